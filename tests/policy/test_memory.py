"""The memory plan: what each way to answer takes, and which one fits."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.engine.reading import window_size
from specprefill_jax.errors import ArtifactError, EmptyPrompt, MemoryTooSmall, PromptTooLong, SettingError
from specprefill_jax.policy import MemoryPlan, plan_memory, require_memory
from specprefill_jax.runtime.blocks import plan_blocks
from specprefill_jax.settings import Settings
from tests.engine.fake import make
from tests.policy.pair import FIXED, SLOT, WEIGHTS, make_manifest

PAIR = make_manifest()
SMALL_CACHES: dict[str, Any] = {"capacities": (1024, 2048, 32768)}


def plan(tokens: int, manifest: Any = PAIR, **knobs: Any) -> MemoryPlan:
    return plan_memory(manifest, tokens, Settings(**knobs))


def names(found: MemoryPlan) -> list[str]:
    return [way.name for way in found.ways]


# --- what a way takes


def test_one_pass_takes_weights_caches_snapshots_and_the_hungrier_call():
    way = plan(20_000).ways[0]
    draft, target = way.draft, way.target
    assert (way.mode, way.window, way.kept) == ("continuous", None, 2000)
    assert (draft.slots, draft.capacity, draft.block) == (20_002, 32_768, 256)
    assert (target.slots, target.capacity, target.block) == (2256, 4096, 256)
    assert (draft.weights, target.weights) == (WEIGHTS["draft"], WEIGHTS["target"])
    assert draft.cache == 32_768 * SLOT["draft"] + FIXED["draft"]
    assert target.cache == 4096 * SLOT["target"] + FIXED["target"]
    assert (draft.snapshots, target.snapshots) == (4 * FIXED["draft"], 4 * FIXED["target"])
    assert draft.rows == 8 * 6 * 8 * 32_768 * 4
    assert target.rows == 0
    # f32 scores and f16 probabilities of 8 heads, the mask, 16 hidden vectors of 1024 for each token
    assert draft.call == 256 * (32_768 * (8 * 6 + 4) + 16 * 1024 * 4)
    assert target.call == 256 * (4096 * (16 * 6 + 4) + 16 * 2560 * 4)
    assert way.call == draft.call + draft.rows > target.call
    kept = sum(share.weights + share.cache + share.snapshots for share in (draft, target))
    assert way.total == kept + way.call


def test_dense_takes_the_whole_prompts_cache_and_the_drafts_weights():
    way = plan(20_000).ways[-1]
    assert (way.mode, way.kept, way.target.slots, way.target.capacity) == ("dense", 20_000, 20_256, 32_768)
    assert way.draft == dataclasses.replace(way.draft, slots=0, cache=0, snapshots=0, call=0, rows=0)
    assert way.weights == sum(WEIGHTS.values())
    assert way.total == way.weights + way.target.cache + way.target.snapshots + way.target.call


def test_estimates_are_what_the_true_models_builds_allocate():
    """Of docs/radeon-780m.md, "The whole models": 0.47 and 0.81 GiB in f16, blocks of 256 on 32,768 slots."""
    draft, target = plan(20_000).ways[0].draft, plan(20_000).ways[-1].target
    assert draft.call + draft.rows == pytest.approx(0.47 * 2**30, rel=0.02)
    assert target.call == pytest.approx(0.81 * 2**30, rel=0.02)


def test_states_are_those_of_the_true_models():
    """Of the same table: 0.39 and 1.05 GiB."""
    assert plan(20_000).ways[0].draft.cache == pytest.approx(0.39 * 2**30, rel=0.02)
    assert plan(20_000).ways[-1].target.cache == pytest.approx(1.05 * 2**30, rel=0.02)


def test_probabilities_are_f32_where_products_are():
    f16 = plan(20_000).ways[0].draft.call
    f32 = plan(20_000, make_manifest(draft={"numerics": "f32"})).ways[0].draft.call
    assert f32 - f16 == 256 * 32_768 * 8 * 2
    assert plan(20_000, make_manifest(draft={"numerics": "bf16"})).ways[0].draft.call == f32


def test_what_a_build_recorded_is_taken_for_its_largest_call_and_in_proportion_below():
    recorded = plan(20_000, make_manifest(draft={"largest_buffer": 454_658_176}))
    one_pass, windows, dense = recorded.ways
    assert (one_pass.draft.call, one_pass.draft.call_known) == (454_658_176, "recorded")
    # of 2048 slots in place of 32,768: 44,040,192 and 452,984,832 are the estimates
    assert windows.draft.call == -(-454_658_176 * 44_040_192 // 452_984_832)
    assert windows.draft.call_known == "in proportion"
    assert one_pass.target.call_known == dense.target.call_known == "estimated"
    assert dense.draft.call_known is None


def test_a_way_of_recorded_calls_is_not_estimated():
    both = make_manifest(draft={"largest_buffer": 1000}, target={"largest_buffer": 1000})
    ways = {way.name: way.estimated for way in plan(20_000, both).ways}
    assert ways == {"continuous": True, "windows of 2000": True, "dense": False}


def test_an_archive_of_both_models_counts_once():
    shared = make_manifest(draft={"parameters": "target.irpa"})
    assert plan(20_000, shared).ways[0].weights == WEIGHTS["target"]


def test_a_short_prompt_takes_a_short_block():
    assert plan(60, mode="sparse").ways[0].draft.block == 64
    assert plan(65, mode="sparse").ways[0].draft.block == 256


def test_the_plan_is_plain_json_with_a_verdict_for_each_way():
    found = plan(20_000)
    document = json.loads(json.dumps(found.to_json(found.ways[1].total)))
    assert [way["fits"] for way in document["ways"]] == [False, True, False]
    assert document["ways"][document["chosen"]]["window"] == 2000
    assert document["ways"][0]["total"] == found.ways[0].total
    assert document["ways"][0]["draft"]["capacity"] == 32_768
    assert found.to_json(1)["chosen"] is None
    assert found.to_json(None)["chosen"] == 0


# --- what fits


@pytest.mark.parametrize(("way", "below"), [(0, "windows of 2000"), (1, None)])
def test_a_way_fits_to_the_byte(way: int, below: str | None):
    found = plan(20_000)
    size = found.ways[way].total
    assert found.fitting(size) == require_memory(found, size) == found.ways[way]
    less = found.fitting(size - 1)
    assert (less and less.name) == below


def test_without_a_limit_the_prompt_is_read_in_one_pass():
    assert require_memory(plan(20_000), None).mode == "continuous"


def test_where_automatic_windows_do_not_fit_smaller_ones_with_a_smaller_cache_do():
    found = plan(20_000, make_manifest(draft=SMALL_CACHES))
    assert names(found) == ["continuous", "windows of 2000", "windows of 1022", "dense"]
    smaller = require_memory(found, found.ways[1].total - 1)
    assert (smaller.window, smaller.draft.slots, smaller.draft.capacity) == (1022, 1024, 1024)


def test_a_window_that_was_asked_for_is_not_made_smaller():
    found = plan(20_000, make_manifest(draft=SMALL_CACHES), window=1500)
    assert names(found) == ["windows of 1500", "dense"]


def test_no_window_is_smaller_than_the_guides_smallest():
    tiny = make_manifest(draft={"capacities": (256, 513, 2048, 32768)})
    assert names(plan(20_000, tiny)) == ["continuous", "windows of 2000", "dense"]
    assert "windows of 512" in names(plan(20_000, tiny, lookahead=1))


def test_windows_that_need_the_same_cache_as_one_pass_are_no_other_way():
    assert names(plan(1500, mode="sparse")) == ["continuous", "dense"]
    one = make_manifest(draft={"capacities": (32768,)})
    assert names(plan(20_000, one)) == ["continuous", "dense"]


def test_where_the_drafts_cache_does_not_fit_the_prompt_is_read_densely():
    found = plan(2000, mode="sparse")
    sparse, dense = found.ways
    assert dense.total < sparse.total
    assert require_memory(found, sparse.total - 1) == dense
    assert require_memory(found, dense.total) == dense


def test_a_draft_that_calibration_found_unfit_is_planned_where_dense_does_not_fit_and_only_there():
    dense = plan(20_000).ways[-1].total
    enough = plan_memory(PAIR, 20_000, Settings(memory=dense), unfit="it keeps 61%")
    assert (names(enough), enough.reason) == (["dense"], "it keeps 61%")
    assert names(plan_memory(PAIR, 20_000, Settings(), unfit="it keeps 61%")) == ["dense"]
    tight = plan_memory(PAIR, 20_000, Settings(memory=dense - 1), unfit="it keeps 61%")
    assert tight.ways == plan(20_000).ways
    assert require_memory(tight, dense - 1).mode == "continuous"
    beyond = plan_memory(PAIR, 40_000, Settings(), unfit="it keeps 61%")
    assert names(beyond) == ["windows of 2000"]


def test_where_nothing_fits_the_error_has_every_number_and_what_helps():
    found = plan(20_000)
    with pytest.raises(MemoryTooSmall) as error:
        require_memory(found, 10_000_000_000)
    assert str(error.value) == (
        "20000 prompt tokens and max_tokens=256 take 10,600,849,408 bytes at least (windows of 2000: "
        "weights 9.92 GB, caches 233.9 MB, snapshots 298.1 MB, one call 146.8 MB (estimated)), but memory is "
        "10,000,000,000 bytes: shorten the prompt, lower max_tokens (--max-tokens), keep less of the prompt "
        "(--keep), use a smaller artifact, or give more memory (--memory)"
    )


def test_a_dense_plan_that_does_not_fit_names_the_sparse_mode():
    with pytest.raises(MemoryTooSmall, match=r"keep less of the prompt \(--mode sparse, --keep\)"):
        require_memory(plan(8000), 10_674_514_432)
    assert require_memory(plan(8000, mode="sparse"), 10_674_514_432).mode == "windows"


def test_no_shorter_prompt_is_advised_where_the_weights_alone_are_too_large():
    with pytest.raises(MemoryTooSmall, match="8,000,000,000 bytes: use a smaller artifact, or give more"):
        require_memory(plan(20_000), 8_000_000_000)


# --- which ways there are


def test_a_prompt_beyond_the_drafts_largest_cache_is_read_by_windows():
    assert names(plan(32_766, max_tokens=1))[0] == "continuous"
    found = plan(32_767, max_tokens=1)
    assert names(found) == ["windows of 2000", "dense"]
    assert found.impossible == (
        "continuous scoring takes 32769 slots, and the draft's largest cache has 32768",
    )


def test_a_prompt_beyond_the_targets_largest_cache_is_not_read_densely():
    assert names(plan(32_512))[-1] == "dense"
    found = plan(32_513)
    assert "dense" not in names(found)
    assert found.impossible == ("dense prefill takes 32769 slots, and the target's largest cache has 32768",)


def test_a_prompt_beyond_the_largest_cache_that_must_be_read_densely_has_no_way():
    found = plan(32_513, mode="dense")
    assert found.ways == ()
    assert found.fitting(None) is None
    with pytest.raises(
        PromptTooLong, match=r"dense prefill takes 32769 slots, .*use an artifact with larger"
    ):
        require_memory(found, None)


def test_a_prompt_beyond_the_positions_has_no_way():
    assert plan(2**18 - 256).ways != ()
    with pytest.raises(
        PromptTooLong, match="prompt and answer take 262145 positions, and the target has 262144"
    ):
        require_memory(plan(2**18 - 255), 16 * 10**9)


@pytest.mark.parametrize(
    ("tokens", "knobs"),
    [(8191, {}), (20_000, {"mode": "dense"}), (20_000, {"enabled": False}), (9000, {"keep": 1})],
)
def test_where_the_draft_is_not_run_there_is_one_way_and_its_reason(tokens: int, knobs: dict[str, Any]):
    found = plan(tokens, **knobs)
    assert names(found) == ["dense"]
    assert found.reason


def test_setting_a_window_leaves_one_pass_out():
    assert names(plan(20_000, window=0)) == ["windows of 2000", "dense"]
    assert plan(20_000, spec_ctx=4096).ways[0].window == 3584


def test_a_window_longer_than_the_prompt_takes_the_prompts_slots():
    (way, _) = plan(1000, mode="sparse", window=2000).ways
    assert (way.window, way.draft.slots) == (2000, 1002)


def test_a_mass_may_need_less_than_the_largest_cache_a_fraction_does_not():
    capped = plan(100_000, max_keep=0).ways[0]
    assert (capped.kept, capped.target.slots) == (32_512, 32_768)
    found = plan(100_000, max_keep=0, keep=0.5, chunking="fixed")
    assert found.ways == ()
    # 50,000 but for a chunk of 32
    assert found.impossible[0] == "sparse prefill takes 50225 slots, and the target's largest cache has 32768"
    assert (
        plan(65_086, max_keep=0, keep=0.5, chunking="fixed").ways[0].kept == 32_512
    )  # of 32,543 at most, 32,512 at least
    assert plan(65_088, max_keep=0, keep=0.5, chunking="fixed").ways == ()


def test_an_answer_as_long_as_the_largest_cache_has_no_way():
    assert plan(20_000, max_tokens=32_768).ways == ()


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_prompt_without_tokens_is_refused(tokens: int):
    with pytest.raises(EmptyPrompt):
        plan(tokens)


@pytest.mark.parametrize("role", ["draft", "target"])
def test_an_artifact_without_a_model_is_refused(role: str):
    models = {name: model for name, model in PAIR.models.items() if name != role}
    with pytest.raises(ArtifactError, match=f"artifact 'pair' has no {role} model"):
        plan(20_000, dataclasses.replace(PAIR, models=models))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"window": 2047}, "window=2047 and lookahead=2: the draft was compiled for 2048 slots at most"),
        ({"lookahead": 2047}, "lookahead=2047: the draft was compiled for 2048 slots at most"),
    ],
)
def test_a_window_or_lookahead_that_no_cache_holds_is_refused(knobs: dict[str, Any], message: str):
    with pytest.raises(SettingError, match=message):
        plan(20_000, make_manifest(draft={"capacities": (2048,)}), **knobs)


# --- the plan says what the engine does


@pytest.mark.parametrize("capacities", [(300,), (1024, 2048), (2048, 16384)])
@pytest.mark.parametrize("knobs", [{}, {"window": 600}, {"spec_ctx": 640}, {"lookahead": 0}])
def test_windows_are_the_engines(capacities: tuple[int, ...], knobs: dict[str, Any]):
    manifest = make_manifest(draft={"capacities": capacities})
    fake = make()
    fake.draft.model = manifest.models["draft"]
    settings = Settings(**knobs)
    try:
        expected = window_size(fake.draft, settings)
    except SettingError:
        with pytest.raises(SettingError):
            plan_memory(manifest, 20_000, settings)
    else:
        assert plan_memory(manifest, 20_000, settings).ways[0].window == expected


@given(st.integers(5, 32_000), st.sampled_from([(64, 256), (16,), (32, 100, 512)]))
def test_no_block_is_longer_than_planned(tokens: int, blocks: tuple[int, ...]):
    manifest = make_manifest(draft={"blocks": blocks}, minimum=0)
    share = plan_memory(manifest, tokens, Settings()).ways[0].draft
    taken = plan_blocks(tokens, lengths=blocks, capacity=share.capacity, rows=8)
    assert max(block.length for block in taken) <= share.block
