"""What a build takes from a compile target: flags, number format, weight layout, and the device's part of the
manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from specprefill_jax.artifact.hashing import sha256_of
from specprefill_jax.artifact.host import cpu_flags, cpu_name
from specprefill_jax.artifact.locate import embedded
from specprefill_jax.artifact.manifest import DeviceTarget, Proof
from specprefill_jax.artifact.targets import KnownTarget, known_target
from specprefill_jax.errors import RecipeError
from specprefill_jax.models.matrix import TileShape

TUNING_FLAG = "--iree-codegen-transform-dialect-library"
# IREE 3.13 reads the library under a lock, and while it waits for its own threads there it takes up another
# kernel, which wants the same lock: now and then it never ends. A single thread does not wait.
_WITH_TUNING = "--mlir-disable-threading"

Products: TypeAlias = frozenset[tuple[str, ...]]
"""Cooperative matrix products (a, b, result) that a target's devices have, by element types."""


@dataclass(frozen=True)
class Target:
    """One compile target.

    Attributes:
        device: what the manifest says about the device; the loader checks it.
        flags: of iree-compile, which runs in compile/: files are named relative to it.
        numerics: formats of the matrices that compile right here, the default first.
        tiled: whether matrices are stored in the CPU kernel's tiles.
        cooperative: the cooperative matrix products that the audit lets pass.
        tuning: the files that the flags name, and their sha256.
    """

    device: DeviceTarget
    flags: tuple[str, ...]
    numerics: tuple[str, ...]
    tiled: bool
    cooperative: Products
    proof: Proof
    tuning: Mapping[str, str]

    @property
    def reduction_size(self) -> int | None:
        """The lanes of a subgroup that the compiler makes reductions for; None without subgroups."""
        return min(self.device.subgroup_sizes, default=None)

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
        TargetError: its file does not follow the schema.
    """
    return make_target(known_target(device))


def make_target(known: KnownTarget) -> Target:
    """A target as its file describes it; for "host", as this machine is."""
    features = known.cpu_features
    if known.target == "host":
        features = tuple(feature for feature in features if feature in cpu_flags())
    flags, tuning = known.flags, {}
    if known.tuning:
        flags = (*flags, f"{TUNING_FLAG}={known.tuning}@__kernel_config", _WITH_TUNING)
        tuning = {known.tuning: sha256_of(embedded("compile") / known.tuning)}
    return Target(
        device=DeviceTarget(
            name=known.name,
            driver=known.driver,
            target=known.target,
            cpu=cpu_name() if known.target == "host" else "",
            cpu_features=features,
            device_match=known.match,
            subgroup_sizes=known.subgroup_sizes,
            features=(),  # follow from the shaders
        ),
        flags=flags,
        numerics=known.numerics,
        tiled=known.tiled,
        cooperative=frozenset(known.cooperative),
        proof=Proof("none", known.unproven) if known.unproven else Proof("self-test", ""),
        tuning=tuning,
    )
