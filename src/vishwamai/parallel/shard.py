"""Trees of arrays laid out over a mesh: by rules, or by cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import PyTree
from vishwamai.parallel.adaptive import adaptive_sharding
from vishwamai.parallel.rules import LogicalRules, Names, shardings


@checked
def shard(
    tree: PyTree,
    mesh: Mesh,
    rules: LogicalRules | None = None,
    axes: Mapping[str, Names] | None = None,
    *,
    adaptive: bool = False,
    **options: Any,
) -> PyTree:
    """The tree with every array laid out over the mesh as the rules say.

    Where the names of an array's axes come from: `axes` has them by the end of its path, "query" or "attention/query";
    the longest end that fits counts. The names are those of the *last* axes, so one entry serves the layers of a stack,
    and an optimizer's moments, whose paths end alike. A tree that knows its own, such as `vishwamai.models.Decoder`,
    has them in `logical_axes` and needs no `axes`.

    Args:
      tree: arrays, or `jax.ShapeDtypeStruct`s, which get their sharding and no memory. Scalars go to every device.
      mesh: mesh, for example of `make_mesh`.
      rules: mesh axes by logical name.
      axes: names by the end of a path; None for `tree.logical_axes`.
      adaptive: chooses for each weight whether it lies whole, by rows or by columns over a mesh axis that `rules` leave
        free, by planned or measured times; `adaptive_sharding` makes the same choice and says why.
      **options: options of `adaptive_sharding`: axis, rows, cost.

    Returns:
      A tree of the same structure. With several processes every process passes the same values.

    Raises:
      ShapeError: an array has no names; a name is not in the rules; an array would be split twice by one mesh axis; or
        a size does not divide. The text has the array's path and the fix.

    >>> import numpy as np
    >>> from vishwamai.parallel import make_mesh
    >>> mesh = make_mesh("fsdp=1,tensor=1", devices=jax.devices()[:1])
    >>> rules = LogicalRules({"embed": "fsdp", "mlp": "tensor"})
    >>> weights = {"layers": [{"up": np.ones((8, 16))}, {"up": np.ones((8, 16))}]}
    >>> shard(weights, mesh, rules, {"up": ("embed", "mlp")})["layers"][0]["up"].sharding.spec
    P('fsdp', 'tensor')
    >>> shard(weights, mesh, rules, {"down": ("mlp", "embed")})
    Traceback (most recent call last):
    vishwamai.core.errors.ShapeError: shard: layers/0/up of shape (8, 16) has no names; pass `axes={"up": (name, name)}`
    with a logical name or None for each of its last axes.
    """

    def put(leaf: PyTree, sharding: NamedSharding) -> jax.Array | jax.ShapeDtypeStruct:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)
        return jax.device_put(leaf, sharding)  # with several processes each puts its own shards

    if adaptive:
        return jax.tree.map(put, tree, adaptive_sharding(tree, mesh, rules, axes, **options).shardings)
    if rules is None or options:
        lack = "`rules` are missing" if rules is None else f"{', '.join(options)} belong to `adaptive=True`"
        raise ShapeError(f"shard: {lack}; pass a LogicalRules, or adaptive=True.")
    return jax.tree.map(put, tree, shardings(tree, mesh, rules, axes))
