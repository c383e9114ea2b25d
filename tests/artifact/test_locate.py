"""Finding artifacts by path and by name, and the embedded demo."""

from pathlib import Path

import pytest

from specprefill_jax.artifact import locate
from specprefill_jax.artifact.locate import cache_folder, demo_artifact, embedded, find_artifact
from specprefill_jax.errors import FileMissing
from tests.artifact.sample import write_artifact


@pytest.fixture(autouse=True)
def own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    assert find_artifact("some/where") == Path("some/where")
    assert find_artifact(str(tmp_path)) == tmp_path
    assert find_artifact(".") == Path()


def test_a_name_is_looked_up_in_artifacts_then_in_the_cache_then_here():
    places = [Path("artifacts/mine"), cache_folder() / "artifacts" / "mine", Path("mine")]
    for place in reversed(places):
        write_artifact(place)
        assert find_artifact("mine") == place


def test_a_directory_without_manifest_is_passed_over():
    Path("artifacts/mine").mkdir(parents=True)
    write_artifact(cache_folder() / "artifacts" / "mine")
    assert find_artifact("mine") == cache_folder() / "artifacts" / "mine"


def test_an_unknown_name_lists_where_it_was_looked_for():
    with pytest.raises(
        FileMissing, match=r"no artifact named 'mine': .*artifacts/mine, .*specprefill compile"
    ):
        find_artifact("mine")


def test_the_cache_folder_follows_the_environment(tmp_path: Path):
    assert cache_folder() == tmp_path / "cache" / "specprefill-jax"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout in miniature."""
    root = tmp_path / "checkout"
    for name in ("artifacts/demo/draft/model.safetensors", "compile/demo.toml", "package/models/layers.py"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("content")
    monkeypatch.setattr(locate, "_PACKAGE", root / "package")
    return root / "package"


def test_a_checkout_reads_embedded_files_where_they_lie(package: Path):
    assert embedded("artifacts/demo") == package.parent / "artifacts/demo"


def test_an_installed_package_reads_them_from_inside(package: Path):
    (package / "embedded" / "artifacts" / "demo").mkdir(parents=True)
    assert embedded("artifacts/demo") == package / "embedded" / "artifacts" / "demo"


def test_an_incomplete_installation_is_named(package: Path):
    with pytest.raises(FileMissing, match="artifacts/other is missing from this installation"):
        embedded("artifacts/other")


def test_the_compiled_demo_lies_in_the_cache_by_device(package: Path):
    cpu, vulkan = demo_artifact("cpu"), demo_artifact("vulkan")
    assert cpu.parent == vulkan.parent == cache_folder() / "artifacts"
    assert cpu.name.startswith("demo-cpu-")
    assert cpu == demo_artifact("cpu") != vulkan


@pytest.mark.parametrize(
    "changed", ["artifacts/demo/draft/model.safetensors", "compile/demo.toml", "package/models/layers.py"]
)
def test_whatever_the_compiled_demo_follows_from_leads_to_a_fresh_directory(changed: str, package: Path):
    before = demo_artifact("cpu")
    (package.parent / changed).write_text("other content")
    assert demo_artifact("cpu") != before


def test_code_for_this_machines_cpu_is_not_found_on_another(package: Path, monkeypatch: pytest.MonkeyPatch):
    here = {device: demo_artifact(device) for device in ("cpu", "vulkan")}
    monkeypatch.setattr(locate, "cpu_flags", lambda: frozenset({"of another CPU"}))
    assert demo_artifact("cpu") != here["cpu"]
    assert demo_artifact("vulkan") == here["vulkan"]


def test_compiled_python_files_do_not_count(package: Path):
    before = demo_artifact("cpu")
    (package / "models" / "__pycache__").mkdir()
    (package / "models" / "__pycache__" / "layers.pyc").write_bytes(b"x")
    assert demo_artifact("cpu") == before
