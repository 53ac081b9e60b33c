//! Drives that `up` is given by their paths.

use anyhow::{Context, Result, bail};
use penstock_drive::FileDrive;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// Drives that are given by their paths: `[DOMAIN=]PATH[,PATH…]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivenDrives {
    /// The failure domain that they share, if it is named.
    domain: Option<String>,
    paths: Vec<PathBuf>,
}

impl FromStr for GivenDrives {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (domain, paths) = match text.split_once('=') {
            // A path may have the character, a name has no slash.
            Some((domain, paths)) if !domain.contains('/') => (Some(domain.to_owned()), paths),
            _ => (None, text),
        };
        if domain.as_deref() == Some("") {
            return Err("a failure domain has a name, as in shelf1=/dev/nvme0n1".into());
        }
        let paths: Vec<PathBuf> = paths.split(',').map(PathBuf::from).collect();
        match paths.iter().any(|path| path.as_os_str().is_empty()) {
            true => Err("a path is missing".into()),
            false => Ok(Self { domain, paths }),
        }
    }
}

/// The drives that are asked for, by path.
pub struct Given {
    /// Absolute paths, in the order of members: domains take turns.
    paths: Vec<String>,
    /// Failure domains of equal size, if they are named.
    domains: Option<usize>,
}

impl Given {
    /// The drives of all `--drive` options; none if there is none.
    pub fn of(options: &[GivenDrives]) -> Result<Option<Self>> {
        if options.is_empty() {
            return Ok(None);
        }
        let mut by_domain: BTreeMap<Option<&str>, Vec<String>> = BTreeMap::new();
        let mut all = BTreeSet::new();
        for given in options {
            for path in &given.paths {
                let path = std::path::absolute(path)?.display().to_string();
                if !all.insert(path.clone()) {
                    bail!("{path} is given twice");
                }
                by_domain.entry(given.domain.as_deref()).or_default().push(path);
            }
        }
        let is_named = by_domain.keys().any(Option::is_some);
        if is_named && by_domain.contains_key(&None) {
            bail!("some drives have a failure domain and some have none: name one for all, or for none");
        }
        let sizes: BTreeSet<usize> = by_domain.values().map(Vec::len).collect();
        if sizes.len() > 1 {
            let counts: Vec<String> = by_domain
                .iter()
                .map(|(name, paths)| format!("{} {}", name.unwrap_or(""), paths.len()))
                .collect();
            bail!("failure domains have equal numbers of drives, not {}", counts.join(", "));
        }
        let of_domains: Vec<Vec<String>> = by_domain.into_values().collect();
        let domains = is_named.then_some(of_domains.len());
        // Member n is in domain n modulo their number.
        let paths =
            (0..of_domains[0].len()).flat_map(|at| of_domains.iter().map(move |paths| paths[at].clone()));
        Ok(Some(Self { paths: paths.collect(), domains }))
    }

    /// The paths, in the order of members.
    pub fn paths(&self) -> &[String] {
        &self.paths
    }

    /// Failure domains of equal size, if they are named.
    pub fn domains(&self) -> Option<usize> {
        self.domains
    }

    /// The sizes of the drives in bytes, in their order.
    pub fn sizes(&self) -> Result<Vec<u64>> {
        let size = |path: &String| {
            FileDrive::size_at(Path::new(path))
                .with_context(|| format!("{path} is no drive that could be used"))
        };
        self.paths.iter().map(size).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Result<(Option<String>, Vec<PathBuf>), String> {
        text.parse().map(|GivenDrives { domain, paths }| (domain, paths))
    }

    #[test]
    fn drives_are_given_with_and_without_domains() {
        let paths = |paths: &[&str]| paths.iter().map(PathBuf::from).collect::<Vec<_>>();
        assert_eq!(parsed("/dev/a,/dev/b"), Ok((None, paths(&["/dev/a", "/dev/b"]))));
        assert_eq!(parsed("s1=/dev/a"), Ok((Some("s1".into()), paths(&["/dev/a"]))));
        assert_eq!(parsed("/dev/a=b"), Ok((None, paths(&["/dev/a=b"]))), "a path may have the character");
        for bad in ["", "=/dev/a", "s1=", "/dev/a,", ",/dev/a"] {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }
}
