"""The same recipe, device and tools give the same bytes, from any checkout, in any directory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.artifact.hashing import sha256_of
from tests.demo_builds import SHAPES

ROOT = Path(__file__).parents[2]
FILES = {
    *("manifest.json", "tokenizer.json", "chat_template.jinja"),
    *(f"{role}.{kind}" for role in ("draft", "target") for kind in ("vmfb", "irpa", "self_test.json")),
}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, elsewhere."""
    copy = tmp_path_factory.mktemp("another") / "checkout"
    for part in ("specprefill_jax", "compile", "artifacts/demo"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "demo_builds.py", copy / "tests")
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("device", SHAPES)
def test_another_checkout_builds_the_same_bytes_of_every_file(
    device: str, demo_of: Callable[[str], Path], checkout: Path, tmp_path: Path
) -> None:
    out = tmp_path / "far" / "away"
    environment = {**os.environ, "PYTHONPATH": str(checkout), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "tests.demo_builds", device, str(out)]
    out.parent.mkdir()
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"built by {checkout}" in done.stdout
    first, second = (
        {path.name: sha256_of(path) for path in folder.iterdir()} for folder in (demo_of(device), out)
    )
    kernels = set() if device == "cpu-portable" else {"draft.kernels.json", "target.kernels.json"}
    assert first.keys() == FILES | kernels
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == set()
