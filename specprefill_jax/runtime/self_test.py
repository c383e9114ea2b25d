"""The proof that a loaded program computes right on this device: recorded logits against found ones."""

import numpy as np
from jaxtyping import Float

from specprefill_jax.errors import SelfTestFailed


def check_logits(
    found: Float[np.ndarray, "K"],
    recorded: tuple[float, ...],
    tolerance: float,
    *,
    entry: str,
    program: str,
    device: str,
) -> None:
    """Compare logits with the recorded ones; `entry`, `program` and `device` name them in the message.

    Raises:
        SelfTestFailed: one is not finite, or differs by more than `tolerance` times the largest recorded
            magnitude (at least 1).
    """
    expected = np.array(recorded)
    allowed = tolerance * max(1.0, float(np.abs(expected).max()))
    worst = float(np.abs(found.astype(np.float64) - expected).max())
    # Written so that a difference that is not a number fails too.
    if not worst <= allowed:
        raise SelfTestFailed(
            f"{program} computes wrong results on {device}: after {entry}, logits differ by {worst:.3g} from "
            f"the recorded ones, and {allowed:.3g} is allowed. Compile the artifact again for this machine; "
            "if that does not help, use another device"
        )
