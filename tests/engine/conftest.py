"""The demo pair, compiled for the CPU once for all tests."""

from pathlib import Path

import pytest

from specprefill_jax.cli.compile import compile_demo
from specprefill_jax.engine import Engine


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact that `specprefill run` compiles on first use."""
    directory = tmp_path_factory.mktemp("demo") / "cpu"
    compile_demo("cpu", directory, print)
    return directory


@pytest.fixture(scope="session")
def engine(demo: Path) -> Engine:
    return Engine.load(demo, "cpu")
