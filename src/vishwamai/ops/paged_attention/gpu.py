"""Paged attention on GPUs: one Triton kernel for prefill and decoding, torch tensors and JAX arrays, and one that adds the splits of long sequences.

A program holds a block of a sequence's queries with the query heads of one kv head, and walks the sequence's pages, of which it reads those that the
block sees and no other. A batch with long runs of queries takes two launches, for large tiles and for those of decoding. Where sequences and heads are
fewer than a GPU has room for, the keys of short runs are split among several programs; their number comes from the Config, so the bits do not change
with the machine. Forward only.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.spec import array_spec
from vishwamai.ops.paged_attention.checks import no_gradient
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec

_KERNELS = "vishwamai.ops.paged_attention.gpu_kernels"
ATTEND, COMBINE, UPDATE = (gpu.Kernel(_KERNELS, name) for name in ("attend", "combine", "update"))

_DTYPES = ("bfloat16", "float16", "float32")
_EIGHT_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
_WIDEST, _WIDEST_LATENT, _WIDEST_REST = 256, 512, 128
"""Columns of a head; of a latent page's value; of what a latent page has beside it."""
_PROGRAMS = 4 * gpu.SMS
"""Programs to aim at by splitting the keys: two for each place on the GPU."""
_FEWEST_BLOCKS = 4
"""Blocks of keys that a split should have: with fewer the pipeline never fills."""
_MOST_SPLITS = 64
_PARTIAL_BYTES = 256 << 20
"""The most memory that the splits' outputs may take."""
_CHUNK = 1024
"""Sequences that a block is looked up among at once."""


@dataclasses.dataclass(frozen=True)
class PagedGpuConfig:
    """Tiles of the Triton kernels: of short runs of queries, decoding above all, and of long ones, which have a launch of their own.

    Attributes:
      rows: rows of a tile, queries times query heads of a kv head; a power of two of 16 or more. Runs that fit one tile are short.
      block_kv: keys of a step, a power of two of 16 or more.
      warps: warps of a program.
      stages: blocks of keys in flight.
      splits: programs that share the keys of a short run.
      long_rows, long_kv, long_warps, long_stages: the same of long runs, whose keys are not shared.
    """

    rows: int
    block_kv: int
    warps: int
    stages: int
    splits: int
    long_rows: int
    long_kv: int
    long_warps: int
    long_stages: int

    def with_block_size(self, block_size: int) -> PagedGpuConfig:
        """The same with about `block_size` keys a step."""
        return dataclasses.replace(self, block_kv=_tile(block_size), long_kv=_tile(block_size))


def _tile(n: int) -> int:
    return max(16, gpu.next_power_of_2(n))


def why_not(spec: PagedSpec, chip: Chip | None) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    del chip
    query, pages = spec.operands.query.dtype, spec.operands.k_pages.dtype
    if query.name not in _DTYPES:
        return f"`query` is {query.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if pages.name not in (*_DTYPES, *_EIGHT_BITS):
        return f"the pages are {pages.name}; the Triton kernels take {', '.join((*_DTYPES, *_EIGHT_BITS))}."
    if pages != query and pages.name in _DTYPES and query.name != "float32":
        return f"the pages are {pages.name}, which {query.name} queries would round."
    if spec.batch * spec.tokens * spec.sequences * spec.pages_per_sequence == 0:
        return "the batch is empty."
    if spec.form == "latent":
        rest = spec.head_dim - spec.value_dim
        if spec.value_dim > _WIDEST_LATENT or rest > _WIDEST_REST:
            return (
                f"latent pages of {spec.value_dim} + {rest} columns do not fit a program's registers; "
                f"it takes up to {_WIDEST_LATENT} + {_WIDEST_REST}."
            )
        if spec.value_dim > _WIDEST and query.itemsize == 4:
            return f"float32 latent pages of {spec.value_dim} columns do not fit a program's shared memory; it takes up to {_WIDEST}."
    elif max(spec.head_dim, spec.value_dim) > _WIDEST:
        widest = max(spec.head_dim, spec.value_dim)
        return f"heads of {widest} columns do not fit a program's registers; it takes up to {_WIDEST}."
    return gpu.why_not()


def notes(spec: PagedSpec, chip: Chip | None) -> list[str]:
    """What a caller may want to know about a call that is served."""
    del chip
    if spec.page_size < 16:
        return [
            f"with pages of {spec.page_size}, numbers of pages are read for single rows; from 16 on a step may read one"
        ]
    return []


def heuristic(spec: PagedSpec, chip: Chip | None) -> PagedGpuConfig:
    """Few rows and many programs at once for short runs, larger tiles for long ones; splits until the programs fill a GPU.

    On Hopper nothing spills but float32 heads wider than 128, and decoding over some 8-bit pages 8 bytes.
    """
    del chip
    most = _most_rows(spec)[0]
    all_rows = _tile(spec.max_q_len * spec.group)
    long = _tiles(spec, min(all_rows, most))
    # Where some runs are long the short ones are those of decoding: as few rows as its heads fill.
    short = long if all_rows <= min(64, most) else _tiles(spec, min(_tile(spec.group), most))
    config = PagedGpuConfig(*short, 1, *long)
    programs = spec.batch * spec.sequences * spec.kv_heads * _heads(spec, config.rows)[1]
    partial = 4 * spec.batch * _slots(spec, config) * spec.heads * spec.value_dim
    splits = min(
        _PROGRAMS // programs,
        spec.visible_tokens // (_FEWEST_BLOCKS * config.block_kv),
        _PARTIAL_BYTES // partial,
        _MOST_SPLITS,
    )
    # A power of two: the number is compiled into the kernel, and batches of many sizes are to share one.
    return dataclasses.replace(config, splits=1 << max(1, splits).bit_length() - 1)


def _tiles(spec: PagedSpec, rows: int) -> tuple[int, int, int, int]:
    """(rows, keys, warps, stages) of a tile of `rows` rows."""
    keys = _most_rows(spec)[1]
    wide = spec.operands.query.dtype.itemsize == 4
    if wide and rows == 64 and spec.head_dim > 64:
        keys = 16
    while keys > 16 and keys >= 2 * spec.visible_tokens:
        keys //= 2
    # Numbers of pages are one load ahead of the pages: of three stages two hold keys and values. The largest tiles have no registers for it.
    stages = 2 if rows == 64 and (keys == 16 or spec.value_dim > _WIDEST) else 3
    return rows, keys, 8 if rows > 16 or (wide and spec.head_dim > 128) else 4, stages


def _most_rows(spec: PagedSpec) -> tuple[int, int]:
    """(the most rows of a tile, keys of a step) that the registers hold."""
    latent, dim = spec.form == "latent", max(_tile(spec.head_dim), _tile(spec.value_dim))
    if spec.operands.query.dtype.itemsize == 4:
        return (64, 32) if dim <= 128 and not latent else (32, 16) if dim <= 128 else (16, 16)
    eight_bits = spec.operands.k_pages.dtype.itemsize == 1
    if dim <= 128:
        return 128, 64
    if latent:
        return (32 if eight_bits else 64), 32
    return (64 if eight_bits else 128), 32


def _heads(spec: PagedSpec, rows: int) -> tuple[int, int]:
    """(query heads of a tile, tiles that a group of them takes)."""
    heads = min(spec.group, rows)
    return heads, gpu.cdiv(spec.group, heads)


def _short(spec: PagedSpec, config: PagedGpuConfig) -> int:
    """Queries of the longest run that is short."""
    return config.rows // _heads(spec, config.rows)[0]


def _slots(spec: PagedSpec, config: PagedGpuConfig) -> int:
    """Rows of queries that the splits' outputs have room for: the tokens, or, where some runs are long, so many of each sequence."""
    short = _short(spec, config)
    return spec.tokens if spec.max_q_len <= short else spec.sequences * short


def _strides(x: Any) -> tuple[int, ...]:
    """A tensor's own strides; JAX arrays have those of contiguous ones. 0 along a leading axis that is shared."""
    if gpu.framework(x) == "torch":
        strides = [int(n) for n in x.stride()]
    else:
        strides = [math.prod(x.shape[axis + 1 :]) for axis in range(len(x.shape))]
    return (0 if x.shape[0] == 1 else strides[0], *strides[1:])


def _places(k_pages: Any, v_pages: Any, form: str) -> dict[str, int]:
    """Where a head's keys and values lie in the pools, in elements."""
    k, step = _strides(k_pages), 2 if form == "combined" else 1
    row = 0 if form == "latent" else k[3]
    v = k if v_pages is None else _strides(v_pages)
    found = dict(k_batch=k[0], k_page=k[1], k_token=k[2], k_head=step * row)
    found |= dict(v_batch=v[0], v_page=v[1], v_token=v[2], v_head=step * row if v_pages is None else v[3])
    return found | dict(v_start=row if form == "combined" else 0)


def forward(spec: PagedSpec, config: PagedGpuConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals
    short, splits = _short(spec, config), config.splits
    result = gpu.result((spec.batch, spec.tokens, spec.heads, spec.value_dim), spec.operands.query.dtype)
    tiles = config.rows, config.block_kv, config.warps, config.stages
    slots = 0
    if (
        spec.max_q_len > short
    ):  # long runs, and zeros for what belongs to no sequence; the short ones are written beside them
        long = config.long_rows, config.long_kv, config.long_warps, config.long_stages
        queries = config.long_rows // _heads(spec, config.long_rows)[0]
        # Every sequence may leave one block unfilled; and one more may hold what is behind the last.
        items = spec.sequences + 1 + spec.tokens // queries
        out, _ = _attend(
            spec, operands, long, items, 1, result, None, QUERIES=queries, DIRECT=False, LEAST=short + 1, SLOTS=0
        )
        result, slots = gpu.onto(out), short
    how = dict(QUERIES=short, DIRECT=True, LEAST=1, SLOTS=slots)
    items = spec.sequences + (0 if slots else 1)
    if splits == 1:
        return Outputs(_attend(spec, operands, tiles, items, 1, result, None, **how)[0]), None
    rows = (splits, spec.batch, _slots(spec, config), spec.heads)
    partial, lse = (gpu.result(shape, "float32") for shape in ((*rows, spec.value_dim), rows))
    partial, lse = _attend(spec, operands, tiles, items, splits, partial, lse, **how)
    return Outputs(_combine(spec, operands, splits, slots, partial, lse, result)), None


def _batches(operands: Operands, *names: str) -> dict[str, int]:
    return {f"{name}_batch": 0 if (x := getattr(operands, name)) is None else _strides(x)[0] for name in names}


def _attend(
    spec: PagedSpec,
    o: Operands,
    tiles: tuple[int, int, int, int],
    items: int,
    splits: int,
    out: gpu.Result,
    lse: gpu.Result | None,
    **how: int,
) -> list[Any]:
    """One launch of the walk over pages: [out, lse or None]."""
    rows, keys, warps, stages = tiles
    heads, head_tiles = _heads(spec, rows)
    latent = spec.form == "latent"
    rest = spec.head_dim - spec.value_dim if latent else 0
    return gpu.launch(
        ATTEND,
        (spec.batch * items * splits * spec.kv_heads * head_tiles,),
        dict(
            query_ptr=o.query,
            k_ptr=o.k_pages,
            v_ptr=o.v_pages,
            kv_lens_ptr=o.kv_lens,
            page_indices_ptr=o.page_indices,
            cu_q_lens_ptr=o.cu_q_lens,
            num_seqs_ptr=o.num_seqs,
            sinks_ptr=o.sinks if splits == 1 else None,
            k_scale_ptr=o.k_scale,
            v_scale_ptr=o.v_scale,
        ),
        dict(out_ptr=out, lse_ptr=lse),
        warps=warps,
        stages=stages,
        batch=spec.batch,
        tokens=spec.tokens,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_tiles=head_tiles,
        items=items,
        sequences=spec.sequences,
        entries=spec.pages_per_sequence,
        window=spec.window or 0,
        **_places(o.k_pages, o.v_pages, spec.form),
        **_batches(o, "kv_lens", "page_indices", "cu_q_lens", "num_seqs", "sinks", "k_scale", "v_scale"),
        SCALE=spec.scale,
        SOFTCAP=spec.softcap,
        WINDOW=spec.window is not None,
        PRECISION="tf32x3" if spec.operands.query.dtype.itemsize == 4 else None,
        PAGE=spec.page_size,
        GROUP=spec.group,
        HEADS=heads,
        SPLITS=splits,
        LATENT=latent,
        D=spec.head_dim,
        DV=spec.value_dim,
        D_TILE=_tile(spec.value_dim if latent else spec.head_dim),
        DV_TILE=_tile(spec.value_dim),
        REST_TILE=_tile(rest),
        ROWS=rows,
        COLUMNS=keys,
        CHUNK=_chunk(spec.sequences),
        **how,
    )


def _combine(spec: PagedSpec, o: Operands, splits: int, slots: int, partial: Any, lse: Any, result: gpu.Result) -> Any:
    """The outputs of the splits added up."""
    tile, splits_tile = gpu.next_power_of_2(spec.value_dim), gpu.next_power_of_2(splits)
    (out,) = gpu.launch(
        COMBINE,
        (math.prod(lse.shape[1:]),),
        dict(
            partial_ptr=partial,
            lse_ptr=lse,
            cu_q_lens_ptr=o.cu_q_lens,
            num_seqs_ptr=o.num_seqs,
            sinks_ptr=o.sinks,
        ),
        dict(out_ptr=result),
        warps=1 if splits_tile * tile <= 1024 else 4,
        batch=spec.batch,
        tokens=spec.tokens,
        heads=spec.heads,
        sequences=spec.sequences,
        **_batches(o, "cu_q_lens", "num_seqs", "sinks"),
        SLOTS=slots,
        SPLITS=splits,
        SPLITS_TILE=splits_tile,
        DV=spec.value_dim,
        DV_TILE=tile,
        ROWS=max(1, min(splits_tile, 4096 // tile)),
    )
    return out


def _chunk(sequences: int) -> int:
    return max(64, min(_CHUNK, gpu.next_power_of_2(sequences)))


def update(
    k_pages: Any,
    v_pages: Any,
    key: Any,
    value: Any,
    kv_lens: Any,
    page_indices: Any,
    cu_q_lens: Any,
    num_seqs: Any,
    k_scale: Any,
    v_scale: Any,
) -> None:
    """`update_pages` of torch tensors: the pools `[1, P, page, ...]` are changed in place, the other operands are contiguous and have no batch axis.

    JAX needs no kernel: XLA's scatter moves the new rows only, and writes in place where the pages are donated.
    """
    form = "latent" if value is None else "combined" if v_pages is None else "separate"
    page = array_spec(k_pages)
    kv_heads = 1 if value is None else key.shape[1]
    columns, value_columns = page.shape[-1], 0 if value is None else value.shape[-1]
    tile, value_tile = _tile(columns), _tile(max(1, value_columns))
    heads = max(1, min(gpu.next_power_of_2(kv_heads), 4096 // max(tile, value_tile)))
    places = _places(k_pages, v_pages, form)
    largest = None
    if page.dtype.itemsize == 1:
        largest = 127.0 if page.dtype.name == "int8" else float(jnp.finfo(page.dtype).max)
    gpu.launch(
        UPDATE,
        (key.shape[0], gpu.cdiv(kv_heads, heads)),
        dict(
            k_ptr=k_pages,
            v_ptr=v_pages,
            key_ptr=key,
            value_ptr=value,
            kv_lens_ptr=kv_lens,
            page_indices_ptr=page_indices,
            cu_q_lens_ptr=cu_q_lens,
            num_seqs_ptr=num_seqs,
            k_scale_ptr=k_scale,
            v_scale_ptr=v_scale,
        ),
        {},
        sequences=page_indices.shape[0],
        entries=page_indices.shape[1],
        pages=page.shape[1],
        kv_heads=kv_heads,
        **{name: n for name, n in places.items() if not name.endswith("batch")},
        PAGE=page.shape[2],
        K=key.shape[-1],
        D=columns,
        DV=value_columns,
        D_TILE=tile,
        DV_TILE=value_tile,
        HEADS=heads,
        MOST=largest,
        CHUNK=_chunk(page_indices.shape[0]),
    )


TRITON = Implementation("triton", "cuda", forward, no_gradient, why_not, heuristic, PagedGpuConfig, notes)
