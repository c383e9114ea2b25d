"""What preflight finds, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specprefill_jax.artifact.schedule import Dispatch
from specprefill_jax.preflight.gpu import Gpu
from specprefill_jax.preflight.kernel import Kernel
from specprefill_jax.preflight.model import Prediction, waves_per_simd

FAIL, WARN = "fail", "warn"
REALISTIC = (0.4, 0.9)  # real devices reach this share of the predicted speed: see docs/radeon-780m.md


@dataclass(frozen=True)
class Use:
    """A kernel as an entry dispatches it."""

    kernel: Kernel
    dispatch: Dispatch
    prediction: Prediction
    gpu: Gpu

    @property
    def us(self) -> float:
        """Microseconds of all its dispatches in one call."""
        return self.prediction.us * self.dispatch.count

    @property
    def workgroups(self) -> int:
        """Of one dispatch."""
        x, y, z = self.dispatch.workgroups
        return x * y * z

    @property
    def wmma_in_hot_loop(self) -> int:
        """WMMA instructions that a turn of the hot loop issues."""
        return round(self.kernel.hot_cost.wmma) if self.kernel.hot else 0

    @property
    def converts_per_wmma(self) -> float:
        """Conversions per WMMA in the hot loop."""
        hot = self.kernel.hot_cost
        return hot.converts / hot.wmma if self.kernel.hot and hot.wmma else 0.0

    def to_json(self) -> dict[str, object]:
        """Plain values of everything that is known."""
        kernel = self.kernel
        return {
            "name": kernel.name,
            "product": dataclasses.asdict(kernel.product) if kernel.product else None,
            "workgroup_size": list(kernel.local),
            "workgroups": list(self.dispatch.workgroups),
            "count": self.dispatch.count,
            "subgroup": kernel.subgroup,
            **dataclasses.asdict(kernel.statistics),
            "waves_per_simd": waves_per_simd(kernel, self.gpu),
            "wmma": kernel.wmma,
            "wmma_in_hot_loop": self.wmma_in_hot_loop,
            "converts_per_wmma": self.converts_per_wmma,
            "lds_of_valu": lds_of_valu(kernel),
            "loops": [loop.turns for loop in kernel.program.loops()],
            "wrong_products": list(kernel.wrong_products),
            "weights_bytes": sum(self.dispatch.weights.values()),
            "weights_streamed": self.prediction.rereads,
            "bytes": self.prediction.bytes,
            "us": self.prediction.us,
            "limit": self.prediction.limit,
        }


def lds_of_valu(kernel: Kernel) -> float:
    """Cycles of local memory in those of the vector units beside it (two share one), in the hot loop."""
    cost = kernel.hot_cost
    return 2 * cost.lds / cost.valu if cost.valu else 0.0


@dataclass(frozen=True)
class Entry:
    """One call of an entry; `layers` is 0 where it does not run through them."""

    name: str
    layers: int
    uses: tuple[Use, ...]

    @property
    def dispatches(self) -> int:
        """Kernels that a call submits."""
        return sum(use.dispatch.count for use in self.uses)

    @property
    def us(self) -> float:
        """Predicted microseconds of its kernels, one after the other."""
        return sum(use.us for use in self.uses)

    @property
    def projections_us(self) -> float:
        """Of which products with the model's weights."""
        return sum(use.us for use in self.uses if use.kernel.product and use.dispatch.weights)


@dataclass(frozen=True)
class Finding:
    """What a check says (level FAIL or WARN) of which kernel or entry, in which entries."""

    level: str
    check: str
    where: str
    text: str
    entries: tuple[str, ...]


@dataclass(frozen=True)
class ModuleReport:
    """One model's module."""

    role: str
    numerics: str
    entries: tuple[Entry, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether a check fails."""
        return any(finding.level == FAIL for finding in self.findings)

    def uses(self) -> Iterator[Use]:
        """Those of all entries."""
        for entry in self.entries:
            yield from entry.uses

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "role": self.role,
            "numerics": self.numerics,
            "entries": {
                entry.name: {
                    "dispatches": entry.dispatches,
                    "layers": entry.layers,
                    "us": entry.us,
                    "projections_us": entry.projections_us,
                    "kernels": [use.to_json() for use in entry.uses],
                }
                for entry in self.entries
            },
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Prompt:
    """How long a model's kernels take for a prompt: `us` is None where no cache of it holds the prompt."""

    tokens: int
    calls: Mapping[str, int]
    us: float | None


@dataclass(frozen=True)
class Memory:
    """Bytes that a model takes on the device.

    Attributes:
        weights: of its archive.
        state: its largest.
        call: what the hungriest call allocates.
    """

    weights: int
    state: int
    call: int


@dataclass(frozen=True)
class Report:
    """An artifact's kernels through a driver, and the memory that its models need, by role."""

    gpu: Gpu
    driver: str
    modules: tuple[ModuleReport, ...]
    prompts: Mapping[str, Prompt]
    memory: Mapping[str, Memory]

    @property
    def bytes(self) -> int:
        """Of all models with their largest states. One call runs at a time."""
        kept = sum(memory.weights + memory.state for memory in self.memory.values())
        return kept + max((memory.call for memory in self.memory.values()), default=0)

    @property
    def too_large(self) -> bool:
        """Whether that is more than the GPU has."""
        return self.bytes > self.gpu.memory

    @property
    def failed(self) -> bool:
        """Whether a check fails."""
        return self.too_large or any(module.failed for module in self.modules)

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "gpu": self.gpu.name,
            "driver": self.driver,
            "passed": not self.failed,
            "realistic": "predicted / {}..{}".format(*REALISTIC),
            "modules": [module.to_json() for module in self.modules],
            "prompts": {role: dataclasses.asdict(prompt) for role, prompt in self.prompts.items()},
            "memory": {
                **{role: dataclasses.asdict(memory) for role, memory in self.memory.items()},
                "together": self.bytes,
                "limit": self.gpu.memory,
            },
        }
