"""Reads and writes through reshaped and bitcast references, which jax 0.10.2's TPU simulator does not know; Mosaic
compiles them.

A kernel that takes 32-bit words out of packed rows reads `ref.reshape(...).bitcast(uint32)[start::stride]`. Here such a
read becomes the simulator's own read of the part before the first change of view, with its checks for races and bounds,
and the rest is done to the value. A write reads that part, changes the value, and writes the whole part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from jax_inside import BitcastTransform, NDIndexer, ReshapeTransform, simulator, simulator_utils
from vishwamai.core.qtensor import bits


def _bitcast(x: np.ndarray, dtype: Any) -> np.ndarray:
    """Rows of narrow elements become rows of wide ones: the first row is the low part."""
    if x.dtype == jnp.int4:  # a byte each on the host
        nibbles = x.view(np.uint8) & 15
        x = nibbles[..., 0::2, :] | nibbles[..., 1::2, :] << 4
    wide, narrow = np.dtype(dtype).itemsize, x.dtype.itemsize
    assert wide >= narrow, "only widening views are read"
    each = wide // narrow
    rows, dim = x.shape[-2:]
    parts = x.reshape(*x.shape[:-2], rows // each, each, dim)
    return np.ascontiguousarray(np.moveaxis(parts, -2, -1)).view(dtype)[..., 0]


def _undo(transform: Any, before: np.ndarray, x: np.ndarray) -> np.ndarray:
    """`before` with the values `x` of its view."""
    if isinstance(transform, ReshapeTransform):
        return x.reshape(before.shape)
    if isinstance(transform, BitcastTransform):
        each, four = 8 * x.dtype.itemsize // bits(before.dtype), before.dtype == jnp.int4
        parts = np.ascontiguousarray(x)[..., None].view(np.uint8 if four else before.dtype)
        if four:
            parts = np.stack((parts & 15, parts >> 4), axis=-1).reshape(*x.shape, each)
            parts = (parts ^ 8).astype(np.int8) - 8
        parts = parts.astype(before.dtype)  # [..., rows / each, dim, each]
        assert parts.shape[-1] == each
        return np.moveaxis(parts, -1, -2).reshape(before.shape)
    changed = before.copy()
    changed[simulator_utils.to_range((transform,))] = x
    return changed


def _apply(x: np.ndarray, transform: Any) -> np.ndarray:
    if isinstance(transform, ReshapeTransform):
        return x.reshape(transform.shape)
    if isinstance(transform, BitcastTransform):
        return _bitcast(x, jnp.dtype(transform.dtype))
    ranges = simulator_utils.to_range((transform,))
    for size, part in zip(x.shape, ranges, strict=True):
        last = (
            part
            if isinstance(part, int)
            else part.start + (len(range(part.start, part.stop, part.step)) - 1) * part.step
        )
        assert 0 <= last < size, f"read of {ranges} from a view of shape {x.shape}"
    return x[ranges]


@contextlib.contextmanager
def readable_views() -> Iterator[None]:
    """Lets the simulator read and write through views."""
    original, original_swap = simulator.get, simulator.swap

    def get(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, transforms: Any, *rest: Any, **named: Any
    ) -> Any:
        views = [n for n, t in enumerate(transforms) if not isinstance(t, NDIndexer)]
        if not views:
            return original(token, device, core, space, buffer, transforms, *rest, **named)
        token, value = original(token, device, core, space, buffer, tuple(transforms[: views[0]]), *rest, **named)
        for transform in transforms[views[0] :]:
            value = _apply(np.asarray(value), transform)
        return token, value

    def swap(
        token: Any, device: Any, core: Any, space: Any, buffer: Any, transforms: Any, new: Any, mask: Any, **named: Any
    ) -> Any:
        views = [n for n, t in enumerate(transforms) if not isinstance(t, NDIndexer)]
        if not views:
            return original_swap(token, device, core, space, buffer, transforms, new, mask, **named)
        assert mask is None, "masked write through a view"
        base, changes = tuple(transforms[: views[0]]), transforms[views[0] :]
        token, value = original(token, device, core, space, buffer, base, **named)
        seen = [np.asarray(value)]
        for transform in changes:
            seen.append(_apply(seen[-1], transform))
        whole = np.asarray(new)
        for transform, before in zip(reversed(changes), reversed(seen[:-1]), strict=True):
            whole = _undo(transform, before, whole)
        token, _ = original_swap(token, device, core, space, buffer, base, whole, None, **named)
        return token, seen[-1]

    get.__wrapped__ = original.__wrapped__  # type: ignore[attr-defined]  # copies between memories read through it
    simulator.get, simulator.swap = get, swap  # type: ignore[assignment]
    try:
        yield
    finally:
        simulator.get, simulator.swap = original, original_swap
