"""JAX's classes of equations and variables. JAX types a variable's `aval` without shape and dtype, so that a type
checker takes these for `Any`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Atom = Any
    JaxprEqn = Any
    Literal = Any
    Var = Any
else:
    from jax.extend.core import JaxprEqn, Literal, Var

    Atom = Var | Literal

__all__ = ["Atom", "JaxprEqn", "Literal", "Var"]
