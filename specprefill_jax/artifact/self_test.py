"""The self-test of a model: fixed inputs, and a fingerprint of everything that they must give.

A fingerprint holds a few numbers that each depend on every value of a tensor (projections on fixed signs), so
that no part of it can change unseen because it was not sampled.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from specprefill_jax.artifact import strict
from specprefill_jax.artifact.manifest import Model, StateTensor
from specprefill_jax.errors import ArtifactError

PROJECTIONS = 16
# A group of values (a head) below this part of the largest group's norm counts as having that norm: what is
# left of a state that decayed away is rounding.
_LEAST_NORM = 1e-3
_DIGITS = 6  # recorded; far finer than any tolerance


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a tensor must be, within `tolerance`.

    Attributes:
        norms: of each group of values, such as a head.
        projections: of all values, each group scaled to norm 1.
        tolerance: the largest root-mean-square difference of the groups, in units of their norms.
    """

    norms: tuple[float, ...]
    projections: tuple[float, ...]
    tolerance: float

    def difference(self, found: Float[np.ndarray, "groups values"]) -> float:
        """Root-mean-square difference from what is expected, in units of the groups' norms.

        It is an estimate, off by a fifth or so: the difference is known in `PROJECTIONS` directions. Values
        that are not finite give NaN or infinity.
        """
        if found.shape[0] != len(self.norms):
            return float("inf")
        with np.errstate(all="ignore"):
            scaled = (found / np.array(self.norms)[:, None]).astype(np.float32)
            off = signs(scaled.size) @ scaled.reshape(-1) - np.array(self.projections)
            return float(np.sqrt(np.mean(off * off) / len(self.norms)))


@dataclasses.dataclass(frozen=True)
class Piece:
    """Tokens that are read together, each at its own position."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SelfTest:
    """Fixed inputs and what they must give.

    From an empty state `pieces` are read, in whatever blocks, then `next_token` is decoded at the position
    after the last one's. `prefilled` and `decoded` say what each must leave: "hidden" (of prefill), "logits",
    "rows" (of a model that returns them: the last piece's queries, at most R) and each state tensor by name,
    of those that grow with the cache the slots in use.
    """

    pieces: tuple[Piece, ...]
    next_token: int
    prefilled: Mapping[str, Expected]
    decoded: Mapping[str, Expected]

    @property
    def slots(self) -> int:
        """Tokens that are read, the decoded one left out."""
        return sum(len(piece.tokens) for piece in self.pieces)

    @classmethod
    def read(cls, path: Path, model: Model) -> "SelfTest":
        """Read the file that `write` wrote for a model.

        Raises:
            ArtifactError: it is not such a file, or of another model.
        """
        test = strict.decode(cls, strict.read_json(path), path.name)
        fault = test._fault(model)
        if fault:
            raise ArtifactError(f"{path} is no self-test of its model: {fault}")
        return test

    def write(self, path: Path) -> None:
        """Write it as JSON; the same self-test gives the same bytes."""
        path.write_text(json.dumps(dataclasses.asdict(self), allow_nan=False) + "\n", encoding="utf-8")

    def _fault(self, model: Model) -> str:
        """Why it cannot be one of this model; "" where it can."""
        tokens = [token for piece in self.pieces for token in piece.tokens]
        positions = [position for piece in self.pieces for position in piece.positions]
        if not tokens or any(len(piece.tokens) != len(piece.positions) for piece in self.pieces):
            return "tokens and positions must be as many, and at least one"
        if not all(0 <= token < model.vocabulary for token in (*tokens, self.next_token)):
            return "a token is outside the vocabulary"
        rising = all(a < b for a, b in itertools.pairwise(positions))
        if not rising or positions[0] < 0 or positions[-1] + 1 >= model.positions:
            return f"positions must rise within 0..{model.positions - 1}, one left for the decoded token"
        if self.slots >= model.capacities[0]:
            return f"{self.slots} tokens and one more do not fit the capacity {model.capacities[0]}"
        names = {"logits", *(tensor.name for tensor in model.state), *(["rows"] if model.rows else [])}
        for entry, expected, wanted in (
            ("prefilled", self.prefilled, names | {"hidden"}),
            ("decoded", self.decoded, names),
        ):
            if expected.keys() != wanted:
                return f"{entry} must hold {', '.join(sorted(wanted))}"
            for name, values in expected.items():
                if len(values.projections) != PROJECTIONS or not values.norms or min(values.norms) <= 0:
                    return f"{entry}.{name} needs {PROJECTIONS} projections and positive norms"
                if not 0 < values.tolerance < 1:
                    return f"{entry}.{name}: the tolerance must be positive and below 1"
        return ""


def expect(values: Float[np.ndarray, "groups values"], tolerance: float) -> Expected:
    """What to record of a tensor."""
    size = np.linalg.norm(values.astype(np.float64), axis=1)
    floor = max(float(size.max()) * _LEAST_NORM, np.finfo(np.float32).tiny)
    norms = _rounded(np.maximum(size, floor))
    scaled = (values.astype(np.float64) / np.array(norms)[:, None]).reshape(-1)
    return Expected(norms, _rounded(signs(scaled.size).astype(np.float64) @ scaled), tolerance)


def by_head(tensor: StateTensor, values: Shaped[np.ndarray, "..."]) -> Float[np.ndarray, "groups values"]:
    """A state tensor, of those that grow the slots in use, with a group for each entry of its first axis
    that is not the slots'."""
    if tensor.grows:
        values = np.moveaxis(values, tensor.shape.index("C"), -1)
    return values.reshape(values.shape[0], -1)


def rows_by_head(rows: Shaped[np.ndarray, "R A H n"]) -> Float[np.ndarray, "groups values"]:
    """Attention rows over the slots in use, with a group for each layer and head."""
    heads = np.moveaxis(rows, 0, 2)
    return heads.reshape(heads.shape[0] * heads.shape[1], -1)


@functools.lru_cache(maxsize=8)
def signs(count: int) -> Float[np.ndarray, "projections values"]:
    """Fixed random signs, the same with every version of NumPy: bits of splitmix64 (Steele et al., 2014)."""
    z: Any = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    bits = (z[None] >> np.arange(PROJECTIONS, dtype=np.uint64)[:, None]) & np.uint64(1)
    return bits.astype(np.float32) * np.float32(2) - np.float32(1)


def _rounded(values: Float[np.ndarray, "n"]) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values)
