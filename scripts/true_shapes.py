"""What the scripts share that make, build and run random models of the true 0.8B and 4B shapes."""

import math
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from typing import Any

from rich.console import Console

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.models.config import TextConfig

PRESETS = {"draft": "0.8b", "target": "4b"}
BLOCK = 256

RECIPE = """\
name = "{name}"
minimum_tokens = 8192
tokenizer = "{target}/tokenizer.json"
chat_template = "chat_template.jinja"

[draft]
checkpoint = "{draft}"
blocks = [{block}]
capacities = {draft_slots}
rows = 8

[target]
checkpoint = "{target}"
blocks = [{block}]
capacities = {target_slots}
"""


@dataclass(frozen=True)
class Phase:
    """A phase of a request: what it read, and how long it took."""

    name: str
    tokens: int
    ms: float

    @property
    def speed(self) -> float | None:
        """Tokens per second; None where nothing was read."""
        return self.tokens / self.ms * 1000 if self.tokens and self.ms else None


def say(step: str) -> None:
    """Tell people who wait what goes on."""
    print(f"== {step}", file=sys.stderr, flush=True)


def presets() -> dict[str, TextConfig]:
    """The shapes of the released models, from the script that makes random ones."""
    loader = SourceFileLoader(
        "make_random_checkpoint", str(Path(__file__).with_name("make_random_checkpoint"))
    )
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module.PRESETS


def make_checkpoint(directory: Path, *shape: str) -> None:
    """Random weights, unless they are there. Written beside it and moved, so never half there.

    Args:
        shape: arguments of make_random_checkpoint that name it.

    Raises:
        OSError: they could not be made.
    """
    if (directory / "config.json").is_file():
        say(f"using the checkpoint {directory}")
        return
    say(f"making the random checkpoint {directory}")
    part = directory.with_name(f".{directory.name}-part")
    shutil.rmtree(part, ignore_errors=True)
    script = Path(__file__).with_name("make_random_checkpoint")
    done = subprocess.run([sys.executable, str(script), *shape, str(part)], check=False)
    if done.returncode:
        raise OSError(f"make_random_checkpoint {' '.join(shape)} failed (exit code {done.returncode})")
    part.rename(directory)


def write_recipe(
    path: Path, checkpoints: Mapping[str, str], capacities: Mapping[str, Sequence[int]], block: int = BLOCK
) -> Path:
    """A recipe of one block length; checkpoints and capacities by role, the former beside the recipe."""
    shutil.copyfile(embedded("artifacts/demo/chat_template.jinja"), path.with_name("chat_template.jinja"))
    text = RECIPE.format(
        name=path.stem,
        block=block,
        **checkpoints,
        **{f"{role}_slots": list(slots) for role, slots in capacities.items()},
    )
    path.write_text(text, encoding="utf-8")
    return path


def slots(tokens: float, block: int = BLOCK) -> int:
    """Whole blocks that hold the tokens and the padding of a last block."""
    return (math.ceil(tokens) + block + block - 1) // block * block


def phases_of(result: Mapping[str, Any]) -> list[Phase]:
    """The phases of a result of `specprefill run --json`, decode among them."""
    timings, new = result["timings"], result["usage"]["completion_tokens"]
    detail = timings["specprefill_detail"]
    read = {
        "draft_prefill": detail["draft_read"],
        "target_prefill": detail["kept"],
        "decode": new - 1,
    }
    phases = {**detail["phases"], "decode": timings["decode_ms"]}
    return [Phase(name, read.get(name, 0), ms) for name, ms in phases.items()]


def resident() -> dict[str, int]:
    """Memory of this process by the names of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    fields = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(kilobytes) * 1024 for name, kilobytes, _ in fields}


def console() -> Console:
    """Where tables go; wide enough for them when nobody watches."""
    return Console() if sys.stdout.isatty() else Console(width=110)
