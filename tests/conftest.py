"""Strictness that every test runs under, and the artifacts that more than one folder of them uses."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Read by JAX when it is first imported, so that tests which never touch JAX do not pay for importing it.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The types and array shapes in signatures are checked at every call of the package's functions. As for static
# type checkers, an int is a float too.
install_import_hook("specprefill_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")


@pytest.fixture(scope="session")
def demo_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The demo pair compiled for a device of `tests.demo_builds.SHAPES`; not to be changed."""

    @cache
    def build(device: str) -> Path:
        from tests.demo_builds import build_demo  # with it comes JAX

        return build_demo(device, tmp_path_factory.mktemp("demo") / device)

    return build
