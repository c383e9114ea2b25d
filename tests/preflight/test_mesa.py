"""Where the driver comes from: this machine's own, the cache, or Debian's packages. No network here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.errors import DeviceError
from specprefill_jax.preflight import mesa
from specprefill_jax.preflight.mesa import LAVAPIPE, Installed, installed_driver, radv

RADV = radv("PHOENIX")
VERSION = "25.0.7"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
# apt-get as far as it is used: a mirror, the packages to install, and downloads.
APT = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
*" --print-uris "*)
    echo "'{{}}' libc6_2.41-12_amd64.deb 1 SHA256:0"
    echo "'{{}}' g++_4%3a14.2_amd64.deb 1 SHA256:0" ;;
*" download "*) touch libc6.deb mesa.deb ;;
*" update") {update} ;;
indextargets*) echo {sites} ;;
esac
"""
DPKG = f"""#!/bin/sh
mkdir -p "$3/{LIBRARIES}" && cd "$3/{LIBRARIES}" &&
touch libvulkan_radeon.so libvulkan_lvp.so ld-linux-x86-64.so.2
"""


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no driver of the system's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(mesa, "_MANIFEST_FOLDERS", (str(tmp_path / "icd.d"),))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Puts apt-get and dpkg-deb of our own first in PATH; the file that notes apt-get's calls."""

    def install(sites: str = "http://mirror.test/debian/", update: str = "true") -> Path:
        folder, log = tmp_path / "bin", tmp_path / "apt.log"
        folder.mkdir()
        for name, text in (("apt-get", APT.format(log=log, sites=sites, update=update)), ("dpkg-deb", DPKG)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return install


def starts(version: str) -> Callable[[Installed], tuple[str, str]]:
    """A probe for whom every driver is of this version."""
    return lambda installed: (version, "")


def prefix(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "specprefill-jax" / f"mesa-{VERSION}"


def test_mesa_is_unpacked_once_and_whole(tools: Callable[..., Path], tmp_path: Path) -> None:
    log, said = tools(), list[str]()
    driver, version = installed_driver(RADV, starts("Mesa 25.0.7-2"), said.append)
    assert version == "Mesa 25.0.7-2"
    assert [line.split(" into ")[0] for line in said] == [f"downloading Mesa {VERSION}"]
    described = json.loads((prefix(tmp_path) / "radeon.json").read_text())
    assert described["ICD"]["library_path"] == f"./{LIBRARIES}/libvulkan_radeon.so", "the folder can move"
    assert driver.command[0] == str(prefix(tmp_path) / LIBRARIES / "ld-linux-x86-64.so.2")
    assert driver.environment["RADV_FORCE_FAMILY"] == "PHOENIX"
    calls = log.read_text()
    assert "mesa-vulkan-drivers=25.0.7* libvulkan1" in calls
    assert "download libc6=2.41-12 g++=4:14.2" in calls
    assert [path.name for path in prefix(tmp_path).parent.iterdir()] == [prefix(tmp_path).name]
    installed_driver(RADV, starts("Mesa 25.0.7-2"), said.append)
    assert (log.read_text(), len(said)) == (calls, 1)


def test_lavapipe_of_mesa_26_comes_from_the_backports(tools: Callable[..., Path], tmp_path: Path) -> None:
    log = tools()
    driver, version = installed_driver(LAVAPIPE, starts("Mesa 26.1.6-1~bpo13+1"), print)
    assert version == "Mesa 26.1.6-1~bpo13+1"
    assert "--target-release=trixie-backports install mesa-vulkan-drivers=26*" in log.read_text()
    manifest = Path(driver.environment["VK_DRIVER_FILES"])
    assert manifest == tmp_path / "cache" / "specprefill-jax" / "mesa-26" / "lvp.json"
    described = json.loads(manifest.read_text())
    assert described["ICD"]["library_path"] == f"./{LIBRARIES}/libvulkan_lvp.so"
    assert "RADV_FORCE_FAMILY" not in driver.environment


def test_a_download_that_fails_says_why_and_leaves_nothing(
    tools: Callable[..., Path], tmp_path: Path
) -> None:
    tools(update="echo 'E: no route to host' >&2; exit 100")
    with pytest.raises(DeviceError, match=r"cannot be downloaded: apt-get: E: no route to host\."):
        installed_driver(RADV, starts("Mesa 25.0.7"), print)
    assert list(prefix(tmp_path).parent.iterdir()) == []


def test_a_machine_without_debians_mirror_is_told_so(tools: Callable[..., Path]) -> None:
    tools(sites="http://mirror.test/ubuntu")
    with pytest.raises(DeviceError, match="apt is configured for no Debian mirror"):
        installed_driver(RADV, starts("Mesa 25.0.7"), print)


def test_a_machine_without_debians_tools_is_told_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceError, match="apt-get and dpkg-deb are not installed here"):
        installed_driver(RADV, starts("Mesa 25.0.7"), print)


def test_another_processor_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(DeviceError, match="x86-64 only, this is aarch64"):
        installed_driver(RADV, starts("Mesa 25.0.7"), print)


def test_a_driver_that_does_not_start_is_named_with_the_reason(tools: Callable[..., Path]) -> None:
    tools()
    with pytest.raises(DeviceError, match=r"does not start here: ends with 127 \(GLIBC\)"):
        installed_driver(RADV, lambda installed: ("", "ends with 127 (GLIBC)"), print)


@pytest.mark.parametrize(
    ("version", "taken"), [("Mesa 25.2.1", True), ("Mesa 24.3.4", False), ("Mesa 26.0.0", False)]
)
def test_the_systems_own_driver_is_taken_where_it_is_of_mesa_25(
    version: str, taken: bool, tools: Callable[..., Path], tmp_path: Path
) -> None:
    log = tools()
    (tmp_path / "icd.d").mkdir()
    manifest = tmp_path / "icd.d" / "radeon_icd.x86_64.json"
    manifest.touch()

    def probe(installed: Installed) -> tuple[str, str]:
        own = installed.environment["VK_DRIVER_FILES"] == str(manifest)
        return (version if own else "Mesa 25.0.7"), ""

    driver, found = installed_driver(RADV, probe, print)
    assert (found, log.exists()) == ((version, False) if taken else ("Mesa 25.0.7", True))
    assert (driver.command == (sys.executable,)) == taken
