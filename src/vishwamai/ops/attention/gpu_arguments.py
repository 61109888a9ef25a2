"""The arguments of attention's Triton kernels, bundled: named tuples that Python fills and the kernels read.

Names in capitals are compile-time constants. Strides are in elements, 0 along an axis that is shared.
"""

from __future__ import annotations

from typing import NamedTuple

from vishwamai.core.types import AnyArray


class Rows(NamedTuple):
    """`[batch, heads, seq, dim]` of any strides in which rows are whole."""

    ptr: AnyArray
    batch: int
    head: int
    seq: int


class Cut(NamedTuple):
    """How a tile of rows is read.

    Attributes:
      DIM: elements of a row.
      ROWS, COLUMNS: the tile, powers of two; zero beyond the sequence and beyond DIM.
      TMA: bool, True for loads by the copy engine.
    """

    DIM: int
    ROWS: int
    COLUMNS: int
    TMA: bool = False


class Extents(NamedTuple):
    """The problem's sizes, and its band: query i sees the keys i + low ... i + high; with `Terms.positions_ptr`, those
    about its position.

    Attributes:
      q_total, kv_total: positions of the arrays; more than q_len and kv_len, those of the longest sequence, where
        sequences are packed.
      offset: the key that query 0 stands at, with ALiBi or packed sequences, 0 where rows have positions; else None.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    q_total: int
    kv_total: int
    low: int | None
    high: int | None
    offset: int | None


class Terms(NamedTuple):
    """What changes the logits beside the band: bias and mask, which broadcast to `[batch, heads, q_len, kv_len]`,
    segment ids, ALiBi's slopes `[batch or 1, heads]`, and the key that each row stands at, `[batch or 1, q_len]`, where
    that is not its own number; pointers may be None.
    """

    bias_ptr: AnyArray
    mask_ptr: AnyArray
    q_segments_ptr: AnyArray
    kv_segments_ptr: AnyArray
    slopes_ptr: AnyArray
    positions_ptr: AnyArray
    bias_b: int
    bias_h: int
    bias_q: int
    bias_k: int
    mask_b: int
    mask_h: int
    mask_q: int
    mask_k: int
    q_segments_b: int
    kv_segments_b: int
    slopes_b: int
    positions_b: int


class Own(NamedTuple):
    """Along which axes the bias is not shared."""

    BATCH: bool
    HEADS: bool
    QUERIES: bool
    KEYS: bool


class Starts(NamedTuple):
    """Where packed sequences begin, int32 `[batch + 1]`; None where they are not packed."""

    q_ptr: AnyArray
    kv_ptr: AnyArray


class Walk(NamedTuple):
    """The tiles that a block mask leaves (see `gpu_blocks.Walks`), None without one.

    Attributes:
      ptr: lists of tiles, or the tiles themselves.
      patterns_ptr: which elements of a partly hidden tile are seen.
      head: entries of one head; 0 where all heads share them.
    """

    ptr: AnyArray
    patterns_ptr: AnyArray
    head: int


class Logits(NamedTuple):
    """How logits and probabilities are computed.

    Attributes:
      LOW, HIGH: bool, True where the band has that edge.
      KEEP_FROM, RESCALE: dropout's threshold, and the factor of what it keeps.
      PRECISION: mode of float32 products.
      BIAS_AFTER: bool, True where the bias is added to the capped logits.
    """

    SCALE: float
    SOFTCAP: float | None
    LOW: bool
    HIGH: bool
    KEEP_FROM: int
    RESCALE: float
    PRECISION: str | None
    BIAS_AFTER: bool
