"""The module text that goes to the compiler: names, scalars, donation, shared weights, tile products."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from specprefill_jax.aot.export import Shapes, export_module
from specprefill_jax.models.checkpoint import parameter_specs
from specprefill_jax.models.config import TextConfig
from specprefill_jax.models.matrix import TileShape

CONFIG = TextConfig(
    vocab_size=80,
    hidden_size=48,
    intermediate_size=40,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_conv_kernel_dim=4,
    rope_theta=1e5,
    rotary_dim=8,
    rms_norm_eps=1e-6,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
    eos_token_ids=(0,),
)
PLAIN = Shapes(blocks=(16, 64), capacities=(32, 128), rows=4, numerics="f32", tile=None)
TILED = replace(PLAIN, numerics="bf16", tile=TileShape(rows=16, depth=2))

# In layer order: the delta layer's last inputs and matrix, then keys and values.
DELTA = ("tensor<3x192xf32>", "tensor<4x16x16xf32>")


@pytest.fixture(scope="module")
def plain() -> str:
    return export_module("draft", CONFIG, PLAIN)


@pytest.fixture(scope="module")
def tiled() -> str:
    return export_module("draft", CONFIG, TILED)


def signature(text: str, name: str) -> tuple[list[str], list[str]]:
    """Arguments and results of a public function."""
    found = re.search(rf"^  func\.func @{name}\((.*)\) -> \((.*)\) \{{$", text, re.MULTILINE)
    assert found is not None, name
    return re.split(r", (?=%)", found[1]), found[2].split(", ")


def test_only_the_entries_are_public(plain: str) -> None:
    public = re.findall(r"func\.func (?!private)(?:public )?@([\w.$]+)", plain)
    assert sorted(public) == [
        "decode_C128",
        "decode_C32",
        "head",
        "prefill_T16_C128",
        "prefill_T16_C32",
        "prefill_T64_C128",
        "prefill_rows_T16_C128",
        "prefill_rows_T16_C32",
        "prefill_rows_T64_C128",
    ]


def test_a_target_returns_no_rows() -> None:
    text = export_module("target", CONFIG, replace(PLAIN, blocks=(16,), capacities=(32,), rows=0))
    assert "prefill_rows" not in text
    assert signature(text, "decode_C32")[1] == ["tensor<80xf32>", *DELTA, *2 * ["tensor<32x2x32xf32>"]]


def test_scalars_are_primitive_values_and_the_state_is_donated(plain: str) -> None:
    arguments, results = signature(plain, "prefill_T16_C32")
    cache = "tensor<32x2x32xf32>"
    assert arguments == [
        "%x0: tensor<16xi32>",
        "%x1: tensor<16xi32>",
        "%x2: i32",
        "%x3: i32",
        f"%s0: {DELTA[0]} {{iree.abi.output = 1 : index}}",
        f"%s1: {DELTA[1]} {{iree.abi.output = 2 : index}}",
        f"%s2: {cache} {{iree.abi.output = 3 : index}}",
        f"%s3: {cache} {{iree.abi.output = 4 : index}}",
    ]
    assert results == ["tensor<48xf32>", *DELTA, cache, cache]


def test_rows_come_between_the_hidden_vector_and_the_state(plain: str) -> None:
    arguments, results = signature(plain, "prefill_rows_T64_C128")
    cache = "tensor<128x2x32xf32>"
    assert results == ["tensor<48xf32>", "tensor<1x4x4x128xf32>", *DELTA, cache, cache]
    assert [argument.partition(" {")[2] for argument in arguments[4:]] == [
        f"iree.abi.output = {i} : index}}" for i in (2, 3, 4, 5)
    ]


def test_decode_takes_three_scalars_and_returns_logits_and_rows(plain: str) -> None:
    arguments, results = signature(plain, "decode_C128")
    assert arguments[:3] == ["%x0: i32", "%x1: i32", "%x2: i32"]
    assert results[:2] == ["tensor<80xf32>", "tensor<1x4x128xf32>"]


def test_head_has_neither_scalars_nor_state(plain: str) -> None:
    assert signature(plain, "head") == (["%x0: tensor<48xf32>"], ["tensor<80xf32>"])


def test_weights_are_shared_parameters_under_the_checkpoints_keys(plain: str) -> None:
    found = re.findall(
        r'^  util\.global private @"([^"]+)" = #flow\.parameter\.named<"model"::"([^"]+)">',
        plain,
        re.MULTILINE,
    )
    keys = [spec.key for spec in parameter_specs(CONFIG)]
    assert found == [(key, key) for key in keys]
    assert "model.layers.1.self_attn.qk_proj.weight" in keys
    for key in keys:  # every entry loads the one copy
        assert plain.count(f'util.global.load @"{key}"') == 9


def test_matrices_take_the_builds_format_and_tiles_and_vectors_do_not(plain: str, tiled: str) -> None:
    both = '@"model.layers.0.mlp.gate_up_proj.weight" = #flow.parameter.named<"model"::' + (
        '"model.layers.0.mlp.gate_up_proj.weight"> : '
    )
    assert f"{both}tensor<80x48xf32>" in plain
    assert f"{both}tensor<5x24x16x2xbf16>" in tiled  # 80 outputs in tiles of 16, 48 inputs in pairs
    norm = '"model.norm.weight"> : tensor<48xf32>'
    assert norm in plain
    assert norm in tiled


def test_tile_products_become_mmt4d_with_f32_sums(plain: str, tiled: str) -> None:
    assert "mmt4d" not in plain
    functions = re.findall(r"  func\.func private @\w+__mmt4d\w*\(.*?\n  \}", tiled, re.DOTALL)
    assert len(functions) >= 9
    for function in functions:
        assert function.count("linalg.mmt4d") == 1
        assert "stablehlo.dot_general" not in function
        assert re.search(r"outs\(%init : tensor<[\dx]+f32>\)", function)


def test_what_is_to_be_made_apart_has_a_barrier_and_nothing_added(plain: str) -> None:
    functions = re.findall(r"  func\.func private @\w+__apart\w*\(.*?\n  \}", plain, re.DOTALL)
    assert functions
    for function in functions:
        assert function.count("iree_tensor_ext.compute_barrier.start") == 1
        assert "stablehlo" not in function


@pytest.mark.parametrize("shapes", [PLAIN, TILED], ids=["plain", "tiled"])
def test_exporting_twice_gives_the_same_text(
    shapes: Shapes, request: pytest.FixtureRequest, plain: str, tiled: str
) -> None:
    assert export_module("draft", CONFIG, shapes) == (tiled if shapes.tile else plain)


def test_the_text_names_no_file_or_directory_of_this_machine(plain: str, tiled: str) -> None:
    for text in (plain, tiled):
        assert "loc(" not in text
        assert str(Path(__file__).parents[2]) not in text
        assert not re.search(r"[\"' (]/[\w.-]+/", text)
