"""Runs commands in this process, on the fake engine, with nothing of the user's environment."""

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from specprefill_jax.cli import main
from tests.engine.fake import Fake, make


class Ran(NamedTuple):
    """What a command left behind."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The engine that `run` and `score` will load, whatever artifact is asked for."""
    made = make()
    for verb in ("run", "score"):
        monkeypatch.setattr(f"specprefill_jax.cli.{verb}.load_engine", lambda *_, **__: made.engine)
    return made


@pytest.fixture
def specprefill(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run `specprefill ARGUMENTS` with `stdin` as standard input."""

    def run(*arguments: str, stdin: bytes | None = None) -> Ran:
        if stdin is not None:
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()
        try:
            status = main(arguments)
        except SystemExit as end:  # how argparse ends
            status = int(end.code or 0)
        captured = capsys.readouterr()
        return Ran(status, str(captured.out), str(captured.err))

    return run
