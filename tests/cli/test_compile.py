"""`specprefill compile`, and the demo pair that `run` compiles on first use."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from specprefill_jax.cli import load
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Engine
from specprefill_jax.errors import CompileError, DeviceError, FileMissing
from tests.cli.conftest import Run
from tests.engine.fake import make


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Stands in for the compile side: writes a manifest and notes what was asked for."""
    asked: list[tuple[str, str]] = []

    def build_artifact(recipe: str, device: str, out: Path, progress: Callable[[str], None]) -> Path:
        progress(f"Lowering for {device}")
        out.mkdir()
        (out / "draft.vmfb").write_text(f"{len(asked)}")
        if recipe == "broken":
            raise CompileError("target: stage executable-targets: no such op")
        (out / "manifest.json").write_text("{}")
        asked.append((recipe, device))
        return out

    recipe, build = ModuleType("recipe"), ModuleType("build")
    recipe.__dict__["read_recipe"] = lambda path: path.read_text()
    build.__dict__["build_artifact"] = build_artifact
    monkeypatch.setitem(sys.modules, "specprefill_jax.aot.recipe", recipe)
    monkeypatch.setitem(sys.modules, "specprefill_jax.aot.build", build)
    Path("pair.toml").write_text("whole")
    Path("broken.toml").write_text("broken")
    return asked


def test_an_artifact_is_built_and_its_directory_printed(built: list[tuple[str, str]], specprefill: Run):
    ran = specprefill("compile", "pair.toml", "--device", "vulkan")
    assert ran == (0, "artifacts/pair-vulkan\n", "Lowering for vulkan\n")
    assert built == [("whole", "vulkan")]
    assert Path("artifacts/pair-vulkan/manifest.json").is_file()
    assert [path.name for path in Path("artifacts").iterdir()] == ["pair-vulkan"]


def test_a_build_that_fails_leaves_nothing_behind(built: list[tuple[str, str]], specprefill: Run):
    ran = specprefill("compile", "broken.toml")
    assert ran.status == 1
    assert ran.err.endswith("specprefill: error: target: stage executable-targets: no such op\n")
    assert list(Path("artifacts").iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(built: list[tuple[str, str]], specprefill: Run):
    Path("taken").write_text("a file")
    ran = specprefill("compile", "pair.toml", "--out", "taken/pair")
    assert ran.status == 2
    assert "the artifact cannot be written to taken/pair: " in ran.err


def test_a_build_that_fails_leaves_the_artifact_of_before(built: list[tuple[str, str]], specprefill: Run):
    specprefill("compile", "pair.toml", "--out", "here")
    assert specprefill("compile", "broken.toml", "--out", "here").status == 1
    assert Path("here/draft.vmfb").read_text() == "0"
    assert Path("here/manifest.json").is_file()


def test_building_again_replaces_the_artifact(built: list[tuple[str, str]], specprefill: Run):
    specprefill("compile", "pair.toml", "--out", "here")
    Path("here/stale").write_text("")
    assert specprefill("compile", "pair.toml", "--out", "here").status == 0
    assert sorted(path.name for path in Path("here").iterdir()) == ["draft.vmfb", "manifest.json"]
    assert Path("here/draft.vmfb").read_text() == "1"


def test_a_directory_that_is_no_artifact_is_not_replaced(built: list[tuple[str, str]], specprefill: Run):
    Path("mine").mkdir()
    Path("mine/diary.txt").write_text("dear")
    ran = specprefill("compile", "pair.toml", "--out", "mine")
    assert ran.status == 2
    assert "--out mine is there and is not an artifact; name another directory" in ran.err
    assert Path("mine/diary.txt").read_text() == "dear"


def test_an_unknown_device_is_refused_with_the_known_ones(built: list[tuple[str, str]], specprefill: Run):
    ran = specprefill("compile", "pair.toml", "--device", "tpu")
    assert ran.status == 2
    assert "unknown device 'tpu'; the known ones are cpu, " in ran.err


@pytest.fixture
def serving_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specprefill_jax.cli.compile._installed", lambda name: "jax" not in name)


@pytest.mark.usefixtures("serving_only")
@pytest.mark.parametrize("command", [["compile", "pair.toml"], ["run", "x"], ["score", "x"]])
def test_without_the_compiler_it_says_which_extra_to_install(
    specprefill: Run, monkeypatch: pytest.MonkeyPatch, command: list[str]
):
    monkeypatch.setattr("specprefill_jax.cli.load.demo_artifact", lambda device: Path("nowhere"))
    monkeypatch.setattr("specprefill_jax.cli.compile.embedded", Path)
    ran = specprefill(*command)
    assert ran.status == 2
    assert "compiling for cpu needs jax, and only serving is installed here" in ran.err
    assert 'pip install "specprefill-jax[compile]"' in ran.err


# --- the demo pair


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, object]]:
    """What `Engine.load` was called with."""
    loaded: list[tuple[object, object]] = []

    class Recorder:
        @staticmethod
        def load(artifact: object, device: object, *, self_test: bool, watch: object) -> Engine:
            assert self_test
            loaded.append((artifact, device))
            return make().engine

    monkeypatch.setattr(load, "Engine", Recorder)
    return loaded


def test_the_demo_pair_is_compiled_on_first_use_only(
    built: list[tuple[str, str]], engines: list[tuple[object, object]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("specprefill_jax.cli.compile.embedded", lambda name: Path("pair.toml"))
    monkeypatch.setattr(load, "demo_artifact", lambda device: Path("cache") / device)
    monkeypatch.setattr(load, "check_present", lambda device: None)
    for device in ("vulkan", "vulkan", None):
        load.load_engine(None, device, Waiting())
    assert built == [("whole", "vulkan"), ("whole", "cpu")]
    assert engines == [(Path("cache/vulkan"), "vulkan")] * 2 + [(Path("cache/cpu"), "cpu")]


def test_nothing_is_compiled_for_a_device_that_is_not_here(
    built: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(load, "demo_artifact", lambda device: Path("cache") / device)
    with pytest.raises(DeviceError):
        load.load_engine(None, "radeon-780m", Waiting())
    assert built == []


def test_nothing_is_compiled_to_be_run_where_nothing_can_prove_it(
    built: list[tuple[str, str]], specprefill: Run
):
    ran = specprefill("run", "x", "--device", "hip-gfx1103")
    assert ran.status == 2
    assert "'hip-gfx1103' can be compiled for but not run: nothing that was compiled for HIP" in ran.err
    assert built == []


def test_the_self_test_is_skipped_on_request_only(monkeypatch: pytest.MonkeyPatch, specprefill: Run):
    asked: list[bool] = []

    def load_engine(*_: object, self_test: bool) -> Engine:
        asked.append(self_test)
        return make().engine

    monkeypatch.setattr("specprefill_jax.cli.run.load_engine", load_engine)
    specprefill("run", "x", "--max-tokens", "1")
    specprefill("run", "x", "--max-tokens", "1", "--skip-self-test")
    assert asked == [True, False]


def test_a_named_artifact_is_loaded_for_its_own_device(engines: list[tuple[object, object]]):
    load.load_engine("mine", None, Waiting())
    assert engines == [("mine", None)]


def test_an_unknown_device_is_refused_before_anything_is_compiled(built: list[tuple[str, str]]):
    with pytest.raises(DeviceError, match="unknown device 'tpu'"):
        load.load_engine(None, "tpu", Waiting())
    assert built == []


def test_without_compiler_the_engine_itself_says_that_the_pair_is_not_compiled():
    with pytest.raises(FileMissing, match="not compiled for vulkan; `specprefill run --device vulkan`"):
        Engine.load(None, "vulkan")
