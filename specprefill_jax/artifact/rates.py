"""How fast an artifact's entries are on the devices that `specprefill tune` has measured: `rates.json`."""

import dataclasses
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

from specprefill_jax.artifact import strict
from specprefill_jax.artifact.beside import RATES_NAME, manifest_digest, replace
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.errors import ArtifactError

log = logging.getLogger(__name__)

SCHEMA = 1

EntryTimes = Mapping[str, float]
"""Milliseconds of one call, by the entry's name."""


@dataclasses.dataclass(frozen=True)
class MeasuredDevice:
    """What was measured on; rates hold for it alone.

    Attributes:
        driver: IREE's driver.
        description: what the driver, or the CPU, calls itself.
        driver_version: of a Vulkan device its own driver, such as "radv Mesa 25.0.7"; "" for a CPU.
        runtime: the version of IREE's runtime.
    """

    driver: str
    description: str
    driver_version: str
    runtime: str


@dataclasses.dataclass(frozen=True)
class Rates:
    """What was measured on one device.

    Attributes:
        device: on which.
        manifest: the digest of the manifest of the build that was measured.
        milliseconds: of one call of each entry, by the role of its model.
    """

    device: MeasuredDevice
    manifest: str
    milliseconds: Mapping[str, EntryTimes]


@dataclasses.dataclass(frozen=True)
class _File:
    schema: int
    devices: tuple[Rates, ...]


def read_rates(directory: Path, manifest: Manifest, device: MeasuredDevice) -> Mapping[str, EntryTimes]:
    """Milliseconds of each entry on `device` by role, of exactly this build; empty where nothing is known.

    Never raises: a request does not depend on rates. Whatever lies there and is of no use is said in the log,
    with the command that mends it.
    """
    path = directory / RATES_NAME
    mend = f"`specprefill tune {directory}` measures again"
    try:
        found = _read(path)
    except ArtifactError as error:
        log.warning("the rates are damaged and are ignored; %s. %s", mend, error)
        return {}
    digest = manifest_digest(manifest)
    for rates in found:
        if rates.device == device and rates.manifest == digest:
            return rates.milliseconds
    named = (device.driver, device.description)
    if any(rates.device == device for rates in found):
        log.warning("%s is of another build of the artifact and is ignored; %s", path, mend)
    elif any((rates.device.driver, rates.device.description) == named for rates in found):
        log.warning(
            "%s was measured on %s with another driver or IREE and is ignored; %s",
            path,
            device.description,
            mend,
        )
    return {}


def write_rates(directory: Path, rates: Rates) -> Path:
    """Put `rates` into the file, in place of earlier ones of the same device; other devices' stay.

    A reader finds the old file or the new one, never a part. A damaged file is replaced.

    Raises:
        ArtifactError: the file cannot be written.
    """
    path = directory / RATES_NAME
    try:
        others = [other for other in _read(path) if other.device != rates.device]
    except ArtifactError as error:
        log.warning("the damaged rates are replaced, other devices' among them. %s", error)
        others = []
    ordered = sorted((*others, rates), key=lambda each: dataclasses.astuple(each.device))
    replace(path, _File(SCHEMA, tuple(ordered)))
    return path


def _read(path: Path) -> tuple[Rates, ...]:
    """What the file holds; nothing where there is none.

    Raises:
        ArtifactError: it cannot be read, or does not follow the schema.
    """
    if not os.path.exists(path):  # unlike Path.exists it is False, not an error, below a closed directory
        return ()
    try:
        document = strict.read_json(path)
        if isinstance(document, Mapping) and document.get("schema") != SCHEMA:
            schema = document.get("schema")
            raise ArtifactError(f"{path}: schema {schema!r}, but this version reads schema {SCHEMA}")
        found = strict.decode(_File, document, str(path)).devices
    except (OverflowError, RecursionError) as error:  # numbers of 400 digits, thousands of brackets
        raise ArtifactError(f"{path} cannot be read: {error}") from error
    for rates in found:
        for role, times in rates.milliseconds.items():
            for entry, milliseconds in times.items():
                if not (math.isfinite(milliseconds) and milliseconds > 0):
                    raise ArtifactError(f"{path}: {role} {entry} takes {milliseconds} ms")
    return found
