"""The schedule of a module, read from what iree-compile prints while it compiles it.

IREE 3.13 writes its program after each phase (`--dump-compilation-phases-to`) at next to no cost, and the
module's bytes stay the same. Two phases say all: `executable-sources` has each kernel with the types of its
tensors, `hal` has the commands, with numbers of workgroups and buffers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from specprefill_jax.artifact.schedule import LOADING, Dispatch, Schedule, Traffic
from specprefill_jax.errors import CompileError

_KERNEL = re.compile(r"^ *func\.func @([\w$]+)\(")
_LOADED = re.compile(r"dispatch\.tensor\.load .* -> tensor<([^>]*)>$")
_STORED = re.compile(r"dispatch\.tensor\.store .* : tensor<([^>]*)> -> ")
_FUNCTION = re.compile(r"^  util\.(?:func (?:public|private) @(?P<name>[\w$]+)\(|initializer\b)")
_MEMOIZED = re.compile(
    r"__(.+)_memoize_apply(?:_\d+)?"
)  # the commands of an entry that are the same at every call
_CONSTANT = re.compile(r"(%[\w-]+) = arith\.constant (\d+) : index")
_LOOK_UP = re.compile(r"(%[\w-]+) = hal\.executable\.lookup\.function .* function\(@.*::@([\w$]+)\) : i64")
_DISPATCH = re.compile(r"hal\.command_buffer\.dispatch<.*\)\[(%[\w-]+)\] workgroups\(\[([^\]]*)\]\)")
_ALLOCATED = re.compile(r"hal\.device\.queue\.alloca<.* : !hal\.buffer\{(%[\w-]+)\}")
_BINDING = re.compile(r"^ *\((%[\w-]+) : [!\w.]+\)\[%[\w-]+, (%[\w-]+)\]")
_PARAMETER = "%__parameter_"  # how IREE names the buffers of `flow.parameter.named`

_Key: TypeAlias = tuple[str, tuple[int, ...], tuple[tuple[str, int], ...]]  # a dispatch without its count


def read_schedule(folder: Path, name: str) -> Schedule:
    """The schedule of a module, from the folder that its phases were written to.

    Raises:
        CompileError: the compiler's text has another form than is known; names `name`.
    """
    try:
        traffic = _traffic(_phase(folder, "executable-sources"))
        entries: dict[str, Counter[_Key]] = {}
        for entry, dispatch in _dispatches(_phase(folder, "hal")):
            if dispatch[0] not in traffic:
                raise ValueError(f"{dispatch[0]} is dispatched and has no source")
            entries.setdefault(entry, Counter())[dispatch] += 1
        buffers = _buffers(_phase(folder, "hal"))
        if not entries:
            raise ValueError("no entry dispatches anything")
    except (KeyError, ValueError) as error:
        raise CompileError(
            f"{name}: the schedule that the compiler prints cannot be read: {error}"
        ) from error
    return Schedule(
        entries={
            entry: tuple(
                Dispatch(kernel, workgroups, dict(weights), count)
                for (kernel, workgroups, weights), count in counts.items()
            )
            for entry, counts in entries.items()
        },
        traffic=traffic,
        buffers=buffers,
    )


def _phase(folder: Path, phase: str) -> Iterator[str]:
    """The lines of a phase: `MODULE.NUMBER.PHASE.mlir`."""
    files = list(folder.glob(f"*.{phase}.mlir"))
    if len(files) != 1:
        raise ValueError(f"{len(files)} files of the phase {phase}")
    with files[0].open(encoding="utf-8") as lines:
        yield from lines


def _traffic(lines: Iterator[str]) -> dict[str, Traffic]:
    """Bytes that each kernel loads and stores, by the types of the tensors in its source."""
    reads: Counter[str] = Counter()
    writes: Counter[str] = Counter()
    kernel = ""
    for line in lines:
        if found := _KERNEL.match(line):
            kernel = found[1]
            reads[kernel] += 0
        elif found := _LOADED.search(line):
            reads[kernel] += _bytes(found[1])
        elif found := _STORED.search(line):
            writes[kernel] += _bytes(found[1])
    return {kernel: Traffic(reads[kernel], writes[kernel]) for kernel in reads}


def _bytes(tensor: str) -> int:
    """256x1024xf16 -> 524288; a bool takes a byte."""
    *sizes, element = tensor.split("x")
    bits = int(re.sub(r"\D", "", element))
    return math.prod(map(int, sizes)) * max(8, bits) // 8


def _commands(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, int], str]]:
    """Lines of the commands, each with the entry that submits it and the constants known there."""
    entry, constants = LOADING, dict[str, int]()
    for line in lines:
        if found := _FUNCTION.match(line):
            memoized = _MEMOIZED.fullmatch(found["name"] or "")
            entry = memoized[1] if memoized else found["name"] or LOADING
            constants.clear()
        elif found := _CONSTANT.search(line):
            constants[found[1]] = int(found[2])
        else:
            yield entry, constants, line


def _buffers(lines: Iterator[str]) -> dict[str, tuple[int, ...]]:
    """Bytes of each buffer that an entry allocates."""
    buffers: dict[str, tuple[int, ...]] = {}
    for entry, constants, line in _commands(lines):
        if found := _ALLOCATED.search(line):
            buffers[entry] = (*buffers.get(entry, ()), constants[found[1]])
        elif "hal.device.queue.alloca" in line:
            raise ValueError(f"a buffer of another form: {line.strip()[:80]}")
    return buffers


def _dispatches(lines: Iterator[str]) -> Iterator[tuple[str, _Key]]:
    """Each dispatch of the commands, and the entry that submits it."""
    kernels: dict[str, str] = {}
    dispatch: tuple[str, tuple[int, ...]] | None = None
    bindings: list[tuple[str, int]] = []
    for entry, constants, line in _commands(lines):
        if found := _LOOK_UP.search(line):
            kernels[found[1]] = found[2]
        elif found := _DISPATCH.search(line):
            dispatch = kernels[found[1]], tuple(constants[name] for name in found[2].split(", "))
            bindings = []
        elif "hal.command_buffer.dispatch" in line:
            raise ValueError(f"a dispatch of another form: {line.strip()[:80]}")
        elif dispatch is not None and (found := _BINDING.match(line)):
            bindings.append((found[1], constants[found[2]]))
        elif dispatch is not None:
            weights = ((str(i), size) for i, (buffer, size) in enumerate(bindings) if _PARAMETER in buffer)
            yield entry, (*dispatch, tuple(weights))
            dispatch = None
