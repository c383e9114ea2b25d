"""Recipes: what is read, and every way in which one is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specprefill_jax.aot.recipe import read_recipe
from specprefill_jax.errors import FileMissing, RecipeError

RECIPE = """
name = "pair"
minimum_tokens = 512
tokenizer = "words/tokenizer.json"
chat_template = "../chat_template.jinja"

[draft]
checkpoint = "small"
blocks = [16, 64, 256]
capacities = [1024, 4608]
rows = 8

[target]
checkpoint = "/models/large"
blocks = [256]
capacities = [1024]
numerics = "f32"
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "pair.toml"
    file.write_text(RECIPE)
    return file


def edited(path: Path, old: str, new: str) -> Path:
    assert RECIPE.count(old) == 1
    path.write_text(RECIPE.replace(old, new))
    return path


def refusal(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        read_recipe(path)
    return str(caught.value)


def test_relative_paths_start_from_the_recipes_directory(path: Path) -> None:
    recipe = read_recipe(path)
    assert recipe.tokenizer == path.parent / "words" / "tokenizer.json"
    assert recipe.chat_template.resolve() == path.parent.parent / "chat_template.jinja"
    assert recipe.draft.checkpoint == path.parent / "small"
    assert recipe.target.checkpoint == Path("/models/large")


def test_every_field_is_read(path: Path) -> None:
    recipe = read_recipe(path)
    assert (recipe.name, recipe.minimum_tokens) == ("pair", 512)
    draft, target = recipe.draft, recipe.target
    assert (draft.blocks, draft.capacities, draft.rows) == ((16, 64, 256), (1024, 4608), 8)
    assert (target.blocks, target.capacities, target.rows) == ((256,), (1024,), 0)
    assert (draft.numerics, target.numerics) == (None, "f32")
    assert recipe.source["draft"] == {
        "checkpoint": "small",
        "blocks": [16, 64, 256],
        "capacities": [1024, 4608],
        "rows": 8,
    }


def test_a_missing_recipe_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=r"no recipe at .*none\.toml; recipes are TOML files, compile/ in"):
        read_recipe(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"name = ", b'name = "\xff"'], ids=["cut off", "not UTF-8"])
def test_what_is_not_toml_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert refusal(path).startswith(f"{path} is not TOML: ")


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (
            "minimum_tokens = 512",
            'minimum_tokens = 512\nauthor = "me"',
            ": unknown author; known are chat_template, draft, minimum_tokens, name, target, tokenizer",
        ),
        ('name = "pair"', 'name = ""', ": name must be a text, not ''"),
        ('name = "pair"', "name = 3", ": name must be a text, not 3"),
        (
            "minimum_tokens = 512",
            "minimum_tokens = -1",
            ": minimum_tokens must be a whole number of at least 0, not -1",
        ),
        (
            "minimum_tokens = 512",
            "minimum_tokens = true",
            ": minimum_tokens must be a whole number of at least 0, not True",
        ),
        (
            "rows = 8",
            "rows = 8\nheads = 2",
            " [draft]: unknown heads; known are blocks, capacities, checkpoint, numerics, rows",
        ),
        ("rows = 8", "", " [draft]: rows missing"),
        ("rows = 8", "rows = 0", " [draft]: rows must be a whole number of at least 1, not 0"),
        ("rows = 8", "rows = 17", " [draft]: rows 17 do not fit the shortest block of 16 tokens"),
        (
            'numerics = "f32"',
            "rows = 8",
            " [target]: unknown rows; known are blocks, capacities, checkpoint, numerics",
        ),
        ('numerics = "f32"', 'numerics = "int4"', " [target]: numerics 'int4' is none of f32, bf16, f16"),
        (
            "blocks = [16, 64, 256]",
            "blocks = []",
            " [draft]: blocks must be ascending whole numbers, such as [64, 256], not []",
        ),
        (
            "blocks = [16, 64, 256]",
            "blocks = 64",
            " [draft]: blocks must be ascending whole numbers, such as [64, 256], not 64",
        ),
        (
            "blocks = [16, 64, 256]",
            "blocks = [64, 16]",
            " [draft]: blocks must be ascending whole numbers, such as [64, 256], not [64, 16]",
        ),
        (
            "blocks = [16, 64, 256]",
            "blocks = [64, 64]",
            " [draft]: blocks must be ascending whole numbers, such as [64, 256], not [64, 64]",
        ),
        (
            "capacities = [1024, 4608]",
            "capacities = [1024.5]",
            " [draft]: capacities must be ascending whole numbers, such as [64, 256], not [1024.5]",
        ),
        (
            "capacities = [1024, 4608]",
            "capacities = [8, 4608]",
            " [draft]: capacity 8 holds no block, the shortest has 16 tokens",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_place_name_and_value(path: Path, old: str, new: str, text: str) -> None:
    assert refusal(edited(path, old, new)) == f"{path}{text}"


def test_a_model_that_is_no_table_is_refused(path: Path) -> None:
    top = RECIPE.partition("[draft]")[0]
    path.write_text(f'{top}draft = "small"\n[target]\ncheckpoint = "large"')
    assert (
        refusal(path) == f"{path} [draft] must be a table with blocks, capacities, checkpoint, numerics, rows"
    )


@pytest.mark.parametrize(("length", "step"), [(8, 16), (24, 16), (63, 16), (80, 64), (96, 64), (250, 64)])
def test_blocks_up_to_a_chunk_are_multiples_of_16_and_longer_ones_of_64(
    path: Path, length: int, step: int
) -> None:
    recipe = edited(path, "blocks = [256]", f"blocks = [{length}]")
    assert refusal(recipe) == (
        f"{path} [target]: block length {length} is not a multiple of {step}; the delta rule works in chunks "
        "of 64 (blocks up to 64: multiples of 16)"
    )


@pytest.mark.parametrize("length", [16, 32, 48, 64, 128, 192])
def test_whole_chunks_and_their_quarters_are_blocks(path: Path, length: int) -> None:
    assert read_recipe(edited(path, "blocks = [256]", f"blocks = [{length}]")).target.blocks == (length,)


def test_rows_may_fill_the_shortest_block(path: Path) -> None:
    assert read_recipe(edited(path, "rows = 8", "rows = 16")).draft.rows == 16
