"""Paged attention on TPU (Pallas): page tables in scalar memory, pages fetched ahead from HBM, only live ones visited. Forward only.

A batch runs as at most two kernels: one for short runs of queries, decoding above all, whose blocks are as small as a tile of rows, and one for long runs.
Each core of a megacore chip takes a share of the items with about half of the pages.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, planning_chip, round_up, sublanes, tiled_bytes, vmem_budget
from vishwamai.core.sharding import match_varying, out_struct
from vishwamai.ops.paged_attention import tpu_kernel, tpu_unpack
from vishwamai.ops.paged_attention.checks import no_gradient
from vishwamai.ops.paged_attention.reference import each
from vishwamai.ops.paged_attention.schedule import Items, items, prefix_sum, runs
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec
from vishwamai.ops.paged_attention.tpu_kernel import LANES, Shape, heads_together, packing

_PAGE_DTYPES = frozenset(
    jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2)
)


_ROWS = 8
_JOINT_ROWS = 64


@dataclasses.dataclass(frozen=True)
class PagedConfig:
    """Tiles of the TPU kernel.

    Attributes:
      block_keys: keys that a step works on; rounded down to whole pages.
      long_rows: rows (queries times query heads of a kv head) of a block of a long run.
      slots: blocks of pages in VMEM: one is read while the others arrive.
      chunk_keys: keys whose scores are held at once.
      cores: TensorCores that share the work.
      unpack: how 8-bit pages are widened, see `tpu_unpack`; "shift" is what every chip can.
      vmem_bytes: what a step plans to use of VMEM, buffers and temporaries together.
    """

    block_keys: int
    long_rows: int = 256
    slots: int = 3
    chunk_keys: int = 128
    cores: int = 1
    vmem_bytes: int = 0
    unpack: str = "shift"

    def with_block_size(self, block_size: int) -> PagedConfig:
        """The same with `block_size` keys a step."""
        return dataclasses.replace(self, block_keys=block_size)


def _short_queries(spec: PagedSpec) -> int:
    """Queries that one tile of rows holds: so many cost no more than one."""
    return min(spec.max_q_len, max(1, sublanes(spec.compute_dtype) // spec.group))


def _shapes(spec: PagedSpec, config: PagedConfig) -> list[tuple[int, int, Shape]]:
    """(shortest run, longest run, sizes) of each kernel that the batch needs."""
    pages = max(1, min(config.block_keys // spec.page_size, spec.pages_per_sequence))
    keys = pages * spec.page_size

    def shape(queries: int, joint: bool) -> Shape:
        rows = queries * (spec.heads if joint else spec.group)
        chunk = config.chunk_keys
        chunk = keys if keys % chunk else chunk
        # Half a chunk is whole tokens, and its words fill whole registers.
        halves = chunk % 2 == 0 and chunk * spec.kv_heads // heads_together(spec) % 16 == 0
        unpack = config.unpack if joint and halves and spec.compute_dtype == jnp.bfloat16 else "shift"
        return Shape(queries, round_up(rows, _ROWS), pages, config.slots, joint, chunk, unpack)

    short = _short_queries(spec)
    found = [(1, short, shape(short, _joint(spec, short)))]
    if spec.max_q_len > short:
        queries = min(spec.max_q_len, max(short, config.long_rows // spec.group))
        found.append((short + 1, spec.max_q_len, shape(queries, False)))
    return found


def _joint(spec: PagedSpec, queries: int) -> bool:
    """Whether all heads' scores are worth computing together: the rows of a token are then read as they lie, and other heads' scores masked."""
    words = spec.kv_heads // heads_together(spec)
    packed = spec.form != "combined" or packing(spec.operands.k_pages.dtype) > 1
    return packed and spec.kv_heads > 1 and words & (words - 1) == 0 and queries * spec.heads <= _JOINT_ROWS


def _vmem_bytes(spec: PagedSpec, shape: Shape) -> int:
    """Buffers and temporaries of one kernel."""
    o = spec.operands
    pages = [p for p in (o.k_pages, o.v_pages) if p is not None]
    buffers = sum(shape.slots * shape.pages * p.dtype.itemsize * _page_elements(spec, p) for p in pages)
    rows = [tiled_bytes((shape.rows, d), jnp.float32) for d in (spec.head_dim, spec.value_dim, LANES, LANES)]
    words = spec.kv_heads // heads_together(spec) if shape.joint else 1
    scores = 8 * tiled_bytes((shape.rows, shape.chunk * words), jnp.float32)
    widened = 4 * tiled_bytes((shape.chunk * words, spec.head_dim), jnp.float32)
    return buffers + _blocks(spec, shape) * 2 * (sum(rows) + rows[0]) + scores + widened


def _page_elements(spec: PagedSpec, pool: Any) -> int:
    """Elements of one page in VMEM, its last two axes padded to tiles (short ones to a power of two rows)."""
    *leading, rows, dim = pool.shape[2:]
    tile = min(sublanes(pool.dtype), 1 << (rows - 1).bit_length())
    count = round_up(rows, max(tile, packing(pool.dtype))) * round_up(dim, LANES)
    return count * (leading[0] if leading else 1)


def why_not(spec: PagedSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    o = spec.operands
    if o.query.dtype not in TPU_DTYPES:
        return f"`query` is {o.query.dtype.name}, and the TPU's vector unit computes in float32 and bfloat16."
    if o.k_pages.dtype not in _PAGE_DTYPES:
        return (
            f"`kv_pages` is {o.k_pages.dtype.name}; the kernel reads {', '.join(sorted(d.name for d in _PAGE_DTYPES))}."
        )
    if o.k_pages.dtype == jnp.float32 and o.query.dtype != jnp.float32:
        return "`kv_pages` is float32 while `query` is narrower, and rounding the pages would lose what they hold."
    if spec.batch * spec.tokens * spec.sequences * spec.pages_per_sequence == 0:
        return "the batch is empty."
    if spec.form == "latent":
        if spec.page_size % sublanes(o.k_pages.dtype):
            return f"a latent page has {spec.page_size} rows of {o.k_pages.dtype.name}, not a multiple of a tile's {sublanes(o.k_pages.dtype)}."
        if o.k_pages.dtype.itemsize == 1:
            return f"latent pages are {o.k_pages.dtype.name}; the kernel reads them in float32 and bfloat16."
    else:
        if spec.head_dim > LANES or spec.value_dim > LANES:
            return f"rows of {max(spec.head_dim, spec.value_dim)} columns cannot be read with a stride; {LANES} is the most."
        rows, each = o.k_pages.shape[3], packing(o.k_pages.dtype)
        words = rows // each
        if rows % each or (words not in (1, 2, 4) and words % 8):
            return f"a token's {rows} rows of {o.k_pages.dtype.name} are not 1, 2, 4 or a multiple of 8 words of 32 bits each, so tiles would have gaps."
    if spec.sequences * spec.pages_per_sequence > _most_entries(chip):
        return f"the page table has {spec.sequences * spec.pages_per_sequence:,} entries, more than the {_most_entries(chip):,} that scalar memory holds."
    least = _vmem_bytes(spec, _shapes(spec, PagedConfig(spec.page_size, LANES, 2, LANES))[-1][2])
    if least > vmem_budget(chip):
        return f"blocks of one page take {least:,} bytes of VMEM, more than the {vmem_budget(chip):,} there are to plan with."
    return None


def _blocks(spec: PagedSpec, shape: Shape) -> int:
    """Blocks of rows that an item's queries fill: one, or one for each kv head."""
    return 1 if shape.joint else spec.kv_heads


def _most_entries(chip: Chip | None) -> int:
    return planning_chip(chip).smem_bytes * 3 // 4 // 4


def heuristic(spec: PagedSpec, chip: Chip | None) -> PagedConfig:
    """About two MiB of pages a step: less, and what a step costs besides its keys shows."""
    keys = max(128, min(1024, (2 << 20) // spec.row_bytes))
    keys = max(spec.page_size, keys // spec.page_size * spec.page_size)
    planned = planning_chip(chip)
    unpack = tpu_unpack.conversion(planned, spec.operands.k_pages.dtype)
    # Decoding waits for the scores, of which more at once are in flight: where pages bring few instructions for their bytes, where HBM gives more than a thousand
    # bytes a cycle (TPU7x), and of latent pages, whose products go through a matrix unit that is as busy as HBM.
    fast = planned.hbm_bandwidth / planned.cores / planned.clock > 1024 and spec.operands.k_pages.dtype.itemsize == 2
    chunk = 128
    if spec.max_q_len == 1:
        chunk = 512 if spec.form == "latent" else 256 if (fast or unpack != "shift") and _joint(spec, 1) else 128
    config = PagedConfig(keys, chunk_keys=chunk, cores=planned.cores_per_device, unpack=unpack)
    while (need := max(_vmem_bytes(spec, s) for _, _, s in _shapes(spec, config))) > vmem_budget(chip):
        if config.block_keys >= 2 * spec.page_size:
            config = dataclasses.replace(config, block_keys=config.block_keys // 2)
        elif config.long_rows > LANES:
            config = dataclasses.replace(config, long_rows=config.long_rows // 2)
        else:
            break
    return dataclasses.replace(config, vmem_bytes=need)


# --- Calls -----------------------------------------------------------------------------------------------------------------------------------------


def _query_blocks(spec: PagedSpec, shape: Shape, query: Any, blocks: Items) -> Any:
    """Each item's queries as `[items, blocks, rows, D]`: rows run over the queries, then over the query heads of the block."""
    if spec.max_q_len == 1:  # item i has token i
        found = query[: blocks.token.shape[0], None]
    else:
        token = blocks.token[:, None] + jnp.arange(shape.queries)
        found = query[jnp.clip(token, 0, spec.tokens - 1)]  # [items, queries, Hq, D]
    return _pad_rows(shape, _by_block(spec, shape, found))


def _by_block(spec: PagedSpec, shape: Shape, x: Any) -> Any:
    """`[items, queries, Hq, D]` as `[items, blocks, rows, D]`, not padded."""
    count = _blocks(spec, shape)
    x = x.reshape(-1, shape.queries, count, spec.heads // count, x.shape[-1]).swapaxes(1, 2)
    return x.reshape(x.shape[0], count, -1, x.shape[-1])


def _by_query(spec: PagedSpec, shape: Shape, x: Any) -> Any:
    """The inverse of `_by_block`; padding falls away."""
    count = _blocks(spec, shape)
    x = x[:, :, : shape.queries * spec.heads // count]
    x = x.reshape(-1, count, shape.queries, spec.heads // count, x.shape[-1]).swapaxes(1, 2)
    return x.reshape(x.shape[0], shape.queries, spec.heads, x.shape[-1])


def _pad_rows(shape: Shape, x: Any) -> Any:
    return jnp.pad(x, ((0, 0), (0, 0), (0, shape.rows - x.shape[2]), (0, 0)))


def _per_row(spec: PagedSpec, shape: Shape, values: Any) -> Any:
    """`[Hq]` values as `[blocks, rows, 1]`."""
    every = jnp.broadcast_to(values[None, None, :, None], (1, shape.queries, spec.heads, 1))
    return _pad_rows(shape, _by_block(spec, shape, every))[0]


def _bounds(spec: PagedSpec, blocks: Items, cores: int) -> Any:
    """First item of every core, and the end: shares of about the same number of pages."""
    number = blocks.sequence.shape[0]
    count = jnp.reshape(blocks.count, (1,))
    if cores == 1:
        return jnp.concatenate((jnp.zeros(1, jnp.int32), count))
    cost = 1 + jnp.maximum(-(-blocks.end // spec.page_size) - blocks.first_page, 0)
    before = prefix_sum(jnp.where(jnp.arange(number) < blocks.count, cost, 0))
    # In float32: pages times cores may pass the range of int32, and a share need not be exact.
    parts = before[-1].astype(jnp.float32) / cores * jnp.arange(1, cores)
    inner = jnp.sum(before[None, :] <= parts[:, None], axis=1, dtype=jnp.int32)
    return jnp.concatenate((jnp.zeros(1, jnp.int32), jnp.minimum(inner, count), count))


def _call(spec: PagedSpec, config: PagedConfig, shape: Shape, operands: Operands, blocks: Items) -> Any:
    """`[items, Hkv, rows, Dv]`; items that do not exist hold anything."""
    number = blocks.sequence.shape[0]
    per_block = spec.heads // _blocks(spec, shape)
    row = jnp.arange(shape.rows, dtype=jnp.int32)[:, None]

    def scale(values: Any) -> Any:
        """Of every row where heads are worked on together, else of every kv head, in scalar memory."""
        return None if values is None or not shape.joint else _per_row(spec, shape, jnp.repeat(values, spec.group))[0]

    scalars = {
        "bounds": _bounds(spec, blocks, config.cores),
        "sequence": blocks.sequence,
        "position": blocks.position,
        "first_page": blocks.first_page,
        "end": blocks.end,
        "table": operands.page_indices.reshape(-1),
    }
    hbm = {
        "query": _query_blocks(spec, shape, operands.query, blocks),
        "k_pages": operands.k_pages,
        "v_pages": operands.v_pages,
    }
    vmem = {
        "sinks": None if operands.sinks is None else _per_row(spec, shape, operands.sinks.astype(jnp.float32)),
        "row_query": row // per_block if shape.queries > 1 else None,
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

    block = (_blocks(spec, shape), shape.rows)
    scratch = {
        "q_buffer": pltpu.VMEM((shape.slots, *block, spec.head_dim), spec.compute_dtype),
        "k_buffer": buffer(o.k_pages),
        "v_buffer": buffer(o.v_pages),
        "o_buffer": pltpu.VMEM((2, *block, spec.value_dim), spec.compute_dtype),
        "m": pltpu.VMEM((*block, LANES), jnp.float32),
        "l": pltpu.VMEM((*block, LANES), jnp.float32),
        "acc": pltpu.VMEM((*block, spec.value_dim), jnp.float32),
        "fetched": pltpu.SemaphoreType.DMA((shape.slots,)),
        "q_fetched": pltpu.SemaphoreType.DMA((shape.slots,)),
        "stored": pltpu.SemaphoreType.DMA((2,)),
    }

    def present(*groups: dict[str, Any]) -> dict[str, Any]:
        return {name: x for group in groups for name, x in group.items() if x is not None}

    given = present(scalars, hbm, vmem, smem)
    arrays = match_varying(list(given.values()))
    names = [*given, "out", *present(scratch)]
    whole = [pl.BlockSpec(x.shape, lambda c, *_, n=x.ndim: (0,) * n) for x in present(vmem).values()]
    out = out_struct((number, *block, spec.value_dim), spec.compute_dtype, *arrays)
    return pl.pallas_call(
        functools.partial(tpu_kernel.kernel, spec, shape, names),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(present(scalars)),
            grid=(config.cores,),
            in_specs=[
                *(pl.BlockSpec(memory_space=pl.ANY) for _ in present(hbm)),
                *whole,
                *(pl.BlockSpec(memory_space=pltpu.SMEM) for _ in present(smem)),
            ],
            out_specs=pl.BlockSpec(memory_space=pl.ANY),
            scratch_shapes=list(present(scratch).values()),
        ),
        out_shape=out,
        compiler_params=_compiler_params(config),
        cost_estimate=pl.CostEstimate(
            flops=spec.flops // spec.batch,
            bytes_accessed=spec.bytes_moved // spec.batch,
            transcendentals=spec.heads * spec.tokens * spec.visible_tokens,
        ),
        name="paged_attention_long" if shape.queries > _short_queries(spec) else "paged_attention_short",
    )(*arrays)


def _compiler_params(config: PagedConfig) -> pltpu.CompilerParams:
    """The VMEM limit is raised where the plan, made for the chip, needs more than the 16 MiB that every chip gives unasked."""
    wanted = round_up(config.vmem_bytes * 5 // 4, 1 << 20)
    return pltpu.CompilerParams(
        dimension_semantics=("parallel",), vmem_limit_bytes=wanted if wanted > 16 << 20 else None
    )


def _one(spec: PagedSpec, config: PagedConfig, operands: Operands) -> Any:
    """The output `[T, Hq, Dv]` of operands without their batch axis."""
    of = runs(operands.kv_lens, operands.cu_q_lens, operands.num_seqs[0])
    result = jnp.zeros((spec.tokens, spec.heads, spec.value_dim), spec.compute_dtype)
    for least, most, shape in _shapes(spec, config):
        blocks = items(spec, of, shape.queries, least, most)
        out = _by_query(spec, shape, _call(spec, config, shape, operands, blocks))  # [items, queries, Hq, Dv]
        number = blocks.sequence.shape[0]
        exists = jnp.arange(number) < blocks.count
        if spec.max_q_len == 1:
            out = jnp.where(exists[:, None, None], out[:, 0], 0)
            return jnp.pad(out, ((0, spec.tokens - number), (0, 0), (0, 0)))
        into = blocks.token[:, None] + jnp.arange(shape.queries)
        into = jnp.where(
            exists[:, None] & (into < blocks.last_token[:, None]), into, spec.tokens
        )  # out of range: dropped
        result = result.at[into].set(out, mode="drop")
    return result


def forward(spec: PagedSpec, config: PagedConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals
    return Outputs(each(functools.partial(_one, spec, config), spec, operands)), None


def notes(spec: PagedSpec, chip: Chip | None) -> list[str]:
    """What a caller may want to know about a call that is served."""
    columns = spec.operands.k_pages.shape[-1]
    if spec.form == "latent" and columns % LANES:
        return [
            f"latent pages of {columns} columns are copied as a whole at every call, for XLA keeps such arrays in columns; give them {round_up(columns, LANES)}"
        ]
    return []


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, no_gradient, why_not, heuristic, PagedConfig, notes)
