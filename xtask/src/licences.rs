//! Checks that the licence of every package in a Linux build is on the list of allowed licences.

mod spdx;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::workspace::cargo;

/// Licences that require at most a notice. Copyleft is not among them, not even for single files (MPL-2.0).
const ALLOWED: [&str; 12] = [
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Zlib",
];

/// Checks the licence of every package in the lock file that a Linux build uses. The error lists the others.
pub(crate) fn check() -> Result<()> {
    // Without a platform cargo would also fetch packages that only other systems need.
    let platform = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let output = cargo()
        .args(["metadata", "--locked", "--format-version=1", "--filter-platform", &platform])
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    let metadata: Value = serde_json::from_slice(&output.stdout).context("cargo metadata is no JSON")?;
    let complaints = complaints(&metadata)?;
    if !complaints.is_empty() {
        bail!("{}", complaints.join("\n"));
    }
    Ok(())
}

fn complaints(metadata: &Value) -> Result<Vec<String>> {
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let mut complaints = Vec::new();
    for package in packages {
        let name = format!(
            "{} {}",
            package["name"].as_str().unwrap_or("?"),
            package["version"].as_str().unwrap_or("?")
        );
        let Some(licence) = package["license"].as_str() else {
            complaints.push(format!("{name}: states no licence expression"));
            continue;
        };
        match spdx::allows(licence, &|id| ALLOWED.contains(&id)) {
            Ok(true) => {}
            Ok(false) => complaints.push(format!("{name}: licence `{licence}` is not on the allow list")),
            Err(error) => complaints.push(format!("{name}: licence `{licence}` cannot be read: {error}")),
        }
    }
    Ok(complaints)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::complaints;

    #[test]
    fn a_package_is_named_with_its_licence() {
        let metadata = json!({ "packages": [
            { "name": "good", "version": "1.0.0", "license": "MIT OR GPL-3.0-only" },
            { "name": "bad", "version": "2.0.0", "license": "MPL-2.0" },
            { "name": "mute", "version": "3.0.0", "license": null },
            { "name": "odd", "version": "4.0.0", "license": "MIT OR" },
        ]});
        let complaints = complaints(&metadata).unwrap();
        assert_eq!(complaints.len(), 3);
        assert_eq!(complaints[0], "bad 2.0.0: licence `MPL-2.0` is not on the allow list");
        assert!(complaints[1].starts_with("mute 3.0.0: states no"));
        assert!(complaints[2].starts_with("odd 4.0.0: licence `MIT OR` cannot be read"));
    }
}
