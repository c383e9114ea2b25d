"""sha256 of files: what a manifest pins."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from specprefill_jax.artifact import beside
from specprefill_jax.artifact.manifest import MANIFEST_NAME, FileEntry

# Large enough that hashing is not bound by calls, small enough that progress moves several times a second.
_PIECE_BYTES = 8 << 20


def sha256_of(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """The sha256 of a file's content, as 64 hex digits. `on_bytes` hears the bytes of each read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
            if on_bytes is not None:
                on_bytes(len(piece))
    return digest.hexdigest()


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """An entry for every file below `directory`, sorted by name: the manifest's `files`.

    The manifest itself is none of them, nor are rates, which come and go.
    """
    names = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {
        name: FileEntry(sha256_of(path), path.stat().st_size)
        for name, path in sorted(names.items())
        if name not in (MANIFEST_NAME, *beside.NAMES)
    }
