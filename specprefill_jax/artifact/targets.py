"""Compile targets as data: the one reader of compile/targets/, one TOML file for each device name.

The compile side takes flags and number formats from it, the serve side how to recognize the device.
"""

import dataclasses
import functools
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

from specprefill_jax.artifact import strict
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.artifact.manifest import DRIVERS, NUMERICS
from specprefill_jax.errors import ArtifactError, DeviceError, TargetError, Unproven

FOLDER = "compile/targets"


@dataclasses.dataclass(frozen=True)
class KnownTarget:
    """A name for `--device`: one file of compile/targets/, whose name it is.

    Attributes:
        about: what it is for, in a few words.
        driver: IREE's driver.
        target: what the compiler calls it; "host" is this machine's CPU.
        match: a regular expression to be found in the names of the devices it means, case aside; "" in any.
        flags: of iree-compile.
        numerics: formats of the matrices that compile, this target's own first.
        tiled: whether matrices are stored in the tiles of the CPU's kernel.
        cpu_features: the /proc/cpuinfo flags that the code may use; of a host, those that it has.
        cooperative: cooperative matrix products (a, b, result) that every such device has.
        subgroup_sizes: subgroup sizes that the code may ask for; the device must have them all.
        tuning: a transform dialect library for iree-compile, relative to compile/; "" for none.
        unproven: why artifacts for it must not be run; "" where a self-test can prove them.
    """

    name: str
    about: str
    driver: str
    target: str
    match: str
    flags: tuple[str, ...]
    numerics: tuple[str, ...]
    tiled: bool
    cpu_features: tuple[str, ...]
    cooperative: tuple[tuple[str, ...], ...]
    subgroup_sizes: tuple[int, ...]
    tuning: str
    unproven: str


_OPTIONAL: Mapping[str, object] = {
    "match": "",
    "tiled": False,
    "cpu_features": [],
    "cooperative": [],
    "subgroup_sizes": [],
    "tuning": "",
    "unproven": "",
}


@functools.cache
def known_targets() -> Mapping[str, KnownTarget]:
    """The targets that come with the package, by name.

    Raises:
        FileMissing: the installation is incomplete.
        TargetError: a file does not follow the schema.
    """
    return read_targets(embedded(FOLDER))


def known_target(name: str) -> KnownTarget:
    """The target of a device name.

    Raises:
        DeviceError: the name is unknown; the message lists the known ones.
    """
    targets = known_targets()
    if name not in targets:
        raise DeviceError(f"unknown device {name!r}; the known ones are {', '.join(targets)}")
    return targets[name]


def check_runnable(target: KnownTarget) -> None:
    """Refuse a target that can only be compiled for.

    Raises:
        Unproven: nothing can prove that its artifacts compute right.
    """
    if target.unproven:
        raise Unproven(
            f"{target.name!r} can be compiled for but not run: {target.unproven}. Use another device; "
            "`specprefill devices` lists them"
        )


def read_targets(folder: Path) -> dict[str, KnownTarget]:
    """The targets of a folder, sorted by name.

    Raises:
        TargetError: a file is not TOML, or a field is unknown, missing, or cannot be.
    """
    return {path.stem: _read(path) for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem)}


def _read(path: Path) -> KnownTarget:
    where = f"{path.parent.name}/{path.name}"
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TargetError(f"{where} cannot be read as TOML: {error}") from error
    if "name" in fields:
        raise TargetError(f"{where}: holds unknown name; a target is named by its file")
    try:
        target = strict.decode(KnownTarget, {"name": path.stem, **_OPTIONAL, **fields}, where)
    except ArtifactError as error:
        raise TargetError(str(error)) from error
    fault = _fault(target, path.parent.parent)
    if fault:
        raise TargetError(f"{where}: {fault}")
    return target


def _fault(target: KnownTarget, base: Path) -> str:
    """What types alone cannot say; "" where nothing is wrong."""
    try:
        re.compile(target.match)
    except re.error as error:
        return f"match {target.match!r} is not a regular expression: {error}"
    if target.driver not in DRIVERS:
        return f"driver {target.driver!r} is none of {', '.join(DRIVERS)}"
    strange = [numerics for numerics in target.numerics if numerics not in NUMERICS]
    if strange or not target.numerics:
        return f"numerics must be some of {', '.join(NUMERICS)}, not {list(target.numerics)}"
    if any(len(product) != 3 for product in target.cooperative):
        return "cooperative: a product has three element types, of a, b and the result"
    if any(size < 1 or size & (size - 1) for size in target.subgroup_sizes):
        return f"subgroup_sizes must be powers of two, not {list(target.subgroup_sizes)}"
    if target.driver != "vulkan" and (target.cooperative or target.subgroup_sizes):
        return "cooperative and subgroup_sizes are for the driver vulkan"
    if target.tuning and not (base / target.tuning).is_file():
        return f"tuning {target.tuning!r} is no file below {base.name}/"
    return ""
