"""The target reads what is kept of a prompt, and writes the answer."""

from collections.abc import Iterator
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from specprefill_jax.chat import Chat
from specprefill_jax.engine.planning import check_slots, deepest_place
from specprefill_jax.engine.request import Request
from specprefill_jax.engine.values import Plan, Result, Timings, Usage
from specprefill_jax.errors import PromptTooLong
from specprefill_jax.policy import Status
from specprefill_jax.sampling import sample


def read_kept(
    request: Request, plan: Plan, positions: Int[np.ndarray, "N"] | None = None
) -> tuple[Float[np.ndarray, "V"], int]:
    """The target reads on to the end of the prompt.

    Args:
        positions: The position of each kept token; None: its own.

    Returns:
        Logits of the first new token, and the tokens of the prompt that it was done with before.

    Raises:
        PromptTooLong: the tokens kept and `max_tokens` exceed the target's largest cache.
        DeviceFailed: the device ran out of memory, or was lost.
    """
    request.clock.enter("target_prefill")
    track = request.caches.target
    _check_room(request, plan)
    place = deepest_place(request, plan.kept)
    reads = place.prompt < request.size
    track.start(place, plan.kept.size + request.settings.max_tokens, reads=reads)
    hidden = place.hidden
    if reads:
        hidden = track.read(
            request.tokens,
            plan.kept,
            stops=request.stops,
            positions=positions,
            before_block=lambda done, total: request.watcher("prefill", done, total),
        ).hidden
    assert hidden is not None, "a place at the prompt's end has its hidden state"
    request.caches.decide(request.size, plan.base)
    request.clock.enter("head")
    return track.program.head(hidden), place.prompt


def write(
    request: Request,
    plan: Plan,
    chat: Chat,
    logits: Float[np.ndarray, "V"],
    *,
    reused: int,
    show_control: bool = False,
) -> Iterator[str | Result]:
    """Pieces of text while the target writes, then the result. New token j has position M + j.

    Raises:
        NotFiniteOutput: the logits are not finite.
        DeviceFailed: the device ran out of memory, or was lost.
    """
    settings, clock = request.settings, request.clock
    generator = np.random.default_rng(settings.seed)
    detokenizer = chat.detokenizer(keep_special=show_control)
    written: list[int] = []
    text: list[str] = []
    finish: Literal["stop", "length"] = "length"
    first = logits
    clock.enter("first_token")
    token = sample(logits, settings, generator, chat.vocabulary)
    clock.pause()
    phases = clock.phases
    while True:
        if token in chat.stop_ids:
            finish = "stop"
            break
        text.append(detokenizer.push(token))
        written.append(token)
        if text[-1]:
            yield text[-1]
        if len(written) == settings.max_tokens:
            break
        request.watcher("decode", len(written), settings.max_tokens)
        clock.enter("decode")
        logits = request.caches.target.write(token).logits
        request.caches.decide(request.size, plan.base)
        token = sample(logits, settings, generator, chat.vocabulary)
        clock.pause()
    if rest := detokenizer.flush():
        text.append(rest)
        yield rest
    timings = Timings(
        status=plan.status,
        reason=plan.reason,
        prompt=request.size,
        kept=plan.kept.size,
        forced=plan.forced,
        pinned=plan.pinned,
        reused=reused,
        draft_read=plan.draft_read,
        looked_ahead=plan.looked_ahead,
        remembered=plan.remembered,
        mode=plan.mode,
        scoring=plan.scoring,
        phases=phases,
        first_token=sum(phases.values()),
        decode=clock.phases.get("decode", 0.0),
    )
    usage = Usage(prompt_tokens=request.size, completion_tokens=len(written))
    yield Result("".join(text), tuple(written), finish, usage, timings, plan.kept, first)


def check_positions(request: Request) -> None:
    """Every token has its own position, whatever is kept.

    Raises:
        PromptTooLong: the prompt and `max_tokens` exceed the target's positions.
    """
    target, asked = request.caches.target.program, request.settings.max_tokens
    if request.size + asked > target.model.positions:
        raise PromptTooLong(
            f"{request.size} prompt tokens and max_tokens={asked} need as many positions, but {target.label} "
            f"has {target.model.positions}: shorten the prompt, or lower max_tokens (--max-tokens)"
        )


def _check_room(request: Request, plan: Plan) -> None:
    read = f"{request.size} prompt tokens"
    if plan.kept.size < request.size:
        read = f"{plan.kept.size} tokens kept of {request.size}"
    elif plan.status is not Status.DISABLED:
        read += f" ({plan.status}: {plan.reason})"
    check_slots(request, plan.kept.size, read)
