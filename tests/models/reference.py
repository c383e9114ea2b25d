"""transformers' Qwen3_5ForCausalLM as the reference of every build, and the cases to compare builds on.

A build takes part by a `Runner`: `compare(expected(reference, case), run(runner, case), tolerance)`. Tensors
go by name: `logits` and `rows` of the prompt's last tokens, the state after the prompt under the manifest's
names (`layers.1.k`), then `decode.0.logits`, `decode.0.rows` and so on, and at last the state after decoding
(`decoded.layers.1.k`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jaxtyping import Float, Int
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from specprefill_jax.models import qwen35
from specprefill_jax.models.checkpoint import load_parameters
from specprefill_jax.models.config import TextConfig, read_config
from specprefill_jax.models.parameters import AttentionState, Model, ModelState

DEMO: Final = Path(__file__).parents[2] / "artifacts" / "demo"

# Largest difference of an f32 build from transformers, as a part of the tensor's largest value. Both sum in
# f32, in other orders: 2e-6 to 2e-5 is measured. A wrong position, slot, mask or gate moves 1e-2 and more.
TOLERANCE: Final = 1e-4
ROWS: Final = 4
CAPACITY: Final = 256
VOCABULARY: Final = 80

Tensors = dict[str, np.ndarray]

# Both kinds of layer before one of the other kind, so that what is wrong in one reaches the other. The head
# sizes are the demo pair's.
_BASE: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}
CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "equal heads": _BASE,
    "twice the value heads": {**_BASE, "linear_num_value_heads": 4},
    "wide heads": {
        **_BASE,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Case:
    """One prompt, the block length it is cut by, and how many tokens are decoded after it.

    Attributes:
        config: a name in `CONFIGS`.
        positions: of the prompt's tokens, ascending; decoding goes on at the last one's successor.
    """

    name: str
    config: str
    positions: tuple[int, ...]
    block: int
    decoded: int

    @property
    def length(self) -> int:
        return len(self.positions)

    @property
    def tokens(self) -> Int[np.ndarray, " M+S"]:
        """The prompt and the decoded tokens after it."""
        rng = np.random.default_rng(self.length)
        return rng.integers(0, VOCABULARY, self.length + self.decoded).astype(np.int32)


def spans(*ranges: tuple[int, int]) -> tuple[int, ...]:
    return tuple(position for first, end in ranges for position in range(first, end))


# 101 of 931 tokens, as selection keeps them: the first, some chunks, the last.
KEPT: Final = spans((0, 4), (32, 64), (320, 352), (640, 672), (930, 931))

CASES: Final = (
    Case("odd length in one block", "equal heads", spans((0, 37)), block=64, decoded=2),
    Case("one token in a block", "equal heads", (0,), block=64, decoded=2),
    Case("gaps, several blocks", "equal heads", KEPT, block=64, decoded=3),
    Case("several blocks", "twice the value heads", spans((0, 150)), block=64, decoded=2),
    Case("fewer tokens than rows in the last block", "twice the value heads", spans((0, 66)), 64, decoded=1),
    Case("gaps, two chunks in a block", "twice the value heads", KEPT, block=128, decoded=2),
    Case("two full chunks", "twice the value heads", spans((0, 128)), block=128, decoded=1),
    Case("blocks below a chunk", "twice the value heads", spans((0, 37)), block=16, decoded=1),
    Case("blocks of one token", "twice the value heads", spans((0, 3), (700, 702)), block=1, decoded=1),
    Case("wide heads, several blocks", "wide heads", spans((0, 70)), block=64, decoded=2),
    Case("wide heads, gaps", "wide heads", KEPT, block=64, decoded=1),
)


@dataclass(frozen=True)
class Pair:
    """One checkpoint, loaded by transformers and by us."""

    directory: Path
    reference: Qwen3_5ForCausalLM = field(repr=False)
    config: TextConfig
    model: Model = field(repr=False)


def random_pair(directory: Path, name: str) -> Pair:
    """Saves a model of `CONFIGS[name]` with random weights and loads it back both ways.

    Every parameter is drawn, norms and decay constants too: transformers' own start leaves norms at zero and
    attention nearly uniform, which would hide mistakes.
    """
    made = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**CONFIGS[name]))
    generator = torch.Generator().manual_seed(1)

    def normal(shape: torch.Size, mean: float, deviation: float) -> torch.Tensor:
        return mean + deviation * torch.randn(shape, generator=generator)

    with torch.no_grad():
        for key, parameter in made.named_parameters():
            if key.endswith("A_log"):  # decays from about 0.995 to 0.3 per token
                parameter.copy_(normal(parameter.shape, -2.5, 1.5))
            elif key.endswith("linear_attn.norm.weight"):
                parameter.copy_(normal(parameter.shape, 1.0, 0.3))
            elif parameter.ndim == 1:
                parameter.copy_(normal(parameter.shape, 0.0, 0.3))
            else:
                parameter.copy_(normal(parameter.shape, 0.0, parameter[0].numel() ** -0.5))
    made.save_pretrained(directory)
    return load_pair(directory)


def load_pair(directory: Path) -> Pair:
    reference = Qwen3_5ForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float32, local_files_only=True
    ).eval()
    config = read_config(directory)
    model = jax.tree.map(jnp.asarray, load_parameters(directory, config, np.float32))
    return Pair(directory, reference, config, model)


class Reference:
    """transformers with its cache: a sequence fed piece by piece, each token at its own position."""

    def __init__(self, model: Qwen3_5ForCausalLM) -> None:
        self.model = model
        self.cache = DynamicCache(config=model.config)

    def feed(
        self, tokens: Int[np.ndarray, " T"], positions: Int[np.ndarray, " T"]
    ) -> tuple[Float[np.ndarray, "T V"], Float[np.ndarray, "T A H M"]]:
        """Logits and attention rows of the piece; M counts all tokens fed so far."""
        # One row per rotary axis (time, height, width). From a plain row of positions transformers would also
        # derive its mask, and may take each gap for the start of another sequence.
        rotary = torch.tensor(np.broadcast_to(positions, (3, 1, len(positions))).astype(np.int64))
        with torch.no_grad():
            output = self.model(
                input_ids=torch.tensor(tokens[None].astype(np.int64)),
                position_ids=rotary,
                cache=self.cache,
                use_cache=True,
                output_attentions=True,
            )
        rows = np.stack([layer[0].numpy() for layer in output.attentions if layer is not None])
        return output.logits[0].numpy(), rows.transpose(2, 0, 1, 3)

    def state(self) -> Tensors:
        """The cache under the manifest's names and in our layouts."""
        config = self.model.config
        tensors: Tensors = {}
        for i, kind in enumerate(config.layer_types or ()):
            layer: Any = self.cache.layers[i]
            if kind == "full_attention":
                for name, cache in (("k", layer.keys), ("v", layer.values)):
                    tensors[f"layers.{i}.{name}"] = cache[0].numpy().transpose(1, 0, 2)
            else:
                # transformers keeps one input more than the next token's convolution reads.
                tail = layer.conv_states[0][0, :, 1 - config.linear_conv_kernel_dim :]
                tensors[f"layers.{i}.conv"] = by_turns(tail.numpy().T, config)
                tensors[f"layers.{i}.matrix"] = layer.recurrent_states[0][0].numpy().transpose(0, 2, 1)
        return {name: tensor.copy() for name, tensor in tensors.items()}


def by_turns(channels: Float[np.ndarray, "rows channels"], config: Any) -> Float[np.ndarray, "rows channels"]:
    """Query and key heads by turns, as our convolution has them; transformers has all queries first."""
    rows, width = len(channels), config.linear_num_key_heads * config.linear_key_head_dim
    pairs = channels[:, : 2 * width].reshape(rows, 2, config.linear_num_key_heads, -1).transpose(0, 2, 1, 3)
    return np.concatenate([pairs.reshape(rows, -1), channels[:, 2 * width :]], axis=1)


def expected(reference: Qwen3_5ForCausalLM, case: Case) -> Tensors:
    """What transformers makes of a case, the prompt in one piece."""
    source = Reference(reference)
    positions = np.asarray(case.positions)
    logits, rows = source.feed(case.tokens[: case.length], positions)
    valid = min(ROWS, case.length - (case.length - 1) // case.block * case.block)
    padded = np.zeros((ROWS, *rows.shape[1:3], CAPACITY), np.float32)
    padded[:valid, ..., : case.length] = rows[case.length - valid :]
    tensors = {"logits": logits[-1], "rows": padded, **source.state()}
    for i in range(case.decoded):
        slot = case.length + i
        logits, rows = source.feed(case.tokens[slot : slot + 1], positions[-1:] + 1 + i)
        padded = np.zeros((*rows.shape[1:3], CAPACITY), np.float32)
        padded[..., : slot + 1] = rows[0]
        tensors |= {f"decode.{i}.logits": logits[0], f"decode.{i}.rows": padded}
    return tensors | {f"decoded.{name}": tensor for name, tensor in source.state().items()}


class Runner(Protocol):
    """One build of one model. A call may consume the state that it is given."""

    def start(self) -> Any:
        """Zero state of `CAPACITY` slots."""
        ...

    def prefill(
        self,
        tokens: Int[np.ndarray, " T"],
        positions: Int[np.ndarray, " T"],
        count: int,
        slot: int,
        state: Any,
    ) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "R A H C"], Any]:
        """Hidden vector, `ROWS` attention rows and the state."""
        ...

    def decode(
        self, token: int, position: int, slot: int, state: Any
    ) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, "A H C"], Any]:
        """Logits, attention rows and the state."""
        ...

    def head(self, hidden: Float[np.ndarray, " D"]) -> Float[np.ndarray, " V"]: ...

    def read(self, state: Any) -> Tensors:
        """The state's arrays under the manifest's names."""
        ...


def run(runner: Runner, case: Case, padding: int = 0) -> Tensors:
    """What a build makes of a case; a block is filled up with tokens `padding` at positions `padding`."""
    prompt = case.tokens[: case.length], np.asarray(case.positions, np.int32)
    hidden, rows, state = run_blocks(runner, *prompt, block=case.block, padding=padding)
    tensors = {"logits": runner.head(hidden), "rows": rows, **used_slots(runner.read(state), case.length)}
    for i in range(case.decoded):
        slot = case.length + i
        logits, rows, state = runner.decode(int(case.tokens[slot]), case.positions[-1] + 1 + i, slot, state)
        tensors |= {f"decode.{i}.logits": logits, f"decode.{i}.rows": rows}
    after = used_slots(runner.read(state), case.length + case.decoded)
    return tensors | {f"decoded.{name}": tensor for name, tensor in after.items()}


def run_blocks(
    runner: Runner,
    tokens: Int[np.ndarray, " M"],
    positions: Int[np.ndarray, " M"],
    *,
    block: int,
    padding: int = 0,
) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "R A H C"], Any]:
    """Hidden vector, attention rows and state after a prompt in blocks of one length."""
    hidden, rows, state = None, None, runner.start()
    for slot in range(0, len(tokens), block):
        count = min(block, len(tokens) - slot)
        piece, places = np.full((2, block), padding, np.int32)
        piece[:count], places[:count] = tokens[slot : slot + count], positions[slot : slot + count]
        hidden, rows, state = runner.prefill(piece, places, count, slot, state)
    assert hidden is not None
    assert rows is not None
    return hidden, rows, state


def used_slots(state: Tensors, length: int) -> Tensors:
    """Keys and values of the first `length` slots, of the convolution's inputs those, the delta matrices."""

    def used(name: str, tensor: np.ndarray) -> np.ndarray:
        if name.endswith(".conv"):  # what lies beside them is z
            heads, size, _ = state[name.replace(".conv", ".matrix")].shape
            return tensor[:, : tensor.shape[1] - heads * size]
        return tensor[:length] if name.endswith((".k", ".v")) else tensor

    return {name: used(name, tensor) for name, tensor in state.items()}


def compare(expected: Tensors, got: Tensors, tolerance: float) -> float:
    """The largest difference of any tensor, as a part of the largest value that is expected in it.

    Raises:
        AssertionError: tensors are missing, of another shape, or differ by more than `tolerance`.
    """
    assert got.keys() == expected.keys()
    errors = {}
    for name, wanted in expected.items():
        assert got[name].shape == wanted.shape, f"{name}: {got[name].shape}, not {wanted.shape}"
        scale = float(np.abs(wanted).max()) or 1.0
        errors[name] = float(np.abs(got[name].astype(np.float64) - wanted).max()) / scale
    wrong = [f"{name} {error:.1e}" for name, error in errors.items() if not error <= tolerance]
    assert not wrong, f"differ by more than {tolerance:g} of their scale: {', '.join(wrong)}"
    return max(errors.values())


_prefill: Final[Callable[..., Any]] = jax.jit(qwen35.prefill, static_argnames=("config", "rows"))
_decode: Final[Callable[..., Any]] = jax.jit(qwen35.decode, static_argnames=("config", "rows"))


@dataclass(frozen=True)
class JaxRunner:
    """Plain JAX, compiled by XLA for the CPU."""

    config: TextConfig
    model: Model = field(repr=False)
    capacity: int = CAPACITY
    matrices: Any = np.float32

    def start(self) -> ModelState:
        return qwen35.initial_state(self.config, self.capacity, self.matrices)

    def prefill(
        self,
        tokens: Int[np.ndarray, " T"],
        positions: Int[np.ndarray, " T"],
        count: int,
        slot: int,
        state: ModelState,
    ) -> tuple[Float[np.ndarray, " D"], Float[np.ndarray, "R A H C"], ModelState]:
        rows_wanted = min(ROWS, len(tokens))  # a block cannot return more rows than it has tokens
        hidden, rows, state = _prefill(
            self.config,
            self.model,
            tokens,
            positions,
            np.int32(count),
            np.int32(slot),
            state,
            rows=rows_wanted,
        )
        unused = ((0, ROWS - rows_wanted), (0, 0), (0, 0), (0, 0))
        ordered = np.array(rows).transpose(2, 0, 1, 3)
        ordered[count:] = 0.0
        return np.asarray(hidden), np.pad(ordered, unused), state

    def decode(
        self, token: int, position: int, slot: int, state: ModelState
    ) -> tuple[Float[np.ndarray, " V"], Float[np.ndarray, "A H C"], ModelState]:
        logits, rows, state = _decode(
            self.config,
            self.model,
            np.int32(token),
            np.int32(position),
            np.int32(slot),
            state,
            rows=True,
        )
        return np.asarray(logits), np.asarray(rows), state

    def head(self, hidden: Float[np.ndarray, " D"]) -> Float[np.ndarray, " V"]:
        return np.asarray(qwen35.head(self.model, jnp.asarray(hidden)))

    def read(self, state: ModelState) -> Tensors:
        tensors: Tensors = {}
        for i, layer in enumerate(state.layers):
            if isinstance(layer, AttentionState):
                tensors |= {f"layers.{i}.k": np.asarray(layer.k), f"layers.{i}.v": np.asarray(layer.v)}
            else:
                tensors[f"layers.{i}.conv"] = np.asarray(layer.conv)
                tensors[f"layers.{i}.matrix"] = np.asarray(layer.matrix)
        return tensors
