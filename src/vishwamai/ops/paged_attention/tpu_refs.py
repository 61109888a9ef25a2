"""What a call of the kernel has: its static sizes, and its references."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one kernel call.

    Attributes:
      queries: queries of an item; rows: rows of an item's block, queries times group, padded.
      pages: pages of a block; slots: blocks in VMEM, being fetched or read.
      joint: all heads are worked on together, in one tall block of `rows` (else `rows` are those of one kv head).
      chunk: keys whose scores are held at once.
      unpack: how rows narrower than the query are widened where heads are worked on together; see `tpu_unpack`.
    """

    queries: int
    rows: int
    pages: int
    slots: int
    joint: bool
    chunk: int
    unpack: str = "shift"


class PagedRefs(NamedTuple):
    """The kernel's references; what a call has no use for is None."""

    # Prefetched scalars: first item of each core, and the items; see `schedule.Items`.
    bounds: Any  # [cores + 1]
    sequence: Any  # [items]
    position: Any  # [items]
    first_page: Any  # [items]
    end: Any  # [items]
    table: Any  # [sequences * pages of each]
    # Operands. Blocks are one where heads are worked on together, else one for each kv head.
    query: Any  # [items, blocks, rows, D]
    k_pages: Any  # [pages, page_size, rows of a token, D], or [pages, page_size, D]
    v_pages: Any
    sinks: Any  # [blocks, rows, 1]
    row_query: Any  # [rows, 1]: which of the item's queries a row is
    row_head: Any  # [rows, 1]: its kv head
    k_scale: Any  # [rows, 1], or [kv heads] in scalar memory
    v_scale: Any
    out: Any  # [items, blocks, rows, Dv]
    # Scratch.
    q_buffer: Any  # [slots, blocks, rows, D]
    k_buffer: Any  # [slots, keys, rows of a token, D]
    v_buffer: Any
    o_buffer: Any  # [2, blocks, rows, Dv]
    m: Any  # [blocks, rows, 128]: running maximum
    l: Any  # [blocks, rows, 128]: running sum
    acc: Any  # [blocks, rows, Dv]
    fetched: Any  # semaphores of the pages
    q_fetched: Any
    stored: Any
    # Where the logsumexp is asked for.
    lse: Any = None  # [items, blocks, rows, 128], every lane alike
    lse_buffer: Any = None  # [2, blocks, rows, 128]
    lse_stored: Any = None
    slopes: Any = None  # [blocks, rows, 1]: ALiBi's
    # Of a tree of guesses: where the new tokens of an item's sequence begin, and which of them a row does not see (1),
    # else 0; the tree's columns padded to whole lanes.
    first_new: Any = None  # [items], a prefetched scalar
    hidden: Any = None  # [items, rows, columns]
    hidden_buffer: Any = None  # [slots, rows, columns]
