"""Parameters of which each device has a part: which axis is split, by the parameter's name, and the whole again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.qtensor import QTensor, bits

LAYERS = "layers"
"""Key of the layers in a tree of parameters."""

ADAPTER_AXES = {"down": (-2, -3), "up": (-1, -3)}
"""The axes of a weight that the arrays of its adapter have too (`lora.Adapted`); they are split as the weight is."""


def parameter_name(path: Any) -> str:
    """The name of the parameter at a path of a tree, the last of its keys; what is below a parameter, such as the parts
    of a quantized moment, has no keys. The arrays of an adapter are below the path of its weight: "query/down".
    """
    keys = [str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    _, inside, weight = keys[-2].rpartition("/") if len(keys) > 1 else ("", "", "")
    return f"{weight}/{keys[-1]}" if inside else keys[-1] if keys else ""


def is_bias(name: str) -> bool:
    """Whether a parameter is a bias by the last name of its path; those of experts have an axis for the experts.

    >>> is_bias("expert_down_bias"), is_bias("expert_down")
    (True, False)
    """
    return name.endswith("_bias")


def in_layers(key: Any) -> bool:
    """Whether a key of a dictionary is that of layers, or the path of a parameter of theirs."""
    return key == LAYERS or (isinstance(key, str) and key.startswith(f"{LAYERS}/"))


def split_axis(axes: Mapping[str, int], name: str) -> int | None:
    """The axis of a parameter that a mesh axis splits, from the end; None where it is whole.

    Args:
      axes: the split axis of weights by their name.
      name: of `parameter_name`.

    >>> [split_axis({"query": -1}, name) for name in ("query", "query/up", "query/down", "key")]
    [-1, -1, None, None]
    """
    weight, _, part = name.partition("/")
    axis = axes.get(weight)
    return axis if not part or axis in ADAPTER_AXES.get(part, ()) else None


def gathered(x: Any, axis: int, over: str) -> Any:
    """Inside `shard_map`: a whole array or `QTensor` from the parts along an axis, counted from the end.

    Args:
      over: the mesh axis that splits it. Scales of a `QTensor` whose number it does not divide are whole already.
    """
    if not isinstance(x, QTensor):
        return _gathered(x, axis, over)
    values = _gathered(x.values, axis, over)
    size = values.shape[axis]
    if axis == x.axis:
        size = 1 if x.block_size is None else -(-size // x.block_size)
    scales = x.scales if x.scales.shape[axis] == size else _gathered(x.scales, axis, over)
    return dataclasses.replace(x, values=values, scales=scales)


def _gathered(x: Any, axis: int, over: str) -> Any:
    """Numbers of 8 bits or fewer travel as bytes, which every backend's collectives take; two of 4 bits in one where
    the last axis is even.
    """
    dtype, where = x.dtype, axis + x.ndim
    pairs = bits(dtype) == 4 and x.shape[-1] % 2 == 0
    if pairs:
        x = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint8)
    elif bits(dtype) == 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    elif bits(dtype) == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8)
    x = jax.lax.all_gather(x, over, axis=where, tiled=True)
    if pairs:
        x = jax.lax.bitcast_convert_type(x, dtype)
        return x.reshape(*x.shape[:-2], -1)
    if bits(dtype) == 4:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint4), dtype)
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x
