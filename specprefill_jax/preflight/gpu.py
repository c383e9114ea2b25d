"""The GPUs that preflight knows, as data."""

from __future__ import annotations

from dataclasses import dataclass

from specprefill_jax.errors import SettingError


@dataclass(frozen=True)
class Gpu:
    """What the static model takes a GPU for. A WGP is a workgroup processor: two CUs of two SIMDs.

    Attributes:
        name: the device name of its artifacts.
        family: RADV's name for it, which its null device is asked for.
        wgps: workgroup processors.
        clock: in Hz.
        memory: bytes that the weights, the caches and the rooms of calls must fit into.
        bandwidth: of memory, in bytes per second.
        cache: bytes of a tensor that stay in the last cache while a kernel runs.
        registers: vector registers of a SIMD, in those of 32 lanes.
        lds: bytes of local memory of a WGP.
        waves: the most that a SIMD keeps.
    """

    name: str
    family: str
    wgps: int
    clock: float
    memory: int
    bandwidth: float
    cache: float
    registers: int
    lds: int
    waves: int


# Phoenix: 12 CUs at 2.7 GHz, 1024 registers (ac_gpu_info.c of Mesa 25.0), 2 MB of L2 of which the streams of
# a product leave about three quarters, no last-level cache. Memory is the first user's machine's.
# 75 GB/s: clpeak measures 73 with DDR5-5600.
_RADEON_780M = Gpu(
    name="radeon-780m",
    family="PHOENIX",
    wgps=6,
    clock=2.7e9,
    memory=16 << 30,
    bandwidth=75e9,
    cache=1.5e6,
    registers=1024,
    lds=128 << 10,
    waves=16,
)
_GPUS = {gpu.name: gpu for gpu in (_RADEON_780M,)}


def known_gpu(name: str) -> Gpu:
    """The GPU of that name.

    Raises:
        SettingError: preflight does not know it.
    """
    if name not in _GPUS:
        raise SettingError(f"preflight does not know the GPU {name!r}; it knows {', '.join(_GPUS)} (--gpu)")
    return _GPUS[name]
