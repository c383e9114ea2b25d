"""Checkpoints in safetensors files, single or sharded, as NumPy views of the mapped files.

The `safetensors` package reads bf16 only through a framework and checks nothing across shards, so the format
is read here: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, data_offsets),
then the bytes.
Source: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np

from specprefill_jax.errors import CheckpointError, FileMissing

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

DTYPES: Final[Mapping[str, np.dtype]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
_MOST_HEADER_BYTES: Final = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorSpec:
    """What a writer must know of a tensor before its bytes: the header comes first in the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Entry:
    spec: TensorSpec
    begin: int
    end: int


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint directory, as a read-only view of its mapped file: nothing is loaded yet.

    Raises:
        FileMissing: the directory, its safetensors file, or a shard that the index names is not there.
        CheckpointError: a file is truncated or malformed, a tensor is in two shards, or index and shards
            disagree.
    """
    index, single = directory / INDEX_FILE, directory / SINGLE_FILE
    if not index.is_file():
        if not single.is_file():
            raise FileMissing(
                f"{directory} holds no checkpoint: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
            )
        return read_file(single)
    placed = _read_index(index)
    if single.is_file() and SINGLE_FILE not in placed.values():
        raise CheckpointError(
            f"{directory} holds two checkpoints, {SINGLE_FILE} and the shards of {INDEX_FILE}; remove one"
        )
    return _read_shards(directory, placed)


def read_file(file: Path) -> dict[str, np.ndarray]:
    """Every tensor of one safetensors file, as a read-only view of the mapped file.

    Raises:
        FileMissing: there is no such file.
        CheckpointError: it is truncated or malformed; the message names the file and the tensor.
    """
    if not file.is_file():
        raise FileMissing(f"{file} does not exist")
    try:
        entries, start = _read_header(file)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    data = np.memmap(file, dtype=np.uint8, mode="r").view(np.ndarray)[start:]
    return {
        entry.spec.name: data[entry.begin : entry.end].view(entry.spec.dtype).reshape(entry.spec.shape)
        for entry in entries
    }


def write_file(file: Path, specs: Sequence[TensorSpec], tensors: Iterable[np.ndarray]) -> None:
    """Writes one safetensors file, one tensor in memory at a time. `tensors` follow `specs` in order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        span = [offset, offset + spec.nbytes]
        header[spec.name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin aligned
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for spec, tensor in zip(specs, tensors, strict=True):
            if tensor.dtype != spec.dtype or tensor.shape != spec.shape:
                raise CheckpointError(
                    f"{spec.name} was announced as {spec.dtype} {list(spec.shape)}, but is "
                    f"{tensor.dtype} {list(tensor.shape)}"
                )
            out.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def write_tensors(
    directory: Path, specs: Sequence[TensorSpec], tensors: Iterable[np.ndarray], shard_bytes: int
) -> None:
    """Writes a checkpoint directory: one file where it fits `shard_bytes`, else shards and their index."""
    directory.mkdir(parents=True, exist_ok=True)
    shards = list(_shards(specs, shard_bytes))
    stream = iter(tensors)
    if len(shards) == 1:
        write_file(directory / SINGLE_FILE, shards[0], stream)
        return
    placed = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_file(directory / name, shard, (next(stream) for _ in shard))
        placed.update({spec.name: name for spec in shard})
    index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": placed}
    (directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _shards(specs: Sequence[TensorSpec], shard_bytes: int) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    size = 0
    for spec in specs:
        if shard and size + spec.nbytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append(spec)
        size += spec.nbytes
    yield shard


def _read_index(index: Path) -> Mapping[str, str]:
    """Tensor name -> shard file name."""
    try:
        placed = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=_unique)["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{index} is not valid JSON: {error}") from None
    except CheckpointError as error:
        raise CheckpointError(f"{index}: {error}") from None
    except (KeyError, TypeError):
        raise CheckpointError(f"{index} has no weight_map") from None
    if not isinstance(placed, dict) or not all(isinstance(name, str) for name in placed.values()):
        raise CheckpointError(f"{index}: weight_map must name a file for each tensor")
    for name in placed.values():
        if Path(name).name != name:
            raise CheckpointError(f"{index} places a tensor in {name!r}; shards must lie beside the index")
    return placed


def _read_shards(directory: Path, placed: Mapping[str, str]) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = {}
    found_in: dict[str, str] = {}
    for shard in sorted(set(placed.values())):
        if not (directory / shard).is_file():
            count = sum(name == shard for name in placed.values())
            raise FileMissing(
                f"{directory / shard} does not exist, but {INDEX_FILE} places {count} tensors in it; "
                "fetch the missing shard"
            )
        for name, tensor in read_file(directory / shard).items():
            if name in found_in:
                raise CheckpointError(f"{name} is in two shards of {directory}: {found_in[name]} and {shard}")
            if name not in placed:
                raise CheckpointError(f"{name} is in {directory / shard}, but {INDEX_FILE} does not name it")
            tensors[name], found_in[name] = tensor, shard
    for name, shard in placed.items():
        if found_in.get(name) != shard:
            elsewhere = f" (it is in {found_in[name]})" if name in found_in else ""
            raise CheckpointError(
                f"{INDEX_FILE} places {name} in {directory / shard}, which lacks it{elsewhere}"
            )
    return tensors


def _read_header(file: Path) -> tuple[list[_Entry], int]:
    """The file's tensors in the order of their bytes, and where those bytes start."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or (length <= _MOST_HEADER_BYTES and 8 + length > size):
            raise CheckpointError(
                f"the file is truncated: it has {size} bytes, and its header alone needs "
                f"{8 if size < 8 else 8 + length}; fetch it again"
            )
        if length > _MOST_HEADER_BYTES:
            raise CheckpointError(
                f"this is no safetensors file: its header would have {length} bytes; the format allows "
                f"{_MOST_HEADER_BYTES}"
            )
        text = stream.read(length)
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"this is no safetensors file: its header is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointError("this is no safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    entries = sorted(
        (_entry(name, fields) for name, fields in header.items()), key=lambda e: (e.begin, e.end)
    )
    _check_layout(entries, size - 8 - length)
    return entries, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated name would otherwise win silently."""
    unique = {}
    for name, value in pairs:
        if name in unique:
            raise CheckpointError(f"{name} is named twice")
        unique[name] = value
    return unique


def _entry(name: str, fields: Any) -> _Entry:
    try:
        dtype_name, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        whole = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(f"{name} needs a dtype, a shape and two data_offsets") from None
    if not whole:
        raise CheckpointError(f"{name}: shape {shape} and data_offsets {[begin, end]} must be whole numbers")
    if not isinstance(dtype_name, str) or dtype_name not in DTYPES:
        raise CheckpointError(f"{name} has the unknown dtype {dtype_name!r}; known are {', '.join(DTYPES)}")
    spec = TensorSpec(name, DTYPES[dtype_name], tuple(shape))
    if end - begin != spec.nbytes:
        raise CheckpointError(
            f"{name} is {dtype_name} {shape}, which takes {spec.nbytes} bytes, but its data_offsets "
            f"{[begin, end]} span {end - begin}"
        )
    return _Entry(spec, begin, end)


def _check_layout(entries: Sequence[_Entry], data_bytes: int) -> None:
    """The tensors fill the data exactly, as the format demands: no overlap, no hole, no bytes to spare."""
    at, before = 0, "the header"
    for entry in entries:
        name = entry.spec.name
        if entry.end > data_bytes:
            raise CheckpointError(
                f"the file is truncated: {name} ends at byte {entry.end} of the data, which has "
                f"{data_bytes}; fetch it again"
            )
        if entry.begin < at:
            raise CheckpointError(f"{before} and {name} overlap by {at - entry.begin} bytes")
        if entry.begin > at:
            raise CheckpointError(f"{entry.begin - at} bytes between {before} and {name} belong to no tensor")
        at, before = entry.end, name
    if at != data_bytes:
        raise CheckpointError(f"{data_bytes - at} bytes after {before} belong to no tensor")
