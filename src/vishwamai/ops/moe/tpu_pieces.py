"""What the two grouped TPU kernels share: pieces of a visit's rows, a grid cut in two for megacore chips."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import dot
from vishwamai.core.types import AnyArray
from vishwamai.ops.moe.tpu_tiles import ALIGN

SEMANTICS = ("parallel", "arbitrary", "arbitrary", "arbitrary", "arbitrary")
"""Of both kernels' grids: the parts of a `Split`, then what each of them walks."""


def product(x: jax.Array, y: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """x times y in float32, of float32 factors at the highest precision."""
    return dot(x, y, axes, precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None)


def keep(x: jax.Array, axis: int, start: AnyArray, stop: AnyArray) -> jax.Array:
    """x with zeros outside `start <= index < stop` of the axis."""
    index = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.where((index >= start) & (index < stop), x, jnp.zeros_like(x))


def for_pieces(
    start: AnyArray,
    stop: AnyArray,
    block_m: int,
    piece: int,
    small: int,
    middle: int,
    body: Callable[[int | jax.Array, int, int | jax.Array], None],
) -> None:
    """Calls `body(first row, rows, fresh)` for pieces that cover `start <= row < stop` of a tile: large ones, then
    small ones, never past the tile.

    Args:
      middle: rows between small and large, 0 for none: one such piece before the small one makes them fit closer.

    Rows before `fresh` were in the piece before: the last one is moved up where it would leave the tile.
    """
    if block_m % ALIGN:  # a tile of all rows there are, which no multiple divides

        @pl.when(stop > start)
        def _() -> None:
            body(0, block_m, 0)

        return
    begin = lax.div(start, ALIGN) * ALIGN  # slices of rows start at multiples of a tile of memory
    total = stop - begin
    large = lax.div(total, piece)

    def visit(fresh: jax.Array, rows: int) -> None:
        body(pl.multiple_of(jnp.minimum(fresh, block_m - rows), ALIGN), rows, fresh)  # moved up at the tile's end

    def one_large(i: jax.Array, carry: None) -> None:
        visit(begin + i * piece, piece)

    def one_small(i: jax.Array, carry: None) -> None:
        visit(begin + large * piece + i * small, small)

    if middle:
        rest = total - large * piece
        instead = (large > 0) & (rest > 0) & (rest <= middle + small - piece)  # of the last large one
        last = large - instead.astype(jnp.int32) + (rest > middle).astype(jnp.int32)
        last_row = begin + last * piece
        after = last_row + jnp.where(instead, middle, 0)
        lax.fori_loop(0, last, one_large, None)
        pl.when(instead | ((rest > small) & (rest <= middle)))(lambda: visit(last_row, middle))
        pl.when(instead | ((rest > 0) & (rest <= small)))(lambda: visit(after, small))
        return
    lax.fori_loop(0, large, one_large, None)
    if piece > small:
        lax.fori_loop(0, lax.div(total - large * piece + small - 1, small), one_small, None)
    else:
        pl.when(total > large * piece)(lambda: one_small(jnp.int32(0), None))


@dataclasses.dataclass(frozen=True)
class Split:
    """A grid over (batch, tiles), cut in two along one of them where that comes out even: a part for each core of a
    megacore chip.

    Grid axes instead of a division, which the scalar unit does not have.
    """

    batch: int
    tiles: int

    @property
    def _axis(self) -> int | None:
        return next((axis for axis, size in ((1, self.tiles), (0, self.batch)) if size % 2 == 0), None)

    @property
    def grid(self) -> tuple[int, int, int]:
        """(parts, batch entries of a part, tiles of a part)."""
        if self._axis is None:
            return 1, self.batch, self.tiles
        return (2, self.batch, self.tiles // 2) if self._axis == 1 else (2, self.batch // 2, self.tiles)

    def index(self, part: AnyArray, b: AnyArray, j: AnyArray) -> tuple[AnyArray, AnyArray]:
        """(batch entry, tile) of a place in the grid."""
        _, batch, tiles = self.grid
        return (part * batch + b, j) if self._axis == 0 else (b, part * tiles + j) if self._axis == 1 else (b, j)
