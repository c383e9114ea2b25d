"""`specprefill score`: shows what is kept."""

import itertools
import json
from pathlib import Path

import pytest

from specprefill_jax.artifact.calibration import Calibration
from tests.cli.conftest import Run
from tests.engine.fake import CHAT, Fake, make

TEXT = " ".join(f"word{number}" for number in range(120))
PROMPT = f"<|im_start|>user\n{TEXT}<|im_end|>\n<|im_start|>assistant\n"


def test_the_terminal_shows_kept_text_and_counts_the_rest(fake: Fake, specprefill: Run):
    ran = specprefill("score", TEXT, "--keep", "0.3")
    assert ran.status == 0
    assert ran.out.startswith("<|im_start|>user\nw [... 28 tokens ...] ")  # the first 4 tokens are forced
    assert "tokens ...]" in ran.out
    assert ran.out.rstrip("\n").endswith("assistant")
    assert ran.err.startswith("kept ")


def test_json_tells_positions_scores_and_text(fake: Fake, specprefill: Run):
    ran = specprefill("score", TEXT, "--keep", "0.3", "--json")
    document = json.loads(ran.out)
    assert document["tokens"] == CHAT.encode(PROMPT).tolist()
    assert document["prompt"] == len(document["importance"]) == len(document["tokens"])
    assert "".join(document["pieces"]) == PROMPT
    assert document["kept"][:4] == [0, 1, 2, 3]
    assert len(document["kept"]) <= document["budget"]
    assert len(document["chunk_scores"]) == len(document["edges"]) - 1
    assert (document["mode"], document["scoring"]) == ("chunk", "continuous")
    assert document["windows"] == [{"start": 0, "end": document["prompt"], "keep_end": document["prompt"]}]
    assert ran.err == ""


def test_a_heat_map_is_written_to_the_file(fake: Fake, specprefill: Run):
    ran = specprefill("score", TEXT, "--html", "map.html")
    assert ran.status == 0
    assert ran.out == ""
    assert "map.html" in ran.err
    page = Path("map.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "&lt;|im_start|&gt;" in page


def test_a_heat_map_that_cannot_be_written_is_bad_input(fake: Fake, specprefill: Run):
    ran = specprefill("score", TEXT, "--html", "none/map.html")
    assert ran.status == 2
    assert "--html: none/map.html cannot be written: No such file" in ran.err


def test_thresholds_play_no_part(fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    Path("own.toml").write_text('mode = "dense"\n')
    assert specprefill("score", TEXT, "--keep", "0.3", "--settings", "own.toml").status == 0
    assert fake.draft.calls != []
    assert fake.target.calls == []


def test_what_was_calibrated_can_be_left_out(specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    found = Calibration("", {"chunk": 16}, 0.95, 0.97, 0.9, 0.99, 100, depth=2, seed=0)
    engine = make(calibration=found).engine
    monkeypatch.setattr("specprefill_jax.cli.score.load_engine", lambda *_, **__: engine)

    def most(*arguments: str) -> int:
        edges = json.loads(specprefill("score", TEXT, "--chunking=fixed", "--json", *arguments).out)["edges"]
        return max(end - start for start, end in itertools.pairwise(edges))

    assert (most(), most("--calibration", "off")) == (16, 32)


@pytest.mark.parametrize(
    "arguments",
    [["--json", "--html", "x"], ["--mode", "sparse"], ["--max-tokens", "3"], ["--temperature", "1"]],
)
def test_an_option_that_score_does_not_have_is_refused(fake: Fake, specprefill: Run, arguments: list[str]):
    assert specprefill("score", TEXT, *arguments).status == 2


def test_a_budget_without_room_is_bad_input(fake: Fake, specprefill: Run):
    ran = specprefill("score", TEXT, "--max-keep", "5")
    assert ran.status == 2
    assert "raise max_keep" in ran.err


def test_verbose_shows_phases_on_standard_error(fake: Fake, specprefill: Run):
    assert "select" in specprefill("score", TEXT, "-v").err
