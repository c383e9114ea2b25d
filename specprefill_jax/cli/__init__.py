"""The command `specprefill`: one module per verb, each of which calls one room and prints."""

from specprefill_jax.cli.main import main

__all__ = ["main"]
