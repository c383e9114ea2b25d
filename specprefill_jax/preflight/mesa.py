"""The driver that plays the GPU: RADV's null device, this machine's own or Mesa 25.0.7 in the user's cache.

RADV_FORCE_FAMILY gives a device of that family without a GPU. Mesa 26 has taken it away, older versions
compile otherwise, so only Mesa 25 will do. Debian 13 has 25.0.7: its packages are unpacked with their own C
library, as any user, and nothing of the system changes.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.errors import DeviceError

VERSION = "25.0.7"
_SUITE, _PACKAGES = "trixie", (f"mesa-vulkan-drivers={VERSION}*", "libvulkan1")
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
_DRIVER, _LOADER = _LIBRARIES / "libvulkan_radeon.so", _LIBRARIES / "ld-linux-x86-64.so.2"
_MANIFEST = "radeon.json"
_MANIFEST_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_USABLE = re.compile(r"Mesa 25\.")
_TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Installed:
    """A driver on this machine, by how a Python program is started that is to find it."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)


def installed_driver(
    family: str, probe: Callable[[Installed], tuple[str, str]], say: Callable[[str], None]
) -> tuple[Installed, str]:
    """A driver that plays GPUs of `family`, and its version; Mesa is downloaded (63 MB) where there is none.

    Args:
        probe: starts a driver and returns its version, or "" and why it does not start.
        say: hears what takes long.

    Raises:
        DeviceError: there is no such driver and none can be had; the message says why.
    """
    for folder in _MANIFEST_FOLDERS:
        for manifest in sorted(Path(folder).glob("radeon_icd*.json")):
            driver = Installed((sys.executable,), _environment(manifest, family))
            version, _ = probe(driver)
            if _USABLE.match(version):
                return driver, version
    prefix = _unpacked(say)
    driver = _from_prefix(prefix, family)
    version, why = probe(driver)
    if not _USABLE.match(version):
        raise DeviceError(
            f"the driver in {prefix} does not start here: {version or why}. Remove that folder and try again"
        )
    return driver, version


def _environment(manifest: Path, family: str) -> dict[str, str]:
    """Of a process that sees this driver only. Loaders before 1.3.207 read the variable's second name."""
    names = {"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}
    quiet = {"MESA_SHADER_CACHE_DISABLE": "1", "VK_LOADER_LAYERS_DISABLE": "~all~"}
    return {**os.environ, **names, **quiet, "RADV_FORCE_FAMILY": family}


def _from_prefix(prefix: Path, family: str) -> Installed:
    """This Python under the prefix's C library: the driver needs a newer one than many systems have."""
    python = Path(sys.executable).resolve()
    libraries = (prefix / _LIBRARIES, python.parent.parent / "lib", Path("/") / _LIBRARIES)
    paths = [path for path in sys.path if path and Path(path).exists()]
    environment = _environment(prefix / _MANIFEST, family) | {
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = (str(prefix / _LOADER), "--library-path", ":".join(map(str, libraries)), str(python))
    return Installed(command, environment)


def _unpacked(say: Callable[[str], None]) -> Path:
    """The folder with Mesa; made in one move, so it is whole or not there."""
    prefix = cache_folder() / f"mesa-{VERSION}"
    if prefix.is_dir():
        return prefix
    if platform.machine() != "x86_64":
        raise DeviceError(f"Mesa {VERSION} is unpacked on x86-64 only, this is {platform.machine()}. {_OWN}")
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise DeviceError(
            f"preflight unpacks Mesa {VERSION} from Debian's packages, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here. {_OWN}"
        )
    say(f"downloading Mesa {VERSION} into {prefix} (63 MB, once)")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mesa-", dir=prefix.parent) as scratch:
            made = Path(scratch) / "mesa"
            _unpack(made, Path(scratch))
            if not prefix.is_dir():  # another process may have been faster
                made.rename(prefix)
    except OSError as error:
        raise DeviceError(f"Mesa cannot be unpacked into {prefix}: {error.strerror or error}") from error
    return prefix


_OWN = "Where the system's own RADV is of Mesa 25, nothing is downloaded"


def _unpack(prefix: Path, scratch: Path) -> None:
    """Download the packages and what they depend on, and unpack them; apt keeps its notes in `scratch`."""
    apt = _private_apt(scratch)
    _run([*apt, "update"])
    listed = _run([*apt, "--print-uris", "--yes", "--no-install-recommends", "install", *_PACKAGES])
    names = re.findall(r"^'\S+' (\S+)_(\S+)_\S+\.deb ", listed, re.MULTILINE)
    packages = [f"{name}={version.replace('%3a', ':')}" for name, version in names]
    downloads = scratch / "packages"
    downloads.mkdir()
    _run([*apt, "download", *packages], downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(prefix)])
    if not (prefix / _DRIVER).is_file() or not (prefix / _LOADER).is_file():
        raise DeviceError(f"Debian's packages of Mesa {VERSION} hold no {_DRIVER.name}, or no C library")
    driver = {"library_path": f"./{_DRIVER}", "api_version": "1.3.0"}
    (prefix / _MANIFEST).write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))


def _private_apt(scratch: Path) -> list[str]:
    """apt-get that knows one suite of this machine's own mirror, and writes below `scratch` only."""
    lists, archives = scratch / "lists" / "partial", scratch / "archives" / "partial"
    for folder in (lists, archives):
        folder.mkdir(parents=True)
    (scratch / "status").touch()
    (scratch / "sources.list").write_text(f"deb [signed-by={_KEYS}] {_mirror()} {_SUITE} main\n")
    options = {
        "Dir::Etc::sourcelist": scratch / "sources.list",
        "Dir::Etc::sourceparts": "-",
        "Dir::State::lists": scratch / "lists",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch,
        "APT::Sandbox::User": "root",  # the sandbox's user may not write there
    }
    return ["apt-get", "-q", *(word for name, value in options.items() for word in ("-o", f"{name}={value}"))]


def _mirror() -> str:
    """The Debian mirror that this machine's apt is configured for.

    Raises:
        DeviceError: it has none.
    """
    sites = _run(["apt-get", "indextargets", "--format", "$(SITE)", "Identifier: Packages"]).split()
    mirrors = [site.rstrip("/") for site in sites if site.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise DeviceError(f"apt is configured for no Debian mirror, which Mesa {VERSION} comes from. {_OWN}")
    return mirrors[0]


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints.

    Raises:
        DeviceError: it fails; with its last words.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DeviceError(
            f"{command[0]} did not end within {_TIME_LIMIT_S} s; is the network slow?"
        ) from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no reason given"]
        raise DeviceError(f"Mesa {VERSION} cannot be downloaded: {command[0]}: {words[-1]}. {_OWN}")
    return done.stdout
