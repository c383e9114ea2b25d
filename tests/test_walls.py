"""The rooms of the package and who may know whom: docs/architecture.md, enforced."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specprefill_jax"

SETTINGS = {"settings", "errors"}
SERVE = SETTINGS | {"artifact"}
PARTS = {"runtime", "scoring", "selection", "policy", "sampling", "chat", "outline", "pins"}
COMPILE = {"models", "formats", "artifact", "errors"}

# room -> the rooms it may import. Every edge goes to a lower floor, but for the checkpoint table, for what
# preflight must know as the compiler's side does (a shader's words, the products that a target has), and for
# the memory plan, which asks scoring and selection what they will read and keep.
FLOORS: dict[str, set[str]] = {
    "errors": set(),
    "settings": {"errors"},
    "artifact": {"errors"},
    # serve side
    "runtime": SERVE,
    "scoring": SETTINGS,
    "selection": SETTINGS,
    "policy": SERVE | {"scoring", "selection"},
    "sampling": SETTINGS,
    "chat": SERVE,
    "outline": SETTINGS | {"chat"},
    "pins": SETTINGS | {"outline"},
    "engine": SERVE | PARTS,
    "session": SERVE | PARTS | {"engine"},
    "server": SETTINGS | {"session", "engine", "report"},
    "quality": SERVE | PARTS | {"session", "engine"},
    # values in, text or HTML out: it may name the values
    "report": SETTINGS | {"policy", "selection", "engine", "quality"},
    # compile side
    "formats": {"errors"},
    "hub": {"errors"},
    "models": {"formats", "errors"},
    "aot": COMPILE,
    "preflight": COMPILE | {"aot"},
}
FLOORS["cli"] = set(FLOORS)

# `kernels` is what `preflight` prints; it is imported when that verb runs.
COMPILE_COMMANDS = {f"specprefill_jax.cli.{name}" for name in ("compile", "preflight", "kernels")}
COMPILE_SIDE = {"models", "formats", "hub", "preflight", "aot"}
COMPILE_LIBRARIES = {"jax", "jaxlib", "iree.compiler", "safetensors", "ml_dtypes"}
REFERENCES = {"torch", "transformers", "scipy"}

# room -> the libraries beyond Python's own that it may import; a room not named here: LIBRARIES_OF_ANY.
LIBRARIES_OF_ANY = {"numpy", "jaxtyping"}
LIBRARIES: dict[str, set[str]] = {
    "artifact": LIBRARIES_OF_ANY | {"platformdirs"},
    "settings": LIBRARIES_OF_ANY | {"platformdirs"},
    "runtime": LIBRARIES_OF_ANY | {"iree.runtime"},
    "chat": LIBRARIES_OF_ANY | {"tokenizers", "jinja2"},
    "quality": LIBRARIES_OF_ANY | {"hard_needle"},
    "report": LIBRARIES_OF_ANY | {"rich", "matplotlib"},
    "cli": LIBRARIES_OF_ANY | {"rich"},
    "models": LIBRARIES_OF_ANY | {"jax", "ml_dtypes"},
    "formats": LIBRARIES_OF_ANY | {"ml_dtypes", "safetensors"},
    "preflight": LIBRARIES_OF_ANY | {"vulkan"},
    "aot": LIBRARIES_OF_ANY | {"jax", "ml_dtypes", "iree.compiler", "iree.runtime"},
}


@dataclass(frozen=True)
class Import:
    """One import statement, wherever in a module it stands."""

    importer: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, importer: str) -> Iterator[Import]:
    """Imports at any depth, those for type checkers and `import_module("name")` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (Import(importer, node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            # `from iree import compiler` and `from specprefill_jax import engine` name modules
            if base in ("iree", "specprefill_jax"):
                yield from (Import(importer, node.lineno, f"{base}.{alias.name}") for alias in node.names)
            else:
                yield Import(importer, node.lineno, base)
        elif isinstance(node, ast.Call) and node.args and isinstance(name := node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in ("import_module", "__import__") and isinstance(name.value, str):
                yield Import(importer, node.lineno, name.value)


def room_of(module: str) -> str:
    """`specprefill_jax.artifact.manifest` -> `artifact`; the package itself is the room ''."""
    return module.removeprefix("specprefill_jax").removeprefix(".").partition(".")[0]


def library_of(target: str) -> str | None:
    """The library that an import outside the package needs; None for Python's own."""
    parts = target.split(".")
    if parts[0] in sys.stdlib_module_names:
        return None
    return ".".join(parts[:2]) if parts[0] == "iree" else parts[0]


MODULES = {module_name(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
IMPORTS = [found for name, source in MODULES.items() for found in imports_of(source, name)]
INSIDE = [found for found in IMPORTS if found.target.partition(".")[0] == "specprefill_jax"]


def broken_floors(imports: list[Import]) -> list[str]:
    return [
        str(found)
        for found in imports
        if (here := room_of(found.importer)) not in ("", "__main__")
        and (there := room_of(found.target)) not in (here, "__version__")
        and there not in FLOORS[here]
    ]


def foreign_libraries(imports: list[Import]) -> list[str]:
    return [
        str(found)
        for found in imports
        if (library := library_of(found.target)) not in (None, "specprefill_jax")
        and library not in LIBRARIES.get(room_of(found.importer), LIBRARIES_OF_ANY)
    ]


# --- the house


def test_every_module_belongs_to_a_room() -> None:
    assert {room_of(name) for name in MODULES} - {"", "__main__"} <= set(FLOORS)


def test_imports_only_go_down() -> None:
    assert broken_floors(INSIDE) == []


def test_a_room_uses_only_the_libraries_that_are_its_own() -> None:
    assert foreign_libraries(IMPORTS) == []


def test_of_the_models_only_the_checkpoint_table_knows_file_formats() -> None:
    knowing = {found.importer for found in INSIDE if room_of(found.target) == "formats"}
    assert {name for name in knowing if room_of(name) == "models"} <= {"specprefill_jax.models.checkpoint"}


def test_preflight_knows_of_the_compiler_only_its_targets_and_its_readers_of_kernels() -> None:
    known = {found.target for found in INSIDE if room_of(found.importer) == "preflight"}
    assert {target for target in known if room_of(target) == "aot"} == {
        "specprefill_jax.aot.executables",
        "specprefill_jax.aot.spirv",
        "specprefill_jax.aot.targets",
    }


def test_only_the_child_process_of_preflight_knows_vulkan() -> None:
    knowing = {found.importer for found in IMPORTS if library_of(found.target) == "vulkan"}
    assert knowing == {"specprefill_jax.preflight.child"}
    inside = [found for found in INSIDE if found.importer == "specprefill_jax.preflight.child"]
    assert inside == [], "the child is started without the package"


def test_of_the_commands_only_these_reach_the_compile_side() -> None:
    reaching = {
        found.importer
        for found in INSIDE
        if room_of(found.importer) == "cli" and room_of(found.target) in COMPILE_SIDE
    }
    assert reaching == COMPILE_COMMANDS


def test_no_import_is_relative() -> None:
    relative = [
        f"{name}, line {node.lineno}"
        for name, source in MODULES.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_the_architecture_document_draws_every_room() -> None:
    document = (ROOT / "docs" / "architecture.md").read_text()
    picture = document.split("```")[3]
    assert {room for room in map(room_of, MODULES) if room and room not in picture} == set()


# --- the tests above can fail


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("engine", "from specprefill_jax.aot.export import export"),
        ("engine", "def late():\n    import specprefill_jax.cli"),
        ("selection.scores", "from specprefill_jax.runtime import device"),
        ("runtime.program", "from specprefill_jax import engine"),
        ("errors", "from specprefill_jax.settings import Settings"),
        ("aot.recipe", "from specprefill_jax.runtime.program import Program"),
        ("models.layers", "from specprefill_jax.artifact import manifest"),
    ],
)
def test_an_import_that_climbs_is_found(importer: str, statement: str) -> None:
    assert len(broken_floors(list(imports_of(statement, f"specprefill_jax.{importer}")))) == 1


@pytest.mark.parametrize(
    ("importer", "statement"),
    [
        ("runtime.program", "import jax.numpy as jnp"),
        ("runtime.program", "if True:\n    from iree import compiler"),
        ("runtime.program", "import importlib\nimportlib.import_module('iree.compiler')"),
        ("scoring.windows", "from iree.runtime import HalDevice"),
        ("engine", "import tokenizers"),
        ("artifact.manifest", "import ml_dtypes"),
        ("models.qwen35", "from safetensors import safe_open"),
    ],
)
def test_a_library_behind_a_wall_is_found(importer: str, statement: str) -> None:
    assert len(foreign_libraries(list(imports_of(statement, f"specprefill_jax.{importer}")))) == 1


def test_an_import_that_goes_down_is_no_finding() -> None:
    source = "from specprefill_jax.errors import FileMissing\nimport json\nimport iree.runtime as runtime"
    found = list(imports_of(source, "specprefill_jax.runtime.device"))
    assert broken_floors([found[0]]) == []
    assert foreign_libraries(found) == []


# --- a bare environment

BARE = """
import importlib, json, sys
from importlib.abc import MetaPathFinder

blocked, modules = json.loads(sys.argv[1])

class Bare(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if any(name == wall or name.startswith(wall + ".") for wall in blocked):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare())
for name in modules:
    importlib.import_module(name)
print(json.dumps(sorted(sys.modules)))
"""


def modules_after_importing(modules: list[str], blocked: set[str]) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", BARE, json.dumps([sorted(blocked), modules])],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout))


def test_everything_that_serves_imports_without_jax_and_without_a_compiler() -> None:
    # iree.runtime itself needs ml_dtypes, so that one is there; our serving modules do not import it (above).
    blocked = COMPILE_LIBRARIES - {"ml_dtypes"} | REFERENCES
    serving = [
        name
        for name in MODULES
        if room_of(name) not in COMPILE_SIDE | {"__main__"} and name not in COMPILE_COMMANDS
    ]
    assert "specprefill_jax.chat" in modules_after_importing(serving, blocked)


def test_a_blocked_library_would_be_noticed() -> None:
    with pytest.raises(AssertionError, match="No module named 'numpy'"):
        modules_after_importing(["specprefill_jax.chat"], {"numpy"})


def test_importing_the_package_alone_is_cheap() -> None:
    loaded = modules_after_importing(["specprefill_jax"], set())
    heavy = {"numpy", "jax", "iree", "tokenizers", "jinja2", "rich", "jaxtyping", "ml_dtypes"}
    assert loaded & heavy == set()


def test_the_package_offers_its_names_when_they_are_first_used() -> None:
    import specprefill_jax
    from specprefill_jax.errors import SpecPrefillError
    from specprefill_jax.settings import Settings

    assert specprefill_jax.SpecPrefillError is SpecPrefillError
    assert specprefill_jax.Settings is Settings
    assert dir(specprefill_jax) == ["Engine", "Settings", "SpecPrefillError", "__version__"]
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        specprefill_jax.Motor  # noqa: B018
