"""`specprefill preflight` on the demo pair."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.cli import main
from specprefill_jax.preflight.report import Report

Demo = Callable[[str], Path]


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
    demo_artifact: Demo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ignored = shutil.ignore_patterns("*.irpa")
    artifact = shutil.copytree(demo_artifact("f16"), tmp_path / "light", ignore=ignored)
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
    assert re.search(r"together, one call at a time: 0\.\d\d of 16\n", out)
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
