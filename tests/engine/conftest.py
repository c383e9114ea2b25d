"""Engines on the demo pair, loaded once for all tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specprefill_jax.engine import Engine
from specprefill_jax.errors import DeviceFailed


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def demo(demo_of: Callable[[str], Path]) -> Path:
    """An artifact of the pair for the CPU."""
    return demo_of("cpu-portable")


@pytest.fixture(scope="session")
def engine(demo: Path) -> Engine:
    return Engine.load(demo)


@pytest.fixture(scope="session")
def vulkan_engine(demo_of: Callable[[str], Path]) -> Engine:
    """The pair on Vulkan."""
    directory = demo_of("vulkan")
    # Lavapipe of Mesa 22.3.6 loses its device now and then while parameters are loaded (tests/aot/child.py).
    for _ in range(2):
        try:
            return Engine.load(directory, "vulkan")
        except DeviceFailed as error:
            print(f"once more: {error}")
    return Engine.load(directory, "vulkan")
