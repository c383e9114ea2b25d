"""Qwen3.5 text configuration, read from a Hugging Face `config.json`.

The reader knows every field that transformers 5.24 (`models/qwen3_5/configuration_qwen3_5.py`) and the public
Qwen3.5 releases write. A field outside these tables may change what the model computes, so it is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, get_args

from specprefill_jax.errors import ConfigError, FileMissing

LayerType = Literal["full_attention", "linear_attention"]

MULTIMODAL: Final = "qwen3_5"
TEXT_ONLY: Final = "qwen3_5_text"

_SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "max_position_embeddings",
)

# Fields that choose a variant of the architecture, and the only value of each that `models` implements.
# A file without the field means this value too: transformers has no other for this model type.
_FIXED: Final[Mapping[str, Any]] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",  # the gate of the delta layer's output norm; swish is SiLU
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "quantization_config": None,
    "rope_scaling": None,
}

_READ: Final = frozenset(
    {
        "model_type",
        "layer_types",
        "full_attention_interval",
        "rope_parameters",
        "rope_theta",
        "partial_rotary_factor",
        "rms_norm_eps",
        "tie_word_embeddings",
        "eos_token_id",
    }
)

# Known to have no effect on text inference: bookkeeping of transformers, training, and the part of the
# checkpoint that is skipped (the multi-token prediction head).
_NO_EFFECT: Final = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "initializer_range",
        "label2id",
        "mtp_num_hidden_layers",
        "mtp_use_dedicated_embeddings",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Known without effect beside `text_config` in the multimodal wrapper: images and video are out of scope.
_WRAPPER_NO_EFFECT: Final = frozenset(
    {
        "image_token_id",
        "language_model_only",
        "video_token_id",
        "vision_config",
        "vision_end_token_id",
        "vision_start_token_id",
    }
)

_ROPE_FIELDS: Final = frozenset(
    {"rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
)


@dataclass(frozen=True)
class TextConfig:
    """Sizes and constants of one Qwen3.5 text model, under the names that its `config.json` uses.

    `rotary_dim` is how many leading dimensions of a head rotary turns (`head_dim * partial_rotary_factor`);
    `eos_token_ids` are the ids that end a generation, empty where the files name none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_types: tuple[LayerType, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    rope_theta: float
    rotary_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers, ascending; their count is `A`."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """Indices of the gated delta layers, ascending."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "linear_attention")

    @property
    def query_dim(self) -> int:
        """Width of all query heads of an attention layer together, the gate not counted."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_dim(self) -> int:
        """Width of all key (or value) heads of an attention layer together."""
        return self.num_key_value_heads * self.head_dim

    @property
    def key_dim(self) -> int:
        """Width of all key (or query) heads of a delta layer together."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Width of all value heads of a delta layer together."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels of a delta layer's convolution: [query | key | value]."""
        return 2 * self.key_dim + self.value_dim

    @classmethod
    def from_hf(cls, fields: Mapping[str, Any]) -> TextConfig:
        """Reads the fields of a `config.json`, multimodal (`text_config` inside) or text-only.

        Raises:
            ConfigError: a foreign `model_type`, an unknown or missing field, a variant that is not
                implemented, or fields that contradict each other.
        """
        return _read_text(_text_fields(fields))

    def to_hf(self) -> dict[str, Any]:
        """The fields of a text-only `config.json`, as `from_hf` and transformers read them."""
        sizes = {name: getattr(self, name) for name in _SIZES}
        eos = self.eos_token_ids
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": TEXT_ONLY,
            **sizes,
            "layer_types": list(self.layer_types),
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotary_dim / self.head_dim,
            },
            "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        }


def read_config(path: Path | str) -> TextConfig:
    """Configuration from a checkpoint directory or its `config.json`.

    Released chat models name further stop ids only in `generation_config.json`; where that file lies beside
    the config, its `eos_token_id` adds to `eos_token_ids`.

    Raises:
        FileMissing: there is no config.json.
        ConfigError: it is not a JSON object, or describes a model that is not understood.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise FileMissing(f"{file} does not exist: a checkpoint directory needs a Hugging Face config.json")
    try:
        config = TextConfig.from_hf(_read_object(file))
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    generation = file.with_name("generation_config.json")
    if not generation.is_file():
        return config
    try:
        more = _token_ids(_read_object(generation).get("eos_token_id"), config.vocab_size)
    except ConfigError as error:
        raise ConfigError(f"{generation}: {error}") from None
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))


def write_config(config: TextConfig, directory: Path, dtype: str) -> None:
    """Writes a text-only config.json; `dtype` names the number format of the weights beside it."""
    text = json.dumps({**config.to_hf(), "dtype": dtype}, indent=2)
    (directory / "config.json").write_text(text + "\n", encoding="utf-8")


def _read_object(file: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"it is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"it holds {_kind(value)}, not a JSON object")
    return value


def _text_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's fields, taken out of the multimodal wrapper where there is one."""
    found = fields.get("model_type")
    if found == TEXT_ONLY:
        return fields
    if found != MULTIMODAL:
        raise ConfigError(
            f"model_type is {found!r}; supported are {TEXT_ONLY!r} (text only) and {MULTIMODAL!r} "
            "(multimodal, whose text_config is read)"
        )
    text = fields.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"model_type {MULTIMODAL!r} needs an object text_config; found {_kind(text)}")
    if text.get("model_type", TEXT_ONLY) != TEXT_ONLY:
        raise ConfigError(f"text_config.model_type is {text['model_type']!r}; supported is {TEXT_ONLY!r}")
    # The wrapper may repeat a field of the text model (tie_word_embeddings, eos_token_id): they must agree.
    own = _WRAPPER_NO_EFFECT | _NO_EFFECT | {"model_type", "text_config"}
    shared = {name: value for name, value in fields.items() if name not in own and value is not None}
    for name, value in shared.items():
        inner = text.get(name)
        if inner is not None and inner != value:
            raise ConfigError(
                f"{name} is {value!r} beside text_config but {inner!r} inside it; make them agree"
            )
    return {**text, **shared}


def _read_text(fields: Mapping[str, Any]) -> TextConfig:
    _check_known(set(fields))
    _check_fixed(fields)
    sizes = {name: _positive(fields, name) for name in _SIZES}
    layers = sizes.pop("num_hidden_layers")
    theta, rotary = _rotary(fields, sizes["head_dim"])
    config = TextConfig(
        **sizes,
        layer_types=_layer_types(fields, layers),
        rope_theta=theta,
        rotary_dim=rotary,
        rms_norm_eps=_positive_number(_required(fields, "rms_norm_eps"), "rms_norm_eps"),
        tie_word_embeddings=_boolean(fields, "tie_word_embeddings"),
        eos_token_ids=_token_ids(fields.get("eos_token_id"), sizes["vocab_size"]),
    )
    _check_heads(config)
    return config


def _check_known(names: set[str]) -> None:
    unknown = sorted(names - set(_SIZES) - set(_FIXED) - _READ - _NO_EFFECT)
    if unknown:
        raise ConfigError(
            f"unknown fields: {', '.join(unknown)}. They may change what the model computes; supported is "
            "what transformers 5.24 writes for qwen3_5. Remove a field that is known not to affect inference"
        )


def _check_fixed(fields: Mapping[str, Any]) -> None:
    for name, supported in _FIXED.items():
        found = fields.get(name, supported)
        if found != supported or isinstance(found, bool) != isinstance(supported, bool):
            raise ConfigError(f"{name} is {found!r}; only {supported!r} is supported")


def _check_heads(config: TextConfig) -> None:
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    _check_divides("num_key_value_heads", groups, "num_attention_heads", heads)
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    _check_divides("linear_num_key_heads", keys, "linear_num_value_heads", values)
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    if key != value:
        raise ConfigError(
            f"linear_key_head_dim is {key} but linear_value_head_dim is {value}; models split a delta "
            "layer's channels into heads of one size, so the two must be equal"
        )
    if config.linear_conv_kernel_dim < 2:
        raise ConfigError("linear_conv_kernel_dim is 1; the convolution needs a kernel of at least 2")


def _check_divides(groups_name: str, groups: int, heads_name: str, heads: int) -> None:
    if heads % groups:
        raise ConfigError(f"{heads_name} {heads} is not a multiple of {groups_name} {groups}")


def _layer_types(fields: Mapping[str, Any], layers: int) -> tuple[LayerType, ...]:
    """`layer_types`, or where only `full_attention_interval` n is given, every n-th layer full attention."""
    listed, interval = fields.get("layer_types"), None
    if fields.get("full_attention_interval") is not None:
        interval = _positive(fields, "full_attention_interval")
    if listed is None and interval is None:
        raise ConfigError("layer_types is missing, and there is no full_attention_interval to derive it from")
    derived = _every(interval, layers) if interval else None
    kinds = derived if listed is None else listed
    if not isinstance(kinds, list) or any(kind not in get_args(LayerType) for kind in kinds):
        raise ConfigError(f"layer_types is {kinds!r}; supported are full_attention and linear_attention")
    if len(kinds) != layers:
        raise ConfigError(f"layer_types lists {len(kinds)} layers, but num_hidden_layers is {layers}")
    for layer, kind in enumerate(derived or ()):
        if kinds[layer] != kind:
            raise ConfigError(
                f"layer_types says {kinds[layer]} for layer {layer}, but full_attention_interval {interval} "
                f"makes it {kind}"
            )
    return tuple(kinds)


def _every(interval: int, layers: int) -> list[LayerType]:
    return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]


def _rotary(fields: Mapping[str, Any], head_dim: int) -> tuple[float, int]:
    """(theta, rotated dimensions of a head), from `rope_parameters` or the older fields beside it."""
    rope = fields.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters is {_kind(rope)}, not an object")
    unknown = sorted(set(rope) - _ROPE_FIELDS)
    if unknown:
        raise ConfigError(f"rope_parameters has unknown fields: {', '.join(unknown)}")
    if rope.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters.rope_type is {rope['rope_type']!r}; only 'default' is supported")
    values = {}
    for name in ("rope_theta", "partial_rotary_factor"):
        inner, outer = rope.get(name), fields.get(name)
        if inner is not None and outer is not None and inner != outer:
            raise ConfigError(
                f"{name} is {inner!r} in rope_parameters but {outer!r} beside it; make them agree"
            )
        if inner is None and outer is None:
            raise ConfigError(f"rope_parameters.{name} is missing")
        values[name] = _positive_number(outer if inner is None else inner, f"rope_parameters.{name}")
    width = head_dim * values["partial_rotary_factor"]
    dim = round(width)
    if not math.isclose(width, dim, rel_tol=1e-6) or dim % 2 or not 2 <= dim <= head_dim:
        raise ConfigError(
            f"partial_rotary_factor {values['partial_rotary_factor']} of head_dim {head_dim} turns {width:g} "
            f"dimensions; they must be an even whole number from 2 to {head_dim}"
        )
    _check_sections(rope.get("mrope_section"), dim)
    return values["rope_theta"], dim


def _check_sections(sections: Any, rotary_dim: int) -> None:
    """A text token has one position for all mrope sections, so only their sum can matter: it must fit."""
    if sections is None:
        return
    if not isinstance(sections, list) or any(type(n) is not int or n < 0 for n in sections):
        raise ConfigError(f"rope_parameters.mrope_section is {sections!r}, not a list of whole numbers")
    if 2 * sum(sections) != rotary_dim:
        raise ConfigError(
            f"rope_parameters.mrope_section {sections} adds up to {sum(sections)} frequencies, but "
            f"partial_rotary_factor makes {rotary_dim // 2}"
        )


def _token_ids(value: Any, vocabulary: int) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ConfigError(
                f"eos_token_id {token!r} is no token id; the vocabulary has ids 0 to {vocabulary - 1}"
            )
    return tuple(ids)


def _required(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ConfigError(f"{name} is missing")
    return fields[name]


def _positive(fields: Mapping[str, Any], name: str) -> int:
    value = _required(fields, name)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value


def _positive_number(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name} is {value!r}; it must be a number above 0")
    return float(value)


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = _required(fields, name)
    if type(value) is not bool:
        raise ConfigError(f"{name} is {value!r}; it must be true or false")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
