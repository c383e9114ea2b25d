"""Artifacts: their files, a manifest that reads back, and what stops a build or a load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import Recipe
from specprefill_jax.artifact.host import cpu_name
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import FileMissing, RecipeError, Unproven
from specprefill_jax.models.checkpoint import ParameterSpec, parameter_specs
from specprefill_jax.models.config import TextConfig, read_config, write_config
from specprefill_jax.runtime.device import open_device
from specprefill_jax.runtime.program import Program
from tests.models.reference import ROWS, Pair

FILES = {
    "manifest.json",
    "draft.vmfb",
    "draft.irpa",
    "draft.self_test.json",
    "target.vmfb",
    "target.irpa",
    "target.self_test.json",
    "tokenizer.json",
    "chat_template.jinja",
}

Pairs = Callable[[str], Pair]


@pytest.fixture
def recipe(smallest_recipe: Recipe) -> Recipe:
    return smallest_recipe


@pytest.fixture
def artifact(smallest: tuple[Path, list[str]]) -> Path:
    return smallest[0]


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*")}


def test_an_artifact_is_these_files(artifact: Path) -> None:
    assert content(artifact).keys() == FILES


def matrices(config: TextConfig) -> list[ParameterSpec]:
    """All are multiples of the CPU's tile, so that none is padded."""
    return [spec for spec in parameter_specs(config) if spec.kind == "matrix"]


def test_the_manifest_reads_back_and_says_what_was_built(artifact: Path, pairs: Pairs) -> None:
    manifest = Manifest.read(artifact)
    assert (manifest.name, manifest.minimum_tokens) == ("smallest", 64)
    assert (manifest.device.name, manifest.device.driver, manifest.proof.kind) == (
        "cpu",
        "local-task",
        "self-test",
    )
    assert manifest.files.keys() == FILES - {"manifest.json"}
    assert manifest.build.recipe == {"name": "smallest", "draft": {"blocks": [16]}}
    assert manifest.build.stablehlo.keys() == {"draft", "target"}
    draft, config = manifest.models["draft"], pairs("draft").config
    assert (draft.rows, draft.blocks, draft.capacities, draft.numerics) == (ROWS, (16,), (32,), "f32")
    assert (draft.layers, draft.attention_layers, draft.vocabulary) == (4, 2, config.vocab_size)
    assert [tensor.name for tensor in draft.state] == [
        *("layers.0.conv", "layers.0.matrix", "layers.1.k", "layers.1.v"),
        *("layers.2.conv", "layers.2.matrix", "layers.3.k", "layers.3.v"),
    ]
    assert manifest.models["target"].rows == 0
    assert draft.largest_parameter == 4 * max(spec.shape[0] * spec.shape[1] for spec in matrices(config))
    assert (manifest.device.subgroup_sizes, manifest.device.features) == ((), ())
    assert manifest.device.cpu == cpu_name()


def test_the_steps_of_a_build_are_said(smallest: tuple[Path, list[str]]) -> None:
    said = smallest[1]
    for role in ("draft", "target"):
        for step in ("writing {}.irpa", "tracing the {}", "compiling the {} for cpu", "computing the {}'s"):
            assert any(line.startswith(step.format(role)) for line in said), step
    assert said[-1] == "hashing the files"


def test_a_built_artifact_proves_itself_when_loaded(artifact: Path) -> None:
    device = open_device("cpu")
    opened = open_artifact(artifact)
    for role in ("draft", "target"):
        assert Program.load(opened, role, device).largest_capacity == 32


def test_without_its_proof_it_is_refused_by_name(artifact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in artifact.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    manifest = Manifest.read(copy)
    replace(manifest, proof=replace(manifest.proof, kind="none", reason="wrong numbers there")).write(copy)
    with pytest.raises(Unproven, match=r"'smallest'.*wrong numbers there"):
        Program.load(open_artifact(copy), "draft", open_device("cpu"))


def test_models_with_different_vocabularies_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    config = replace(read_config(recipe.target.checkpoint), vocab_size=96)
    write_config(config, tmp_path, "float32")
    other = replace(recipe, target=replace(recipe.target, checkpoint=tmp_path))
    with pytest.raises(
        RecipeError, match="draft has 80 vocabulary rows and the target 96: they must share one"
    ):
        build_artifact(other, "cpu", tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "name"), [("tokenizer", "tokenizer.json"), ("chat_template", "chat_template.jinja")]
)
def test_a_missing_tokenizer_or_template_is_named(
    field: str, name: str, recipe: Recipe, tmp_path: Path
) -> None:
    missing = tmp_path / f"no-{name}"
    broken = replace(recipe, **{field: missing})
    with pytest.raises(FileMissing, match=rf"no {name} at {missing}, which the recipe names"):
        build_artifact(broken, "cpu", tmp_path / "out", print)
