//! Base permutations, the load that they make, and a search for even ones.
//!
//! The load of a distance `d` is what the member `d` after a failed one has to read and write while the
//! strips of the failed one are made again, over all turns of all base permutations. The search swaps columns
//! as long as that makes the loads more even. It is run once, when an array is made: the result is stored.

use crate::shape::{LayoutError, Shape};

/// The search adds base permutations until a distance has this mean load at least: one more or less is then
/// 2.5 %.
const MEAN_LOAD: i64 = 40;
/// Most base permutations.
const MOST_BASES: usize = 64;
/// A load is even if no distance has more above the mean than this share.
const EVEN: f64 = 0.03;
/// Swaps that are tried for each column before a base permutation is added.
const TRIES: usize = 400;
/// Most times that this does not keep failure domains apart.
const MOST_FAILED: usize = 4;
/// The cost of a strip too many in a failure domain, beside squares of loads.
const EXCESS: i64 = 1 << 40;

/// One base permutation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Columns {
    /// By column.
    members: Vec<usize>,
    /// By member.
    columns: Vec<usize>,
}

impl Columns {
    /// The permutation that names these members, if it fits the shape.
    pub(crate) fn new(shape: &Shape, members: &[u8]) -> Result<Self, String> {
        if members.len() != shape.members {
            return Err(format!("it has {} columns for {} members", members.len(), shape.members));
        }
        let mut columns = vec![usize::MAX; shape.members];
        for (column, member) in members.iter().enumerate() {
            match columns.get_mut(usize::from(*member)) {
                Some(free @ &mut usize::MAX) => *free = column,
                _ => return Err(format!("member {member} has no column, or more than one")),
            }
        }
        let new = Self { members: members.iter().map(|member| usize::from(*member)).collect(), columns };
        match (0..shape.stripes()).map(|stripe| new.excess(shape, stripe)).sum::<i64>() {
            0 => Ok(new),
            excess => Err(format!("{excess} strips too many are in one failure domain with others")),
        }
    }

    /// The members by column, as formats store them.
    pub(crate) fn members(&self) -> Vec<u8> {
        self.members.iter().map(|member| u8::try_from(*member).expect("there are at most 256")).collect()
    }

    pub(crate) fn member(&self, column: usize) -> usize {
        self.members[column]
    }

    pub(crate) fn column(&self, member: usize) -> usize {
        self.columns[member]
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.members.swap(one, other);
        for column in [one, other] {
            self.columns[self.members[column]] = column;
        }
    }

    /// The columns of a stripe of a slice.
    fn stripe<'a>(&'a self, shape: &'a Shape, stripe: usize) -> impl Iterator<Item = usize> + Clone + 'a {
        (0..shape.strips).map(move |strip| (stripe * shape.strips + strip) % shape.used())
    }

    /// The number of strips of a stripe above the most that their failure domains may have.
    fn excess(&self, shape: &Shape, stripe: usize) -> i64 {
        if shape.domains == shape.members {
            return 0;
        }
        let mut counts = vec![0; shape.domains];
        self.stripe(shape, stripe).for_each(|column| counts[shape.domain(self.members[column])] += 1);
        let most = shape.most_in_domain();
        let excess: usize = counts.iter().map(|count: &usize| count.saturating_sub(most)).sum();
        i64::try_from(excess).expect("a stripe has few strips")
    }
}

/// The load of each distance.
#[derive(Clone, Debug)]
pub(crate) struct Loads {
    shape: Shape,
    /// By distance; that of 0 is not used.
    loads: Vec<i64>,
    squares: i64,
    excess: i64,
}

impl Loads {
    pub(crate) fn new(shape: Shape) -> Self {
        Self { shape, loads: vec![0; shape.members], squares: 0, excess: 0 }
    }

    /// Adds all that a base permutation makes.
    pub(crate) fn count(&mut self, base: &Columns) {
        (0..self.shape.stripes()).for_each(|stripe| self.stripe(base, stripe, 1));
        let (rows, used) = (self.shape.rows(), self.shape.used());
        (0..rows).for_each(|row| (0..used).for_each(|column| self.spare(base, row, column, 1)));
    }

    /// Adds `count` loads from a failed member to another.
    fn add(&mut self, failed: usize, other: usize, count: i64) {
        let load = &mut self.loads[(other + self.shape.members - failed) % self.shape.members];
        self.squares += (2 * *load + count) * count;
        *load += count;
    }

    /// Adds the reads that a stripe needs, or takes them away.
    fn stripe(&mut self, base: &Columns, stripe: usize, count: i64) {
        let shape = self.shape;
        for one in base.stripe(&shape, stripe) {
            for other in base.stripe(&shape, stripe).filter(|other| *other != one) {
                self.add(base.members[one], base.members[other], count);
            }
        }
        self.excess += count * base.excess(&shape, stripe);
    }

    /// Adds the write of a lost strip to the first spare place of its row, or takes it away.
    fn spare(&mut self, base: &Columns, row: usize, column: usize, count: i64) {
        let Shape { spares, .. } = self.shape;
        if spares > 0 {
            let spare = self.shape.used() + first_spare(row, spares);
            self.add(base.members[column], base.members[spare], count);
        }
    }

    /// Adds all that depends on these two columns of a base permutation, or takes it away.
    fn columns(&mut self, base: &Columns, [one, other]: [usize; 2], count: i64) {
        let (shape, used) = (self.shape, self.shape.used());
        let mut stripes: Vec<usize> = Vec::new();
        for (column, counted) in [(one, None), (other, Some(one))] {
            if column >= used || Some(column) == counted {
                continue;
            }
            for row in 0..shape.rows() {
                let stripe = (row * used + column) / shape.strips;
                let others = base.stripe(&shape, stripe);
                for other in others.filter(|other| *other != column && Some(*other) != counted) {
                    self.add(base.members[column], base.members[other], count);
                    self.add(base.members[other], base.members[column], count);
                }
                stripes.push(stripe);
            }
        }
        stripes.sort_unstable();
        stripes.dedup();
        self.excess += count * stripes.into_iter().map(|stripe| base.excess(&shape, stripe)).sum::<i64>();
        for row in 0..shape.rows() {
            let is_moved = |column: usize| column == one || column == other;
            let is_all = shape.spares > 0 && is_moved(used + first_spare(row, shape.spares));
            let columns = (0..used).filter(|column| is_all || is_moved(*column));
            columns.for_each(|column| self.spare(base, row, column, count));
        }
    }

    /// The mean of all distances.
    fn mean(&self) -> i64 {
        let distances = i64::try_from(self.shape.members - 1).expect("there are at most 256 members");
        self.loads.iter().sum::<i64>() / distances.max(1)
    }

    /// The less of it, the better.
    fn cost(&self) -> i64 {
        self.squares + EXCESS * self.excess
    }

    /// See [`crate::Declustered::imbalance`].
    pub(crate) fn imbalance(&self) -> f64 {
        let Shape { members, domains, .. } = self.shape;
        let in_domain = |distance: &usize| domains < members && distance.is_multiple_of(domains);
        let (inside, outside): (Vec<usize>, Vec<usize>) = (1..members).partition(in_domain);
        let over = |distances: &[usize]| {
            let loads = distances.iter().map(|distance| self.loads[*distance] as f64);
            let mean = loads.clone().sum::<f64>() / distances.len().max(1) as f64;
            let most = loads.fold(0.0, f64::max);
            if mean > 0.0 { most / mean - 1.0 } else { 0.0 }
        };
        over(&inside).max(over(&outside))
    }
}

/// The number of the spare place that the first lost strip of a row moves to.
pub(crate) fn first_spare(row: usize, spares: usize) -> usize {
    row % spares
}

/// Numbers from a seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let wide = u128::from(mixed ^ (mixed >> 31)) * limit as u128;
        usize::try_from(wide >> 64).expect("it is below the limit")
    }
}

/// Searches for base permutations of a shape with an even load, from a seed. Fails if the shape is not
/// possible, or if no permutation was found that keeps failure domains apart.
pub fn search(shape: Shape, seed: u64) -> Result<Vec<Vec<u8>>, LayoutError> {
    shape.check()?;
    let mut random = Random(seed);
    let mut bases: Vec<Columns> = Vec::new();
    let mut loads = Loads::new(shape);
    let mut failed = 0;
    loop {
        let base = shuffled(&shape, &mut random);
        loads.count(&base);
        bases.push(base);
        let is_loaded = loads.squares > 0;
        if is_loaded && loads.mean() < MEAN_LOAD && bases.len() < MOST_BASES {
            continue;
        }
        improve(&mut bases, &mut loads, &mut random);
        match loads.excess {
            0 if loads.imbalance() <= EVEN || bases.len() >= MOST_BASES => break,
            0 => {}
            _ => failed += 1,
        }
        if failed == MOST_FAILED || bases.len() >= MOST_BASES {
            return Err(LayoutError::Shape(format!(
                "no layout was found that places {} strips in {} domains with at most {} in each",
                shape.strips, shape.domains, shape.redundancy
            )));
        }
    }
    Ok(bases.iter().map(Columns::members).collect())
}

/// A random permutation.
fn shuffled(shape: &Shape, random: &mut Random) -> Columns {
    let members: Vec<usize> = (0..shape.members).collect();
    let mut base = Columns { columns: members.clone(), members };
    for column in (1..shape.members).rev() {
        base.swap(column, random.below(column + 1));
    }
    base
}

/// Swaps columns as long as that lowers the cost, until the loads are even or nothing helps any more.
fn improve(bases: &mut [Columns], loads: &mut Loads, random: &mut Random) {
    let members = loads.shape.members;
    for _ in 0..TRIES {
        if loads.excess == 0 && loads.imbalance() <= EVEN {
            return;
        }
        for _ in 0..members {
            let base = random.below(bases.len());
            let columns = [random.below(members), random.below(members)];
            let (before, base) = (loads.cost(), &mut bases[base]);
            exchange(base, columns, loads);
            if loads.cost() > before {
                exchange(base, columns, loads);
                assert_eq!(loads.cost(), before, "a swap is its own inverse");
            }
        }
    }
}

fn exchange(base: &mut Columns, columns: [usize; 2], loads: &mut Loads) {
    loads.columns(base, columns, -1);
    base.swap(columns[0], columns[1]);
    loads.columns(base, columns, 1);
}
