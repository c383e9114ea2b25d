"""The next token from the target's logits."""

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.errors import NotFiniteOutput
from specprefill_jax.settings import Settings


def sample(
    logits: Float[np.ndarray, "V"], settings: Settings, generator: np.random.Generator, vocabulary: int
) -> int:
    """One token id: the likeliest at temperature 0 (ties: the lowest id), else drawn with `generator`.

    Candidates are narrowed and weighted in llama.cpp's order: top-k, top-p, min-p, then temperature, so that
    the temperature does not change which tokens are candidates.

    Args:
        vocabulary: Size of the tokenizer. Ids from there on only pad the model's output and are never drawn.

    Raises:
        NotFiniteOutput: a logit is not a finite number.
    """
    if not np.isfinite(logits).all():
        bad = np.count_nonzero(~np.isfinite(logits))
        raise NotFiniteOutput(f"{bad} of {logits.size} logits are not finite, so no token can follow")
    logits = logits[:vocabulary].astype(np.float64)
    if settings.temperature == 0:
        return int(logits.argmax())
    ids = _likeliest(logits, settings.top_k)
    probabilities = softmax(logits[ids])
    reached = int(np.searchsorted(np.cumsum(probabilities), settings.top_p))  # by this candidate, which stays
    ids, probabilities = ids[: reached + 1], probabilities[: reached + 1]
    ids = ids[probabilities >= settings.min_p * probabilities[0]]
    return int(generator.choice(ids, p=softmax(logits[ids], settings.temperature)))


def _likeliest(logits: Float[np.ndarray, "V"], count: int) -> Int[np.ndarray, "K"]:
    """The `count` likeliest ids (0: all), likeliest first; ties: the lower id."""
    if not 0 < count < logits.size:
        return np.argsort(-logits, kind="stable")
    # Sorting all of a vocabulary of 250,000 takes longer than everything else here.
    candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def softmax(logits: Float[np.ndarray, "K"], temperature: float = 1.0) -> Float[np.ndarray, "K"]:
    """Probabilities of `logits` at a temperature above 0."""
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the likeliest to exp(-inf) = 0
        weights = np.exp((logits - logits.max()) / temperature)
    return weights / weights.sum()
