"""JAX's settings `numpy_rank_promotion` and `numpy_dtype_promotion`: they are about the caller's arithmetic. The
library's own is written for JAX's defaults, whatever is in force where it is called, differentiated or mapped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from vishwamai.core.types import PyTree

F = TypeVar("F", bound=Callable[..., Any])


def by_default(function: F) -> F:
    """The function under JAX's default promotion.

    >>> import jax.numpy as jnp
    >>> with jax.numpy_rank_promotion("raise"):
    ...     by_default(lambda x: x + jnp.ones(2))(jnp.ones((3, 2))).shape
    (3, 2)
    """

    @functools.wraps(function)
    def run(*arguments: PyTree, **options: PyTree) -> PyTree:
        if are_default():
            return function(*arguments, **options)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*arguments, **options)

    return run  # type: ignore[return-value]


def are_default() -> bool:
    """Whether JAX promotes as it does by default."""
    settings: Any = jax.config  # whose fields its types do not say
    return settings.jax_numpy_rank_promotion == "allow" and settings.jax_numpy_dtype_promotion == "standard"
