"""The exchange of Ulysses attention: from a part of the sequence with all heads to all of it with a share of them."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.spec import AttentionSpec, Operands


def why_not_ulysses(spec: AttentionSpec, heads: int, size: int) -> str | None:
    """Why an exchange over `size` devices cannot serve a call; None if it can. `heads` are a device's query heads."""
    if spec.operands.slopes is not None:
        return "`alibi_slopes` are given, which the exchange does not carry."
    if heads % size:
        return f"{heads} query heads do not divide over {size} devices."
    if spec.blocks is not None and spec.blocks.heads > 1:
        return "the heads have block masks of their own, which are constants of the program."
    return None


def exchange(axes: object, operands: Operands) -> Operands:
    """The operands of a device's share of the heads, for the whole sequence; inside `shard_map`.

    Args:
      axes: the mesh axes over which the sequence is split; their size divides the query heads.
      operands: a device's part. Of `bias` and `mask` its rows, with the keys of all; seeds and sinks of all heads.
    """
    size = jax.lax.axis_size(axes)
    kv_heads = operands.key.shape[1]
    # The devices divide the query heads, and so does kv_heads: their least common multiple does, too.
    copies = math.lcm(kv_heads, size) // kv_heads

    def swapped(x: AnyArray) -> PyTree:
        return jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=2, tiled=True)

    def share(x: AnyArray) -> PyTree:
        """This device's heads."""
        if x is None or x.shape[1] == 1:
            return x
        count = x.shape[1] // size
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * count, count, 1)

    def rows(x: AnyArray) -> PyTree:
        if x is None or x.shape[2] == 1:
            return share(x)
        return _gathered(axes, x, 2) if x.shape[1] == 1 else swapped(x)

    key, value = (x if copies == 1 else jnp.repeat(x, copies, 1) for x in operands[1:3])
    return Operands(
        swapped(operands.query),
        swapped(key),
        swapped(value),
        rows(operands.bias),
        rows(operands.mask),
        _gathered(axes, operands.q_segment_ids, 1),
        _gathered(axes, operands.kv_segment_ids, 1),
        share(operands.sinks),
        share(operands.dropout_seed),
        _gathered(axes, operands.q_positions, 1),
    )


def gathered(axes: object, operands: Operands) -> Operands:
    """The operands of the whole sequence, on every device; inside `shard_map`.

    Args:
      axes, operands: arguments of `exchange`.
    """
    arrays = {name: _gathered(axes, getattr(operands, name), 2) for name in ("query", "key", "value")}
    for name in ("bias", "mask"):
        x = getattr(operands, name)
        arrays[name] = x if x is None or x.shape[2] == 1 else _gathered(axes, x, 2)
    lines = ("q_segment_ids", "kv_segment_ids", "q_positions")
    return operands._replace(**arrays, **{name: _gathered(axes, getattr(operands, name), 1) for name in lines})


def own_rows(axes: object, x: AnyArray) -> PyTree:
    """This device's rows of a result `[batch, heads, q_len, ...]` that every device has whole."""
    rows = x.shape[2] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * rows, rows, 2)


def _gathered(axes: object, x: AnyArray, axis: int) -> PyTree:
    return None if x is None else jax.lax.all_gather(x, axes, axis=axis, tiled=True)


def restored(axes: object, x: AnyArray) -> PyTree:
    """A result `[batch, heads, q_len, ...]` of the whole sequence, back to this device's part with all heads."""
    return jax.lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
