"""One compiled model on one device: its entries as typed calls, its state kept on the device."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import iree.runtime as iree
import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.artifact.manifest import Model
from specprefill_jax.artifact.self_test import SelfTest
from specprefill_jax.artifact.verify import Artifact
from specprefill_jax.errors import ArtifactError, PromptTooLong
from specprefill_jax.runtime.blocks import capacity_for, plan_blocks
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.failure import blames_the_device, device_failed, failing_as
from specprefill_jax.runtime.proven import is_proven, note_proven
from specprefill_jax.runtime.self_test import Outcome, require_passed, run_self_test
from specprefill_jax.runtime.state import Snapshot, State
from specprefill_jax.runtime.target import check_proof, check_target, check_versions
from specprefill_jax.runtime.transfer import Input, as_int32, same_memory

BeforeBlock = Callable[[int, int], None]
"""Hears tokens done and tokens in all before each block.

It may raise to cancel: the state then holds exactly the tokens done.
"""


@dataclasses.dataclass(frozen=True)
class Prefilled:
    """Result of a prefill.

    Attributes:
        hidden: the last token's hidden state, for `Program.head`.
        rows: attention rows of the last `rows_valid` tokens, oldest first; rows after those are 0. None if
            unasked.
        rows_valid: how many rows are valid: min(R, tokens).
    """

    hidden: Float[np.ndarray, "D"]
    rows: Float[np.ndarray, "R A H C"] | None
    rows_valid: int


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Result of one decode step; `rows` are the token's attention rows where the model returns them."""

    logits: Float[np.ndarray, "V"]
    rows: Float[np.ndarray, "A H C"] | None


class Program:
    """The entries of one model, loaded on one device.

    Attributes:
        label: how messages name it.
        device: the device it runs on.
        model: its part of the manifest.
    """

    def __init__(
        self, label: str, model: Model, device: Device, context: iree.VmContext, module: iree.VmModule
    ) -> None:
        self.label = label
        self.device = device
        self.model = model
        self._context = context
        self._functions = _look_up(label, model, module)
        self._proven_in_place: set[str] = set()
        self._tokens = {length: Input(device.hal, (length,), "i32") for length in model.blocks}
        self._positions = {length: Input(device.hal, (length,), "i32") for length in model.blocks}
        self._hidden = Input(device.hal, (model.hidden,), "f32")

    @classmethod
    def load(
        cls,
        artifact: Artifact,
        role: str,
        device: Device,
        *,
        self_test: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Program":
        """Load one model of an artifact whose files have been checked, and prove it on this device.

        Args:
            role: "draft" or "target".
            self_test: False leaves out the self-test, which otherwise runs unless it passed here before.
            progress: hears entries tested, and entries in all.

        Raises:
            WrongTarget: the artifact was compiled for another device.
            WrongVersion: or by another version of IREE.
            Unproven: its manifest says `proof: none`.
            ArtifactError: it has no such model, or module and manifest disagree.
            SelfTestFailed: it computes wrong results here.
            DeviceFailed: the device ran out of memory, or was lost.
        """
        manifest = artifact.manifest
        check_proof(manifest)
        check_versions(manifest)
        check_target(manifest, device)
        model = manifest.models.get(role)
        if model is None:
            present = ", ".join(manifest.models)
            raise ArtifactError(f"artifact {manifest.name!r} has no {role} model, only {present}")
        label = f"the {role} of artifact {manifest.name!r}"
        context, module = _load_module(artifact, model, device, label)
        program = cls(label, model, device, context, module)
        if self_test and not is_proven(manifest, role, device):
            for done, outcome in enumerate(program.test(artifact), start=1):
                require_passed(outcome, program=label, device=device.description)
                if progress is not None:
                    progress(done, len(program.entries))
            note_proven(manifest, role, device)
        return program

    def test(self, artifact: Artifact) -> Iterator[Outcome]:
        """Run the self-test that comes with this model in `artifact`; how each entry did.

        Raises:
            ArtifactError: the file of the self-test is invalid, or an entry does not work in place.
            DeviceFailed: the device ran out of memory, or was lost.
        """
        assert self.model.self_test is not None, "the manifest was checked: only `proof: none` has none"
        return run_self_test(self, SelfTest.read(artifact.path(self.model.self_test), self.model))

    @property
    def entries(self) -> tuple[str, ...]:
        """Names of the module's functions."""
        return tuple(self._functions)

    @property
    def largest_capacity(self) -> int:
        """Slots of the largest cache compiled: the limit of prompt and answer together."""
        return self.model.capacities[-1]

    def new_state(self, slots: int) -> State:
        """An empty state with the smallest compiled cache of at least `slots` slots.

        Raises:
            PromptTooLong: no compiled cache is that large.
        """
        return self.state_of_capacity(self.capacity_for(slots))

    def grow(self, state: State, slots: int) -> None:
        """Give `state` the smallest compiled cache of at least `slots` slots; it keeps what it holds.

        Raises:
            PromptTooLong: no compiled cache is that large.
            DeviceFailed: the device has no memory for it. The state is not usable then.
        """
        state.grow(self.capacity_for(slots))

    def capacity_for(self, slots: int) -> int:
        """The smallest compiled cache of at least `slots` slots.

        Raises:
            PromptTooLong: there is none.
        """
        capacity = capacity_for(slots, self.model.capacities)
        if capacity is not None:
            return capacity
        raise PromptTooLong(
            f"{slots} slots are needed, but {self.label} was compiled for {self.largest_capacity} at most: "
            "shorten the prompt, keep less of it, lower --max-tokens, or use an artifact with larger "
            "`capacities`"
        )

    def state_of_capacity(self, capacity: int) -> State:
        """An empty state with a cache of exactly `capacity` slots, one of the compiled capacities."""
        if capacity not in self.model.capacities:
            raise ValueError(f"capacity {capacity} is not compiled; {self.label} has {self.model.capacities}")
        return State(self.model.state, capacity, self.device.transfer)

    def prefill(
        self,
        state: State,
        tokens: Int[np.ndarray, "N"],
        positions: Int[np.ndarray, "N"],
        *,
        rows: bool = False,
        before_block: BeforeBlock | None = None,
    ) -> Prefilled:
        """Read tokens into the next slots of `state`, each at its own position of the prompt.

        Raises:
            EmptyPrompt: there are no tokens.
            PromptTooLong: the cache has not enough free slots.
            ValueError: a token or position is out of range, or rows are asked of a model without them.
        """
        self._check_tokens(tokens, positions)
        wanted = self.model.rows if rows else 0
        if rows and wanted == 0:
            raise ValueError(f"{self.label} returns no attention rows: its manifest says rows 0")
        plan = plan_blocks(
            len(tokens), lengths=self.model.blocks, capacity=state.capacity, start=state.length, rows=wanted
        )
        results: list[iree.HalBufferView] = []
        for block in plan:
            if before_block is not None:
                before_block(block.offset, len(tokens))
            part = slice(block.offset, block.offset + block.count)
            entry = "prefill_rows" if rows and block is plan[-1] else "prefill"
            results = self._prefill(entry, state, tokens[part], positions[part], block.length)
        read = self.device.transfer.read
        valid = min(wanted, plan[-1].count)
        return Prefilled(read(results[0]), by_query(read(results[1]), valid) if rows else None, valid)

    def prefill_block(
        self,
        state: State,
        tokens: Int[np.ndarray, "N"],
        positions: Int[np.ndarray, "N"],
        *,
        length: int,
        rows: bool = False,
    ) -> Prefilled:
        """Read N <= length tokens as one block of a given compiled length.

        Raises:
            ValueError: the tokens do not fit the block, or a token or position is out of range.
            PromptTooLong: the block does not fit the cache.
        """
        self._check_tokens(tokens, positions)
        results = self._prefill("prefill_rows" if rows else "prefill", state, tokens, positions, length)
        read = self.device.transfer.read
        valid = min(self.model.rows, len(tokens)) if rows else 0
        return Prefilled(read(results[0]), by_query(read(results[1]), valid) if rows else None, valid)

    def head(self, hidden: Float[np.ndarray, "D"]) -> Float[np.ndarray, "V"]:
        """Logits of the token that follows the one with this hidden state."""
        arguments = iree.VmVariantList(1)
        arguments.push_ref(self._hidden.write(hidden).ref)
        return self.device.transfer.read(self._invoke("head", arguments, None)[0])

    def decode(self, state: State, token: int, position: int) -> Decoded:
        """Read one token into the next slot of `state` and predict the one after it.

        Raises:
            PromptTooLong: the cache is full.
            ValueError: the token or position is out of range.
        """
        self._check_tokens(np.array([token]), np.array([position]))
        _check_room(state, 1)
        arguments = iree.VmVariantList(3 + len(state.views))
        for scalar in (token, position, state.length):
            arguments.push_int(scalar)
        results = self._invoke(f"decode_C{state.capacity}", arguments, state)
        state.advance(1)
        read = self.device.transfer.read
        return Decoded(read(results[0]), read(results[1]) if self.model.rows else None)

    def snapshot(self, state: State) -> Snapshot:
        """Note where `state` is: its delta states copied on the device, and its length."""
        return state.snapshot()

    def restore(self, state: State, snapshot: Snapshot) -> None:
        """Bring `state` back to a snapshot of it, bit for bit.

        Raises:
            ValueError: the snapshot is of another state, or was overwritten since.
        """
        state.restore(snapshot)

    def _prefill(
        self,
        entry: str,
        state: State,
        tokens: Int[np.ndarray, "N"],
        positions: Int[np.ndarray, "N"],
        length: int,
    ) -> list[iree.HalBufferView]:
        """One call of a prefill entry: its results before the state."""
        count = len(tokens)
        if length not in self._tokens or not 1 <= count <= length:
            raise ValueError(f"{count} tokens in a block of {length}; the blocks are {self.model.blocks}")
        _check_room(state, length)
        arguments = iree.VmVariantList(4 + len(state.views))
        arguments.push_ref(self._tokens[length].write(as_int32(tokens, length)).ref)
        arguments.push_ref(self._positions[length].write(as_int32(positions, length)).ref)
        arguments.push_int(count)
        arguments.push_int(state.length)
        results = self._invoke(f"{entry}_T{length}_C{state.capacity}", arguments, state)
        state.advance(count)
        return results

    def _invoke(
        self, entry: str, arguments: iree.VmVariantList, state: State | None
    ) -> list[iree.HalBufferView]:
        """Call an entry, the state as its last arguments, and give its results before the state."""
        views = () if state is None else state.views
        for view in views:
            arguments.push_ref(view.ref)
        outputs = iree.VmVariantList(4 + len(views))
        with failing_as(f"{entry} of {self.label}"):
            self._context.invoke(self._functions[entry], arguments, outputs)
        results = [outputs.get_as_object(i, iree.HalBufferView) for i in range(len(outputs))]
        split = len(results) - len(views)
        if entry not in self._proven_in_place:
            self._check_in_place(entry, results[split:], views)
        return results[:split]

    def _check_in_place(
        self, entry: str, returned: list[iree.HalBufferView], views: tuple[iree.HalBufferView, ...]
    ) -> None:
        """A returned state must be the memory passed in: the program goes on with its own buffers."""
        for tensor, after, before in zip(self.model.state, returned, views, strict=bool(views)):
            if not same_memory(after, before):
                raise ArtifactError(
                    f"{entry} of {self.label} does not update state {tensor.name!r} in place: it was "
                    "compiled without donating it. Compile the artifact again with this version"
                )
        self._proven_in_place.add(entry)

    def _check_tokens(self, tokens: Int[np.ndarray, "N"], positions: Int[np.ndarray, "N"]) -> None:
        """Out-of-range values would read beyond a table on the device, with no error there."""
        if len(tokens) == 0:
            return
        if tokens.min() < 0 or tokens.max() >= self.model.vocabulary:
            last = self.model.vocabulary - 1
            raise ValueError(f"a token id is outside 0..{last}, the vocabulary of {self.label}")
        if positions.min() < 0 or positions.max() >= self.model.positions:
            raise ValueError(
                f"a position is outside 0..{self.model.positions - 1}, the range of {self.label}"
            )
        if (np.diff(positions) <= 0).any():
            raise ValueError("positions must rise from token to token")


def by_query(rows: Float[np.ndarray, "A H R C"], valid: int) -> Float[np.ndarray, "R A H C"]:
    """Rows as callers have them, 0 past the valid ones; entries return them as the device writes them."""
    ordered = rows.transpose(2, 0, 1, 3)
    ordered[valid:] = 0.0
    return ordered


def _check_room(state: State, slots: int) -> None:
    if state.length + slots > state.capacity:
        raise PromptTooLong(
            f"the call writes slots {state.length}..{state.length + slots - 1}, but the cache has "
            f"{state.capacity}: shorten the prompt, lower --max-tokens, or use an artifact with larger "
            "`capacities`"
        )


@functools.cache
def _vm_instance() -> iree.VmInstance:
    """One for the process, as IREE wants it."""
    return iree.VmInstance()


def _load_module(
    artifact: Artifact, model: Model, device: Device, label: str
) -> tuple[iree.VmContext, iree.VmModule]:
    """Map the module and its parameters from their files and bind them to the device."""
    instance = _vm_instance()
    try:
        parameters = iree.ParameterIndex()
        parameters.load(str(artifact.path(model.parameters)))
        provider = parameters.create_provider(scope="model")
        module = iree.VmModule.mmap(instance, str(artifact.path(model.module)))
        context = iree.VmContext(
            instance,
            [
                iree.create_hal_module(instance, device.hal),
                # Before the module that asks for them.
                iree.create_io_parameters_module(instance, provider),
                module,
            ],
        )
    except (RuntimeError, ValueError) as error:
        if blames_the_device(error):
            raise device_failed(f"loading {label}", error) from error
        raise ArtifactError(
            f"{label} cannot be loaded on {device.description}: {error}. Compile the artifact again with "
            "this installation: a module runs with exactly the IREE version that compiled it"
        ) from error
    return context, module


def _look_up(label: str, model: Model, module: iree.VmModule) -> dict[str, iree.VmFunction]:
    """Every entry that the manifest promises."""
    kinds = ("prefill", "prefill_rows") if model.rows else ("prefill",)
    names = [f"decode_C{capacity}" for capacity in model.capacities]
    for capacity in model.capacities:
        lengths = [length for length in model.blocks if length <= capacity]
        names += [f"{kind}_T{length}_C{capacity}" for kind in kinds for length in lengths]
    names.append("head")
    missing = sorted(set(names) - set(module.function_names))
    if missing:
        raise ArtifactError(
            f"the module of {label} lacks entries that its manifest names: {', '.join(missing)}"
        )
    functions = {name: module.lookup_function(name) for name in names}
    return {name: function for name, function in functions.items() if function is not None}
