"""Strictness that every test runs under."""

import os

import pytest
from jaxtyping import install_import_hook

# Read by JAX when it is first imported, so that tests which never touch JAX do not pay for importing it.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Files run side by side (scripts/test). These fixtures take a minute to make and serve several files.
SHARED = ("demo_artifact", "smallest")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs in one process: the tests of a file, and all that use one of the shared fixtures."""
    for item in items:
        used = [name for name in SHARED if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(used[0] if used else item.path.as_posix()))


# The types and array shapes in signatures are checked at every call of the package's functions. As for static
# type checkers, an int is a float too.
install_import_hook("specprefill_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
