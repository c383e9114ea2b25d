"""The proof that a loaded program computes right on this device: fixed inputs, recorded outputs."""

import typing

import numpy as np
from jaxtyping import Float

from specprefill_jax.artifact.manifest import SelfTest
from specprefill_jax.errors import SelfTestFailed

if typing.TYPE_CHECKING:
    from specprefill_jax.runtime.program import Program


def verify(program: "Program", test: SelfTest) -> None:
    """Run the inputs of `test` through prefill, head and decode, and compare the logits with the recorded
    ones.

    Raises:
        SelfTestFailed: a result differs by more than the recorded tolerance, or is not finite.
    """
    state = program.state_of_capacity(test.capacity)
    hidden = program.prefill_block(
        state,
        np.array(test.tokens, np.int32),
        np.array(test.positions, np.int32),
        length=test.block,
    )
    index = np.array(test.logits_index)
    _compare(program, "prefill", program.head(hidden)[index], test.prefill_logits, test.tolerance)
    decoded = program.decode(state, test.next_token, test.positions[-1] + 1)
    _compare(program, "decode", decoded.logits[index], test.decode_logits, test.tolerance)


def _compare(
    program: "Program",
    entry: str,
    found: Float[np.ndarray, "K"],
    recorded: tuple[float, ...],
    tolerance: float,
) -> None:
    expected = np.array(recorded)
    allowed = tolerance * max(1.0, float(np.abs(expected).max()))
    worst = float(np.abs(found.astype(np.float64) - expected).max())
    # Written so that a difference that is not a number fails too.
    if not worst <= allowed:
        raise SelfTestFailed(
            f"{program.label} computes wrong results on {program.device.description}: after {entry}, logits "
            f"differ by {worst:.3g} from the recorded ones, and {allowed:.3g} is allowed. Compile the "
            "artifact again for this machine; if that does not help, use another device"
        )
