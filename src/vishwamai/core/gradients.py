"""Gradients of pure-JAX functions over an op's operands; some are absent or integers."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vishwamai.core.call_plan import FORWARD, with_arguments
from vishwamai.core.types import AnyArray, PyTree


def is_float(x: AnyArray) -> bool:
    """Whether an array has a gradient."""
    return jnp.issubdtype(x.dtype, jnp.floating)


def map_fields(function: Callable[[PyTree], PyTree], operands: PyTree) -> PyTree:
    """Applies `function` to every operand that is there."""
    return type(operands)(*(None if x is None else function(x) for x in operands))


def autodiff_backward(forward: Callable[..., tuple[PyTree, PyTree]]) -> Callable[..., PyTree]:
    """The backward of a pure-JAX `forward`, by JAX's own differentiation."""
    forward = with_arguments(forward, FORWARD)

    def backward(spec: object, config: object, operands: PyTree, cotangents: PyTree) -> PyTree:
        differentiable = map_fields(lambda x: x if is_float(x) else None, operands)
        rest = map_fields(lambda x: None if is_float(x) else x, operands)

        def run(chosen: PyTree) -> PyTree:
            merged = type(operands)(*(r if c is None else c for c, r in zip(chosen, rest, strict=True)))
            return forward(spec, config, merged, False)[0]

        return jax.vjp(run, differentiable)[1](cotangents)[0]

    return backward
