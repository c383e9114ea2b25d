"""Strictness that every test runs under, and the artifacts that more than one folder of them uses."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping import install_import_hook

if TYPE_CHECKING:
    from tests.demo_builds import Builds

# Read by JAX when it is first imported, so that tests which never touch JAX do not pay for importing it.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The types and array shapes in signatures are checked at every call of the package's functions. As for static
# type checkers, an int is a float too.
install_import_hook("specprefill_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@pytest.fixture(scope="session")
def demo_builds(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Builds]":
    """Builds of the demo pair, which several folders of tests share."""
    from tests.demo_builds import Builds  # with it comes JAX

    builds = Builds(tmp_path_factory.mktemp("demo"))
    yield builds
    builds.end()


@pytest.fixture(scope="session")
def demo_of(demo_builds: "Builds") -> Callable[[str], Path]:
    """The demo pair compiled for a device of `tests.demo_builds.SHAPES`; not to be changed."""
    return lambda device: demo_builds.begin(device).result()
