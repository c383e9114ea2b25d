"""One request through the engine, on models of a few lines whose every call is recorded."""

import dataclasses
import math
import time

import numpy as np
import pytest
from jaxtyping import Float, Int

from specprefill_jax.engine import Engine, Result
from specprefill_jax.errors import (
    ArtifactError,
    BudgetTooSmall,
    DeviceFailed,
    EmptyPrompt,
    NotFiniteOutput,
    PromptTooLong,
    ScoresUnusable,
    TemplateError,
)
from specprefill_jax.settings import Settings
from tests.engine.fake import CHAT, Attend, Fake, from_everything, make, prompt, to_token

# 320 tokens are 10 chunks of 32; token 130 lies in chunk 4.
TOKENS = prompt(320, needle_at=130)
SHORT = Settings(max_tokens=3, break_even=False)
# Kept of them: the first 4, the chunk of the needle, the last chunk. The needle's chunk alone has mean
# attention above 0.0012, and every other one about that; so with a budget of 80 it comes first, and then one
# of the others (pooling spreads it over 124..136, within the chunk).
ONE_CHUNK = Settings(
    max_tokens=3,
    break_even=False,
    select_mode="chunk",
    keep=0.2125,
    chunking="fixed",
    boost_first_mult=1,
    boost_last_mult=1,
)


def kept_of(result: Result) -> list[int]:
    return result.kept.tolist()


def nothing_read(attended: list[int]) -> Float[np.ndarray, "n"]:
    return np.full(len(attended), 0.25, np.float32)


def broken(attended: list[int]) -> Float[np.ndarray, "n"]:
    row = np.full(len(attended), 0.25, np.float32)
    row[3] = np.nan
    return row


def no_number(read: list[tuple[int, int]]) -> float:
    return math.nan


# --- what the target reads


def test_dense_the_target_reads_every_token_at_its_own_position():
    fake = make()
    result = fake.engine.generate(TOKENS, dataclasses.replace(SHORT, mode="dense"))
    assert fake.target.of("prefill") == [(TOKENS.tolist(), list(range(320)))]
    assert fake.draft.calls == []
    assert kept_of(result) == list(range(320))


def test_sparse_the_target_reads_the_kept_tokens_at_their_own_positions():
    fake = make()
    result = fake.engine.generate(TOKENS, ONE_CHUNK)
    # budget 68 = ceil(0.2125 * 320): 4 first, 32 last, and the needle's chunk exactly fills it
    kept = [*range(4), *range(128, 160), *range(288, 320)]
    assert kept_of(result) == kept
    assert fake.target.of("prefill") == [(TOKENS[kept].tolist(), kept)]


def test_generated_token_j_is_read_at_position_m_plus_j_in_the_next_slot():
    fake = make()
    result = fake.engine.generate(TOKENS, ONE_CHUNK)
    assert [positions for _, positions in fake.target.of("decode")] == [[320], [321]]
    assert [tokens for tokens, _ in fake.target.of("decode")] == [[t] for t in result.tokens[:2]]
    (state,) = fake.target.states
    assert state.length == 68 + 2


def test_the_answer_follows_from_what_was_read():
    fake = make()
    result = fake.engine.generate(TOKENS, dataclasses.replace(SHORT, mode="dense"))
    read = [(int(token), position) for position, token in enumerate(TOKENS)]
    expected = []
    for position in (320, 321, 322):
        expected.append(from_everything(read))
        read.append((expected[-1], position))
    assert list(result.tokens) == expected
    assert result.text == CHAT.decode(expected)


# --- status


@pytest.mark.parametrize(
    ("tokens", "settings", "status", "reason"),
    [
        (TOKENS, Settings(), "active", "320 tokens reach the minimum of 200"),
        (TOKENS, Settings(mode="dense"), "disabled", "mode is dense"),
        (TOKENS, Settings(enabled=False), "disabled", "enabled is off"),
        (TOKENS[:199], Settings(), "skipped_min_tokens", "199 tokens are fewer than the minimum of 200"),
        (TOKENS[:199], Settings(mode="sparse"), "active", "mode is sparse"),
        (TOKENS[:199], Settings(minimum_tokens=199), "active", "the minimum of 199"),
        (TOKENS, Settings(keep=1.0), "kept_all", "keep every token"),
        (TOKENS[:4], Settings(mode="sparse"), "kept_all", "keep every token"),
        (TOKENS, Settings(max_keep=36), "skipped_insufficient_budget", "raise max_keep"),
    ],
)
def test_the_status_says_what_was_done_and_why(
    tokens: Int[np.ndarray, "M"], settings: Settings, status: str, reason: str
):
    settings = dataclasses.replace(settings, max_tokens=2, break_even=False)
    result = make().engine.generate(tokens, settings)
    assert result.timings.status == status
    assert reason in result.timings.reason
    assert (len(result.kept) < len(tokens)) == (status == "active")


@pytest.mark.parametrize(
    "settings", [Settings(keep=1.0), Settings(mode="dense"), Settings(minimum_tokens=400)]
)
def test_where_nothing_can_be_dropped_the_draft_is_not_run(settings: Settings):
    fake = make()
    fake.engine.generate(TOKENS, dataclasses.replace(settings, max_tokens=2))
    assert fake.draft.calls == []


def test_keeping_everything_gives_the_tokens_of_dense():
    fake = make()
    everything = fake.engine.generate(TOKENS, Settings(keep=1.0, max_tokens=5))
    dense = fake.engine.generate(TOKENS, Settings(mode="dense", max_tokens=5))
    assert everything.tokens == dense.tokens


@pytest.mark.parametrize(
    ("attend", "reason"), [(nothing_read, "rank nothing"), (broken, "importance: 1 of 320 numbers")]
)
def test_scores_that_rank_nothing_lead_to_the_dense_answer_and_say_so(attend: Attend, reason: str):
    fake = make(attend=attend)
    result = fake.engine.generate(TOKENS, dataclasses.replace(SHORT, pool=0))
    assert result.timings.status == "failed_dense"
    assert reason in result.timings.reason
    assert result.tokens == make().engine.generate(TOKENS, Settings(mode="dense", max_tokens=3)).tokens


def test_a_draft_without_numbers_leads_to_the_dense_answer():
    result = make(draft_speak=no_number).engine.generate(TOKENS, SHORT)
    assert result.timings.status == "failed_dense"
    assert "hidden state: 1 of 1 numbers are not finite" in result.timings.reason
    assert kept_of(result) == list(range(320))


@pytest.mark.parametrize(
    "error", [DeviceFailed("RESOURCE_EXHAUSTED; out of memory"), MemoryError("no memory")]
)
def test_a_draft_that_fails_on_the_device_leads_to_the_dense_answer(
    error: Exception, caplog: pytest.LogCaptureFixture
):
    def fail(attended: list[int]) -> Float[np.ndarray, "n"]:
        raise error

    result = make(attend=fail).engine.generate(TOKENS, SHORT)
    assert result.timings.status == "failed_dense"
    assert str(error) in result.timings.reason
    assert kept_of(result) == list(range(320))
    assert str(error) in caplog.text


def test_a_sparse_prefill_without_numbers_is_done_again_densely(caplog: pytest.LogCaptureFixture):
    def only_dense(read: list[tuple[int, int]]) -> float:
        return from_everything(read) if len(read) >= 320 else math.nan

    fake = make(speak=only_dense)
    result = fake.engine.generate(TOKENS, SHORT)
    assert result.timings.status == "failed_dense"
    assert "after the kept tokens are not finite" in result.timings.reason
    assert (result.timings.kept, result.timings.forced, result.timings.mode) == (320, 0, "dense")
    assert result.tokens == make().engine.generate(TOKENS, Settings(mode="dense", max_tokens=3)).tokens
    assert len(fake.target.of("prefill")) == 2


def test_a_dense_prefill_without_numbers_is_an_error():
    with pytest.raises(NotFiniteOutput, match="logits are not finite"):
        make(speak=no_number).engine.generate(TOKENS, Settings(mode="dense"))


# --- phases


@pytest.mark.parametrize(
    ("settings", "phases"),
    [
        (
            ONE_CHUNK,
            [
                *("tokenize", "decide", "draft_prefill", "lookahead", "select"),
                *("target_prefill", "head", "first_token"),
            ],
        ),
        (
            Settings(mode="dense", max_tokens=3),
            ["tokenize", "decide", "target_prefill", "head", "first_token"],
        ),
    ],
)
def test_the_phases_add_up_to_the_time_to_first_token(settings: Settings, phases: list[str]):
    timings = make().engine.generate(TOKENS, settings).timings
    assert list(timings.phases) == phases
    assert all(milliseconds > 0 for milliseconds in timings.phases.values())
    assert timings.first_token == pytest.approx(sum(timings.phases.values()))
    assert timings.decode > 0


def test_each_phase_is_what_passes_in_it(monkeypatch: pytest.MonkeyPatch):
    now = 0.0

    def takes(seconds: float) -> None:
        nonlocal now
        now += seconds

    def speak(read: list[tuple[int, int]]) -> float:
        # A prefill ends with this, and so does each decode step.
        takes(2.0 if len(read) <= 68 else 0.25)
        return from_everything(read)

    def draft_speak(read: list[tuple[int, int]]) -> float:
        takes(5.0 if len(read) <= 320 else 0.5)
        return from_everything(read)

    monkeypatch.setattr("specprefill_jax.engine.clock.time.perf_counter", lambda: now)
    fake = make(speak=speak, draft_speak=draft_speak)
    timings = fake.engine.generate(TOKENS, ONE_CHUNK, watch=lambda *_: takes(0.001)).timings
    assert timings.phases == pytest.approx(
        {
            "tokenize": 0,
            "decide": 0,
            "draft_prefill": 5000 + 20,
            "lookahead": 2 * (500 + 1),
            "select": 0,
            "target_prefill": 2000 + 5,
            "head": 0,
            "first_token": 0,
        }
    )
    assert timings.first_token == pytest.approx(5020 + 1002 + 2005)
    assert timings.decode == pytest.approx(2 * 250)  # hearing of it comes before


def test_what_a_reader_does_between_pieces_is_not_counted():
    for part in make().engine.stream(TOKENS, ONE_CHUNK):
        if isinstance(part, Result):
            assert part.timings.first_token + part.timings.decode < 300
        else:
            time.sleep(0.3)


def test_json_has_the_fields_of_the_guide_and_the_detail():
    document = make().engine.generate(TOKENS, ONE_CHUNK).to_json()
    assert list(document) == ["text", "tokens", "finish", "usage", "timings"]
    assert document["usage"] == {"prompt_tokens": 320, "completion_tokens": 3, "total_tokens": 323}
    assert document["timings"]["specprefill"] == "active"
    detail = document["timings"]["specprefill_detail"]
    assert detail | {"phases": None} == {
        "prompt": 320,
        "kept": 68,
        "forced": 36,
        "pinned": 0,
        "reused": 0,
        "draft_read": 320,
        "looked_ahead": 2,
        "remembered": False,
        "mode": "chunk",
        "scoring": "continuous",
        "reason": "320 tokens reach the minimum of 200 (minimum_tokens)",
        "phases": None,
    }
    assert len(detail["phases"]) == 8


# --- cancelling


class Stop(DeviceFailed):
    """A listener's wish, which could be taken for a failure of the device."""


def stop_at(number: int, heard: list[tuple[str, int, int]]):
    def watch(phase: str, done: int, total: int) -> None:
        heard.append((phase, done, total))
        if len(heard) == number:
            raise Stop

    return watch


def test_a_request_can_be_cancelled_at_every_border_and_the_next_one_is_unaffected():
    fake = make()
    undisturbed = make().engine.generate(TOKENS, ONE_CHUNK)
    borders: list[tuple[str, int, int]] = []
    fake.engine.generate(TOKENS, ONE_CHUNK, watch=stop_at(10**9, borders))
    # 20 blocks of the draft and 2 steps of lookahead; 5 blocks of the target; 2 tokens after the first
    assert [phase for phase, _, _ in borders] == ["score"] * 22 + ["prefill"] * 5 + ["decode"] * 2
    for number in range(1, len(borders) + 1):
        heard: list[tuple[str, int, int]] = []
        fake.engine.forget()
        with pytest.raises(Stop):
            fake.engine.generate(TOKENS, ONE_CHUNK, watch=stop_at(number, heard))
        assert heard == borders[:number]
        assert fake.engine.generate(TOKENS, ONE_CHUNK).tokens == undisturbed.tokens


def test_a_listener_hears_how_far_each_phase_has_come():
    heard: list[tuple[str, int, int]] = []
    make().engine.generate(TOKENS, ONE_CHUNK, watch=stop_at(10**9, heard))
    assert heard[:2] == [("score", 0, 320), ("score", 16, 320)]
    assert heard[20:24] == [("score", 320, 320), ("score", 320, 320), ("prefill", 0, 68), ("prefill", 16, 68)]
    assert heard[27:] == [("decode", 1, 3), ("decode", 2, 3)]


def test_a_stream_that_nobody_reads_to_its_end_does_not_affect_the_next():
    fake = make()
    undisturbed = fake.engine.generate(TOKENS, ONE_CHUNK)
    abandoned = fake.engine.stream(TOKENS, ONE_CHUNK)
    next(abandoned)
    assert fake.engine.generate(TOKENS, ONE_CHUNK).tokens == undisturbed.tokens


# --- the answer


def scripted(*answer: int):
    """Says these tokens one after the other, after a prompt of 8."""
    return lambda read: answer[len(read) - 8]


def test_a_stop_token_ends_the_answer_and_is_no_part_of_it():
    result = make(speak=scripted(40, 41, 2, 42)).engine.generate(prompt(8))
    assert (result.tokens, result.finish) == ((40, 41), "stop")
    assert result.usage.completion_tokens == 2


def test_an_answer_may_be_empty():
    result = make(speak=scripted(2)).engine.generate(prompt(8))
    assert (result.text, result.tokens, result.finish) == ("", (), "stop")


def test_max_tokens_ends_the_answer_without_reading_its_last_token():
    fake = make(speak=scripted(40, 41, 42))
    result = fake.engine.generate(prompt(8), Settings(max_tokens=2))
    assert (result.tokens, result.finish) == ((40, 41), "length")
    assert fake.target.of("decode") == [([40], [8])]


def test_pieces_are_whole_characters_and_join_to_the_text():
    answer = CHAT.encode("naïve 日本 🙂 end").tolist()
    *pieces, result = make(speak=scripted(*answer, 2)).engine.stream(prompt(8))
    assert isinstance(result, Result)
    assert result.text == "".join(map(str, pieces)) == "naïve 日本 🙂 end"
    assert "�" not in result.text
    assert len(pieces) < len(answer)  # several tokens made one character


def test_half_a_character_at_the_end_is_shown_as_such():
    first, *_ = CHAT.encode("🙂").tolist()
    *pieces, result = make(speak=scripted(first, 2)).engine.stream(prompt(8))
    assert isinstance(result, Result)
    assert pieces == ["�"]
    assert result.text == "�"


def test_control_tokens_are_hidden_unless_the_prompt_is_raw():
    start = CHAT.encode("<|im_start|>").tolist()
    text = "one two three four"
    assert make(speak=lambda _: start[0]).engine.generate(text, Settings(max_tokens=2)).text == ""
    shown = make(speak=lambda _: start[0]).engine.generate(text, Settings(max_tokens=2), raw=True)
    assert shown.text == "<|im_start|>" * 2


def test_padding_ids_are_never_said():
    result = make().engine.generate(TOKENS, SHORT)
    assert max(result.tokens) < CHAT.vocabulary


def test_the_same_seed_draws_the_same_answer():
    drawn = Settings(temperature=4.0, seed=7, max_tokens=12)
    fake = make()
    one, two = (fake.engine.generate(TOKENS, drawn).tokens for _ in range(2))
    other = fake.engine.generate(TOKENS, dataclasses.replace(drawn, seed=8)).tokens
    assert one == two
    assert one != other


# --- prompts


def test_a_text_is_one_user_message_in_the_template():
    tokens = make().engine.encode("How?", prefix="So")
    assert CHAT.decode(tokens) == "<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\nSo"


def test_a_conversation_is_templated_as_a_whole():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How?"}]
    tokens = make().engine.encode(messages)
    expected = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert CHAT.decode(tokens) == expected


def test_a_raw_text_is_taken_as_it_is():
    engine = make().engine
    assert (
        engine.encode("<|im_start|>x", raw=True, prefix=" y").tolist()
        == CHAT.encode("<|im_start|>x y").tolist()
    )
    assert engine.encode(" \n", raw=True).size > 0


def test_tokens_are_taken_as_they_are():
    engine = make().engine
    assert engine.encode([5, 6]).tolist() == engine.encode(np.array([5, 6], np.int32)).tolist() == [5, 6]


@pytest.mark.parametrize("empty", ["", "  \n", []])
def test_an_empty_prompt_is_refused(empty: str | list[int]):
    with pytest.raises(EmptyPrompt, match="give at least one"):
        make().engine.generate(empty)


def test_what_cannot_act_on_a_prompt_is_refused():
    engine = make().engine
    with pytest.raises(ValueError, match="raw"):
        engine.encode([{"role": "user", "content": "x"}], raw=True)
    with pytest.raises(ValueError, match="prefix"):
        engine.encode([5, 6], prefix="x")
    with pytest.raises(ValueError, match="whole numbers in one row, not bool"):
        engine.encode([True, False])
    with pytest.raises(ValueError, match="a token id is outside 0"):
        engine.encode([5, 10**6])
    with pytest.raises(TemplateError, match="unexpected message role"):
        engine.encode([{"role": "judge", "content": "x"}])


# --- limits


def test_one_token_is_a_prompt():
    fake = make()
    assert len(fake.engine.generate(TOKENS[:1], Settings(mode="sparse", max_tokens=2)).tokens) == 2


def test_a_prompt_and_answer_beyond_the_cache_are_refused_with_the_limit_and_the_knob():
    engine = make(target_capacity=330).engine
    message = (
        r"320 prompt tokens and max_tokens=11 .* need 331 cache slots, but the target .* for 330: "
        r"lower max_tokens \(--max-tokens\) to 10, "
    )
    with pytest.raises(PromptTooLong, match=message):
        engine.generate(TOKENS, Settings(mode="dense", max_tokens=11))
    assert len(engine.generate(TOKENS, Settings(mode="dense", max_tokens=10)).tokens) == 10


def test_a_prompt_beyond_the_targets_cache_is_answered_when_what_is_kept_fits():
    result = make(target_capacity=80).engine.generate(TOKENS, ONE_CHUNK)
    assert (result.timings.status, result.timings.kept) == ("active", 68)


def test_a_prompt_beyond_the_last_position_is_refused_whatever_is_kept():
    fake = make()
    settings = Settings(mode="sparse", max_tokens=3, max_keep=64)
    with pytest.raises(PromptTooLong, match=r"262142 prompt tokens and max_tokens=3 .* has 262144"):
        fake.engine.generate(np.ones(2**18 - 2, np.int32), settings)


def test_a_prompt_that_could_not_be_made_sparse_says_so_when_it_does_not_fit():
    with pytest.raises(PromptTooLong, match=r"320 prompt tokens \(failed_dense: .*rank nothing"):
        make(target_capacity=80, attend=nothing_read).engine.generate(TOKENS, ONE_CHUNK)


def test_a_tokenizer_with_more_tokens_than_a_model_is_refused():
    fake = make()
    fake.draft.model = dataclasses.replace(fake.draft.model, vocabulary=1000)
    with pytest.raises(ArtifactError, match="1664 tokens, but the draft of artifact 'fake' knows 1000"):
        Engine(fake.engine.artifact, CHAT, fake.draft, fake.target)


# --- given tokens


def test_an_answer_from_given_tokens_reads_just_these():
    fake = make()
    kept = np.array([0, 5, 9], np.int32)
    result = fake.engine.answer_from(TOKENS, kept, SHORT)
    assert fake.target.of("prefill") == [(TOKENS[kept].tolist(), [0, 5, 9])]
    assert [positions for _, positions in fake.target.of("decode")] == [[320], [321]]
    assert fake.draft.calls == []
    assert result.kept.tolist() == [0, 5, 9]


def test_given_positions_take_the_place_of_the_tokens_own():
    fake = make()
    kept, slots = np.array([0, 5, 9], np.int32), np.arange(3, dtype=np.int32)
    at_slots = fake.engine.answer_from(TOKENS, kept, SHORT, positions=slots).logits
    assert fake.target.of("prefill") == [(TOKENS[kept].tolist(), [0, 1, 2])]
    assert (at_slots != fake.engine.answer_from(TOKENS, kept, SHORT).logits).any()


def test_a_result_has_the_logits_of_its_first_token_not_of_its_last():
    result = make().engine.answer_from(TOKENS, np.array([0, 5, 9], np.int32), SHORT)
    assert len(set(result.tokens)) == len(result.tokens) == SHORT.max_tokens
    assert result.logits[: CHAT.vocabulary].argmax() == result.tokens[0]


# --- scoring


def test_score_gives_what_an_answer_would_keep():
    fake: Fake = make()
    scored = fake.engine.score(TOKENS, ONE_CHUNK)
    assert scored.selection.kept.tolist() == kept_of(fake.engine.generate(TOKENS, ONE_CHUNK))
    assert scored.scoring == "continuous"
    assert scored.windows == ((0, 320, 320),)
    assert list(scored.phases) == ["tokenize", "decide", "draft_prefill", "lookahead", "select"]


def test_score_runs_whatever_thresholds_and_mode_say():
    scored = make(minimum=10**6).engine.score(TOKENS, dataclasses.replace(ONE_CHUNK, mode="dense"))
    assert scored.selection.kept.size == 68


def test_the_pieces_of_a_scored_prompt_are_its_text():
    scored = make(attend=to_token(5)).engine.score("Ünï 🙂 code", raw=True)
    assert "".join(scored.pieces) == "Ünï 🙂 code"
    assert len(scored.pieces) == scored.tokens.size


def test_score_says_plainly_when_the_scores_are_of_no_use():
    with pytest.raises(ScoresUnusable, match="rank nothing"):
        make(attend=nothing_read).engine.score(TOKENS)
    with pytest.raises(BudgetTooSmall, match="raise max_keep"):
        make().engine.score(TOKENS, Settings(max_keep=30))
