"""What instructions of RDNA3 take, in cycles of the unit that they keep busy, and the bytes that they move.

Sources: ACO's statistics (Mesa 25.0, aco_statistics.cpp). 32 cycles per WMMA are AMD's peak of 512 operations
per clock and CU. Local memory is taken for 128 bytes per clock and CU, the vector cache for 64.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from specprefill_jax.preflight.isa import Instruction

WMMA_CYCLES = 32
_QUARTER_RATE = re.compile(r"v_(mul_lo_u32|mul_hi|mad_u64|mad_i64)")
# A wave of 64 lanes issues these for both halves at once; all others in two turns.
_BOTH_HALVES = re.compile(
    r"v_(fma_f32|fmac_f32|fmaak_f32|fmamk_f32|mul_f32|add_f32|sub_f32|subrev_f32|fma_f16|fmac_f16|mul_f16|add_f16"
    r"|sub_f16|mov_b32|cndmask_b32|max_f32|min_f32|max_f16|min_f16|dot2)"
)
_LANES = re.compile(r"v_(readlane|writelane)")
_MEMORY = ("buffer_", "global_", "flat_", "scratch_", "tbuffer_")
_CROSS_LANE = ("permute", "swizzle")  # go through local memory's crossbar, and touch no memory
_WIDTHS = ((r"b128|x4", 16), (r"b96|x3", 12), (r"b64|x2", 8), (r"[bui]16", 2), (r"[bui]8(?!\d)", 1))


@dataclass(frozen=True)
class Cost:
    """Cycles of one wave on each unit, bytes of all its lanes, and how many of some instructions there are.

    Attributes:
        valu: cycles of the vector unit, products of matrices included.
        lds: cycles of local memory.
        vmem: cycles of the vector cache.
        loaded, stored: bytes to and from memory.
        wmma, converts, scratch, lanes: instructions: products, conversions, accesses to scratch memory, moves
            between a scalar and one lane (which spilled scalars need).
    """

    valu: float = 0.0
    lds: float = 0.0
    vmem: float = 0.0
    loaded: float = 0.0
    stored: float = 0.0
    wmma: float = 0.0
    converts: float = 0.0
    scratch: float = 0.0
    lanes: float = 0.0

    def plus(self, other: Cost, turns: float = 1.0) -> Cost:
        """This cost and so many turns of another."""
        mine, others = vars(self), vars(other)
        return Cost(**{name: mine[name] + turns * others[name] for name in mine})


def cost_of(instructions: Iterable[Instruction], wave: int) -> Cost:
    """The cost of instructions that a wave of `wave` lanes issues once."""
    total = Cost()
    for name, count in Counter(instruction.name for instruction in instructions).items():
        total = total.plus(instruction_cost(name, wave), count)
    return total


@cache
def instruction_cost(name: str, wave: int) -> Cost:
    """The cost of one, by its name; nothing for what only scalars and waits are about."""
    turns = wave / 32
    if name.startswith("v_wmma"):
        return Cost(valu=WMMA_CYCLES, wmma=1)
    if name.startswith("v_"):
        return Cost(
            valu=_vector_cycles(name, turns),
            converts=float(name.startswith("v_cvt")),
            lanes=float(_LANES.match(name) is not None),
        )
    if name.startswith("ds_"):
        width = (
            4 if any(word in name for word in _CROSS_LANE) else _width(name) * (2 if "2addr" in name else 1)
        )
        return Cost(lds=max(1.0, width / 4) * turns)
    if name.startswith(_MEMORY):
        moved = float(_width(name) * wave)
        return Cost(
            vmem=max(_width(name) / 4 * 2, 1.0) * turns,
            loaded=moved if "load" in name else 0.0,
            stored=moved if "store" in name else 0.0,
            scratch=float(name.startswith("scratch_")),
        )
    return Cost()


def _vector_cycles(name: str, turns: float) -> float:
    if name.startswith("v_dual") or (turns > 1 and _BOTH_HALVES.match(name)):
        return 1.0
    return 4 * turns if _QUARTER_RATE.match(name) else turns


def _width(name: str) -> int:
    """Bytes per lane."""
    return next((size for pattern, size in _WIDTHS if re.search(pattern, name)), 4)
