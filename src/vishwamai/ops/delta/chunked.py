"""The gated delta rule by chunks of tokens, as products, in plain JAX: memory linear in the sequence on every platform.

With G the sums of the log-decays from the start of a chunk, S the state before it, and masks that leave out other
segments:

    A[t, s] = beta_t (k_t . k_s) exp(G_t - G_s) for s < t,   P[t, s] = (q_t . k_s) exp(G_t - G_s) for s <= t
    U = (I + A)^-1 beta (V - (exp(G) K) S),   Y = (exp(G) Q) S + P U,   S' = exp(G_C) S + (exp(G_C - G) K)^T U

Yang, Wang, Zhang, Shen, Kim, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length" (2024); Yang,
Kautz, Hatamizadeh, "Gated Delta Networks" (2024). Without the correction A is 0: Dao, Gu, "Transformers are SSMs"
(2024). With a decay for each channel, products of blocks of tokens take their decays from the start of the later block,
so that no factor exceeds 1: Kimi Team, "Kimi Linear" (2025).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.segments import segment_numbers
from vishwamai.core.sharding import match_varying
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size
from vishwamai.core.types import AnyArray
from vishwamai.ops.delta.reference import start_state, with_skip
from vishwamai.ops.delta.spec import DeltaSpec, Operands, Outputs

SUB_BLOCK = 16
"""Tokens whose decays by channel are multiplied out, pair by pair."""
FEW = 8
"""Tokens up to which the recurrence takes fewer operations than a chunk, and features of values up to which a scan does
where each channel has a decay.
"""
_GRID = 16.0
"""Sums of multiples of 1 / _GRID are exact in float32 for any chunk of clamped decays."""


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(Tiles):
    """`chunk` tokens become one set of products."""

    chunk: int = size("tokens", 64, least=16, most=256, block_size=lambda tiles, n: n)


def why_not_default(spec: DeltaSpec, target: Target) -> str | None:
    return f"{spec.seq} tokens take fewer operations one by one." if spec.seq <= FEW else None


def heuristic(spec: DeltaSpec, target: Target) -> ChunkedConfig:
    """64 tokens: as many operations within a chunk as with the state, for the usual 128 channels."""
    return ChunkedConfig(min(64, max(1, spec.seq)))


class LogSums(NamedTuple):
    """Sums of log-decays along a chunk in two parts, of which the coarse one is exact, so that the difference of two of
    them is as accurate as the sum of what lies between.
    """

    coarse: jax.Array
    fine: jax.Array

    def minus(self, subtrahend: LogSums) -> jax.Array:
        return (self.coarse - subtrahend.coarse) + (self.fine - subtrahend.fine)

    def __getitem__(self, index: object) -> LogSums:  # type: ignore[override]
        return LogSums(self.coarse[index], self.fine[index])

    @property
    def total(self) -> jax.Array:
        return self.coarse + self.fine


def log_sums(decay: jax.Array) -> LogSums:
    """The sums of `decay` along the last axis but one, the token itself included. A log-decay whose exponential is 0
    counts as the least one that is.
    """
    least = -800.0 if decay.dtype == jnp.float64 else -110.0
    decay = jnp.maximum(decay, least)
    coarse = lax.stop_gradient(jnp.round(decay * _GRID) / _GRID)
    return LogSums(jnp.cumsum(coarse, axis=-2), jnp.cumsum(decay - coarse, axis=-2))


def unit_lower_inverse(a: jax.Array, precision: Any) -> jax.Array:
    """`(I + a)^-1` of strictly lower triangular matrices by products: the inverses of diagonal blocks, then of blocks
    twice as large. As stable as substitution, unlike the series of powers.
    """
    size = a.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    inverse = jnp.where(row == column, 1.0, 0.0).astype(a.dtype)
    block = 1
    while block < size:
        below = (row // (2 * block) == column // (2 * block)) & (row // block > column // block)
        off = jnp.where(below, a, 0.0)
        if block == 1:
            inverse = inverse - off
        else:
            off = jnp.matmul(inverse, off, precision=precision)
            inverse = inverse - jnp.matmul(off, inverse, precision=precision)
        block *= 2
    return inverse


def _past(between: jax.Array, seen: jax.Array, axes: tuple[int, int] = (-2, -1)) -> jax.Array:
    """The decays between two tokens, -inf where `seen` is False; of a token and itself 0, because the gradients of two
    equal sums cancel only up to their rounding.
    """
    row, column = (lax.broadcasted_iota(jnp.int32, between.shape, between.ndim + axis) for axis in axes)
    return jnp.where(row == column, 0.0, jnp.where(seen & (row > column), between, -jnp.inf))


def _scores(rows: jax.Array, key: jax.Array, sums: LogSums | None, seen: jax.Array, precision: Any) -> jax.Array:
    """rows[t] . key[s] with the decays between t and s, 0 where `seen` is False; `[..., chunk, chunk]`."""

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b.mT, precision=precision)

    if sums is None or sums.coarse.shape[-1] == 1:
        scores = product(rows, key)
        if sums is not None:
            between = sums.minus(LogSums(*(x.mT for x in sums)))
            scores = scores * jnp.exp(_past(between, seen))
        return jnp.where(seen, scores, 0.0)
    chunk = key.shape[-2]
    parts = []
    for start in range(0, chunk, SUB_BLOCK):
        block = slice(start, min(start + SUB_BLOCK, chunk))
        inside = sums[..., block, :]
        between = inside[..., :, None, :].minus(inside[..., None, :, :])
        between = _past(between, seen[..., block, block, None], axes=(-3, -2))
        terms = rows[..., block, None, :] * key[..., None, block, :] * jnp.exp(between)
        part = [jnp.sum(terms, axis=-1)]
        if start:
            before = sums[..., start - 1 : start, :]
            left = rows[..., block, :] * jnp.exp(inside.minus(before))
            right = key[..., :start, :] * jnp.exp(before.minus(sums[..., :start, :]))
            part.insert(0, product(left, right))
        pad = [(0, 0)] * (key.ndim - 1) + [(0, chunk - block.stop)]
        parts.append(jnp.pad(jnp.concatenate(part, axis=-1), pad))
    return jnp.where(seen, jnp.concatenate(parts, axis=-2), 0.0)


class Chunk(NamedTuple):
    """The tokens of a chunk in the dtype of sums, `[batch, key heads, group or 1, chunk, ...]`; `numbers` of their
    segments `[batch or 1, 1 + chunk]`, the first of which is the state's.
    """

    value: jax.Array
    query: jax.Array
    key: jax.Array
    decay: jax.Array | None
    beta: jax.Array | None
    numbers: jax.Array | None


def chunk_step(spec: DeltaSpec, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """(the state after a chunk, y of its tokens); the state is `[batch, key heads, group, key_dim, value_dim]`."""
    value, query, key, decay, beta, numbers = chunk
    # States and updates have more digits than 16-bit operands, so one pass of bfloat16 products is not enough.
    wide = spec.operands.value.dtype.itemsize >= 4
    precision = lax.Precision.HIGHEST if wide else lax.Precision.HIGH
    count = value.shape[-2]
    row, column = (lax.broadcasted_iota(jnp.int32, (count, count), axis) for axis in (0, 1))
    seen = row >= column
    enters: jax.Array | float = 1.0  # factors of the state before the chunk, for each token
    leaves: jax.Array | float = 1.0  # factors of each token for the state after the chunk
    remains: jax.Array | float = 1.0
    sums = None
    if decay is not None:
        sums = log_sums(decay)
        last = sums[..., -1:, :]
        after = jnp.where(row[:, :1] == count - 1, 0.0, last.minus(sums))  # for the reason of `_past`
        enters, leaves, remains = jnp.exp(sums.total), jnp.exp(after), jnp.exp(last.total).mT
    if numbers is not None:
        numbers = numbers[:, None, None]
        tokens, first, last = numbers[..., 1:], numbers[..., :1], numbers[..., -1:]
        seen = seen & (tokens[..., :, None] == tokens[..., None, :])
        enters = jnp.where((tokens == first)[..., None], enters, 0.0)
        leaves = jnp.where((tokens == last)[..., None], leaves, 0.0)
        remains = jnp.where((last == first)[..., None], remains, 0.0)

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.matmul(a, b, precision=precision)

    update = value
    if spec.correction:
        update = update - product(key * enters, state)
    if beta is not None:
        update = update * beta[..., None]
    if spec.correction:
        a = _scores(key, key, sums, seen & (row > column), precision)
        update = product(unit_lower_inverse(a if beta is None else a * beta[..., None], precision), update)
    y = product(query * enters, state) + product(_scores(query, key, sums, seen, precision), update)
    return state * remains + product((key * leaves).mT, update), spec.scale * y


def scan_step(spec: DeltaSpec, state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """The same without the correction, by a scan of `S -> factor S + write` over the chunk's tokens, whose states all
    exist at once: few operations where a state has few values for each decay of its own (Mamba). Blelloch, "Prefix
    sums and their applications" (1990).
    """
    value, query, key, decay, beta, numbers = chunk
    assert decay is not None
    writes = key[..., None] * (value if beta is None else value * beta[..., None])[..., None, :]
    factors = jnp.exp(decay)[..., None]  # [batch, key heads, group, chunk, key_dim, 1]
    if numbers is not None:
        begins = numbers[:, 1:] != numbers[:, :-1]
        factors = jnp.where(begins[:, None, None, :, None, None], 0.0, factors)

    def then(first: tuple[jax.Array, jax.Array], second: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return first[0] * second[0], second[0] * first[1] + second[1]

    factors, sums = lax.associative_scan(then, (factors, writes), axis=3)
    states = factors * state[..., None, :, :] + sums
    return states[..., -1, :, :], spec.scale * jnp.sum(query[..., None] * states, axis=-2)


def chunks_of(spec: DeltaSpec, operands: Operands, size: int) -> tuple[Chunk, int]:
    """The chunks, an axis of `lax.scan` in front, and their count. Tokens past the end change no state: their key is
    0 and their log-decay 0.
    """
    count = -(-spec.seq // size)
    groups = max(1, spec.key_heads)

    def cut(x: AnyArray, heads: int) -> AnyArray:
        if x is None:
            return None
        x = x.astype(spec.accumulator)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, count * size - spec.seq), *[(0, 0)] * (x.ndim - 3)])
        x = x.reshape(spec.batch, groups, heads // groups, count, size, *x.shape[3:])
        return jnp.moveaxis(x, 3, 0)

    numbers = None
    if operands.segment_ids is not None:
        rows = jnp.pad(segment_numbers(operands.segment_ids), ((0, 0), (0, count * size - spec.seq)), mode="edge")
        tokens = rows.reshape(rows.shape[0], count, size)
        before = jnp.pad(tokens[:, :-1, -1:], ((0, 0), (1, 0), (0, 0)))
        numbers = jnp.moveaxis(jnp.concatenate([before, tokens], axis=2), 1, 0)
    value, decay, beta = (cut(x, spec.heads) for x in (operands.value, operands.decay, operands.beta))
    query, key = (cut(x, spec.key_heads) for x in (operands.query, operands.key))
    return Chunk(value, query, key, decay, beta, numbers), count


def forward(spec: DeltaSpec, config: ChunkedConfig, operands: Operands) -> tuple[Outputs, None]:
    """One step of `lax.scan` for each chunk. Its gradient saves the state before each chunk and computes the rest
    again.
    """
    state = start_state(spec, operands)
    if 0 in (spec.batch, spec.seq, spec.heads):
        y = jnp.zeros_like(operands.value)
        return Outputs(y, state if spec.return_state else None), None
    size = max(1, min(config.chunk, spec.seq))
    chunks, count = chunks_of(spec, operands, size)
    state = state.reshape(spec.batch, spec.key_heads, -1, spec.key_dim, spec.value_dim)
    state, _ = match_varying((state, operands))

    scans = spec.by_channel and not spec.correction and spec.value_dim <= FEW

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state: jax.Array, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        return (scan_step if scans else chunk_step)(spec, state, chunk)

    state, y = lax.scan(step, state, chunks)
    y = jnp.moveaxis(y, 0, 3).reshape(spec.batch, spec.heads, count * size, spec.value_dim)[:, :, : spec.seq]
    y = with_skip(spec, operands, y).astype(operands.value.dtype)
    state = state.reshape(spec.batch, spec.heads, spec.key_dim, spec.value_dim) if spec.return_state else None
    return Outputs(y, state), None


XLA_CHUNKED = Implementation(
    "xla_chunked",
    None,
    forward,
    autodiff_backward(forward),
    heuristic=heuristic,
    config_type=ChunkedConfig,
    why_not_default=why_not_default,
)
