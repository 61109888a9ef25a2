"""The bodies of the TPU normalization: rows in chunks, wide rows in slabs of columns."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import LANES, round_up
from vishwamai.core.types import Ref, Slice
from vishwamai.ops.norm.spec import NormSpec
from vishwamai.ops.norm.tpu_tiles import NARROW, NormConfig

_SLABS = 64
"""Parts that wide rows are taken in at most (each is code of its own)."""


def _slabs(spec: NormSpec) -> list[Slice]:
    """The columns of one slab after the other: all of narrow rows, a lane tile or a few of wide ones."""
    width = spec.features if spec.features <= NARROW else round_up(pl.cdiv(spec.features, _SLABS), LANES)
    return [pl.ds(start, min(width, spec.features - start)) for start in range(0, spec.features, width)]


class _RowSum:
    """A sum over the columns: slabs are added as they come, and the lanes of what they add up to at the end. A narrower
    last slab stays apart.
    """

    def __init__(self) -> None:
        self._parts: dict[int, jax.Array] = {}

    def add(self, slab: jax.Array) -> None:
        """Adds `[chunk, width]`."""
        width = slab.shape[1]
        # Elementwise: lanes are reduced once, in `rows`, and not for each slab.
        self._parts[width] = self._parts[width] + slab if width in self._parts else slab

    def rows(self) -> jax.Array:
        """The sums, `[chunk, 1]`."""
        first, *rest = (jnp.sum(part, axis=-1, keepdims=True) for part in self._parts.values())
        return first + rest[0] if rest else first


def _for_chunks(config: NormConfig, body: Callable[[Slice, int], None]) -> None:
    """Calls `body(rows, k)` for every chunk, two (k = 0, 1) in a turn of the loop where they are even."""
    count = config.block_rows // config.chunk_rows
    unroll = 2 if count % 2 == 0 else 1

    def step(i: jax.Array, carry: None) -> None:
        for k in range(unroll):
            start = pl.multiple_of((i * unroll + k) * config.chunk_rows, config.chunk_rows)
            body(pl.ds(start, config.chunk_rows), k)
        return carry

    lax.fori_loop(0, count // unroll, step, None)


class _Centered:
    """A chunk of rows less their mean (of a layer norm; the rows as they are of an RMS norm), by slabs.

    What was centered waits in VMEM, in half `k` of `centered_ref`, which spares the next pass the widening and the
    subtraction.
    """

    def __init__(self, spec: NormSpec, ref: Ref, rows: Slice, centered_ref: Ref, k: int):
        self.ref, self.rows, self.centered_ref, self.k = ref, rows, centered_ref, k
        self.mean = None
        if spec.kind == "layer":
            total = _RowSum()
            for columns in _slabs(spec):
                total.add(self._read(columns))
            self.mean = total.rows() * (1.0 / spec.features)  # [chunk, 1]

    def _read(self, columns: Slice) -> jax.Array:
        return self.ref[self.rows, columns].astype(jnp.float32)

    def first(self, columns: Slice) -> jax.Array:
        """`[chunk, width]`, when it is needed first."""
        s = self._read(columns)
        if self.mean is None:
            return s
        s = s - self.mean  # centered before it is squared: E[x^2] - E[x]^2 would cancel
        self.centered_ref[self.k, :, columns] = s
        return s

    def again(self, columns: Slice) -> jax.Array:
        """The same later."""
        return self._read(columns) if self.mean is None else self.centered_ref[self.k, :, columns]


def forward_kernel(
    x_ref: Ref,
    residual_ref: Ref,
    scale_ref: Ref,
    offset_ref: Ref,
    y_ref: Ref,
    total_ref: Ref,
    centered_ref: Ref,
    *,
    spec: NormSpec,
    config: NormConfig,
) -> None:
    """y = (s - mean) * rstd * scale + offset of s = x + residual, the mean for a layer norm; blocks [block_rows,
    features].
    """
    slabs = _slabs(spec)

    def chunk(rows: Slice, k: int) -> None:
        if residual_ref is not None:
            for columns in slabs:
                # Added in float32 and rounded once, which is what adding in the array's own dtype gives.
                total = x_ref[rows, columns].astype(jnp.float32) + residual_ref[rows, columns].astype(jnp.float32)
                total_ref[rows, columns] = total.astype(total_ref.dtype)
        source = _Centered(spec, x_ref if residual_ref is None else total_ref, rows, centered_ref, k)
        squares = _RowSum()
        for columns in slabs:
            s = source.first(columns)
            # first
            squares.add(s * s)
        rstd = lax.rsqrt(squares.rows() * (1.0 / spec.features) + spec.eps)  # [chunk, 1]
        for columns in slabs:
            y = source.again(columns) * rstd  # [chunk, width]
            if scale_ref is not None:
                y = y * scale_ref[:, columns]
            if offset_ref is not None:
                y = y + offset_ref[:, columns]
            y_ref[rows, columns] = y.astype(y_ref.dtype)

    _for_chunks(config, chunk)


def backward_kernel(
    s_ref: Ref,
    dy_ref: Ref,
    dtotal_ref: Ref,
    scale_ref: Ref,
    dx_ref: Ref,
    dscale_ref: Ref,
    doffset_ref: Ref,
    centered_ref: Ref,
    *,
    spec: NormSpec,
    config: NormConfig,
    steps: int,
) -> None:
    """With c = s - mean and g = dy * scale: dx = rstd * (g - c * (rstd^2 * mean(g * c)) - mean(g)), the last for a
    layer norm.
    """
    part, step = pl.program_id(1), pl.program_id(2)
    first_row = (part * steps + step) * config.block_rows
    inverse, slabs = 1.0 / spec.features, _slabs(spec)

    @pl.when(step == 0)
    def _() -> None:
        for ref in (dscale_ref, doffset_ref):
            if ref is not None:
                ref[...] = jnp.zeros_like(ref)  # the block stays over the steps of a part

    def partial_rows(values: jax.Array, rows: Slice) -> jax.Array:
        """Sums `[chunk, width]` to eight rows; rows past the end of the array hold anything and count as zero."""
        if spec.rows % config.block_rows:
            index = first_row + rows.start + lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(index < spec.rows, values, 0.0)
        return jnp.sum(values.reshape(config.chunk_rows // 8, 8, values.shape[1]), axis=0)  # [8, width]

    def chunk(rows: Slice, k: int) -> None:
        source = _Centered(spec, s_ref, rows, centered_ref, k)
        squares, products, sums = _RowSum(), _RowSum(), _RowSum()
        for columns in slabs:
            s, g = source.first(columns), dy_ref[rows, columns].astype(jnp.float32)
            if scale_ref is not None:
                g = g * scale_ref[:, columns]
            squares.add(s * s)
            products.add(g * s)
            if source.mean is not None:
                sums.add(g)
        rstd = lax.rsqrt(squares.rows() * inverse + spec.eps)  # [chunk, 1]
        slope = products.rows() * inverse * (rstd * rstd)  # [chunk, 1]
        if source.mean is None:
            slope, shift = slope * rstd, None
        else:
            shift = sums.rows() * inverse  # [chunk, 1], mean(g)
        for columns in slabs:
            s, dy = source.again(columns), dy_ref[rows, columns].astype(jnp.float32)
            normed = dy * rstd  # [chunk, width]
            if dscale_ref is not None:
                dscale_ref[:, columns] += partial_rows(normed * s, rows)  # [8, width]: eight rows are added up outside
            if doffset_ref is not None:
                doffset_ref[:, columns] += partial_rows(dy, rows)
            g = normed if shift is None else dy
            if scale_ref is not None:
                g = g * scale_ref[:, columns]
            dx = g - s * slope
            if shift is not None:  # scaled last: gradients that cancel do so exactly, however large rstd is
                dx = (dx - shift) * rstd
            if dtotal_ref is not None:
                dx = dx + dtotal_ref[rows, columns].astype(jnp.float32)
            dx_ref[rows, columns] = dx.astype(dx_ref.dtype)

    _for_chunks(config, chunk)
