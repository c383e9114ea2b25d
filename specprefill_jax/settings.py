"""Every knob of a request in one frozen dataclass, from flags, SP_* environment variables and a TOML file.

A flag wins over a variable, a variable over the file, the file over the default. The SP_* variables have the
names and defaults of the SpecPrefill guide, v3.1; only SP_POOL is ours.
"""

import difflib
import logging
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

from specprefill_jax.errors import FileMissing, SettingError

logger = logging.getLogger(__name__)

SMALLEST_WINDOW = 512
"""Tokens; a shorter window reads its tokens with too little context (the guide's lower clamp)."""

WINDOW_MARGIN = 128
"""Slots of the draft's context that a window leaves free for lookahead (the guide's upper clamp)."""

ROLES = ("system", "tools", "last_user", "user", "assistant", "tool")
"""Parts of a conversation that can be pinned: the system part, the tool definitions, the content of the last
user message, and the contents of all messages of a role."""


class Origin(NamedTuple):
    """Where a knob's value came from: the name used there, and the place (empty for a flag)."""

    name: str
    place: str = ""

    def holding(self, value: object) -> str:
        """The setting as the user would find it, e.g. `SP_CHUNK=32 in the environment`."""
        return f"{self.name}={value} in {self.place}" if self.place else f"{self.name}={value}"


class Kind(NamedTuple):
    """A kind of value: how it is read from what a person wrote (else ValueError), and its limits in words."""

    read: Callable[[Any], Any]
    limits: str


class Head(NamedTuple):
    """A head of the draft: of which of its full-attention layers, and which there; both from 0."""

    layer: int
    head: int


class Knob(NamedTuple):
    """What is known about a field of `Settings`: its kind, its environment variable (or None), its use."""

    kind: Kind
    env: str | None
    help: str


def _knob(default: object, kind: Kind, env: str | None, text: str) -> Any:
    return field(default=default, metadata={"knob": Knob(kind, env, text)})


def _whole(low: int) -> Kind:
    def read(raw: Any) -> int:
        if isinstance(raw, bool | float) or int(raw) < low:
            raise ValueError
        return int(raw)

    return Kind(read, f"a whole number, {low} or more")


def _number(low: float, high: float = math.inf) -> Kind:
    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not (math.isfinite(float(raw)) and low <= float(raw) <= high):
            raise ValueError
        return float(raw)

    return Kind(
        read, f"a number, {low:g} or more" if high == math.inf else f"a number from {low:g} to {high:g}"
    )


def _positive(high: float = math.inf) -> Kind:
    read_number = _number(0, high).read

    def read(raw: Any) -> float:
        if read_number(raw) == 0:
            raise ValueError
        return read_number(raw)

    return Kind(read, "a number above 0" + ("" if high == math.inf else f", at most {high:g}"))


def _odd_or_zero() -> Kind:
    read_whole = _whole(0).read

    def read(raw: Any) -> int:
        if read_whole(raw) % 2 == 0 and read_whole(raw) != 0:
            raise ValueError
        return read_whole(raw)

    return Kind(read, "0 (no pooling) or an odd number of tokens")


def _byte_count() -> Kind:
    """Powers of 1000 (16G, 16GB) as makers of memory count it, powers of 1024 (16GiB) as drivers do."""
    written = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmgt])(i?))?b?", re.IGNORECASE)

    def read(raw: Any) -> int:
        found = written.fullmatch(str(raw).strip())
        if found is None or isinstance(raw, bool | float):
            raise ValueError
        number, letter, binary = found.groups()
        power = "kmgt".index(letter.lower()) + 1 if letter else 0
        size = int(Decimal(number) * (1024 if binary else 1000) ** power)
        if size == 0:
            raise ValueError
        return size

    return Kind(
        read, "a size above 0: bytes, or like 16G (16 * 1000^3 bytes), 11.5GiB (11.5 * 1024^3) or 800M"
    )


def _choice(*names: str) -> Kind:
    def read(raw: Any) -> str:
        if raw not in names:
            raise ValueError
        return raw

    return Kind(read, "one of " + ", ".join(names))


def _roles() -> Kind:
    def read(raw: Any) -> tuple[str, ...]:
        written = raw.split(",") if isinstance(raw, str) else list(raw)
        names = tuple(dict.fromkeys(str(name).strip() for name in written))
        if names in ((), ("",), ("none",)):
            return ()
        if not set(names) <= set(ROLES):
            raise ValueError
        return names

    return Kind(read, "names separated by commas, of " + ", ".join(ROLES) + "; or none")


def _heads() -> Kind:
    written = re.compile(r"(\d+)\.(\d+)")

    def head(part: Any) -> Head:
        found = written.fullmatch(part.strip()) if isinstance(part, str) else None
        if not found and not isinstance(part, list | tuple):
            raise ValueError
        pair: Any = tuple(map(int, found.groups())) if found else part
        if any(type(number) is not int or number < 0 for number in pair):  # a bool is an int as well
            raise ValueError
        return Head(*pair)  # or TypeError, where there are not two

    def read(raw: Any) -> tuple[Head, ...] | None:
        if not isinstance(raw, str | list | tuple | None):
            raise ValueError
        each = [part.strip() for part in raw.split(",")] if isinstance(raw, str) else list(raw or ())
        return None if each in ([], ["all"]) else tuple(sorted(set(map(head, each))))

    return Kind(read, "heads like 2.0,5.3 (attention layer 2, head 0, ..; from 0), or all")


def _switch() -> Kind:
    words = {"1": True, "true": True, "on": True, "yes": True}
    words |= {"0": False, "false": False, "off": False, "no": False}

    def read(raw: Any) -> bool:
        if str(raw).lower() not in words:
            raise ValueError
        return words[str(raw).lower()]

    return Kind(read, "on or off (also 1, 0, true, false, yes, no)")


def _unset_or(kind: Kind) -> Kind:
    return Kind(lambda raw: None if raw is None else kind.read(raw), kind.limits)


@dataclass(frozen=True)
class Settings:
    """Every knob of a request. Make one with `Settings.resolve`; a value out of its limits never gets in.

    Some knobs select a way of working by being set at all: they are None until set, and a property gives what
    to work with (`selection`, `scoring`, `keep_fraction`, `draft_context`). `origins` says where each knob
    that was given to `resolve` came from.

    Raises:
        SettingError: a value is out of its limits; the message says where it came from and what is allowed.
    """

    enabled: bool = _knob(True, _switch(), None, "off: never run the draft")
    mode: Literal["auto", "sparse", "dense"] = _knob(
        "auto",
        _choice("auto", "sparse", "dense"),
        None,
        "sparse skips thresholds, dense never runs the draft",
    )
    minimum_tokens: int | None = _knob(
        None, _unset_or(_whole(0)), None, "shorter prompts run dense (default: the artifact's)"
    )
    calibration: bool = _knob(
        True, _switch(), None, "what `specprefill calibrate` chose stands in for settings that are not given"
    )
    memory: int | None = _knob(
        None,
        _unset_or(_byte_count()),
        None,
        "most device memory to take: 16G = 16 * 1000^3 bytes, 16GiB = 16 * 1024^3 (default: no limit known)",
    )

    lookahead: int = _knob(2, _whole(0), "SP_LOOKAHEAD", "greedy draft steps that score the prompt too")
    spec_ctx: int | None = _knob(
        None,
        _unset_or(_whole(SMALLEST_WINDOW + WINDOW_MARGIN)),
        "SP_SPEC_CTX",
        "draft context that an automatic window is made for (default: 8192); setting it scores by windows",
    )
    window: int | None = _knob(
        None,
        _unset_or(_whole(0)),
        "SP_WINDOW",
        "tokens per window, 0 = automatic; setting it scores by windows",
    )
    pool: int = _knob(
        13, _odd_or_zero(), "SP_POOL", "tokens to average attention over, 0 = none (the guide's rule)"
    )

    pooling: Literal["average", "max"] = _knob(
        "average", _choice("average", "max"), None, "what a token gets of the tokens around it"
    )
    per_head: Literal["raw", "peak", "zscore", "rank", "median"] = _knob(
        "raw",
        _choice("raw", "peak", "zscore", "rank", "median"),
        None,
        "how heads are made comparable: raw attention, share of the head's peak, ..",
    )
    across: Literal["max", "mean"] = _knob(
        "max", _choice("max", "mean"), None, "a token counts as in its strongest head, or as in all"
    )
    queries: int = _knob(1, _whole(1), None, "how many of the last prompt tokens are asked")
    sinks: int = _knob(0, _whole(0), None, "how many first tokens' attention counts for nothing")
    heads: tuple[Head, ...] | None = _knob(
        None, _heads(), None, "which heads count: 2.0,5.3 (layer.head) or all"
    )

    select_mode: Literal["mass", "chunk"] | None = _knob(
        None,
        _unset_or(_choice("mass", "chunk")),
        "SP_SELECT_MODE",
        "mass: a share of attention, chunk: a fraction of tokens (default: mass; chunk when keep is set)",
    )
    cumulative_mass: float = _knob(0.85, _positive(1), "SP_CUMULATIVE_MASS", "share of attention to keep")
    keep: float | None = _knob(
        None,
        _unset_or(_number(0, 1)),
        "SP_KEEP_PCT",
        "fraction of tokens to keep (default: 0.3); setting it selects by fraction",
    )
    max_keep: int = _knob(
        2000, _whole(0), "SP_MAX_KEEP", "most tokens to keep, 0 = no limit; keep=1 ignores it"
    )
    chunk: int = _knob(32, _whole(1), "SP_CHUNK", "tokens per chunk")
    chunking: Literal["fixed", "text"] = _knob(
        "text",
        _choice("text", "fixed"),
        None,
        "text ends chunks where lines or sentences end; fixed after every `chunk` tokens",
    )
    halo: bool = _knob(False, _switch(), None, "on: a chunk that peaks at a border brings its neighbor")
    normalizer: Literal["minmax", "clip", "zscore"] = _knob(
        "minmax",
        _choice("minmax", "clip", "zscore"),
        None,
        "clip scales without the outer 1%, zscore by deviation",
    )
    boost_first_mult: float = _knob(
        1.5, _positive(), "SP_BOOST_FIRST_MULT", "first tokens' importance factor"
    )
    boost_first_n: int = _knob(64, _whole(0), "SP_BOOST_FIRST_N", "how many first tokens are boosted")
    boost_last_mult: float = _knob(1.3, _positive(), "SP_BOOST_LAST_MULT", "last tokens' importance factor")
    boost_last_n: int = _knob(128, _whole(0), "SP_BOOST_LAST_N", "how many last tokens are boosted")

    pin_roles: tuple[str, ...] = _knob(
        ("system", "tools", "last_user"),
        _roles(),
        None,
        "parts of a conversation to keep; last_user if short",
    )
    tool_guard: Literal["spans", "strict", "off"] = _knob(
        "spans",
        _choice("spans", "strict", "off"),
        None,
        "spans keeps system and tools whole, strict runs requests with tools dense",
    )

    break_even: bool = _knob(True, _switch(), "SP_BREAK_EVEN", "run dense where the draft would not pay")
    spec_throughput: float = _knob(0.0, _number(0), "SP_SPEC_THROUGHPUT", "draft tokens/s, 0 = automatic")
    break_even_safety: float = _knob(
        1.2, _positive(), "SP_BREAK_EVEN_SAFETY", "by what factor savings must exceed the draft's cost"
    )

    history: Literal["keep", "rescore"] = _knob(
        "keep",
        _choice("keep", "rescore"),
        None,
        "earlier turns stay as they were kept, or are selected anew",
    )
    deadline: float | None = _knob(
        None, _unset_or(_positive()), None, "stop a request after so many seconds (default: never)"
    )

    temperature: float = _knob(0.0, _number(0), None, "0 = greedy")
    top_k: int = _knob(0, _whole(0), None, "sample among the k likeliest tokens, 0 = all")
    top_p: float = _knob(1.0, _positive(1), None, "sample among the likeliest tokens of this probability")
    min_p: float = _knob(0.0, _number(0, 1), None, "drop tokens less likely than this share of the best")
    seed: int | None = _knob(None, _unset_or(_whole(0)), None, "seed of the sampler (default: a fresh one)")
    max_tokens: int = _knob(256, _whole(1), None, "most tokens to generate")

    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def resolve(
        cls,
        flags: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        file: Path | None = None,
    ) -> "Settings":
        """Settings from `flags` (by field name; None = not given), else `environ`, else the TOML `file`.

        Raises:
            SettingError: a bad value, an unknown knob in `flags` or `file`, or a file that is not TOML.
            FileMissing: `file` does not exist or cannot be read.
        """
        given = {**_from_file(file), **_from_environment(environ or {}), **_from_flags(flags or {})}
        values = {name: _read(name, raw, origin) for name, (raw, origin) in given.items()}
        settings = cls(**values, origins={name: origin for name, (_, origin) in given.items()})
        _warn_of_idle_knobs(settings)
        return settings

    def with_defaults(self, values: Mapping[str, object]) -> "Settings":
        """These settings, in which `values` stand in for those that were left at their defaults.

        A fraction to keep does not where something else was said about how much to keep.

        Raises:
            SettingError: a name is not a setting, or a value none that it may have.
        """
        for name in values:
            _check_known(name, "the calibration")
        default = Settings()
        said = {n for n in knobs() if n in self.origins or getattr(self, n) != getattr(default, n)}
        names = set(values) - said
        if said & {"keep", "select_mode", "cumulative_mass"}:
            names.discard("keep")
        read = {name: _read(name, values[name], Origin(name, "the calibration")) for name in names}
        return replace(self, **read)

    def __post_init__(self) -> None:
        for name in knobs():
            value = _read(name, getattr(self, name), self.origins.get(name, Origin(name)))
            object.__setattr__(self, name, value)
        largest = self.draft_context - WINDOW_MARGIN
        if self.window and not SMALLEST_WINDOW <= self.window <= largest:
            origin = self.origins.get("window", Origin("window"))
            raise SettingError(
                f"{origin.holding(self.window)}: window must be 0 (automatic) or from {SMALLEST_WINDOW} "
                f"to {largest} tokens (spec_ctx - {WINDOW_MARGIN}); "
                "for a larger one raise spec_ctx (SP_SPEC_CTX)"
            )

    @property
    def selection(self) -> Literal["mass", "chunk"]:
        """How chunks are selected: as asked for, else `chunk` when a fraction was set, else `mass`."""
        return self.select_mode or ("mass" if self.keep is None else "chunk")

    @property
    def keep_fraction(self) -> float:
        """Fraction of tokens to keep: `keep`, or the guide's 0.3."""
        return 0.3 if self.keep is None else self.keep

    @property
    def scoring(self) -> Literal["continuous", "windows"]:
        """How the draft reads the prompt: in one pass, or by windows once a window or its context is set."""
        return "continuous" if self.window is None and self.spec_ctx is None else "windows"

    @property
    def draft_context(self) -> int:
        """Slots of draft context that an automatic window is made for: `spec_ctx`, or the guide's 8192."""
        return 8192 if self.spec_ctx is None else self.spec_ctx


def knobs() -> dict[str, Knob]:
    """Every knob by its field name, in field order; the command line makes its options from this."""
    return {f.name: f.metadata["knob"] for f in fields(Settings) if "knob" in f.metadata}


Given = dict[str, tuple[Any, Origin]]


def _read(name: str, raw: Any, origin: Origin) -> Any:
    kind = knobs()[name].kind
    try:
        return kind.read(raw)
    except (TypeError, ValueError, OverflowError):
        raise SettingError(f"{origin.holding(raw)}: {name} must be {kind.limits}") from None


def _from_flags(flags: Mapping[str, object]) -> Given:
    given = {name: value for name, value in flags.items() if value is not None}
    for name in given:
        _check_known(name, "the flags")
    return {name: (value, Origin("--" + name.replace("_", "-"))) for name, value in given.items()}


def _from_environment(environ: Mapping[str, str]) -> Given:
    """SP_* variables that are not empty. Other programs may use the prefix: an unknown one only warns."""
    names = {knob.env: name for name, knob in knobs().items() if knob.env}
    given: Given = {}
    for variable, value in environ.items():
        if variable in names and value:
            given[names[variable]] = (value, Origin(variable, "the environment"))
        elif variable.startswith("SP_") and variable not in names:
            logger.warning("%s is not a setting and has no effect%s", variable, _suggestion(variable, names))
    return given


def _from_file(file: Path | None) -> Given:
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileMissing(f"settings file {file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"settings file {file} is not TOML: {error}") from error
    for name in table:
        _check_known(name, str(file))
    return {name: (value, Origin(name, str(file))) for name, value in table.items()}


def _check_known(name: str, place: str) -> None:
    if name not in knobs():
        hint = _suggestion(name, knobs()) or "; known are " + ", ".join(knobs())
        raise SettingError(f"{name} in {place} is not a setting{hint}")


def _suggestion(name: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _warn_of_idle_knobs(settings: Settings) -> None:
    """A knob that was set but cannot act is said aloud, so that nobody tunes it in vain."""
    idle = {}
    if not settings.break_even:
        idle |= dict.fromkeys(("spec_throughput", "break_even_safety"), "break_even is off")
    if settings.selection == "mass" and settings.keep_fraction < 1:
        idle["keep"] = "selection is by mass"
    if settings.selection == "chunk":
        idle["cumulative_mass"] = "selection is by a fixed fraction"
    for name, reason in idle.items():
        if name in settings.origins:
            setting = settings.origins[name].holding(getattr(settings, name))
            logger.warning("%s has no effect: %s", setting, reason)
