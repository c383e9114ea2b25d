"""Compile targets as data: flags, number formats, weight layout, and what the device must be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from specprefill_jax.artifact.host import cpu_flags
from specprefill_jax.artifact.manifest import DeviceTarget, Proof
from specprefill_jax.errors import DeviceError, RecipeError
from specprefill_jax.models.matrix import TileShape

# /proc/cpuinfo names of the instruction sets that `--iree-llvmcpu-target-cpu=host` may use.
_HOST_FEATURES = frozenset(
    (
        *("avx", "avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "movbe", "avx_vnni", "gfni", "vaes"),
        *("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi"),
        *("avx512_vbmi2", "avx512_bitalg", "avx512_vnni", "avx512_vpopcntdq", "avx512_bf16", "avx512_fp16"),
        *("vpclmulqdq", "amx_tile", "amx_bf16", "amx_int8"),
    )
)
_V3_FEATURES = ("abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe")
# Explicit tile products stay as they are: generalized, they miss the CPU's matrix kernel (50x in bf16).
_CPU = (
    "--iree-hal-target-device=local",
    "--iree-hal-local-target-device-backends=llvm-cpu",
    "--iree-opt-generalize-matmul=false",
)
_VULKAN = ("--iree-hal-target-device=vulkan",)
# For a profile without subgroup operations IREE 3.13 spreads each operation of a kernel over the threads in
# its own way and puts no barrier between: a reduction and what reads it must be kernels of their own.
_PORTABLE = ("--iree-dispatch-creation-enable-aggressive-fusion=false",)
_COMMON = ("--iree-opt-level=O2",)
_PROVEN = Proof(kind="self-test", reason="")

Products: TypeAlias = frozenset[tuple[str, str, str]]
"""Cooperative matrix products a x b -> result that a target's devices have, by element types."""


@dataclass(frozen=True)
class Target:
    """One compile target.

    Attributes:
        device: what the manifest says about the device; the loader checks it.
        flags: of iree-compile.
        numerics: formats of the matrices that compile right here, the default first.
        tiled: whether matrices are stored in the CPU kernel's tiles.
        cooperative: the cooperative matrix products that the audit lets pass.
    """

    device: DeviceTarget
    flags: tuple[str, ...]
    numerics: tuple[str, ...]
    tiled: bool
    cooperative: Products = frozenset()
    proof: Proof = _PROVEN

    def number_format(self, asked: str | None) -> str:
        """The matrices' format: the recipe's, or this target's own.

        Raises:
            RecipeError: the target has no such build.
        """
        if asked is not None and asked not in self.numerics:
            raise RecipeError(
                f"{self.device.name} builds matrices in {' or '.join(self.numerics)}, "
                f"the recipe asks for {asked}"
            )
        return asked or self.numerics[0]

    def tile(self, numerics: str) -> TileShape | None:
        """The kernel's tile: 16 rows with AVX-512, 8 without; pairs of inputs where bf16 dots exist."""
        if not self.tiled:
            return None
        rows = 16 if "avx512f" in self.device.cpu_features else 8
        return TileShape(rows=rows, depth=2 if numerics == "bf16" and self._has_bf16_dots() else 1)

    def _has_bf16_dots(self) -> bool:
        return "avx512_bf16" in self.device.cpu_features


def target_for(device: str) -> Target:
    """The target of a device name.

    Raises:
        DeviceError: the name is unknown.
    """
    targets = _targets()
    if device not in targets:
        raise DeviceError(f"unknown device {device!r}; the known ones are {', '.join(targets)}")
    return targets[device]


def _targets() -> dict[str, Target]:
    return {
        "cpu": _cpu("cpu", "host", tuple(sorted(_HOST_FEATURES & cpu_flags()))),
        "cpu-portable": _cpu("cpu-portable", "x86-64-v3", _V3_FEATURES),
        "vulkan": _vulkan("vulkan", "vp_android_baseline_2022", "", ("f32",), extra=_PORTABLE),
        "llvmpipe": _vulkan("llvmpipe", "llvmpipe", "llvmpipe", ("f32", "f16")),
        "llvmpipe-f16": _vulkan("llvmpipe-f16", "llvmpipe", "llvmpipe", ("f16", "f32")),
        "radeon-780m": _vulkan(
            "radeon-780m",
            "gfx1103",
            "780M|PHOENIX|gfx1103",
            ("f16", "f32"),
            cooperative=frozenset({("f16", "f16", "f32")}),
        ),
    }


def _cpu(name: str, cpu: str, features: tuple[str, ...]) -> Target:
    device = DeviceTarget(name, "local-task", cpu, features, "")
    return Target(device, (*_CPU, f"--iree-llvmcpu-target-cpu={cpu}", *_COMMON), ("bf16", "f32"), tiled=True)


def _vulkan(
    name: str,
    target: str,
    match: str,
    numerics: tuple[str, ...],
    cooperative: Products = frozenset(),
    extra: tuple[str, ...] = (),
) -> Target:
    device = DeviceTarget(name, "vulkan", target, (), match)
    flags = (*_VULKAN, f"--iree-vulkan-target={target}", *_COMMON, *extra)
    return Target(device, flags, numerics, tiled=False, cooperative=cooperative)
