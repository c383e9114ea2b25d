"""`specprefill preflight`: an artifact's kernels through the compiler of the GPU that it is for."""

import argparse
import json

from specprefill_jax.artifact.locate import find_artifact
from specprefill_jax.cli.compile import require_libraries
from specprefill_jax.cli.progress import Waiting
from specprefill_jax.errors import PreflightMissing, SettingError

LIBRARIES = ("vulkan", "jax", "ml_dtypes")
SHOWN = 12  # kernels of each entry


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command line of this verb."""
    parser = verbs.add_parser(
        "preflight",
        help="check an artifact's kernels with the GPU's own compiler, without the GPU",
        description="Compile every kernel of an artifact with the driver of the GPU that it is for, on any "
        "Linux machine, and report what the driver makes of them. Fails on kernels that would compute wrong "
        "numbers or run badly. Predicted times rank kernels, they promise nothing: docs/radeon-780m.md.",
        allow_abbrev=False,
    )
    parser.add_argument("artifact", metavar="ARTIFACT", help="an artifact's directory, or its name")
    parser.add_argument("--gpu", default="radeon-780m", metavar="NAME", help="the GPU (default: radeon-780m)")
    parser.add_argument("--tokens", type=int, metavar="N", help="also sum up a prompt of N tokens")
    parser.add_argument(
        "--kernels", type=int, default=SHOWN, metavar="N", help=f"of each entry, 0: all (default: {SHOWN})"
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.set_defaults(verb=run)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print what was found; 1 where a check fails."""
    for name, least in (("tokens", 1), ("kernels", 0)):
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise SettingError(f"--{name} {value}: a whole number of at least {least}, please")
    require_libraries(LIBRARIES, PreflightMissing, "preflight", "preflight")
    from specprefill_jax.cli.kernels import show
    from specprefill_jax.preflight.preflight import preflight

    with Waiting() as waiting:
        report = preflight(find_artifact(arguments.artifact), arguments.gpu, arguments.tokens, waiting.say)
    if arguments.json:
        print(json.dumps(report.to_json(), ensure_ascii=False))
    else:
        show(report, arguments.kernels)
    return 1 if report.failed else 0
