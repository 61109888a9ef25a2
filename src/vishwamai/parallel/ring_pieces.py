"""Pieces of an array that travel around a ring of devices, each asked for before the work that hides its transfer.

Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (2023).
Pieces go both ways at once, so that the farthest one makes half of the hops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.sharding import match_varying
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class RingPieces:
    """The pieces of an array of which every device of a mesh axis has one; for use inside `shard_map`.

    Attributes:
      axis: the mesh axis.
      size: how many devices it has.
    """

    axis: str
    size: int

    @property
    def reach(self) -> tuple[int, int]:
        """How far pieces travel to later devices and to earlier ones.

        >>> RingPieces("x", 4).reach, RingPieces("x", 5).reach, RingPieces("x", 1).reach
        ((2, 1), (2, 2), (0, 0))
        """
        return self.size // 2, (self.size - 1) // 2

    def shift(self, x: PyTree, way: int) -> PyTree:
        """What the device `way` places before this one has."""
        # (source, destination): values move `way` places on, and come from `way` places before
        pairs = [(i, (i + way) % self.size) for i in range(self.size)]
        return jax.lax.ppermute(x, self.axis, pairs)

    def gathered(self, x: jax.Array) -> Iterator[tuple[int, PyTree]]:
        """(distance, piece) for every device: the piece of the device `distance` places before this one."""
        up, down = self.reach
        # Pieces travel both ways at once, since a link carries as much in each direction; each crosses half the ring.
        before = self.shift(x, 1) if up else None  # asked for before the first piece is used
        after = self.shift(x, -1) if down else None
        yield 0, x
        for step in range(1, up + 1):
            from_before, from_after = before, after
            # The next transfers are issued before this piece is used, so that the work on it can hide them.
            before = self.shift(before, 1) if step < up else None
            after = self.shift(after, -1) if step < down else None
            yield step, from_before
            if step <= down:  # of an even number of devices the farthest one comes one way only
                yield -step, from_after

    def reduced(self, part: Callable[[int], jax.Array], dtype: DTypeLike) -> jax.Array:
        """The sum of the parts that all devices have for this one.

        Args:
          part: this device's part of the sum for the device `distance` places after it.
          dtype: dtype of the sums that travel.
        """
        up, down = self.reach

        def added(total: jax.Array | None, way: int, distance: int) -> jax.Array:
            shifted = None if total is None else self.shift(total, way)
            local = part(distance)  # traced after the transfer, which it hides
            # Added in the part's own dtype, and rounded to what travels once a hop.
            return (local if shifted is None else local + shifted.astype(local.dtype)).astype(dtype)

        before = after = None
        # The farthest sums start first, and each device on the way adds its part.
        for step in range(up, 0, -1):
            before = added(before, 1, step)
            if step <= down:
                after = added(after, -1, -step)
        shifted = [self.shift(x, way) for x, way in ((before, 1), (after, -1)) if x is not None]
        local = part(0)  # this device's part is last: both half sums are on their last hop meanwhile
        return sum((x.astype(local.dtype) for x in shifted), local)

    def rows(self, x: jax.Array, distance: int) -> jax.Array:
        """The rows (last axis but one) of `x` that belong to the device `distance` places after this one."""
        count = x.shape[-2] // self.size  # rows of one device
        return jax.lax.dynamic_slice_in_dim(x, self._start(distance, count), count, x.ndim - 2)

    def joined(self, pieces: Iterator[tuple[int, PyTree]]) -> PyTree:
        """The rows of all devices in their order, from (distance, rows) as `gathered` gives them; of every leaf."""
        result: PyTree = None
        for distance, rows in pieces:
            if result is None:
                result = jax.tree.map(self._empty, rows)
            result = jax.tree.map(lambda x, y, d=distance: self._placed(x, y, -d), result, rows)
        return result

    def _empty(self, x: jax.Array) -> jax.Array:
        shape = (*x.shape[:-2], x.shape[-2] * self.size, x.shape[-1])
        # Zeros are the same on every device, and `shard_map` declines to update them by values that vary: their type is
        # changed.
        return match_varying((jnp.zeros(shape, x.dtype), x))[0]

    def _placed(self, target: jax.Array, x: jax.Array, distance: int) -> jax.Array:
        start = self._start(distance, x.shape[-2])
        return jax.lax.dynamic_update_slice_in_dim(target, x, start, target.ndim - 2)

    def _start(self, distance: int, count: int) -> jax.Array:
        # around the ring; traced, since a program serves all devices
        return (jax.lax.axis_index(self.axis) + distance) % self.size * count
