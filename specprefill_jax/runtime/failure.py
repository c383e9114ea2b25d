"""What IREE raises while a device works, as an error of ours."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from specprefill_jax.errors import DeviceFailed

# DATA_LOSS is what IREE makes of a lost Vulkan device; files have been checked before anything is loaded.
_BY_THE_DEVICE = re.compile("VK_ERROR_DEVICE_LOST|VK_ERROR_OUT_OF|DATA_LOSS|RESOURCE_EXHAUSTED")


@contextmanager
def failing_as(work: str) -> Iterator[None]:
    """Turns what IREE raises in the block, or in the decorated function, into `DeviceFailed`.

    Args:
        work: what was going on, for the message: "decode_C1024 of the draft ..".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise device_failed(work, error) from error


def device_failed(work: str, error: Exception) -> DeviceFailed:
    """What IREE raised during `work`, as an error of ours."""
    first_line = str(error).partition("\n")[0].rstrip("; ")
    return DeviceFailed(
        f"{work} failed on the device: {first_line}. If memory ran out, close other programs, shorten "
        "the prompt, keep less of it, or lower --max-tokens; if the device was lost, start again"
    )


def blames_the_device(error: Exception) -> bool:
    """Whether IREE says that the device was lost, or that memory ran out."""
    return _BY_THE_DEVICE.search(str(error)) is not None
