"""The true 0.8B and 4B shapes with random weights: do they compile, how fast are they, in how much memory?"""

import argparse
import dataclasses
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
from rich.table import Table
from true_shapes import (
    BLOCK,
    PRESETS,
    console,
    make_checkpoint,
    phases_of,
    resident,
    say,
    slots,
    write_recipe,
)

from specprefill_jax.aot.audit import compile_audited
from specprefill_jax.aot.build import describe_build, module_shapes
from specprefill_jax.aot.compiler import Commands, count_commands
from specprefill_jax.aot.export import export_module
from specprefill_jax.aot.recipe import ModelRecipe, Recipe, read_recipe
from specprefill_jax.aot.targets import target_for
from specprefill_jax.artifact.manifest import MANIFEST_NAME, Manifest
from specprefill_jax.cli.compile import build
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import ArtifactError, SpecPrefillError
from specprefill_jax.models.config import read_config
from specprefill_jax.settings import Settings

MOST_MEMORY = 22e9  # bytes: what a machine of 24 GB leaves to one program
GPU = "radeon-780m"
NEW_TOKENS = 8
SAMPLE_EVERY_S = 0.02

P = ParamSpec("P")
Made = TypeVar("Made")


@dataclasses.dataclass(frozen=True)
class Peak:
    """The most memory that a process had resident, in bytes.

    Attributes:
        anonymous: its own, sampled.
        file_backed: pages of mapped files, such as the weights, sampled.
        together: both at the same time, as the kernel noted it (VmHWM).
    """

    anonymous: int
    file_backed: int
    together: int


@dataclasses.dataclass(frozen=True)
class Built:
    """How the CPU artifact was made: seconds of each step, and memory without the compiler's."""

    steps: Mapping[str, float]
    memory: Peak


@dataclasses.dataclass(frozen=True)
class Ran:
    """One prompt on the CPU; `load_s` covers the check of the files and both self-tests."""

    load_s: float
    result: Mapping[str, Any]
    memory: Peak


@dataclasses.dataclass(frozen=True)
class GpuModule:
    """One model compiled for the GPU."""

    compile_s: float
    bytes: int
    layers: int
    entries: Mapping[str, Commands]


def main() -> int:
    """0 if everything compiles and runs within the memory, 1 if not, 2 if it cannot be tried."""
    options = parse()
    workdir: Path = options.workdir
    try:
        Settings(keep=options.keep)
        workdir.mkdir(parents=True, exist_ok=True)
        for name in PRESETS.values():
            make_checkpoint(workdir / name, "--preset", name)
        recipe = recipe_for(workdir, options.tokens, options.keep)
        compile_for_cpu(recipe, workdir / "cpu")
        ran = in_child(run_prompt, workdir / "cpu", options.tokens, options.keep)
        missed = report_run(ran)
        if not options.skip_gpu:
            report_gpu(in_child(compile_for_gpu, recipe))
    except (SpecPrefillError, OSError) as error:
        print(f"check_true_shapes: error: {error}", file=sys.stderr)
        return 2
    for bar in missed:
        print(f"check_true_shapes: missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="check_true_shapes", description=__doc__)
    parser.add_argument("workdir", type=Path, metavar="WORKDIR", help="40 GB of disk; kept for the next run")
    parser.add_argument("--tokens", type=int, default=4000, help="of the random prompt (default 4000)")
    parser.add_argument("--keep", type=float, default=0.3, help="share that the target reads (default 0.3)")
    parser.add_argument("--skip-gpu", action="store_true", help=f"do not compile for {GPU}")
    options = parser.parse_args()
    if options.tokens < BLOCK:
        parser.error(f"--tokens {options.tokens}: a prompt of at least {BLOCK} tokens, please")
    return options


def in_child(function: Callable[P, Made], *args: P.args, **kwargs: P.kwargs) -> Made:
    """What the function returns in a new process, whose memory is its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args, **kwargs).result()


def recipe_for(workdir: Path, tokens: int, keep: float) -> Path:
    """A recipe with one block length and caches just large enough for the prompt and the answer."""
    capacities = {
        "draft": [slots(tokens + Settings().lookahead)],
        "target": [max(2048, slots(math.ceil(keep * tokens) + NEW_TOKENS))],
    }
    return write_recipe(workdir / "true-shapes.toml", PRESETS, capacities)


def models(recipe: Recipe) -> dict[str, ModelRecipe]:
    """Both models by role."""
    return {"draft": recipe.draft, "target": recipe.target}


def export(role: str, model: ModelRecipe, device: str) -> str:
    """The program of a model before it is compiled."""
    say(f"tracing the {role} for {device}")
    return export_module(role, read_config(model.checkpoint), module_shapes(model, target_for(device)))


def compile_for_cpu(recipe: Path, out: Path) -> None:
    """The CPU artifact, unless the one that is there would be built again; and how it was made."""
    notes = out.with_suffix(".json")
    if in_child(is_current, recipe, out):
        say(f"using the artifact {out}")
    else:
        notes.unlink(missing_ok=True)
        built = in_child(build_and_measure, recipe, out)
        notes.write_text(json.dumps(dataclasses.asdict(built)), encoding="utf-8")
    if notes.is_file():
        report_build(json.loads(notes.read_text(encoding="utf-8")))


def is_current(recipe: Path, out: Path) -> bool:
    """Whether the recipe would give what `out` holds: the same programs, flags, tools and CPU."""
    if not (out / MANIFEST_NAME).is_file():
        return False
    plan, target = read_recipe(recipe), target_for("cpu")
    try:
        made = Manifest.read(out)
    except ArtifactError:
        return False
    texts = {role: export(role, model, "cpu") for role, model in models(plan).items()}
    device = dataclasses.replace(made.device, features=())  # follow from the shaders, of which a CPU has none
    return device == target.device and made.build == describe_build(plan, target, texts)


def build_and_measure(recipe: Path, out: Path) -> Built:
    """Build the artifact; to be called in a process of its own."""
    steps: dict[str, float] = {}
    current, since = "reading the recipe", time.perf_counter()

    def end() -> None:
        steps[current] = steps.get(current, 0.0) + time.perf_counter() - since

    def hear(step: str) -> None:
        nonlocal current, since
        say(step)
        end()
        current, since = step.partition(":")[0], time.perf_counter()  # "writing draft.irpa: 1 GiB" goes on

    with MemoryPeak() as memory:
        build(recipe, "cpu", out, hear)
    end()
    return Built(steps, memory.peak())


def run_prompt(artifact: Path, count: int, keep: float) -> Ran:
    """A prompt of random tokens through draft, selection and target; to be called in a process of its own."""
    say(f"opening {artifact}: checking the files, mapping the weights, self-tests")
    settings = Settings(mode="sparse", keep=keep, max_keep=0, max_tokens=NEW_TOKENS)
    with MemoryPeak() as memory, Waiting() as waiting:
        began = time.perf_counter()
        engine = Engine.load(artifact, "cpu", watch=waiting)
        load_s = time.perf_counter() - began
        say(f"running {count} tokens")
        tokens = np.random.default_rng(0).integers(engine.target.model.vocabulary, size=count, dtype=np.int32)
        result = engine.generate(tokens, settings, watch=waiting).to_json()
    return Ran(load_s, result, memory.peak())


def compile_for_gpu(recipe: Path) -> dict[str, GpuModule]:
    """Both modules, and what their entries submit. They are not run: there need not be such a GPU here."""
    return {role: compile_one_for_gpu(role, model) for role, model in models(read_recipe(recipe)).items()}


def compile_one_for_gpu(role: str, model: ModelRecipe) -> GpuModule:
    """One module, and its commands."""
    text, target = export(role, model, GPU), target_for(GPU)
    say(f"compiling the {role} for {GPU}")
    began = time.perf_counter()
    audited = compile_audited(text, target, f"{role} for {GPU}")
    compile_s = time.perf_counter() - began
    say(f"counting what the {role} submits on {GPU}")
    entries = count_commands(text, target.flags, f"{role} for {GPU}")
    layers = read_config(model.checkpoint).num_hidden_layers
    return GpuModule(compile_s, len(audited.module), layers, entries)


class MemoryPeak:
    """Watches the resident memory of this process while it is entered."""

    def __init__(self) -> None:
        self._anonymous = self._file_backed = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "MemoryPeak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def peak(self) -> Peak:
        """The most so far."""
        return Peak(self._anonymous, self._file_backed, resident()["VmHWM"])

    def _watch(self) -> None:
        while not self._ended.wait(SAMPLE_EVERY_S):
            found = resident()
            self._anonymous = max(self._anonymous, found["RssAnon"])
            self._file_backed = max(self._file_backed, found["RssFile"])


def report_build(built: Mapping[str, Any]) -> None:
    """How long the CPU artifact took, and its memory. From JSON, since it may be of an earlier run."""
    shown = Table(title="cpu: building the artifact")
    shown.add_column("step")
    shown.add_column("seconds", justify="right")
    for step, seconds in built["steps"].items():
        shown.add_row(step, f"{seconds:.1f}")
    console().print(shown)
    memory = Peak(**built["memory"])
    print(f"cpu: building: {in_words(memory)}")


def report_run(ran: Ran) -> list[str]:
    """Phases, speed and memory; what is missed, in words."""
    timings = ran.result["timings"]
    detail, new = timings["specprefill_detail"], ran.result["usage"]["completion_tokens"]
    by = {"lookahead": " (draft)", "head": " (target)", "decode": " (target)"}
    shown = Table(title=f"cpu: {detail['prompt']} tokens, {detail['kept']} kept, {new} new")
    for header in ("phase", "tokens", "ms", "tokens/s"):
        shown.add_column(header, justify="left" if header == "phase" else "right")
    for phase in phases_of(ran.result):
        speed = f"{phase.speed:.1f}" if phase.speed is not None else ""
        shown.add_row(phase.name + by.get(phase.name, ""), str(phase.tokens or ""), f"{phase.ms:,.0f}", speed)
    console().print(shown)
    print(f"cpu: status {timings['specprefill']} ({detail['reason']}), {detail['scoring']} scoring")
    first_token = timings["time_to_first_token_ms"] / 1000
    print(f"cpu: first token after {first_token:.1f} s, loaded in {ran.load_s:.1f} s")
    print(f"cpu: running: {in_words(ran.memory)}; the limit is {gigabytes(MOST_MEMORY)}")
    missed = []
    if timings["specprefill"] != "active":
        missed.append(f"status {timings['specprefill']} in place of active: {detail['reason']}")
    if ran.memory.together > MOST_MEMORY:
        missed.append(f"{gigabytes(ran.memory.together)} of memory, more than {gigabytes(MOST_MEMORY)}")
    return missed


def report_gpu(modules: Mapping[str, GpuModule]) -> None:
    """What each entry submits."""
    counted = [field.name for field in dataclasses.fields(Commands)]
    shown = Table(title=f"{GPU}: commands per call")
    for header in ("entry", *counted, "dispatches per layer"):
        shown.add_column(header, justify="left" if header == "entry" else "right", no_wrap=header == "entry")
    for role, module in modules.items():
        for name, counts in module.entries.items():
            per_layer = "" if name == "head" else f"{counts.dispatches / module.layers:.1f}"
            cells = (str(getattr(counts, field)) for field in counted)
            shown.add_row(f"{role} {name}", *cells, per_layer)
    console().print(shown)
    for role, module in modules.items():
        print(f"{GPU}: the {role} compiled in {module.compile_s:.0f} s to {module.bytes / 1e6:.1f} MB")


def in_words(peak: Peak) -> str:
    """The memory of a process."""
    return (
        f"peak anonymous {gigabytes(peak.anonymous)}, peak file-backed {gigabytes(peak.file_backed)}, "
        f"peak together {gigabytes(peak.together)}"
    )


def gigabytes(size: float) -> str:
    """Bytes in GB."""
    return f"{size / 1e9:.2f} GB"


if __name__ == "__main__":
    sys.exit(main())
