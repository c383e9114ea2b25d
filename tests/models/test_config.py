import json
from pathlib import Path
from typing import Any

import pytest

from specprefill_jax.errors import ConfigError, FileMissing
from specprefill_jax.models.config import TextConfig, read_config

DEMO = Path(__file__).parents[2] / "artifacts" / "demo"


def text_fields(**changes: Any) -> dict[str, Any]:
    """The text model of the 0.8B release; a change of None removes the field."""
    fields = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3584,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": 248320,
    }
    return {name: value for name, value in {**fields, **changes}.items() if value is not None}


def multimodal_fields(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": text_fields(),
        "tie_word_embeddings": True,
        "transformers_version": "5.0.0",
        "video_token_id": 248057,
        "vision_config": {"model_type": "qwen3_5", "depth": 12},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
        **changes,
    }


def test_release_fields_become_the_documented_shapes() -> None:
    config = TextConfig.from_hf(text_fields())
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (1024, 24, 3584)
    assert config.attention_layers == (3, 7, 11, 15, 19, 23)
    assert len(config.delta_layers) == 18
    assert (config.query_dim, config.key_value_dim) == (2048, 512)
    assert (config.key_dim, config.value_dim, config.conv_channels) == (2048, 2048, 6144)
    assert (config.rope_theta, config.rotary_dim) == (1e7, 64)
    assert config.tie_word_embeddings is True
    assert config.eos_token_ids == (248044,)


def test_multimodal_wrapper_gives_the_same_config_as_its_text_model() -> None:
    assert TextConfig.from_hf(multimodal_fields()) == TextConfig.from_hf(text_fields())


def test_tied_embedding_may_be_named_by_the_wrapper_alone() -> None:
    wrapper = multimodal_fields(text_config=text_fields(tie_word_embeddings=None))
    assert TextConfig.from_hf(wrapper).tie_word_embeddings is True


@pytest.mark.parametrize("wrapped", [False, True])
def test_everything_that_transformers_writes_is_understood(tmp_path: Path, wrapped: bool) -> None:
    from transformers import Qwen3_5Config, Qwen3_5TextConfig

    reference = Qwen3_5TextConfig(num_hidden_layers=8, eos_token_id=[5, 7])
    written = Qwen3_5Config(text_config=reference) if wrapped else reference
    written.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config == TextConfig.from_hf(json.loads(json.dumps(written.to_dict())))
    assert list(config.layer_types) == reference.layer_types
    assert (config.hidden_size, config.linear_num_value_heads) == (4096, 32)
    assert (config.rope_theta, config.rotary_dim) == (10000.0, 64)
    assert config.eos_token_ids == (5, 7)


def test_transformers_reads_back_what_we_write() -> None:
    from transformers import Qwen3_5TextConfig

    config = TextConfig.from_hf(text_fields())
    reference = Qwen3_5TextConfig(**config.to_hf())
    assert TextConfig.from_hf(reference.to_dict()) == config
    assert reference.to_dict()["rope_parameters"]["partial_rotary_factor"] == 0.25


@pytest.mark.parametrize(("name", "layers"), [("draft", 4), ("target", 8)])
def test_demo_pair_is_understood(name: str, layers: int) -> None:
    config = read_config(DEMO / name)
    assert config.num_hidden_layers == layers
    assert config.rotary_dim == 8
    assert config.eos_token_ids == (2,)


def test_layers_follow_the_interval_where_no_list_is_given() -> None:
    config = TextConfig.from_hf(text_fields(layer_types=None, num_hidden_layers=6, full_attention_interval=3))
    assert config.attention_layers == (2, 5)


def test_rotary_may_be_named_beside_rope_parameters() -> None:
    config = TextConfig.from_hf(
        text_fields(rope_parameters={"rope_type": "default"}, rope_theta=500.0, partial_rotary_factor=0.5)
    )
    assert (config.rope_theta, config.rotary_dim) == (500.0, 128)


def test_stop_ids_of_the_generation_config_are_added(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text_fields()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [248046, 248044]}))
    assert read_config(tmp_path / "config.json").eos_token_ids == (248044, 248046)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'; supported are 'qwen3_5_text'"),
        ({"model_type": "qwen3_5_moe_text"}, "model_type is 'qwen3_5_moe_text'"),
        ({"num_experts": 64, "zoom": 1}, "unknown fields: num_experts, zoom"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"tie_word_embeddings": None}, "tie_word_embeddings is missing"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"layer_types": None, "full_attention_interval": None}, "layer_types is missing"),
        ({"head_dim": 0}, "head_dim is 0; it must be a whole number of at least 1"),
        ({"head_dim": "256"}, "head_dim is '256'; it must be a whole number"),
        ({"vocab_size": True}, "vocab_size is True; it must be a whole number"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it must be a number above 0"),
        ({"attention_bias": True}, "attention_bias is True; only False is supported"),
        ({"attention_bias": 0}, "attention_bias is 0; only False is supported"),
        ({"attn_output_gate": False}, "attn_output_gate is False; only True is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; only 'swish' is supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; only 'float32' is supported"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers is \\[1\\]; only \\[\\] is supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}; only None is supported"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling is {'type': 'yarn'}; only None is supported"),
        ({"num_hidden_layers": 23}, "layer_types lists 24 layers, but num_hidden_layers is 23"),
        (
            {"full_attention_interval": 3},
            "layer_types says linear_attention for layer 2, but full_attention_inter",
        ),
        ({"layer_types": ["sliding_attention"] * 24}, "supported are full_attention and linear_attention"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        (
            {"linear_num_key_heads": 5},
            "linear_num_value_heads 16 is not a multiple of linear_num_key_heads 5",
        ),
        (
            {"linear_value_head_dim": 64},
            "linear_key_head_dim is 128 but linear_value_head_dim is 64; models split .* heads of one size",
        ),
        ({"linear_conv_kernel_dim": 1}, "the convolution needs a kernel of at least 2"),
        ({"eos_token_id": 248320}, "eos_token_id 248320 is no token id; the vocabulary has ids 0 to 248319"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.25 in rope_parameters but 0.5 beside it",
        ),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextConfig.from_hf(text_fields(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_type": "yarn"}, "rope_parameters.rope_type is 'yarn'; only 'default' is supported"),
        ({"factor": 4.0}, "rope_parameters has unknown fields: factor"),
        ({"rope_theta": None}, "rope_parameters.rope_theta is missing"),
        ({"partial_rotary_factor": None}, "rope_parameters.partial_rotary_factor is missing"),
        ({"rope_theta": -1}, "rope_parameters.rope_theta is -1; it must be a number above 0"),
        ({"partial_rotary_factor": 0.1}, "turns 25.6 dimensions; they must be an even whole number"),
        ({"partial_rotary_factor": 2.0}, "turns 512 dimensions"),
        ({"mrope_section": [11, 11, 11]}, "adds up to 33 frequencies, but partial_rotary_factor makes 32"),
        ({"mrope_section": "11"}, "mrope_section is '11', not a list of whole numbers"),
    ],
)
def test_rotary_that_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    rope = {**text_fields()["rope_parameters"], **changes}
    with pytest.raises(ConfigError, match=message):
        TextConfig.from_hf(text_fields(rope_parameters=rope))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "needs an object text_config; found nothing"),
        ({"text_config": text_fields(model_type="qwen3_next")}, "text_config.model_type is 'qwen3_next'"),
        ({"tie_word_embeddings": False}, "False beside text_config but True inside it; make them agree"),
        ({"hidden_size": 2048}, "hidden_size is 2048 beside text_config but 1024 inside it"),
        ({"audio_config": {}}, "unknown fields: audio_config"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}"),
    ],
)
def test_wrapper_that_is_not_understood_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextConfig.from_hf(multimodal_fields(**changes))


def test_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileMissing, match=r"config\.json does not exist"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: it is not valid JSON"),
        ("[]", "config.json: it holds a list, not a JSON object"),
        ('{"model_type": "llama"}', "config.json: model_type is 'llama'"),
    ],
)
def test_error_names_the_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_bad_stop_id_of_the_generation_config_names_that_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text_fields()))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": "stop"}))
    with pytest.raises(ConfigError, match=r"generation_config\.json: eos_token_id 'stop' is no token id"):
        read_config(tmp_path)
