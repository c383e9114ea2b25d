"""What IREE raises while a device works, as an error of ours."""

from collections.abc import Iterator
from contextlib import contextmanager

from specprefill_jax.errors import DeviceFailed


@contextmanager
def failing_as(work: str) -> Iterator[None]:
    """Turns what IREE raises in the block, or in the decorated function, into `DeviceFailed`.

    Args:
        work: what was going on, for the message: "decode_C1024 of the draft ..".
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        first_line = str(error).partition("\n")[0].rstrip("; ")
        raise DeviceFailed(
            f"{work} failed on the device: {first_line}. If memory ran out, close other programs, shorten "
            "the prompt, keep less of it, or lower --max-tokens; if the device was lost, start again"
        ) from error
