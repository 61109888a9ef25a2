"""The two collectives of tensor parallelism, with the gradients that they have where a `shard_map` checks no variance.

Shoeybi et al., "Megatron-LM" (2019): f, which copies an activation to all shards of a layer, and g, which adds up what
they give. The gradient of each is the other.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
from jax import Array

from vishwamai.core.arguments import checked
from vishwamai.core.sharding import mesh_axis_size

if TYPE_CHECKING:
    from jaxtyping import Num, Shaped


@checked
def copy_to_shards(x: Shaped[Array, ...], axis: str) -> Array:
    """`x` itself, and the sum over the shards for its gradient: before a product whose weight is split by columns.

    For use inside `shard_map(..., check_vma=False)`, such as the parts of a pipeline.

    Args:
      x: the same on every device of the mesh axis `axis`.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> f = jax.shard_map(lambda x: copy_to_shards(x, "tensor"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
    ...                   check_vma=False)
    >>> jax.grad(lambda x: f(x).sum())(jax.numpy.ones(2)).tolist()
    [1.0, 1.0]
    """
    mesh_axis_size("copy_to_shards", "axis", (axis,))
    return _copied(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copied(x: Array, axis: str) -> Array:
    return x


# Each shard's gradient is a part of the sum: they add up where x was whole.
_copied.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (jax.lax.psum(g, axis),))


@checked
def sum_of_shards(x: Num[Array, ...], axis: str) -> Array:
    """The sum of `x` over the shards, whose gradient every shard gets as it is: after a product whose weight is split
    by rows.

    For use inside `shard_map(..., check_vma=False)`, such as the parts of a pipeline.

    Args:
      x: this shard's part of a sum over the mesh axis `axis`.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> f = jax.shard_map(lambda x: sum_of_shards(x, "tensor"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P(),
    ...                   check_vma=False)
    >>> f(jax.numpy.ones(2)).tolist()
    [1.0, 1.0]
    """
    mesh_axis_size("sum_of_shards", "axis", (axis,))
    return _summed(x, axis)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _summed(x: Array, axis: str) -> Array:
    return jax.lax.psum(x, axis)


# Under `check_vma=False` psum's own transpose is a psum again, which would count the gradient once for each shard.
_summed.defvjp(lambda x, axis: (jax.lax.psum(x, axis), None), lambda axis, _, g: (g,))
