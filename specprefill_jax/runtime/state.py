"""A model's state: keys, values and delta states that live on the device and are updated in place."""

import dataclasses
import weakref
from collections.abc import Sequence

import iree.runtime as iree
import numpy as np
from jaxtyping import Float

from specprefill_jax.artifact.manifest import StateTensor
from specprefill_jax.runtime.transfer import Transfer


@dataclasses.dataclass(eq=False)
class Snapshot:
    """What a state cannot recover by itself: copies of its delta states, and its length in slots.

    Keys and values are not copied: slots below `length` still hold them. `stale` says why that is no longer
    so.
    """

    length: int
    buffers: tuple[iree.HalBuffer, ...]
    stale: str | None = None

    @property
    def bytes(self) -> int:
        """Device memory it holds."""
        return sum(buffer.byte_length() for buffer in self.buffers)


class State:
    """The state of one sequence at one cache capacity.

    Attributes:
        capacity: cache slots C.
        length: slots in use; the next token goes to slot `length`.
        views: the device buffers, in the order in which the entries take them.
    """

    def __init__(self, tensors: Sequence[StateTensor], capacity: int, transfer: Transfer) -> None:
        self._tensors = tuple(tensors)
        self._transfer = transfer
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        self.capacity = capacity
        self.length = 0
        self.views = tuple(transfer.allocate(t.shape_at(capacity), t.dtype) for t in self._tensors)
        self.reset()

    @property
    def bytes(self) -> int:
        """Device memory it holds."""
        return sum(view.byte_length for view in self.views)

    def reset(self) -> None:
        """Empty the cache: zero-fill every tensor. Snapshots of earlier content become unusable."""
        self._transfer.zero(view.get_buffer() for view in self.views)
        self.length = 0
        for snapshot in self._snapshots:
            snapshot.stale = "the state was reset after it"

    def grow(self, capacity: int) -> None:
        """Move to a larger cache. Everything below `length` stays, and so do snapshots.

        Raises:
            ValueError: the cache would not become larger.
            DeviceFailed: the device has no memory for it. The state is not usable then.
        """
        if capacity <= self.capacity:
            raise ValueError(f"a cache of {self.capacity} slots does not grow to {capacity}")
        views = list(self.views)
        for i, tensor in enumerate(self._tensors):
            if tensor.grows:
                # One by one, so that only one of them is there twice.
                larger = self._transfer.allocate(tensor.shape_at(capacity), tensor.dtype)
                self._transfer.zero(
                    [larger.get_buffer()]
                )  # masked slots count with weight 0, but must be numbers
                self._transfer.copy_part(views[i], larger, tensor.shape.index("C"), self.length)
                views[i] = larger
                self.views = tuple(views)
        self.capacity = capacity

    def snapshot(self) -> Snapshot:
        """Copy the delta states on the device, to return here with `restore`."""
        sources = self._delta_buffers()
        copies = tuple(self._transfer.allocate_bytes(source.byte_length()) for source in sources)
        self._transfer.copy(zip(sources, copies, strict=True))
        snapshot = Snapshot(self.length, copies)
        self._snapshots.add(snapshot)
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this state, bit for bit below its length. Later slots are undefined.

        Raises:
            ValueError: the snapshot is of another state, or slots that it relies on have been written since.
        """
        if snapshot not in self._snapshots:
            raise ValueError("the snapshot belongs to another state; restore it into its own")
        if snapshot.stale is not None:
            raise ValueError(f"the snapshot of {snapshot.length} slots cannot be restored: {snapshot.stale}")
        self._transfer.copy(zip(snapshot.buffers, self._delta_buffers(), strict=True))
        self.length = snapshot.length

    def advance(self, count: int) -> None:
        """Note that `count` more slots hold tokens."""
        for snapshot in self._snapshots:
            if snapshot.length > self.length:
                snapshot.stale = f"slots from {self.length} on were written after it"
        self.length += count

    def read(self) -> dict[str, Float[np.ndarray, "..."]]:
        """A copy of every tensor by name, for tests and diagnosis."""
        return {t.name: self._transfer.read(v) for t, v in zip(self._tensors, self.views, strict=True)}

    def read_slots(self, slots: int) -> dict[str, Float[np.ndarray, "..."]]:
        """A copy of every tensor by name; of those that grow with the cache, the first `slots` slots."""
        found = {}
        for tensor, view in zip(self._tensors, self.views, strict=True):
            at = tensor.shape.index("C") if tensor.grows else 0
            count = slots if tensor.grows else view.shape[0]
            found[tensor.name] = self._transfer.read_part(view, at, count)
        return found

    def _delta_buffers(self) -> list[iree.HalBuffer]:
        pairs = zip(self._tensors, self.views, strict=True)
        return [view.get_buffer() for tensor, view in pairs if not tensor.grows]
