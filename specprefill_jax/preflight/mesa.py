"""The driver that plays the GPU: RADV's null device, this machine's own or Mesa 25.0.7 in the user's cache.

RADV_FORCE_FAMILY gives a device of that family without a GPU. Mesa 26 has taken it away, older versions
compile otherwise, so only Mesa 25 will do. Debian 13 has 25.0.7: its packages are unpacked with their own C
library, as any user, and nothing of the system changes.
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

VERSION = "25.0.7"
_DRIVER = LIBRARIES / "libvulkan_radeon.so"
_MESA = Packages(
    name=f"Mesa {VERSION}",
    folder=f"mesa-{VERSION}",
    wanted=(f"mesa-vulkan-drivers={VERSION}*", "libvulkan1"),
    holds=_DRIVER,
    megabytes=63,
    otherwise="Where the system's own RADV is of Mesa 25, nothing is downloaded",
)
_MANIFEST = "radeon.json"
_MANIFEST_FOLDERS = ("/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d", "/usr/share/vulkan/icd.d")
_USABLE = re.compile(r"Mesa 25\.")


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
    prefix = unpacked(_MESA, say, _manifest)
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
    libraries = (prefix / LIBRARIES, python.parent.parent / "lib", Path("/") / LIBRARIES)
    paths = [path for path in sys.path if path and Path(path).exists()]
    environment = _environment(prefix / _MANIFEST, family) | {
        "PYTHONHOME": sys.base_prefix,
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = (str(prefix / LOADER), "--library-path", ":".join(map(str, libraries)), str(python))
    return Installed(command, environment)


def _manifest(prefix: Path) -> None:
    """What the Vulkan loader reads, beside the driver: the folder can move."""
    driver = {"library_path": f"./{_DRIVER}", "api_version": "1.3.0"}
    (prefix / _MANIFEST).write_text(json.dumps({"file_format_version": "1.0.0", "ICD": driver}))
