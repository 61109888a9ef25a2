"""The arguments of attention's Triton kernels, bundled: named tuples that Python fills and the kernels read.

Names in capitals are compile-time constants. Strides are in elements, 0 along an axis that is shared.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """`[batch, heads, seq, dim]` of any strides in which rows are whole."""

    ptr: Any
    batch: Any
    head: Any
    seq: Any


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

    batch: Any
    q_heads: Any
    kv_heads: Any
    q_len: Any
    kv_len: Any
    q_total: Any
    kv_total: Any
    low: Any
    high: Any
    offset: Any


class Terms(NamedTuple):
    """What changes the logits beside the band: bias and mask, which broadcast to `[batch, heads, q_len, kv_len]`,
    segment ids, ALiBi's slopes `[batch or 1, heads]`, and the key that each row stands at, `[batch or 1, q_len]`, where
    that is not its own number; pointers may be None.
    """

    bias_ptr: Any
    mask_ptr: Any
    q_segments_ptr: Any
    kv_segments_ptr: Any
    slopes_ptr: Any
    positions_ptr: Any
    bias_b: Any
    bias_h: Any
    bias_q: Any
    bias_k: Any
    mask_b: Any
    mask_h: Any
    mask_q: Any
    mask_k: Any
    q_segments_b: Any
    kv_segments_b: Any
    slopes_b: Any
    positions_b: Any


class Own(NamedTuple):
    """Along which axes the bias is not shared."""

    BATCH: bool
    HEADS: bool
    QUERIES: bool
    KEYS: bool


class Starts(NamedTuple):
    """Where packed sequences begin, int32 `[batch + 1]`; None where they are not packed."""

    q_ptr: Any
    kv_ptr: Any


class Walk(NamedTuple):
    """The tiles that a block mask leaves (see `gpu_blocks.Walks`), None without one.

    Attributes:
      ptr: lists of tiles, or the tiles themselves.
      patterns_ptr: which elements of a partly hidden tile are seen.
      head: entries of one head; 0 where all heads share them.
    """

    ptr: Any
    patterns_ptr: Any
    head: Any


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
