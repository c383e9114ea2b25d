"""`specprefill VERB ...`: reads the arguments, runs the verb, turns an error into one line and a status."""

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from specprefill_jax import __version__
from specprefill_jax.cli import (
    calibrate,
    compile,
    devices,
    evaluate,
    plan,
    preflight,
    run,
    score,
    tune,
    verify,
)
from specprefill_jax.errors import (
    CompileError,
    DeviceFailed,
    KernelRefused,
    NotFiniteOutput,
    ScoresUnusable,
    SelfTestFailed,
    SpecPrefillError,
)

FAILED_WHILE_RUNNING = (
    CompileError,
    DeviceFailed,
    KernelRefused,
    NotFiniteOutput,
    ScoresUnusable,
    SelfTestFailed,
)
"""Errors that no change of the command line would have prevented; they exit with 1, all others with 2."""

INTERRUPTED = 130  # what a shell reports after Ctrl-C: 128 + SIGINT
PIPE_CLOSED = 141  # and after a closed pipe: 128 + SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the status for the shell: 0, 1 for a failure while running, 2 for bad input."""
    logging.basicConfig(
        format="specprefill: %(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr, force=True
    )
    logging.addLevelName(logging.WARNING, "warning")
    options = parser().parse_args(arguments)
    try:
        status = options.verb(options)
        sys.stdout.flush()
    except SpecPrefillError as error:
        print(f"specprefill: error: {error}", file=sys.stderr)
        return 1 if isinstance(error, FAILED_WHILE_RUNNING) else 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes standard output once more when it ends, and would complain then.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status


def parser() -> argparse.ArgumentParser:
    """The command line of all verbs."""
    top = argparse.ArgumentParser(
        prog="specprefill",
        description="Speculative prefill for Qwen3.5: a small draft reads the prompt, the large model "
        "prefills only what matters.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"specprefill-jax {__version__}")
    verbs = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for verb in (run, score, evaluate, compile, verify, tune, calibrate, preflight, plan, devices):
        verb.add_parser(verbs)
    return top
