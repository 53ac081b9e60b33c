//! Base permutations, the load that they make, and a search for even ones.
//!
//! The load of a distance `d` is what the member `d` after a failed one has to read and write while the
//! strips of the failed one are made again, over all turns of all base permutations. The search swaps cells
//! as long as that makes the loads more even. It is run once, when an array is made: the result is stored.

use crate::shape::{LayoutError, Shape};

/// The search adds base permutations until a distance has this mean load at least: one more or less is then
/// 2.5 %.
const MEAN_LOAD: i64 = 40;
/// Most base permutations.
const MOST_BASES: usize = 64;
/// A load is even if no distance has more above the mean than this share.
const EVEN: f64 = 0.03;
/// Swaps that are tried for each cell before a base permutation is added.
const TRIES: usize = 400;
/// Most times that this does not keep failure domains apart.
const MOST_FAILED: usize = 4;
/// The cost of a strip too many in a failure domain, beside squares of loads.
const EXCESS: i64 = 1 << 40;

/// One base permutation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cells {
    /// By cell.
    members: Vec<usize>,
    /// By member.
    cells: Vec<usize>,
}

impl Cells {
    /// The permutation that names these members, if it fits the shape.
    pub(crate) fn new(shape: &Shape, members: &[u8]) -> Result<Self, String> {
        if members.len() != shape.members {
            return Err(format!("it has {} cells for {} members", members.len(), shape.members));
        }
        let mut cells = vec![usize::MAX; shape.members];
        for (cell, member) in members.iter().enumerate() {
            match cells.get_mut(usize::from(*member)) {
                Some(free @ &mut usize::MAX) => *free = cell,
                _ => return Err(format!("member {member} has no cell, or more than one")),
            }
        }
        let new = Self { members: members.iter().map(|member| usize::from(*member)).collect(), cells };
        match (0..shape.stripes()).map(|stripe| new.excess(shape, stripe)).sum::<i64>() {
            0 => Ok(new),
            excess => Err(format!("{excess} strips too many are in one failure domain with others")),
        }
    }

    /// The members by cell, as formats store them.
    pub(crate) fn members(&self) -> Vec<u8> {
        self.members.iter().map(|member| u8::try_from(*member).expect("there are at most 256")).collect()
    }

    pub(crate) fn member(&self, cell: usize) -> usize {
        self.members[cell]
    }

    pub(crate) fn cell(&self, member: usize) -> usize {
        self.cells[member]
    }

    fn swap(&mut self, one: usize, other: usize) {
        self.members.swap(one, other);
        for cell in [one, other] {
            self.cells[self.members[cell]] = cell;
        }
    }

    /// The cells of a stripe of a band.
    fn stripe<'a>(&'a self, shape: &'a Shape, stripe: usize) -> impl Iterator<Item = usize> + Clone + 'a {
        (0..shape.strips).map(move |strip| (stripe * shape.strips + strip) % shape.used())
    }

    /// The number of strips of a stripe above the most that their failure domains may have.
    fn excess(&self, shape: &Shape, stripe: usize) -> i64 {
        if shape.domains == shape.members {
            return 0;
        }
        let mut counts = vec![0; shape.domains];
        self.stripe(shape, stripe).for_each(|cell| counts[shape.domain(self.members[cell])] += 1);
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

    /// Adds all that the base permutation with a number makes.
    pub(crate) fn count(&mut self, number: usize, base: &Cells) {
        (0..self.shape.stripes()).for_each(|stripe| self.stripe(base, stripe, 1));
        (0..self.shape.used()).for_each(|cell| self.spare((number, base), cell, 1));
    }

    /// Adds `count` loads from a failed member to another.
    fn add(&mut self, failed: usize, other: usize, count: i64) {
        let load = &mut self.loads[(other + self.shape.members - failed) % self.shape.members];
        self.squares += (2 * *load + count) * count;
        *load += count;
    }

    /// Adds the reads that a stripe needs, or takes them away.
    fn stripe(&mut self, base: &Cells, stripe: usize, count: i64) {
        let shape = self.shape;
        for one in base.stripe(&shape, stripe) {
            for other in base.stripe(&shape, stripe).filter(|other| *other != one) {
                self.add(base.members[one], base.members[other], count);
            }
        }
        self.excess += count * base.excess(&shape, stripe);
    }

    /// Adds the writes of the lost strips of a cell, in all rows, to the spare place that they try first,
    /// or takes them away.
    fn spare(&mut self, (number, base): (usize, &Cells), cell: usize, count: i64) {
        let Shape { spares, .. } = self.shape;
        if spares > 0 {
            let spare = self.shape.used() + first_spare(number, spares);
            let rows = i64::try_from(self.shape.rows()).expect("a band has few rows");
            self.add(base.members[cell], base.members[spare], count * rows);
        }
    }

    /// Adds all that depends on these two cells of a base permutation, or takes it away.
    fn cells(&mut self, (number, base): (usize, &Cells), [one, other]: [usize; 2], count: i64) {
        let (shape, used) = (self.shape, self.shape.used());
        let mut stripes: Vec<usize> = Vec::new();
        for (cell, counted) in [(one, None), (other, Some(one))] {
            if cell >= used || Some(cell) == counted {
                continue;
            }
            for row in 0..shape.rows() {
                let stripe = (row * used + cell) / shape.strips;
                let others = base.stripe(&shape, stripe);
                for other in others.filter(|other| *other != cell && Some(*other) != counted) {
                    self.add(base.members[cell], base.members[other], count);
                    self.add(base.members[other], base.members[cell], count);
                }
                stripes.push(stripe);
            }
        }
        stripes.sort_unstable();
        stripes.dedup();
        self.excess += count * stripes.into_iter().map(|stripe| base.excess(&shape, stripe)).sum::<i64>();
        let is_moved = |cell: usize| cell == one || cell == other;
        let is_all = shape.spares > 0 && is_moved(used + first_spare(number, shape.spares));
        let cells = (0..used).filter(|cell| is_all || is_moved(*cell));
        cells.for_each(|cell| self.spare((number, base), cell, count));
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

/// The number of the spare place that lost strips try first, in all rows of a band with the base permutation
/// of this number. In one band it is the same: if a stripe loses a strip in one row and later another in the
/// next, two different members are left for them.
pub(crate) fn first_spare(base: usize, spares: usize) -> usize {
    base % spares
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

    fn shuffle(&mut self, items: &mut [usize]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

/// Searches for base permutations of a shape with an even load, from a seed. Fails if the shape is not
/// possible, or if no permutation was found that keeps failure domains apart.
pub fn search(shape: Shape, seed: u64) -> Result<Vec<Vec<u8>>, LayoutError> {
    shape.check()?;
    let mut random = Random(seed);
    let mut bases: Vec<Cells> = Vec::new();
    let mut loads = Loads::new(shape);
    let mut failed = 0;
    loop {
        let base = shuffled(&shape, &mut random);
        loads.count(bases.len(), &base);
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
    Ok(bases.iter().map(Cells::members).collect())
}

/// A random permutation. Failure domains of several members take turns, in one order: so the cells of a
/// stripe, which follow each other, are in as many domains as possible. Only where a stripe goes on in the
/// next row may the order be broken.
fn shuffled(shape: &Shape, random: &mut Random) -> Cells {
    let mut members: Vec<usize> = (0..shape.members).collect();
    random.shuffle(&mut members);
    if shape.domains < shape.members {
        let mut order: Vec<usize> = (0..shape.domains).collect();
        random.shuffle(&mut order);
        let in_domain = |domain: usize| {
            members.iter().copied().filter(|member| shape.domain(*member) == domain).collect::<Vec<_>>()
        };
        let of_domains: Vec<Vec<usize>> = order.into_iter().map(in_domain).collect();
        let rounds = 0..shape.members / shape.domains;
        members = rounds.flat_map(|round| of_domains.iter().map(move |members| members[round])).collect();
    }
    let mut base = Cells { cells: vec![0; members.len()], members };
    for (cell, member) in base.members.iter().enumerate() {
        base.cells[*member] = cell;
    }
    base
}

/// Swaps cells as long as that lowers the cost, until the loads are even or nothing helps any more.
fn improve(bases: &mut [Cells], loads: &mut Loads, random: &mut Random) {
    let members = loads.shape.members;
    for _ in 0..TRIES {
        if loads.excess == 0 && loads.imbalance() <= EVEN {
            return;
        }
        for _ in 0..members {
            let number = random.below(bases.len());
            let cells = [random.below(members), random.below(members)];
            let (before, base) = (loads.cost(), &mut bases[number]);
            exchange((number, base), cells, loads);
            if loads.cost() > before {
                exchange((number, base), cells, loads);
                assert_eq!(loads.cost(), before, "a swap is its own inverse");
            }
        }
    }
}

fn exchange((number, base): (usize, &mut Cells), cells: [usize; 2], loads: &mut Loads) {
    loads.cells((number, base), cells, -1);
    base.swap(cells[0], cells[1]);
    loads.cells((number, base), cells, 1);
}
