"""The rotation on TPU: queries and keys in one pass over memory, the angles of a position read once for all heads
(Pallas).

A grid step holds all heads of a run of positions. With C = [cos, cos] and S = [-sin, sin] over a head's features, and
x' the features with the two of each pair exchanged (a rotation of lanes), the result is x C + x' S. The backward pass
is the same kernel with -sin.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.errors import KernelError
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import (
    LANES,
    LARGEST_TRANSFER,
    SMALLEST_TRANSFER,
    STEPS,
    TPU_DTYPES,
    VmemTiles,
    call,
    planning_chip,
    round_up,
    sublanes,
    tiled_bytes,
    vmem_budget,
)
from vishwamai.core.target import Target
from vishwamai.core.tiles import size
from vishwamai.core.types import AnyArray, Ref
from vishwamai.ops.rope.reference import table_gradients
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec

_TRANSFER = 0.8e-6
"""Seconds of a core's share of the bandwidth that the smallest transfer takes, for the same reason: the newer chips
move more in their latency.
"""
_TABLE_ROWS = 8
"""Rows of the tables that make a tile."""
_CHUNK_BYTES = 32 << 10
"""Of float32 features that are turned together: eight registers."""


@dataclasses.dataclass(frozen=True)
class RopeConfig(VmemTiles):
    """Tiles of the TPU kernel.

    Attributes:
      block_positions: positions that one grid step holds in VMEM, with all their heads.
      chunk_positions: positions that are turned together in registers; divides `block_positions`.
      vmem_bytes: bytes of VMEM that a step plans to use.
    """

    # A tile of the tables, of which "bshd" may turn fewer rows at a time.
    block_positions: int = size(
        "positions", block_size=lambda tiles, n: round_up(n, max(_TABLE_ROWS, tiles.chunk_positions))
    )
    chunk_positions: int = size("positions")
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_positions < 1 or self.block_positions < 1 or self.block_positions % self.chunk_positions:
            raise KernelError(
                f"RopeConfig: chunk_positions is {self.chunk_positions} and block_positions {self.block_positions}; "
                "block_positions must be a multiple of chunk_positions."
            )

    def needs(self, spec: RopeSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": _block_bytes(spec, self.block_positions)}


def _chunk(spec: RopeSpec) -> int:
    """Positions that are turned together: registers for one head's, in "bshd" for all heads'."""
    tile = sublanes(spec.operands.query.dtype)
    width = round_up(spec.head_dim, LANES) * 4
    if spec.layout == "bhsd":
        rows = max(1, _CHUNK_BYTES // (width * tile)) * tile
        rows = min(rows, round_up(spec.positions, tile))
        while rows > tile and _block_bytes(spec, rows) > vmem_budget(Target("tpu")):  # many heads
            rows = max(tile, rows // 2 // tile * tile)
        return rows
    # Rows of tables that are wider than a register are read by whole tiles; their positions are then turned a few at a
    # time.
    return 8 if spec.head_dim > LANES else _position_group(spec)


def _position_group(spec: RopeSpec) -> int:
    """Positions whose heads, in "bshd", are turned in registers together: 1, 2, 4 or 8."""
    heads = max(round_up(spec.heads(x), 8) for x in spec.operands[:2] if x is not None)
    most = max(1, min(8, _CHUNK_BYTES // (round_up(spec.head_dim, LANES) * 4 * heads)))
    return 1 << (most.bit_length() - 1)


def _block_bytes(spec: RopeSpec, positions: int) -> int:
    """VMEM of `positions` positions: queries and keys in and out and two tables, double buffered."""
    width = spec.head_dim
    total = 2 * tiled_bytes((positions, width), jnp.float32)
    for x in spec.operands[:2]:
        if x is not None:
            heads = spec.heads(x)
            shape = (heads, positions, width) if spec.layout == "bhsd" else (positions, heads, width)
            total += 2 * tiled_bytes(shape, x.dtype)
    return 2 * total


def why_not(spec: RopeSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    query = spec.operands.query
    if query.dtype not in TPU_DTYPES:
        return f"`x` is {query.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if spec.operands.cos.dtype not in (*TPU_DTYPES, jnp.dtype(jnp.float16)):
        return f"the tables are {spec.operands.cos.dtype.name}, and the TPU's vector unit computes in float32."
    if any(x is not None and x.size == 0 for x in spec.operands):
        return "an array is empty."
    rows = max(_TABLE_ROWS, _chunk(spec))
    need = _block_bytes(spec, rows)
    if need > vmem_budget(target):
        return (
            f"{rows} positions of all heads take {need:,} bytes of VMEM, more than the {vmem_budget(target):,} "
            "there are to plan with."
        )
    return None


def heuristic(spec: RopeSpec, target: Target) -> RopeConfig:
    """As many positions as make a transfer worth its latency, but few enough that the first and the last, which nothing
    hides, are a small part.
    """
    chunk = _chunk(spec)
    query = spec.operands.query
    position_bytes = max(
        1, spec.heads(query) * round_up(spec.head_dim, LANES) * query.dtype.itemsize
    )  # bytes a position
    planned = planning_chip(target)
    transfer = position_bytes * spec.batch * spec.positions // (planned.cores_per_device * STEPS)
    smallest = max(SMALLEST_TRANSFER, int(_TRANSFER * planned.hbm_bandwidth_per_device / planned.cores_per_device))
    transfer = min(max(transfer, smallest), LARGEST_TRANSFER)
    by_memory = vmem_budget(target) * chunk // _block_bytes(spec, chunk)
    count = max(1, min(transfer // position_bytes, by_memory, round_up(spec.positions, chunk)) // chunk)
    rows = max(_TABLE_ROWS, chunk << (count.bit_length() - 1))
    return RopeConfig(rows, chunk, _block_bytes(spec, rows))


def _shifted(x: jax.Array, by: int) -> jax.Array:
    """`x` with its last axis turned by `by` features to the right, around the end."""
    size = x.shape[-1]
    by %= size
    if size % LANES == 0:
        return pltpu.roll(x, by, axis=x.ndim - 1)  # whole registers rotate lanes in one operation
    return jnp.concatenate([x[..., size - by :], x[..., : size - by]], axis=-1)


def _exchanged(spec: RopeSpec, x: jax.Array) -> jax.Array:
    """`x` with the two features of each pair exchanged; anything in features that do not turn."""
    if not spec.interleaved and 2 * spec.pairs == spec.head_dim:
        return _shifted(x, spec.pairs)
    feature = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    first = feature % 2 == 0 if spec.interleaved else feature < spec.pairs  # the first feature of a pair
    by = 1 if spec.interleaved else spec.pairs
    return jnp.where(first, _shifted(x, -by), _shifted(x, by))  # each from the other's place


def _turned(spec: RopeSpec, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    y = wide * cos + _exchanged(spec, wide) * sin  # the sign of the pair's first feature is in `sin`
    if 2 * spec.pairs < spec.head_dim:  # not by cos = 1 and sin = 0, for 0 * NaN is NaN
        feature = lax.broadcasted_iota(jnp.int32, y.shape, y.ndim - 1)
        y = jnp.where(feature < 2 * spec.pairs, y, wide)
    return y.astype(x.dtype)


def _kernel(
    cos_ref: Ref,
    sin_ref: Ref,
    query_ref: Ref,
    key_ref: Ref | None,
    query_out: Ref,
    key_out: Ref,
    *,
    spec: RopeSpec,
    config: RopeConfig,
) -> None:
    """One step: blocks [heads, positions, features] or [positions, heads, features], tables [positions, features]."""
    turned = [(query_ref, query_out)] + ([] if key_ref is None else [(key_ref, key_out)])

    def chunk(i: jax.Array, carry: None) -> None:
        rows = pl.ds(pl.multiple_of(i * config.chunk_positions, config.chunk_positions), config.chunk_positions)
        cos, sin = cos_ref[rows, :], sin_ref[rows, :]  # [chunk_positions, features]
        if spec.layout == "bshd":
            few = math.gcd(_position_group(spec), config.chunk_positions)
            for j in range(0, config.chunk_positions, few):
                part = pl.ds(i * config.chunk_positions + j, few)
                factors = cos[j : j + few, None, :], sin[j : j + few, None, :]  # [few, 1, features], for all heads
                for x_ref, y_ref in turned:
                    y_ref[part] = _turned(spec, x_ref[part], *factors)
            return
        for x_ref, y_ref in turned:

            def head(h: jax.Array, carry: None, x_ref: AnyArray = x_ref, y_ref: Any = y_ref) -> None:
                y_ref[h, rows, :] = _turned(spec, x_ref[h, rows, :], cos, sin)

            heads = x_ref.shape[0]
            lax.fori_loop(0, heads, head, None, unroll=next(n for n in (4, 3, 2, 1) if heads % n == 0))

    lax.fori_loop(0, config.block_positions // config.chunk_positions, chunk, None)


def _by_feature(spec: RopeSpec, table: jax.Array, first: int) -> jax.Array:
    """A table as a factor of each feature, `[B or 1, T, D]` float32; `first` is the sign for the first of each pair."""
    table = table.astype(jnp.float32)
    if spec.interleaved:
        spread = jnp.stack([first * table, table], axis=-1).reshape(*table.shape[:-1], -1)  # pairs (0, 1), (2, 3), ...
    else:
        spread = jnp.concatenate([first * table, table], axis=-1)  # pairs (0, P), (1, P + 1), ... of P
    return jnp.pad(spread, ((0, 0), (0, 0), (0, spec.head_dim - 2 * spec.pairs)))


def turn(spec: RopeSpec, config: RopeConfig, operands: Operands, name: str) -> tuple[AnyArray, AnyArray]:
    """The kernel on the query and, where there is one, the key."""
    query, key = operands.query, operands.key
    rows, width = config.block_positions, spec.head_dim

    def block(x: AnyArray) -> pl.BlockSpec | None:
        if x is None:
            return None
        if spec.layout == "bhsd":
            return pl.BlockSpec((None, x.shape[1], rows, width), lambda i, b: (b, 0, i, 0))
        return pl.BlockSpec((None, rows, x.shape[2], width), lambda i, b: (b, i, 0, 0))

    # The batch is the inner axis: tables that it shares are read once.
    shared = operands.cos.shape[0] == 1
    table = pl.BlockSpec((None, rows, width), lambda i, b: (0 if shared else b, i, 0))

    return call(
        functools.partial(_kernel, spec=spec, config=config),
        name=name,
        grid=(pl.cdiv(spec.positions, rows), spec.batch),
        inputs=dict(
            cos_ref=(_by_feature(spec, operands.cos, 1), table),
            sin_ref=(_by_feature(spec, operands.sin, -1), table),
            query_ref=(query, block(query)),
            key_ref=(key, block(key)),
        ),
        outputs=dict(
            query_out=(query.shape, query.dtype, block(query)),
            key_out=None if key is None else (key.shape, key.dtype, block(key)),
        ),
        semantics=("parallel", "parallel"),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
    )


def forward(spec: RopeSpec, config: RopeConfig, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(*turn(spec, config, operands, "rope_forward")), None


def backward(spec: RopeSpec, config: RopeConfig, operands: Operands, cotangents: Outputs) -> Operands:
    # The inverse of a rotation is the one by the opposite angle.
    dquery, dkey = turn(spec, config, Operands(*cotangents, operands.cos, -operands.sin), "rope_backward")
    return Operands(dquery, dkey, *table_gradients(spec, operands, cotangents))


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, RopeConfig)
