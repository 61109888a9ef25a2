"""Adam whose moments lie in 8 bits, with a scale for every 128 numbers.

After Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (2022). In place of their table, the root of a
magnitude is rounded to int8, so that small numbers keep more of their digits than on an even grid: a block reaches down
to 1/127^2 of its largest number. Of the second moment the root is stored. Rounding is stochastic: to the nearest, a
moment that changes by less than half a step would never change.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import vishwamai
from vishwamai.core.qtensor import QTensor
from vishwamai.core.types import PyTree

BLOCK = 128
SMALLEST = 4096
"""Parameters with fewer numbers, or with one axis, have float32 moments."""


class RoundedMoments(NamedTuple):
    """State of `scale_by_adam_8bit`: steps taken, the first moment, and the root of the second, as they are stored."""

    count: jax.Array
    mu: PyTree
    root: PyTree


def scale_by_adam_8bit(b1: float = 0.9, b2: float = 0.95, eps: float = 1e-8) -> optax.GradientTransformation:
    """As `optax.scale_by_adam`, with a quarter of its memory.

    Args:
      b1, b2: decay of the moments.
      eps: added to the root of the second.

    >>> import jax.numpy as jnp
    >>> params = {"w": jnp.ones((64, 128))}
    >>> optimizer = scale_by_adam_8bit()
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update({"w": jnp.full((64, 128), 0.5)}, state)
    >>> state.mu["w"], round(float(updates["w"][0, 0]), 3)
    (QTensor(int8[64,128], float32[64,1], format='int8', axis=-1, block_size=128), 1.0)
    """

    def init(params: PyTree) -> RoundedMoments:
        # Two arrays each, so that both can be donated.
        first, second = (jax.tree.map(lambda p: _store(jnp.zeros(p.shape, jnp.float32), None), params) for _ in "mv")
        return RoundedMoments(jnp.zeros((), jnp.int32), first, second)

    def update(updates: PyTree, state: RoundedMoments, params: PyTree = None) -> tuple[PyTree, RoundedMoments]:
        del params
        count = state.count + 1
        key = jax.random.fold_in(jax.random.key(0), count)
        leaves, structure = jax.tree.flatten(updates)
        stored = (jax.tree.leaves(tree, is_leaf=_is_stored) for tree in (state.mu, state.root))
        steps_and_moments = []
        for number, (g, mu, root) in enumerate(zip(leaves, *stored)):
            first, second = jax.random.split(jax.random.fold_in(key, number))
            wide = g.astype(jnp.float32)
            m = b1 * _load(mu) + (1 - b1) * wide
            v = b2 * jnp.square(_floor(root)) + (1 - b2) * jnp.square(wide)
            step = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps)
            steps_and_moments.append((step.astype(g.dtype), _store(m, first), _store(jnp.sqrt(v), second)))
        steps, mus, roots = (jax.tree.unflatten(structure, list(part)) for part in zip(*steps_and_moments))
        return steps, RoundedMoments(count, mus, roots)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def _is_stored(leaf: PyTree) -> bool:
    return isinstance(leaf, QTensor)


def _load(stored: PyTree) -> jax.Array:
    if not _is_stored(stored):
        return stored
    root = stored.dequantize()
    return root * jnp.abs(root)


def _floor(stored: PyTree) -> jax.Array:
    """The root of the second moment; one that was rounded to 0 counts as half a step."""
    if not _is_stored(stored):
        return stored
    half = QTensor(jnp.ones_like(stored.values), stored.scales / 2, stored.format, -1, stored.block_size)
    seen = jnp.max(stored.values, axis=-1, keepdims=True) > 0
    return jnp.where(seen, jnp.maximum(_load(stored), _load(half)), 0.0)


def _store(x: jax.Array, key: jax.Array | None) -> jax.Array | QTensor:
    if x.ndim < 2 or x.size < SMALLEST:
        return x
    root = jnp.sign(x) * jnp.sqrt(jnp.abs(x))
    if key is None:
        return vishwamai.quantize(root, "int8", axis=-1, block_size=BLOCK)
    return vishwamai.quantize(root, "int8", axis=-1, block_size=BLOCK, rounding="stochastic", key=key)
