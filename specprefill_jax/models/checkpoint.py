"""The table between checkpoint keys and parameters of a Qwen3.5 text model, used in both directions.

The canonical key is the text-only one (`model.layers.0.mlp.up_proj.weight`); the multimodal releases put
`model.language_model.` where it says `model.`. Shapes follow from the configuration, never from the file: a
tensor that is unknown, missing or of another shape is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from pathlib import Path
from typing import Any, Final, Literal

import jax
import ml_dtypes
import numpy as np
from jaxtyping import Float, Int, Shaped
from numpy.typing import DTypeLike

from specprefill_jax.errors import CheckpointError
from specprefill_jax.formats.safetensors import TensorSpec, read_tensors, write_tensors
from specprefill_jax.models.config import TextConfig, write_config
from specprefill_jax.models.parameters import Attention, Block, Delta, Mlp, Model

TEXT_PREFIX: Final = "model."
MULTIMODAL_PREFIX: Final = "model.language_model."
SKIPPED_PREFIXES: Final = ("model.visual.", "mtp.")  # the vision tower; the multi-token prediction head

Kind = Literal["matrix", "vector"]

MATRIX_DTYPES: Final = tuple(np.dtype(d) for d in (np.float32, ml_dtypes.bfloat16, np.float16))
FLOATS: Final = (*MATRIX_DTYPES, np.dtype(np.float64))
DEFAULT_SHARD_BYTES: Final = 4_000_000_000


@dataclass(frozen=True)
class Row:
    """One line of the table.

    `field` is the parameter's path inside `Model` or `Block`. `parts` are its names in the checkpoint after
    the prefix and `layers.N.`, with their shapes there in the words of `_sizes`: most parameters are one
    tensor, some are several matrices, one below the other. `key` is its own name. Matrices take the number
    format of the build; vectors (norms, decay constants, the convolution) stay f32 in every build. `paired`
    ones begin with the delta rule's query heads and then its key heads, which the model has by turns.
    """

    field: str
    key: str
    kind: Kind
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    paired: bool = False


def _row(field: str, key: str, kind: Kind, shape: tuple[str, ...], paired: bool = False) -> Row:
    return Row(field, key, kind, ((key, shape),), paired)


MODEL_ROWS: Final = (
    _row("embed_tokens", "embed_tokens.weight", "matrix", ("vocabulary", "hidden")),
    _row("norm", "norm.weight", "vector", ("hidden",)),
)
HEAD_ROW: Final = _row("lm_head", "lm_head.weight", "matrix", ("vocabulary", "hidden"))
BLOCK_ROWS: Final = (
    _row("input_layernorm", "input_layernorm.weight", "vector", ("hidden",)),
    _row("post_attention_layernorm", "post_attention_layernorm.weight", "vector", ("hidden",)),
    Row(
        "mlp.gate_up_proj",
        "mlp.gate_up_proj.weight",
        "matrix",
        (
            ("mlp.gate_proj.weight", ("intermediate", "hidden")),
            ("mlp.up_proj.weight", ("intermediate", "hidden")),
        ),
    ),
    _row("mlp.down_proj", "mlp.down_proj.weight", "matrix", ("hidden", "intermediate")),
)
ATTENTION_ROWS: Final = (
    Row(
        "mixer.qk_proj",
        "self_attn.qk_proj.weight",
        "matrix",
        (
            ("self_attn.q_proj.weight", ("queries and gates", "hidden")),
            ("self_attn.k_proj.weight", ("keys", "hidden")),
        ),
    ),
    _row("mixer.v_proj", "self_attn.v_proj.weight", "matrix", ("keys", "hidden")),
    _row("mixer.o_proj", "self_attn.o_proj.weight", "matrix", ("hidden", "queries")),
    _row("mixer.q_norm", "self_attn.q_norm.weight", "vector", ("head",)),
    _row("mixer.k_norm", "self_attn.k_norm.weight", "vector", ("head",)),
)
DELTA_ROWS: Final = (
    Row(
        "mixer.in_proj_qkvz",
        "linear_attn.in_proj_qkvz.weight",
        "matrix",
        (
            ("linear_attn.in_proj_qkv.weight", ("channels", "hidden")),
            ("linear_attn.in_proj_z.weight", ("delta values", "hidden")),
        ),
        paired=True,
    ),
    Row(
        "mixer.in_proj_ba",
        "linear_attn.in_proj_ba.weight",
        "matrix",
        (
            ("linear_attn.in_proj_b.weight", ("delta value heads", "hidden")),
            ("linear_attn.in_proj_a.weight", ("delta value heads", "hidden")),
        ),
    ),
    _row("mixer.conv1d", "linear_attn.conv1d.weight", "vector", ("channels", "one", "kernel"), paired=True),
    _row("mixer.A_log", "linear_attn.A_log", "vector", ("delta value heads",)),
    _row("mixer.dt_bias", "linear_attn.dt_bias", "vector", ("delta value heads",)),
    _row("mixer.norm", "linear_attn.norm.weight", "vector", ("delta value head",)),
    _row("mixer.out_proj", "linear_attn.out_proj.weight", "matrix", ("hidden", "delta values")),
)
MIXER_ROWS: Final = {"full_attention": ATTENTION_ROWS, "linear_attention": DELTA_ROWS}


def _sizes(config: TextConfig) -> dict[str, int]:
    return {
        "vocabulary": config.vocab_size,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "queries": config.query_dim,
        "queries and gates": 2 * config.query_dim,
        "keys": config.key_value_dim,
        "head": config.head_dim,
        "channels": config.conv_channels,
        "delta values": config.value_dim,
        "delta value heads": config.linear_num_value_heads,
        "delta value head": config.linear_value_head_dim,
        "one": 1,
        "kernel": config.linear_conv_kernel_dim,
    }


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a model: its name, its path in `Model`, and the checkpoint's tensors that make it up.

    Attributes:
        key: its name in a parameter archive: the checkpoint's own where it is one tensor of it.
        stored: canonical keys and shapes in the file; several are matrices that lie one below the other.
        pairs: (heads, size) of the query heads with which it begins, as many key heads following, where the
            parameter has them by turns: query, key, query, key; None for all others.

    The shape of the convolution differs from the file's: [channels, 1, kernel] becomes [kernel, channels], so
    that one tap is one contiguous row.
    """

    key: str
    path: tuple[str | int, ...]
    kind: Kind
    stored: Mapping[str, tuple[int, ...]]
    pairs: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        first, *_ = shapes = tuple(self.stored.values())
        if len(first) == 3:
            return (first[2], first[0])
        return (sum(shape[0] for shape in shapes), *first[1:])

    def from_stored(self, arrays: Sequence[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The stored tensors as the parameter; a single one stays a view."""
        array = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        if self.pairs is not None:
            array = array[self._by_turns()]
        return np.ascontiguousarray(array[:, 0].T) if array.ndim == 3 else array

    def to_stored(self, array: Shaped[np.ndarray, "..."]) -> list[Shaped[np.ndarray, "..."]]:
        """The parameter as the tensors of the file."""
        shapes = tuple(self.stored.values())
        array = array.T[:, None] if len(shapes[0]) == 3 else array
        if self.pairs is not None:
            array = array[np.argsort(self._by_turns())]
        return np.split(array, np.cumsum([shape[0] for shape in shapes])[:-1])

    def _by_turns(self) -> Int[np.ndarray, " rows"]:
        """Which row of the file each row of the parameter is."""
        heads, size = self.pairs or (0, 0)
        rows = np.arange(sum(shape[0] for shape in self.stored.values()))
        first = rows[: 2 * heads * size].reshape(2, heads, size).transpose(1, 0, 2)
        return np.concatenate([first.reshape(-1), rows[2 * heads * size :]])

    def dtype(self, matrix_dtype: np.dtype) -> np.dtype:
        """The type this parameter has in a build whose matrices are `matrix_dtype`."""
        return matrix_dtype if self.kind == "matrix" else np.dtype(np.float32)


def parameter_specs(config: TextConfig) -> tuple[ParameterSpec, ...]:
    """Every parameter: the embedding, the layers in order, the final norm, the head where it is not tied."""
    sizes = _sizes(config)

    def spec(row: Row, key: str, path: tuple[str | int, ...]) -> ParameterSpec:
        return ParameterSpec(
            key=key + row.key,
            path=(*path, *row.field.split(".")),
            kind=row.kind,
            stored={key + name: tuple(sizes[size] for size in shape) for name, shape in row.parts},
            pairs=(config.linear_num_key_heads, config.linear_key_head_dim) if row.paired else None,
        )

    embedding, norm = MODEL_ROWS
    layers = [
        spec(row, f"{TEXT_PREFIX}layers.{layer}.", ("layers", layer))
        for layer, kind in enumerate(config.layer_types)
        for row in BLOCK_ROWS + MIXER_ROWS[kind]
    ]
    head = [] if config.tie_word_embeddings else [spec(HEAD_ROW, "", ())]
    return (spec(embedding, TEXT_PREFIX, ()), *layers, spec(norm, TEXT_PREFIX, ()), *head)


def parameter_shapes(config: TextConfig, matrix_dtype: DTypeLike) -> Model:
    """A `Model` whose leaves are `jax.ShapeDtypeStruct`: what an export needs in place of weights."""
    matrices = _matrix_dtype(matrix_dtype)
    return build_model(config, lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype(matrices)))


def load_parameters(directory: Path, config: TextConfig, matrix_dtype: DTypeLike) -> Model:
    """A `Model` of NumPy arrays from a checkpoint directory.

    Tensors that the file already holds in the wanted format stay views of the mapped file.

    Raises: as `iterate_tensors`.
    """
    tensors = dict(iterate_tensors(directory, config, matrix_dtype))
    return build_model(config, lambda spec: tensors[spec.key])


def save_parameters(
    model: Model,
    config: TextConfig,
    directory: Path,
    *,
    prefix: str = TEXT_PREFIX,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes a checkpoint directory: a text-only config.json, safetensors in the formats of the arrays."""
    tensors = {
        stored_key(key, prefix): array
        for spec in parameter_specs(config)
        for key, array in zip(spec.stored, spec.to_stored(np.asarray(parameter_at(model, spec))), strict=True)
    }
    stored = [TensorSpec(key, array.dtype, array.shape) for key, array in tensors.items()]
    write_tensors(directory, stored, list(tensors.values()), shard_bytes)
    write_config(config, directory, str(np.asarray(model.embed_tokens).dtype))


def iterate_tensors(
    directory: Path, config: TextConfig, matrix_dtype: DTypeLike
) -> Iterator[tuple[str, Float[np.ndarray, "*shape"]]]:
    """(key, array) of every parameter in the order of `parameter_specs`, one in memory at a time.

    Names, shapes and formats are checked before the first array, values as each array is reached. Matrices
    come as `matrix_dtype` (float32, bfloat16 or float16), vectors as float32, the convolution as
    [kernel, channels].

    Raises:
        FileMissing: the checkpoint or one of its shards is not there.
        CheckpointError: a file is malformed; a tensor is unknown, missing, there twice, of another shape or
            of a format that is not read; a value is not finite or too large for `matrix_dtype`.
    """
    matrices = _matrix_dtype(matrix_dtype)
    specs = parameter_specs(config)
    stored = canonical_tensors(read_tensors(directory))
    _check_coverage(directory, config, specs, stored)

    def arrays() -> Iterator[tuple[str, np.ndarray]]:
        for spec in specs:
            tensors = [converted(key, stored[key], spec.dtype(matrices)) for key in spec.stored]
            yield spec.key, spec.from_stored(tensors)

    return arrays()


def build_model(config: TextConfig, leaf: Callable[[ParameterSpec], Any]) -> Model:
    """A `Model` with `leaf(spec)` in the place of each parameter: the table read towards the parameters."""
    leaves = {spec.path: leaf(spec) for spec in parameter_specs(config)}

    def node(cls: type[Any], *path: str | int) -> Any:
        return cls(**{field.name: leaves[(*path, field.name)] for field in fields(cls)})

    def block(layer: int, kind: str) -> Block:
        mixer = Attention if kind == "full_attention" else Delta
        return Block(
            input_layernorm=leaves["layers", layer, "input_layernorm"],
            mixer=node(mixer, "layers", layer, "mixer"),
            post_attention_layernorm=leaves["layers", layer, "post_attention_layernorm"],
            mlp=node(Mlp, "layers", layer, "mlp"),
        )

    return Model(
        embed_tokens=leaves["embed_tokens",],
        layers=tuple(block(layer, kind) for layer, kind in enumerate(config.layer_types)),
        norm=leaves["norm",],
        lm_head=leaves.get(("lm_head",)),
    )


def parameter_at(model: Model, spec: ParameterSpec) -> Any:
    """The parameter that `spec` names: the table read towards the checkpoint."""

    def step(node: Any, name: str | int) -> Any:
        return node[name] if isinstance(name, int) else getattr(node, name)

    return reduce(step, spec.path, model)


def stored_key(key: str, prefix: str) -> str:
    """The canonical key under another prefix; the head has none."""
    return prefix + key.removeprefix(TEXT_PREFIX) if key.startswith(TEXT_PREFIX) else key


def canonical_tensors(
    tensors: Mapping[str, Shaped[np.ndarray, "..."]],
) -> dict[str, Shaped[np.ndarray, "..."]]:
    """Tensors under their canonical keys, without the skipped ones.

    Raises:
        CheckpointError: a tensor is there under both prefixes.
    """
    canonical: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if name.startswith(SKIPPED_PREFIXES):
            continue
        multimodal = name.startswith(MULTIMODAL_PREFIX)
        key = TEXT_PREFIX + name.removeprefix(MULTIMODAL_PREFIX) if multimodal else name
        if key in canonical:
            raise CheckpointError(
                f"{key} is there twice, as {key} and as {stored_key(key, MULTIMODAL_PREFIX)}; "
                "a checkpoint uses one prefix"
            )
        canonical[key] = tensor
    return canonical


def _check_coverage(
    directory: Path,
    config: TextConfig,
    specs: Sequence[ParameterSpec],
    stored: dict[str, np.ndarray],
) -> None:
    """Every parameter is there in its shape and a format that is read, and nothing else is."""
    if config.tie_word_embeddings:
        _drop_tied_head(directory, stored)
    wanted = {key: shape for spec in specs for key, shape in spec.stored.items()}
    missing = [f"{key} {list(shape)}" for key, shape in wanted.items() if key not in stored]
    if missing:
        raise CheckpointError(f"{directory} lacks {_some(missing)}, which its config.json asks for")
    unknown = [f"{key} {list(tensor.shape)}" for key, tensor in stored.items() if key not in wanted]
    if unknown:
        raise CheckpointError(
            f"{directory} holds {_some(unknown)}, which has no place in the model of its config.json; "
            f"skipped by name are only {' and '.join(prefix + '*' for prefix in SKIPPED_PREFIXES)}"
        )
    for key, shape in wanted.items():
        found = stored[key]
        if found.shape != shape:
            raise CheckpointError(
                f"{key} in {directory} has shape {list(found.shape)}, but config.json asks for {list(shape)}"
            )
        if found.dtype not in FLOATS:
            raise CheckpointError(
                f"{key} in {directory} is stored as {found.dtype}; read are {', '.join(map(str, FLOATS))}. "
                "Convert a quantized checkpoint to one of them first"
            )


def _drop_tied_head(directory: Path, stored: dict[str, np.ndarray]) -> None:
    """A tied head may be stored again, as some exporters do; then it must be the embedding, bit for bit."""
    head, embedding = stored.pop(HEAD_ROW.key, None), stored.get(TEXT_PREFIX + MODEL_ROWS[0].key)
    if head is None or embedding is None:
        return
    same_form = head.dtype == embedding.dtype and head.shape == embedding.shape
    if not same_form or not np.array_equal(_bits(head), _bits(embedding)):
        raise CheckpointError(
            f"{HEAD_ROW.key} in {directory} differs from {TEXT_PREFIX}{MODEL_ROWS[0].key}, but config.json "
            "says tie_word_embeddings; set it to false if the head was trained on its own"
        )


def _some(names: Sequence[str]) -> str:
    """The first names of a list that may be long."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + rest


def converted(key: str, array: Float[np.ndarray, "*shape"], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """The array as `dtype`; the same array where it already is. Rounded to nearest, never clipped.

    Raises:
        CheckpointError: a value is not finite or beyond the range of `dtype`; the message names the tensor.
    """
    largest = largest_magnitude(array)
    if not np.isfinite(largest):
        raise CheckpointError(f"{key} holds a value that is not finite; the checkpoint is damaged")
    limit = float(ml_dtypes.finfo(dtype).max)
    if largest > limit:
        raise CheckpointError(
            f"{key} reaches {largest:g}, but {dtype} ends at {limit:g}; build with bfloat16 or float32 "
            "weights"
        )
    if array.dtype == dtype:
        return array
    out = np.empty(array.shape, dtype)
    source, target = array.reshape(-1), out.reshape(-1)
    for piece in _pieces(source.size):
        # Through f32: NumPy and ml_dtypes convert to and from it with vector instructions.
        target[piece] = source[piece].astype(np.float32).astype(dtype)
    return out


def largest_magnitude(array: Float[np.ndarray, "*shape"]) -> float:
    """The largest absolute value; infinite or NaN if any value is.

    A float's bits without the sign are ordered as its magnitude is, infinity and then NaN above all numbers:
    one integer maximum checks the values of a 4B checkpoint at the speed of memory.
    """
    if not array.size:
        return 0.0
    bits = _bits(array).reshape(-1)
    magnitude = bits.dtype.type(np.iinfo(bits.dtype).max >> 1)
    largest = max((bits[piece] & magnitude).max() for piece in _pieces(bits.size))
    return float(np.asarray(largest, bits.dtype).view(array.dtype).astype(np.float64))


def _bits(array: Float[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def _pieces(size: int) -> Iterator[slice]:
    """Slices of a few MB, so that a conversion needs no second copy of a large tensor."""
    step = 1 << 21
    return (slice(at, at + step) for at in range(0, size, step))


def _matrix_dtype(dtype: DTypeLike) -> np.dtype:
    found = np.dtype(dtype)
    if found not in MATRIX_DTYPES:
        raise CheckpointError(
            f"weights cannot be loaded as {found}; choose {', '.join(map(str, MATRIX_DTYPES))}"
        )
    return found
