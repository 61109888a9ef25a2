"""What a call of the kernel has: its static sizes, and its references."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.precision import lax_precision
from vishwamai.core.types import AnyArray

LOWEST = -1e30
"""Where the running maximum starts: below any logit, above the masked ones."""
MASKED = -2e38
LOG2E, LN2 = math.log2(math.e), math.log(2)


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Product over axis `contract[0]` of `a` and `contract[1]` of `b`, summed in float32; float32 operands at full
    precision.
    """
    precision = lax_precision("highest") if a.dtype == jnp.float32 else None
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Static sizes of one kernel call.

    Attributes:
      queries: queries of an item; rows: rows of an item's block, queries times group, padded.
      long: the kernel for long runs (`tpu_long`), else the one for short runs (`tpu_short`).
      heads: query heads as the kernel for long runs reads them, padded.
      pages: pages of a block; slots: blocks in VMEM, being fetched or read.
      joint: all heads are worked on together, in one tall block of `rows` (else `rows` are those of one kv head).
      chunk: keys whose scores are held at once.
      unpack: how rows narrower than the query are widened where heads are worked on together; see `tpu_unpack`.
    """

    queries: int
    rows: int
    long: bool
    heads: int
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
    position: Any  # [items], of the first query that is read
    first_page: Any  # [items]
    end: Any  # [items]
    table: Any  # [sequences * pages of each]
    # Operands. Blocks are one where heads are worked on together, else one for each kv head. "rows 1" is "1 rows" of
    # long runs.
    query: AnyArray  # [items, blocks, rows, D]; of long runs [tokens, heads, D]
    k_pages: AnyArray  # [pages, page_size, rows of a token, D], or [pages, page_size, D]
    v_pages: AnyArray
    sinks: AnyArray  # [blocks, rows 1]
    row_query: Any  # [rows 1]: which of the item's queries a row is
    row_head: Any  # [rows, 1]: its kv head
    k_scale: Any  # [rows, 1], or [kv heads] in scalar memory
    v_scale: Any
    out: Any  # [items, blocks, rows, Dv]; of long runs [tokens, heads, Dv]
    # Scratch.
    q_buffer: Any  # [slots, *an item's queries, D]
    k_buffer: Any  # [slots, keys, rows of a token, D]
    v_buffer: Any
    o_buffer: Any  # [2, *an item's results, Dv]
    m: Any  # [blocks, rows, 128]: running maximum; of long runs [blocks, 1, rows]
    l: Any  # [blocks, rows, 128]: running sum; of long runs [blocks, 8, rows], to be added up
    acc: Any  # [blocks, rows, Dv]; of long runs [blocks, Dv, rows]
    fetched: Any  # semaphores of the pages
    q_fetched: Any
    stored: Any
    # Of long runs: first token that is read, rows read before the item's first query, and its queries; the results
    # that stand in `out` before; and the item's queries by kv head.
    token: Any = None  # [items]
    skip: Any = None  # [items]
    count: Any = None  # [items]
    before: Any = None
    q_rows: Any = None  # [blocks, rows, D]
    # Where the logsumexp is asked for.
    lse: Any = None  # [items, blocks, rows, 128], every lane alike; of long runs [items, blocks, rows]
    lse_buffer: Any = None  # [2, *an item's]
    lse_stored: Any = None
    slopes: Any = None  # [blocks, rows 1]: ALiBi's
    # Of a tree of guesses: where the new tokens of an item's sequence begin, and which of them a row does not see (1),
    # else 0; the tree's columns padded to whole lanes.
    first_new: Any = None  # [items], a prefetched scalar
    hidden: AnyArray = None  # [items, rows, columns]
    hidden_buffer: Any = None  # [slots, rows, columns]
