"""`specprefill run`: answers a prompt."""

import argparse
import json
import sys

from rich.console import Console

from specprefill_jax.cli import options
from specprefill_jax.cli.load import load_engine
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.engine import Result
from specprefill_jax.report.terminal import phases_table, summary


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "run",
        help="answer a prompt",
        description="Answer a prompt.",
        usage=options.USAGE.format("run"),
        allow_abbrev=False,
    )
    options.add_prompt(parser)
    parser.add_argument("--json", action="store_true", help="print text, tokens, usage and timings as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="status and phases on standard error")
    options.add_knobs(parser, "answer", options.ANSWERING)
    options.add_knobs(parser, "whether to prefill sparsely", options.THRESHOLDS)
    options.add_knobs(parser, "how the draft scores tokens", options.SCORING, hidden=options.SCORER)
    options.add_knobs(
        parser,
        "what is kept (more settings of both: specprefill score --help)",
        options.KEEPING,
        hidden=options.RANKING,
    )
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer as it comes, or all at once as JSON."""
    settings = options.read_settings(arguments)
    prompt = options.read_prompt(arguments)
    result = None
    with Waiting() as waiting:
        engine = load_engine(
            arguments.artifact, arguments.device, waiting, self_test=not arguments.skip_self_test
        )
        answer = engine.stream(prompt, settings, watch=waiting, **options.prompt_options(arguments))
        for part in answer:
            if isinstance(part, Result):
                result = part
            elif not arguments.json:
                waiting.end()
                print(part, end="", flush=True)
    assert result is not None, "an answer ends in its result"
    print(json.dumps(result.to_json(), ensure_ascii=False) if arguments.json else "")
    if arguments.verbose:
        console = Console(file=sys.stderr)
        console.print(summary(result.timings))
        console.print(phases_table(result.timings.phases))
    return 0
