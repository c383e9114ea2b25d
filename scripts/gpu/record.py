"""What the checks found: written as it comes, read again to go on, and shown at the end."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

Result = Literal["passed", "failed", "not offered"]
COLORS: Mapping[Result, str] = {"passed": "green", "failed": "red", "not offered": "yellow"}


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        result: "not offered" where the device lacks what the check is about. That is no failure, and no pass.
        detail: what was found, in words.
        found: the same in numbers, for the file.
    """

    name: str
    result: Result
    detail: str
    found: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, passed: bool, detail: str, **found: Any) -> Check:
        """Passed or failed."""
        return cls(name, "passed" if passed else "failed", detail, found)


@dataclass
class Step:
    """A step's checks so far; `ended` once it came to its end, well or not."""

    checks: list[Check] = field(default_factory=list)
    seconds: float = 0.0
    ended: bool = False

    @property
    def good(self) -> bool:
        """Whether it need not be run again."""
        return self.ended and all(check.result != "failed" for check in self.checks)


class OtherRun(ValueError):
    """The file is of a run of something else."""


class Record:
    """All steps of a run, kept in a file if there is one, after every check.

    Args:
        about: what the results hold for: those of a file of something else are not taken over.
        resume: whether to go on from what the file holds.

    Raises:
        OtherRun: the file cannot be gone on from.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any], *, resume: bool = False) -> None:
        self._path = path
        self.about = json.loads(json.dumps(about))
        self.steps: dict[str, Step] = {}
        if resume and path is not None and path.is_file():
            self._read(path)

    def begin(self, name: str) -> None:
        """What an earlier run of the step found is forgotten."""
        self.steps[name] = Step()
        self._write()

    def add(self, name: str, check: Check) -> None:
        """Keep a check of the step."""
        self.steps[name].checks.append(check)
        self._write()

    def end(self, name: str, seconds: float) -> None:
        """The step is over."""
        self.steps[name].seconds, self.steps[name].ended = round(seconds, 1), True
        self._write()

    def rows(self) -> Iterator[tuple[str, Check]]:
        """Every check with its step."""
        for name, step in self.steps.items():
            for check in step.checks:
                yield name, check

    @property
    def status(self) -> int:
        """For the shell: 1 if anything failed."""
        return int(any(check.result == "failed" for _, check in self.rows()))

    def _read(self, path: Path) -> None:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            about = document["about"]
            steps = {
                name: Step([Check(**check) for check in step["checks"]], step["seconds"], step["ended"])
                for name, step in document["steps"].items()
            }
        except (ValueError, KeyError, TypeError) as error:
            raise OtherRun(f"{path} holds no results that can be gone on from: {error}") from error
        if about != self.about:
            changed = sorted(key for key in {*about, *self.about} if about.get(key) != self.about.get(key))
            raise OtherRun(f"{path} holds results for another {', '.join(changed)}; name another file")
        self.steps = steps

    def _write(self) -> None:
        """As a whole and then moved: a run that is killed leaves the last complete file."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_name(f".{self._path.name}-part")
        steps = {name: asdict(step) for name, step in self.steps.items()}
        part.write_text(json.dumps({"about": self.about, "steps": steps}, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._path)


def table(record: Record, title: str) -> Table:
    """One row per check."""
    shown = Table(title=title)
    for header in ("step", "check", "result", "found"):
        shown.add_column(header, no_wrap=header == "step")
    for step, check in record.rows():
        shown.add_row(
            step, escape(check.name), f"[{COLORS[check.result]}]{check.result}[/]", escape(check.detail)
        )
    return shown


def totals(record: Record) -> str:
    """How many checks came out how."""
    results = [check.result for _, check in record.rows()]
    return ", ".join(f"{results.count(result)} {result}" for result in COLORS)


def markdown(record: Record, title: str, facts: Mapping[str, str]) -> str:
    """The same for a page of docs/: what was checked on what, and when."""
    lines = [f"## {title}", "", *(f"- {name}: {value}" for name, value in facts.items())]
    lines += [f"- {totals(record)}", "", "| step | check | result | found |", "|---|---|---|---|"]
    for step, check in record.rows():
        cells = (step, check.name, check.result, check.detail)
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join([*lines, ""])
