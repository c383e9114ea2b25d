"""Speculative prefill for Qwen3.5: a small draft reads the prompt, the target prefills only what matters.

Names are loaded when they are first used: importing this package costs nothing and needs neither JAX, nor
a compiler, nor a device.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specprefill_jax.engine import Engine
    from specprefill_jax.errors import SpecPrefillError
    from specprefill_jax.settings import Settings

__all__ = ["Engine", "Settings", "SpecPrefillError", "__version__"]

__version__ = "0.1.0"

_HOMES = {
    "Engine": "specprefill_jax.engine",
    "Settings": "specprefill_jax.settings",
    "SpecPrefillError": "specprefill_jax.errors",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
