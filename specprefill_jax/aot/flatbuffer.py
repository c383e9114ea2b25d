"""Reading FlatBuffers: as much of the format as IREE's executables need.

Source: the FlatBuffers documentation, "FlatBuffer Internals".
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table at a byte of a buffer. Fields are numbered from 0, as the schema lists them.

    Raises:
        ValueError: any reader, where the buffer ends before the field does.
    """

    data: bytes
    at: int

    @classmethod
    def root(cls, data: bytes) -> Table:
        """The table that a buffer is about."""
        return cls(data, _word(data, 0))

    def number(self, field: int) -> int:
        """An unsigned field of 32 bits; 0 where it is left out, as the format has it."""
        at = self._field(field)
        return 0 if at is None else _word(self.data, at)

    def text(self, field: int) -> str:
        """A string; "" where it is left out."""
        return self.bytes(field, 1).decode()

    def bytes(self, field: int, size: int) -> bytes:
        """A vector of elements of `size` bytes each; empty where it is left out."""
        at = self._target(field)
        if at is None:
            return b""
        start, length = at + 4, size * _word(self.data, at)
        if start + length > len(self.data):
            raise ValueError(f"a vector of {length} bytes at byte {start} of {len(self.data)}")
        return self.data[start : start + length]

    def numbers(self, field: int) -> tuple[int, ...]:
        """A vector of unsigned words."""
        words = self.bytes(field, 4)
        return struct.unpack(f"<{len(words) // 4}I", words)

    def tables(self, field: int) -> tuple[Table, ...]:
        """A vector of tables."""
        return tuple(self._tables(field))

    def _tables(self, field: int) -> Iterator[Table]:
        at = self._target(field)
        for index in range(0 if at is None else _word(self.data, at)):
            place = (at or 0) + 4 + 4 * index
            yield Table(self.data, place + _word(self.data, place))

    def _target(self, field: int) -> int | None:
        at = self._field(field)
        return None if at is None else at + _word(self.data, at)

    def _field(self, field: int) -> int | None:
        """Where a field stands: the table begins with the way back to a list of its fields' offsets."""
        fields = self.at - struct.unpack("<i", _piece(self.data, self.at, 4))[0]
        entry = 4 + 2 * field
        if entry + 2 > struct.unpack("<H", _piece(self.data, fields, 2))[0]:
            return None
        offset = struct.unpack("<H", _piece(self.data, fields + entry, 2))[0]
        return self.at + offset if offset else None


def _word(data: bytes, at: int) -> int:
    return struct.unpack("<I", _piece(data, at, 4))[0]


def _piece(data: bytes, at: int, length: int) -> bytes:
    if at < 0 or at + length > len(data):
        raise ValueError(f"{length} bytes at byte {at} of {len(data)}")
    return data[at : at + length]
