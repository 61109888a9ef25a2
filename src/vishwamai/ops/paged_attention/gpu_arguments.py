"""The arguments of paged attention's Triton kernels, bundled: named tuples that Python fills and the kernels read.

Names in capitals are compile-time constants. Strides are in elements, of int4 in bytes, and 0 along an axis that is
shared; pointers may be None.
"""

from __future__ import annotations

from typing import NamedTuple

from vishwamai.core.types import AnyArray


class Pool(NamedTuple):
    """Pages of keys or of values, with their scales, `[batch, heads]`."""

    ptr: AnyArray
    scale_ptr: AnyArray
    batch: int
    page: int
    token: int
    head: int
    scale_batch: int


class Sequences(NamedTuple):
    """Lengths and pages of each sequence.

    Attributes:
      total: sequences of a batch element; entries: pages of a sequence.
    """

    kv_lens_ptr: AnyArray
    page_indices_ptr: AnyArray
    cu_q_lens_ptr: AnyArray
    num_seqs_ptr: AnyArray
    kv_lens_batch: int
    page_indices_batch: int
    cu_q_lens_batch: int
    num_seqs_batch: int
    total: int
    entries: int


class Terms(NamedTuple):
    """What changes the logits: sinks, ALiBi's slopes, the mask of a tree of drafts, and the window."""

    sinks_ptr: AnyArray
    slopes_ptr: AnyArray
    tree_ptr: AnyArray
    sinks_batch: int
    slopes_batch: int
    tree_batch: int
    tree_columns: int
    window: int | None


class Extents(NamedTuple):
    """The problem's sizes, and the items and tiles of heads that its grid has."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_tiles: int
    items: int


class Scores(NamedTuple):
    """How logits are computed.

    Attributes:
      WINDOW: bool, True where there is a window.
      PRECISION: mode of float32 products.
    """

    SCALE: float
    SOFTCAP: float | None
    WINDOW: bool
    PRECISION: str | None


class Items(NamedTuple):
    """Which queries an item of the grid has; see `gpu_kernels.attend`."""

    QUERIES: int
    DIRECT: bool
    LEAST: int
    SLOTS: int
    SPLITS: int


class Turn(NamedTuple):
    """Which columns of a key are turned: 2 PAIRS from FIRST on; INTERLEAVED: bool, True for neighbours as pairs."""

    PAIRS: int
    FIRST: int
    INTERLEAVED: bool


class Tiles(NamedTuple):
    """The tile of a step: query rows, and keys.

    Attributes:
      HEADS: query heads among the rows; GROUP: query heads of a kv head.
      CHUNK: sequences that a block is looked up among at once.
    """

    ROWS: int
    COLUMNS: int
    HEADS: int
    GROUP: int
    PAGE: int
    CHUNK: int


class Widths(NamedTuple):
    """Columns of keys and values, and the powers of two that hold them.

    Attributes:
      LATENT: bool, True where values are the first columns of the keys; REST_TILE: for the others.
      FOUR: bool, True for pages of 4 bits.
    """

    D: int
    DV: int
    D_TILE: int
    DV_TILE: int
    REST_TILE: int = 1
    LATENT: bool = False
    FOUR: bool = False
