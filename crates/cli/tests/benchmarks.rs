//! Tests of the command line's benchmarks: the contents of their output, not the speed.
#![allow(clippy::unwrap_used, clippy::disallowed_methods, missing_docs)]

use serde_json::Value;
use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_penstock")).arg("bench").args(arguments).output().unwrap()
}

/// Parses the output; checks that every line has the keys that readers rely on, and positive numbers.
fn lines(output: &Output) -> Vec<Value> {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
    for line in &lines {
        for key in ["name", "unit", "limit"] {
            assert!(line[key].as_str().is_some_and(|text| !text.is_empty()), "{key} of {line}");
        }
        for key in ["measured", "ceiling", "efficiency"] {
            assert!(line[key].as_f64().is_some_and(|number| number > 0.0), "{key} of {line}");
        }
        assert_eq!(line["peer"].is_number(), line["ratio"].is_number(), "{line}");
        assert_eq!(line["peer"].is_number(), line["peer_name"].is_string(), "{line}");
    }
    lines
}

#[test]
fn codec_measures_ceilings_and_all_operations() {
    let picture = std::env::temp_dir().join(format!("penstock-roofline-{}.svg", std::process::id()));
    let output = bench(&[
        "codec",
        "--quick",
        "--rounds",
        "1",
        "--only",
        "8+3",
        "--json",
        "--svg",
        picture.to_str().unwrap(),
    ]);
    let lines = lines(&output);
    let svg = std::fs::read_to_string(&picture).unwrap();
    std::fs::remove_file(&picture).unwrap();
    let has = |name: &str| lines.iter().any(|line| line["name"].as_str().unwrap().starts_with(name));
    for ceiling in ["L1 read", "L2 write", "memory read", "memory write, streaming stores", "products in L1"]
    {
        assert!(has(ceiling), "{ceiling}");
    }
    for warmth in ["warm", "cold"] {
        for operation in
            ["encode", "encode with checksums", "decode 1 lost", "decode 3 lost", "update of a block"]
        {
            assert!(has(&format!("8+3 {operation}, {warmth}, 1 core")), "{operation}, {warmth}");
        }
    }
    assert!(!has("4+2"), "only what was asked for");
    assert!(svg.starts_with("<svg") && svg.contains(">8+3<"), "the picture has the code");
}

#[test]
fn codec_runs_on_every_kernel_and_refuses_others_by_name() {
    let output = bench(&[
        "codec",
        "--quick",
        "--rounds",
        "1",
        "--kernel",
        "portable",
        "--only",
        "4+1 encode, warm",
        "--json",
    ]);
    assert!(!lines(&output).is_empty());
    let output = bench(&["codec", "--kernel", "mmx"]);
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("no kernel mmx runs on this processor"), "{told}");
    assert!(told.contains("portable"), "it names those that do: {told}");
}

#[test]
fn array_measures_a_code() {
    let lines = lines(&bench(&["array", "--code", "2+1", "--json"]));
    assert!(lines.iter().any(|line| line["name"].as_str().unwrap().starts_with("2+1 write")));
}
