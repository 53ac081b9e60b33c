# The two commands that README.md names, and `ci`. Everything else is in `cargo xtask`.

.DEFAULT_GOAL := help
.PHONY: help up test ci

TARGET_DIR := $(or $(CARGO_TARGET_DIR),target)
# Finds a newly installed rustup in shells that were opened before the installation.
export PATH := $(PATH):$(HOME)/.cargo/bin

help:
	@echo 'make up     build Penstock and start it here: state in ./penstock-data, file system at ./mnt'
	@echo 'make test   run every check and test; the last line says how many passed, failed and were skipped'
	@echo 'make ci     formatting, lints, licences and tidiness only'

# `exec` replaces the shell, so that no shell stands between Ctrl-C and the program.
up:
	@scripts/prerequisites.sh up
	cargo build --release --locked -p penstock-cli
	@exec $(TARGET_DIR)/release/penstock up ./penstock-data --mount ./mnt

test:
	@scripts/prerequisites.sh test
	@cargo xtask test

ci:
	@cargo xtask ci
