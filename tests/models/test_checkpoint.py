from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from transformers import Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration, Qwen3_5TextConfig

from specprefill_jax.errors import CheckpointError, FileMissing
from specprefill_jax.formats.safetensors import TensorSpec, read_tensors, write_tensors
from specprefill_jax.models.checkpoint import (
    MULTIMODAL_PREFIX,
    TEXT_PREFIX,
    build_model,
    iterate_tensors,
    largest_magnitude,
    load_parameters,
    parameter_at,
    parameter_shapes,
    parameter_specs,
    save_parameters,
)
from specprefill_jax.models.config import TextConfig, read_config
from specprefill_jax.models.matrix import Tiled
from specprefill_jax.models.parameters import Attention, Delta, Model

DEMO = Path(__file__).parents[2] / "artifacts" / "demo"
UP = "model.layers.0.mlp.up_proj.weight"  # one of two in a parameter
DOWN = "model.layers.0.mlp.down_proj.weight"  # one by itself
NORM = "model.layers.0.input_layernorm.weight"
CONV = "model.layers.0.linear_attn.conv1d.weight"

TINY: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 64,
}


def tiny(*, tied: bool = True) -> TextConfig:
    return TextConfig.from_hf(Qwen3_5TextConfig(**TINY, tie_word_embeddings=tied).to_dict())


def random_model(config: TextConfig, dtype: Any = np.float32) -> Model:
    rng = np.random.default_rng(1)
    return build_model(
        config, lambda spec: rng.standard_normal(spec.shape).astype(spec.dtype(np.dtype(dtype)))
    )


def saved(directory: Path, **options: Any) -> TextConfig:
    """A valid tied checkpoint in `directory`."""
    config = tiny()
    save_parameters(random_model(config), config, directory, **options)
    return config


def rewrite(directory: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    """Changes the tensors of a single-file checkpoint."""
    tensors = {name: np.array(tensor) for name, tensor in read_tensors(directory).items()}
    change(tensors)
    specs = [TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
    write_tensors(directory, specs, tensors.values(), shard_bytes=1 << 30)


def as_stored(directory: Path, config: TextConfig) -> dict[str, np.ndarray]:
    """What a checkpoint's parameters hold, under the names and in the shapes of the file."""
    parameters = dict(iterate_tensors(directory, config, np.float32))
    return {
        key: tensor
        for spec in parameter_specs(config)
        for key, tensor in zip(spec.stored, spec.to_stored(parameters[spec.key]), strict=True)
    }


def assert_same(found: Model, wanted: Model) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("prefix", [TEXT_PREFIX, MULTIMODAL_PREFIX])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_bytes", [4_000, 1 << 30])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_parameters_survive_a_round_trip(
    tmp_path: Path, prefix: str, tied: bool, shard_bytes: int, dtype: Any
) -> None:
    config = tiny(tied=tied)
    model = random_model(config, dtype)
    save_parameters(model, config, tmp_path, prefix=prefix, shard_bytes=shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard_bytes == 4_000
    names = [name for name in read_tensors(tmp_path) if name != "lm_head.weight"]
    assert all(name.startswith(prefix) for name in names)
    assert read_config(tmp_path) == config
    assert_same(load_parameters(tmp_path, config, dtype), model)


def test_text_only_checkpoint_of_transformers_loads(tmp_path: Path) -> None:
    reference = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, tie_word_embeddings=False)).bfloat16()
    reference.save_pretrained(tmp_path, max_shard_size="10KB")
    config = read_config(tmp_path)
    tensors = as_stored(tmp_path, config)
    state = reference.state_dict()
    assert tensors.keys() == state.keys()
    for key, wanted in state.items():
        np.testing.assert_array_equal(tensors[key], wanted.float().numpy(), err_msg=key)


def test_multimodal_checkpoint_of_transformers_loads_without_its_vision_tower(tmp_path: Path) -> None:
    text = Qwen3_5TextConfig(**TINY, tie_word_embeddings=True)
    vision = {"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 1, "out_hidden_size": 24}
    wrapper = Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    reference = Qwen3_5ForConditionalGeneration(wrapper)
    reference.save_pretrained(tmp_path)
    assert any(name.startswith("model.visual.") for name in read_tensors(tmp_path))
    config = read_config(tmp_path)
    tensors = as_stored(tmp_path, config)
    state = reference.state_dict()
    for key, array in tensors.items():
        wanted = state[key.replace(TEXT_PREFIX, MULTIMODAL_PREFIX, 1)].numpy()
        np.testing.assert_array_equal(array, wanted, err_msg=key)
    assert config.tie_word_embeddings
    assert "lm_head.weight" not in tensors


def test_a_tap_of_the_convolution_becomes_a_contiguous_row(tmp_path: Path) -> None:
    config = saved(tmp_path)
    # Channel c, tap t: 4 c + t. The first head is a query's, the third a value's: both stay where they are.
    stored = np.arange(64 * 4, dtype=np.float32).reshape(64, 1, 4)
    rewrite(tmp_path, lambda tensors: tensors.update({CONV: stored}))
    found = dict(iterate_tensors(tmp_path, config, np.float32))[CONV]
    assert found.shape == (4, 64)
    assert found[:, :3].tolist() == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert found.flags.c_contiguous


def test_the_convolution_is_saved_as_transformers_stores_it(tmp_path: Path) -> None:
    config = tiny()
    taps = np.arange(4 * 64, dtype=np.float32).reshape(4, 64)  # tap t, channel c: 64 t + c
    model = build_model(
        config, lambda spec: taps if spec.key == CONV else np.zeros(spec.shape, spec.dtype(np.dtype("f4")))
    )
    save_parameters(model, config, tmp_path)
    stored = read_tensors(tmp_path)[CONV]
    assert stored.shape == (64, 1, 4)
    assert stored[:2].tolist() == [[[0, 64, 128, 192]], [[1, 65, 129, 193]]]


def test_heads_of_queries_and_keys_come_by_turns(tmp_path: Path) -> None:
    """Two query and two key heads of 8 channels, then 32 channels of values and 32 rows of z."""
    config = saved(tmp_path)
    number = np.arange(64 + 32, dtype=np.float32)[:, None] * np.ones((1, config.hidden_size), np.float32)
    qkv, z = CONV.replace("conv1d", "in_proj_qkv"), CONV.replace("conv1d", "in_proj_z")
    rewrite(tmp_path, lambda tensors: tensors.update({qkv: number[:64], z: number[64:]}))
    found = dict(iterate_tensors(tmp_path, config, np.float32))[CONV.replace("conv1d", "in_proj_qkvz")]
    by_turns = [*range(8), *range(16, 24), *range(8, 16), *range(24, 96)]
    assert found[:, 0].tolist() == by_turns
    stored = as_stored(tmp_path, config)
    np.testing.assert_array_equal(stored[qkv], number[:64])
    np.testing.assert_array_equal(stored[z], number[64:])


@pytest.mark.parametrize(("name", "parameters"), [("draft", 600_000), ("target", 1_040_000)])
def test_demo_pair_loads(name: str, parameters: int) -> None:
    config = read_config(DEMO / name)
    model = load_parameters(DEMO / name, config, np.float32)
    assert sum(leaf.size for leaf in jax.tree.leaves(model)) == pytest.approx(parameters, rel=0.01)


def test_mtp_head_is_skipped(tmp_path: Path) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"mtp.norm.weight": np.zeros(3, np.float32)}))
    assert "mtp.norm.weight" not in dict(iterate_tensors(tmp_path, config, np.float32))


def test_shapes_of_the_release_are_the_documented_ones() -> None:
    config = replace(
        tiny(),
        hidden_size=1024,
        num_attention_heads=8,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
    )
    specs = parameter_specs(config)
    shapes = {key.split(".", 3)[-1]: shape for spec in specs for key, shape in spec.stored.items()}
    assert shapes["linear_attn.in_proj_qkv.weight"] == (6144, 1024)
    assert shapes["linear_attn.in_proj_z.weight"] == (2048, 1024)
    assert shapes["linear_attn.in_proj_a.weight"] == (16, 1024)
    assert shapes["linear_attn.out_proj.weight"] == (1024, 2048)
    assert shapes["linear_attn.conv1d.weight"] == (6144, 1, 4)
    assert shapes["self_attn.q_proj.weight"] == (4096, 1024)
    assert shapes["self_attn.k_proj.weight"] == (512, 1024)
    assert shapes["self_attn.o_proj.weight"] == (1024, 2048)
    ours = {spec.key.split(".", 3)[-1]: spec.shape for spec in specs}
    assert ours["linear_attn.in_proj_qkvz.weight"] == (8192, 1024)
    assert ours["linear_attn.in_proj_ba.weight"] == (32, 1024)
    assert ours["linear_attn.conv1d.weight"] == (4, 6144)
    assert ours["self_attn.qk_proj.weight"] == (4608, 1024)


def test_table_reaches_every_leaf_of_the_model_once() -> None:
    config = tiny(tied=False)
    model = build_model(config, lambda spec: spec.key)
    keys = [spec.key for spec in parameter_specs(config)]
    assert sorted(jax.tree.leaves(model)) == sorted(keys)
    assert [parameter_at(model, spec) for spec in parameter_specs(config)] == keys


def test_shapes_stand_in_for_weights() -> None:
    config = tiny()
    shapes = parameter_shapes(config, ml_dtypes.bfloat16)
    assert shapes.lm_head is None
    delta, attention = shapes.layers[0].mixer, shapes.layers[3].mixer
    assert isinstance(delta, Delta)
    assert isinstance(attention, Attention)
    assert not isinstance(attention.qk_proj, Tiled)
    assert (delta.conv1d.shape, delta.conv1d.dtype) == ((4, 2 * 16 + 32), np.float32)
    assert (attention.qk_proj.shape, attention.qk_proj.dtype) == ((10 * 16, 24), ml_dtypes.bfloat16)


def test_matrices_take_the_format_of_the_build_and_vectors_stay_f32(tmp_path: Path) -> None:
    config = saved(tmp_path)
    for key, array in iterate_tensors(tmp_path, config, np.float16):
        is_vector = array.ndim == 1 or key.endswith("conv1d.weight")
        assert array.dtype == (np.float32 if is_vector else np.float16), key


def test_tensors_already_in_the_wanted_format_stay_in_the_file(tmp_path: Path) -> None:
    config = saved(tmp_path)
    assert not dict(iterate_tensors(tmp_path, config, np.float32))[DOWN].flags.writeable


def test_conversion_rounds_to_nearest_even(tmp_path: Path) -> None:
    config = saved(tmp_path)
    # Half way between the bf16 numbers 1 and 1.0078125, 1.0078125 and 1.015625; just above the first middle.
    values = np.array([1.00390625, 1.01171875, 1.00390637], np.float32)
    rewrite(tmp_path, lambda tensors: tensors[DOWN][0, :3].__setitem__(slice(None), values))
    array = dict(iterate_tensors(tmp_path, config, ml_dtypes.bfloat16))[DOWN]
    assert array[0, :3].astype(np.float32).tolist() == [1.0, 1.015625, 1.0078125]


def set_value(key: str, value: float) -> Callable[[dict[str, np.ndarray]], Any]:
    return lambda tensors: tensors[key].reshape(-1).__setitem__(3, value)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("key", [UP, NORM])
def test_value_that_is_not_finite_is_refused(tmp_path: Path, value: float, key: str) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, set_value(key, value))
    with pytest.raises(CheckpointError, match=f"{key} holds a value that is not finite"):
        dict(iterate_tensors(tmp_path, config, np.float32))


def test_value_beyond_f16_is_refused_with_its_maximum(tmp_path: Path) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, set_value(UP, -70000.0))
    with pytest.raises(
        CheckpointError, match=f"{UP} reaches 70000, but float16 ends at 65504; build with bfloat16"
    ):
        dict(iterate_tensors(tmp_path, config, np.float16))
    dict(iterate_tensors(tmp_path, config, ml_dtypes.bfloat16))


def test_vector_beyond_f16_stays_exact_in_an_f16_build(tmp_path: Path) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, set_value(NORM, 70000.0))
    assert dict(iterate_tensors(tmp_path, config, np.float16))[NORM][3] == 70000.0


def test_largest_f16_number_is_kept(tmp_path: Path) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, set_value(DOWN, 65504.0))
    assert dict(iterate_tensors(tmp_path, config, np.float16))[DOWN].reshape(-1)[3] == 65504.0


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_largest_magnitude_ignores_the_sign(dtype: Any) -> None:
    assert largest_magnitude(np.array([[1.0, -4.0], [3.5, -0.0]], dtype)) == 4.0
    assert largest_magnitude(np.array([1.0, -np.inf], dtype)) == np.inf
    assert np.isnan(largest_magnitude(np.array([-np.nan, np.inf, 1.0], dtype)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(UP), rf"lacks {UP} \[20, 24\], which its config.json asks for"),
        (lambda t: [t.pop(key) for key in list(t)[2:]], r" and \d+ more, which its config.json asks for"),
        (
            lambda t: t.update({"model.layers.9.x": np.zeros(2, np.float32)}),
            r"holds model.layers.9.x \[2\], which has no place .* only model.visual.\* and mtp.\*",
        ),
        (
            lambda t: t.update({UP: np.zeros((24, 20), np.float32)}),
            rf"{UP} in .* has shape \[24, 20\], but config.json asks for \[20, 24\]",
        ),
        (
            lambda t: t.update({UP: np.zeros((20, 24), np.int8)}),
            rf"{UP} in .* is stored as int8; read are float32, bfloat16, float16, float64. Convert a quan",
        ),
        (
            lambda t: t.update({MULTIMODAL_PREFIX + UP.removeprefix(TEXT_PREFIX): t[UP]}),
            rf"{UP} is there twice, as {UP} and as model.language_model.layers.0.mlp.up_proj.weight",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}),
            "lm_head.weight in .* differs from model.embed_tokens.weight, but config.json says tie_word_emb",
        ),
        (
            lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].astype(np.float16)}),
            "lm_head.weight in .* differs from model.embed_tokens.weight",
        ),
    ],
)
def test_wrong_tensor_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, np.ndarray]], Any], message: str
) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        iterate_tensors(tmp_path, config, np.float32)


def test_tied_head_that_equals_the_embedding_is_accepted(tmp_path: Path) -> None:
    config = saved(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    assert load_parameters(tmp_path, config, np.float32).lm_head is None


def test_untied_model_needs_its_head(tmp_path: Path) -> None:
    saved(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight \[40, 24\]"):
        load_parameters(tmp_path, tiny(tied=False), np.float32)


def test_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    config = saved(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        CheckpointError, match=r"model.safetensors: the file is truncated: model.norm.weight ends"
    ):
        load_parameters(tmp_path, config, np.float32)


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match="holds no checkpoint"):
        load_parameters(tmp_path, tiny(), np.float32)


def test_format_that_no_build_uses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be loaded as int8; choose float32, bfloat16, float16"):
        load_parameters(tmp_path, tiny(), np.int8)
