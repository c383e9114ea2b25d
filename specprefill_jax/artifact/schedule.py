"""Which kernels the entries of a module dispatch: written beside a module that is compiled for a GPU."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

from specprefill_jax.artifact import strict
from specprefill_jax.errors import FileMissing

LOADING = "(load)"  # in place of an entry: what is dispatched once, when the module is loaded


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of the tensors that a kernel reads and writes in one dispatch, each tensor counted once.

    Of a table that is looked up in, all of it is counted.
    """

    reads: int
    writes: int


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """A kernel as one entry dispatches it.

    Attributes:
        kernel: the name of its entry point in the module.
        workgroups: how many in x, y and z.
        weights: bytes of the parameter behind a binding, by the number of the binding.
        count: how often the entry dispatches it like this.
    """

    kernel: str
    workgroups: tuple[int, ...]
    weights: Mapping[str, int]
    count: int


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the entries of a module dispatch, in the order of first use, and the traffic of each kernel.

    `buffers` are the sizes in bytes of those that one call of an entry allocates: its results, and the room
    that its kernels share, which is free again when it ends.
    """

    entries: Mapping[str, tuple[Dispatch, ...]]
    traffic: Mapping[str, Traffic]
    buffers: Mapping[str, tuple[int, ...]]

    @property
    def largest_buffer(self) -> int:
        """Bytes of the largest single buffer that a call allocates."""
        return max((size for sizes in self.buffers.values() for size in sizes), default=0)

    @property
    def most_buffers(self) -> int:
        """Bytes of all that the hungriest call allocates."""
        return max((sum(sizes) for sizes in self.buffers.values()), default=0)

    def write(self, path: Path) -> None:
        """Write it as JSON; the same schedule gives the same bytes."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        path.write_text(text + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Schedule":
        """The schedule in a file.

        Raises:
            FileMissing: there is no such file.
            ArtifactError: it is not a schedule.
        """
        if not path.is_file():
            raise FileMissing(
                f"no {path.name} in {path.parent}: it says which kernels an entry dispatches, and comes with "
                "an artifact that this version of `specprefill compile` builds for a GPU. Build it again"
            )
        return strict.decode(cls, strict.read_json(path), str(path))


def schedule_name(role: str) -> str:
    """The file of an artifact that holds a model's schedule."""
    return f"{role}.kernels.json"
