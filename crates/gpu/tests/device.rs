//! Tests that the kernels on a GPU make the processor's bytes. Prints SKIPPED if there is no driver or no
//! GPU.
#![allow(clippy::unwrap_used)]

use penstock_base::crc32c_blocks;
use penstock_gpu::{DeviceMemory, Gpu, GpuCode, GpuError, Stripes, checksums};
use penstock_raid::Code;
use std::io::Write;

/// Opens the first GPU, or prints that `test` was skipped.
fn gpu(test: &str) -> Option<Gpu> {
    match Gpu::open(0) {
        Ok(gpu) => Some(gpu),
        Err(error @ (GpuError::NoDriver(_) | GpuError::NoDevice { .. })) => {
            std::io::stderr().write_all(format!("SKIPPED {test}: {error}\n").as_bytes()).unwrap();
            None
        }
        Err(error) => panic!("there is a GPU, and {error}"),
    }
}

fn bytes(count: usize) -> Vec<u8> {
    let word =
        |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes();
    (0..count.div_ceil(8)).flat_map(word).take(count).collect()
}

/// Stripes with pseudo-random data and the processor's parity.
fn stripes(code: &Code, count: usize, strip_bytes: usize) -> Vec<u8> {
    let strips = code.k() + code.m();
    let mut all = bytes(count * strips * strip_bytes);
    for stripe in all.chunks_exact_mut(strips * strip_bytes) {
        let (data, parity) = stripe.split_at_mut(code.k() * strip_bytes);
        let data: Vec<&[u8]> = data.chunks_exact(strip_bytes).collect();
        code.encode(&data, &mut parity.chunks_exact_mut(strip_bytes).collect::<Vec<_>>());
    }
    all
}

const GEOMETRIES: [(usize, usize); 9] =
    [(1, 2), (4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 3), (10, 4), (5, 8)];

#[test]
fn encode_decode_and_verify_agree_with_the_processor() {
    let Some(gpu) = gpu("encode_decode_and_verify_agree_with_the_processor") else { return };
    for (k, m) in GEOMETRIES {
        for strip_bytes in [16, 4096, 65_536 + 48] {
            let code = Code::new(k, m).unwrap();
            let expected = stripes(&code, 3, strip_bytes);
            let mut memory = gpu.zeroed(expected.len()).unwrap();
            memory.write(0, &expected).unwrap();
            let on_gpu = GpuCode::new(&gpu, &code);
            for lost in [(k..k + m).collect::<Vec<_>>(), (0..m.min(k)).collect(), vec![k / 2]] {
                for stripe in 0..3 {
                    for position in &lost {
                        let offset = (stripe * (k + m) + position) * strip_bytes;
                        memory.write(offset, &vec![0xa5; strip_bytes]).unwrap();
                    }
                }
                let all = Stripes::new(&memory, k + m, strip_bytes).unwrap();
                match lost[0] == k {
                    true => on_gpu.encode(&all).unwrap().run().unwrap(),
                    false => on_gpu.decode(&all, &lost).unwrap().run().unwrap(),
                }
                gpu.wait().unwrap();
                let mut made = vec![0; expected.len()];
                memory.read(0, &mut made).unwrap();
                assert!(made == expected, "{k}+{m} without {lost:?}, {strip_bytes} bytes");
            }
            let verification_of = |memory: &DeviceMemory| {
                let all = Stripes::new(memory, k + m, strip_bytes).unwrap();
                let verification = on_gpu.verify(&all).unwrap();
                verification.run().unwrap();
                verification.disagreements().unwrap()
            };
            assert_eq!(verification_of(&memory), [0, 0, 0], "{k}+{m}");
            let last = (2 * (k + m) - 1) * strip_bytes + strip_bytes - 1;
            memory.write(last, &[!expected[last]]).unwrap();
            assert_eq!(verification_of(&memory), [0, 1 << (m - 1), 0], "{k}+{m}: the last byte of stripe 1");
        }
    }
}

#[test]
fn stripes_of_another_width_are_refused() {
    let Some(gpu) = gpu("stripes_of_another_width_are_refused") else { return };
    let on_gpu = GpuCode::new(&gpu, &Code::new(4, 2).unwrap());
    let memory = gpu.zeroed(7 * 4096).unwrap();
    for strips in [5, 7] {
        let stripes = Stripes::new(&memory, strips, 4096).unwrap();
        assert!(matches!(on_gpu.encode(&stripes), Err(GpuError::Shape(_))), "{strips} strips");
        assert!(matches!(on_gpu.decode(&stripes, &[0, 1]), Err(GpuError::Shape(_))), "{strips} strips");
        assert!(matches!(on_gpu.verify(&stripes), Err(GpuError::Shape(_))), "{strips} strips");
    }
    assert!(matches!(Stripes::new(&memory, 4, 100), Err(GpuError::Shape(_))), "not whole columns");
}

#[test]
fn checksums_agree_with_the_processor() {
    let Some(gpu) = gpu("checksums_agree_with_the_processor") else { return };
    for blocks in [1, 7, 32] {
        let all = bytes(5 * 3 * blocks * 4096);
        let mut memory = gpu.zeroed(all.len()).unwrap();
        memory.write(0, &all).unwrap();
        let stripes = Stripes::new(&memory, 5, blocks * 4096).unwrap();
        let checks = checksums(&stripes).unwrap();
        checks.run().unwrap();
        assert_eq!(checks.crcs().unwrap(), crc32c_blocks(&all), "strips of {blocks} blocks");
    }
}

#[test]
fn without_a_gpu_there_is_an_error_and_no_panic() {
    match Gpu::open(usize::MAX >> 40) {
        Err(error @ GpuError::NoDriver(_)) => {
            assert!(error.to_string().starts_with("no CUDA driver: "), "{error}")
        }
        Err(GpuError::NoDevice { wanted, found }) => assert!(wanted > found),
        other => panic!("a GPU of this number: {other:?}"),
    }
}
