"""Shows what `specprefill run --json` printed: answer, status and a table of phases; checks the answer."""

import argparse
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from specprefill_jax.report.terminal import phases_table


def main() -> int:
    """0 for the expected answer by way of sparse prefill, 1 for anything else."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path, help="what `specprefill run --json` printed")
    parser.add_argument("--question", required=True)
    parser.add_argument("--prefix", required=True, help="what the answer began with")
    parser.add_argument("--expect", required=True, help="a word of the right answer")
    arguments = parser.parse_args()

    result = json.loads(arguments.result.read_text())
    status = result["timings"]["specprefill"]
    answer = result["text"]
    console = Console()
    console.print(Text.assemble(("question  ", "bold"), arguments.question))
    console.print(Text.assemble(("answer    ", "bold"), arguments.prefix, (answer, "bold green")))
    detail = result["timings"]["specprefill_detail"]
    share = detail["kept"] / detail["prompt"]
    console.print(Text.assemble(("status    ", "bold"), status))
    console.print(
        Text.assemble(("kept      ", "bold"), f"{detail['kept']} of {detail['prompt']} tokens ({share:.0%})")
    )
    console.print(phases_table(detail["phases"]))

    right = arguments.expect in re.findall(r"\w+", answer)
    if not right:
        print(f"wrong answer: expected {arguments.expect!r}, got {answer!r}", file=sys.stderr)
    if status != "active":
        print(f"the prompt was not prefilled sparsely: status {status!r}", file=sys.stderr)
    return 0 if right and status == "active" else 1


if __name__ == "__main__":
    sys.exit(main())
