"""The target GPU's own compiler, in a process of its own: kernels in, statistics and disassembly out."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specprefill_jax.aot.executables import Executable
from specprefill_jax.errors import KernelRefused
from specprefill_jax.preflight.gpu import Gpu
from specprefill_jax.preflight.kernel import Statistics
from specprefill_jax.preflight.mesa import Installed, installed_driver, radv

_CHILD = Path(__file__).with_name("child.py")
_START_LIMIT_S = 60
LIMIT_S = 600  # for all kernels of a module; a true one takes two seconds


@dataclass(frozen=True)
class Compiled:
    """What the driver makes of a kernel: lanes of its waves, its numbers, its disassembly."""

    subgroup: int
    statistics: Statistics
    assembly: str


class Driver:
    """A driver that plays a GPU.

    Attributes:
        version: what it calls itself, such as "Mesa 25.0.7-2+deb13u1".
    """

    def __init__(self, gpu: Gpu, say: Callable[[str], None]) -> None:
        """Find it, or download it.

        Raises:
            DeviceError: there is none (see `mesa.installed_driver`).
        """
        self._installed, self.version = installed_driver(
            radv(gpu.family), lambda installed: driver_version(installed, "radv"), say
        )

    def compile(
        self, kernels: Sequence[Executable], name: str, *, limit_s: float = LIMIT_S
    ) -> dict[str, Compiled]:
        """Every kernel of a module through the driver, by name; one process for all.

        Raises:
            KernelRefused: the driver refuses a kernel, crashes on it or does not end; names it, and `name`.
        """
        answers, end = _answers(self._installed, kernels, limit_s)
        compiled = {
            kernel.name: _compiled(answer, kernel, name)
            for kernel, answer in zip(kernels, answers, strict=False)
        }
        if len(answers) < len(kernels):
            raise KernelRefused(
                f"{name}: the driver ({self.version}) {end} while it compiles {kernels[len(answers)].name}"
            )
        return compiled


def driver_version(installed: Installed, name: str) -> tuple[str, str]:
    """What a driver of that name calls itself; or "" where it does not start or is another one, and why."""
    lines, end = _lines(installed, "", _START_LIMIT_S)
    if not lines:
        return "", end
    return str(lines[0]["version"]) if lines[0]["driver"] == name else "", f"it is {lines[0]['driver']}"


def _answers(
    installed: Installed, kernels: Sequence[Executable], limit_s: float
) -> tuple[list[dict[str, Any]], str]:
    """The answers to the kernels, as many as came, and how the process ended."""
    asked = "".join(json.dumps(_asked(kernel)) + "\n" for kernel in kernels)
    lines, end = _lines(installed, asked, limit_s)
    return lines[1:], end


def _asked(kernel: Executable) -> dict[str, Any]:
    return {
        "name": kernel.name,
        "spirv": base64.b64encode(kernel.spirv).decode(),
        "subgroup": kernel.subgroup,
        "bindings": kernel.bindings,
        "constants": kernel.constants,
        "specialization": list(kernel.specialization.items()),
    }


def _lines(installed: Installed, asked: str, limit_s: float) -> tuple[list[dict[str, Any]], str]:
    """The lines that the process prints until it ends, and how it ends, in words."""
    process = subprocess.Popen(
        [*installed.command, "-P", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=dict(installed.environment),
    )
    try:
        printed, complaint = process.communicate(asked, timeout=limit_s)
        words = complaint.strip().splitlines()[-1:] or [""]
        end = f"ends with {process.returncode} ({words[0]})"
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        end = f"does not end within {limit_s} s"
    whole = printed[: printed.rfind("\n") + 1]
    return [json.loads(line) for line in whole.splitlines()], end


def _compiled(answer: Mapping[str, Any], kernel: Executable, name: str) -> Compiled:
    if "error" in answer:
        raise KernelRefused(f"{name}: the driver refuses {kernel.name}: {answer['error']}")
    numbers = answer["statistics"]
    statistics = Statistics(
        vgprs=numbers["VGPRs"],
        sgprs=numbers["SGPRs"],
        spilled_vgprs=numbers["Spilled VGPRs"],
        spilled_sgprs=numbers["Spilled SGPRs"],
        scratch=numbers["Scratch size"],
        lds=numbers["LDS size"],
        instructions=numbers["Instructions"],
    )
    return Compiled(answer["subgroup"], statistics, answer["assembly"])
