"""Which tiles of a weight the workgroups of a product read, in what order: by the shader's own arithmetic.

A weight that is larger than the cache is streamed again for every workgroup that comes back to a tile after
the others, so the order decides about memory traffic. It is read off the address of the first load that a
workgroup makes from the weight: integer arithmetic on the workgroup's number, evaluated backwards from there.

Source: the SPIR-V specification 1.6.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from specprefill_jax.aot.spirv import Instruction, Shader

MOST_WORKGROUPS = 1 << 14  # of a product that is looked at; those of true models have some hundreds

_CONSTANT, _LOAD, _ACCESS, _DECORATE = 43, 61, 65, 71
_CONSTANTS = {41: 1, 42: 0, 46: 0}  # OpConstantTrue, OpConstantFalse, OpConstantNull
_EXTRACT, _SELECT, _PHI, _MATRIX_LOAD = 81, 169, 245, 4457
_BUILTIN, _BINDING, _WORKGROUP_ID = 11, 33, 26
_SAME = (113, 114, 124)  # conversions between integers
_PRODUCTS = {151: lambda a, b: a * b, 152: lambda a, b: _signed(a) * _signed(b)}  # of two words, in two words
_WORD = 0xFFFFFFFF


def _signed(value: int) -> int:
    return value - (1 << 32) if value >> 31 else value


_ARITHMETIC: dict[int, Callable[[int, int], int]] = {
    128: operator.add,
    130: operator.sub,
    132: operator.mul,
    134: operator.floordiv,
    135: lambda a, b: int(_signed(a) / _signed(b)),
    137: operator.mod,
    138: lambda a, b: _signed(a) - _signed(b) * int(_signed(a) / _signed(b)),
    139: lambda a, b: _signed(a) % _signed(b),
    170: operator.eq,
    171: operator.ne,
    172: operator.gt,
    173: lambda a, b: _signed(a) > _signed(b),
    174: operator.ge,
    175: lambda a, b: _signed(a) >= _signed(b),
    176: operator.lt,
    177: lambda a, b: _signed(a) < _signed(b),
    178: operator.le,
    179: lambda a, b: _signed(a) <= _signed(b),
    194: operator.rshift,
    195: lambda a, b: _signed(a) >> b,
    196: operator.lshift,
    197: operator.or_,
    198: operator.xor,
    199: operator.and_,
}
_UNDERSTOOD = {
    _CONSTANT,
    _LOAD,
    _ACCESS,
    _EXTRACT,
    _SELECT,
    _PHI,
    *_CONSTANTS,
    *_SAME,
    *_PRODUCTS,
    *_ARITHMETIC,
}


@dataclass(frozen=True)
class Tiles:
    """How many tiles a weight has, and whether the next workgroup reads the next tile or the same one."""

    count: int
    next_workgroup_next_tile: bool


def weight_tiles(shader: Shader, binding: int, workgroups: tuple[int, ...]) -> Tiles | None:
    """The tiles of the weight at a binding; None where the first load from it cannot be followed."""
    if not 1 < workgroups[0] * workgroups[1] * workgroups[2] <= MOST_WORKGROUPS:
        return None
    reader = _Reader(shader)
    address = reader.first_load(binding)
    if address is None:
        return None
    order = [(x, y, z) for z, y, x in product(*(range(size) for size in reversed(workgroups)))]
    try:
        tiles = [reader.value(address, workgroup) for workgroup in order]
    except (KeyError, ZeroDivisionError, RecursionError):
        return None
    return Tiles(len(set(tiles)), tiles[0] != tiles[1])


class _Reader:
    """Values of a shader by their ids, for the first lane of a workgroup and the first turn of loops."""

    def __init__(self, shader: Shader) -> None:
        self._makers: dict[int, Instruction] = {}
        self._builtins: dict[int, int] = {}
        self._bindings: dict[int, int] = {}
        self._loads: list[int] = []
        for instruction in shader.instructions:
            operands = instruction.operands
            if instruction.opcode == _DECORATE and operands[1] in (_BUILTIN, _BINDING):
                (self._builtins if operands[1] == _BUILTIN else self._bindings)[operands[0]] = operands[2]
            elif instruction.opcode in _UNDERSTOOD:
                self._makers[operands[1]] = instruction
            if instruction.opcode in (_LOAD, _MATRIX_LOAD):
                self._loads.append(operands[2])

    def first_load(self, binding: int) -> int | None:
        """The id of the index of the first element that is loaded from a binding."""
        for pointer in self._loads:
            access = self._makers.get(pointer)
            if (
                access is not None
                and access.opcode == _ACCESS
                and self._bindings.get(access.operands[2]) == binding
            ):
                return access.operands[-1]
        return None

    def value(self, of: int, workgroup: tuple[int, ...]) -> int:
        """The value of an id, as a word.

        Raises:
            KeyError: it follows from something else than integer arithmetic on the workgroup's number.
        """
        return self._evaluate(of, workgroup, {})

    def _evaluate(self, of: int, workgroup: tuple[int, ...], known: dict[int, int]) -> int:
        if of not in known:
            known[of] = self._made(self._makers[of], workgroup, known) & _WORD
        return known[of]

    def _made(self, maker: Instruction, workgroup: tuple[int, ...], known: dict[int, int]) -> int:
        opcode, operands = maker.opcode, maker.operands[2:]
        if opcode == _CONSTANT:
            return operands[0]
        if opcode in _CONSTANTS:
            return _CONSTANTS[opcode]
        if opcode == _EXTRACT:
            return self._component(operands[0], operands[1], workgroup, known)
        if opcode == _LOAD:
            return self._loaded(operands[0])
        if opcode in (*_SAME, _PHI):
            return self._evaluate(operands[0], workgroup, known)
        if opcode == _SELECT:
            chosen = operands[1] if self._evaluate(operands[0], workgroup, known) else operands[2]
            return self._evaluate(chosen, workgroup, known)
        compute = _ARITHMETIC[opcode]
        return int(compute(*(self._evaluate(operand, workgroup, known) for operand in operands[:2])))

    def _component(self, of: int, index: int, workgroup: tuple[int, ...], known: dict[int, int]) -> int:
        """A component of a long product or of a builtin: of the workgroup's number, or 0 as in lane 0."""
        source = self._makers[of]
        if source.opcode in _PRODUCTS:
            left, right = (self._evaluate(operand, workgroup, known) for operand in source.operands[2:4])
            return _PRODUCTS[source.opcode](left, right) >> (32 * index)
        return workgroup[index] if self._builtins[source.operands[2]] == _WORKGROUP_ID else 0

    def _loaded(self, pointer: int) -> int:
        """A scalar of a builtin or of the push constants: 0 shifts all tiles alike."""
        if pointer in self._builtins:
            return 0
        access = self._makers[pointer]
        if access.opcode != _ACCESS or access.operands[2] in self._bindings:
            raise KeyError(access.opcode)
        return 0
