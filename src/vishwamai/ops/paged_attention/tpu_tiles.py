"""Tiles of paged attention on TPU: blocks of pages, kinds of runs, and what they take of VMEM."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.core.pallas import (
    LANES,
    TPU_DTYPES,
    VmemTiles,
    planning_chip,
    round_up,
    sublanes,
    tiled_bytes,
    vmem_budget,
)
from vishwamai.core.qtensor import bits
from vishwamai.core.target import Target
from vishwamai.core.tiles import size
from vishwamai.ops.paged_attention import tpu_unpack
from vishwamai.ops.paged_attention.spec import TOKENS_DECLINED, PagedSpec
from vishwamai.ops.paged_attention.tpu_long import rows, stored_heads, whole_queries
from vishwamai.ops.paged_attention.tpu_refs import Shape
from vishwamai.ops.paged_attention.tpu_words import heads_together, packing

if TYPE_CHECKING:
    from vishwamai.core.spec import ArraySpec


_PAGE_DTYPES = frozenset(
    jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4, jnp.float8_e4m3fn, jnp.float8_e5m2)
)
_ROWS = 8
_JOINT_ROWS = 64
_MOST_COLUMNS = 1024
"""Of a tree's mask: its product with a block then costs eight times that of a block's keys with the query."""


@dataclasses.dataclass(frozen=True)
class PagedConfig(VmemTiles):
    """Tiles of the TPU kernel.

    Attributes:
      block_keys: keys that a step works on; rounded down to whole pages.
      long_rows: about so many rows (queries times query heads of a kv head) has a block of a long run.
      slots: blocks of pages in VMEM: one is read while the others arrive.
      chunk_keys: keys whose scores are held at once, of short runs; long_chunk_keys: of long runs.
      cores: TensorCores that share the work.
      unpack: how pages of 8 and 4 bits are widened, see `tpu_unpack`; "shift" is what every chip can.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together.
    """

    block_keys: int = size("keys", block_size=lambda tiles, n: n)
    long_rows: int = size("rows", 512)
    slots: int = size("slots", 3)
    chunk_keys: int = size("keys", 128)
    long_chunk_keys: int = size("keys", 256)
    cores: int = 1
    vmem_bytes: int = 0
    unpack: str = "shift"

    def needs(self, spec: PagedSpec, target: Target) -> dict[str, int]:
        return {"vmem_bytes": max(_vmem_bytes(spec, shape) for _, _, shape in shapes(spec, self))}


def short_queries(spec: PagedSpec) -> int:
    """Queries that one tile of rows holds: so many cost no more than one."""
    return min(spec.max_q_len, max(1, sublanes(spec.compute_dtype) // spec.group))


def shapes(spec: PagedSpec, config: PagedConfig) -> list[tuple[int, int, Shape]]:
    """(shortest run, longest run, sizes) of each kernel that the batch needs."""
    pages = max(1, min(config.block_keys // spec.page_size, spec.pages_per_sequence))
    keys = pages * spec.page_size

    def shape(queries: int, chunk: int, joint: bool = False, long: bool = False) -> Shape:
        chunk = keys if keys % chunk else chunk
        if long:
            return Shape(queries, rows(spec, queries), True, stored_heads(spec), pages, config.slots, False, chunk)
        # Half a chunk is whole tokens, and its words fill whole registers.
        halves = chunk % 2 == 0 and chunk * spec.kv_heads // heads_together(spec) % 16 == 0
        unpack = config.unpack if joint and halves and spec.compute_dtype == jnp.bfloat16 else "shift"
        height = round_up(queries * (spec.heads if joint else spec.group), _ROWS)
        return Shape(queries, height, False, spec.heads, pages, config.slots, joint, chunk, unpack)

    short = short_queries(spec)
    kernels = [(1, short, shape(short, config.chunk_keys, joint=_joint(spec, short)))]
    if spec.max_q_len > short:
        multiple = whole_queries(spec)
        queries = max(
            multiple, min(round_up(spec.max_q_len, multiple), config.long_rows // spec.group // multiple * multiple)
        )
        kernels.append((short + 1, spec.max_q_len, shape(queries, config.long_chunk_keys, long=True)))
    return kernels


def _joint(spec: PagedSpec, queries: int) -> bool:
    """Whether all heads' scores are worth computing together: the rows of a token are then read as they lie, and other
    heads' scores masked.
    """
    words = spec.kv_heads // heads_together(spec)
    packed = spec.form != "combined" or packing(spec.operands.k_pages.dtype) > 1
    return packed and spec.kv_heads > 1 and words & (words - 1) == 0 and queries * spec.heads <= _JOINT_ROWS


def _vmem_bytes(spec: PagedSpec, shape: Shape) -> int:
    """Buffers and temporaries of one kernel."""
    o = spec.operands
    pages = [p for p in (o.k_pages, o.v_pages) if p is not None]
    buffers = sum(shape.slots * shape.pages * bits(p.dtype) * _page_elements(spec, p) // 8 for p in pages)
    words = spec.kv_heads // heads_together(spec) if shape.joint else 1
    words *= max(1, 8 // bits(o.k_pages.dtype))  # those of 4 bits hold twice the rows
    scores = 8 * tiled_bytes((shape.rows, shape.chunk * words), jnp.float32)
    widened = 4 * tiled_bytes((shape.chunk * words, spec.head_dim), jnp.float32)
    if o.tree_mask is not None:
        columns = round_up(o.tree_mask.shape[2], LANES)
        buffers += shape.slots * tiled_bytes((shape.rows, columns), jnp.bfloat16)
        widened += 2 * tiled_bytes((columns, LANES), jnp.float32)
    if shape.long:
        query_block = (shape.queries * shape.heads, max(spec.head_dim, spec.value_dim))
        buffers += (shape.slots + 2) * tiled_bytes(query_block, spec.compute_dtype)  # queries and results
        height = spec.value_dim + 8 + 8 * (1 + 2 * spec.return_lse)
        per_head = tiled_bytes((shape.rows, spec.head_dim), spec.compute_dtype)
        per_head += tiled_bytes((height, shape.rows), jnp.float32)
        return buffers + spec.kv_heads * per_head + scores + widened
    per_head = [tiled_bytes((shape.rows, d), jnp.float32) for d in (spec.head_dim, spec.value_dim, LANES, LANES)]
    if spec.return_lse:
        per_head.append(tiled_bytes((shape.rows, LANES), jnp.float32))
    return buffers + row_blocks(spec, shape) * 2 * (sum(per_head) + per_head[0]) + scores + widened


def _page_elements(spec: PagedSpec, pool: ArraySpec) -> int:
    """Elements of one page in VMEM, its last two axes padded to tiles (short ones to a power of two rows)."""
    *leading, rows, dim = pool.shape[2:]
    tile = min(sublanes(pool.dtype), 1 << (rows - 1).bit_length())
    count = round_up(rows, max(tile, packing(pool.dtype))) * round_up(dim, LANES)
    return count * (leading[0] if leading else 1)


def why_not(spec: PagedSpec, target: Target) -> str | None:
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
    if o.tree_mask is not None and o.tree_mask.shape[2] > _MOST_COLUMNS:
        return (
            f"`tree_mask` has {o.tree_mask.shape[2]} columns, each of which every block of new tokens multiplies by; "
            f"{_MOST_COLUMNS} are the most."
        )
    if spec.batch * spec.tokens * spec.sequences * spec.pages_per_sequence == 0:
        return "the batch is empty."
    if spec.token_scales:
        return TOKENS_DECLINED
    if spec.form == "latent":
        if o.k_pages.dtype.itemsize == 1:
            return f"latent pages are {o.k_pages.dtype.name}; the kernel reads them in float32 and bfloat16."
        if spec.page_size % sublanes(o.k_pages.dtype):
            return (
                f"a latent page has {spec.page_size} rows of {o.k_pages.dtype.name}, not a multiple of a tile's "
                f"{sublanes(o.k_pages.dtype)}."
            )
    else:
        if spec.head_dim > LANES or spec.value_dim > LANES:
            return (
                f"rows of {max(spec.head_dim, spec.value_dim)} columns cannot be read with a stride; {LANES} is the "
                "most."
            )
        rows, per_word = o.k_pages.shape[3], packing(o.k_pages.dtype)
        words = rows // per_word
        if rows % per_word or (words not in (1, 2, 4) and words % 8):
            return (
                f"a token's {rows} rows of {o.k_pages.dtype.name} are not 1, 2, 4 or a multiple of 8 words of 32 bits "
                "each, so tiles would have gaps."
            )
    if spec.sequences * spec.pages_per_sequence > _most_entries(target):
        return (
            f"the page table has {spec.sequences * spec.pages_per_sequence:,} entries, more than the "
            f"{_most_entries(target):,} that scalar memory holds."
        )
    least = _vmem_bytes(spec, shapes(spec, PagedConfig(spec.page_size, long_rows=1, slots=2))[-1][2])
    if least > vmem_budget(target):
        return (
            f"blocks of one page take {least:,} bytes of VMEM, more than the {vmem_budget(target):,} there are to plan "
            "with."
        )
    return None


def row_blocks(spec: PagedSpec, shape: Shape) -> int:
    """Blocks of rows that an item's queries fill: one, or one for each kv head."""
    return 1 if shape.joint else spec.kv_heads


def _most_entries(target: Target) -> int:
    return planning_chip(target).smem_bytes * 3 // 4 // 4


def heuristic(spec: PagedSpec, target: Target) -> PagedConfig:
    """About two MiB of pages a step: less, and what a step costs besides its keys shows."""
    keys = max(128, min(1024, (2 << 20) // spec.row_bytes))
    keys = max(spec.page_size, keys // spec.page_size * spec.page_size)
    planned = planning_chip(target)
    unpack = tpu_unpack.conversion(planned, spec.operands.k_pages.dtype)
    # Decoding waits for the scores, of which more at once are in flight: where pages bring few instructions for their
    # bytes, where HBM gives more than a thousand bytes a cycle (TPU7x), and of latent pages and those of 4 bits, whose
    # products keep a matrix unit as busy as HBM, or busier.
    fast = planned.hbm_bandwidth / planned.cores / planned.clock > 1024 and spec.operands.k_pages.dtype.itemsize == 2
    chunk = 128
    if spec.max_q_len == 1:
        chunk = 256 if (fast or unpack != "shift") and _joint(spec, 1) else 128
        if spec.form == "latent" or (bits(spec.operands.k_pages.dtype) < 8 and _joint(spec, 1)):
            chunk = 512
    config = PagedConfig(keys, chunk_keys=chunk, cores=planned.cores_per_device, unpack=unpack)
    while (need := config.needs(spec, target)["vmem_bytes"]) > vmem_budget(target):
        if config.block_keys >= 2 * spec.page_size:
            config = dataclasses.replace(config, block_keys=config.block_keys // 2)
        elif config.long_rows > LANES:
            config = dataclasses.replace(config, long_rows=config.long_rows // 2)
        else:
            break
    return dataclasses.replace(config, vmem_bytes=need)
