"""An artifact in memory whose models are a few lines of NumPy, so that each step of a request shows.

What a model says next follows from every token it has read, its position and its slot; what it attends to is
chosen by the test. All calls are recorded.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.artifact.calibration import Calibration
from specprefill_jax.artifact.manifest import (
    COMPILER,
    RUNTIME,
    Build,
    DeviceTarget,
    FileEntry,
    Manifest,
    Model,
    Proof,
    StateTensor,
)
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.chat import Chat
from specprefill_jax.engine import Engine
from specprefill_jax.runtime.blocks import plan_blocks
from specprefill_jax.runtime.program import BeforeBlock, Decoded, Prefilled, Program
from specprefill_jax.runtime.state import Snapshot, State

DEMO = Path(__file__).parents[2] / "artifacts" / "demo"
CHAT = Chat.load(DEMO / "tokenizer.json", DEMO / "chat_template.jinja", stop_ids=[2])
VOCABULARY = CHAT.vocabulary + 30  # padded, as real models are
BLOCK = 16
LAYERS, HEADS = 2, 3
ROWS = 8
NEEDLE = 100

Speak = Callable[[list[tuple[int, int]]], float]
"""From (token, position) of all that was read, by slot, to the next token; NaN: to logits without numbers."""

Attend = Callable[[list[int]], Float[np.ndarray, "n"]]
"""From the tokens read to the last one's attention over them."""


def from_everything(read: list[tuple[int, int]]) -> int:
    """A next token that changes with any token, position or slot; never a stop token."""
    return 3 + sum((slot + 1) * (token + 7 * position) for slot, (token, position) in enumerate(read)) % 1500


def to_token(needle: int) -> Attend:
    """Attention that is 0.5 on every `needle` and small, but not constant, elsewhere."""

    def attend(tokens: list[int]) -> Float[np.ndarray, "n"]:
        read = np.array(tokens)
        return np.where(read == needle, 0.5, 0.001 * (read % 5)).astype(np.float32)

    return attend


STATE = (StateTensor("k", ("C",), "f32"), StateTensor("matrix", (100,), "f32"))


@dataclasses.dataclass(eq=False)
class FakeSnapshot(Snapshot):
    """A delta state, which follows from everything read."""

    read: tuple[tuple[int, int], ...] = ()

    @property
    def bytes(self) -> int:
        return 400


class FakeState(State):
    """What has been read."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self.read_so_far: list[tuple[int, int]] = []

    @property
    def bytes(self) -> int:
        return 4 * self.capacity + 400

    def reset(self) -> None:
        self.length = 0
        self.read_so_far = []


class FakeProgram(Program):
    """A model in NumPy. `calls` records what was asked of it, `states` what it made."""

    def __init__(self, label: str, capacities: tuple[int, ...], speak: Speak, attend: Attend | None) -> None:
        self.label = label
        self.model = Model(
            module="m",
            parameters="p",
            numerics="f32",
            layers=4,
            hidden=1,
            vocabulary=VOCABULARY,
            positions=2**18,
            attention_layers=LAYERS,
            query_heads=HEADS,
            rows=ROWS if attend else 0,
            blocks=(BLOCK,),
            capacities=capacities,
            state=STATE,
            largest_parameter=1,
            largest_buffer=0,
            self_test=None,
        )
        self.speak = speak
        self.attend = attend
        self.calls: list[tuple[str, list[int], list[int]]] = []
        self.states: list[FakeState] = []

    def new_state(self, slots: int) -> State:
        assert slots <= self.largest_capacity, "the engine checks this first"
        self.states.append(FakeState(self.capacity_for(slots)))
        return self.states[-1]

    def grow(self, state: State, slots: int) -> None:
        state.capacity = self.capacity_for(slots)

    def prefill(
        self,
        state: State,
        tokens: Int[np.ndarray, "N"],
        positions: Int[np.ndarray, "N"],
        *,
        rows: bool = False,
        before_block: BeforeBlock | None = None,
    ) -> Prefilled:
        # The padding of a block must fit the cache too.
        plan_blocks(
            tokens.size, lengths=(BLOCK,), capacity=state.capacity, start=state.length, rows=ROWS * rows
        )
        self.calls.append(("prefill", tokens.tolist(), positions.tolist()))
        for start in range(0, tokens.size, BLOCK):
            if before_block is not None:
                before_block(start, tokens.size)
            for token, position in zip(tokens[start:][:BLOCK], positions[start:][:BLOCK], strict=True):
                self._take(state, int(token), int(position))
        hidden = np.array([self._next(state)], np.float32)
        valid = min(ROWS, tokens.size) if rows else 0  # only those of this call, as a program returns them
        # Those before the last show nothing: the engine must take the last.
        own = self._rows(state) if rows else None
        shown = None if own is None else np.stack([*(np.zeros_like(own) for _ in range(1, valid)), own])
        return Prefilled(hidden, shown, valid)

    def head(self, hidden: Float[np.ndarray, "D"]) -> Float[np.ndarray, "V"]:
        self.calls.append(("head", [], []))
        return self._logits(float(hidden[0]))

    def decode(self, state: State, token: int, position: int) -> Decoded:
        self.calls.append(("decode", [token], [position]))
        self._take(state, token, position)
        return Decoded(self._logits(self._next(state)), self._rows(state) if self.attend else None)

    def snapshot(self, state: State) -> Snapshot:
        assert isinstance(state, FakeState)
        return FakeSnapshot(state.length, (), read=tuple(state.read_so_far))

    def restore(self, state: State, snapshot: Snapshot) -> None:
        assert isinstance(state, FakeState)
        assert isinstance(snapshot, FakeSnapshot)
        assert tuple(state.read_so_far[: snapshot.length]) == snapshot.read, "its slots were overwritten"
        state.length = snapshot.length
        del state.read_so_far[snapshot.length :]

    def of(self, kind: str) -> list[tuple[list[int], list[int]]]:
        """Tokens and positions of the recorded calls of one kind."""
        return [(tokens, positions) for name, tokens, positions in self.calls if name == kind]

    def _take(self, state: State, token: int, position: int) -> None:
        assert isinstance(state, FakeState)
        assert state.length < state.capacity, "the engine makes room first"
        state.read_so_far.append((token, position))
        state.length += 1

    def _next(self, state: State) -> float:
        assert isinstance(state, FakeState)
        return self.speak(state.read_so_far)

    def _logits(self, said: float) -> Float[np.ndarray, "V"]:
        """The token said is likeliest; the padding beyond the tokenizer would be likelier still."""
        logits = np.full(VOCABULARY, 0.0 if np.isfinite(said) else np.nan, np.float32)
        logits[CHAT.vocabulary :] += 9
        if np.isfinite(said):
            logits[int(said)] = 5
        return logits

    def _rows(self, state: State) -> Float[np.ndarray, "A H C"]:
        """The weakest head and layer show nothing; slots not in use hold what must not be looked at."""
        assert isinstance(state, FakeState)
        assert self.attend is not None
        row = np.full((LAYERS, HEADS, state.capacity), 77, np.float32)
        row[:, :, : state.length] = 0
        row[1, 2, : state.length] = self.attend([token for token, _ in state.read_so_far])
        return row


@dataclasses.dataclass
class Fake:
    """An engine on two fake models."""

    engine: Engine
    draft: FakeProgram
    target: FakeProgram


def make(
    *,
    attend: Attend | None = None,
    speak: Speak = from_everything,
    draft_speak: Speak = from_everything,
    draft_capacity: int | tuple[int, ...] = 4096,
    target_capacity: int | tuple[int, ...] = 4096,
    minimum: int = 200,
    calibration: Calibration | None = None,
) -> Fake:
    """An engine whose artifact runs prompts of at least `minimum` tokens through the draft."""
    draft = FakeProgram(
        "the draft of artifact 'fake'", _several(draft_capacity), draft_speak, attend or to_token(NEEDLE)
    )
    target = FakeProgram("the target of artifact 'fake'", _several(target_capacity), speak, None)
    manifest = Manifest(
        schema=2,
        name="fake",
        device=DeviceTarget("cpu", "local-task", "host", "", (), "", (), ()),
        proof=Proof("self-test", ""),
        minimum_tokens=minimum,
        tokenizer="tokenizer.json",
        chat_template="chat_template.jinja",
        stop_ids=(2,),
        models={"draft": draft.model, "target": target.model},
        files={"p": FileEntry("0" * 64, 1)},
        build=Build({}, {COMPILER: "3.13.0", RUNTIME: "3.13.0"}, {}, {}),
    )
    engine = Engine(Artifact(DEMO, manifest), CHAT, draft, target, calibration=calibration)
    return Fake(engine, draft, target)


def _several(capacity: int | tuple[int, ...]) -> tuple[int, ...]:
    return capacity if isinstance(capacity, tuple) else (capacity,)


def prompt(size: int, needle_at: int | None = None) -> Int[np.ndarray, "M"]:
    """Tokens 300, 301, ..., with one NEEDLE among them."""
    tokens = 300 + np.arange(size, dtype=np.int32) % 700
    if needle_at is not None:
        tokens[needle_at] = NEEDLE
    return tokens
