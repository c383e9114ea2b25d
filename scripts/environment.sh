# shellcheck shell=bash
# Sourced by scripts/demo and scripts/test, from the repository's root: `make_environment EXTRA` gives .venv with
# the package installed in place and that extra, and puts it first in PATH.

say() { printf '\n== %s\n' "$*" >&2; }

fail() {
    printf '%s: error: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

debian_install() { # PACKAGE...
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq || fail "apt-get update failed; it is needed to install: $*"
    apt-get install -y -qq --no-install-recommends "$@" >&2 || fail "apt-get could not install: $*"
}

can_install_debian() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    return 1
}

make_environment() { # EXTRA
    local extra=$1 python stamp wanted
    if ! python=$(find_python); then
        can_install_debian || fail "no Python 3.11 to 3.14 found in PATH; install one and run this again"
        say "Installing Python (Debian package python3-venv)"
        debian_install python3-venv
        python=$(find_python) || fail "the system's Python is not 3.11 to 3.14; put one of these in PATH"
    fi
    if [ ! -x .venv/bin/python ]; then
        if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            can_install_debian || fail "$python cannot make environments; install the package python3-venv"
            say "Installing what makes environments (Debian package python3-venv)"
            debian_install python3-venv
        fi
        say "Making the environment .venv with $("$python" --version)"
        "$python" -m venv .venv
    fi
    # Installed once per extra and content of pyproject.toml; the stamp is written last, so that an interrupted
    # install is done again.
    stamp=.venv/installed-$extra
    wanted=$(sha256sum pyproject.toml)
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        say "Installing the package with the extra '$extra' into .venv (downloads when new; some minutes)"
        .venv/bin/python -m pip install --disable-pip-version-check -e ".[$extra]" >&2
        echo "$wanted" >"$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
}
