"""`specprefill preflight` where it is not installed; tests/preflight runs it."""

from pathlib import Path

import pytest

from specprefill_jax.cli import compile
from tests.cli.conftest import Run


def test_without_its_library_it_names_the_extra(specprefill: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_installed", lambda name: name != "vulkan")
    ran = specprefill("preflight", "artifact")
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        "specprefill: error: preflight needs vulkan, and only serving is installed here: "
        'pip install "specprefill-jax[preflight]"\n'
    )
    assert list(Path().iterdir()) == []
