"""Bias, masks, soft cap and dropout on one tile of scores, as the TPU kernels see it: transposed,
`[block_kv, block_q]`.

Queries lie along the lanes, so every statistic of a row is one lane of a `[1, block_q]` vector. Logits are in units of
log2(e), because the hardware's exponential is 2^x: the query is multiplied by scale * log2(e) once, the bias tile by
tile.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core import dropout
from vishwamai.core.pallas import LANES
from vishwamai.core.types import ABSENT, AnyArray, Ref
from vishwamai.ops.attention.spec import AttentionSpec
from vishwamai.ops.attention.tpu_schedule import Tiling, unpack_tile

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def query_factor(spec: AttentionSpec) -> tuple[float, float]:
    """(what the query is multiplied by, what the products are): logits in base 2, or the argument of tanh where there
    is a soft cap.

    One multiplication per query instead of one per score; in bfloat16 it rounds the query once more, as much as a
    change of its last bit. That is within the tolerance of a bfloat16 result, but not of a float32 logsumexp that the
    caller asked for.
    """
    factor = spec.scale * LOG2E if spec.softcap is None else spec.scale / spec.softcap
    return (1.0, factor) if spec.return_lse and spec.operands.query.dtype == jnp.bfloat16 else (factor, 1.0)


def scaled_query(spec: AttentionSpec, query: jax.Array) -> jax.Array:
    """The query as it enters the product with the keys."""
    factor, _ = query_factor(spec)
    return query if factor == 1.0 else (query.astype(jnp.float32) * factor).astype(query.dtype)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over axis `contract[0]` of `a` and `contract[1]` of `b`, summed in float32; float32 operands at full
    precision.
    """
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def transposed(x: jax.Array, visible: jax.Array | None = None) -> jax.Array:
    """`x.T` in its own dtype, by way of float32, whose tiles the hardware transposes; 0 for rows of `x` that `visible`,
    `[1, rows]`, does not show.
    """
    y = x.astype(jnp.float32).T
    if visible is not None:
        y = jnp.where(jnp.broadcast_to(visible, y.shape) > 0.5, y, 0.0)
    return y.astype(x.dtype)


def needs_mask_everywhere(spec: AttentionSpec) -> bool:
    """Whether no tile is without mask code: something is read or drawn for every position, or compared with it."""
    o = spec.operands
    operands = (o.bias, o.mask, o.q_positions, o.slopes)
    return any(operand is not None for operand in operands) or spec.dropout_rate > 0


class AttentionRefs(NamedTuple):
    """The references of attention's kernels; what a kernel or a call has no use for is None.

    Panels are what a grid step holds: `panel_q` blocks of queries and `panel_kv` blocks of keys.
    """

    # Prefetched scalars: the schedule, see `tpu_schedule`; ranges of segment ids or of the keys that positions reach,
    # see `tpu_operands.block_ranges`; sinks in base 2, seeds of dropout.
    panels: Ref = ABSENT
    homes: Ref = ABSENT
    tiles: Ref = ABSENT
    counts: Ref = ABSENT
    q_range: Ref = ABSENT
    kv_range: Ref = ABSENT
    sinks: Ref = ABSENT
    seeds: Ref = ABSENT
    tile_ids: Ref = ABSENT  # [heads or 1, q blocks, kv blocks], flat: patterns of the bias gradient's tiles
    # Operands.
    query: Ref = ABSENT  # [panel_q * block_q, D]
    do: Ref = ABSENT  # [panel_q * block_q, Dv]
    key: Ref = ABSENT  # [panel_kv * block_kv, D]
    value: Ref = ABSENT  # [panel_kv * block_kv, Dv]
    logsumexp: Ref = ABSENT  # [panel_q, 1, block_q], of the forward pass a result
    delta: Ref = ABSENT  # [panel_q, 1, block_q]: rowsum(dO * O)
    bias: Ref = ABSENT
    mask: Ref = ABSENT
    patterns: Ref = ABSENT  # [patterns, words, block_q]
    q_ids: Ref = ABSENT  # [panel_q, 1, block_q]
    kv_ids: Ref = ABSENT  # [panel_kv, 1, block_kv]
    exposed: Ref = ABSENT  # [panel_kv, 1, block_kv]: 1 for the keys of `masks.exposed_keys`
    q_positions: Ref = ABSENT  # [panel_q, 1, block_q]
    slopes: Ref = ABSENT  # [1, 1]: ALiBi's, times log2(e)
    dq_zeros: Ref = ABSENT  # the memory of `dq_sum`
    # Results.
    out: Ref = ABSENT  # [panel_q * block_q, Dv]
    dk: Ref = ABSENT  # [panel_kv * block_kv, D]
    dv: Ref = ABSENT  # [panel_kv * block_kv, Dv]
    dq: Ref = ABSENT  # [panel_q * block_q, D]; a scratch where dq is summed in HBM
    dq_sum: Ref = ABSENT  # [B, Hq, Tq, D] in HBM
    dbias: Ref = ABSENT
    # Scratch: transposed blocks, and sums.
    q_scaled: Ref = ABSENT  # [panel_q * block_q, D]
    v_t: Ref = ABSENT  # [panel_kv, Dv, block_kv]
    acc: Ref = ABSENT  # [panel_q, Dv, block_q]
    m: Ref = ABSENT  # [panel_q, 1, block_q]: running maximum
    l: Ref = ABSENT  # [panel_q, 8, block_q]: running sum, in eight rows
    scores_0: Ref = ABSENT  # [block_kv, block_q]
    scores_1: Ref = ABSENT
    dk_sum: Ref = ABSENT  # [panel_kv, *tpu_backward_walk.sum_shape]
    dv_sum: Ref = ABSENT
    q_t: Ref = ABSENT  # [panel_q, D, block_q]
    do_t: Ref = ABSENT  # [panel_q, Dv, block_q]
    k_t: Ref = ABSENT  # [panel_kv, D, block_kv]
    dq_t: Ref = ABSENT  # [panel_q, or all blocks of a group's queries, D, block_q]
    live: Ref = ABSENT  # the panel's list of tiles, after the segments
    spare: Ref = ABSENT
    copied: Ref = ABSENT


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """Where a tile stands: block indices within the panel, absolute position of its first query and key, its pattern in
    the block mask.
    """

    i: AnyArray
    j: AnyArray
    row: jax.Array
    column: jax.Array
    pattern: int | jax.Array


def tile_at(word: jax.Array, tiling: Tiling, q_panel: jax.Array, kv_panel: jax.Array) -> ScoreTile:
    """Unpacks a word of the schedule."""
    i, j, pattern = unpack_tile(word)
    row = (q_panel * tiling.panel_q + i) * tiling.block_q
    return ScoreTile(i, j, row, (kv_panel * tiling.panel_kv + j) * tiling.block_kv, pattern)


def _unpacked(words: jax.Array, tiling: Tiling) -> jax.Array:
    """A pattern's words `[rows, block_q]` as bool `[block_kv, block_q]`."""
    bits = tiling.block_kv // words.shape[0]
    return jnp.concatenate([(words & np.array(1 << n, np.uint32).view(np.int32)) != 0 for n in range(bits)], axis=0)


def is_dense(x: AnyArray) -> bool:
    """Whether a bias or a mask has a value for every query and key."""
    return x.shape[2] > 1 and x.shape[3] > 1


def _column(row: jax.Array, tiling: Tiling) -> jax.Array:
    """A vector along the keys, `[1, block_kv]`, spread over the tile."""
    lanes = jnp.broadcast_to(row, (LANES, row.shape[1])).T  # [block_kv, 128], all lanes alike
    return jnp.concatenate([lanes] * (tiling.block_q // LANES), axis=1)


def _spread(spec: AttentionSpec, tiling: Tiling, shape: tuple[int, ...], ref: Ref, tile: ScoreTile) -> jax.Array:
    """The tile `[block_kv, block_q]`, or a `[1, block_q]` or `[1, 1]` vector that broadcasts to it, of an operand of
    full `shape`; 32-bit.
    """
    rows, columns = shape[2] > 1, shape[3] > 1
    if rows and columns:
        index = (
            pl.ds(pl.multiple_of(tile.i * tiling.block_q, LANES), tiling.block_q),
            pl.ds(pl.multiple_of(tile.j * tiling.block_kv, LANES), tiling.block_kv),
        )
        x = ref[index].astype(jnp.float32).T
        # Past the end of the array there is anything; it must not reach an arithmetic operation.
        if shape[3] % (tiling.block_kv * tiling.panel_kv):
            x = jnp.where(tile.column + lax.broadcasted_iota(jnp.int32, x.shape, 0) < spec.kv_len, x, 0.0)
        if shape[2] % (tiling.block_q * tiling.panel_q):
            x = jnp.where(tile.row + lax.broadcasted_iota(jnp.int32, x.shape, 1) < spec.q_len, x, 0.0)
        return x
    if rows:
        return ref[tile.i]
    if columns:
        return _column(ref[tile.j], tiling)
    return ref[...]


def bias_tile(spec: AttentionSpec, tiling: Tiling, refs: AttentionRefs, tile: ScoreTile) -> jax.Array:
    """The bias of a tile in the units of what it is added to: of the products, or of the capped logits."""
    bias = _spread(spec, tiling, spec.operands.bias.shape, refs.bias, tile).astype(jnp.float32)
    if spec.softcap is not None and not spec.bias_after_softcap:
        return bias * (1.0 / spec.softcap)
    # A finite bias stays finite in base 2: float32's lowest number is a common way to write "never".
    lowest = float(jnp.finfo(jnp.float32).min) / LOG2E * 0.99
    return jnp.where(bias == -jnp.inf, bias, jnp.maximum(bias, lowest)) * LOG2E


def visible(spec: AttentionSpec, tiling: Tiling, refs: AttentionRefs, tile: ScoreTile) -> jax.Array | None:
    """Which positions of a tile take part, bool, broadcasting to `[block_kv, block_q]`; None if all do."""
    shape = (tiling.block_kv, tiling.block_q)
    terms = []
    low, high = spec.band
    key = lax.broadcasted_iota(jnp.int32, shape, 0)
    if low is not None or high is not None:
        distance = key - lax.broadcasted_iota(jnp.int32, shape, 1)
        ahead = tile.column - tile.row
        if high is not None:
            terms.append(distance <= high - ahead)
        if low is not None:
            terms.append(distance >= low - ahead)
    if tiling.blocks(spec)[1] * tiling.block_kv > spec.kv_len:
        terms.append(key < spec.kv_len - tile.column)
    if refs.patterns is not None:
        terms.append(_unpacked(refs.patterns[tile.pattern], tiling))
    if spec.operands.mask is not None:
        terms.append(_spread(spec, tiling, spec.operands.mask.shape, refs.mask, tile) > 0.5)
    if spec.operands.q_segment_ids is not None:
        terms.append(refs.q_ids[tile.i] == _column(refs.kv_ids[tile.j], tiling))
    if spec.operands.q_positions is not None:
        low, high = spec.reach
        distance = key - (refs.q_positions[tile.i] - tile.column)
        if high is not None:
            terms.append(distance <= high)
        if low is not None:
            terms.append(distance >= low)
    if not terms:
        return None
    seen = terms[0]
    for term in terms[1:]:
        seen = jnp.logical_and(seen, term)
    return seen


def _distance(spec: AttentionSpec, tiling: Tiling, refs: AttentionRefs, tile: ScoreTile) -> jax.Array:
    """How far each key is from the key that the query stands at, float32 `[block_kv, block_q]`."""
    shape = (tiling.block_kv, tiling.block_q)
    key = tile.column + lax.broadcasted_iota(jnp.int32, shape, 0)
    if spec.operands.q_positions is not None:
        return jnp.abs(key - refs.q_positions[tile.i]).astype(jnp.float32)
    row = tile.row + spec.causal_offset + lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.abs(key - row).astype(jnp.float32)


def base2_logits(
    spec: AttentionSpec, tiling: Tiling, refs: AttentionRefs, tile: ScoreTile, s: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits * log2(e) of a tile from its products, -inf where masked; and the soft cap's derivative, None without
    one.
    """
    _, factor = query_factor(spec)
    if factor != 1.0:
        s = s * factor
    if spec.operands.bias is not None and not spec.bias_after_softcap:
        s = s + bias_tile(spec, tiling, refs, tile)
    slope = None
    if spec.softcap is not None:
        t = jnp.tanh(s)
        slope = 1.0 - t * t  # derivative of tanh
        s = t * (spec.softcap * LOG2E)  # softcap * tanh(s / softcap), in units of log2 e
    if spec.bias_after_softcap:
        s = s + bias_tile(spec, tiling, refs, tile)
    if spec.operands.slopes is not None:
        s = s - refs.slopes[...] * _distance(spec, tiling, refs, tile)
    if masked:
        seen = visible(spec, tiling, refs, tile)
        if seen is not None:
            s = jnp.where(seen, s, -jnp.inf)
    return s, slope


def keep_mask(spec: AttentionSpec, tiling: Tiling, refs: AttentionRefs, tile: ScoreTile, head: jax.Array) -> jax.Array:
    """Which positions of a tile dropout keeps. `head` is the flat index batch * Hq + head."""
    rows = tile.row + lax.broadcasted_iota(jnp.int32, (1, tiling.block_q), 1)
    columns = tile.column + lax.broadcasted_iota(jnp.int32, (tiling.block_kv, 1), 0)
    return dropout.keep_mask(refs.seeds[2 * head], refs.seeds[2 * head + 1], rows, columns, spec.dropout_rate)


def probabilities(
    spec: AttentionSpec,
    tiling: Tiling,
    refs: AttentionRefs,
    tile: ScoreTile,
    s: jax.Array,
    dp: jax.Array,
    head: jax.Array,
    masked: bool,
    of_bias: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(P with dropout, gradient of the logits before the soft cap), `[block_kv, block_q]`, from the products of a
    tile. `of_bias`: the gradient of the logits where the bias is added, which may be after the soft cap.
    """
    s, slope = base2_logits(spec, tiling, refs, tile, s, masked)
    # At most 1: of huge logits, the other order of this product's sum may exceed the logsumexp.
    p = jnp.exp2(jnp.minimum(s - refs.logsumexp[tile.i], 0.0))  # [block_kv, block_q]
    hides = masked and refs.exposed is not None  # keys and values that may be infinite or NaN
    if hides and spec.band[1] is not None and tiling.blocks(spec)[0] * tiling.block_q > spec.q_len:
        p = jnp.where(refs.logsumexp[tile.i] == jnp.inf, 0.0, p)  # padding sees keys that no query sees
    dropped = p
    if spec.dropout_rate > 0:
        scale = jnp.where(keep_mask(spec, tiling, refs, tile, head), 1.0 / (1.0 - spec.dropout_rate), 0.0)
        dropped, dp = p * scale, dp * scale  # the same mask and factor as in the forward pass
    ds = p * (dp - refs.delta[tile.i])  # [block_kv, block_q]
    if slope is not None and not (of_bias and spec.bias_after_softcap):
        ds = ds * slope  # not of a bias that is added behind the cap
    if hides:
        ds = jnp.where(p == 0.0, 0.0, ds)
    return dropped, ds
