//! Generates man pages and shell completion from the command line's definition.

use crate::args::{Args, Shell};
use anyhow::{Context, Result};
use clap::CommandFactory;
use std::path::Path;
use std::process::ExitCode;

const NAME: &str = "penstock";

/// Prints a shell's completion script.
pub fn completion(shell: Shell) -> ExitCode {
    println!("{}", script(shell).trim_end());
    ExitCode::SUCCESS
}

fn script(shell: Shell) -> String {
    let shell = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), NAME, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Writes penstock.1 and a page for each command into a directory. Creates the directory.
pub fn man(dir: &Path) -> Result<ExitCode> {
    std::fs::create_dir_all(dir).with_context(|| format!("{} cannot be made", dir.display()))?;
    clap_mangen::generate_to(Args::command(), dir)
        .with_context(|| format!("the pages cannot be written into {}", dir.display()))?;
    println!("pages are in {}; `man -l {}` shows the first", dir.display(), dir.join("penstock.1").display());
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Command;

    /// Calls `check` with every visible command and its full name, joined by hyphens.
    fn walk(command: &Command, words: &str, check: &mut dyn FnMut(&Command, &str)) {
        check(command, words);
        for inner in
            command.get_subcommands().filter(|inner| inner.get_name() != "help" && !inner.is_hide_set())
        {
            walk(inner, &format!("{words}-{}", inner.get_name()), check);
        }
    }

    #[test]
    fn every_shell_completes_verbs_and_options() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell);
            for word in ["replace", "bundle", "scrub-days"] {
                assert!(script.contains(word), "{shell:?} knows {word}");
            }
        }
    }

    #[test]
    fn every_verb_and_option_has_help_and_a_page() {
        let dir = std::env::temp_dir().join(format!("penstock-man-{}", std::process::id()));
        man(&dir).unwrap();
        let mut verbs = 0;
        let mut command = Args::command();
        command.build();
        walk(&command, NAME, &mut |command, words| {
            verbs += 1;
            assert!(command.get_about().is_some(), "{words} has no help");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                assert!(arg.get_help().is_some(), "{words}: {} has no help", arg.get_id());
            }
            let page = std::fs::read_to_string(dir.join(format!("{words}.1")));
            let page = page.unwrap_or_else(|error| panic!("{words}.1: {error}"));
            let about = command.get_about().unwrap().to_string();
            let first = about.split([':', ';', ',', '-', '\'']).next().unwrap();
            assert!(page.starts_with(".ie") && page.contains(first), "{words}.1 says `{first}`");
            assert!(!page.contains("detached"), "what is hidden is on no page");
        });
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(verbs > 20, "{verbs} verbs");
    }
}
