"""Bias, masks, soft cap and dropout on one tile of scores, as the TPU kernels see it: transposed, `[block_kv, block_q]`.

Queries lie along the lanes, so every statistic of a row is one lane of a `[1, block_q]` vector. Logits are in units of log2(e), because the
hardware's exponential is 2^x: the query is multiplied by scale * log2(e) once, the bias tile by tile.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core import dropout
from vishwamai.core.pallas import TPU_DTYPES, round_up
from vishwamai.ops.attention.spec import AttentionSpec, Operands
from vishwamai.ops.attention.tpu_schedule import Tiling, id_ranges, unpack_tile

LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453
LANES = 128


def query_factor(spec: AttentionSpec) -> tuple[float, float]:
    """(what the query is multiplied by, what the products are): logits in base 2, or the argument of tanh where there is a soft cap.

    One multiplication per query instead of one per score; in bfloat16 it rounds the query once more, as much as a change of its last bit. That is
    within the tolerance of a bfloat16 result, but not of a float32 logsumexp that the caller asked for.
    """
    factor = spec.scale * LOG2E if spec.softcap is None else spec.scale / spec.softcap
    return (1.0, factor) if spec.return_lse and spec.operands.query.dtype == jnp.bfloat16 else (factor, 1.0)


def scaled_query(spec: AttentionSpec, query: jax.Array) -> jax.Array:
    """The query as it enters the product with the keys."""
    factor, _ = query_factor(spec)
    return query if factor == 1.0 else (query.astype(jnp.float32) * factor).astype(query.dtype)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over axis `contract[0]` of `a` and `contract[1]` of `b`, summed in float32; float32 operands at full precision."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def transposed(x: jax.Array) -> jax.Array:
    """`x.T` in its own dtype, by way of float32, whose tiles the hardware transposes."""
    return x.astype(jnp.float32).T.astype(x.dtype)


def needs_mask_everywhere(spec: AttentionSpec) -> bool:
    """Whether no tile is without mask code: something is read or drawn for every position."""
    return spec.operands.bias is not None or spec.operands.mask is not None or spec.dropout_rate > 0


def pad_axis(x: Any, axis: int, size: int, mode: str = "constant") -> Any:
    """Pads `axis` to `size`; zeros unless `mode` says otherwise."""
    if x is None or x.shape[axis] == size:
        return x
    return jnp.pad(x, [(0, size - x.shape[axis] if n == axis else 0) for n in range(x.ndim)], mode=mode)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Where a tile stands: block indices within the panel, absolute position of its first query and key, its pattern in the block mask."""

    i: Any
    j: Any
    row: Any
    column: Any
    pattern: Any


def tile_at(word: Any, tiling: Tiling, q_panel: Any, kv_panel: Any) -> Tile:
    """Unpacks a word of the schedule."""
    i, j, pattern = unpack_tile(word)
    row = (q_panel * tiling.panel_q + i) * tiling.block_q
    return Tile(i, j, row, (kv_panel * tiling.panel_kv + j) * tiling.block_kv, pattern)


# --- What the kernels are given beside query, key and value ------------------------------------------------------------------------------------------


def scalar_operands(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> dict[str, jax.Array]:
    """Operands that live in scalar memory, flat: id ranges of segments, sinks (in base 2), seeds of dropout."""
    q_blocks, kv_blocks = tiling.blocks(spec)
    found: dict[str, jax.Array] = {}
    if operands.q_segment_ids is not None:
        q_ids, kv_ids = _padded_ids(spec, tiling, operands)
        found["q_ids_range"] = id_ranges(q_ids, tiling.block_q)
        found["kv_ids_range"] = id_ranges(kv_ids, tiling.block_kv)
    if operands.sinks is not None:
        found["sinks"] = operands.sinks.astype(jnp.float32).reshape(-1) * LOG2E
    if operands.dropout_seed is not None and spec.dropout_rate > 0:
        found["seeds"] = lax.bitcast_convert_type(operands.dropout_seed, jnp.int32).reshape(-1)
    return found


def _padded_ids(spec: AttentionSpec, tiling: Tiling, operands: Operands) -> tuple[jax.Array, jax.Array]:
    q_blocks, kv_blocks = tiling.blocks(spec)
    return (
        pad_axis(operands.q_segment_ids, 1, q_blocks * tiling.block_q, "edge"),
        pad_axis(operands.kv_segment_ids, 1, kv_blocks * tiling.block_kv, "edge"),
    )


def array_operands(
    spec: AttentionSpec, tiling: Tiling, operands: Operands, place: Any
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """Bias, mask and segment ids with their block specs.

    A vector along the queries or the keys is cut into `[blocks, 1, block]`, so that a kernel picks a block by a leading index.

    Args:
      place: `place(kind)` makes an index map from `kind(b, h, q_panel, kv_panel) -> block index`.
    """
    found: dict[str, tuple[jax.Array, pl.BlockSpec]] = {}
    for name in ("bias", "mask"):
        x = getattr(operands, name)
        if x is None:
            continue
        if name == "mask":
            x = x.astype(jnp.int8 if _is_dense(x) else jnp.float32)
        elif not _is_dense(x) or x.dtype not in TPU_DTYPES:
            x = x.astype(jnp.float32)
        found[name] = _broadcast_operand(spec, tiling, x, place)
    words = pattern_words(spec, tiling)
    if words is not None:
        block = pl.BlockSpec(words.shape, place(lambda b, h, q, kv: (0, 0, 0)), pipeline_mode=pl.Buffered(1))
        found["patterns"] = (jnp.asarray(words), block)
    if operands.q_segment_ids is not None:
        q_ids, kv_ids = _padded_ids(spec, tiling, operands)
        found["q_ids"] = _broadcast_operand(spec, tiling, q_ids[:, None, :, None], place)
        found["kv_ids"] = _broadcast_operand(spec, tiling, kv_ids[:, None, None, :], place)
    return found


def pattern_words(spec: AttentionSpec, tiling: Tiling) -> np.ndarray | None:
    """The partly visible tiles of the block mask, transposed and a bit to a position; None where every tile of it is whole or empty.

    Returns:
      int32 `[patterns, rows, block_q]`: bit n of row r is key n * rows + r, so that a tile is unpacked by shifts and never across sublanes. There are
      as many bits to a word as leave whole registers of 8 rows.
    """
    tiles = spec.tile_masks(tiling.block_q, tiling.block_kv, *tiling.blocks(spec))
    if tiles is None or not tiles.partial:
        return None
    bits = 32 if tiling.block_kv % 256 == 0 else 16
    cut = tiles.patterns.swapaxes(1, 2).reshape(len(tiles.patterns), bits, tiling.block_kv // bits, tiling.block_q)
    words = (cut.astype(np.uint32) << np.arange(bits, dtype=np.uint32)[None, :, None, None]).sum(1, dtype=np.uint32)
    return words.view(np.int32)


def _unpacked(words: jax.Array, tiling: Tiling) -> jax.Array:
    """A pattern's words `[rows, block_q]` as bool `[block_kv, block_q]`."""
    bits = tiling.block_kv // words.shape[0]
    return jnp.concatenate([(words & np.array(1 << n, np.uint32).view(np.int32)) != 0 for n in range(bits)], axis=0)


def statistics(
    spec: AttentionSpec, tiling: Tiling, logsumexp: jax.Array, delta: jax.Array, place: Any
) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    """logsumexp in base 2 and delta, `[B, Hq, blocks, 1, block_q]`. Rows that attend to nothing, and padding, get +inf: a probability of 0."""
    q_blocks, _ = tiling.blocks(spec)
    size = q_blocks * tiling.block_q
    padding = [(0, 0), (0, 0), (0, size - spec.q_len)]
    base2 = jnp.where(logsumexp == -jnp.inf, jnp.inf, logsumexp.astype(jnp.float32) * LOG2E)
    arrays = {"logsumexp": jnp.pad(base2, padding, constant_values=jnp.inf), "delta": jnp.pad(delta, padding)}
    block = tiling.block_spec(
        (None, None, tiling.panel_q, 1, tiling.block_q), place(lambda b, h, q, kv: (b, h, q, 0, 0))
    )
    return {
        name: (x.reshape(spec.batch, spec.q_heads, q_blocks, 1, tiling.block_q), block) for name, x in arrays.items()
    }


def _is_dense(x: Any) -> bool:
    return x.shape[2] > 1 and x.shape[3] > 1


def _broadcast_operand(spec: AttentionSpec, tiling: Tiling, x: jax.Array, place: Any) -> tuple[jax.Array, pl.BlockSpec]:
    """`[B|1, H|1, Tq|1, Tk|1]` as a kernel reads it."""
    batch, heads, rows, columns = x.shape
    q_blocks, kv_blocks = tiling.blocks(spec)

    def index(b: Any, h: Any, *rest: Any) -> tuple[Any, ...]:
        return (b if batch > 1 else 0, h if heads > 1 else 0, *rest)

    if _is_dense(x):
        block = (None, None, tiling.panel_q * tiling.block_q, tiling.panel_kv * tiling.block_kv)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, q, kv)))
    if rows > 1:
        x = pad_axis(x, 2, q_blocks * tiling.block_q).reshape(batch, heads, q_blocks, 1, tiling.block_q)
        block = (None, None, tiling.panel_q, 1, tiling.block_q)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, q, 0, 0)))
    if columns > 1:
        x = pad_axis(x, 3, kv_blocks * tiling.block_kv).reshape(batch, heads, kv_blocks, 1, tiling.block_kv)
        block = (None, None, tiling.panel_kv, 1, tiling.block_kv)
        return x, tiling.block_spec(block, place(lambda b, h, q, kv: index(b, h, kv, 0, 0)))
    return x, pl.BlockSpec((None, None, 1, 1), place(lambda b, h, q, kv: index(b, h, 0, 0)))


# --- Inside the kernels ------------------------------------------------------------------------------------------------------------------------------


def _column(row: jax.Array, tiling: Tiling) -> jax.Array:
    """A vector along the keys, `[1, block_kv]`, spread over the tile."""
    lanes = jnp.broadcast_to(row, (LANES, row.shape[1])).T  # [block_kv, 128], all lanes alike
    return jnp.concatenate([lanes] * (tiling.block_q // LANES), axis=1)


def _spread(spec: AttentionSpec, tiling: Tiling, shape: tuple[int, ...], ref: Any, tile: Tile) -> jax.Array:
    """The tile `[block_kv, block_q]`, or a `[1, block_q]` or `[1, 1]` vector that broadcasts to it, of an operand of full `shape`; 32-bit."""
    rows, columns = shape[2] > 1, shape[3] > 1
    if rows and columns:
        at = (
            pl.ds(pl.multiple_of(tile.i * tiling.block_q, LANES), tiling.block_q),
            pl.ds(pl.multiple_of(tile.j * tiling.block_kv, LANES), tiling.block_kv),
        )
        x = ref[at].astype(jnp.float32).T
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


def bias_tile(spec: AttentionSpec, tiling: Tiling, refs: SimpleNamespace, tile: Tile) -> jax.Array:
    """The bias of a tile in the units of the products."""
    bias = _spread(spec, tiling, spec.operands.bias.shape, refs.bias, tile).astype(jnp.float32)
    if spec.softcap is not None:
        return bias * (1.0 / spec.softcap)
    # A finite bias stays finite in base 2: float32's lowest number is a common way to write "never".
    lowest = float(jnp.finfo(jnp.float32).min) / LOG2E * 0.99
    return jnp.where(bias == -jnp.inf, bias, jnp.maximum(bias, lowest)) * LOG2E


def visible(spec: AttentionSpec, tiling: Tiling, refs: SimpleNamespace, tile: Tile) -> jax.Array | None:
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
    if hasattr(refs, "patterns"):
        terms.append(_unpacked(refs.patterns[tile.pattern], tiling))
    if spec.operands.mask is not None:
        terms.append(_spread(spec, tiling, spec.operands.mask.shape, refs.mask, tile) > 0.5)
    if spec.operands.q_segment_ids is not None:
        terms.append(refs.q_ids[tile.i] == _column(refs.kv_ids[tile.j], tiling))
    if not terms:
        return None
    seen = terms[0]
    for term in terms[1:]:
        seen = jnp.logical_and(seen, term)
    return seen


def base2_logits(
    spec: AttentionSpec, tiling: Tiling, refs: SimpleNamespace, tile: Tile, s: jax.Array, masked: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Logits * log2(e) of a tile from its products, -inf where masked; and the soft cap's derivative, None without one."""
    _, factor = query_factor(spec)
    if factor != 1.0:
        s = s * factor
    if spec.operands.bias is not None:
        s = s + bias_tile(spec, tiling, refs, tile)
    slope = None
    if spec.softcap is not None:
        t = jnp.tanh(s)
        slope = 1.0 - t * t
        s = t * (spec.softcap * LOG2E)
    if masked:
        seen = visible(spec, tiling, refs, tile)
        if seen is not None:
            s = jnp.where(seen, s, -jnp.inf)
    return s, slope


def kept(spec: AttentionSpec, tiling: Tiling, refs: SimpleNamespace, tile: Tile, head: Any) -> jax.Array:
    """Which positions of a tile dropout keeps. `head` is the flat index batch * Hq + head."""
    rows = tile.row + lax.broadcasted_iota(jnp.int32, (1, tiling.block_q), 1)
    columns = tile.column + lax.broadcasted_iota(jnp.int32, (tiling.block_kv, 1), 0)
    return dropout.keep_mask(refs.seeds[2 * head], refs.seeds[2 * head + 1], rows, columns, spec.dropout_rate)


def probabilities(
    spec: AttentionSpec,
    tiling: Tiling,
    refs: SimpleNamespace,
    tile: Tile,
    s: jax.Array,
    dp: jax.Array,
    head: Any,
    masked: bool,
) -> tuple[jax.Array, jax.Array]:
    """(P with dropout, gradient of the logits before the soft cap), `[block_kv, block_q]`, from the products of a tile."""
    s, slope = base2_logits(spec, tiling, refs, tile, s, masked)
    p = jnp.exp2(s - refs.logsumexp[tile.i])
    dropped = p
    if spec.dropout_rate > 0:
        scale = jnp.where(kept(spec, tiling, refs, tile, head), 1.0 / (1.0 - spec.dropout_rate), 0.0)
        dropped, dp = p * scale, dp * scale
    ds = p * (dp - refs.delta[tile.i])
    return dropped, ds if slope is None else ds * slope


def kernel_params(
    vmem_bytes: int, semantics: tuple[str, ...] = ("parallel", "parallel", "arbitrary", "arbitrary")
) -> pltpu.CompilerParams:
    """Compiler parameters for a plan of `vmem_bytes`, which the heuristic has held against the chip."""
    limit = round_up(vmem_bytes * 5 // 4, 1 << 20)
    # 16 MiB is what every generation grants unasked.
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit if limit > 16 << 20 else None)  # type: ignore[arg-type]


def call(
    body: Any,
    *,
    scalars: dict[str, Any],
    inputs: dict[str, tuple[Any, pl.BlockSpec]],
    outputs: dict[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: dict[str, Any],
    grid: tuple[int, ...],
    **kwargs: Any,
) -> dict[str, Any]:
    """`pallas_call` whose refs reach `body` as the attributes of one namespace, under the names given here."""
    names = (*scalars, *inputs, *outputs, *scratch)

    def kernel(*refs: Any) -> None:
        body(SimpleNamespace(**dict(zip(names, refs, strict=True))))

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[struct for struct, _ in outputs.values()],
        **kwargs,
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    return dict(zip(outputs, results, strict=True))
