"""Which programs have passed their self-test on which device, so that it runs once and not at every load."""

import hashlib
import importlib.metadata
import json
import logging
from pathlib import Path

from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.artifact.manifest import RUNTIME, Manifest
from specprefill_jax.runtime.device import Device

log = logging.getLogger(__name__)


def is_proven(manifest: Manifest, role: str, device: Device) -> bool:
    """Whether this model passed on this device, with this driver and this IREE, before."""
    return _note(manifest, role, device).is_file()


def note_proven(manifest: Manifest, role: str, device: Device) -> None:
    """Remember that it passed; a cache that cannot be written costs another self-test, nothing else."""
    note = _note(manifest, role, device)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(f"{role} of {manifest.name} on {device.description}\n", encoding="utf-8")
    except OSError as error:
        log.warning("cannot note in %s that the %s was tested: %s", note.parent, role, error)


def _note(manifest: Manifest, role: str, device: Device) -> Path:
    """Named after everything that the results follow from; the manifest holds the hash of every file."""
    facts = device.facts
    parts = (
        json.dumps(manifest.to_json(), sort_keys=True),
        role,
        device.driver,
        device.description,
        " ".join(sorted(device.cpu_flags)) if facts is None else facts.driver,
        importlib.metadata.version(RUNTIME),
    )
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return cache_folder() / "proven" / digest
