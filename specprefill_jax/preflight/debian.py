"""Packages of Debian 13 in the user's cache: unpacked with their own C library, as any user.

Nothing of the system changes. The mirror is the one that this machine's apt is configured for.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.errors import DeviceError

LIBRARIES = Path("usr/lib/x86_64-linux-gnu")
LOADER = LIBRARIES / "ld-linux-x86-64.so.2"  # starts a program of the packages under their C library
_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
_TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Packages:
    """Packages that are unpacked together with what they depend on.

    Attributes:
        name: what they are called in messages.
        folder: in the user's cache.
        wanted: as apt-get install takes them.
        holds: a file that must be there afterwards.
        megabytes: to download, about.
        otherwise: what makes the download unnecessary; stands at the end of every refusal.
        suites: of Debian that hold them and what they depend on; the last one is preferred.
    """

    name: str
    folder: str
    wanted: tuple[str, ...]
    holds: Path
    megabytes: int
    otherwise: str
    suites: tuple[str, ...] = ("trixie",)


def unpacked(
    packages: Packages, say: Callable[[str], None], finish: Callable[[Path], None] = lambda prefix: None
) -> Path:
    """The folder with the packages; made in one move, so it is whole or not there.

    Args:
        say: hears what takes long.
        finish: adds to the folder before it is in its place.

    Raises:
        DeviceError: they cannot be had here; the message says why.
    """
    prefix = cache_folder() / packages.folder
    if prefix.is_dir():
        return prefix
    if platform.machine() != "x86_64":
        raise DeviceError(
            f"{packages.name} is unpacked on x86-64 only, this is {platform.machine()}. {packages.otherwise}"
        )
    missing = [tool for tool in ("apt-get", "dpkg-deb") if shutil.which(tool) is None]
    if missing:
        raise DeviceError(
            f"preflight unpacks {packages.name} from Debian's packages, and {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here. {packages.otherwise}"
        )
    say(f"downloading {packages.name} into {prefix} ({packages.megabytes} MB, once)")
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=prefix.parent) as scratch:
            made = Path(scratch) / "made"
            _Apt(packages, Path(scratch)).unpack(made)
            finish(made)
            if not prefix.is_dir():  # another process may have been faster
                made.rename(prefix)
    except OSError as error:
        raise DeviceError(
            f"{packages.name} cannot be unpacked into {prefix}: {error.strerror or error}"
        ) from error
    return prefix


class _Apt:
    """apt-get that knows the packages' suites, of this machine's own mirror, and writes to `scratch` only."""

    def __init__(self, packages: Packages, scratch: Path) -> None:
        self._packages, self._scratch = packages, scratch

    def unpack(self, prefix: Path) -> None:
        """Download the packages and what they depend on, and unpack them."""
        apt, packages = self._command(), self._packages
        self._run([*apt, "update"])
        options = ("--print-uris", "--yes", "--no-install-recommends")
        release = f"--target-release={packages.suites[-1]}"
        listed = self._run([*apt, *options, release, "install", *packages.wanted])
        names = re.findall(r"^'\S+' (\S+)_(\S+)_\S+\.deb ", listed, re.MULTILINE)
        versions = [f"{name}={version.replace('%3a', ':')}" for name, version in names]
        downloads = self._scratch / "packages"
        downloads.mkdir()
        self._run([*apt, "download", *versions], downloads)
        for package in sorted(downloads.glob("*.deb")):
            self._run(["dpkg-deb", "-x", str(package), str(prefix)])
        if not (prefix / packages.holds).is_file() or not (prefix / LOADER).is_file():
            raise DeviceError(
                f"Debian's packages of {packages.name} hold no {packages.holds.name}, or no C library"
            )

    def _command(self) -> list[str]:
        scratch = self._scratch
        for name in ("lists", "archives"):
            (scratch / name / "partial").mkdir(parents=True)
        (scratch / "status").touch()
        mirror = self._mirror()
        sources = (f"deb [signed-by={_KEYS}] {mirror} {suite} main\n" for suite in self._packages.suites)
        (scratch / "sources.list").write_text("".join(sources))
        options = {
            "Dir::Etc::sourcelist": scratch / "sources.list",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": scratch / "lists",
            "Dir::State::status": scratch / "status",
            "Dir::Cache": scratch,
            "APT::Sandbox::User": "root",  # the sandbox's user may not write there
        }
        words = (word for name, value in options.items() for word in ("-o", f"{name}={value}"))
        return ["apt-get", "-q", *words]

    def _mirror(self) -> str:
        """The Debian mirror that this machine's apt is configured for.

        Raises:
            DeviceError: it has none.
        """
        sites = self._run(["apt-get", "indextargets", "--format", "$(SITE)", "Identifier: Packages"]).split()
        mirrors = [site.rstrip("/") for site in sites if site.rstrip("/").endswith("/debian")]
        if not mirrors:
            raise DeviceError(
                f"apt is configured for no Debian mirror, which {self._packages.name} comes from. "
                f"{self._packages.otherwise}"
            )
        return mirrors[0]

    def _run(self, command: Sequence[str], folder: Path | None = None) -> str:
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
            raise DeviceError(
                f"{self._packages.name} cannot be downloaded: {command[0]}: {words[-1]}. "
                f"{self._packages.otherwise}"
            )
        return done.stdout
