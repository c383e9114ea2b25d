"""Drivers of Mesa that stand in for the GPU: this machine's own, or Debian's packages in the user's cache.

Packages are unpacked with their own C library, as any user, and nothing of the system changes. Two releases
are of use:

- RADV's null device: RADV_FORCE_FAMILY gives a device of that family without a GPU. Mesa 26 has taken it
  away, older versions compile otherwise, so only Mesa 25 will do. Debian 13 has 25.0.7.
- Lavapipe, which runs shaders on the CPU, has cooperative matrices in Mesa 26. Debian 13 has it among its
  backports.
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

_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
_LOADER = _LIBRARIES / "ld-linux-x86-64.so.2"
_MANIFEST_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Release:
    """A driver of Mesa, and where to have it from.

    Attributes:
        version: of Mesa in Debian's packages; how it begins is enough.
        suites: Debian's suites that hold it and what it depends on; the last one is preferred.
        driver: the driver's name in file names: libvulkan_NAME.so, and NAME_icd.json where it is installed.
        usable: the versions that will do.
        own: how this machine's own driver would have to be, in words.
        megabytes: of its packages.
        variables: of the environment of whoever uses it.
    """

    version: str
    suites: tuple[str, ...]
    driver: str
    usable: re.Pattern[str]
    own: str
    megabytes: int
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def library(self) -> Path:
        """Where the packages have the driver."""
        return _LIBRARIES / f"libvulkan_{self.driver}.so"

    @property
    def instead(self) -> str:
        """How to do without the packages."""
        return f"Where the system's own {self.own}, nothing is downloaded"


def radv(family: str) -> Release:
    """RADV as a GPU of `family`."""
    return Release(
        version="25.0.7",
        suites=("trixie",),
        driver="radeon",
        usable=re.compile(r"Mesa 25\."),
        own="RADV is of Mesa 25",
        megabytes=63,
        variables={"RADV_FORCE_FAMILY": family},
    )


LAVAPIPE = Release(
    version="26",
    suites=("trixie", "trixie-backports"),
    driver="lvp",
    usable=re.compile(r"Mesa (2[6-9]|[3-9]\d)\."),
    own="lavapipe is of Mesa 26",
    megabytes=63,
)


@dataclass(frozen=True)
class Installed:
    """A driver on this machine, by how a Python program is started that is to find it."""

    command: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)


def installed_driver(
    release: Release, probe: Callable[[Installed], tuple[str, str]], say: Callable[[str], None]
) -> tuple[Installed, str]:
    """A driver of that release, and its version; Mesa is downloaded where this machine has none that will do.

    Args:
        probe: starts a driver and returns its version, or "" and why it does not start.
        say: hears what takes long.

    Raises:
        DeviceError: there is no such driver and none can be had; the message says why.
    """
    for folder in _MANIFEST_FOLDERS:
        for manifest in sorted(Path(folder).glob(f"{release.driver}_icd*.json")):
            driver = Installed((sys.executable,), _environment(manifest, release))
            version, _ = probe(driver)
            if release.usable.match(version):
                return driver, version
    prefix = _unpacked(release, say)
    driver = _from_prefix(prefix, release)
    version, why = probe(driver)
    if not release.usable.match(version):
        raise DeviceError(
            f"the driver in {prefix} does not start here: {version or why}. Remove that folder and try again"
        )
    return driver, version


def _environment(manifest: Path, release: Release) -> dict[str, str]:
    """Of a process that sees this driver only. Loaders before 1.3.207 read the variable's second name."""
    names = {"VK_DRIVER_FILES": str(manifest), "VK_ICD_FILENAMES": str(manifest)}
    quiet = {"MESA_SHADER_CACHE_DISABLE": "1", "VK_LOADER_LAYERS_DISABLE": "~all~"}
    return {**os.environ, **names, **quiet, **release.variables}


def _from_prefix(prefix: Path, release: Release) -> Installed:
    """This Python under the prefix's C library: the driver needs a newer one than many systems have."""
    python = Path(sys.executable).resolve()
    libraries = (prefix / _LIBRARIES, python.parent.parent / "lib", Path("/") / _LIBRARIES)
    paths = [path for path in sys.path if path and Path(path).exists()]
    environment = _environment(_manifest(prefix, release), release) | {
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = (str(prefix / _LOADER), "--library-path", ":".join(map(str, libraries)), str(python))
    return Installed(command, environment)


def _manifest(prefix: Path, release: Release) -> Path:
    """What the loader is told of the driver in `prefix`."""
    return prefix / f"{release.driver}.json"


def _unpacked(release: Release, say: Callable[[str], None]) -> Path:
    """The folder with Mesa; made in one move, so it is whole or not there."""
    prefix = cache_folder() / f"mesa-{release.version}"
    if prefix.is_dir():
        return prefix
    if platform.machine() != "x86_64":
        raise DeviceError(
            f"Mesa {release.version} is unpacked on x86-64 only, this is {platform.machine()}. "
            f"{release.instead}"
        )
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise DeviceError(
            f"Mesa {release.version} is unpacked from Debian's packages, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here. {release.instead}"
        )
    say(f"downloading Mesa {release.version} into {prefix} ({release.megabytes} MB, once)")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".mesa-", dir=prefix.parent) as scratch:
            made = Path(scratch) / "mesa"
            try:
                _unpack(release, made, Path(scratch))
            except _Failed as failure:
                raise DeviceError(
                    f"Mesa {release.version} cannot be downloaded: {failure}. {release.instead}"
                ) from failure
            if not prefix.is_dir():  # another process may have been faster
                made.rename(prefix)
    except OSError as error:
        raise DeviceError(f"Mesa cannot be unpacked into {prefix}: {error.strerror or error}") from error
    return prefix


class _Failed(Exception):
    """A step of downloading and unpacking failed; says which and why."""


def _unpack(release: Release, prefix: Path, scratch: Path) -> None:
    """Download the packages and what they depend on, and unpack them; apt keeps its notes in `scratch`."""
    apt = _private_apt(release.suites, scratch)
    _run([*apt, "update"])
    wanted = (f"mesa-vulkan-drivers={release.version}*", "libvulkan1")
    options = ("--print-uris", "--yes", "--no-install-recommends", f"--target-release={release.suites[-1]}")
    listed = _run([*apt, *options, "install", *wanted])
    names = re.findall(r"^'\S+' (\S+)_(\S+)_\S+\.deb ", listed, re.MULTILINE)
    packages = [f"{name}={version.replace('%3a', ':')}" for name, version in names]
    downloads = scratch / "packages"
    downloads.mkdir()
    _run([*apt, "download", *packages], downloads)
    for package in sorted(downloads.glob("*.deb")):
        _run(["dpkg-deb", "-x", str(package), str(prefix)])
    if not (prefix / release.library).is_file() or not (prefix / _LOADER).is_file():
        raise _Failed(f"Debian's packages hold no {release.library.name}, or no C library")
    driver = {"library_path": f"./{release.library}", "api_version": "1.3.0"}
    described = {"file_format_version": "1.0.0", "ICD": driver}
    _manifest(prefix, release).write_text(json.dumps(described))


def _private_apt(suites: Sequence[str], scratch: Path) -> list[str]:
    """apt-get that knows these suites of this machine's own mirror, and writes below `scratch` only."""
    lists, archives = scratch / "lists" / "partial", scratch / "archives" / "partial"
    for folder in (lists, archives):
        folder.mkdir(parents=True)
    (scratch / "status").touch()
    mirror = _mirror()
    sources = "".join(f"deb [signed-by={_KEYS}] {mirror} {suite} main\n" for suite in suites)
    (scratch / "sources.list").write_text(sources)
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
        _Failed: it has none.
    """
    sites = _run(["apt-get", "indextargets", "--format", "$(SITE)", "Identifier: Packages"]).split()
    mirrors = [site.rstrip("/") for site in sites if site.rstrip("/").endswith("/debian")]
    if not mirrors:
        raise _Failed("apt is configured for no Debian mirror, which it comes from")
    return mirrors[0]


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    """What a command prints.

    Raises:
        _Failed: it fails; with its last words.
    """
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _Failed(f"{command[0]} did not end within {_TIME_LIMIT_S} s; is the network slow?") from error
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no reason given"]
        raise _Failed(f"{command[0]}: {words[-1]}")
    return done.stdout
