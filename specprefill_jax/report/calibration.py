"""What a calibration found: heads, retention, and what is used from now on."""

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from specprefill_jax.quality.calibration import KEEPS, Found

SHOWN_HEADS = 8
"""Heads in the table, the best ones; a draft may have dozens."""


def calibration_report(found: Found) -> Group:
    """The tables of `specprefill calibrate`."""
    return Group(_heads(found), Text(), _retention(found), Text(), *_verdict(found))


def _heads(found: Found) -> Table:
    table = Table(
        title=f"heads alone, mean over {KEEPS[0]:.0%} to {KEEPS[-1]:.0%} kept",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title_style="bold",
    )
    table.add_column("layer.head")
    table.add_column("kept whole", justify="right")
    for head, share in found.heads[:SHOWN_HEADS]:
        table.add_row(f"{head.layer}.{head.head}", f"{share:.0%}")
    if len(found.heads) > SHOWN_HEADS:
        table.add_row(
            f"and {len(found.heads) - SHOWN_HEADS} more", f"at most {found.heads[SHOWN_HEADS][1]:.0%}"
        )
    return table


def _retention(found: Found) -> Table:
    prompts = found.calibration.prompts
    table = Table(
        title=f"kept whole, of {prompts} prompts put aside",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        title_style="bold",
    )
    for heading in ("keep", "chosen", "default", "guide's rule"):
        table.add_column(heading, justify="right")
    for row in found.retention:
        shares = (row.chosen, row.default, row.plain)
        table.add_row(f"{row.keep:g}", *(f"{share:.0%}" for share in shares))
    return table


def _verdict(found: Found) -> list[Text]:
    calibration = found.calibration
    settings = ", ".join(f"{name}={_shown(value)}" for name, value in calibration.settings.items())
    interval = f"{calibration.retention:.1%} ({100 * calibration.lower:.1f} to {100 * calibration.upper:.1f})"
    lines = [
        Text(f"chosen: {settings}"),
        Text(f"the heads that count lie in the first {calibration.depth} of the draft's attention layers"),
        Text(f"which keeps whole {interval}; wanted were {calibration.wanted:.1%}"),
    ]
    if calibration.reached:
        return lines
    return [
        *lines,
        Text(
            "The draft does not reach that: in mode auto prompts are read densely, with status "
            "skipped_calibration. Try a better draft, or a lower --retention",
            "yellow",
        ),
    ]


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
