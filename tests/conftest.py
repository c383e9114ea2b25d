"""Strictness that every test runs under."""

import os

from jaxtyping import install_import_hook

# Read by JAX when it is first imported, so that tests which never touch JAX do not pay for importing it.
os.environ.setdefault("JAX_NUMPY_DTYPE_PROMOTION", "strict")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# The types and array shapes in signatures are checked at every call of the package's functions. As for static
# type checkers, an int is a float too.
install_import_hook("specprefill_jax", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")
