"""Which hops of a ring the segments leave empty. Segments are values, so a device asks while the program runs.

A hop that no device needs is not made, and no later one: keys go one device further than the last that needs them,
because they are asked for a hop ahead. In a hop that others need, a device that sees none of the keys computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.sharding import varying_axes
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.spec import Operands
from vishwamai.ops.attention.split.ring_plan import Ring


class Reach(NamedTuple):
    """What segments leave of the hops of `Ring.steps`.

    Attributes:
      sees: bool `[hops]`, whether this device may see keys in a hop; None without segments, where it may in all.
      last: the last hop in which any device does, the same on all of them; None without segments.
    """

    sees: jax.Array | None = None
    last: jax.Array | None = None

    def hop(self, i: int, make: Callable[..., object], *state: object) -> PyTree:
        """`make(*state)`, or the state as it is where hop `i` is not made. The first one always is: sinks enter in
        it.
        """
        if i == 0 or self.last is None:
            return make(*state)
        return jax.lax.cond(self.last >= i, make, lambda *state: state, *state)

    def seen(self, i: int, compute: Callable[..., object], *values: object) -> PyTree:
        """`compute(*values)`, or the first value where this device sees nothing in hop `i`."""
        if i == 0 or self.sees is None:
            return compute(*values)
        return jax.lax.cond(self.sees[i], compute, lambda *values: values[0], *values)

    def at_last(self, ways: Sequence[Callable[[AnyArray], object]], x: AnyArray) -> PyTree:
        """The way of the last hop that was made, one of those for each hop."""
        return ways[-1](x) if self.last is None else jax.lax.switch(self.last, ways, x)


def reach_of(ring: Ring, operands: Operands) -> Reach:
    """What the segments of this device's operands leave.

    Two parts of the sequence may see each other where their smallest and largest ids overlap, which is exact for ids
    in order.
    """
    if operands.q_segment_ids is None or operands.kv_segment_ids is None or len(ring.steps) == 1:
        return Reach()
    halves = 2 if ring.zigzag else 1  # what lies together in the sequence
    queries, keys = (_ranges(ids, halves) for ids in (operands.q_segment_ids, operands.kv_segment_ids))
    me = jax.lax.axis_index(ring.axes)
    all_keys = jax.lax.psum(jnp.zeros((ring.size, *keys.shape), keys.dtype).at[me].set(keys), ring.axes)
    lowest, highest = all_keys[:, 0, None], all_keys[:, 1, None]  # [devices, 1, halves, batch]
    meet = (queries[0][:, None] <= highest) & (lowest <= queries[1][:, None])  # [devices, rows, columns, batch]
    source = (me - jnp.array(ring.steps)) % ring.size
    sees = (meet.any(-1)[source] & jnp.asarray(_computed(ring, halves))[:, me]).any((1, 2))
    last = jnp.max(jnp.where(sees, jnp.arange(len(ring.steps)), 0))
    return Reach(sees, jax.lax.pmax(last, _everyone(ring, operands.q_segment_ids)))


def _ranges(ids: jax.Array, halves: int) -> PyTree:
    """`[2, halves, batch]`, the smallest and the largest id of each half."""
    limits = jnp.iinfo(ids.dtype)
    parts = jnp.split(ids, halves, axis=1)
    low = [jnp.min(part, axis=1, initial=limits.max) for part in parts]
    return jnp.stack([jnp.stack(low), jnp.stack([jnp.max(part, axis=1, initial=limits.min) for part in parts])])


def _computed(ring: Ring, halves: int) -> np.ndarray:
    """bool `[hops, devices, rows, columns]`: which halves the static plan takes together."""

    def half_slice(half: int | None) -> slice:
        return slice(None) if half is None else slice(half, half + 1)

    computed = np.zeros((len(ring.steps), ring.size, halves, halves), bool)
    for hop, step in enumerate(ring.steps):
        for device, part in enumerate(ring.parts(step)):
            if part is not None:
                computed[hop, device, half_slice(part.rows), half_slice(part.columns)] = True
    return computed


def _everyone(ring: Ring, ids: object) -> tuple[str, ...]:
    """The mesh axes whose devices have segments of their own: all of them make the same hops, because XLA's program
    has one transfer for all.
    """
    varying = varying_axes(ids)
    if varying >= set(ring.axes):
        return tuple(sorted(varying))
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)  # `check_vma=False` says of no array what it varies over
