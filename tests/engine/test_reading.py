"""How the draft reads a prompt: in one pass or by windows, and what its attention rows become."""

import dataclasses

import numpy as np
import pytest
from jaxtyping import Float

from specprefill_jax.engine.reading import window_size
from specprefill_jax.errors import SettingError
from specprefill_jax.settings import Head, Settings
from tests.engine.fake import CHAT, from_everything, make, prompt, to_token

PLAIN = Settings(pool=0)


def test_the_draft_reads_all_in_one_pass_and_looks_ahead_greedily_from_the_prompts_end():
    fake = make()
    tokens = prompt(320, needle_at=130)
    fake.engine.score(tokens, Settings(lookahead=3))
    assert fake.draft.of("prefill") == [(tokens.tolist(), list(range(320)))]
    read = [(int(token), position) for position, token in enumerate(tokens)]
    said = []
    for position in (320, 321, 322):
        said.append(from_everything(read))
        read.append((said[-1], position))
    assert fake.draft.of("decode") == [([said[0]], [320]), ([said[1]], [321]), ([said[2]], [322])]


def test_without_lookahead_the_prompts_own_row_decides():
    fake = make()
    scored = fake.engine.score(prompt(320, needle_at=130), dataclasses.replace(PLAIN, lookahead=0))
    assert [name for name, _, _ in fake.draft.calls] == ["prefill"]
    assert scored.importance.argmax() == 130
    assert scored.importance[130] == 0.5


def test_importance_is_the_mean_of_the_prompts_row_and_the_lookahead_rows_cut_to_the_prompt():
    def by_length(tokens: list[int]) -> Float[np.ndarray, "n"]:
        # 1, 3 and 8 on token 5, the prompt's row (of 100 tokens), first lookahead, second
        row = np.zeros(len(tokens), np.float32)
        row[5] = {100: 1, 101: 3, 102: 8}[len(tokens)]
        return row

    scored = make(attend=by_length).engine.score(prompt(100), PLAIN)
    assert scored.importance.shape == (100,)
    assert scored.importance[5] == 4
    assert np.delete(scored.importance, 5).tolist() == [0] * 99


def test_pooling_spreads_a_peak_over_its_neighbors():
    importance = make(attend=to_token(100)).engine.score(prompt(320, needle_at=130), Settings()).importance
    assert (importance[124:137] > 0.5 / 13).all()
    assert importance[123] < 0.01
    assert importance[137] < 0.01


def test_settings_choose_the_heads_and_the_queries():
    fake, tokens = make(attend=to_token(100)), prompt(320, needle_at=130)
    only = dataclasses.replace(PLAIN, lookahead=0, heads=(Head(1, 2),))
    assert fake.engine.score(tokens, only).importance.argmax() == 130
    # The row before the last is all 0 there: the mean of both is half.
    both = fake.engine.score(tokens, dataclasses.replace(only, queries=2))
    assert both.importance[130] == 0.25


def test_a_head_that_the_draft_lacks_is_refused_before_it_reads_anything():
    fake = make()
    with pytest.raises(SettingError, match=r"heads=2\.0: the draft has 2 attention layers of 3 heads"):
        fake.engine.generate(prompt(320), Settings(mode="sparse", heads=(Head(2, 0),)))
    assert fake.draft.calls == fake.target.calls == []


def test_rows_are_the_drafts_own_cut_to_the_prompt():
    fake, tokens = make(attend=to_token(100)), prompt(320, needle_at=130)
    rows = fake.engine.rows(tokens, lookahead=3)
    assert rows.prompt.shape == (8, 2, 3, 320)
    assert rows.lookahead.shape == (3, 2, 3, 320)
    assert rows.prompt[-1, 1, 2].argmax() == 130
    assert fake.engine.rows(tokens).lookahead.shape == (0, 2, 3, 320)


def test_lookahead_goes_on_past_a_stop_token():
    fake = make(draft_speak=lambda read: 2)
    fake.engine.score(prompt(100, needle_at=50), Settings(lookahead=2))
    assert fake.draft.of("decode") == [([2], [100]), ([2], [101])]


def test_lookahead_never_takes_an_id_that_only_pads_the_vocabulary():
    fake = make()
    fake.engine.score(prompt(100, needle_at=50))
    assert all(token < CHAT.vocabulary for tokens, _ in fake.draft.of("decode") for token in tokens)


def test_after_lookahead_the_drafts_state_is_what_the_prompt_made_of_it():
    fake = make()
    tokens = prompt(100, needle_at=50)
    fake.engine.score(tokens)
    (state,) = fake.draft.states
    assert state.read_so_far == [(int(token), position) for position, token in enumerate(tokens)]
    assert state.length == 100


# --- windows


def test_the_guides_example_is_read_by_its_four_windows_each_from_position_0():
    fake = make(draft_capacity=8192)
    tokens = prompt(4471, needle_at=1500)
    scored = fake.engine.score(tokens, Settings(window=2000, pool=0))
    expected = [(0, 2000), (1000, 3000), (2000, 4000), (3000, 4471)]
    assert fake.draft.of("prefill") == [
        (tokens[start:end].tolist(), list(range(end - start))) for start, end in expected
    ]
    assert [positions for _, positions in fake.draft.of("decode")] == [
        [end - start + step] for start, end in expected for step in (0, 1)
    ]
    assert scored.scoring == "windows"
    assert [window.keep_end for window in scored.windows] == [1000, 2000, 3000, 4471]
    assert scored.importance.argmax() == 1500


def test_each_token_gets_its_importance_from_the_window_that_contributes_it():
    def by_window(tokens: list[int]) -> Float[np.ndarray, "n"]:
        return np.full(len(tokens), tokens[0] - 299, np.float32)  # tokens begin with 300 + start % 700

    importance = make(attend=by_window).engine.score(prompt(1400), Settings(window=600)).importance
    # windows start at 0, 300, 600, 900; the last, 900..1400, contributes all it has
    assert importance.tolist() == [1.0] * 300 + [301.0] * 300 + [601.0] * 300 + [201.0] * 500


def test_windows_share_one_state_that_is_emptied_between_them():
    fake = make()
    fake.engine.score(prompt(1400, needle_at=700), Settings(window=600))
    (state,) = fake.draft.states
    assert state.length == 500


@pytest.mark.parametrize(
    ("size", "lookahead", "scoring"), [(598, 2, "continuous"), (599, 2, "windows"), (599, 1, "continuous")]
)
def test_one_pass_falls_back_to_windows_when_prompt_and_lookahead_exceed_the_drafts_cache(
    size: int, lookahead: int, scoring: str
):
    fake = make(draft_capacity=600)
    scored = fake.engine.score(prompt(size, needle_at=100), Settings(lookahead=lookahead))
    assert scored.scoring == scoring
    assert max(len(tokens) for tokens, _ in fake.draft.of("prefill")) + lookahead <= 600


def test_the_automatic_window_is_the_guides_as_far_as_the_drafts_cache_goes():
    # 3 heads: 500 MiB / (8192 * 3 * 4) = 5333; spec_ctx 1024: 1024 - 512
    assert window_size(make(draft_capacity=8192).draft, Settings(window=0)) == 5333
    assert window_size(make(draft_capacity=8192).draft, Settings(spec_ctx=1024)) == 512
    assert window_size(make(draft_capacity=4096).draft, Settings(window=0)) == 4094


def test_a_window_that_the_drafts_cache_cannot_hold_is_refused_with_the_limit():
    with pytest.raises(SettingError, match=r"window=599: .* 600 slots.*lookahead takes 2; .* 598 or fewer"):
        make(draft_capacity=600).engine.score(prompt(700), Settings(window=599))


def test_a_lookahead_that_leaves_no_room_for_the_prompt_is_refused():
    with pytest.raises(SettingError, match=r"lookahead=600: .*lower lookahead \(SP_LOOKAHEAD\)"):
        make(draft_capacity=600).engine.score(prompt(100), Settings(lookahead=600))


def test_a_number_that_is_not_finite_is_found_even_where_a_window_drops_it():
    def broken_tail(tokens: list[int]) -> Float[np.ndarray, "n"]:
        row = np.linspace(0, 1, len(tokens), dtype=np.float32)
        row[550:600] = np.inf
        return row

    result = make(attend=broken_tail).engine.generate(
        prompt(1400), Settings(mode="sparse", window=600, pool=0, max_tokens=1)
    )
    assert result.timings.status == "failed_dense"
    assert "50 of 600 numbers are not finite" in result.timings.reason
