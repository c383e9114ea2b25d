"""An artifact whose files are known to be the ones that its manifest was written for."""

import dataclasses
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from specprefill_jax.artifact.hashing import sha256_of
from specprefill_jax.artifact.locate import cache_folder
from specprefill_jax.artifact.manifest import FileEntry, Manifest
from specprefill_jax.errors import FileMissing, HashMismatch

log = logging.getLogger(__name__)

# Files up to this size are hashed at every load (a tenth of a second at most). Larger ones, the parameter
# archives of real models, are hashed once; after that a stamp of size, time and inode stands for the content.
STAMPED_ABOVE_BYTES = 64 << 20

Progress = Callable[[int, int], None]
"""Hears bytes hashed so far and bytes to hash in all."""


@dataclasses.dataclass(frozen=True)
class Artifact:
    """A directory and its manifest, the files checked."""

    directory: Path
    manifest: Manifest

    def path(self, name: str) -> Path:
        """The path of one of its files, by the name that the manifest uses."""
        return self.directory / name


def open_artifact(directory: Path, progress: Progress | None = None) -> Artifact:
    """Read the manifest of `directory` and check every file that it lists.

    Raises:
        FileMissing: the directory, or a file that the manifest lists, does not exist.
        HashMismatch: a file is not the one that the manifest was written for.
        ArtifactError: the manifest is missing or invalid.
    """
    artifact = Artifact(directory, Manifest.read(directory))
    verify_files(artifact, progress)
    return artifact


def verify_files(artifact: Artifact, progress: Progress | None = None, *, trust_stamps: bool = True) -> None:
    """Check the presence, size and sha256 of every file; files over 64 MB only when their stamp has changed.

    Args:
        trust_stamps: False hashes every file.

    Raises:
        FileMissing: a file does not exist.
        HashMismatch: a file has another size or another content.
    """
    pending: dict[str, FileEntry] = {}
    for name, entry in artifact.manifest.files.items():
        path = artifact.path(name)
        if not path.is_file():
            raise FileMissing(
                f"{path} is missing, though the manifest of {artifact.manifest.name!r} lists it. {_REPAIR}"
            )
        size = path.stat().st_size
        if size != entry.bytes:
            raise HashMismatch(f"{path} has {size} bytes, but its manifest says {entry.bytes}. {_REPAIR}")
        stamped = trust_stamps and size > STAMPED_ABOVE_BYTES
        if not stamped or _read_stamp(path) != _stamp(path, entry.sha256):
            pending[name] = entry
    done, total = 0, sum(entry.bytes for entry in pending.values())

    def count(read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress(done, total)

    for name, entry in pending.items():
        path = artifact.path(name)
        before = _stamp(path, entry.sha256)
        found = sha256_of(path, count)
        if found != entry.sha256:
            raise HashMismatch(f"{path} has sha256 {found}, but its manifest says {entry.sha256}. {_REPAIR}")
        if entry.bytes > STAMPED_ABOVE_BYTES:
            _write_stamp(path, before)


_REPAIR = (
    "The artifact is incomplete or was changed: copy it again, or build it again with `specprefill compile`."
)


def _stamp(path: Path, sha256: str) -> dict[str, object]:
    status = path.stat()
    return {"sha256": sha256, "bytes": status.st_size, "mtime_ns": status.st_mtime_ns, "inode": status.st_ino}


def _stamp_file(path: Path) -> Path:
    key = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()
    return cache_folder() / "verified" / f"{key}.json"


def _read_stamp(path: Path) -> object:
    try:
        return json.loads(_stamp_file(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_stamp(path: Path, stamp: dict[str, object]) -> None:
    """Keep the stamp; a cache that cannot be written costs another hashing next time, nothing else."""
    target = _stamp_file(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=target.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(stamp, file)
        os.replace(temporary, target)
    except OSError as error:
        log.warning("cannot note in %s that %s was checked: %s", target.parent, path, error)
