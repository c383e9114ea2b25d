"""The same recipe, device and tools give the same bytes, from any checkout, in any directory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep

ROOT = Path(__file__).parents[2]
DEVICES = ("cpu-portable", "vulkan", "radeon-780m")
FILES = {
    *("manifest.json", "tokenizer.json", "chat_template.jinja"),
    *(f"{role}.{kind}" for role in ("draft", "target") for kind in ("vmfb", "irpa", "self_test.json")),
}

# The demo pair in each device's own number format, in one bucket: all buckets of compile/demo.toml take three
# times as long, and go through the same code.
BUILD = """
import dataclasses, json, sys
from pathlib import Path
import specprefill_jax
from specprefill_jax.aot.build import build_artifact
from specprefill_jax.aot.recipe import read_recipe
from specprefill_jax.artifact.hashing import sha256_of
from specprefill_jax.artifact.locate import embedded

checkout, out, *devices = sys.argv[1:]
assert Path(specprefill_jax.__file__).is_relative_to(checkout)
recipe = read_recipe(embedded("compile/demo.toml"))
draft, target = (
    dataclasses.replace(model, blocks=(64,), capacities=(512,), numerics=None)
    for model in (recipe.draft, recipe.target)
)
recipe = dataclasses.replace(recipe, draft=draft, target=target)
hashes = {}
for device in devices:
    built = build_artifact(recipe, device, Path(out) / device, lambda step: None)
    hashes[device] = {path.name: sha256_of(path) for path in built.iterdir()}
print(json.dumps(hashes))
"""


def build(checkout: Path, out: Path) -> dict[str, dict[str, str]]:
    """The sha256 of every file that a checkout builds, by device; in a process of its own."""
    out.mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(checkout), str(out), *DEVICES],
        capture_output=True,
        text=True,
        check=False,
        cwd=out,
        env={**os.environ, "PYTHONPATH": str(checkout)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, str]]]:
    """What this checkout and a copy of it elsewhere build."""
    place = tmp_path_factory.mktemp("rebuild")
    copy = place / "another" / "checkout"
    for part in ("specprefill_jax", "compile", "artifacts/demo"):
        shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(build, (ROOT, copy), (place / "here", place / "far" / "away")))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_two_checkouts_build_the_same_bytes_of_every_file(
    device: str, twice: list[dict[str, dict[str, str]]]
) -> None:
    first, second = (hashes[device] for hashes in twice)
    kernels = set() if device == "cpu-portable" else {"draft.kernels.json", "target.kernels.json"}
    assert first.keys() == FILES | kernels
    assert {name for name in first if first[name] != second[name]} == set()
