"""A kernel's disassembly (RDNA3, as RADV prints it) as a tree: instructions and loops, each with its turns.

A loop is what a branch back encloses. How often it turns is read from its counter: a register that an
instruction of the loop steps, and that another compares with a constant.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

# What ACO's own statistics take for the turns of a loop, whose counter nothing is known about.
ASSUMED_TURNS = 8

_LABEL = re.compile(r"^(BB\d+):")
_BRANCH = re.compile(r"^s_c?branch\w* (BB\d+)")
_STEP = re.compile(
    r"^(?:s_add_[ui]32 (?P<s>s\d+), (?P=s)|s_addk_i32 (?P<k>s\d+)"
    r"|v_add_nc_u32\w* (?P<v>v\d+)), (?P<step>\w+)(?:, (?P<same>v\d+))?$"
)
_COMPARE = re.compile(r"^(?:s_cmpk?_|v_cmpx?_)(?:gt|ge|lt|le|lg|eq)_[iu]32\w* (?:vcc\w*, |s\[[\d:]+\], )?")
_START = re.compile(r"^(?:s_movk?_[ib]32|v_mov_b32\w*) (?P<register>[sv]\d+), (?P<value>\w+)$")


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name, and the whole of it without comment."""

    name: str
    text: str


@dataclass(frozen=True)
class Loop:
    """What is repeated, in order, and how often; `turns` is None where the counter cannot be read."""

    body: tuple[Instruction | Loop, ...]
    turns: int | None

    def instructions(self) -> Iterator[Instruction]:
        """Its instructions once, those of inner loops included."""
        for item in self.body:
            if isinstance(item, Loop):
                yield from item.instructions()
            else:
                yield item

    def loops(self) -> Iterator[Loop]:
        """Every loop inside, the inner ones after the one around them."""
        for item in self.body:
            if isinstance(item, Loop):
                yield item
                yield from item.loops()


def parse(assembly: str) -> Loop:
    """The whole kernel, as a loop of one turn.

    Raises:
        ValueError: there is no instruction in the text.
    """
    instructions, labels = _read(assembly)
    if not instructions:
        raise ValueError("the driver gives no disassembly")
    return Loop(tuple(_nested(instructions, 0, len(instructions), _spans(instructions, labels))), 1)


def with_turns(program: Loop, turns: int) -> Loop:
    """The program, its one loop turning so often: for a counter that compares with what a call passes in.

    Raises:
        ValueError: it has no loop, or several.
    """
    loops = list(program.loops())
    if len(loops) != 1:
        raise ValueError(f"the kernel has {len(loops)} loops, not one")
    body = tuple(replace(item, turns=turns) if isinstance(item, Loop) else item for item in program.body)
    return replace(program, body=body)


def _read(assembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions, and the index of the first one behind each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in assembly.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
            continue
        text, _, code = line.partition(";")
        text = text.strip()
        if text.startswith(
            "(invalid"
        ):  # LLVM does not know a vector instruction of this class: 0x7e..., 0xd5...
            text = "v_unknown" if re.match(r" *(7[ef]|d[567])", code) else ""
        if text and not text.startswith("("):
            instructions.append(Instruction(text.split()[0], text))
    return instructions, labels


def _spans(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """Where loops begin and end (behind the branch back); one per beginning, those that overlap joined."""
    ends: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        branch = _BRANCH.match(instruction.text)
        first = labels.get(branch[1], index + 1) if branch else index + 1
        if first <= index:
            ends[first] = max(index + 1, ends.get(first, 0))
    spans: list[tuple[int, int]] = []
    for first, end in sorted(ends.items()):
        while spans and spans[-1][1] <= first:
            spans.pop()
        if spans and spans[-1][1] < end:
            ends[spans[-1][0]] = end
        spans.append((first, ends[first]))
    return sorted(ends.items())


def _nested(
    instructions: Sequence[Instruction], first: int, end: int, spans: Sequence[tuple[int, int]]
) -> Iterator[Instruction | Loop]:
    """The instructions from `first` to before `end`, those within a span as a loop."""
    at = first
    for start, stop in spans:
        if start < at or stop > end:
            continue
        yield from instructions[at:start]
        inside = [span for span in spans if start <= span[0] and span[1] <= stop and span != (start, stop)]
        body = tuple(_nested(instructions, start, stop, inside))
        yield Loop(body, _turns(body, instructions[:start]))
        at = stop
    yield from instructions[at:end]


def _turns(body: Sequence[Instruction | Loop], before: Sequence[Instruction]) -> int | None:
    """The most turns that a counter of the loop allows. The counters of inner loops do not count."""
    own = [item for item in body if isinstance(item, Instruction)]
    steps = dict(filter(None, map(_step, own)))
    turns = []
    for instruction in own:
        if (head := _COMPARE.match(instruction.text)) is None:
            continue
        operands = instruction.text[head.end() :].split(", ")
        counters = [operand for operand in operands if operand in steps]
        limits = [number for operand in operands if (number := _number(operand)) is not None]
        if len(counters) == 1 and len(limits) == 1:
            way = limits[0] - _start(before, counters[0])
            turns.append(max(1, math.ceil(way / steps[counters[0]])))
    return max(turns, default=None)


def _step(instruction: Instruction) -> tuple[str, int] | None:
    """The register that an instruction steps, and by how much."""
    found = _STEP.match(instruction.text)
    if found is None:
        return None
    register = found["s"] or found["k"] or found["v"]
    step = _number(found["step"])
    if not step or (found["v"] and found["same"] != register):
        return None
    return register, step


def _start(before: Sequence[Instruction], register: str) -> int:
    """The constant that a register is set to last; 0 where it is another value, such as a lane's number."""
    for instruction in reversed(before):
        found = _START.match(instruction.text)
        if found and found["register"] == register:
            return _number(found["value"]) or 0
    return 0


def _number(operand: str) -> int | None:
    """A constant of the assembly."""
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", operand) is None:
        return None
    value = int(operand, 0)
    return value - (1 << 32) if value >= 1 << 31 else value
