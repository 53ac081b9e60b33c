#!/usr/bin/env bash
# Checks that this machine has what `make up` or `make test` needs, and installs what is missing.
#
#   scripts/prerequisites.sh up|test
#
# As root, this installs missing packages with apt-get. Otherwise it prints one command that installs them.
# The exit status is 1 if the work cannot go on without them. Packages that only some tests use do not stop
# the rest: those tests print SKIPPED.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'prerequisites: %s\n' "$*" >&2; }
have() { command -v "$1" >/dev/null 2>&1; }

# Debian keeps some tools outside the search path of an ordinary user.
export PATH="$PATH:/usr/sbin:/sbin"

required=()
optional=()

# Sets `required` and `optional` to the packages whose programs are missing. $1: up or test.
look() {
    required=()
    optional=()
    have cc || required+=(gcc libc6-dev)
    if ! have fusermount3; then
        # root mounts without the setuid helper
        if [ "$(id -u)" = 0 ]; then optional+=(fuse3); else required+=(fuse3); fi
    fi
    if [ "$1" = test ]; then
        have python3 || optional+=(python3)
        python3 -c 'import ensurepip, venv' 2>/dev/null || optional+=(python3-venv)
        have setfattr || optional+=(attr)
        have sqlite3 || optional+=(sqlite3)
    fi
    if ! have cargo; then
        # Debian 13 and Ubuntu 24.04 have a package of rustup. Earlier releases need its own installer.
        if have apt-cache && apt-cache policy rustup | grep -q 'Candidate: [0-9]'; then required+=(rustup); fi
    fi
}

# Prints all missing packages on one line.
missing() {
    local all=("${required[@]}" "${optional[@]}")
    echo "${all[*]}"
}

apt() { DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0 "$@" </dev/null; }

# Runs apt-get and retries once after 5 s: most failures of mirrors are temporary.
apt_twice() {
    apt "$@" && return 0
    say "apt-get $1 failed; trying once more"
    sleep 5
    apt "$@"
}

# Installs the missing packages. $1: up or test.
install_missing() {
    if ! have apt-get; then
        [ -z "$(missing)" ] || say "this system has no apt-get; install these (Debian's names) by its own means: $(missing)"
        return 1
    fi
    say "reading the package lists"
    apt_twice update || say "apt-get update failed; going on with the package lists that are here"
    # The new lists may contain packages that the old ones, or none, did not.
    look "$1"
    [ $((${#required[@]} + ${#optional[@]})) -gt 0 ] || return 0
    say "installing with apt-get: $(missing)"
    # The output of apt-get matters only if it fails.
    local log
    log=$(mktemp)
    if ! apt_twice install -y --no-install-recommends "${required[@]}" "${optional[@]}" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        return 1
    fi
    rm -f "$log"
}

# Checks for the compiler that rust-toolchain.toml names, and installs it with rustup if it is missing. For
# tests, also checks for rustfmt and clippy. $1: up or test.
look_at_rust() {
    local channel
    channel=$(sed -n 's/^channel *= *"\(.*\)"/\1/p' rust-toolchain.toml)
    if ! have cargo; then
        say "cargo is missing. Install it with:"
        say "  curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal"
        return 1
    fi
    if have rustup; then
        if ! rustup toolchain list | grep -q "^$channel-"; then
            say "installing Rust $channel"
            rustup toolchain install "$channel" --profile minimal --component rustfmt --component clippy
        fi
    elif [ "$(printf '%s\n' "$channel" "$(cargo --version | cut -d' ' -f2)" | sort -V | head -n 1)" != "$channel" ]; then
        say "$(cargo --version) is too old: Rust $channel or newer is needed. Install rustup from https://rustup.rs"
        return 1
    fi
    [ "$1" = test ] || return 0
    cargo fmt --version >/dev/null 2>&1 || add_component "$channel" rustfmt
    cargo clippy --version >/dev/null 2>&1 || add_component "$channel" clippy
}

add_component() {
    if ! have rustup; then
        say "cargo $2 is missing; install the Rust component $2"
        return 1
    fi
    rustup component add --toolchain "$1" "$2"
}

main() {
    case "${1:-}" in
        up | test) ;;
        *)
            say "usage: scripts/prerequisites.sh up|test"
            exit 2
            ;;
    esac
    look "$1"
    local count=$((${#required[@]} + ${#optional[@]}))
    # New package lists may contain rustup.
    if [ "$(id -u)" = 0 ] && ! have cargo; then count=1; fi
    if [ "$count" -gt 0 ]; then
        if [ "$(id -u)" = 0 ]; then
            install_missing "$1" || true
            look "$1"
            [ ${#optional[@]} = 0 ] || say "going on without: ${optional[*]}"
        else
            say "missing on this machine; install with:"
            printf '    sudo apt-get install -y %s\n' "$(missing)" >&2
            [ ${#required[@]} -gt 0 ] || say "going on: the tests that need them print SKIPPED"
        fi
        if [ ${#required[@]} -gt 0 ]; then
            [ "$(id -u)" != 0 ] || say "still missing: ${required[*]}"
            exit 1
        fi
    fi
    look_at_rust "$1"
}

main "$@"
