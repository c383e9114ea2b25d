"""`specprefill plan`: what a prompt takes, read off a manifest."""

import dataclasses
import json
from pathlib import Path

import pytest

from specprefill_jax.artifact.beside import manifest_digest
from specprefill_jax.artifact.calibration import Calibration, write_calibration
from tests.cli.conftest import Run
from tests.policy.pair import make_manifest


@pytest.fixture(autouse=True)
def pair() -> None:
    """An artifact of which only the manifest is there, by path and by name."""
    for directory in (Path("pair"), Path("artifacts/mine")):
        directory.mkdir(parents=True)
        make_manifest().write(directory)


def test_the_table_has_a_column_for_each_way_and_says_which_is_taken(specprefill: Run):
    ran = specprefill("plan", "./pair", "--prompt", "20000", "--memory", "10.9G")
    lines = ran.out.splitlines()
    assert (ran.status, ran.err) == (0, "")
    cells = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in lines if line.startswith("│")}
    assert [cell.strip() for cell in cells["together"]] == ["11.33 GB", "10.60 GB", "12.15 GB"]
    assert [cell.strip() for cell in cells["fits 10.90 GB"]] == ["no", "yes", "no"]
    assert [cell.strip() for cell in cells["draft rows"]] == ["50.3 MB", "3.1 MB", ""]
    assert [cell.strip() for cell in cells["draft slots"]] == ["20002 of 32768", "2002 of 2048", ""]
    assert "one call: estimated" in ran.out
    assert lines[-1] == "windows of 2000: continuous does not fit"
    assert max(map(len, lines)) <= 80


def test_an_artifact_has_a_name_too(specprefill: Run):
    ran = specprefill("plan", "mine", "--prompt", "20000")
    assert ran.status == 0
    assert "fits" not in ran.out  # no limit is known
    assert "continuous: 20000 tokens reach the minimum of 8192" in " ".join(ran.out.split())


def test_json_has_bytes(specprefill: Run):
    ran = specprefill("plan", "./pair", "--prompt", "20000", "--memory", "10.9G", "--json")
    document = json.loads(ran.out)
    assert (document["prompt"], document["memory"], document["chosen"]) == (20_000, 10_900_000_000, 1)
    assert [way["mode"] for way in document["ways"]] == ["continuous", "windows", "dense"]
    assert [way["total"] for way in document["ways"]] == [11334852608, 10600849408, 12145991680]


def test_the_plan_follows_the_calibration_as_an_answer_does(specprefill: Run):
    found = Calibration(
        manifest_digest(make_manifest()),
        {"keep": 0.05},
        0.95,
        0.61,
        0.5,
        0.7,
        100,
        depth=2,
        seed=0,
    )
    ask = ("plan", "./pair", "--prompt", "20000")

    def shown(*arguments: str) -> str:
        return " ".join(specprefill(*ask, *arguments).out.split())

    write_calibration(Path("pair"), dataclasses.replace(found, retention=0.97, upper=0.99))
    assert json.loads(specprefill(*ask, "--json").out)["ways"][0]["kept"] == 1000
    write_calibration(Path("pair"), found)
    assert "dense: calibration found that 61.0% (50.0 to 70.0) of the facts" in shown()
    assert "continuous: 20000 tokens reach" in shown("--memory", "12.1G")  # dense does not fit
    assert "continuous: 20000 tokens reach" in shown("--calibration", "off")


@pytest.mark.parametrize("output", [[], ["--json"]])
def test_the_status_is_1_where_nothing_fits(specprefill: Run, output: list[str]):
    fitting = ("plan", "./pair", "--prompt", "20000", "--memory", "10600849408", *output)
    assert specprefill(*fitting).status == 0
    ran = specprefill("plan", "./pair", "--prompt", "20000", "--memory", "10526334975", *output)
    assert ran.status == 1
    assert output or ran.out.splitlines()[-1] == "nothing fits"


def test_a_prompt_beyond_every_cache_has_no_table_and_status_1(specprefill: Run):
    ran = specprefill("plan", "./pair", "--prompt", "40000", "--mode", "dense")
    assert ran.status == 1
    assert ran.out == (
        "dense prefill takes 40256 slots, and the target's largest cache has 32768\nnothing fits\n"
    )


def test_a_dense_plan_has_no_rows_of_a_draft_that_is_not_run(specprefill: Run):
    out = specprefill("plan", "./pair", "--prompt", "5000").out
    assert "draft weights" in out
    assert "draft cache" not in out


def test_settings_come_from_flags_variables_and_a_file(specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    Path("own.toml").write_text('memory = "16G"\nmax_tokens = 1000\n')
    monkeypatch.setenv("SP_MAX_KEEP", "500")
    arguments = ("--prompt", "20000", "--settings", "own.toml", "--max-tokens", "10", "--json")
    document = json.loads(specprefill("plan", "./pair", *arguments).out)
    assert (document["memory"], document["max_tokens"]) == (16_000_000_000, 10)
    assert document["ways"][0]["kept"] == 500


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["./pair"], "the following arguments are required: --prompt"),
        (["./pair", "--prompt", "0"], "a prompt of 0 tokens has none"),
        (["./pair", "--prompt", "9", "--memory", "lots"], "--memory=lots: memory must be a size above 0"),
        (
            ["./pair", "--prompt", "9", "--mode", "dense", "--keep", "0.1"],
            "--keep has no effect in mode dense",
        ),
        (["./pair", "--prompt", "9", "--chunk", "16"], "unrecognized arguments: --chunk"),
        (["none", "--prompt", "9"], "no artifact named 'none'"),
        (["./none", "--prompt", "9"], "no artifact at none: the directory does not exist"),
    ],
)
def test_bad_input_is_told_what_is_wrong(specprefill: Run, arguments: list[str], message: str):
    ran = specprefill("plan", *arguments)
    assert (ran.status, ran.out) == (2, "")
    assert message in ran.err
