"""scripts/preflight_gemms: shapes, llama.cpp's rules, where its shaders come from, and a product of ours."""

from __future__ import annotations

import importlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from specprefill_jax.aot.targets import target_for
from specprefill_jax.errors import CompileError, FileMissing
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.model import Prediction
from tests.preflight.sample import GPU, kernel

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHADERS = "ggml/src/ggml-vulkan/vulkan-shaders"
CORES = 12  # of a 780M


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """Scripts import each other from their own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield


@pytest.fixture(scope="module")
def gemms(scripts: None) -> ModuleType:
    return importlib.import_module("preflight_gemms")


@pytest.fixture(scope="module")
def llama(scripts: None) -> ModuleType:
    return importlib.import_module("llama_matmul")


def test_the_shapes_are_those_of_the_stacked_matrices(gemms: ModuleType) -> None:
    shapes = gemms.shapes_of("0.8b", gemms.presets()["0.8b"])
    assert {(shape.names, shape.count): (shape.outputs, shape.inputs) for shape in shapes} == {
        (("gate_up_proj",), 24): (2 * 3584, 1024),
        (("down_proj",), 24): (1024, 3584),
        (("in_proj_qkvz",), 18): (3 * 2048 + 2048, 1024),
        (("out_proj", "o_proj"), 18 + 6): (1024, 2048),
        (("qk_proj",), 6): (2 * 2048 + 512, 1024),
        (("v_proj",), 6): (512, 1024),
    }


@pytest.mark.parametrize(
    ("outputs", "tokens", "size"),
    [(1024, 256, "l"), (65, 65, "l"), (64, 256, "m"), (1024, 64, "m"), (32, 256, "s"), (1024, 32, "s")],
)
def test_llamas_tile_follows_from_outputs_and_tokens(
    llama: ModuleType, outputs: int, tokens: int, size: str
) -> None:
    assert llama.tile_size(outputs, tokens) == size


def test_the_waves_of_llamas_workgroups_cover_their_tiles(llama: ModuleType) -> None:
    for variant in llama.VARIANTS:
        for tile in variant.tiles.values():
            threads, outputs, tokens, _, wave_outputs, wave_tokens, *_, lanes = tile.words
            assert (outputs, tokens, lanes) == (tile.outputs, tile.tokens, variant.subgroup)
            assert (outputs // wave_outputs) * (tokens // wave_tokens) == threads // lanes


@pytest.mark.parametrize(
    ("outputs", "tokens", "k", "parts", "part"),
    [
        (1024, 256, 3584, 1, 3584),  # 16 tiles: more than two thirds of the cores
        (1024, 128, 3584, 3, 1280),  # 8 tiles: thirds of 1195, in steps of 256
        (64, 256, 2560, 3, 1024),  # 4 tiles of 64x64: 12 // 4
        (128, 128, 2048, 8, 256),  # one tile: never more than 8
        (128, 128, 2304, 5, 512),  # at 512 each a sixth part would be empty
        (128, 128, 1024, 1, 1024),  # short sums stay whole
    ],
)
def test_llama_cuts_long_sums_of_few_tiles(
    llama: ModuleType, outputs: int, tokens: int, k: int, parts: int, part: int
) -> None:
    how = llama.launch(llama.VARIANTS[0], outputs, tokens, k, CORES)
    assert (how.parts, how.part) == (parts, part)
    assert how.workgroups[0] == -(-outputs // how.tile.outputs) * parts


def test_llamas_grid_goes_over_the_outputs_first(llama: ModuleType) -> None:
    assert llama.launch(llama.VARIANTS[0], 7168, 256, 1024, CORES).workgroups == (56, 2, 1)


def test_the_ways_to_write_a_ragged_tile_are_found(llama: ModuleType) -> None:
    text = (
        "const bool is_aligned = p.stride_d % 4 == 0;  // why\n  const bool is_in_bounds = dr <= p.M && dc;\n"
    )
    assert llama.EDGES.subn(r"\1true;", text) == (
        "const bool is_aligned = true;  // why\n  const bool is_in_bounds = true;\n",
        2,
    )


def test_the_shaders_are_found_in_either_kind_of_sources(llama: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=r"name llama\.cpp's sources with --llama-cpp"):
        llama.find_shaders(tmp_path, print)
    inner = tmp_path / "vendor/llama.cpp" / SHADERS
    inner.mkdir(parents=True)
    assert llama.find_shaders(tmp_path, print) == inner
    (tmp_path / SHADERS).mkdir(parents=True)
    assert llama.find_shaders(tmp_path, print) == tmp_path / SHADERS


def test_the_sdist_is_downloaded_once_and_only_its_shaders_are_kept(
    llama: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = list[list[str]]()

    def pip(command: list[str]) -> str:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        with tarfile.open(folder / "sdist.tar.gz", "w:gz") as archive:
            for name in (f"root/vendor/llama.cpp/{SHADERS}/mul_mm.comp", "root/setup.py"):
                info = tarfile.TarInfo(name)
                info.size = 4
                archive.addfile(info, io.BytesIO(b"text"))
        return ""

    monkeypatch.setattr(llama, "run", pip)
    said = list[str]()
    found = llama.find_shaders(None, said.append)
    assert (found / "mul_mm.comp").read_text() == "text"
    assert llama.find_shaders(None, said.append) == found
    assert ([command[-1] for command in asked], len(said)) == ([llama.SDIST], 1)
    assert [path.name for path in found.parents[5].iterdir()] == ["vendor"]
    assert [path.name for path in found.parents[6].iterdir()] == [found.parents[5].name]


def test_the_systems_shader_compiler_is_taken_where_it_passes_llamas_test(
    llama: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glslc").write_text("#!/bin/sh\necho shaderc 2026.1\necho more\n")
    (tmp_path / "glslc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert llama.find_compiler(tmp_path, print) == (["glslc"], "shaderc 2026.1")


def test_a_command_that_fails_is_named_with_its_words(llama: ModuleType) -> None:
    with pytest.raises(CompileError, match=r"sh -c echo no >&2; exit 3: no"):
        llama.run(["sh", "-c", "echo no >&2; exit 3"])


def test_a_product_of_ours_is_compiled_alone(gemms: ModuleType, driver: Driver) -> None:
    shape = gemms.Shape("0.8b", ("v_proj",), 6, 512, 1024)
    (found,) = gemms.ours([shape], 256, "ours, tuned", target_for(GPU.name), driver, GPU)
    assert (found.tile, found.workgroups, found.kernel.threads) == ("128x128", 8, 256)
    assert found.wmma == 16
    assert not found.fails


def test_the_table_of_times_sums_up_a_block(gemms: ModuleType) -> None:
    def found(shape: object, build: str, us: float) -> Any:
        said = Prediction(us=us, limit="dram", bytes=1e6, rereads=1.0)
        return gemms.Found(shape, 256, build, "128x128", 1, 192, kernel(), said)

    wide, long = gemms.Shape("4b", ("a", "b"), 3, 2048, 1024), gemms.Shape("4b", ("c",), 2, 1024, 4096)
    rows = [found(shape, build, us) for build, us in (("x", 100.0), ("y", 250.0)) for shape in (wide, long)]
    console = Console(width=200, file=io.StringIO())
    console.print(gemms.times(rows))
    console.print(gemms.kernels(rows))
    assert isinstance(console.file, io.StringIO)
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in console.file.getvalue().splitlines()
    ]
    assert ["4b a, b", "2048 x 1024", "100 (10.7, dram)", "250 (4.3, dram)"] in lines, (
        "2 x 256 x 2^21 operations"
    )
    assert ["4b, all 5 of a block, ms", "", "0.5", "1.2"] in lines
    assert ["x", "128x128", "2", "128", "32", "128", "0", "16384", "8", "2"] in lines
    assert rows[0].to_json()["us"] == 100.0
