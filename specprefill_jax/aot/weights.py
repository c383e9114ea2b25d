"""Parameter archives: a checkpoint's tensors in the build's format and layout, one in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import iree.runtime as iree
import numpy as np

from specprefill_jax.aot.export import DTYPES, Shapes
from specprefill_jax.models.checkpoint import iterate_tensors, parameter_specs
from specprefill_jax.models.config import TextConfig


def write_archive(
    checkpoint: Path, config: TextConfig, shapes: Shapes, path: Path, say: Callable[[str], None]
) -> None:
    """Writes the .irpa that the module maps, keys as in the checkpoint.

    Converted tensors go through a scratch file beside it, so that a checkpoint larger than memory fits.

    Raises:
        FileMissing, CheckpointError: as `models.checkpoint.iterate_tensors`.
    """
    kinds = {spec.key: spec.kind for spec in parameter_specs(config)}
    tensors = iterate_tensors(checkpoint, config, DTYPES[shapes.numerics])
    index = iree.ParameterIndex()
    say(f"writing {path.name}")
    with tempfile.TemporaryFile(dir=path.parent) as scratch:
        places = []
        for key, tensor in tensors:
            if scratch.tell() >> 30 != (scratch.tell() + tensor.nbytes) >> 30:
                say(f"writing {path.name}: {(scratch.tell() + tensor.nbytes) >> 30} GiB")
            if shapes.tile is not None and kinds[key] == "matrix":
                tensor = shapes.tile.tile(tensor)
            places.append((key, scratch.tell(), tensor.nbytes))
            np.ascontiguousarray(tensor).tofile(scratch)
        scratch.flush()
        data = np.memmap(scratch, dtype=np.uint8, mode="r")
        for key, start, size in places:
            index.add_buffer(key, data[start : start + size])
        index.create_archive_file(str(path))
