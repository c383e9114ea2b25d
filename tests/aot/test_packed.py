"""scripts/gpu_check: an artifact is carried without its weights, which are written anew where it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.artifacts import pack, unpack, write_weights

from specprefill_jax.aot.recipe import Recipe
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import FileMissing, HashMismatch
from tests.models.reference import Pair


@pytest.fixture
def unpacked(smallest: tuple[Path, list[str]], tmp_path: Path) -> Path:
    pack(smallest[0], tmp_path / "packed")
    assert not list((tmp_path / "packed").glob("*.irpa"))
    unpack(tmp_path / "packed", tmp_path / "here")
    with pytest.raises(FileMissing):
        open_artifact(tmp_path / "here")
    return tmp_path / "here"


def test_the_weights_come_out_as_the_build_wrote_them(unpacked: Path, smallest_recipe: Recipe) -> None:
    write_weights(unpacked, "draft", smallest_recipe.draft.checkpoint)
    write_weights(unpacked, "target", smallest_recipe.target.checkpoint)
    open_artifact(unpacked)


def test_weights_of_another_checkpoint_are_refused(
    unpacked: Path, smallest_recipe: Recipe, pairs: Callable[[str], Pair], tmp_path: Path
) -> None:
    write_weights(unpacked, "draft", smallest_recipe.draft.checkpoint)
    write_weights(unpacked, "target", smallest_recipe.target.checkpoint)
    archive = unpacked / "target.irpa"
    changed = bytearray(archive.read_bytes())
    changed[-1] ^= 1
    archive.write_bytes(changed)
    with pytest.raises(HashMismatch, match=r"target\.irpa"):
        open_artifact(unpacked)


def test_weights_stay_only_while_the_artifact_is_the_same(unpacked: Path, tmp_path: Path) -> None:
    (unpacked / "draft.irpa").write_bytes(b"weights")
    unpack(tmp_path / "packed", unpacked)
    assert (unpacked / "draft.irpa").is_file()
    manifest = tmp_path / "packed" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "name": "other"}))
    unpack(tmp_path / "packed", unpacked)
    assert not (unpacked / "draft.irpa").is_file()
