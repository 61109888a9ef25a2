"""AdamW whose step on the CPU is one pass over gradients, parameters and moments, by a native kernel.

XLA writes one array with each loop on the CPU, so it reads gradients and moments twice; elsewhere it has one loop. The
kernel (`core/cpp/adam.isa.cc`) writes parameters and moments in place, and leaves them as they are in a step that is
not good. Clipping is inside: to write clipped gradients would be one array more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vishwamai.core import ffi, sharding
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.training.adam import Moments, bias, kept_where, scale_by_adam
from vishwamai.training.config import OptimizerSection

_HANDLER = "vishwamai_adam"


class AdamW(optax.GradientTransformationExtraArgs):
    """A chain of optax: `scale_by_adam`, decay and factors by parameter, and a learning rate. `one_pass` is the same
    with clipping and the addition to the parameters, for the CPU.
    """

    one_pass: Callable[..., tuple[PyTree, PyTree]]


def adamw(
    section: OptimizerSection,
    grouped: optax.GradientTransformation,
    decay: PyTree,
    factor: PyTree,
    rate: optax.GradientTransformation,
) -> AdamW:
    """The chain and its form for the CPU.

    Args:
      section: section of the configuration.
      grouped: adds `decay` times the parameters to the updates and multiplies by `factor`, trees of floats.
      rate: `optax.scale_by_learning_rate`.
    """
    b1, b2, eps = section.b1, section.b2, section.eps
    chain = optax.chain(scale_by_adam(b1, b2, eps, mu_dtype=jnp.dtype(section.moment_dtype)), grouped, rate)

    def one_pass(
        gradients: PyTree, params: PyTree, state: PyTree, clip: AnyArray, good: AnyArray
    ) -> tuple[PyTree, PyTree]:
        moments, no_state, steps = state
        count = optax.safe_increment(moments.count)
        factor_of_all, after = rate.update(jnp.ones((), jnp.float32), steps)
        corrections = (1 / x for x in bias(b1, b2, count))
        numbers = jnp.stack([jnp.asarray(x, jnp.float32) for x in (clip, *corrections, factor_of_all)])

        def update_parameter(
            g: AnyArray, p: AnyArray, mu: AnyArray, nu: AnyArray, decay: float, factor: float
        ) -> PyTree:
            if not p.size:
                return p, mu, nu
            dims = tuple(f"axis__{i}" for i in range(p.ndim))
            axes = sharding.Axes((dims,) * 4 + (("numbers",), ()), (dims,) * 3, frozenset(dims))
            options: dict[str, Any] = {"b1": b1, "b2": b2, "eps": eps, "decay": decay, "factor": factor}
            attributes: dict[str, Any] = {name: np.float64(value) for name, value in options.items()}

            def call(*arrays: AnyArray) -> tuple[AnyArray, ...]:
                results = tuple(ffi.result(x.shape, x.dtype) for x in arrays[1:4])
                return tuple(ffi.call(_HANDLER, results, *arrays, aliases={1: 0, 2: 1, 3: 2}, **attributes))

            split = sharding.partitioned(call, axes)
            return sharding.follow_explicit_axes(split, axes, g, p, mu, nu, numbers, good)

        triples = jax.tree.map(update_parameter, gradients, params, moments.mu, moments.nu, decay, factor)
        params, mu, nu = jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0, 0)), triples)
        next_moments = Moments(jnp.where(good, count, moments.count), mu, nu)
        return params, (next_moments, no_state, kept_where(good, after, steps))

    rule = AdamW(chain.init, chain.update)
    rule.one_pass = one_pass
    return rule


def why_not(gradients: PyTree, params: PyTree, moments: Moments) -> str | None:
    """The reason why the kernel cannot take a step of these arrays, or None."""
    wide = jax.tree.leaves((gradients, params, moments.nu))
    narrow = jax.tree.leaves(moments.mu)
    others = {x.dtype.name for x in wide} - {"float32"} | {x.dtype.name for x in narrow} - {"float32", "bfloat16"}
    if others:
        return f"an array is {min(others)}; the CPU kernel takes float32, and bfloat16 as the first moment."
    return ffi.why_not(None, _HANDLER)
