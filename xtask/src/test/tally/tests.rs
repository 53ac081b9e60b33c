//! Tests of the tally on recorded output of complete, failed and interrupted runs.

use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::{Tally, header, result, without_escapes};

/// Feeds the complete output of a run to a tally. Returns the printed tally and the lines that are shown.
fn check(output: &str, exit_code: i32) -> (String, Vec<String>) {
    let mut tally = Tally::default();
    let shown = output.lines().filter(|line| tally.feed(line)).map(str::to_owned).collect();
    tally.end(ExitStatus::from_raw(exit_code << 8));
    assert_eq!(tally.has_failed(), tally.failed > 0);
    (tally.to_string(), shown)
}

const CLEAN: &str = "\
   Compiling base v0.1.0
     Running unittests src/lib.rs (target/debug/deps/penstock_base-0123456789abcdef)

running 4 tests
test a ... ok
test b ... ok
test c ... ok
test d ... ignored, takes an hour

successes:

---- a stdout ----
noise
SKIPPED a: no /dev/fuse
SKIPPED a: no /dev/fuse

---- b stdout ----
not SKIPPED b: in the middle


successes:
    a
    b
    c

test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.00s

   Doc-tests penstock_base

running 1 test
test src/lib.rs - f (line 3) ... ok

successes:

successes:
    src/lib.rs - f (line 3)

test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

all doctests ran in 0.10s; merged doctests compilation took 0.09s
";

#[test]
fn passed_skipped_and_ignored_are_counted() {
    let (tally, shown) = check(CLEAN, 0);
    assert_eq!(
        tally,
        "SKIPPED a: no /dev/fuse\nignored d in penstock_base, takes an hour\n3 passed, 0 failed, 2 skipped"
    );
    assert!(shown.contains(&"SKIPPED a: no /dev/fuse".to_owned()));
    assert!(!shown.contains(&"noise".to_owned()));
    assert!(shown.contains(&"test c ... ok".to_owned()));
}

#[test]
fn failures_are_named_with_their_binary() {
    let output = "
     Running tests/crash.rs (target/debug/deps/crash-0123456789abcdef)

running 2 tests
test good ... ok
test bad ... FAILED

successes:

successes:
    good

failures:

---- bad stdout ----
SKIPPED bad: said so and failed all the same
failures:
    no name
test result: ok. 9 passed; 0 failed; 0 ignored


failures:
    bad

test result: FAILED. 1 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s

error: test failed, to rerun pass `-p penstock-node --test crash`
";
    // The format cannot tell a result line that a failed test prints itself from a genuine one, so that line
    // is changed here.
    let output = output.replace("test result: ok. 9", "a test result: ok. 9");
    let (tally, shown) = check(&output, 101);
    assert_eq!(tally, "FAILED bad in crash\n1 passed, 1 failed, 0 skipped");
    assert!(shown.iter().any(|line| line.contains("said so and failed")));
}

#[test]
fn a_binary_without_a_result_line_has_failed() {
    let died = "
     Running tests/a.rs (target/debug/deps/a-0123456789abcdef)

running 2 tests
test good ... ok
error: test failed, to rerun pass `-p x --test a`
     Running tests/b.rs (target/debug/deps/b-0123456789abcdef)
     Running tests/c.rs (target/debug/deps/c-0123456789abcdef)

running 0 tests

successes:

successes:

test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
     Running tests/d.rs (target/debug/deps/d-0123456789abcdef)

running 1 test
";
    let expected = "FAILED a: died before its result line\nFAILED b: ended before it ran its tests\n\
                    FAILED d: died before its result line\n0 passed, 3 failed, 0 skipped";
    // Also if cargo reports success: a test may have called exit(0).
    assert_eq!(check(died, 0).0, expected);
    assert_eq!(check(died, 101).0, expected);
}

#[test]
fn a_build_that_fails_has_failed() {
    let (tally, shown) = check("error[E0425]: cannot find value\nerror: could not compile `x`\n", 101);
    assert!(tally.starts_with("FAILED cargo test: exit status: 101"));
    assert!(tally.ends_with("\n0 passed, 1 failed, 0 skipped"));
    assert_eq!(shown.len(), 2);

    let mut tally = Tally::default();
    tally.fail("check fmt".to_owned());
    tally.end(ExitStatus::from_raw(101 << 8));
    assert!(tally.to_string().ends_with("\n0 passed, 2 failed, 0 skipped"));
}

#[test]
fn bare_output_is_understood() {
    let output = "
     Running tests/show.rs (target/debug/deps/show-0123456789abcdef)

running 2 tests
test a ... SKIPPED a: no drive
ok
SKIPPED b: no drive
test b ... ok

test result: ok. 2 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
    let (tally, _) = check(output, 0);
    assert_eq!(tally, "SKIPPED a: no drive\nSKIPPED b: no drive\n0 passed, 0 failed, 2 skipped");
}

#[test]
fn more_skips_than_passes_are_a_defect() {
    let output = "
     Running tests/a.rs (target/debug/deps/a-0123456789abcdef)
running 1 test
SKIPPED a: x
SKIPPED b: x
test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
";
    assert!(check(output, 0).0.contains("FAILED a: 2 tests say SKIPPED and only 1 passed"));
}

#[test]
fn lines_are_taken_apart() {
    assert_eq!(header("     Running unittests src/main.rs (/t/debug/deps/xtask-00ff)"), Some("xtask"));
    assert_eq!(header("Running late (again)"), None);
    assert_eq!(result("test result: FAILED. 12 passed; 3 failed; 4 ignored; 0 measured"), Some([12, 3, 4]));
    assert_eq!(result("test result: odd"), None);
    assert_eq!(without_escapes("\u{1b}[1m\u{1b}[32m     Running\u{1b}[0m x\u{1b}(B"), "     Running x");
}
