"""The same recipe, device and tools give the same bytes, from any checkout, in any directory."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path

import pytest

from specprefill_jax.artifact.hashing import sha256_of
from tests.demo_builds import ROOT, SHAPES, Builds

FILES = {
    *("manifest.json", "tokenizer.json", "chat_template.jinja"),
    *(f"{role}.{kind}" for role in ("draft", "target") for kind in ("vmfb", "irpa", "self_test.json")),
}


@pytest.fixture(scope="module")
def twice(
    demo_builds: Builds, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Future[Path], Future[Path]]]:
    """What this checkout and a copy of it elsewhere build, by device; all of them begin at once."""
    copy = tmp_path_factory.mktemp("another") / "checkout"
    for part in ("specprefill_jax", "compile", "artifacts/demo"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "demo_builds.py", copy / "tests")
    return {device: (demo_builds.begin(device), demo_builds.begin(device, copy)) for device in SHAPES}


@pytest.mark.slow
@pytest.mark.parametrize("device", SHAPES)
def test_another_checkout_builds_the_same_bytes_of_every_file(
    device: str, twice: dict[str, tuple[Future[Path], Future[Path]]]
) -> None:
    first, second = (
        {path.name: sha256_of(path) for path in built.result().iterdir()} for built in twice[device]
    )
    kernels = set() if device == "cpu-portable" else {"draft.kernels.json", "target.kernels.json"}
    assert first.keys() == FILES | kernels
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == set()
