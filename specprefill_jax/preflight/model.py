"""A static model of the time of a kernel. It ranks kernels; docs/radeon-780m.md states its error.

Each stretch of the program (what is in one loop and in no inner one) takes as long as the busiest unit of a
workgroup processor needs for all the waves that share it, or as one wave needs with its waits, whichever is
longer; the whole at least as long as memory needs for its bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from specprefill_jax.artifact.schedule import Dispatch, Traffic
from specprefill_jax.preflight.gpu import Gpu
from specprefill_jax.preflight.kernel import Kernel
from specprefill_jax.preflight.tiles import Tiles

SIMDS, CUS = 4, 2  # of a workgroup processor
_LDS_UNIT = 1024


@dataclass(frozen=True)
class Prediction:
    """What the model says of one dispatch.

    Attributes:
        us: microseconds.
        limit: what they are spent on: valu, lds, vmem (the vector cache), latency or dram.
        bytes: moved from and to memory.
        rereads: how often the weights are streamed; 0 where there are none, or their tiles are not known.
    """

    us: float
    limit: str
    bytes: float
    rereads: float


def resident_workgroups(kernel: Kernel, gpu: Gpu) -> int:
    """How many workgroups a workgroup processor keeps: what registers, local memory and wave slots allow."""
    unit = 16 if kernel.subgroup == 32 else 8
    allocated = max(unit, -(-kernel.statistics.vgprs // unit) * unit)
    registers = gpu.registers * 32 // kernel.subgroup
    waves = min(gpu.waves, registers // allocated)
    lds = -(-kernel.statistics.lds // _LDS_UNIT) * _LDS_UNIT
    by_lds = gpu.lds // lds if lds else waves * SIMDS
    return max(1, min(waves * SIMDS // kernel.waves, by_lds))


def waves_per_simd(kernel: Kernel, gpu: Gpu) -> float:
    """Occupancy, in waves of the kernel's own size."""
    return resident_workgroups(kernel, gpu) * kernel.waves / SIMDS


def predict(
    kernel: Kernel, dispatch: Dispatch, traffic: Traffic, tiles: Tiles | None, gpu: Gpu
) -> Prediction:
    """The time of one dispatch.

    Args:
        traffic: bytes of the kernel's tensors.
        tiles: how its workgroups walk over its weight, where it is known.
    """
    workgroups = math.prod(dispatch.workgroups)
    resident = min(resident_workgroups(kernel, gpu), -(-workgroups // gpu.wgps))
    batches, rest = divmod(workgroups, gpu.wgps * resident)
    spent: defaultdict[str, float] = defaultdict(float)
    for limit, cycles in _stretches(kernel, resident):
        spent[limit] += batches * cycles
    for limit, cycles in _stretches(kernel, -(-rest // gpu.wgps)):
        spent[limit] += cycles if rest else 0.0
    moved, rereads = _memory(kernel, dispatch, traffic, tiles, gpu, gpu.wgps * resident)
    busy, memory = sum(spent.values()) / gpu.clock, moved / gpu.bandwidth
    limit = "dram" if memory > busy else max(spent, key=lambda unit: spent[unit])
    return Prediction(1e6 * max(busy, memory), limit, moved, rereads)


def _stretches(kernel: Kernel, workgroups: int) -> Iterator[tuple[str, float]]:
    """The limiting unit of each stretch of the program and its cycles, with so many workgroups on it."""
    waves = workgroups * kernel.waves
    per_simd, per_cu = -(-waves // SIMDS), -(-waves // CUS)
    for stretch in kernel.stretches:
        units = {
            "valu": per_simd * stretch.cost.valu,
            "lds": per_cu * stretch.cost.lds,
            "vmem": per_cu * stretch.cost.vmem,
            "latency": stretch.latency,
        }
        limit = max(units, key=lambda unit: units[unit])
        yield limit, stretch.turns * units[limit]


def _memory(
    kernel: Kernel, dispatch: Dispatch, traffic: Traffic, tiles: Tiles | None, gpu: Gpu, at_once: int
) -> tuple[float, float]:
    """Bytes moved, and how often the weights are streamed, with so many workgroups at once.

    No kernel moves more than its instructions ask for: of a table that it looks up in, only that counts.
    """
    waves = math.prod(dispatch.workgroups) * kernel.waves
    stored = min(traffic.writes, waves * kernel.cost.stored)
    weights = sum(dispatch.weights.values())
    if tiles is None or kernel.product is None or not weights:
        return stored + min(traffic.reads, waves * kernel.cost.loaded), 0.0
    rows = max(1.0, math.prod(dispatch.workgroups) / tiles.count)  # of workgroups that read the same tile
    if tiles.next_workgroup_next_tile:
        again, others = math.ceil(rows / max(1.0, at_once / tiles.count)), math.ceil(tiles.count / at_once)
    else:
        again, others = math.ceil(rows / at_once), math.ceil(tiles.count / max(1.0, at_once / rows))
    again = again if weights > gpu.cache else 1
    rest = max(0, traffic.reads - weights)
    return stored + again * weights + rest * (others if rest > gpu.cache else 1), float(again)
