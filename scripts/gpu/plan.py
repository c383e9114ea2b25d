"""What is built and checked: everything that the steps follow from, kept with what was built."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from true_shapes import BLOCK, PRESETS, presets, slots

from specprefill_jax.models.config import TextConfig
from specprefill_jax.settings import Settings

PLAN = "plan.json"
PERIOD = 4  # layers: three of the delta rule, one of attention
NEW_TOKENS = 33
TINY_BLOCK = 64

# Seconds that a step may take. Together they are more than a short loan of a GPU: --budget cuts them.
LIMITS = {"facts": 60, "kernels": 300, "demo": 900, "weights": 1200, "shapes": 900, "speed": 1200}
STEPS = tuple(LIMITS)
# What is compiled, and the steps that are nothing without it.
BUILT = {"kernels": ("kernels",), "demo": ("demo",), "shapes": ("weights", "shapes", "speed")}
NEEDS = {"shapes": ("weights",), "speed": ("weights",)}


@dataclass(frozen=True)
class Plan:
    """What is built and checked.

    Attributes:
        target: the name of the device that artifacts are built for.
        kernels: the name of the device that the single kernels are built for.
        tokens: lengths of the prompts whose speed is measured.
        keeps: shares of them that the target reads.
        layers: of both models; 0: as many as the released ones have.
        tiny: models of a few thousand parameters in their place, to try the steps.
        questions: of the demo pair, from the first on.
        seed: of all random weights.
    """

    target: str = "nvidia"
    kernels: str = "radeon-780m"
    tokens: tuple[int, ...] = (4096, 10000)
    keeps: tuple[float, ...] = (0.3, 0.15)
    layers: int = 0
    tiny: bool = False
    questions: int = 40
    seed: int = 0

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return TINY_BLOCK if self.tiny else BLOCK

    def config(self, role: str, layers: int) -> TextConfig:
        """A model's shape, cut to `layers` (0: all)."""
        config = presets()["tiny" if self.tiny else PRESETS[role]]
        return dataclasses.replace(config, layer_types=config.layer_types[: layers or None])

    def capacities(self) -> dict[str, list[int]]:
        """Slots of the whole models: a cache for each prompt, and a smaller one for what is kept."""
        whole = sorted({slots(count + NEW_TOKENS, self.block) for count in self.tokens})
        kept = slots(max(self.keeps) * max(self.tokens) + NEW_TOKENS, self.block)
        draft = sorted({slots(count + Settings().lookahead, self.block) for count in self.tokens})
        return {"draft": draft, "target": sorted({kept, *whole})}

    def write(self, folder: Path) -> None:
        """Keep it with what is built."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        (folder / PLAN).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Plan:
        """The plan of what is in a folder.

        Raises:
            OSError, ValueError: there is none.
        """
        try:
            fields = json.loads((folder / PLAN).read_text(encoding="utf-8"))
            lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
            return cls(**{**fields, **lists})
        except TypeError as error:
            raise ValueError(f"{folder / PLAN} is of another version of this script: {error}") from error


def select(asked: Sequence[str] | None) -> tuple[str, ...]:
    """The steps in their order: those asked for and what these need; all where none is named.

    Raises:
        ValueError: a name is no step.
    """
    names = set(asked or STEPS)
    if unknown := sorted(names - set(STEPS)):
        raise ValueError(f"no step is called {', '.join(unknown)}; the steps are {', '.join(STEPS)}")
    names.update(need for name in tuple(names) for need in NEEDS.get(name, ()))
    return tuple(step for step in STEPS if step in names)


def built_for(steps: Sequence[str]) -> tuple[str, ...]:
    """What must be compiled for the steps."""
    return tuple(name for name, users in BUILT.items() if set(users) & set(steps))


def limit_of(step: str, scale: float, budget: float | None, spent: float) -> float:
    """Seconds that a step has: its own limit, or what is left of the budget where that is less."""
    limit = LIMITS[step] * scale
    return limit if budget is None else min(limit, budget - spent)
