"""What memory an answer takes, before anything is loaded: the ways to answer a prompt, each with its sum.

All of it follows from the manifest, the prompt's length and the settings. The ways, caches and windows are
those that the engine takes, so that a plan says what would be done and not only what would fit.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from specprefill_jax.artifact.manifest import ELEMENT_BYTES, Manifest, Model
from specprefill_jax.errors import ArtifactError, EmptyPrompt, MemoryTooSmall, PromptTooLong, SettingError
from specprefill_jax.policy.decision import decide
from specprefill_jax.scoring import attention_bytes, auto_window
from specprefill_jax.selection import fewest_kept, keeps_everything, token_budget
from specprefill_jax.settings import SMALLEST_WINDOW, Settings

SNAPSHOTS = 4
"""Most of each model in a conversation: the first, after system and tools, and the newest. One takes 19 MiB
for a draft of 0.8B, and 50 MiB for a target of 4B."""

WIDTHS = 16
"""What a call holds per token beside its attention, in hidden vectors of f32 (the MLP's two halves are 7).

So estimated, a block of 256 tokens on 32,768 slots takes what f16 builds of the true 0.8B and 4B allocate,
within 2% ("The whole models" in docs/radeon-780m.md).
"""


@dataclass(frozen=True)
class Share:
    """Bytes that one model takes of the device's memory in one way to answer.

    Attributes:
        weights: its archive; 0 where another model has the same one.
        slots: cache slots that it needs. 0: it is loaded and not run, and nothing below is needed.
        capacity: slots of the smallest compiled cache that holds them.
        block: the most tokens that one of its calls reads.
        cache: its state at this capacity.
        snapshots: copies of those parts of its state that do not grow with the cache, as a conversation has.
        call: the buffer that the kernels of one call share.
        call_known: how that is known: recorded by the build, in proportion to what is recorded of the largest
            cache and block, or estimated, as for a CPU.
        rows: the attention rows that a call returns.
    """

    weights: int
    slots: int = 0
    capacity: int = 0
    block: int = 0
    cache: int = 0
    snapshots: int = 0
    call: int = 0
    call_known: Literal["recorded", "in proportion", "estimated"] | None = None
    rows: int = 0


@dataclass(frozen=True)
class Way:
    """A way to answer a prompt.

    A conversation keeps both models' caches, so both are counted; one call runs at a time. A single request
    takes less: it gives the draft's cache back before the target's is made, and needs no snapshots.

    Attributes:
        mode: How the draft reads the prompt; "dense": it does not, and the target reads all of it.
        window: Tokens per window; None unless by windows.
        kept: The most tokens of the prompt that the target reads.
        draft, target: What each model takes.
    """

    mode: Literal["continuous", "windows", "dense"]
    window: int | None
    kept: int
    draft: Share
    target: Share

    @property
    def weights(self) -> int:
        """Bytes of both archives: both models are loaded in every way."""
        return self.draft.weights + self.target.weights

    @property
    def caches(self) -> int:
        """Bytes of both states."""
        return self.draft.cache + self.target.cache

    @property
    def snapshots(self) -> int:
        """Bytes of both models' snapshots."""
        return self.draft.snapshots + self.target.snapshots

    @property
    def call(self) -> int:
        """Bytes of the hungrier model's call, the rows that it returns included."""
        return max(self.draft.call + self.draft.rows, self.target.call + self.target.rows)

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.weights + self.caches + self.snapshots + self.call

    @property
    def estimated(self) -> bool:
        """Whether a call's buffer is anything but what the build has recorded."""
        return any(share.call_known not in (None, "recorded") for share in (self.draft, self.target))

    @property
    def name(self) -> str:
        """The way in words."""
        return self.mode if self.window is None else f"windows of {self.window}"


@dataclass(frozen=True)
class MemoryPlan:
    """The ways to answer a prompt, and what each takes.

    Attributes:
        tokens, max_tokens: Of the prompt, and the most of the answer.
        reason: Why the draft is run, or why not.
        ways: Those that the compiled caches allow, in the order in which they are preferred.
        impossible: Why other ways are not open, however much memory there is.
    """

    tokens: int
    max_tokens: int
    reason: str
    ways: tuple[Way, ...]
    impossible: tuple[str, ...]

    def fitting(self, memory: int | None) -> Way | None:
        """The first way that takes at most `memory` bytes (None: no limit is known); None where none does."""
        return next((way for way in self.ways if memory is None or way.total <= memory), None)

    def to_json(self, memory: int | None) -> dict[str, object]:
        """Plain values; sizes in bytes."""
        chosen = self.fitting(memory)
        return {
            "prompt": self.tokens,
            "max_tokens": self.max_tokens,
            "memory": memory,
            "reason": self.reason,
            "chosen": None if chosen is None else self.ways.index(chosen),
            "ways": [
                {
                    **dataclasses.asdict(way),
                    "call": way.call,
                    "total": way.total,
                    "fits": memory is None or way.total <= memory,
                }
                for way in self.ways
            ],
            "impossible": list(self.impossible),
        }


def plan_memory(manifest: Manifest, tokens: int, settings: Settings, *, unfit: str = "") -> MemoryPlan:
    """What it takes to answer a prompt of `tokens`: sparsely in one pass or by windows, or densely.

    Where one pass does not fit, windows that need a smaller cache may; smaller windows than the engine would
    take by itself are tried too, unless the settings name one. How many tokens will be kept is not known yet:
    the most that the settings allow are counted, as far as the largest cache goes.

    Args:
        unfit: Why the draft is no guide to what matters: it is not asked where the whole prompt fits the
            target's largest cache and the setting `memory`. "": nothing speaks against it.

    Raises:
        EmptyPrompt: there are no tokens.
        ArtifactError: the artifact lacks a model.
        SettingError: `window` or `lookahead` does not fit the draft's largest cache.
    """
    if tokens < 1:
        raise EmptyPrompt(f"a prompt of {tokens} tokens has none; give at least one")
    draft, target = _model(manifest, "draft"), _model(manifest, "target")
    ways: list[Way] = []
    impossible: list[str] = []
    whole = tokens + settings.max_tokens
    of_draft, of_target = _weights(manifest)
    largest = target.capacities[-1]
    dense = None
    if whole <= largest:
        share = _share(target, of_target, tokens, settings.max_tokens)
        dense = Way("dense", None, tokens, Share(of_draft), share)
    fits = dense is not None and (settings.memory is None or dense.total <= settings.memory)
    decision = decide(tokens, settings, manifest.minimum_tokens, unfit=unfit if fits else "")
    sparse, reason = decision.run, decision.reason
    if sparse and keeps_everything(tokens, settings):
        sparse, reason = False, "the settings keep every token of this prompt"
    if whole > target.positions:
        impossible.append(f"prompt and answer take {whole} positions, and the target has {target.positions}")
        return MemoryPlan(tokens, settings.max_tokens, reason, (), tuple(impossible))
    fewest, most = fewest_kept(tokens, settings), min(token_budget(tokens, settings), tokens)
    if sparse and fewest + settings.max_tokens > largest:
        impossible.append(_too_few("sparse prefill", fewest + settings.max_tokens, "target", target))
    elif sparse:
        kept = min(most, largest - settings.max_tokens)
        share = _share(target, of_target, kept, settings.max_tokens)
        for window, read in _readings(draft, tokens, settings):
            mode = "continuous" if window is None else "windows"
            ways.append(Way(mode, window, kept, _share(draft, of_draft, read, settings.lookahead), share))
        if settings.scoring == "continuous" and ways[0].window is not None:
            impossible.append(_too_few("continuous scoring", tokens + settings.lookahead, "draft", draft))
    if dense is None:
        impossible.append(_too_few("dense prefill", whole, "target", target))
    else:
        ways.append(dense)
    return MemoryPlan(tokens, settings.max_tokens, reason, tuple(ways), tuple(impossible))


def require_memory(plan: MemoryPlan, memory: int | None) -> Way:
    """The way to answer in `memory` bytes (None: no limit is known).

    Raises:
        MemoryTooSmall: no way fits.
        PromptTooLong: no compiled cache holds what is needed, however much memory there is.
    """
    chosen = plan.fitting(memory)
    if chosen is not None:
        return chosen
    asked = f"{plan.tokens} prompt tokens and max_tokens={plan.max_tokens}"
    if not plan.ways:
        raise PromptTooLong(
            f"{asked} are too many: {'; '.join(plan.impossible)}. Shorten the prompt, lower max_tokens "
            "(--max-tokens), keep less of it (--keep), or use an artifact with larger `capacities`"
        )
    assert memory is not None, "without a limit the first way fits"
    least = min(plan.ways, key=lambda way: way.total)
    estimated = " (estimated)" if least.estimated else ""
    raise MemoryTooSmall(
        f"{asked} take {least.total:,} bytes at least ({least.name}: weights {size_words(least.weights)}, "
        f"caches {size_words(least.caches)}, snapshots {size_words(least.snapshots)}, one call "
        f"{size_words(least.call)}{estimated}), but memory is {memory:,} bytes: "
        f"{_remedies(plan, least, memory)}"
    )


def size_words(size: int) -> str:
    """Bytes for people, in powers of 1000."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def _remedies(plan: MemoryPlan, least: Way, memory: int) -> str:
    """What helps; where the weights alone are too large, no shorter prompt does."""
    if least.weights >= memory:
        return "use a smaller artifact, or give more memory (--memory)"
    sparse = "--keep" if any(way.mode != "dense" for way in plan.ways) else "--mode sparse, --keep"
    return (
        f"shorten the prompt, lower max_tokens (--max-tokens), keep less of the prompt ({sparse}), use a "
        "smaller artifact, or give more memory (--memory)"
    )


def _model(manifest: Manifest, role: str) -> Model:
    if role not in manifest.models:
        present = ", ".join(manifest.models)
        raise ArtifactError(f"artifact {manifest.name!r} has no {role} model, only {present}")
    return manifest.models[role]


def _weights(manifest: Manifest) -> tuple[int, int]:
    """Bytes of the draft's and the target's archive; one that both share counts once."""
    draft, target = manifest.models["draft"].parameters, manifest.models["target"].parameters
    return 0 if draft == target else manifest.files[draft].bytes, manifest.files[target].bytes


def _readings(draft: Model, tokens: int, settings: Settings) -> Iterator[tuple[int | None, int]]:
    """How the draft may read the prompt: tokens per window (None: one pass), and tokens read together.

    Each takes a smaller cache than the one before it; a window that does not is no help.
    """
    before = draft.capacities[-1] + 1
    if settings.scoring == "continuous" and tokens + settings.lookahead < before:
        yield None, tokens
        before = _capacity(draft, tokens + settings.lookahead)
    for window in _window_sizes(draft, settings):
        read = min(window, tokens)
        if (capacity := _capacity(draft, read + settings.lookahead)) < before:
            yield window, read
            before = capacity


def _window_sizes(draft: Model, settings: Settings) -> list[int]:
    """The window that the engine takes, then the largest one of each smaller cache."""
    largest, lookahead = draft.capacities[-1], settings.lookahead
    room = largest - lookahead
    if room < max(settings.window or 0, 2):
        window = f"window={settings.window} and " if settings.window else ""
        raise SettingError(
            f"{window}lookahead={lookahead}: the draft was compiled for {largest} slots at most; lower "
            "window (SP_WINDOW) or lookahead (SP_LOOKAHEAD)"
        )
    if settings.window:
        return [settings.window]
    own = min(auto_window(settings.draft_context, draft.query_heads), room)
    smaller = (capacity - lookahead for capacity in reversed(draft.capacities))
    return [own, *(window for window in smaller if SMALLEST_WINDOW <= window < own)]


def _share(model: Model, weights: int, tokens: int, more: int) -> Share:
    """What a model takes that reads `tokens` and decodes `more`, at most."""
    capacity = _capacity(model, tokens + more)
    block = _block(model, tokens, capacity)
    fixed = sum(tensor.bytes_at(capacity) for tensor in model.state if not tensor.grows)
    call, known = _call(model, block, capacity)
    return Share(
        weights=weights,
        slots=tokens + more,
        capacity=capacity,
        block=block,
        cache=model.state_bytes(capacity),
        snapshots=SNAPSHOTS * fixed,
        call=call,
        call_known=known,
        rows=model.rows * model.attention_layers * model.query_heads * capacity * 4,
    )


def _capacity(model: Model, slots: int) -> int:
    """The smallest compiled cache of at least so many slots; the caller has made sure that there is one."""
    return next(capacity for capacity in model.capacities if capacity >= slots)


def _block(model: Model, tokens: int, capacity: int) -> int:
    """The longest block that reading `tokens` may take: the shortest that holds them, else the longest."""
    lengths = [length for length in model.blocks if length <= capacity]
    return next((length for length in lengths if length >= tokens), lengths[-1])


def _call(
    model: Model, block: int, capacity: int
) -> tuple[int, Literal["recorded", "in proportion", "estimated"]]:
    """Bytes of the buffer that the kernels of one call share, and how they are known.

    A build for a GPU records its largest entry's; that of a smaller one is in proportion to the estimates.
    """
    estimate = _estimate(model, block, capacity)
    if model.largest_buffer == 0:
        return estimate, "estimated"
    largest = model.capacities[-1]
    longest = _block(model, largest, largest)
    if (block, capacity) == (longest, largest):
        return model.largest_buffer, "recorded"
    return -(-model.largest_buffer * estimate // _estimate(model, longest, largest)), "in proportion"


def _estimate(model: Model, block: int, capacity: int) -> int:
    """One layer's attention scores, the probabilities made of them, the mask, and what each token holds.

    A call's layers share the room, so it does not count once per layer. Probabilities are f16 in f16 builds.
    """
    scores = attention_bytes(capacity, block, model.query_heads)
    probabilities = scores // 4 * (ELEMENT_BYTES["f16"] if model.numerics == "f16" else ELEMENT_BYTES["f32"])
    mask = attention_bytes(capacity, block, 1)
    return scores + probabilities + mask + WIDTHS * model.hidden * block * 4


def _too_few(way: str, slots: int, role: str, model: Model) -> str:
    return f"{way} takes {slots} slots, and the {role}'s largest cache has {model.capacities[-1]}"
