"""What one model has read of a conversation, and the places that it can go back to.

A recurrent state cannot be cut back, and chat templates render history anew, so that the next prompt seldom
continues the last one to its end. So a track keeps snapshots where the next prompt is likely to branch off.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.errors import DeviceFailed, MemoryTooSmall
from specprefill_jax.policy import SNAPSHOTS
from specprefill_jax.runtime.program import BeforeBlock, Decoded, Prefilled, Program
from specprefill_jax.runtime.state import Snapshot, State

logger = logging.getLogger(__name__)

Room = Callable[[int, bool], None]
"""Hears the bytes that are about to be taken of the device's memory, and whether they must be; it may raise
MemoryTooSmall."""


@dataclass(frozen=True, eq=False)
class Place:
    """A point of a prompt that a state can be brought to.

    Attributes:
        prompt: Prompt tokens before it, whether read or left out.
        slots: How many of them were read.
        snapshot: What brings the state there; None for the very beginning, and for where the state is now.
        hidden: Hidden state of the last token read, where that is known.
    """

    prompt: int
    slots: int
    snapshot: Snapshot | None = None
    hidden: Float[np.ndarray, "D"] | None = None


BEGINNING = Place(0, 0)


class Track:
    """A model's state with what it has read: every token of a prompt, or the kept ones.

    Args:
        program: The model.
        room: Called before device memory is taken.
    """

    def __init__(self, program: Program, room: Room | None = None) -> None:
        self.program = program
        self._room = room or (lambda *_: None)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and give the memory back."""
        self._state: State | None = None
        self._tokens = np.empty(0, np.int32)
        self._kept = np.empty(0, np.int32)
        self._places: list[Place] = []
        # Whether the state is where the tokens above say, or was left in the middle of a call.
        self._settled = True

    @property
    def prompt(self) -> int:
        """Tokens that the state stands for, whether read or left out."""
        return self._tokens.size

    @property
    def tokens(self) -> Int[np.ndarray, "M"]:
        """The tokens that the state stands for, whether read or left out."""
        return self._tokens

    @property
    def kept(self) -> Int[np.ndarray, "N"]:
        """Indices, in the prompt, of the tokens read, by slot."""
        return self._kept

    @property
    def bytes(self) -> int:
        """Device memory that it holds, its snapshots included."""
        if self._state is None:
            return 0
        snapshots = (place.snapshot for place in self._places)
        return self._state.bytes + sum(snapshot.bytes for snapshot in snapshots if snapshot is not None)

    def places(self, tokens: Int[np.ndarray, "M"], most: int) -> Iterator[Place]:
        """Places whose tokens begin `tokens`, at most `most` of them: deepest first.

        None behind which a block would no longer fit the largest cache, unless nothing is left to read there.
        """
        both = min(self.prompt, tokens.size)
        unlike = np.flatnonzero(self._tokens[:both] != tokens[:both])
        common = min(most, int(unlike[0]) if unlike.size else both)
        here = [Place(self.prompt, self._kept.size)] if self._settled and self.prompt else []
        for place in sorted([*self._places, *here], key=lambda place: -place.prompt):
            room = place.slots + self._shortest <= self.program.largest_capacity
            if place.prompt <= common and (room or place.prompt == tokens.size):
                yield place
        yield BEGINNING

    def back_to(self, place: Place) -> None:
        """Take back what was read since a place that `stay` left."""
        assert place.snapshot is not None, "a place that was left has a snapshot"
        self._settled = False
        self.program.restore(self._present(), place.snapshot)
        self._be_at(place)

    def start(self, place: Place, slots: int, *, reads: bool = True) -> None:
        """Bring the state to a place, with a cache of at least `slots` slots.

        Args:
            reads: Whether something will be read there: then there is room for a block behind it too.

        Raises:
            PromptTooLong: no compiled cache is that large.
            DeviceFailed: the device has no memory for it. The track is empty then.
        """
        self._settled = False
        try:
            block = min(place.slots + self._shortest, self.program.largest_capacity) if reads else 0
            self._start(place, max(slots, block))
        except BaseException:
            self.clear()
            raise
        self._be_at(place)

    def read(
        self,
        tokens: Int[np.ndarray, "M"],
        kept: Int[np.ndarray, "N"],
        *,
        stops: Sequence[int] = (),
        rows: bool = False,
        positions: Int[np.ndarray, "N"] | None = None,
        before_block: BeforeBlock | None = None,
    ) -> Prefilled:
        """Read on to the end of a prompt: of `tokens` those in `kept` that were not read yet.

        Args:
            kept: Indices into `tokens`, ascending: those read before, and others up to the last token.
            stops: Where to leave a place to come back to, in prompt tokens, ascending: as far as there is
                memory for it, and as a block after it still fits the cache. The end is one if it is named.
            rows: Whether to return the attention rows of the last tokens read.
            positions: The position of each kept token; None: its index, `kept`.
            before_block: Hears the tokens of this call done and in all, and may raise to cancel: then the
                blocks done stay read.

        Raises:
            DeviceFailed: the device ran out of memory, or was lost.
        """
        before, size = self._kept.size, tokens.size
        positions = kept if positions is None else positions
        prefilled: Prefilled | None = None
        for stop in self._reachable(stops, kept, size):
            start, end = self._kept.size, int(np.searchsorted(kept, stop))

            def block(done: int, _: int, start: int = start) -> None:
                self._note(tokens, kept, start + done)
                if before_block is not None:
                    self._settled = True
                    before_block(start + done - before, kept.size - before)
                    self._settled = False

            if end > start:
                self._settled = False
                prefilled = self.program.prefill(
                    self._present(),
                    tokens[kept[start:end]],
                    positions[start:end],
                    rows=rows and stop == size,
                    before_block=block,
                )
            self._tokens, self._kept = tokens[:stop], kept[:end]
            self._settled = True
            if stop in stops:
                self._stay_if_possible(None if prefilled is None else prefilled.hidden)
        assert prefilled is not None, "the last token of a prompt is kept, and was not read yet"
        return prefilled

    def stay(self, hidden: Float[np.ndarray, "D"] | None = None, *, needed: bool = True) -> Place:
        """Leave a place here to come back to.

        Raises:
            MemoryTooSmall, DeviceFailed: there is no memory for it.
        """
        self._room(self.program.model.state_bytes(0), needed)
        place = Place(self.prompt, self._kept.size, self.program.snapshot(self._present()), hidden)
        self._places = [*(kept for kept in self._places if kept.prompt < place.prompt), place]
        if len(self._places) > SNAPSHOTS:  # the first is after system and tools
            del self._places[1]
        return place

    def look_ahead(self, token: int, position: int) -> Decoded:
        """Read a token that is no part of the prompt; `back_to` a place takes it back."""
        self._settled = False
        return self.program.decode(self._present(), token, position)

    def write(self, token: int) -> Decoded:
        """Read a token that the model wrote, at the position after all tokens of the prompt."""
        position = self.prompt
        decoded = self.look_ahead(token, position)
        self._tokens = np.append(self._tokens, np.int32(token))
        self._kept = np.append(self._kept, np.int32(position))
        self._settled = True
        return decoded

    def _be_at(self, place: Place) -> None:
        self._tokens, self._kept = self._tokens[: place.prompt], self._kept[: place.slots]
        self._places = [kept for kept in self._places if kept.prompt <= place.prompt]
        self._settled = True

    def _start(self, place: Place, slots: int) -> None:
        if self._state is not None and place is BEGINNING:
            if self._state.capacity == self.program.capacity_for(slots):
                self._state.reset()
            else:
                self._state = None  # its memory is needed now
        model, capacity = self.program.model, self.program.capacity_for(slots)
        if self._state is None:
            self._places = []
            self._room(model.state_bytes(capacity), True)
            self._state = self.program.new_state(slots)
        if self._state.capacity < slots:
            self._room(model.state_bytes(capacity) - self._state.bytes, True)
            self.program.grow(self._state, slots)
        if place.snapshot is not None:
            self.program.restore(self._state, place.snapshot)

    @property
    def _shortest(self) -> int:
        """Tokens of the shortest block: it writes that many slots, however few of its tokens are valid."""
        return self.program.model.blocks[0]

    def _reachable(self, stops: Sequence[int], kept: Int[np.ndarray, "N"], size: int) -> list[int]:
        """Stops still to come behind which a block fits the cache, and the end."""
        last = self._present().capacity - self._shortest
        inner = [stop for stop in stops if self.prompt < stop < size and np.searchsorted(kept, stop) <= last]
        return [*inner, size]

    def _stay_if_possible(self, hidden: Float[np.ndarray, "D"] | None) -> None:
        """A place less costs the next turn time, and nothing else."""
        try:
            self.stay(hidden, needed=False)
        except (MemoryTooSmall, DeviceFailed) as error:
            logger.info("no place to come back to after %d tokens: %s", self.prompt, error)

    def _present(self) -> State:
        assert self._state is not None, "start comes first"
        return self._state

    def _note(self, tokens: Int[np.ndarray, "M"], kept: Int[np.ndarray, "N"], read: int) -> None:
        """`read` of the kept tokens are read, and what lies before the last of them is left out for good."""
        if read > self._kept.size:
            self._kept = kept[:read]
            self._tokens = tokens[: int(kept[read - 1]) + 1]
