"""`specprefill run`: what it reads, prints and refuses."""

import json
import sys
from pathlib import Path

import pytest

from specprefill_jax.errors import NotFiniteOutput
from tests.cli.conftest import Run
from tests.engine.fake import CHAT, Fake, make

USER = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def read_by(fake: Fake) -> str:
    """The text that the target read."""
    ((tokens, _),) = fake.target.of("prefill")
    return CHAT.decode(tokens)


def test_standard_output_carries_only_the_answer(fake: Fake, specprefill: Run):
    ran = specprefill("run", "How?", "--max-tokens", "3")
    expected = make().engine.generate("How?").text
    assert ran.status == 0
    assert ran.out.endswith("\n")
    assert expected.startswith(ran.out.removesuffix("\n"))
    assert len(ran.out) > 1
    assert ran.err == ""
    assert read_by(fake) == USER.format("How?")


def test_json_is_one_document_with_text_tokens_usage_and_timings(fake: Fake, specprefill: Run):
    ran = specprefill("run", "How?", "--max-tokens", "3", "--json")
    document = json.loads(ran.out)
    assert list(document) == ["text", "tokens", "finish", "usage", "timings"]
    assert document["text"] == CHAT.decode(document["tokens"])
    assert len(document["tokens"]) == 3
    assert document["timings"]["specprefill"] == "skipped_min_tokens"
    assert ran.err == ""


def test_verbose_shows_status_and_phases_on_standard_error(fake: Fake, specprefill: Run):
    ran = specprefill("run", "How?", "--max-tokens", "3", "-v")
    assert "skipped_min_tokens" in ran.err
    assert "prefill" in ran.err
    assert "skipped" not in ran.out


# --- the prompt


def test_a_file_is_a_prompt(fake: Fake, specprefill: Run):
    Path("text.txt").write_text("All of it.\n")
    assert specprefill("run", "-f", "text.txt").status == 0
    assert read_by(fake) == USER.format("All of it.\n")


def test_a_prompt_after_a_file_is_the_question_about_it(fake: Fake, specprefill: Run):
    Path("text.txt").write_text("All of it.\n")
    assert specprefill("run", "-f", "text.txt", "Why?").status == 0
    assert read_by(fake) == USER.format("All of it.\n\nWhy?")


def test_standard_input_is_a_prompt(fake: Fake, specprefill: Run):
    assert specprefill("run", stdin="Läuft.".encode()).status == 0
    assert read_by(fake) == USER.format("Läuft.")


def test_a_dash_is_standard_input_so_that_a_question_can_follow(fake: Fake, specprefill: Run):
    assert specprefill("run", "-f", "-", "Why?", stdin=b"All of it.").status == 0
    assert read_by(fake) == USER.format("All of it.\n\nWhy?")


def test_prefix_begins_the_answer(fake: Fake, specprefill: Run):
    assert specprefill("run", "Why?", "--prefix", "Because").status == 0
    assert read_by(fake) == USER.format("Why?") + "Because"


def test_raw_takes_the_text_and_its_control_tokens_as_they_are(fake: Fake, specprefill: Run):
    assert specprefill("run", "--raw", "<|im_start|>x").status == 0
    ((tokens, _),) = fake.target.of("prefill")
    assert tokens == CHAT.encode("<|im_start|>x").tolist()


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["-f", "none.txt"], None, "none.txt cannot be read: No such file"),
        (["-f", "."], None, ". cannot be read: Is a directory"),
        (["-f", "bytes.bin"], None, "bytes.bin is not UTF-8 text"),
        (["-f", "empty.txt"], None, "empty.txt is empty"),
        (["-f", "empty.txt", "Why?"], None, "empty.txt is empty"),
        ([""], None, "the prompt is empty"),
        ([], b" \n", "standard input is empty"),
        ([], b"\xff", "standard input is not UTF-8 text"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_bad_input(
    fake: Fake, specprefill: Run, arguments: list[str], stdin: bytes | None, message: str
):
    Path("bytes.bin").write_bytes(b"\xff\xfe")
    Path("empty.txt").write_text("\n")
    ran = specprefill("run", *arguments, stdin=stdin)
    assert ran.status == 2
    assert ran.err.startswith("specprefill: error: ")
    assert message in ran.err
    assert ran.out == ""


def test_nobody_is_left_waiting_at_a_terminal(fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    ran = specprefill("run")
    assert ran.status == 2
    assert "no prompt: give it as an argument, in a file (-f FILE), or on standard input" in ran.err


# --- settings


def test_settings_come_from_flags_environment_and_file(
    fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    Path("own.toml").write_text("minimum_tokens = 10\nchunk = 8\nmax_tokens = 1\nbreak_even = false\n")
    monkeypatch.setenv("SP_CHUNK", "16")
    text = "word " * 300
    ran = specprefill("run", text, "--keep", "0.5", "--settings", "own.toml", "--json")
    detail = json.loads(ran.out)["timings"]["specprefill_detail"]
    assert (detail["mode"], detail["reason"][-40:]) == ("chunk", "reach the minimum of 10 (minimum_tokens)")
    # A budget of ceil(0.5 * 909) = 455 holds the last chunk, 909 % 16 = 13 tokens, and 27 whole chunks of 16.
    assert (detail["prompt"], detail["kept"]) == (909, 13 + 27 * 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "2"], "--keep=2: keep must be a number from 0 to 1"),
        (["--window", "100"], "--window=100: window must be 0 (automatic) or from 512"),
        (["--max-tokens", "none"], "--max-tokens=none: max_tokens must be a whole number"),
        (["--mode", "fast"], "--mode=fast: mode must be one of auto, sparse, dense"),
        (["--settings", "none.toml"], "settings file none.toml cannot be read"),
        (["--settings", "bad.toml"], "kep in bad.toml is not a setting; did you mean keep?"),
        (["--keep", "0.3", "--mode", "dense"], "--keep has no effect in mode dense"),
        (["--window", "600", "--mode", "dense"], "--window has no effect in mode dense"),
        (["--calibration", "off", "--mode", "dense"], "--calibration has no effect in mode dense"),
        (["--pooling", "max", "--pool", "0"], "--pooling has no effect with pool=0, where nothing is pooled"),
        (["--minimum-tokens", "9", "--mode", "sparse"], "--minimum-tokens has no effect in mode sparse"),
        (["--top-k", "5"], "--top-k has no effect at temperature 0"),
        (["--seed", "5"], "--seed has no effect at temperature 0"),
        (["--cumulative-mass", "0.9", "--keep", "0.3"], "--cumulative-mass has no effect when a fixed"),
        (["--keep", "0.3", "--select-mode", "mass"], "--keep has no effect when selection is by mass"),
    ],
)
def test_a_bad_value_or_a_flag_that_cannot_act_is_bad_input(
    fake: Fake, specprefill: Run, arguments: list[str], message: str
):
    Path("bad.toml").write_text("kep = 0.3\n")
    ran = specprefill("run", "x", *arguments)
    assert ran.status == 2
    assert f"specprefill: error: {message}" in ran.err
    assert ran.out == ""
    assert fake.target.calls == []


def test_a_flag_that_acts_is_accepted(fake: Fake, specprefill: Run):
    assert specprefill("run", "x", "--temperature", "0.7", "--top-k", "5", "--seed", "1").status == 0
    assert specprefill("run", "x", "--keep", "1", "--select-mode", "mass").status == 0


def test_a_bad_environment_variable_is_named(fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SP_KEEP_PCT", "abc")
    ran = specprefill("run", "x")
    assert ran.status == 2
    assert "SP_KEEP_PCT=abc in the environment" in ran.err


def test_a_variable_that_is_no_setting_warns_on_standard_error(
    fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SP_KEEP", "0.3")
    ran = specprefill("run", "x")
    assert ran.status == 0
    assert ran.err.startswith("specprefill: warning: SP_KEEP is not a setting")


@pytest.mark.parametrize("arguments", [["--html", "x.html"], ["--max", "3"], ["a", "b"]])
def test_an_option_that_run_does_not_have_is_refused(fake: Fake, specprefill: Run, arguments: list[str]):
    assert specprefill("run", "x", *arguments).status == 2


# --- ends


def test_a_failure_while_running_has_its_own_status_and_no_traceback(
    fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object, **__: object) -> None:
        raise NotFiniteOutput("3 of 9 logits are not finite")

    monkeypatch.setattr(fake.engine, "stream", fail)
    assert specprefill("run", "x") == (1, "", "specprefill: error: 3 of 9 logits are not finite\n")


def test_a_prompt_beyond_the_cache_is_bad_input(fake: Fake, specprefill: Run):
    ran = specprefill("run", "x", "--max-tokens", "9999")
    assert ran.status == 2
    assert "lower max_tokens (--max-tokens)" in ran.err


def test_an_interrupt_ends_quietly_with_the_status_of_a_signal(
    fake: Fake, specprefill: Run, monkeypatch: pytest.MonkeyPatch
):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(fake.engine, "stream", interrupt)
    assert specprefill("run", "x") == (130, "", "")
