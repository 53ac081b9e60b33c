use super::homes::Homes;
use super::*;
use crate::search;
use std::collections::BTreeSet;

/// Shapes that people use: drives of a server, of a shelf, of several shelves.
const SHAPES: [[usize; 5]; 23] = [
    [4, 3, 1, 1, 4],
    [7, 6, 2, 1, 7],
    [8, 2, 1, 1, 8],
    [8, 6, 2, 1, 8],
    [11, 10, 2, 1, 11],
    [12, 6, 2, 1, 12],
    [12, 6, 2, 1, 6],
    [12, 6, 2, 0, 3],
    [12, 8, 2, 0, 4],
    [24, 4, 2, 2, 2],
    [24, 8, 2, 4, 4],
    [24, 3, 2, 4, 2],
    [23, 10, 2, 1, 23],
    [24, 6, 2, 1, 24],
    [24, 10, 2, 2, 24],
    [24, 10, 2, 2, 12],
    [36, 11, 3, 2, 6],
    [48, 10, 2, 2, 8],
    [60, 10, 2, 2, 60],
    [60, 10, 2, 5, 5],
    [90, 19, 3, 3, 90],
    [106, 10, 2, 4, 106],
    [256, 10, 2, 8, 256],
];

fn shape([members, strips, redundancy, spares, domains]: [usize; 5]) -> Shape {
    Shape { members, strips, redundancy, spares, domains }
}

fn layout(of: [usize; 5]) -> Declustered {
    let shape = shape(of);
    let bases = search(shape, 1).unwrap_or_else(|error| panic!("{shape:?}: {error}"));
    Declustered::new(shape, &bases).unwrap()
}

#[test]
fn every_place_has_one_strip_or_is_spare() {
    for of in SHAPES {
        let layout = layout(of);
        let (shape, rows) = (*layout.shape(), layout.period().min(4000 / of[0] as u64));
        let mut seen = BTreeSet::new();
        for row in 0..rows - rows % shape.rows() as u64 {
            for member in 0..shape.members {
                let place = Place { member, row };
                match layout.content(place) {
                    Content::Strip { stripe, strip } => {
                        assert_eq!(layout.place(stripe, strip), place, "{of:?}");
                        assert!(seen.insert((stripe, strip)));
                    }
                    Content::Spare(number) => assert!(number < shape.spares),
                }
            }
        }
        assert_eq!(seen.len() as u64, layout.stripes(rows) * shape.strips as u64, "{of:?}");
    }
}

#[test]
fn no_stripe_has_two_strips_on_a_member_or_too_many_in_a_domain() {
    for of in SHAPES {
        let layout = layout(of);
        let shape = layout.shape();
        for stripe in 0..layout.stripes(layout.period()).min(20_000) {
            let members: BTreeSet<_> =
                (0..shape.strips).map(|strip| layout.place(stripe, strip).member).collect();
            assert_eq!(members.len(), shape.strips, "{of:?}");
            let mut domains = vec![0; shape.domains];
            members.iter().for_each(|member| domains[shape.domain(*member)] += 1);
            assert!(domains.iter().all(|strips| *strips <= shape.most_in_domain()), "{of:?}: {domains:?}");
        }
    }
}

/// The reads and writes of each member when `failed` has failed, over a period, counted strip by strip.
fn loads(layout: &Declustered, failed: usize) -> Vec<u64> {
    let shape = layout.shape();
    let mut loads = vec![0; shape.members];
    for stripe in 0..layout.stripes(layout.period()) {
        let places: Vec<Place> = (0..shape.strips).map(|strip| layout.place(stripe, strip)).collect();
        let Some(lost) = places.iter().position(|place| place.member == failed) else { continue };
        places.iter().filter(|place| place.member != failed).for_each(|place| loads[place.member] += 1);
        if let Some(home) = Homes::new(layout, layout.band_of(stripe), &[failed]).of(stripe, lost) {
            loads[home.member] += 1;
        }
    }
    loads
}

/// Every single failure of the shapes without failure domains: the same for each member, for they all turn
/// through the same cells.
#[test]
fn the_load_of_a_failure_is_even() {
    for of in SHAPES.into_iter().filter(|of| of[0] == of[4]) {
        let layout = layout(of);
        // As far as the time of a test goes: all members turn through the same cells.
        let failures = if of[0] <= 24 { of[0] } else { 1 };
        for failed in 0..failures {
            let mut loads = loads(&layout, failed);
            assert_eq!(loads.remove(failed), 0);
            let mean = loads.iter().sum::<u64>() as f64 / loads.len() as f64;
            let most = *loads.iter().max().unwrap() as f64;
            assert!(most <= 1.03 * mean, "{of:?}, {failed}: {most} beside {mean}");
            assert!((most / mean - 1.0 - layout.imbalance()).abs() < 1e-9, "{of:?}: what the search counts");
        }
    }
}

#[test]
fn members_have_all_cells_equally_often() {
    for of in SHAPES {
        let layout = layout(of);
        let shape = layout.shape();
        let bands = layout.period() / shape.rows() as u64;
        for cell in 0..shape.members {
            let mut counts = vec![0; shape.members];
            (0..bands).for_each(|band| counts[layout.place_in(band, 0, cell).member] += 1);
            assert!(counts.iter().all(|count| *count == layout.bases.len()), "{of:?}, {cell}");
        }
    }
}

/// Checks the homes of a band after these failures. Returns how many strips have none.
fn check_homes(layout: &Declustered, band: u64, failed: &[usize]) -> usize {
    let (shape, homes) = (layout.shape(), Homes::new(layout, band, failed));
    let (mut taken, mut without) = (BTreeSet::new(), 0);
    let first = band * shape.stripes() as u64;
    for stripe in first..first + shape.stripes() as u64 {
        let mut members = Vec::new();
        for strip in 0..shape.strips {
            let own = layout.place(stripe, strip);
            let Some(home) = homes.of(stripe, strip) else {
                assert!(failed.contains(&own.member));
                without += 1;
                continue;
            };
            assert!(!failed.contains(&home.member) && taken.insert(home), "{home:?} after {failed:?}");
            assert_eq!(home == own, !failed.contains(&own.member));
            if home != own {
                assert_eq!(home.row, own.row, "it moves within its row");
                assert!(matches!(layout.content(home), Content::Spare(_)), "{home:?} is not spare");
            }
            members.push(home.member);
        }
        let distinct: BTreeSet<_> = members.iter().collect();
        assert_eq!(distinct.len(), members.len(), "two strips on one member after {failed:?}");
        let in_domain = |domain| members.iter().filter(|member| shape.domain(**member) == domain).count();
        assert!((0..shape.domains).all(|domain| in_domain(domain) <= shape.most_in_domain()));
    }
    without
}

#[test]
fn lost_strips_move_to_spare_places() {
    for of in SHAPES {
        let layout = layout(of);
        let shape = *layout.shape();
        let bands = if of[0] <= 24 { 3 } else { 1 };
        for band in 0..bands {
            for one in (0..shape.members).step_by(shape.members.div_ceil(12)) {
                let without = check_homes(&layout, band, &[one]);
                let is_free = shape.domains == shape.members && shape.spares > 0;
                assert!(without == 0 || !is_free, "{of:?}: {without} strips without a place");
                for other in (0..shape.members).step_by(shape.members.div_ceil(4)) {
                    check_homes(&layout, band, &[one, other]);
                    check_homes(&layout, band, &[one, other, (one + other) % shape.members]);
                }
            }
        }
    }
}

#[test]
fn what_an_earlier_failure_moved_stays() {
    let layout = layout([24, 10, 2, 2, 24]);
    let shape = *layout.shape();
    for (one, other) in [(0, 1), (5, 20), (23, 7)] {
        for band in 0..40 {
            let (before, after) =
                (Homes::new(&layout, band, &[one]), Homes::new(&layout, band, &[one, other]));
            let first = band * shape.stripes() as u64;
            for stripe in first..first + shape.stripes() as u64 {
                for strip in 0..shape.strips {
                    let home = before.of(stripe, strip).unwrap();
                    assert!(home.member == other || after.of(stripe, strip) == Some(home));
                }
            }
        }
    }
}

#[test]
fn bases_that_do_not_fit_are_refused() {
    let of = shape([6, 4, 2, 1, 3]);
    let bases = search(of, 7).unwrap();
    let refused = |bases: &[Vec<u8>]| Declustered::new(of, bases).unwrap_err().to_string();
    assert!(refused(&[]).contains("at least one"));
    assert!(refused(&[vec![0, 1, 2, 3, 4]]).contains("5 cells"));
    assert!(refused(&[bases[0].clone(), vec![0, 1, 2, 3, 4, 4]]).starts_with("base permutation 1: member 4"));
    assert!(refused(&[vec![0, 1, 2, 3, 4, 9]]).contains("member 9"));
    let narrow = shape([6, 4, 2, 0, 2]);
    let wrong = Declustered::new(narrow, &[vec![0, 2, 4, 1, 3, 5]]).unwrap_err().to_string();
    assert!(wrong.contains("strips too many"), "{wrong}");
}

/// The map is a format: an array that was made with these parameters is read by every later release.
#[test]
fn the_map_does_not_change() {
    let bases = vec![vec![3, 0, 4, 1, 2], vec![1, 4, 2, 0, 3]];
    let layout = Declustered::new(shape([5, 3, 1, 1, 5]), &bases).unwrap();
    let places = |stripe| -> Vec<(usize, u64)> {
        (0..3).map(|strip| layout.place(stripe, strip)).map(|place| (place.member, place.row)).collect()
    };
    assert_eq!(places(0), [(3, 0), (0, 0), (4, 0)]);
    assert_eq!(places(1), [(1, 0), (3, 1), (0, 1)]);
    assert_eq!(places(4), [(1, 3), (4, 3), (2, 3)]);
    assert_eq!(places(8), [(4, 6), (1, 6), (0, 6)]);
    assert_eq!(layout.content(Place { member: 2, row: 0 }), Content::Spare(0));
    assert_eq!(layout.bases(), bases);
}

#[test]
fn a_layout_without_load_has_one_base() {
    assert_eq!(search(shape([6, 1, 0, 0, 6]), 1).unwrap().len(), 1);
}

#[test]
fn a_shape_without_a_layout_is_refused() {
    // Each stripe fills all domains, but 58 cells do not divide into them.
    let refused = search(shape([60, 10, 2, 2, 5]), 1).unwrap_err().to_string();
    assert!(refused.contains("10 strips in 5 domains with at most 2 in each"), "{refused}");
    assert!(search(shape([6, 6, 2, 1, 6]), 1).is_err());
}

/// Regression: with another first spare place in each row, a stripe that lost strips in two rows found the
/// second place on the member of the first one.
#[test]
fn as_many_members_as_spare_places_may_fail_in_turn() {
    for of in SHAPES.into_iter().filter(|of| of[4] == of[0] && of[3] > 1) {
        let layout = layout(of);
        for band in 0..layout.period().min(100) {
            assert_eq!(check_homes(&layout, band, &[1, 5]), 0, "{of:?}, band {band}");
        }
    }
}

/// Strips move and come back in any order, members fail and return. At no time has a failure domain more
/// strips of a stripe than the code can lose.
#[test]
fn strips_that_move_and_come_back_keep_domains_apart() {
    let mut state = 7u64;
    let mut below = |bound: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
        (state >> 33) as usize % bound
    };
    for of in SHAPES.into_iter().filter(|of| of[4] < of[0] && of[3] > 0) {
        let layout = layout(of);
        let shape = *layout.shape();
        let mut moved = 0;
        for stripe in 0..layout.stripes(layout.period()).min(200) {
            let mut spares: Vec<Option<usize>> = vec![None; shape.strips];
            let mut failed: BTreeSet<usize> = BTreeSet::new();
            for _ in 0..60 {
                let member = below(shape.members);
                if !failed.remove(&member) && failed.len() < 3 {
                    failed.insert(member);
                }
                let strip = below(shape.strips);
                let place = |strip: usize, spare: Option<usize>| match spare {
                    Some(spare) => layout.spare_place(stripe, strip, spare),
                    None => layout.place(stripe, strip),
                };
                if failed.contains(&place(strip, spares[strip]).member) {
                    let taken = |spare| {
                        (0..shape.strips).any(|at| {
                            spares[at].is_some_and(|other| {
                                place(at, Some(other)) == layout.spare_place(stripe, strip, spare)
                            })
                        })
                    };
                    let is_lost = |member| failed.contains(&member);
                    let found = layout.find_spare(stripe, strip, |at| spares[at], taken, is_lost);
                    moved += usize::from(found.is_some());
                    spares[strip] = found.or(spares[strip]);
                } else if spares[strip].is_some() && !failed.contains(&layout.place(stripe, strip).member) {
                    spares[strip] = None;
                }
                let mut domains = vec![0; shape.domains];
                (0..shape.strips).for_each(|at| domains[shape.domain(place(at, spares[at]).member)] += 1);
                assert!(domains.iter().all(|count| *count <= shape.most_in_domain()), "{of:?}: {domains:?}");
            }
        }
        assert!(moved > 0, "{of:?}: nothing moved");
    }
}
