//! Tests of parity bytes of fixed stripes, computed elsewhere with plain field arithmetic: the format must
//! not change.
//!
//! Byte i of data strip j is (167 j + 13 i + j i^2 + 5) mod 256, 32 bytes to a strip. Parity strip r is the
//! sum over j of c(r, j) times data strip j, modulo 0x11d. For 4+2 and 8+3, c(r, j) = (2^r)^j. For 10+4, the
//! matrix is C(r, j) = 1 / (r + (4 + j)), its columns divided by row 0 and then its rows by column 0. For 5+8
//! it is the same of 1 / (r + (8 + j)).

use crate::stripe::{encode, shared};
use penstock_raid::{Code, Kernel};

const STRIP_BYTES: usize = 32;

const PARITY_4_2: [&str; 2] = [
    "00c08040300010a0200020003080f020400040c090807020e0c020001000d020",
    "92be427ea8312543241cd9653aee3a08bfb39ce95128e8bd9a9f404fbe8d39eb",
];

const PARITY_8_3: [&str; 3] = [
    "9080d0805000d0c0b00030003000d0c0f0007080b0007040d08010009000b0c0",
    "3ce97a675606439759aa0eca32340a774a9ee4e10323e74e5ca01ecbc463106d",
    "6f641d7d813cd3e95941fdc801c44462671297609dcf9ccd8e1a47cc965c5b91",
];

const PARITY_10_4: [&str; 4] = [
    "4928857009400d1899080520f950bd5849c8057089600d18f9a8458059105d58",
    "6711af5f5ff50b881018e8c7154fa031e8d0a9613765275a778fe6046ce3fed7",
    "c95e6b11a7dd0e40851618762fb3f23d1708e3ce96a0e65690350244383b8c60",
    "33750653a5c8ce2b33a5fe12deb36a19045c6574ae76d53986614560da0917b4",
];

const PARITY_5_8: [&str; 8] = [
    "a1724bac25466f60295a93144d6e97c83102dbfc75163f30396aa3645d3ee718",
    "002b051cb2e055e4bc29841200d359b546d90c4493d8b60e727baa7ba4642fdd",
    "4745de0ed240cfbc0d2ce9727f151070b8727486f8f944512034eafca6516af7",
    "4ae500dce144f782de9fe55a3077c8a75e38958cfd4a0aeda0546f70fc0176bb",
    "2b7c275807d07cdf1e4278227ebe7ec07c530e7d2be3d285f9d6e4b56435e6cf",
    "833d78a785c033110a9370888b79bfbfeb793081f2c66c00089b453e56c1bc22",
    "52429736367069bf2be5327e3e41e9817f681c1a33ca1f19af90401f242bb9fe",
    "9d2d18bc9364b40045805d219864601e7d376ff1d8be0af97964b7f879b9336f",
];

fn golden_data(k: usize) -> Vec<Vec<u8>> {
    let byte = |j: usize, i: usize| (167 * j + 13 * i + j * i * i + 5) as u8;
    (0..k).map(|j| (0..STRIP_BYTES).map(|i| byte(j, i)).collect()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check(k: usize, parity_hex: &[&str]) {
    for kernel in Kernel::available() {
        let code = Code::new(k, parity_hex.len()).unwrap().with_kernel(kernel).unwrap();
        let data = golden_data(k);
        let parity = encode(&code, &data);
        let made: Vec<String> = parity.iter().map(|strip| hex(strip)).collect();
        assert_eq!(made, parity_hex, "{k}+{} on {}", parity_hex.len(), kernel.name());
        assert!(code.verify(&shared(&data), &shared(&parity)));
    }
}

#[test]
fn parity_of_4_and_2() {
    check(4, &PARITY_4_2);
}

#[test]
fn parity_of_8_and_3() {
    check(8, &PARITY_8_3);
}

#[test]
fn parity_of_10_and_4() {
    check(10, &PARITY_10_4);
}

#[test]
fn parity_of_5_and_8() {
    check(5, &PARITY_5_8);
}
