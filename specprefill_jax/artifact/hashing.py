"""sha256 of files: what a manifest pins."""

import hashlib
from pathlib import Path

from specprefill_jax.artifact.manifest import MANIFEST_NAME, FileEntry


def sha256_of(path: Path) -> str:
    """The sha256 of a file's content, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(directory: Path) -> dict[str, FileEntry]:
    """An entry for every file below `directory` but the manifest, sorted by name: the manifest's `files`."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    names = {path.relative_to(directory).as_posix(): path for path in paths}
    return {
        name: FileEntry(sha256_of(path), path.stat().st_size)
        for name, path in sorted(names.items())
        if name != MANIFEST_NAME
    }
