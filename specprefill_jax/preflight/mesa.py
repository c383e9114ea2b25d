"""Drivers of Mesa that stand in for the GPU: this machine's own, or Debian's packages in the user's cache.

Two releases are of use:

- RADV's null device: RADV_FORCE_FAMILY gives a device of that family without a GPU. Mesa 26 has taken it
  away, older versions compile otherwise, so only Mesa 25 will do. Debian 13 has 25.0.7.
- Lavapipe, which runs shaders on the CPU, has cooperative matrices in Mesa 26. Debian 13 has it among its
  backports.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specprefill_jax.errors import DeviceError
from specprefill_jax.preflight.debian import LIBRARIES, LOADER, Packages, unpacked

_MANIFEST_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")


@dataclass(frozen=True)
class Release:
    """A driver of Mesa, and where to have it from.

    Attributes:
        driver: its name in file names: libvulkan_NAME.so, and NAME_icd.json where it is installed.
        usable: the versions that will do.
        packages: Debian's, for where this machine's own driver will not do.
        variables: of the environment of whoever uses it.
    """

    driver: str
    usable: re.Pattern[str]
    packages: Packages
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def manifest(self) -> str:
        """What the Vulkan loader is told of the driver, beside the packages' files."""
        return f"{self.driver}.json"


def _packages(version: str, driver: str, own: str, suites: tuple[str, ...]) -> Packages:
    return Packages(
        name=f"Mesa {version}",
        folder=f"mesa-{version}",
        wanted=(f"mesa-vulkan-drivers={version}*", "libvulkan1"),
        holds=LIBRARIES / f"libvulkan_{driver}.so",
        megabytes=63,
        otherwise=f"Where the system's own {own}, nothing is downloaded",
        suites=suites,
    )


def radv(family: str) -> Release:
    """RADV as a GPU of `family`."""
    return Release(
        driver="radeon",
        usable=re.compile(r"Mesa 25\."),
        packages=_packages("25.0.7", "radeon", "RADV is of Mesa 25", ("trixie",)),
        variables={"RADV_FORCE_FAMILY": family},
    )


LAVAPIPE = Release(
    driver="lvp",
    usable=re.compile(r"Mesa (2[6-9]|[3-9]\d)\."),
    packages=_packages("26", "lvp", "lavapipe is of Mesa 26", ("trixie", "trixie-backports")),
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
    prefix = unpacked(release.packages, say, lambda made: _write_manifest(release, made))
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
    libraries = (prefix / LIBRARIES, python.parent.parent / "lib", Path("/") / LIBRARIES)
    paths = [path for path in sys.path if path and Path(path).exists()]
    environment = _environment(prefix / release.manifest, release) | {
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = (str(prefix / LOADER), "--library-path", ":".join(map(str, libraries)), str(python))
    return Installed(command, environment)


def _write_manifest(release: Release, prefix: Path) -> None:
    """The driver's path is relative to it: the folder can move."""
    driver = {"library_path": f"./{release.packages.holds}", "api_version": "1.3.0"}
    (prefix / release.manifest).write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
