"""Moving values between the host and a device.

`DeviceArray.to_host` of IREE 3.13 fails on Vulkan devices that share memory with the host (integrated GPUs,
lavapipe): the allocator calls any host memory importable, then refuses every pointer that is not aligned to a
page. So values are read back through a staging buffer of our own. No upstream issue is known.
`tests/runtime/test_transfer.py` fails once the stock way works: then this reader can go.
"""

import math
from collections.abc import Iterable
from typing import Any

import iree.runtime as iree
import numpy as np
from jaxtyping import Int, Shaped

from specprefill_jax.runtime.failure import failing_as

# IREE's enumerations mix with whole numbers only after this conversion.
_DEFAULT_USAGE = int(iree.BufferUsage.DEFAULT)
_MAPPING = int(iree.BufferUsage.MAPPING_SCOPED)
_DEVICE_LOCAL = int(iree.MemoryType.DEVICE_LOCAL)
_HOST_VISIBLE = int(iree.MemoryType.HOST_VISIBLE) | int(iree.MemoryType.HOST_COHERENT)
_STAGING = int(iree.MemoryType.HOST_LOCAL) | int(iree.MemoryType.DEVICE_VISIBLE)

ELEMENT_TYPES = {
    "f32": iree.HalElementType.FLOAT_32,
    "f16": iree.HalElementType.FLOAT_16,
    "bf16": iree.HalElementType.BFLOAT_16,
    "i32": iree.HalElementType.SINT_32,
}
# Views give their element type as a plain number, against what IREE's stubs say.
_BFLOAT16: Any = iree.HalElementType.BFLOAT_16
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i32": 4}


class Input:
    """A device buffer that the host writes directly, reused from call to call: no copy, no wait."""

    @failing_as("reserving memory")
    def __init__(self, device: iree.HalDevice, shape: tuple[int, ...], dtype: str) -> None:
        kind = np.float32 if dtype == "f32" else np.int32
        self._dtype = np.dtype(kind)
        self._buffer = device.allocator.allocate_buffer(
            memory_type=_DEVICE_LOCAL | _HOST_VISIBLE,
            allowed_usage=_DEFAULT_USAGE | _MAPPING,
            allocation_size=int(np.prod(shape)) * self._dtype.itemsize,
        )
        self.shape = shape
        self.view = iree.HalBufferView(self._buffer, shape, ELEMENT_TYPES[dtype])

    def write(self, values: Shaped[np.ndarray, "..."]) -> iree.HalBufferView:
        """Fill the buffer; a call that reads it must not be running."""
        self._buffer.map().asarray(self.shape, self._dtype)[...] = values
        return self.view


class Transfer:
    """Reads, copies and zero-fills buffers of one device; returns when the device has finished.

    Every method raises DeviceFailed where the device does: out of memory, or lost.
    """

    def __init__(self, device: iree.HalDevice) -> None:
        self._device = device
        self._semaphore = device.create_semaphore(0)
        self._submitted = 0
        self._staging: iree.HalBuffer | None = None

    def allocate(self, shape: tuple[int, ...], dtype: str) -> iree.HalBufferView:
        """A buffer in device memory. Its content is undefined."""
        size = int(np.prod(shape)) * _ELEMENT_BYTES[dtype]
        return iree.HalBufferView(self.allocate_bytes(size), shape, ELEMENT_TYPES[dtype])

    @failing_as("reserving memory")
    def allocate_bytes(self, size: int) -> iree.HalBuffer:
        """A buffer of `size` bytes in device memory. Its content is undefined."""
        return self._device.allocator.allocate_buffer(
            memory_type=_DEVICE_LOCAL, allowed_usage=_DEFAULT_USAGE, allocation_size=size
        )

    @failing_as("reading a result")
    def read(self, view: iree.HalBufferView) -> Shaped[np.ndarray, "..."]:
        """The values of a device buffer as a new array; bf16, which NumPy lacks, is widened to float32."""
        buffer = view.get_buffer()
        staging = self._reserve(buffer.byte_length())
        self.copy([(buffer, staging)])
        return _values(staging, list(view.shape), view.element_type)

    @failing_as("reading a result")
    def read_part(self, view: iree.HalBufferView, axis: int, count: int) -> Shaped[np.ndarray, "..."]:
        """As `read`, but the first `count` entries along an axis alone; the rest is not moved either."""
        shape = list(view.shape)
        outer = math.prod(shape[:axis])
        stride = view.byte_length // outer
        length = stride // shape[axis] * count
        staging = self._reserve(outer * length)
        commands = iree.HalCommandBuffer(self._device)
        for i in range(outer):
            commands.copy(view.get_buffer(), staging, i * stride, i * length, length)
        commands.end()
        self._execute(commands)
        shape[axis] = count
        return _values(staging, shape, view.element_type)

    @failing_as("copying state")
    def copy(self, pairs: Iterable[tuple[iree.HalBuffer, iree.HalBuffer]]) -> None:
        """Copy each source buffer to the beginning of its target, on the device."""
        for source, target in pairs:
            wait, signal = self._step()
            self._device.queue_copy(source, target, wait_semaphores=wait, signal_semaphores=signal)
            self._submitted += 1
        self._finish()

    @failing_as("copying state")
    def copy_part(
        self, source: iree.HalBufferView, target: iree.HalBufferView, axis: int, count: int
    ) -> None:
        """Copy the first `count` entries along an axis, in which alone the two may differ; on the device."""
        if count == 0:
            return
        outer = math.prod(list(source.shape)[:axis])
        steps = source.byte_length // outer, target.byte_length // outer
        length = steps[0] // source.shape[axis] * count
        commands = iree.HalCommandBuffer(self._device)
        for i in range(outer):
            commands.copy(source.get_buffer(), target.get_buffer(), i * steps[0], i * steps[1], length)
        commands.end()
        self._execute(commands)

    @failing_as("clearing state")
    def zero(self, buffers: Iterable[iree.HalBuffer]) -> None:
        """Fill each buffer with zeros, all in one submission."""
        commands = iree.HalCommandBuffer(self._device)
        for buffer in buffers:
            commands.fill(buffer, np.zeros(1, np.uint8), 0, buffer.byte_length())
        commands.end()
        self._execute(commands)

    def _reserve(self, size: int) -> iree.HalBuffer:
        """The staging buffer, of at least `size` bytes."""
        if self._staging is None or self._staging.byte_length() < size:
            self._staging = self._device.allocator.allocate_buffer(
                memory_type=_STAGING,
                allowed_usage=int(iree.BufferUsage.TRANSFER_TARGET) | _MAPPING,
                # A power of two, so that growing prompts do not allocate at every step.
                allocation_size=1 << max(16, (size - 1).bit_length()),
            )
        return self._staging

    def _execute(self, commands: iree.HalCommandBuffer) -> None:
        """Submit commands behind all earlier ones, and wait for them."""
        wait, signal = self._step()
        self._device.queue_execute(commands, wait_semaphores=wait, signal_semaphores=signal)
        self._submitted += 1
        self._finish()

    def _step(self) -> tuple[iree.HalFence, iree.HalFence]:
        """Fences that put one more operation behind all earlier ones.

        It counts once it is submitted: waiting for one that was refused would never end.
        """
        return (
            iree.HalFence.create_at(self._semaphore, self._submitted),
            iree.HalFence.create_at(self._semaphore, self._submitted + 1),
        )

    def _finish(self) -> None:
        iree.HalFence.create_at(self._semaphore, self._submitted).wait()


def _values(staging: iree.HalBuffer, shape: list[int], element_type: Any) -> Shaped[np.ndarray, "..."]:
    """A copy of what the staging buffer begins with."""
    mapped = staging.map()
    if element_type == int(_BFLOAT16):
        halves = mapped.asarray(shape, np.dtype(np.uint16))
        return (halves.astype(np.uint32) << 16).view(np.float32)
    dtype: Any = np.dtype(iree.HalElementType.map_to_dtype(element_type))
    return mapped.asarray(shape, dtype).copy()


def same_memory(one: iree.HalBufferView, other: iree.HalBufferView) -> bool:
    """Whether two views show the same device buffer."""
    first: Any = one.get_buffer()
    second: Any = other.get_buffer()
    return bool(first.ref == second.ref)


def as_int32(values: Int[np.ndarray, "N"], length: int) -> Int[np.ndarray, "T"]:
    """`values` padded to a block of `length`, the padding repeating the last value."""
    padded = np.empty(length, np.int32)
    padded[: len(values)] = values
    padded[len(values) :] = values[-1]
    return padded
