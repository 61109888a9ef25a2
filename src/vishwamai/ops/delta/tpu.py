"""The gated delta rule on TPU (Pallas): a grid step takes a chunk of tokens of a few heads, whose states stay in VMEM
from chunk to chunk.

The products are those of `chunked.py`. What a chunk needs of decays, betas and segments comes as rows of one float32
array, a row for each quantity, and becomes columns by a masked sum. For 16-bit operands every product is one pass of
the matrix unit, whose inputs are rounded to bfloat16; states and updates are stored and summed in float32. The backward
pass is that of `chunked.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, VmemTiles, call, dot, round_up, tiled_bytes, vmem_budget
from vishwamai.core.segments import segment_numbers
from vishwamai.core.target import Target
from vishwamai.core.tiles import size
from vishwamai.core.types import Ref
from vishwamai.ops.delta import chunked
from vishwamai.ops.delta.spec import DeltaSpec, Operands, Outputs

_ROWS = 8
"""Of the array of a chunk's quantities: one tile."""
Product = Callable[[jax.Array, jax.Array, tuple[int, int]], jax.Array]
_COARSE, _FINE, _BETA, _NUMBER, _BEFORE, _SKIP = range(6)


@dataclasses.dataclass(frozen=True)
class DeltaConfig(VmemTiles):
    """Tiles of the TPU kernel.

    Attributes:
      chunk: tokens that become one set of products; a multiple of 16.
      heads: heads of the state in a grid step.
      vmem_bytes: bytes of VMEM that a step plans to use.
    """

    chunk: int = size("tokens", 64, least=16, most=256, block_size=lambda tiles, n: round_up(n, 16))
    heads: int = size("heads", 1)
    vmem_bytes: int = 0

    def needs(self, spec: DeltaSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": _step_bytes(spec, self.chunk, self.heads)}


def _step_bytes(spec: DeltaSpec, chunk: int, heads: int) -> int:
    """Blocks in and out, double buffered; the states; a chunk's float32 temporaries."""
    dtype, group = spec.operands.value.dtype, spec.heads // spec.key_heads
    tokens = 2 * heads * tiled_bytes((chunk, spec.value_dim), dtype)
    tokens += 2 * max(1, heads // group) * tiled_bytes((chunk, spec.key_dim), dtype)
    state = heads * tiled_bytes((spec.key_dim, spec.value_dim), jnp.float32)
    rows = heads * tiled_bytes((_ROWS, chunk), jnp.float32)
    temporaries = 6 * tiled_bytes((chunk, chunk), jnp.float32) + 4 * tiled_bytes((chunk, spec.value_dim), jnp.float32)
    return 2 * (tokens + rows) + 5 * state + heads * temporaries


def why_not(spec: DeltaSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    value = spec.operands.value
    if value.dtype not in TPU_DTYPES:
        return f"`value` is {value.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if value.size == 0 or spec.key_dim == 0:
        return "an axis is empty."
    if spec.by_channel:
        return "each channel has a decay of its own, and the kernel takes one for a head."
    need = _step_bytes(spec, 16, 1)
    if need > vmem_budget(target):
        return f"a state of {spec.key_dim} x {spec.value_dim} takes {need:,} bytes of VMEM, more than it can plan with."
    return None


def heuristic(spec: DeltaSpec, target: Target) -> DeltaConfig:
    """64 tokens, and as many heads up to eight as memory holds: the products of one hide the wait for another's."""
    chunk = min(64, round_up(spec.seq, 16))
    heads = 8
    while heads > 1 and _step_bytes(spec, chunk, heads) > vmem_budget(target):
        heads //= 2
    heads = _step_heads(spec, heads)
    return DeltaConfig(chunk, heads, _step_bytes(spec, chunk, heads))


def _step_heads(spec: DeltaSpec, most: int) -> int:
    """Heads of a step, `most` at most, that divide those of the call and share heads of query and key evenly."""
    group = spec.heads // spec.key_heads
    return next(n for n in range(most, 0, -1) if spec.heads % n == 0 and (n % group == 0 or group % n == 0))


def _inverses(matrices: list[jax.Array], row: jax.Array, column: jax.Array, product: Product) -> list[jax.Array]:
    """`chunked.unit_lower_inverse` of several matrices, level by level, so that the products of one hide the wait for
    those of another; of blocks of whole tiles the rows that are not zero alone.
    """
    count = row.shape[0]
    # Blocks of one row: the inverse of a unit triangle of size 1 is 1. Each level joins pairs of blocks [[A, 0], [B,
    # C]], whose inverse has -C^-1 B A^-1 below its diagonal.
    inverses = [jnp.where(row == column, 1.0, 0.0)] * len(matrices)
    block = 1
    while block < count:
        bits = block.bit_length() - 1  # not `//`, which Mosaic cannot lower without a TPU
        below = (row >> bits + 1 == column >> bits + 1) & (row >> bits > column >> bits)  # B of each pair
        offs = [jnp.where(below, a, 0.0) for a in matrices]
        by_pairs = block % _ROWS == 0 and count % (2 * block) == 0  # whole tiles: only rows of C change
        lower = [_odd(x, block) if by_pairs else x for x in inverses]
        if block > 1:
            offs = [product(x, off, (1, 0)) for x, off in zip(lower, offs, strict=True)]  # C^-1 B
            offs = [product(off, x, (1, 0)) for off, x in zip(offs, inverses, strict=True)]  # C^-1 B A^-1
        lower = [x - off for x, off in zip(lower, offs, strict=True)]
        if by_pairs:
            pairs = [
                (x.reshape(-1, 2, block, count)[:, 0], y.reshape(-1, block, count)) for x, y in zip(inverses, lower)
            ]
            lower = [jnp.stack(pair, axis=1).reshape(count, count) for pair in pairs]
        inverses, block = lower, 2 * block
    return inverses


def _odd(x: jax.Array, block: int) -> jax.Array:
    """The rows of every second block, the first left out."""
    return x.reshape(-1, 2, block, x.shape[1])[:, 1].reshape(-1, x.shape[1])


class _Rows(NamedTuple):
    """What a head's tokens bring besides query, key and value: columns `[chunk, 1]`, and `decays` `[chunk, chunk]`."""

    enters: jax.Array
    leaves: jax.Array
    remains: jax.Array
    decays: jax.Array
    beta: jax.Array


def _read_rows(spec: DeltaSpec, rows: jax.Array, row: jax.Array, column: jax.Array) -> _Rows:
    def line(i: int) -> jax.Array:
        return rows[i : i + 1]  # [1, chunk]

    def upright(i: int) -> jax.Array:
        return jnp.sum(jnp.where(row == column, line(i), 0.0), axis=1, keepdims=True)  # [chunk, 1]

    # Sums of the coarse parts, multiples of a grid, are exact: differences of long sums lose no digits.
    coarse, fine, past = upright(_COARSE), upright(_FINE), row > column
    enters = jnp.exp(coarse + fine)  # [chunk, 1]: decay from the chunk's start to each token
    # From each token to the end of the chunk.
    leaves = jnp.exp((line(_COARSE)[:, -1:] - coarse) + (line(_FINE)[:, -1:] - fine))
    remains = enters[-1:]  # [1, 1]: over the whole chunk
    if spec.operands.segment_ids is not None:
        number, before, last = upright(_NUMBER), line(_BEFORE)[:, :1], line(_NUMBER)[:, -1:]
        past &= number == line(_NUMBER)  # a token sees its own segment only
        enters = jnp.where(number == before, enters, 0.0)  # the incoming state is of its segment only
        leaves = jnp.where(number == last, leaves, 0.0)
        remains = jnp.where(before == last, remains, 0.0)
    # [chunk, chunk]. Coarse sums are multiples of a grid, so that their difference is exact (`chunked.log_sums`).
    between = (coarse - line(_COARSE)) + (fine - line(_FINE))
    decays = jnp.where(past, jnp.exp(jnp.where(past, between, 0.0)), 0.0)  # no exp of a positive future
    return _Rows(enters, leaves, remains, decays, upright(_BETA))


def _kernel(
    query_ref: Ref,
    key_ref: Ref,
    value_ref: Ref,
    rows_ref: Ref,
    start_ref: Ref | None,
    y_ref: Ref,
    state_out: Ref | None,
    state_ref: Ref,
    *,
    spec: DeltaSpec,
    config: DeltaConfig,
) -> None:
    """Blocks [key heads, chunk, key_dim], [heads, chunk, value_dim], rows [heads, 8, chunk]; states in scratch
    [heads, key_dim, value_dim].
    """
    step, chunk = pl.program_id(2), config.chunk
    dtype = spec.operands.value.dtype
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT

    @pl.when(step == 0)
    def _() -> None:
        # [heads, key_dim, value_dim]
        state_ref[...] = jnp.zeros_like(state_ref) if start_ref is None else start_ref[...]

    row, column = (lax.broadcasted_iota(jnp.int32, (chunk, chunk), axis) for axis in (0, 1))
    ragged = spec.seq % chunk != 0
    group = value_ref.shape[0] // key_ref.shape[0]  # value heads that share a head of query and key

    def product(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
        return dot(a.astype(dtype), b.astype(dtype), axes, precision=precision)

    def masked(x: jax.Array) -> jax.Array:
        """0 past the end of the sequence, where memory holds anything."""
        if not ragged:
            return x
        token = lax.broadcasted_iota(jnp.int32, x.shape, 0) + step * chunk
        return jnp.where(token < spec.seq, x, jnp.zeros_like(x))

    # Each line does its part for all heads, which wait for nothing of one another.
    heads = range(value_ref.shape[0])
    keys = [masked(key_ref[i]) for i in range(key_ref.shape[0])]
    pairs = [jnp.concatenate([masked(query_ref[i]), key], axis=0) for i, key in enumerate(keys)]  # [2 chunk, key_dim]
    scores = [dot(x, key, (1, 1), precision=precision) for x, key in zip(pairs, keys, strict=True)]
    of_state = [product(pairs[h // group], state_ref[h], (1, 0)) for h in heads]  # [2 chunk, value_dim]
    rows = [_read_rows(spec, rows_ref[h], row, column) for h in heads]
    values = [masked(value_ref[h]).astype(jnp.float32) for h in heads]
    updates = values  # [chunk, value_dim] of each head
    if spec.correction:
        updates = [v - r.enters * x[chunk:] for v, r, x in zip(updates, rows, of_state, strict=True)]  # v - e^G S^T k
    if spec.operands.beta is not None:
        updates = [u * r.beta for u, r in zip(updates, rows, strict=True)]
    if spec.correction:
        a = [scores[h // group][chunk:] * rows[h].decays for h in heads]  # [chunk, chunk], strictly lower
        if spec.operands.beta is not None:
            a = [x * r.beta for x, r in zip(a, rows, strict=True)]
        updates = [product(x, u, (1, 0)) for x, u in zip(_inverses(a, row, column, product), updates, strict=True)]
    for h in heads:
        past = scores[h // group][:chunk] * jnp.where(row == column, 1.0, rows[h].decays)  # [chunk, chunk], lower
        y = spec.scale * (rows[h].enters * of_state[h][:chunk] + product(past, updates[h], (1, 0)))
        if spec.operands.skip is not None:
            y += rows_ref[h][_SKIP : _SKIP + 1, :1] * values[h]
        y_ref[h] = y.astype(y_ref.dtype)
        state_ref[h] = rows[h].remains * state_ref[h] + product(keys[h // group], rows[h].leaves * updates[h], (0, 0))

    if state_out is not None:

        @pl.when(step == pl.num_programs(2) - 1)
        def _() -> None:
            state_out[...] = state_ref[...]


def _rows(spec: DeltaSpec, chunk: int, operands: Operands) -> jax.Array:
    """What the kernel needs of decays, betas and segments: float32 `[batch, heads, chunks, 8, chunk]`."""
    count = -(-spec.seq // chunk)
    shape = spec.batch, spec.heads, count, chunk

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, count * chunk - spec.seq)))
        return x.reshape(shape)

    zeros = jnp.zeros(shape, jnp.float32)
    rows = [zeros] * _ROWS
    if operands.decay is not None:
        sums = chunked.log_sums(cut(operands.decay[..., 0])[..., None])
        rows[_COARSE], rows[_FINE] = sums.coarse[..., 0], sums.fine[..., 0]
    if operands.beta is not None:
        rows[_BETA] = cut(operands.beta)
    if operands.segment_ids is not None:
        numbers = segment_numbers(operands.segment_ids)
        # Padding belongs to the last segment.
        numbers = jnp.pad(numbers, ((0, 0), (0, count * chunk - spec.seq)), mode="edge")
        numbers = numbers.reshape(-1, 1, count, chunk).astype(jnp.float32)
        # The segment at the end of the chunk before.
        before = jnp.pad(numbers[:, :, :-1, -1:], ((0, 0), (0, 0), (1, 0), (0, 0)))
        rows[_NUMBER], rows[_BEFORE] = jnp.broadcast_to(numbers, shape), jnp.broadcast_to(before, shape)
    if operands.skip is not None:
        rows[_SKIP] = jnp.broadcast_to(operands.skip[:, :, None, None].astype(jnp.float32), shape)
    return jnp.stack(rows, axis=3)


def forward(spec: DeltaSpec, config: DeltaConfig, operands: Operands) -> tuple[Outputs, None]:
    chunk, heads, group = config.chunk, _step_heads(spec, config.heads), spec.heads // spec.key_heads
    few = max(1, heads // group)  # heads of query and key in a step
    sharing = max(1, group // heads)  # steps that read the same heads of query and key
    narrow = pl.BlockSpec((None, few, chunk, spec.key_dim), lambda b, h, c: (b, lax.div(h, sharing), c, 0))
    wide = pl.BlockSpec((None, heads, chunk, spec.value_dim), lambda b, h, c: (b, h, c, 0))
    states = pl.BlockSpec((None, heads, spec.key_dim, spec.value_dim), lambda b, h, c: (b, h, 0, 0))
    shape = spec.batch, spec.heads, spec.key_dim, spec.value_dim
    start = operands.initial_state
    y, state = call(
        functools.partial(_kernel, spec=spec, config=config),
        name="gated_delta_rule_forward",
        grid=(spec.batch, spec.heads // heads, pl.cdiv(spec.seq, chunk)),
        inputs=dict(
            query_ref=(operands.query, narrow),
            key_ref=(operands.key, narrow),
            value_ref=(operands.value, wide),
            rows_ref=(
                _rows(spec, chunk, operands),
                pl.BlockSpec((None, heads, None, _ROWS, chunk), lambda b, h, c: (b, h, c, 0, 0)),
            ),
            start_ref=(None if start is None else start.astype(jnp.float32), states),
        ),
        outputs=dict(
            y_ref=(operands.value.shape, operands.value.dtype, wide),
            state_out=(shape, jnp.float32, states) if spec.return_state else None,
        ),
        scratch=dict(state_ref=pltpu.VMEM((heads, spec.key_dim, spec.value_dim), jnp.float32)),
        semantics=("parallel", "parallel", "arbitrary"),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops,
        bytes_accessed=spec.bytes_moved,
        transcendentals=spec.batch * spec.heads * spec.seq * chunk,
    )
    return Outputs(y, state), None


def backward(spec: DeltaSpec, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs) -> Operands:
    """By XLA, with the products of `chunked.py`."""
    products = chunked.heuristic(spec, Target("tpu"))
    return chunked.XLA_CHUNKED.backward(spec, products, operands, outputs, residuals, cotangents)


PALLAS_TPU = Implementation(
    "pallas_tpu",
    "tpu",
    forward,
    backward,
    why_not,
    heuristic,
    DeltaConfig,
    why_not_default=chunked.why_not_default,
)
