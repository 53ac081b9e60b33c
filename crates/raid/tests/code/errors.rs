//! Tests of the requests that are rejected with an error, its messages, and the misuse that panics.

use penstock_raid::{Code, CodeError, Kernel, MAX_STRIPS};

#[test]
fn geometries_outside_the_proof_are_refused() {
    for (k, m) in [
        (0, 0),
        (0, 2),
        (1, 9),
        (60, 5),
        (56, 9),
        (61, 4),
        (62, 3),
        (64, 1),
        (65, 0),
        (usize::MAX, 1),
        (1, usize::MAX),
    ] {
        assert_eq!(Code::new(k, m).unwrap_err(), CodeError::Geometry { k, m });
    }
    for (k, m) in [(1, 0), (1, 8), (56, 8), (59, 5), (60, 4), (61, 3), (62, 2), (63, 1), (64, 0)] {
        assert!(Code::new(k, m).is_ok(), "{k}+{m}");
    }
    assert_eq!(
        Code::new(61, 4).unwrap_err().to_string(),
        "there is no code 61+4: it needs at least 1 data strip, at most 8 parity strips and at most 64 strips in \
         all"
    );
}

#[test]
fn more_losses_than_parity_are_refused() {
    let code = Code::new(4, 2).unwrap();
    let error = code.plan(&[0, 3, 5]).unwrap_err();
    assert_eq!(error, CodeError::TooManyLost { lost: 3, allowed: 2 });
    assert_eq!(error.to_string(), "3 strips of a stripe are lost, at most 2 can be made again");
    let error = Code::new(MAX_STRIPS, 0).unwrap().plan(&[63]).unwrap_err();
    assert_eq!(error, CodeError::TooManyLost { lost: 1, allowed: 0 });
}

#[test]
fn too_few_available_strips_are_refused() {
    let code = Code::new(4, 2).unwrap();
    let error = code.plan_with(&[0, 1, 5], &[2]).unwrap_err();
    assert_eq!(error, CodeError::TooFewSources { available: 3, required: 4 });
    // A wanted strip is never a source.
    let error = code.plan_with(&[0, 1, 2, 5], &[2]).unwrap_err();
    assert_eq!(error, CodeError::TooFewSources { available: 3, required: 4 });
    assert_eq!(error.to_string(), "3 strips of a stripe can be read besides the wanted ones, 4 are required");
}

#[test]
fn lists_that_are_no_set_of_positions_are_refused() {
    let code = Code::new(4, 2).unwrap();
    let outside = CodeError::NoSuchPosition { position: 6, strips: 6 };
    assert_eq!(code.plan(&[6]).unwrap_err(), outside);
    assert_eq!(code.plan_with(&[0, 1, 2, 3, 6], &[4]).unwrap_err(), outside);
    assert_eq!(code.plan_with(&[0, 1, 2, 3], &[6]).unwrap_err(), outside);
    // A shift by a position of 64 or more would overflow.
    let far = CodeError::NoSuchPosition { position: usize::MAX, strips: 6 };
    assert_eq!(code.plan(&[usize::MAX]).unwrap_err(), far);

    let twice = CodeError::RepeatedPosition { position: 1 };
    assert_eq!(code.plan(&[1, 1]).unwrap_err(), twice);
    assert_eq!(code.plan_with(&[0, 1, 1, 2, 3], &[4]).unwrap_err(), twice);
    assert_eq!(code.plan_with(&[0, 1, 2, 3], &[1, 1]).unwrap_err(), twice);
}

#[test]
fn kernel_that_the_processor_lacks_is_refused() {
    for kernel in [Kernel::Portable, Kernel::Neon, Kernel::Avx2, Kernel::Avx2Gfni, Kernel::Avx512Gfni] {
        let result = Code::new(2, 1).unwrap().with_kernel(kernel);
        if Kernel::available().contains(&kernel) {
            assert_eq!(result.unwrap().kernel(), kernel);
        } else {
            assert_eq!(result.unwrap_err(), CodeError::KernelUnavailable { kernel: kernel.name() });
        }
    }
}

#[test]
#[should_panic(expected = "source strips differ in length")]
fn data_strips_of_different_lengths_are_a_bug() {
    Code::new(2, 1).unwrap().encode(&[&[1, 2], &[3]], &mut [&mut [0, 0]]);
}

#[test]
#[should_panic(expected = "output strips differ in length")]
fn parity_strip_of_another_length_is_a_bug() {
    Code::new(2, 1).unwrap().encode(&[&[1, 2], &[3, 4]], &mut [&mut [0]]);
}

#[test]
#[should_panic(expected = "old and new strip differ in length")]
fn update_of_different_lengths_is_a_bug() {
    Code::new(2, 1).unwrap().update(0, &[1, 2], &[3], &mut [&mut [0, 0]]);
}

#[test]
#[should_panic(expected = "failed: source strips")]
fn missing_data_strip_is_a_bug() {
    Code::new(2, 1).unwrap().encode(&[&[1, 2]], &mut [&mut [0, 0]]);
}

#[test]
#[should_panic(expected = "failed: output strips")]
fn missing_parity_strip_is_a_bug() {
    Code::new(2, 2).unwrap().encode(&[&[1], &[2]], &mut [&mut [0]]);
}

#[test]
#[should_panic(expected = "strips differ in length")]
fn verify_of_different_lengths_is_a_bug() {
    Code::new(2, 1).unwrap().verify(&[&[1, 2], &[3, 4]], &[&[0]]);
}
