"""iree-compile as a child process with a time limit.

Some programs make a target's code generator run forever.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iree.compiler.tools import binaries

from specprefill_jax.artifact.locate import embedded
from specprefill_jax.errors import CompileError

TIME_LIMIT_S = 1800
# IREE 3.13 makes its reductions for subgroups of the target's smallest size and lets the driver choose: RADV
# then takes 64 lanes where 32 were meant, and a sum has the terms of two. So they are told to ask for it.
_CONFIGURED = "executable-configurations"
_REDUCTION = re.compile(r"(spirv_pipeline<SubgroupReduce> workgroup_size = \[[\d, ]*\])(?! subgroup_size)")
_WITHOUT_CONSTANTS = "--mlir-elide-elementsattrs-if-larger=16"  # of printed text only
# A loop as such, or the branches that it is lowered to.
_LOOP = re.compile(r"\b(?:scf\.(?:for|while|forall)|cf\.(?:br|cond_br|switch))\b")


def compile_module(
    text: str,
    flags: Sequence[str],
    name: str,
    *,
    subgroup: int | None = None,
    phases: Path | None = None,
    time_limit_s: int = TIME_LIMIT_S,
) -> bytes:
    """The module's bytes, unaudited (see `audit.py`). Through stdin: they do not depend on a file's name.

    Args:
        subgroup: lanes of a subgroup, which shaders that reduce over them then ask the driver for. None: they
            ask for nothing.
        phases: a folder that the program is written to as it stands after each phase of the compiler, large
            constants left out (see `schedule.py`). The module's bytes stay the same.

    Raises:
        CompileError: the compiler refuses the program, or does not end within the limit; names `name`.
    """
    if subgroup is not None:
        configured = _run(text, (*flags, f"--compile-to={_CONFIGURED}"), name, time_limit_s).decode()
        text = _REDUCTION.sub(rf"\1 subgroup_size = {subgroup}", configured)
        flags = (*flags, f"--compile-from={_CONFIGURED}")
    printing = (_WITHOUT_CONSTANTS, f"--dump-compilation-phases-to={phases}") if phases is not None else ()
    return _run(text, flags, name, time_limit_s, printing)


@dataclass(frozen=True)
class Commands:
    """What one call of an entry submits to the device.

    Attributes:
        dispatches: kernels.
        copies: transfers between device buffers.
        submissions: command buffers given to the device's queue.
        staging: copies through a host buffer.
        waits: times the host waits for the device.
        loops: loops on the host.
    """

    dispatches: int
    copies: int
    submissions: int
    staging: int
    waits: int
    loops: int = 0


def count_commands(text: str, flags: Sequence[str], name: str) -> dict[str, Commands]:
    """Commands per entry, counted in the scheduled program (iree-compile --compile-to=stream).

    Raises: as `compile_module`.
    """
    scheduled = _run(text, [*flags, "--compile-to=stream"], name, TIME_LIMIT_S).decode()
    counts = {}
    for function in re.split(r"\n  (?=util\.func|util\.initializer|stream\.executable)", scheduled):
        head = re.match(r"util\.func public @([\w$]+)\(", function)
        if head is None:
            continue
        counts[head.group(1)] = Commands(
            dispatches=function.count("stream.cmd.dispatch "),
            copies=function.count("stream.cmd.copy "),
            submissions=function.count("stream.cmd.execute "),
            staging=len(re.findall(r"!stream\.resource<staging>", function)),
            # The last wait hands the results to a caller that is synchronous.
            waits=function.count("stream.timepoint.await ") - 1,
            loops=len(_LOOP.findall(function)),
        )
    return counts


def _run(
    text: str, flags: Sequence[str], name: str, time_limit_s: int, printing: Sequence[str] = ()
) -> bytes:
    tool = binaries.find_tool("iree-compile")
    command = [tool, "-", "-o", "-", "--iree-input-type=stablehlo", *flags, *printing]
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            capture_output=True,
            timeout=time_limit_s,
            cwd=embedded("compile"),  # flags name files relative to it: no result depends on where it lies
        )
    except subprocess.TimeoutExpired as error:
        raise CompileError(
            f"{name}: the compiler did not end within {time_limit_s} s; {_with(flags)}. "
            "Other `blocks` or `capacities` in the recipe may help"
        ) from error
    said = done.stderr.decode(errors="replace")
    faults = re.findall(r"error: (.*)", said)
    # IREE 3.13 reports a tuning that it cannot read as an error, goes on without it, and exits with 0.
    if done.returncode != 0 or faults:
        first = " / ".join(fault[:200] for fault in faults[:2]) or said[-400:]
        raise CompileError(f"{name}: the compiler refused the program ({_with(flags)}): {first}")
    return done.stdout


def _with(flags: Sequence[str]) -> str:
    return "flags " + " ".join(flags)
