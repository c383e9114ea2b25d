"""Recipes: which models, which shapes, which number format. TOML in, frozen dataclasses out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from specprefill_jax.artifact.manifest import NUMERICS
from specprefill_jax.errors import FileMissing, RecipeError
from specprefill_jax.models.delta import CHUNK

LEAST = 16  # shorter blocks are not tested on every device
MINIMUM_TOKENS = 8192  # prompts below this are not worth the draft, as the guide has it
_TOP = {"name", "minimum_tokens", "tokenizer", "chat_template", "draft", "target"}
_MODEL = {"checkpoint", "blocks", "capacities", "rows", "numerics"}


@dataclass(frozen=True)
class ModelRecipe:
    """One model of the pair.

    Attributes:
        checkpoint: directory with config.json and safetensors.
        blocks: block lengths T, ascending; multiples of 16 up to 64, multiples of 64 beyond.
        capacities: cache capacities C in slots, ascending.
        rows: attention rows R that the last block returns; 0 for the target.
        numerics: format of the matrices, or None for the device's own choice.
    """

    checkpoint: Path
    blocks: tuple[int, ...]
    capacities: tuple[int, ...]
    rows: int
    numerics: str | None


@dataclass(frozen=True)
class Recipe:
    """What to build; paths are absolute or relative to the working directory."""

    name: str
    minimum_tokens: int
    tokenizer: Path
    chat_template: Path
    draft: ModelRecipe
    target: ModelRecipe
    source: Mapping[str, object]


def read_recipe(path: Path) -> Recipe:
    """Reads a recipe; relative paths in it start from its own directory.

    Raises:
        FileMissing: there is no such file.
        RecipeError: not TOML, a field is unknown, missing or out of range.
    """
    if not path.is_file():
        raise FileMissing(f"no recipe at {path}; recipes are TOML files, compile/ in the repository has some")
    try:
        fields = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    fields = {"minimum_tokens": MINIMUM_TOKENS, **fields}
    _only(fields, _TOP, _TOP, str(path))
    base = path.parent
    return Recipe(
        name=_text(fields, "name", str(path)),
        minimum_tokens=_count(fields, "minimum_tokens", str(path), least=0),
        tokenizer=base / _text(fields, "tokenizer", str(path)),
        chat_template=base / _text(fields, "chat_template", str(path)),
        draft=_model(fields, "draft", base, f"{path} [draft]"),
        target=_model(fields, "target", base, f"{path} [target]"),
        source=fields,
    )


def _model(recipe: Mapping[str, object], role: str, base: Path, where: str) -> ModelRecipe:
    fields = recipe[role]
    if not isinstance(fields, Mapping):
        raise RecipeError(f"{where} must be a table with {', '.join(sorted(_MODEL))}")
    required = _MODEL - {"numerics"} - ({"rows"} if role == "target" else set())
    _only(fields, _MODEL if role == "draft" else _MODEL - {"rows"}, required, where)
    numerics = fields.get("numerics")
    if numerics is not None and numerics not in NUMERICS:
        raise RecipeError(f"{where}: numerics {numerics!r} is none of {', '.join(NUMERICS)}")
    blocks = _sizes(fields, "blocks", where)
    for length in blocks:
        step = CHUNK if length > CHUNK else LEAST
        if length % step:
            raise RecipeError(
                f"{where}: block length {length} is not a multiple of {step}; the delta rule works in chunks "
                f"of {CHUNK} (blocks up to {CHUNK}: multiples of {LEAST})"
            )
    capacities = _sizes(fields, "capacities", where)
    if capacities[0] < blocks[0]:
        raise RecipeError(
            f"{where}: capacity {capacities[0]} holds no block, the shortest has {blocks[0]} tokens"
        )
    rows = _count(fields, "rows", where, least=1) if role == "draft" else 0
    if rows > blocks[0]:
        raise RecipeError(f"{where}: rows {rows} do not fit the shortest block of {blocks[0]} tokens")
    return ModelRecipe(base / _text(fields, "checkpoint", where), blocks, capacities, rows, numerics)


def _only(fields: Mapping[str, object], known: set[str], required: set[str], where: str) -> None:
    unknown, missing = sorted(set(fields) - known), sorted(required - set(fields))
    if unknown:
        raise RecipeError(f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}")
    if missing:
        raise RecipeError(f"{where}: {', '.join(missing)} missing")


def _text(fields: Mapping[str, object], key: str, where: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value:
        raise RecipeError(f"{where}: {key} must be a text, not {value!r}")
    return value


def _count(fields: Mapping[str, object], key: str, where: str, least: int) -> int:
    value = fields[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RecipeError(f"{where}: {key} must be a whole number of at least {least}, not {value!r}")
    return value


def _sizes(fields: Mapping[str, object], key: str, where: str) -> tuple[int, ...]:
    value = fields[key]
    sizes = tuple(value) if isinstance(value, list) else ()
    whole = all(type(size) is int and size > 0 for size in sizes)
    if not sizes or not whole or any(a >= b for a, b in pairwise(sizes)):
        raise RecipeError(f"{where}: {key} must be ascending whole numbers, such as [64, 256], not {value!r}")
    return sizes
