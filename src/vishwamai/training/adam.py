"""Adam whose moments are written in place, with the guard of the step inside.

Kingma & Ba, "Adam" (2015), by the formulas of `optax.scale_by_adam`. There, the new parameters are computed from
the old moments, so XLA on the CPU copies every moment before it overwrites it. Here they come from the new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class Moments(NamedTuple):
    """State of `scale_by_adam`: steps taken, and the two moments. A step that is not good leaves it as it is."""

    count: jax.Array
    mu: PyTree
    nu: PyTree


def scale_by_adam(
    b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8, mu_dtype: DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """As `optax.scale_by_adam`; `update` takes `good`, and where it is false, gives zeros and the state as it was.

    Args:
      b1, b2: decay of the moments.
      eps: added to the root of the second.
      mu_dtype: dtype of the first moment; None for that of the parameters.

    >>> optimizer = scale_by_adam()
    >>> state = optimizer.init({"w": jnp.ones(2)})
    >>> updates, after = optimizer.update({"w": jnp.full(2, 0.5)}, state, good=jnp.bool_(True))
    >>> updates["w"].round(3).tolist(), int(after.count)
    ([1.0, 1.0], 1)
    >>> updates, after = optimizer.update({"w": jnp.full(2, jnp.nan)}, after, good=jnp.bool_(False))
    >>> updates["w"].tolist(), after.mu["w"].round(3).tolist(), int(after.count)
    ([0.0, 0.0], [0.05, 0.05], 1)
    """

    def init(params: PyTree) -> Moments:
        mu = jax.tree.map(lambda p: jnp.zeros(p.shape, mu_dtype or p.dtype), params)
        return Moments(jnp.zeros((), jnp.int32), mu, jax.tree.map(jnp.zeros_like, params))

    def update(
        updates: PyTree, state: PyTree, params: PyTree = None, *, good: bool | jax.Array = True, **_: object
    ) -> tuple[PyTree, Moments]:
        del params
        good = jnp.asarray(good)
        count = optax.safe_increment(state.count)
        first, second = bias(b1, b2, count)

        def moments_of(g: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            # Where `mu` is bfloat16, optax rounds `b1` and the product to it: 0.9 becomes 0.8984.
            new_mu = (1 - b1) * g + b1 * mu.astype(g.dtype)
            new_nu = (1 - b2) * jnp.square(g) + b2 * nu
            kept_mu = jnp.where(good, new_mu.astype(mu.dtype), mu)
            kept_nu = jnp.where(good, new_nu.astype(nu.dtype), nu)
            # Of moments that are stored rounded, the direction is that of the exact ones.
            near_mu = kept_mu if kept_mu.dtype == new_mu.dtype else new_mu
            near_nu = kept_nu if kept_nu.dtype == new_nu.dtype else new_nu
            direction = _direction(good, near_mu, near_nu, first.astype(g.dtype), second.astype(g.dtype), eps)
            return direction, kept_mu, kept_nu

        triples = jax.tree.map(moments_of, updates, state.mu, state.nu)
        direction, mu, nu = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), triples)
        return direction, Moments(jnp.where(good, count, state.count), mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def bias(b1: float, b2: float, count: AnyArray) -> tuple[AnyArray, AnyArray]:
    """What both moments are divided by after `count` steps, because they start at 0."""
    return 1 - jnp.asarray(b1, jnp.float32) ** count, 1 - jnp.asarray(b2, jnp.float32) ** count


def _direction(
    good: jax.Array, mu: jax.Array, nu: jax.Array, first: jax.Array, second: jax.Array, eps: float
) -> jax.Array:
    """The moments without their bias, one by the root of the other.

    XLA on the CPU would compute the moments once more in the loop that reads them, from the old ones, and keep a copy
    of those for it. A barrier makes it read the new ones, in the loop that writes the parameters. Elsewhere one loop
    reads and writes all of them.
    """
    moments = mu, nu
    mu, nu = jax.lax.platform_dependent(*moments, cpu=lambda *x: jax.lax.optimization_barrier(x), default=lambda *x: x)
    direction = (mu / first) / (jnp.sqrt(nu / second) + eps)
    return jnp.where(good, direction, jnp.zeros_like(direction))


def kept_where(good: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """What a step leaves: `new` where it is good, else `old`. `Moments` are guarded by their own rule and are taken
    as they are.
    """

    def keep(a: AnyArray, b: AnyArray) -> AnyArray:
        return a if isinstance(a, Moments) else jnp.where(good, a, b)

    return jax.tree.map(keep, new, old, is_leaf=lambda x: isinstance(x, Moments))
