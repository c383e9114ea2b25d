"""Prompts that are cut where their lines and sentences end, on the models of tests/engine/fake.py."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from specprefill_jax.selection import History, fixed, segments, select
from specprefill_jax.session import Session
from specprefill_jax.settings import Settings
from tests.engine.fake import CHAT, make

SPARSE = Settings(mode="sparse", max_tokens=2, select_mode="chunk", keep=0.3)
TEXT = SPARSE  # chunks follow the text by default
LINES = "".join(f"The {i}th line of them all says that it is line {i}.\n" for i in range(40)) + "Which?"


def test_chunks_end_where_lines_do_and_are_kept_whole():
    scored = make().engine.score(LINES, TEXT, raw=True)
    edges, kept = scored.selection.edges, scored.selection.kept
    np.testing.assert_array_equal(edges, segments(CHAT.borders(scored.tokens), 32))
    chunks = [CHAT.decode(scored.tokens[i:j]) for i, j in pairwise(edges)]
    assert all(chunk.endswith(".\n") for chunk in chunks[:-1])
    mask = np.isin(np.arange(scored.tokens.size), kept)
    whole = [mask[i:j].all() for i, j in pairwise(edges)]
    assert 1 < sum(whole) < len(whole)
    assert mask.sum() == sum(np.diff(edges)[whole]) + (0 if whole[0] else 4)
    assert kept.size <= scored.selection.budget


def test_the_answer_reads_what_the_score_shows():
    assert make().engine.generate(LINES, TEXT).kept.tolist() == (
        make().engine.score(LINES, TEXT).selection.kept.tolist()
    )


def test_chunks_of_a_fixed_size_are_to_be_had():
    scored = make().engine.score(LINES, dataclasses.replace(SPARSE, chunking="fixed"), raw=True)
    np.testing.assert_array_equal(scored.selection.edges, fixed(scored.tokens.size, 32))


@pytest.mark.parametrize("settings", [SPARSE, dataclasses.replace(TEXT, chunk=16)])
def test_json_tells_the_setting_and_the_edges(settings: Settings):
    document = make().engine.score(LINES, settings).to_json()
    assert document["chunk"] == settings.chunk
    assert len(document["edges"]) == len(document["chunk_scores"]) + 1
    assert (document["edges"][0], document["edges"][-1]) == (0, document["prompt"])


def test_a_last_chunk_that_leaves_no_room_is_known_before_the_draft_reads():
    # Behind the last line that ends are 40 tokens, one chunk: more than the last fixed one of 32 can have.
    text = LINES.removesuffix("Which?") + " so" * 20
    tokens = CHAT.encode(text)
    last = tokens.size - int(segments(CHAT.borders(tokens), 32)[-2])
    assert last == 40
    fake, capped = make(), dataclasses.replace(TEXT, max_keep=40)
    result = fake.engine.generate(text, capped, raw=True)
    assert result.timings.status == "skipped_insufficient_budget"
    assert f"44 of {tokens.size} tokens are always kept" in result.timings.reason
    assert fake.draft.calls == []
    assert (
        make().engine.generate(text, dataclasses.replace(capped, chunking="fixed"), raw=True).kept.size <= 40
    )


def test_in_a_conversation_earlier_turns_stay_and_the_new_one_is_cut_at_its_borders():
    fake = make()
    session = Session(fake.engine)
    first = session.generate(LINES, TEXT, raw=True)
    before = CHAT.encode(LINES)
    more = np.concatenate([before, np.array(first.tokens, np.int32), CHAT.encode("\n" + LINES)])
    second = session.generate(more, TEXT)
    assert (first.timings.status, second.timings.status) == ("active", "active")
    kept = second.kept[second.kept < before.size]
    assert kept.tolist() == first.kept.tolist()
    edges = segments(CHAT.borders(more), 32)
    importance = make().engine.score(more, TEXT).importance
    wanted = select(importance, TEXT, history=History(before.size, first.kept), edges=edges)
    assert second.kept.tolist() == wanted.kept.tolist()
