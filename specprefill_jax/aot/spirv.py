"""SPIR-V read as words: the cooperative matrix products of a shader, and what their operands are.

Source: the SPIR-V specification 1.6 and SPV_KHR_cooperative_matrix.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

MAGIC = 0x07230203
_HEADER_WORDS = 5

_NOP, _NAME, _MEMBER_NAME, _DECORATE, _MEMBER_DECORATE = 0, 5, 6, 71, 72
_ENTRY_POINT, _CAPABILITY, _TYPE_INT, _TYPE_FLOAT = 15, 17, 21, 22
_CONVERT = 115
_TYPE_MATRIX, _PRODUCT = 4456, 4459
_SUBGROUP_OPERATIONS = range(345, 367)  # OpGroupNonUniformShuffle to OpGroupNonUniformQuadSwap
_ABOUT_IDS = (_NAME, _MEMBER_NAME, _DECORATE, _MEMBER_DECORATE)

Words = tuple[int, ...]


@dataclass(frozen=True)
class Instruction:
    """One instruction: where its first word stands, its opcode and the words after the first."""

    at: int
    opcode: int
    operands: Words


@dataclass(frozen=True)
class Product:
    """One cooperative multiply-add, result = a b + c: the result ids of its operands and their element types.

    `a_source` and `b_source` are the ids before a conversion, where the operand comes from one.
    """

    at: int
    a: int
    b: int
    types: tuple[str, ...]  # of a, b, c and the result
    a_source: int | None
    b_source: int | None


class Shader:
    """One SPIR-V module.

    Raises:
        ValueError: the words are no SPIR-V module.
    """

    def __init__(self, words: Words) -> None:
        self.words = words
        self.instructions = tuple(_instructions(words))

    @classmethod
    def from_bytes(cls, data: bytes) -> Shader:
        """Raises: ValueError, as the class."""
        if len(data) % 4:
            raise ValueError(f"{len(data)} bytes are not whole words")
        return cls(struct.unpack(f"<{len(data) // 4}I", data))

    def to_bytes(self) -> bytes:
        return struct.pack(f"<{len(self.words)}I", *self.words)

    @property
    def name(self) -> str:
        """Of its entry point; "" without one."""
        for instruction in self.instructions:
            if instruction.opcode == _ENTRY_POINT:
                text = struct.pack(f"<{len(instruction.operands) - 2}I", *instruction.operands[2:])
                return text.partition(b"\0")[0].decode(errors="replace")
        return ""

    def capabilities(self) -> frozenset[int]:
        """What it declares to need, by the numbers of the specification."""
        return frozenset(
            instruction.operands[0]
            for instruction in self.instructions
            if instruction.opcode == _CAPABILITY and instruction.operands
        )

    def joins_lanes(self) -> bool:
        """Whether values of a subgroup's lanes meet: what comes out depends on how many they are."""
        return any(instruction.opcode in _SUBGROUP_OPERATIONS for instruction in self.instructions)

    def products(self) -> tuple[Product, ...]:
        """Its cooperative multiply-adds. An operand that is no cooperative matrix has the type "unknown"."""
        matrices = self._matrix_types()
        types: dict[int, str] = {}
        sources: dict[int, int] = {}
        found = []
        for instruction in self.instructions:
            if instruction.opcode in _ABOUT_IDS or len(instruction.operands) < 2:
                continue
            result_type, result, *operands = instruction.operands
            if result_type in matrices:
                types[result] = matrices[result_type]
            if instruction.opcode == _CONVERT:
                sources[result] = operands[0]
            if instruction.opcode == _PRODUCT:
                found.append((instruction.at, (*operands[:3], result)))
        return tuple(
            Product(
                at=at,
                a=ids[0],
                b=ids[1],
                types=tuple(types.get(id, "unknown") for id in ids),
                a_source=sources.get(ids[0]),
                b_source=sources.get(ids[1]),
            )
            for at, ids in found
        )

    def products_beside(self, known: frozenset[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Element types (a, b, c, result) of the products that are none of the known (a, b, result)."""
        return [
            (a, b, c, result)
            for a, b, c, result in (product.types for product in self.products())
            if (a, b, result) not in known or c != result
        ]

    def without_conversions(self) -> Shader:
        """The same shader, its products reading their operands from before a conversion."""
        words = list(self.words)
        bypassed = set()
        for product in self.products():
            operands = ((product.a, product.a_source), (product.b, product.b_source))
            for offset, (operand, source) in enumerate(operands, start=3):
                if source is not None:
                    words[product.at + offset] = source
                    bypassed.add(operand)
        return Shader(tuple(words))._without(bypassed)

    def _without(self, results: set[int]) -> Shader:
        """Conversions that nothing reads any more become no-operations: the length stays."""
        # Any word counts, a number that looks like an id too: then a conversion stays, which does no harm.
        read = {
            word
            for instruction in self.instructions
            for word in instruction.operands[2 if instruction.opcode == _CONVERT else 0 :]
        }
        words = list(self.words)
        for instruction in self.instructions:
            if instruction.opcode == _CONVERT and instruction.operands[1] in results - read:
                length = len(instruction.operands) + 1
                words[instruction.at : instruction.at + length] = [1 << 16 | _NOP] * length
        return Shader(tuple(words))

    def _matrix_types(self) -> dict[int, str]:
        """The ids of cooperative matrix types, and their element types."""
        elements, matrices = {}, {}
        for instruction in self.instructions:
            result, *rest = instruction.operands or (0,)
            if instruction.opcode == _TYPE_FLOAT:
                elements[result] = "bf16" if rest == [16, 0] else f"f{rest[0]}"
            elif instruction.opcode == _TYPE_INT:
                elements[result] = f"{'s' if rest[1] else 'u'}{rest[0]}"
            elif instruction.opcode == _TYPE_MATRIX:
                matrices[result] = elements[rest[0]]
        return matrices


def _instructions(words: Words) -> Iterator[Instruction]:
    if len(words) < _HEADER_WORDS or words[0] != MAGIC:
        raise ValueError("no SPIR-V header")
    at = _HEADER_WORDS
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if length == 0 or at + length > len(words):
            raise ValueError(f"the instruction at word {at} has {length} words of {len(words) - at} left")
        yield Instruction(at, opcode, words[at + 1 : at + length])
        at += length
