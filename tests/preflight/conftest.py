"""The real driver and the real demo pair, once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from specprefill_jax.preflight.driver import Driver
from specprefill_jax.preflight.preflight import preflight
from specprefill_jax.preflight.report import Report
from tests.preflight.sample import GPU


@pytest.fixture(scope="session")
def driver() -> Driver:
    """RADV's null device. Mesa is downloaded into the user's cache where it is not there, as by the verb."""
    return Driver(GPU, print)


@pytest.fixture(scope="session")
def demo(demo_of: Callable[[str], Path]) -> Path:
    """The demo pair compiled for the Radeon, in f16."""
    return demo_of(GPU.name)


@pytest.fixture(scope="session")
def report(demo: Path) -> Report:
    """What preflight finds in the demo pair, and for a prompt of 1,000 tokens."""
    return preflight(demo, GPU.name, 1000, print)
