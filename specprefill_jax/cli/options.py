"""What the verbs that read a prompt have in common: the prompt, the artifact, and the settings."""

import argparse
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from specprefill_jax.chat import ask_about
from specprefill_jax.engine import PromptOptions
from specprefill_jax.errors import EmptyPrompt, FileMissing, SettingError
from specprefill_jax.pins import Pins
from specprefill_jax.settings import Settings, knobs

Name = TypeVar("Name", bound=str)

USAGE = "specprefill {} [OPTIONS] [PROMPT]"

SCORING = ("lookahead", "spec_ctx", "window", "pool")
SCORER = ("queries", "pooling", "per_head", "across", "sinks", "heads")
KEEPING = ("select_mode", "cumulative_mass", "keep", "max_keep", "pin_roles")
RANKING = (
    "chunk",
    "chunking",
    "halo",
    "normalizer",
    "boost_first_mult",
    "boost_first_n",
    "boost_last_mult",
    "boost_last_n",
)
SELECTING = (*KEEPING, *RANKING)
AUTO = ("minimum_tokens", "break_even")
THRESHOLDS = ("mode", *AUTO, "calibration", "tool_guard", "memory")
ANSWERING = ("max_tokens", "deadline", "temperature", "top_k", "top_p", "min_p", "seed")
DRAWING = ("top_k", "top_p", "min_p", "seed")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The options that say what is read, and with what."""
    parser.add_argument("prompt", nargs="?", help="the prompt, or the question about FILE")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the prompt from FILE (-: standard input)")
    parser.add_argument("--raw", action="store_true", help="no chat template: the text as it is")
    parser.add_argument("--prefix", default="", metavar="TEXT", help="begin the answer with TEXT")
    parser.add_argument(
        "--pin",
        action="append",
        default=[],
        metavar="TEXT",
        help="keep TEXT wherever it stands (may be given again)",
    )
    parser.add_argument("--artifact", metavar="NAME", help="a compiled artifact (default: the demo pair)")
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="default: the artifact's; cpu for the demo pair",
    )
    parser.add_argument("--skip-self-test", action="store_true", help="load without testing the models")
    parser.add_argument("--settings", type=Path, metavar="FILE", help="settings from a TOML file")


def add_knobs(
    parser: argparse.ArgumentParser, title: str, names: Iterable[str], *, hidden: Iterable[str] = ()
) -> None:
    """An option per setting. Its value is read by `Settings`, which knows the limits.

    Those `hidden` are understood as well, but the help leaves them out.
    """
    group = parser.add_argument_group(title)
    for name in hidden:
        parser.add_argument("--" + name.replace("_", "-"), dest=name, help=argparse.SUPPRESS)
    for name in names:
        knob = knobs()[name]
        words = knob.help.replace("%", "%%") + (f" [{knob.env}]" if knob.env else "")
        choices = knob.kind.limits.partition("one of ")[2].replace(", ", "|")
        group.add_argument("--" + name.replace("_", "-"), dest=name, metavar=choices or "X", help=words)


def read_settings(options: argparse.Namespace) -> Settings:
    """Settings from the command line, the environment and the file that it names.

    Raises:
        SettingError: a value is bad, or an option of this command line cannot act.
        FileMissing: the settings file does not exist.
    """
    flags = {name: value for name, value in vars(options).items() if name in knobs() and value is not None}
    settings = Settings.resolve(flags, os.environ, options.settings)
    dense = "mode" in vars(options) and settings.mode == "dense"  # a verb without modes always runs the draft
    for names, idle, reason in (
        (
            (*SCORING, *SCORER, *SELECTING, "calibration"),
            dense,
            "in mode dense, where the draft is not run",
        ),
        (("pooling",), settings.pool <= 1, f"with pool={settings.pool}, where nothing is pooled"),
        (AUTO, settings.mode != "auto", f"in mode {settings.mode}, which has no thresholds"),
        (("cumulative_mass",), settings.selection == "chunk", "when a fixed fraction is kept"),
        (("keep",), settings.selection == "mass" and settings.keep_fraction < 1, "when selection is by mass"),
        (DRAWING, settings.temperature == 0, "at temperature 0, where the likeliest token is taken"),
    ):
        for name in flags:
            if idle and name in names:
                raise SettingError(f"--{name.replace('_', '-')} has no effect {reason}; leave it out")
    return settings


def read_names(
    flag: str, given: str | None, known: Iterable[Name], default: tuple[Name, ...]
) -> tuple[Name, ...]:
    """Names separated by commas, each once; the default where nothing was given.

    Raises:
        SettingError: one of them is not known.
    """
    if given is None:
        return default
    by_name = {str(name): name for name in known}
    asked = dict.fromkeys(name.strip() for name in given.split(","))
    if not asked.keys() <= by_name.keys():
        raise SettingError(
            f"--{flag}={given}: {flag} must be names separated by commas, of {', '.join(by_name)}"
        )
    return tuple(by_name[name] for name in asked)


def prompt_options(options: argparse.Namespace) -> PromptOptions:
    """How the prompt is to be read."""
    pins = Pins(texts=tuple(options.pin))
    return {"raw": options.raw, "prefix": options.prefix, "pins": pins}


def read_prompt(options: argparse.Namespace) -> str:
    """The text to read: the argument, a file, standard input, or a file and the question about it.

    Raises:
        FileMissing: the file cannot be read.
        SettingError: it is not text.
        EmptyPrompt: there is none.
    """
    if options.file is None and options.prompt is not None:
        return options.prompt
    if options.file is None and sys.stdin.isatty():
        raise EmptyPrompt("no prompt: give it as an argument, in a file (-f FILE), or on standard input")
    text = _read(options.file)
    if not text.strip():
        raise EmptyPrompt(f"{_named(options.file)} is empty; give at least one word")
    return text if options.prompt is None else ask_about(text, options.prompt)


def _read(file: str | None) -> str:
    try:
        if file is None or file == "-":
            return sys.stdin.buffer.read().decode()
        return Path(file).read_bytes().decode()
    except OSError as error:
        raise FileMissing(f"{_named(file)} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingError(f"{_named(file)} is not UTF-8 text: {error}") from error


def _named(file: str | None) -> str:
    return "standard input" if file is None or file == "-" else file
