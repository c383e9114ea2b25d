"""Reading back, uploading, copying and zero-filling on each device."""

from pathlib import Path

import iree.runtime
import numpy as np
import pytest

from specprefill_jax.errors import DeviceFailed
from specprefill_jax.runtime.device import Device
from specprefill_jax.runtime.transfer import ELEMENT_TYPES, Input, Transfer


def upload(device: Device, values: np.ndarray, dtype: str) -> iree.runtime.HalBufferView:
    view = device.hal.allocator.allocate_buffer_copy(
        memory_type=int(iree.runtime.MemoryType.DEVICE_LOCAL),
        allowed_usage=int(iree.runtime.BufferUsage.DEFAULT),
        device=device.hal,
        buffer=values,
        element_type=ELEMENT_TYPES[dtype],
    )
    assert isinstance(view, iree.runtime.HalBufferView)
    return view


@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 2, 11)])
def test_values_come_back_as_they_went(device: Device, shape: tuple[int, ...]):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) - 2.5
    np.testing.assert_array_equal(device.transfer.read(upload(device, values, "f32")), values)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_part_along_any_axis_can_be_read_alone(device: Device, axis: int):
    values = np.arange(7 * 4 * 8, dtype=np.float32).reshape(7, 4, 8)
    found = device.transfer.read_part(upload(device, values, "f32"), axis, 3)
    np.testing.assert_array_equal(found, values.take(range(3), axis))


def test_half_floats_come_back_and_bfloats_are_widened(device: Device):
    halves = np.array([1.5, -0.25, 1024], np.float16)
    found = device.transfer.read(upload(device, halves, "f16"))
    assert found.dtype == np.float16
    np.testing.assert_array_equal(found, halves)
    # bf16 is the upper half of a float32: 0x3FC0 is 1.5, 0xC000 is -2.
    found = device.transfer.read(upload(device, np.array([0x3FC0, 0xC000], np.uint16), "bf16"))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([1.5, -2], np.float32))


def test_what_was_read_is_not_changed_by_the_next_read(device: Device):
    first = device.transfer.read(upload(device, np.full(4, 1, np.float32), "f32"))
    device.transfer.read(upload(device, np.full(4, 2, np.float32), "f32"))
    np.testing.assert_array_equal(first, np.full(4, 1, np.float32))


def test_the_staging_buffer_is_reused_and_grows(device: Device):
    small, large = np.zeros(4, np.float32), np.arange(40_000, dtype=np.float32)
    view = upload(device, small, "f32")
    device.transfer.read(view)
    before = device.hal.allocator.statistics
    for _ in range(5):
        device.transfer.read(view)
    after = device.hal.allocator.statistics
    assert after["host_bytes_allocated"] + after["device_bytes_allocated"] == (
        before["host_bytes_allocated"] + before["device_bytes_allocated"]
    )
    np.testing.assert_array_equal(device.transfer.read(upload(device, large, "f32")), large)


def test_an_input_is_rewritten_in_place(device: Device):
    tokens = Input(device.hal, (4,), "i32")
    first = tokens.write(np.array([1, 2, 3, 4], np.int32))
    np.testing.assert_array_equal(device.transfer.read(first), [1, 2, 3, 4])
    second = tokens.write(np.array([5, 6, 7, 8], np.int32))
    assert second is first
    np.testing.assert_array_equal(device.transfer.read(second), [5, 6, 7, 8])


def test_zero_fills_all_buffers_and_copy_goes_one_way(device: Device):
    one = upload(device, np.arange(6, dtype=np.float32), "f32")
    two = upload(device, np.ones(6, np.float32), "f32")
    device.transfer.copy([(one.get_buffer(), two.get_buffer())])
    np.testing.assert_array_equal(device.transfer.read(two), np.arange(6))
    device.transfer.zero([one.get_buffer()])
    np.testing.assert_array_equal(device.transfer.read(one), np.zeros(6))
    np.testing.assert_array_equal(device.transfer.read(two), np.arange(6))


def test_more_memory_than_there_is_fails_with_a_typed_error(device: Device):
    with pytest.raises(DeviceFailed, match="reserving memory failed on the device"):
        device.transfer.allocate_bytes(1 << 50)


def test_stock_read_back_still_fails_on_vulkan_devices_that_share_host_memory(device: Device):
    """When this fails, IREE reads back from such devices by itself: delete `Transfer.read`'s own staging."""
    view = upload(device, np.arange(4, dtype=np.float32), "f32")
    stock = iree.runtime.DeviceArray(device.hal, view)
    if device.driver == "local-task":
        np.testing.assert_array_equal(stock.to_host(), np.arange(4))
        return
    with pytest.raises(ValueError, match="could not import host allocation"):
        stock.to_host()


def test_no_other_module_of_the_runtime_uses_the_stock_read_back():
    package = Path(__file__).parents[2] / "specprefill_jax"
    users = [path.name for path in package.rglob("*.py") if ".to_host()" in path.read_text(encoding="utf-8")]
    assert users == []


def test_a_copy_that_was_refused_does_not_keep_the_next_one_waiting(device: Device):
    """Each waits for the one before: for one that was never submitted it would wait for ever."""

    class Refusing:
        def __getattr__(self, name: str) -> object:
            return getattr(device.hal, name)

        def queue_copy(self, *_: object, **__: object) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED")

    transfer = Transfer(device.hal)
    source, target = (transfer.allocate_bytes(16) for _ in range(2))
    transfer._device = Refusing()  # type: ignore[assignment]
    with pytest.raises(DeviceFailed):
        transfer.copy([(source, target)])
    transfer._device = device.hal
    transfer.copy([(source, target)])
