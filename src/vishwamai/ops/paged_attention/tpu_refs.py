"""What a call of the kernel has: its static sizes, and its references."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.precision import lax_precision
from vishwamai.core.types import ABSENT, Ref

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
    bounds: Ref  # [cores + 1]
    sequence: Ref  # [items]
    position: Ref  # [items], of the first query that is read
    first_page: Ref  # [items]
    end: Ref  # [items]
    table: Ref  # [sequences * pages of each]
    # Operands. Blocks are one where heads are worked on together, else one for each kv head. "rows 1" is "1 rows" of
    # long runs.
    query: Ref  # [items, blocks, rows, D]; of long runs [tokens, heads, D]
    k_pages: Ref  # [pages, page_size, rows of a token, D], or [pages, page_size, D]
    v_pages: Ref
    sinks: Ref  # [blocks, rows 1]
    row_query: Ref  # [rows 1]: which of the item's queries a row is
    row_head: Ref  # [rows, 1]: its kv head
    k_scale: Ref  # [rows, 1], or [kv heads] in scalar memory
    v_scale: Ref
    out: Ref  # [items, blocks, rows, Dv]; of long runs [tokens, heads, Dv]
    # Scratch.
    q_buffer: Ref  # [slots, *an item's queries, D]
    k_buffer: Ref  # [slots, keys, rows of a token, D]
    v_buffer: Ref
    o_buffer: Ref  # [2, *an item's results, Dv]
    m: Ref  # [blocks, rows, 128]: running maximum; of long runs [blocks, 1, rows]
    l: Ref  # [blocks, rows, 128]: running sum; of long runs [blocks, 8, rows], to be added up
    acc: Ref  # [blocks, rows, Dv]; of long runs [blocks, Dv, rows]
    fetched: Ref  # semaphores of the pages
    q_fetched: Ref
    stored: Ref
    # Of long runs: first token that is read, rows read before the item's first query, and its queries; the results
    # that stand in `out` before; and the item's queries by kv head.
    token: Ref = ABSENT  # [items]
    skip: Ref = ABSENT  # [items]
    count: Ref = ABSENT  # [items]
    before: Ref = ABSENT
    q_rows: Ref = ABSENT  # [blocks, rows, D]
    # Where the logsumexp is asked for.
    lse: Ref = ABSENT  # [items, blocks, rows, 128], every lane alike; of long runs [items, blocks, rows]
    lse_buffer: Ref = ABSENT  # [2, *an item's]
    lse_stored: Ref = ABSENT
    slopes: Ref = ABSENT  # [blocks, rows 1]: ALiBi's
    # Of a tree of guesses: where the new tokens of an item's sequence begin, and which of them a row does not see (1),
    # else 0; the tree's columns padded to whole lanes.
    first_new: Ref = ABSENT  # [items], a prefetched scalar
    hidden: Ref = ABSENT  # [items, rows, columns]
    hidden_buffer: Ref = ABSENT  # [slots, rows, columns]
