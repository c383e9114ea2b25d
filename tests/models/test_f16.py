"""What the f16 builds round, shown in JAX against f32: no device for them is at hand.

The rounding points are those of the compiled modules, since the program is the same: matrices, the inputs of
every product, keys and values are f16, all sums and the rest f32.
"""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

from specprefill_jax.models.checkpoint import load_parameters
from specprefill_jax.scoring.importance import importance
from specprefill_jax.scoring.scorer import Rows, Scorer
from specprefill_jax.selection.select import select
from specprefill_jax.settings import Settings
from tests.models.reference import (
    CONFIGS,
    DEMO,
    Case,
    JaxRunner,
    Pair,
    load_pair,
    random_pair,
    run,
    run_blocks,
    spans,
)

LIMIT = 2e-2  # of the largest logit; 7e-4 to 5.2e-3 is measured
AGREEMENT = 0.98


def in_f16(pair: Pair, capacity: int) -> JaxRunner:
    model = jax.tree.map(jnp.asarray, load_parameters(pair.directory, pair.config, np.float16))
    return JaxRunner(pair.config, model, capacity, np.dtype(np.float16))


# Wide heads have twice the value heads too; equal ones are the demo draft's, which is compared below.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "wide heads" else pytest.mark.deep) for name in CONFIGS]
)
def test_logits_in_prefill_and_decode_stay_within_the_limit(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pair = random_pair(tmp_path_factory.mktemp("checkpoint"), name)
    case = Case(name, "", spans((0, 4), (32, 96), (320, 441)), block=128, decoded=2)
    wanted = run(JaxRunner(pair.config, pair.model), case)
    got = run(in_f16(pair, 256), case)
    for logits in ("logits", "decode.0.logits", "decode.1.logits"):
        off = np.abs(got[logits] - wanted[logits]).max() / np.abs(wanted[logits]).max()
        print(f"{name}, {logits}: {off:.1e} of {LIMIT:g}")
        assert off < LIMIT


def test_the_demo_draft_keeps_the_same_tokens() -> None:
    """Tokens kept by both, as a part of those kept in f32, over prompts of 768 tokens."""
    pair, capacity = load_pair(DEMO / "draft"), 768
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    lines = (DEMO / "examples.jsonl").read_text(encoding="utf-8").splitlines()[:3]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids[-capacity:] for line in lines]
    runners = JaxRunner(pair.config, pair.model, capacity), in_f16(pair, capacity)
    both = total = 0
    for ids in prompts:
        tokens, positions = np.array(ids, np.int32), np.arange(len(ids), dtype=np.int32)
        kept = []
        for runner in runners:
            _, rows, _ = run_blocks(runner, tokens, positions, block=256)
            attention = np.asarray(rows[-1:])[..., : len(ids)]
            scores = importance(Rows(attention, attention[:0]), Scorer())
            kept.append(set(select(scores, Settings()).kept.tolist()))
        both, total = both + len(kept[0] & kept[1]), total + len(kept[0])
    print(f"{both} of {total} kept in f32 are kept in f16 too")
    assert 0 < total < sum(map(len, prompts))
    assert both >= AGREEMENT * total
