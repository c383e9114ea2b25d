"""An artifact that is not what it says is refused with the reason, without a crash and without an answer."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file, save_file

from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.export import Shapes, export_module
from specprefill_jax.aot.recipe import ModelRecipe, Recipe
from specprefill_jax.aot.self_test import make_self_test
from specprefill_jax.aot.targets import target_for
from specprefill_jax.aot.weights import write_archive
from specprefill_jax.artifact.hashing import describe_files
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.artifact.verify import open_artifact
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.models import delta, qwen35
from specprefill_jax.models.config import TextConfig, read_config, write_config
from specprefill_jax.runtime.program import Program
from specprefill_jax.runtime.target import open_device_for
from tests.aot.mutations import KINDS, WEIGHTS, Mutation, WeightMutation, replaced

pytestmark = pytest.mark.deep

ANSWERED = "answered"


class Loader:
    """Loads artifacts in another process: what would crash it fails one test, and a new one takes over."""

    def __init__(self) -> None:
        self._pool = self._start()

    def __call__(self, directory: Path, device: str | None = None) -> str:
        """The class and the text of the refusal, or `ANSWERED`."""
        try:
            return self._pool.submit(load, directory, device).result()
        except BrokenProcessPool:
            self._pool = self._start()
            pytest.fail("loading it ended the process")

    def close(self) -> None:
        self._pool.shutdown()

    def _start(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def load(directory: Path, device: str | None) -> str:
    """Load every model of an artifact as an engine does; runs in the other process."""
    try:
        artifact = open_artifact(directory)
        opened = open_device_for(artifact.manifest, device)
        for role in artifact.manifest.models:
            Program.load(artifact, role, opened)
    except SpecPrefillError as error:
        return f"{type(error).__name__}: {error}"
    return ANSWERED


@pytest.fixture(scope="module")
def loader() -> Iterator[Loader]:
    made = Loader()
    yield made
    made.close()


@pytest.fixture
def copy(smallest: tuple[Path, list[str]], tmp_path: Path) -> Path:
    """A copy of the smallest artifact, to be changed by replacing files."""
    return linked(smallest[0], tmp_path / "copy")


def linked(source: Path, directory: Path) -> Path:
    directory.mkdir()
    for path in source.iterdir():
        os.link(path, directory / path.name)
    return directory


def rehashed(directory: Path) -> None:
    """Give the manifest the hashes of what is there."""
    manifest = Manifest.read(directory)
    (directory / "manifest.json").unlink()
    replace(manifest, files=describe_files(directory)).write(directory)


def test_the_artifact_that_all_the_others_are_made_of_loads(copy: Path, loader: Loader) -> None:
    assert loader(copy, "cpu") == ANSWERED
    rehashed(copy)
    assert loader(copy) == ANSWERED


def test_there_are_25_of_each_kind() -> None:
    assert len(KINDS) == 7
    for mutations in (*KINDS.values(), [*WEIGHTS, *MODULES]):
        assert len({mutation.name for mutation in mutations}) == len(mutations) >= 25


ALL = [mutation for mutations in KINDS.values() for mutation in mutations]


@pytest.mark.vulkan
@pytest.mark.parametrize("mutation", ALL, ids=[mutation.name for mutation in ALL])
def test_it_is_refused_with_the_reason(mutation: Mutation, copy: Path, loader: Loader) -> None:
    mutation.change(copy)
    refusal, _, text = loader(copy, mutation.device).partition(": ")
    assert refusal == mutation.refusal, text
    assert mutation.reason in text


# --- what only computing shows


@pytest.mark.parametrize("mutation", WEIGHTS, ids=[mutation.name for mutation in WEIGHTS])
def test_other_weights_under_right_hashes_fail_the_self_test(
    mutation: WeightMutation, copy: Path, loader: Loader, smallest_recipe: Recipe, tmp_path: Path
) -> None:
    model = getattr(smallest_recipe, mutation.role)
    tensors = load_file(model.checkpoint / "model.safetensors")
    mutation.change(tensors)
    changed = tmp_path / "checkpoint"
    changed.mkdir()
    save_file(tensors, changed / "model.safetensors")
    archive = copy / f"{mutation.role}.irpa"
    archive.unlink()
    write_archive(changed, read_config(model.checkpoint), shapes_of(model), archive, lambda _: None)
    rehashed(copy)
    assert loader(copy).startswith(
        f"SelfTestFailed: the {mutation.role} of artifact 'smallest' computes wrong"
    )


@dataclass(frozen=True)
class ModuleMutation:
    """A module that reads the same weights and computes something else: fields of the configuration, and
    functions of the model replaced by others while it is traced."""

    name: str
    config: Mapping[str, float] = field(default_factory=dict)
    patches: tuple[tuple[Any, str, Callable[..., Any]], ...] = ()


ROTARY = qwen35.rotary_phases


def by_slot(config: TextConfig, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    return ROTARY(config, jnp.arange(positions.shape[0], dtype=jnp.int32))


def everything_seen(slot: jax.Array, block: int, capacity: int) -> jax.Array:
    return jnp.zeros((block, capacity), jnp.float32)


MODULES = [
    ModuleMutation("another rotary base", {"rope_theta": 1e4}),
    ModuleMutation("another norm epsilon", {"rms_norm_eps": 1e-3}),
    ModuleMutation("rotation by slot, not by position", patches=((qwen35, "rotary_phases", by_slot),)),
    ModuleMutation("no causal mask", patches=((qwen35, "causal_mask", everything_seen),)),
    ModuleMutation("no decay in the delta rule", patches=((delta, "softplus", jnp.zeros_like),)),
]


@pytest.fixture(scope="module")
def two_layers(
    smallest: tuple[Path, list[str]], smallest_recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, TextConfig]:
    """An artifact of one model, the first delta and attention layer of the draft: quick to compile."""
    whole, place = smallest_recipe.draft.checkpoint, tmp_path_factory.mktemp("two-layers")
    config = read_config(whole)
    config = replace(config, layer_types=config.layer_types[:2])
    tensors = load_file(whole / "model.safetensors")
    kept = {key: values for key, values in tensors.items() if not re.search(r"layers\.[23]\.", key)}
    (place / "checkpoint").mkdir()
    write_config(config, place / "checkpoint", "float32")
    save_file(kept, place / "checkpoint" / "model.safetensors")
    directory = place / "artifact"
    directory.mkdir()
    for name in ("tokenizer.json", "chat_template.jinja"):
        os.link(smallest[0] / name, directory / name)
    shapes = shapes_of(smallest_recipe.target)
    write_archive(place / "checkpoint", config, shapes, directory / "target.irpa", lambda _: None)
    make_self_test(place / "checkpoint", config, shapes).write(directory / "target.self_test.json")
    (directory / "target.vmfb").write_bytes(compile_two_layers(traced(config, smallest_recipe.target)))
    manifest = Manifest.read(smallest[0])
    draft, target = manifest.models["draft"], manifest.models["target"]
    model = replace(
        draft,
        **{name: getattr(target, name) for name in ("module", "parameters", "self_test", "rows")},
        layers=2,
        attention_layers=1,
        state=tuple(tensor for tensor in draft.state if re.match(r"layers\.[01]\.", tensor.name)),
    )
    replace(manifest, models={"target": model}, files=describe_files(directory)).write(directory)
    return directory, config


def shapes_of(model: ModelRecipe) -> Shapes:
    return Shapes(model.blocks, model.capacities, model.rows, "f32", target_for("cpu").tile("f32"))


def traced(config: TextConfig, model: ModelRecipe, mutation: ModuleMutation | None = None) -> str:
    """The program of two layers, or of another than these."""
    with pytest.MonkeyPatch.context() as patch:
        for place, name, function in mutation.patches if mutation else ():
            patch.setattr(place, name, function)
        return export_module(
            "target", replace(config, **mutation.config) if mutation else config, shapes_of(model)
        )


def compile_two_layers(text: str) -> bytes:
    return compile_module(text, target_for("cpu").flags, "two layers")


@pytest.fixture(scope="module")
def modules(
    two_layers: tuple[Path, TextConfig], smallest_recipe: Recipe
) -> Iterator[dict[str, Future[bytes]]]:
    """The other modules, by name. The compiler works on one core, so two of them at a time."""
    texts = {each.name: traced(two_layers[1], smallest_recipe.target, each) for each in MODULES}
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(compile_two_layers, text) for name, text in texts.items()}


def test_the_artifact_of_two_layers_loads(two_layers: tuple[Path, TextConfig], loader: Loader) -> None:
    assert loader(two_layers[0]) == ANSWERED


@pytest.mark.parametrize("mutation", MODULES, ids=[mutation.name for mutation in MODULES])
def test_another_module_under_right_hashes_fails_the_self_test(
    mutation: ModuleMutation,
    two_layers: tuple[Path, TextConfig],
    modules: dict[str, Future[bytes]],
    loader: Loader,
    tmp_path: Path,
) -> None:
    copy = linked(two_layers[0], tmp_path / "copy")
    module = modules[mutation.name].result()
    assert module != (copy / "target.vmfb").read_bytes()
    replaced(copy / "target.vmfb", module)
    rehashed(copy)
    assert loader(copy).startswith("SelfTestFailed: the target of artifact 'smallest' computes wrong")
