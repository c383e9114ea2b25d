"""Files that lie beside those of the manifest: what was found out about an artifact after it was compiled.

They are none of the manifest's: an artifact is the same with or without them.
"""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.errors import ArtifactError

RATES_NAME = "rates.json"
CALIBRATION_NAME = "calibration.json"
NAMES = (RATES_NAME, CALIBRATION_NAME)


def manifest_digest(manifest: Manifest) -> str:
    """A sha256 of the manifest, and so of the build: it holds the hash of every file."""
    return hashlib.sha256(json.dumps(manifest.to_json(), sort_keys=True).encode()).hexdigest()


def check_writable(path: Path) -> None:
    """Find out whether `replace` could write, before minutes are spent on what to write.

    Raises:
        ArtifactError: it could not.
    """
    scratch = _scratch(path)
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a directory")
        scratch.touch()
        scratch.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def replace(path: Path, document: object) -> None:
    """Write a dataclass as JSON. A reader finds the old file or the new one, never a part.

    Raises:
        ArtifactError: the file cannot be written.
    """
    assert dataclasses.is_dataclass(document)
    assert not isinstance(document, type)
    text = json.dumps(dataclasses.asdict(document), indent=1, ensure_ascii=False, allow_nan=False)
    scratch = _scratch(path)
    try:
        scratch.write_text(text + "\n", encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise _unwritable(path, error) from error


def _scratch(path: Path) -> Path:
    """Beside the file, so that one takes the other's place at once, with the permissions of a new file."""
    return path.with_name(f".{path.name}-{os.getpid()}")


def _unwritable(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(
        f"{path} cannot be written: {error.strerror or error}. It lies in the artifact's directory: make "
        "that writable, or copy the artifact to where you can write and use the copy"
    )
