"""Whole modules through the real driver, and `specprefill preflight` on the demo pair."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from specprefill_jax.aot.audit import audit
from specprefill_jax.aot.compiler import compile_module
from specprefill_jax.aot.schedule import read_schedule
from specprefill_jax.aot.targets import target_for
from specprefill_jax.artifact.manifest import Manifest
from specprefill_jax.artifact.schedule import LOADING, Schedule, schedule_name
from specprefill_jax.cli import main
from specprefill_jax.errors import ArtifactError, FileMissing, HashMismatch, SettingError, WrongTarget
from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.preflight import Module, check_module, preflight, prompt_time
from specprefill_jax.preflight.report import FAIL, Prompt, Report
from tests.preflight.gemm import program
from tests.preflight.sample import GPU

Gemm = Callable[[str], Module]


@pytest.fixture(scope="session")
def gemm(tmp_path_factory: pytest.TempPathFactory) -> Gemm:
    """A product of a number format, compiled and not audited."""

    @cache
    def build(numerics: str) -> Module:
        dtype = {"f16": "float16", "f32": "float32"}[numerics]
        folder = tmp_path_factory.mktemp("phases")
        module = compile_module(program(dtype), target_for(GPU.name).flags, "gemm", phases=folder)
        return Module("draft", module, read_schedule(folder, "gemm"), 1, numerics)

    return build


def failures(found: Report) -> set[str]:
    return {finding.check for module in found.modules for finding in module.findings if finding.level == FAIL}


# --- the demo pair


def test_the_demo_pair_passes(report: Report) -> None:
    """It compiles to begin with: rows whose mask was computed inside their softmax did not, for gfx1103."""
    assert failures(report) == set()
    assert not report.failed


def test_every_entry_is_reported_with_all_that_it_dispatches(report: Report, demo: Path) -> None:
    for module in report.modules:
        schedule = Schedule.read(demo / schedule_name(module.role))
        expected = {name: sum(d.count for d in entry) for name, entry in schedule.entries.items()}
        assert {entry.name: entry.dispatches for entry in module.entries} == expected
        model = Manifest.read(demo).models[module.role]
        (capacity,) = model.capacities
        called = {f"prefill_T256_C{capacity}", f"decode_C{capacity}", "head"}
        called |= {f"prefill_rows_T256_C{capacity}"} if model.rows else set()
        assert called <= expected.keys()
        assert expected.keys() - called <= {LOADING}
        assert all(entry.us > 0 for entry in module.entries)


def test_the_projections_are_multiplied_by_the_matrix_unit(report: Report) -> None:
    for module in report.modules:
        (prefill,) = [entry for entry in module.entries if entry.name.startswith("prefill_T")]
        projections = [
            use
            for use in prefill.uses
            if (product := use.kernel.product) and min(product.m, product.n) >= 64 and use.dispatch.weights
        ]
        assert len(projections) > 4
        assert all(use.kernel.wmma for use in projections)
        assert all(use.prediction.rereads for use in projections if use.workgroups > 1), "a tile is not known"


def test_a_prompt_takes_its_blocks(report: Report) -> None:
    entries = {module.role: {entry.name: entry.us for entry in module.entries} for module in report.modules}
    draft, target = report.prompts["draft"], report.prompts["target"]
    assert draft.calls == {"prefill_T256_C4608": 3, "prefill_rows_T256_C4608": 1}
    assert target.calls == {"prefill_T256_C4608": 4}
    assert target.us == pytest.approx(4 * entries["target"]["prefill_T256_C4608"])


def test_a_prompt_that_no_cache_holds_has_no_time(report: Report, demo: Path) -> None:
    model = Manifest.read(demo).models["draft"]
    assert prompt_time(model, report.modules[0], 4608).us is not None
    assert prompt_time(model, report.modules[0], 4609) == Prompt(4609, {}, None)


def test_the_memory_is_that_of_the_weights_the_states_and_one_call(report: Report, demo: Path) -> None:
    manifest = Manifest.read(demo)
    archives = sum(manifest.files[model.parameters].bytes for model in manifest.models.values())
    states = sum(model.state_bytes(4608) for model in manifest.models.values())
    calls = [memory.call for memory in report.memory.values()]
    assert min(calls) > 2 * 2 * 256 * 4608 * 4  # scores of two heads' queries on each of two key heads
    assert report.bytes == archives + states + max(calls)
    for role, model in manifest.models.items():
        assert model.largest_buffer <= report.memory[role].call


def test_a_pair_that_the_memory_does_not_hold_fails(report: Report) -> None:
    fitting = replace(report, modules=())
    assert not fitting.failed
    assert not replace(fitting, gpu=replace(GPU, memory=report.bytes)).failed
    assert replace(fitting, gpu=replace(GPU, memory=report.bytes - 1)).failed


def test_the_report_is_plain_json(report: Report) -> None:
    document = json.loads(json.dumps(report.to_json()))
    assert (document["gpu"], document["passed"]) == (GPU.name, not report.failed)
    assert document["driver"].startswith("Mesa 25.")
    memory = document["memory"]
    assert memory["together"] == report.bytes < memory["limit"] == 16 * 2**30
    assert memory["draft"].keys() == {"weights", "state", "call"}
    kernel = document["modules"][0]["entries"]["head"]["kernels"][0]
    assert {"name", "workgroups", "vgprs", "scratch", "waves_per_simd", "us", "limit"} <= kernel.keys()


# --- a single product, with the compiler's fault left in (iree-org/iree issue 24817)


def test_audit_and_preflight_both_catch_what_an_unaudited_compile_lets_through(
    gemm: Gemm, driver: Driver
) -> None:
    module = gemm("f16")
    audited = audit(module.module, target_for(GPU.name).cooperative, "gemm")
    assert audited.repaired == audited.products > 0

    found = check_module(module, GPU, driver)
    assert {finding.check for finding in found.findings if finding.level == FAIL} == {"products"}
    assert "conversions" in {finding.check for finding in found.findings}
    assert "f32 x f32 + f32 -> f32" in found.findings[0].text

    repaired = check_module(replace(module, module=audited.module), GPU, driver)
    assert not repaired.failed
    assert "conversions" not in {finding.check for finding in repaired.findings}


def test_an_f32_build_needs_no_wmma_and_says_so(gemm: Gemm, driver: Driver) -> None:
    module = gemm("f32")
    exempt = check_module(module, GPU, driver)
    assert not exempt.failed
    assert exempt.notes == ("f32 build: radeon-780m has no WMMA for it, so products need none",)
    judged = check_module(replace(module, numerics="f16"), GPU, driver)
    assert {finding.check for finding in judged.findings if finding.level == FAIL} == {"no WMMA"}
    assert judged.notes == ()


def test_a_schedule_of_another_build_is_refused(gemm: Gemm, driver: Driver) -> None:
    mixed = replace(gemm("f16"), schedule=gemm("f32").schedule)
    with pytest.raises(ArtifactError, match="they are of different builds"):
        check_module(mixed, GPU, driver)


# --- what is no artifact for this GPU


@pytest.fixture
def copied(demo: Path, tmp_path: Path) -> Path:
    return shutil.copytree(demo, tmp_path / "copied")


def test_a_changed_module_or_schedule_is_refused(copied: Path) -> None:
    path = copied / "target.kernels.json"
    path.write_text(path.read_text().replace('"count": 1', '"count": 2', 1))
    with pytest.raises(HashMismatch, match=r"target\.kernels\.json"):
        preflight(copied, GPU.name, None, print)


def test_an_artifact_of_before_lacks_the_schedule(copied: Path) -> None:
    manifest = Manifest.read(copied)
    files = {name: entry for name, entry in manifest.files.items() if not name.endswith(".kernels.json")}
    replace(manifest, files=files).write(copied)
    (copied / "draft.kernels.json").unlink()
    with pytest.raises(FileMissing, match=r"no draft\.kernels\.json in .*Build it again"):
        preflight(copied, GPU.name, None, print)


def test_an_artifact_for_another_device_is_refused(copied: Path) -> None:
    manifest = Manifest.read(copied)
    replace(manifest, device=target_for("vulkan").device).write(copied)
    with pytest.raises(WrongTarget, match="was compiled for vulkan, and this is a preflight for radeon-780m"):
        preflight(copied, GPU.name, None, print)


def test_an_unknown_gpu_is_refused(copied: Path) -> None:
    with pytest.raises(SettingError, match="does not know the GPU 'radeon-890m'; it knows radeon-780m"):
        preflight(copied, "radeon-890m", None, print)


# --- the command


@pytest.fixture
def known(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    """What preflight would find, without finding it again."""
    monkeypatch.setattr(
        "specprefill_jax.preflight.preflight.preflight", lambda directory, gpu, tokens, say: report
    )


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(("preflight", *arguments))
    out, err = capsys.readouterr()
    return status, out, err


def test_people_get_tables_and_the_weights_are_not_needed(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("*.irpa")
    artifact = shutil.copytree(demo, tmp_path / "light", ignore=ignored)
    status, out, _ = run(capsys, str(artifact), "--tokens", "1000", "--kernels", "3")
    failed = "FAIL" in out
    assert status == int(failed)
    assert re.search(r"radeon-780m (passes|fails)\. Kernels compiled by Mesa 25\.\S+ without the GPU", out)
    assert "realistic = predicted / 0.4..0.9" in out
    for title in (
        "draft prefill_T256_C4608:",
        "draft decode_C4608:",
        "target head:",
        "draft, f16: one call of",
    ):
        assert title in out
    assert re.search(r"\d+ other kernels in \d+ dispatches: \d+\.\d\d ms", out)
    assert re.search(r"together, one call at a time: 0\.\d\d of 16 *\n", out)
    assert "target: 1000 tokens = 4 x prefill_T256_C4608: " in out
    assert max(map(len, out.splitlines())) <= 168


@pytest.mark.usefixtures("known")
def test_programs_get_json(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "./artifact", "--json")
    assert status == int(report.failed)
    assert json.loads(out) == json.loads(json.dumps(report.to_json()))


@pytest.mark.usefixtures("known")
def test_a_kernel_count_of_zero_shows_all(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "./artifact", "--kernels", "0")
    assert "other kernels" not in out
    (head,) = [entry for entry in report.modules[0].entries if entry.name == "head"]
    assert all(use.kernel.operation in out for use in head.uses)


@pytest.mark.parametrize("arguments", [("--tokens", "0"), ("--kernels", "-1")])
def test_bad_numbers_are_bad_input(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "artifact", *arguments)
    assert (status, out) == (2, "")
    assert f"specprefill: error: {' '.join(arguments)}: a whole number of at least" in err


def test_an_artifact_that_is_not_there_is_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, str(tmp_path / "none"))
    assert status == 2
    assert "no artifact at" in err
