"""JAX's own compilation cache: where it is, and whether this process uses it."""

from __future__ import annotations

import jax
from jax.experimental.compilation_cache import compilation_cache


def directory() -> str | None:
    """Where it lies; None where it is off."""
    values = jax.config.values
    return (values["jax_compilation_cache_dir"] or None) if values["jax_enable_compilation_cache"] else None


def turn(on: bool) -> None:
    """Turns it on or off from the next program on."""
    jax.config.update("jax_enable_compilation_cache", on)
    compilation_cache.reset_cache()  # whether it is used was decided by the first program
