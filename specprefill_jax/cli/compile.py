"""`specprefill compile`: builds an artifact for one device from a recipe."""

import argparse
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.artifact.manifest import MANIFEST_NAME
from specprefill_jax.artifact.targets import known_target
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.errors import CompilerMissing, SettingError, SpecPrefillError

COMPILE_LIBRARIES = ("jax", "iree.compiler", "ml_dtypes")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "compile",
        help="build an artifact from a recipe",
        description="Build an artifact for one device from a recipe, and print its directory.",
        allow_abbrev=False,
    )
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="a recipe (TOML); compile/ has some")
    parser.add_argument(
        "--device", default="cpu", metavar="NAME", help="see `specprefill devices` (default: cpu)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="where to write it (default: artifacts/RECIPE-DEVICE)"
    )
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Build, and print the artifact's directory."""
    out = arguments.out or Path("artifacts") / f"{arguments.recipe.stem}-{arguments.device}"
    with Waiting() as waiting:
        build(arguments.recipe, arguments.device, out, waiting.say)
    print(out)
    return 0


def compile_demo(device: str, directory: Path, say: Callable[[str], None]) -> None:
    """Compile the embedded demo pair for a device into `directory`.

    Raises:
        CompilerMissing: only serving is installed.
        CompileError: the compiler refuses a program for this device.
    """
    build(embedded("compile/demo.toml"), device, directory, say)


def build(recipe: Path, device: str, out: Path, say: Callable[[str], None]) -> None:
    """Build the artifact of `recipe` for `device`; `out` appears, or is replaced, once it is complete.

    Raises:
        CompilerMissing: only serving is installed.
        DeviceError: the device is unknown.
        SettingError: `out` is there and is no artifact, or cannot be written.
        RecipeError, ConfigError, CheckpointError: the recipe, or what it names, cannot be compiled.
        CompileError: the compiler refuses a program for this device.
    """
    known_target(device)
    if out.exists() and not (out / MANIFEST_NAME).is_file() and (out.is_file() or any(out.iterdir())):
        raise SettingError(f"--out {out} is there and is not an artifact; name another directory")
    require_libraries(COMPILE_LIBRARIES, CompilerMissing, "compile", f"compiling for {device}")
    from specprefill_jax.aot.build import build_artifact
    from specprefill_jax.aot.recipe import read_recipe

    plan = read_recipe(recipe)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            made = Path(scratch) / "artifact"
            build_artifact(plan, device, made, say)
            _put(made, out, Path(scratch) / "replaced")
    except OSError as error:
        raise SettingError(
            f"the artifact cannot be written to {out}: {error.strerror or error}. Name another place: --out, "
            "or XDG_CACHE_HOME for the demo pair"
        ) from error


def _put(made: Path, out: Path, replaced: Path) -> None:
    """Move a finished artifact into place. Whoever comes second replaces what the first put there."""
    if out.exists():
        os.replace(out, replaced)
    shutil.move(made, out)


def require_libraries(names: Sequence[str], error: type[SpecPrefillError], extra: str, doing: str) -> None:
    """Raises: `error`, where one of the libraries that `doing` takes is not installed; it names the extra."""
    missing = [name for name in names if not _installed(name)]
    if missing:
        raise error(
            f"{doing} needs {', '.join(missing)}, and only serving is installed here: "
            f'pip install "specprefill-jax[{extra}]"'
            + (", or name a compiled artifact (--artifact)" if extra == "compile" else "")
        )


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package around a submodule is missing
        return False
