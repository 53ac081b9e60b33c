//! Tests of every erasure pattern of small codes, and of samples of the largest ones.

use crate::random::Random;
use crate::stripe::{decode, encode, random_data, subsets};
use penstock_raid::{Code, Kernel, MAX_PARITY, MAX_STRIPS};

/// Checks that `plan(lost)` reads the first k survivors, and makes the lost strips in the order of the list.
fn check_plan(code: &Code, stripe: &[Vec<u8>], lost: &[usize]) {
    let label = format!("{}+{} without {lost:?} on {}", code.k(), code.m(), code.kernel().name());
    let plan = code.plan(lost).unwrap();
    assert_eq!(plan.lost(), lost, "{label}");
    let survivors = (0..stripe.len()).filter(|position| !lost.contains(position));
    assert_eq!(plan.sources(), survivors.take(code.k()).collect::<Vec<_>>(), "{label}");
    for (made, &position) in decode(&plan, stripe).iter().zip(lost) {
        assert_eq!(*made, stripe[position], "{label}: strip {position}");
    }
}

#[test]
fn every_pattern_up_to_10_data_strips() {
    for kernel in Kernel::available() {
        let mut random = Random::new(1);
        for m in 0..=MAX_PARITY {
            for k in 1..=if m <= 4 { 10 } else { 5 } {
                let code = Code::new(k, m).unwrap().with_kernel(kernel).unwrap();
                let mut stripe = random_data(&mut random, k, 70);
                stripe.extend(encode(&code, &stripe));
                for lost in (0..=m).flat_map(|count| subsets(k + m, count)) {
                    check_plan(&code, &stripe, &lost);
                    let reversed: Vec<usize> = lost.iter().rev().copied().collect();
                    check_plan(&code, &stripe, &reversed);
                }
            }
        }
    }
}

#[test]
fn samples_of_the_largest_codes() {
    let mut random = Random::new(2);
    for m in 1..=MAX_PARITY {
        let k = MAX_STRIPS - m;
        let code = Code::new(k, m).unwrap();
        let mut stripe = random_data(&mut random, k, 333);
        stripe.extend(encode(&code, &stripe));
        for _ in 0..500 {
            let mut lost = vec![];
            while lost.len() < m {
                let position = random.below(MAX_STRIPS);
                if !lost.contains(&position) {
                    lost.push(position);
                }
            }
            check_plan(&code, &stripe, &lost);
        }
    }
}

#[test]
fn every_choice_of_available_strips() {
    let mut random = Random::new(3);
    for (k, m) in [(1, 2), (2, 2), (3, 3), (4, 2), (3, 4)] {
        let code = Code::new(k, m).unwrap();
        let mut stripe = random_data(&mut random, k, 65);
        stripe.extend(encode(&code, &stripe));
        let strips = k + m;
        for available in (k..=strips).flat_map(|count| subsets(strips, count)) {
            for wanted in (0..=m).flat_map(|count| subsets(strips, count)) {
                let usable: Vec<usize> = available.iter().copied().filter(|p| !wanted.contains(p)).collect();
                let plan = code.plan_with(&available, &wanted);
                if usable.len() < k {
                    assert!(plan.is_err(), "{k}+{m} from {available:?} makes {wanted:?}");
                    continue;
                }
                let plan = plan.unwrap();
                assert_eq!(plan.sources(), &usable[..k], "{k}+{m} from {available:?} makes {wanted:?}");
                for (made, &position) in decode(&plan, &stripe).iter().zip(&wanted) {
                    assert_eq!(*made, stripe[position], "{k}+{m} from {available:?}: strip {position}");
                }
            }
        }
    }
}

#[test]
fn available_positions_in_any_order_give_the_same_plan() {
    let code = Code::new(4, 2).unwrap();
    let plan = code.plan_with(&[5, 3, 4, 0, 2], &[1]).unwrap();
    assert_eq!(plan.sources(), [0, 2, 3, 4], "data strips first, then the lowest parity strip");
    assert_eq!(plan.lost(), [1]);
}

#[test]
fn mirrors_are_copies_for_every_m() {
    for kernel in Kernel::available() {
        for m in 0..=MAX_PARITY {
            let code = Code::new(1, m).unwrap().with_kernel(kernel).unwrap();
            for strip_bytes in [0, 1, 63, 64, 65, 4097] {
                let data = random_data(&mut Random::new(4), 1, strip_bytes);
                let parity = encode(&code, &data);
                assert_eq!(parity, vec![data[0].clone(); m], "1+{m}, {strip_bytes} bytes, {}", kernel.name());
            }
        }
    }
}
