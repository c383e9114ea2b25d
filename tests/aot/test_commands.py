"""What a call submits to the device, counted in the scheduled program at the true widths of 0.8B and 4B.

Two and three groups of layers (three delta, one attention) stand for the whole: a further group adds what the
third one did. `scripts/check_true_shapes` counts whole models.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from specprefill_jax.aot.compiler import Commands, count_commands
from specprefill_jax.aot.export import Shapes, export_module
from specprefill_jax.aot.lower import Entry, module_text
from specprefill_jax.aot.targets import target_for
from specprefill_jax.models.config import LayerType, TextConfig

GROUP: tuple[LayerType, ...] = (
    "linear_attention",
    "linear_attention",
    "linear_attention",
    "full_attention",
)
BLOCK, CAPACITY = 256, 4096
TARGET = target_for("radeon-780m")


def true_widths(
    hidden: int, intermediate: int, heads: tuple[int, int], delta_heads: tuple[int, int]
) -> TextConfig:
    """`heads` is (query, key/value), `delta_heads` is (key, value)."""
    return TextConfig(
        vocab_size=248320,
        hidden_size=hidden,
        intermediate_size=intermediate,
        layer_types=2 * GROUP,
        num_attention_heads=heads[0],
        num_key_value_heads=heads[1],
        head_dim=256,
        linear_num_key_heads=delta_heads[0],
        linear_num_value_heads=delta_heads[1],
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_theta=1e7,
        rotary_dim=64,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        eos_token_ids=(0,),
    )


# Widths and rows. The 0.8B model is the draft and returns rows, the 4B model is the target.
MODELS = {
    "0.8b": (true_widths(1024, 3584, (8, 2), (16, 16)), 8),
    "4b": (true_widths(2560, 9216, (16, 4), (16, 32)), 0),
}
GROUPS = {"0.8b": 6, "4b": 8}
# Dispatches per layer, those that a call makes once (embedding, mask, phases, last norm) included.
CEILINGS = {
    ("0.8b", "prefill"): 25,
    ("0.8b", "prefill_rows"): 25,
    ("0.8b", "decode"): 14,
    ("4b", "prefill"): 25,
    ("4b", "decode"): 14,
}
# And copies on the device: of a delta layer the inputs that its convolution keeps, in and out.
COPY_CEILINGS = {"prefill": 1, "prefill_rows": 1, "decode": 3}
HEAD_CEILING = 2

# True shapes take minutes to compile. Every run holds the demo pair to the same ceilings: they are a check of
# preflight, which it must pass.
NAMES = [pytest.param(name, marks=pytest.mark.deep) for name in MODELS]
KINDS = [pytest.param(name, kind, marks=pytest.mark.deep) for name, kind in CEILINGS]

Counts = Callable[..., dict[str, Commands]]


@pytest.fixture(scope="module")
def counts() -> Counts:
    @cache
    def count(name: str, groups: int = 2) -> dict[str, Commands]:
        config, rows = MODELS[name]
        config = replace(config, layer_types=groups * GROUP)
        text = export_module("model", config, Shapes((BLOCK,), (CAPACITY,), rows, "f16", None))
        return count_commands(text, TARGET.flags, name)

    return count


def entry(kind: str) -> str:
    return f"decode_C{CAPACITY}" if kind == "decode" else f"{kind}_T{BLOCK}_C{CAPACITY}"


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_is_counted(name: str, counts: Counts) -> None:
    kinds = [kind for model, kind in CEILINGS if model == name]
    assert counts(name).keys() == {*map(entry, kinds), "head"}


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_one_submission_without_staging_or_waits(name: str, counts: Counts) -> None:
    for function, commands in counts(name).items():
        got = (commands.submissions, commands.staging, commands.waits)
        assert got == (1, 0, 0), function


@pytest.mark.parametrize("name", NAMES)
def test_no_loop_over_layers_tokens_or_chunks_is_left_to_the_host(name: str, counts: Counts) -> None:
    assert {function: commands.loops for function, commands in counts(name).items() if commands.loops} == {}


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_dispatches_per_layer_stay_below_the_ceiling(name: str, kind: str, counts: Counts) -> None:
    two, three = (counts(name, groups)[entry(kind)].dispatches for groups in (2, 3))
    assert three - two > len(GROUP), "fewer kernels than layers: nothing was counted"
    whole = two + (GROUPS[name] - 2) * (three - two)
    print(f"{name} {kind}: {whole / (GROUPS[name] * len(GROUP)):.2f} dispatches per layer")
    assert whole <= CEILINGS[name, kind] * GROUPS[name] * len(GROUP)
    copies = counts(name, 2)[entry(kind)].copies
    assert copies <= COPY_CEILINGS[kind] * 2 * len(GROUP)


@pytest.mark.parametrize("name", NAMES)
def test_the_head_is_its_product_and_a_conversion(name: str, counts: Counts) -> None:
    assert 1 <= counts(name)["head"].dispatches <= HEAD_CEILING


def test_a_loop_and_its_waits_would_be_counted() -> None:
    """A loop whose end depends on the data: the host must read the condition at every turn."""

    def halved(_: tuple[()], x: jax.Array, state: tuple[()]) -> tuple[jax.Array]:
        return (jax.lax.while_loop(lambda x: jnp.sum(x) > 1.0, lambda x: x * 0.5, x),)

    text = module_text("loop", [], [Entry("halve", halved, (jax.ShapeDtypeStruct((8,), jnp.float32),), ())])
    commands = count_commands(text, TARGET.flags, "loop")["halve"]
    assert commands.loops > 0
    assert commands.staging + commands.waits > 0
