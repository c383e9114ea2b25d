# shellcheck shell=bash
# Sourced by the scripts here, from the repository's root: `make_environment EXTRA` gives .venv with
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

lavapipe_driver() {
    local folder
    for folder in /etc/vulkan/icd.d /usr/local/share/vulkan/icd.d /usr/share/vulkan/icd.d; do
        compgen -G "$folder/lvp_icd*.json" && return
    done
    return 1
}

vulkan_loader() { python -c 'import ctypes; ctypes.CDLL("libvulkan.so.1")' 2>/dev/null; }

# Makes lavapipe the only Vulkan device that programs started from here see; installs it where that is possible.
use_lavapipe() {
    if ! { vulkan_loader && lavapipe_driver >/dev/null; } && can_install_debian; then
        say "Installing Vulkan (Debian packages mesa-vulkan-drivers, libvulkan1)"
        debian_install mesa-vulkan-drivers libvulkan1
    fi
    vulkan_loader || fail "no Vulkan loader (libvulkan.so.1), which ${0##*/} needs for lavapipe and never goes without.
Install it (Debian: apt-get install libvulkan1), or run this as root."
    lavapipe_driver >/dev/null || fail "no lavapipe driver (lvp_icd*.json), which ${0##*/} needs and never goes without.
Install it (Debian: apt-get install mesa-vulkan-drivers), or run this as root."
    # A GPU of this machine must not answer in its place.
    VK_DRIVER_FILES=$(lavapipe_driver | head -n 1)
    export VK_DRIVER_FILES
    export VK_ICD_FILENAMES=$VK_DRIVER_FILES # the name that loaders before 1.3.207 read
    say "Vulkan: lavapipe of Mesa $(mesa_version), $VK_DRIVER_FILES"
}

mesa_version() {
    dpkg-query --show --showformat='${Version}' mesa-vulkan-drivers 2>/dev/null || echo "(version unknown)"
}
