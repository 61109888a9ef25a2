"""Paged attention on TPU (Pallas): page tables in scalar memory, pages fetched ahead from HBM, only live ones visited.
Forward only.

A batch runs as at most two kernels: one for short runs of queries, decoding above all, whose blocks are as small as a
tile of rows, and one for long runs. Each core of a megacore chip takes a share of the items with about half of the
pages.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import LANES, call, round_up
from vishwamai.core.sharding import match_varying
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.paged_attention import tpu_kernel
from vishwamai.ops.paged_attention.checks import no_gradient
from vishwamai.ops.paged_attention.reference import nothing, over_batches
from vishwamai.ops.paged_attention.schedule import Items, Runs, at_tokens, items, prefix_sum, query_of, runs
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec
from vishwamai.ops.paged_attention.tpu_long import by_query, by_row
from vishwamai.ops.paged_attention.tpu_refs import Shape
from vishwamai.ops.paged_attention.tpu_tiles import PagedConfig, heuristic, row_blocks, shapes, why_not

if TYPE_CHECKING:
    import jax


def _query_blocks(spec: PagedSpec, shape: Shape, query: AnyArray, blocks: Items) -> AnyArray:
    """Each item's queries as `[items, blocks, rows, D]`: rows run over the queries, then over the query heads of the
    block.
    """
    if spec.max_q_len == 1:  # item i has token i
        rows = query[: blocks.token.shape[0], None]
    else:
        token = blocks.token[:, None] + jnp.arange(shape.queries)
        rows = query[jnp.clip(token, 0, spec.tokens - 1)]  # [items, queries, Hq, D]
    return _pad_rows(shape, _by_block(spec, shape, rows))


def _by_block(spec: PagedSpec, shape: Shape, x: AnyArray) -> AnyArray:
    """`[items, queries, Hq, D]` as `[items, blocks, rows, D]`, not padded."""
    count = row_blocks(spec, shape)
    x = x.reshape(-1, shape.queries, count, spec.heads // count, x.shape[-1]).swapaxes(1, 2)
    return x.reshape(x.shape[0], count, -1, x.shape[-1])


def _by_query(spec: PagedSpec, shape: Shape, x: AnyArray) -> AnyArray:
    """The inverse of `_by_block`; padding falls away."""
    count = row_blocks(spec, shape)
    x = x[:, :, : shape.queries * spec.heads // count]
    x = x.reshape(-1, count, shape.queries, spec.heads // count, x.shape[-1]).swapaxes(1, 2)
    return x.reshape(x.shape[0], shape.queries, spec.heads, x.shape[-1])


def _pad_rows(shape: Shape, x: AnyArray) -> AnyArray:
    return jnp.pad(x, ((0, 0), (0, 0), (0, shape.rows - x.shape[2]), (0, 0)))


def _per_row(spec: PagedSpec, shape: Shape, values: AnyArray) -> AnyArray:
    """`[Hq]` values as `[blocks, rows, 1]`; of long runs `[blocks, 1, rows]`."""
    if shape.long:
        return by_row(spec, shape, jnp.broadcast_to(values, (shape.queries, spec.heads)))[:, None]
    every = jnp.broadcast_to(values[None, None, :, None], (1, shape.queries, spec.heads, 1))
    return _pad_rows(shape, _by_block(spec, shape, every))[0]


def _hidden(spec: PagedSpec, shape: Shape, tree_mask: Any, first: Any) -> jax.Array:
    """The new tokens that a row does not see, `[items, rows, columns]` bfloat16 of zeros and ones, of items that begin
    at the tokens `first`.
    """
    token = jnp.clip(first[:, None] + jnp.arange(shape.queries), 0, spec.tokens - 1)
    columns = round_up(tree_mask.shape[1], LANES) - tree_mask.shape[1]
    hidden = jnp.pad(~tree_mask[token], ((0, 0), (0, 0), (0, columns))).astype(jnp.bfloat16)
    if shape.long:  # one head's queries after the other, or all heads of a query
        times = shape.rows // shape.queries
        return jnp.repeat(hidden, times, axis=1) if spec.form == "latent" else jnp.tile(hidden, (1, times, 1))
    hidden = jnp.repeat(hidden, spec.heads // row_blocks(spec, shape), axis=1)  # [items, queries, columns]
    return _pad_rows(shape, hidden[:, None])[:, 0]


def _bounds(spec: PagedSpec, blocks: Items, cores: int) -> AnyArray:
    """First item of every core, and the end: shares of about the same number of pages."""
    number = blocks.sequence.shape[0]
    count = jnp.reshape(blocks.count, (1,))
    if cores == 1:
        return jnp.concatenate((jnp.zeros(1, jnp.int32), count))
    cost = 1 + jnp.maximum(-(-blocks.end // spec.page_size) - blocks.first_page, 0)
    cost = jnp.where(jnp.arange(number) < blocks.count, cost, 0)
    ends = prefix_sum(cost)
    # In float32: pages times cores may pass the range of int32, and a share need not be exact.
    parts = ends[-1].astype(jnp.float32) / cores * jnp.arange(1, cores)
    # An item belongs to the core that has the middle of its cost.
    inner = jnp.sum((ends - cost / 2)[None, :] <= parts[:, None], axis=1, dtype=jnp.int32)
    return jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.minimum(inner, count), count))


def _call(
    spec: PagedSpec,
    config: PagedConfig,
    shape: Shape,
    operands: Operands,
    of: Runs,
    blocks: Items,
    before: AnyArray = None,
) -> tuple[AnyArray, AnyArray]:
    """The results, and the logsumexp or None; see `PagedRefs` for their shapes. Items that do not exist hold anything.

    Args:
      before: results `[T, heads, Dv]` that those of long runs are written into.
    """
    number = blocks.sequence.shape[0]
    per_block = spec.heads // row_blocks(spec, shape)
    row = jnp.arange(shape.rows, dtype=jnp.int32)[:, None]

    def scale(values: AnyArray) -> AnyArray:
        """Of every row where heads are worked on together, else of every kv head, in scalar memory."""
        return None if values is None or not shape.joint else _per_row(spec, shape, jnp.repeat(values, spec.group))[0]

    def of_heads(values: AnyArray) -> AnyArray:
        return None if values is None else _per_row(spec, shape, values.astype(jnp.float32))

    scalars = {
        "bounds": _bounds(spec, blocks, config.cores),
        "sequence": blocks.sequence,
        "position": blocks.position,
        "first_page": blocks.first_page,
        "end": blocks.end,
        "table": operands.page_indices.reshape(-1),
    }
    token, query = blocks.token, None
    if shape.long:
        # The last queries of the batch are read with some of those before them.
        token = _first_read(shape, blocks, before)
        skip = blocks.token - token
        scalars |= {"position": blocks.position - skip, "token": token, "skip": skip, "count": blocks.queries}
        padding = [(0, to - now) for to, now in zip(before.shape[:2], operands.query.shape, strict=False)]
        query = jnp.pad(operands.query, (*padding, (0, 0)))
    tree = operands.tree_mask
    if tree is not None:
        scalars["first_new"] = (of.kv_len - of.length)[blocks.sequence]
    hbm = {
        "query": _query_blocks(spec, shape, operands.query, blocks) if query is None else query,
        "k_pages": operands.k_pages,
        "v_pages": operands.v_pages,
        "hidden": None if tree is None else _hidden(spec, shape, tree, token),
        "before": before,
    }
    if shape.long:
        query_of_row = jnp.broadcast_to(
            jnp.arange(shape.queries, dtype=jnp.int32)[:, None], (shape.queries, spec.heads)
        )
        row_query = by_row(spec, shape, query_of_row)[:1]
    else:
        row_query = row // per_block if shape.queries > 1 else None
    vmem = {
        "sinks": of_heads(operands.sinks),
        "slopes": of_heads(operands.slopes),
        "row_query": row_query,
        "row_head": row % per_block // spec.group if shape.joint else None,
        "k_scale": scale(operands.k_scale),
        "v_scale": scale(operands.v_scale),
    }
    smem = {} if shape.joint else {"k_scale": operands.k_scale, "v_scale": operands.v_scale}
    o = spec.operands

    def buffer(pool: Any) -> Any:
        return (
            None
            if pool is None
            else pltpu.VMEM((shape.slots, shape.pages * spec.page_size, *pool.shape[3:]), pool.dtype)
        )

    blocks_of_rows = row_blocks(spec, shape)
    block = (blocks_of_rows, shape.rows)
    item = (shape.queries, shape.heads) if shape.long else block
    lse_item = block if shape.long else (*block, LANES)
    running = ((1, shape.rows), (8, shape.rows), (spec.value_dim, shape.rows))
    if not shape.long:
        running = ((shape.rows, LANES), (shape.rows, LANES), (shape.rows, spec.value_dim))
    scratch = {
        "q_buffer": pltpu.VMEM((shape.slots, *item, spec.head_dim), spec.compute_dtype),
        "q_rows": pltpu.VMEM((*block, spec.head_dim), spec.compute_dtype) if shape.long else None,
        "k_buffer": buffer(o.k_pages),
        "v_buffer": buffer(o.v_pages),
        "o_buffer": pltpu.VMEM((2, *item, spec.value_dim), spec.compute_dtype),
        **{
            name: pltpu.VMEM((blocks_of_rows, *of_block), jnp.float32)
            for name, of_block in zip(("m", "l", "acc"), running, strict=True)
        },
        "fetched": pltpu.SemaphoreType.DMA((shape.slots,)),
        "q_fetched": pltpu.SemaphoreType.DMA((shape.slots,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
        "lse_buffer": pltpu.VMEM((2, *lse_item), jnp.float32) if spec.return_lse else None,
        "lse_stored": pltpu.SemaphoreType.DMA((2,)) if spec.return_lse else None,
        "hidden_buffer": None if tree is None else pltpu.VMEM((shape.slots, *hbm["hidden"].shape[1:]), jnp.bfloat16),
    }

    scalars, hbm, vmem, smem = match_varying((scalars, hbm, vmem, smem))
    in_hbm, in_smem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.SMEM)
    out, logsumexp = call(
        functools.partial(tpu_kernel.kernel, spec, shape),
        name="paged_attention_long" if shape.long else "paged_attention_short",
        grid=(config.cores,),
        scalars=scalars,
        inputs={
            **{name: (x, in_hbm) for name, x in hbm.items()},
            **{name: (x, _full_block(x)) for name, x in vmem.items()},
            **{name: (x, in_smem) for name, x in smem.items()},
        },
        outputs={
            "out": ((number, *item, spec.value_dim) if before is None else before.shape, spec.compute_dtype, in_hbm),
            "lse": ((number, *lse_item), jnp.float32, in_hbm) if spec.return_lse else None,
        },
        scratch=scratch,
        aliases={"before": "out"} if shape.long else {},
        semantics=("parallel",),
        vmem_bytes=config.vmem_bytes,
        flops=spec.flops // spec.batch,
        bytes_accessed=spec.bytes_moved // spec.batch,
        transcendentals=spec.heads * spec.tokens * spec.visible_tokens,
    )
    return out, logsumexp


def _first_read(shape: Shape, blocks: Items, before: AnyArray) -> AnyArray:
    """First token that an item of a long run reads, so that it ends within the `[T, ...]` arrays."""
    return jnp.minimum(blocks.token, before.shape[0] - shape.queries)


def _full_block(x: AnyArray) -> pl.BlockSpec | None:
    return None if x is None else pl.BlockSpec(x.shape, lambda c, *_: (0,) * x.ndim)


def _placed(spec: PagedSpec, shape: Shape, blocks: Items, x: AnyArray, before: jax.Array, where: PyTree) -> AnyArray:
    """`before`, `[T, Hq, D]`, with the results of the items `[items, blocks, rows, D]` at their tokens."""
    x = _by_query(spec, shape, x)  # [items, queries, Hq, D]
    if where is not None:
        return at_tokens(x, before, *where)
    number = blocks.sequence.shape[0]
    x = jnp.where((jnp.arange(number) < blocks.count)[:, None, None], x[:, 0], before[:number])
    return jnp.concatenate((x, before[number:]))


def _short(
    spec: PagedSpec, config: PagedConfig, shape: Shape, operands: Operands, of: Runs, most: int, outputs: Outputs
) -> Outputs:
    """`outputs` with the results of runs of up to `most` queries."""
    blocks = items(spec, of, shape.queries, 1, most)
    out, logsumexp = _call(spec, config, shape, operands, of, blocks)
    # With a token to a sequence, item i has token i.
    where = None if spec.max_q_len == 1 else query_of(spec, of, shape.queries, 1, most)
    if logsumexp is not None:
        logsumexp = _placed(spec, shape, blocks, logsumexp[..., :1], outputs.logsumexp[..., None], where)[..., 0]
    return Outputs(_placed(spec, shape, blocks, out, outputs.out, where), logsumexp)


def _long(
    spec: PagedSpec, config: PagedConfig, shape: Shape, operands: Operands, of: Runs, least: int, outputs: Outputs
) -> Outputs:
    """`outputs` with the results of runs of `least` queries and more, which the kernel writes to their tokens."""
    blocks = items(spec, of, shape.queries, least, spec.max_q_len)
    tokens = max(spec.tokens, shape.queries)
    before = jnp.pad(outputs.out, ((0, tokens - spec.tokens), (0, shape.heads - spec.heads), (0, 0)))
    out, logsumexp = _call(spec, config, shape, operands, of, blocks, before)
    if logsumexp is not None:
        place, exists = query_of(spec, of, shape.queries, least, spec.max_q_len)
        item = place // shape.queries
        skip = (blocks.token - _first_read(shape, blocks, before))[item]
        logsumexp = at_tokens(by_query(spec, shape, logsumexp), outputs.logsumexp, place + skip, exists)
    return Outputs(out[: spec.tokens, : spec.heads], logsumexp)


def _one_batch(spec: PagedSpec, config: PagedConfig, operands: Operands) -> Outputs:
    """The output `[T, Hq, Dv]` and the logsumexp `[T, Hq]` of operands without their batch axis."""
    count: Any = operands.num_seqs
    of = runs(operands.kv_lens, operands.cu_q_lens, count[0])
    outputs = nothing(spec, ())
    for least, most, shape in shapes(spec, config):
        if shape.long:
            outputs = _long(spec, config, shape, operands, of, least, outputs)
        else:
            outputs = _short(spec, config, shape, operands, of, most, outputs)
    return outputs


def forward(spec: PagedSpec, config: PagedConfig, operands: Operands) -> tuple[Outputs, None]:
    return over_batches(functools.partial(_one_batch, spec, config), spec, operands), None


def notes(spec: PagedSpec, target: Target) -> list[str]:
    """What a caller may want to know about a call that is served."""
    columns = spec.operands.k_pages.shape[-1]
    if spec.form == "latent" and columns % LANES:
        return [
            (
                f"latent pages of {columns} columns are copied as a whole at every call, for XLA keeps such arrays in "
                f"columns; give them {round_up(columns, LANES)}"
            )
        ]
    return []


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, no_gradient, why_not, heuristic, PagedConfig, notes)
