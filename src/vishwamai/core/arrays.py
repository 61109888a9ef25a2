"""Formulas that serve arrays of JAX and tensors of torch alike, where no kernel is needed.

Such a formula takes its functions from `namespace(x)` and uses only those that bear one name and meaning in
`jax.numpy` and in torch (`where`, `clip`, `frexp`, ...); a dtype is JAX's.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray


def namespace(x: AnyArray) -> Any:
    """The module `torch` for a tensor, `jax.numpy` for any other array.

    >>> namespace(jnp.ones(3)).__name__
    'jax.numpy'
    """
    return sys.modules["torch"] if gpu.framework(x) == "torch" else jnp


def activations(x: AnyArray) -> Any:
    """The module `torch.nn.functional` for a tensor, `jax.nn` for any other array: `sigmoid(x)`, `softmax(x, axis)`."""
    return namespace(x).nn.functional if gpu.framework(x) == "torch" else jax.nn


def constant(x: AnyArray) -> AnyArray:
    """The array, to which no gradient goes."""
    return x.detach() if gpu.framework(x) == "torch" else jax.lax.stop_gradient(x)


def cast(x: AnyArray, dtype: object) -> AnyArray:
    """The array in a dtype of JAX.

    >>> cast(jnp.ones(3), "bfloat16").dtype.name
    'bfloat16'
    """
    if gpu.framework(x) != "torch":
        return x.astype(dtype)
    return x.to(_torch_dtype(dtype))


@functools.cache
def _torch_dtype(dtype: Any) -> Any:
    return getattr(sys.modules["torch"], jnp.dtype(dtype).name)


def padded(x: AnyArray, axis: int, count: int) -> AnyArray:
    """The array with `count` zeros after the last entry of an axis."""
    if gpu.framework(x) == "torch":
        ends = [0] * (2 * x.ndim)
        ends[-2 * (axis % x.ndim) - 1] = count  # torch counts axes from the last one
        return sys.modules["torch"].nn.functional.pad(x, ends)
    ends = [(0, 0)] * x.ndim
    ends[axis] = (0, count)
    return jnp.pad(x, ends)


def widened(x: AnyArray) -> Any:
    """The array in float32, or in float64 where it has that."""
    return cast(x, jnp.promote_types(array_spec(x).dtype, jnp.float32))


def numbers(count: int, like: AnyArray) -> AnyArray:
    """0 ... count - 1, int32, on the device of `like` if that is torch's.

    >>> numbers(3, jnp.ones(2)).tolist()
    [0, 1, 2]
    """
    if gpu.framework(like) != "torch":
        return jnp.arange(count, dtype=jnp.int32)
    torch = sys.modules["torch"]
    return torch.arange(count, dtype=torch.int32, device=like.device)


def fetched(x: AnyArray, index: AnyArray, fill: float = 0) -> AnyArray:
    """Entries of x along its first axis; `fill` where the index is past its end.

    >>> fetched(jnp.array([5, 7]), jnp.array([1, 2, 0])).tolist()
    [7, 0, 5]
    """
    if gpu.framework(x) != "torch":
        if not x.shape[0]:  # JAX gathers nothing of it
            return jnp.full((*index.shape, *x.shape[1:]), fill, x.dtype)
        return jnp.asarray(x).at[index].get(mode="fill", fill_value=fill)
    end = x.new_full((1, *x.shape[1:]), fill)
    return sys.modules["torch"].cat([x, end])[index.clamp(max=x.shape[0])]


def largest(x: AnyArray, count: int) -> tuple[AnyArray, AnyArray]:
    """The `count` largest entries along the last axis, largest first, and where they are; of equal ones the first wins.

    >>> [y.tolist() for y in largest(jnp.array([5, 9, 7, 9]), 3)]
    [[9, 9, 7], [1, 3, 2]]
    """
    if gpu.framework(x) != "torch":
        return jax.lax.top_k(x, count)
    values, order = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count], order[..., :count]


def gather_last(x: AnyArray, index: AnyArray) -> AnyArray:
    """Entries of x along its last axis, of each row its own.

    >>> gather_last(jnp.array([[5, 7], [8, 9]]), jnp.array([[1], [0]])).tolist()
    [[7], [8]]
    """
    return x.gather(-1, index) if gpu.framework(x) == "torch" else jnp.take_along_axis(x, index, axis=-1)


def cut(x: AnyArray, start: AnyArray, count: int) -> AnyArray:
    """`count` entries along the last axis, from `start` on: a number or a scalar array, with all of them in x.

    >>> cut(jnp.array([5, 7, 9]), jnp.int32(1), 2).tolist()
    [7, 9]
    """
    if gpu.framework(x) != "torch":
        return jax.lax.dynamic_slice_in_dim(x, start, count, axis=-1)
    if isinstance(start, int):
        return x.narrow(-1, start, count)
    return x[..., start + numbers(count, x)]


def bincount(bins: AnyArray, count: int) -> AnyArray:
    """How often each of `count` numbers is in a vector of integers, int32.

    >>> bincount(jnp.array([2, 0, 2]), 3).tolist()
    [1, 0, 2]
    """
    if gpu.framework(bins) != "torch":
        return jnp.zeros(count, jnp.int32).at[bins].add(1)
    torch = sys.modules["torch"]
    ones = torch.ones_like(bins, dtype=torch.int32)
    return ones.new_zeros(count).scatter_add(0, bins.long(), ones)


def inverse(order: AnyArray) -> AnyArray:
    """Where each number is in a permutation: int32, of torch int64, which it is faster with.

    >>> inverse(jnp.array([2, 0, 1])).tolist()
    [1, 2, 0]
    """
    if gpu.framework(order) != "torch":
        places = numbers(order.shape[0], order)
        return jnp.zeros_like(places).at[order].set(places, unique_indices=True)
    places = sys.modules["torch"].arange(order.shape[0], device=order.device)
    return places.scatter(0, order, places)
