"""Which queries meet which pages: the ragged batch cut into items, each a block of one sequence's queries and the run of pages that it sees.

Everything here is integer arithmetic on [sequences]- or [items]-sized arrays inside the program, so lengths may change from call to call without a new
compilation. Items stand in the order of their sequences, without gaps, and only those that exist are walked.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from vishwamai.ops.paged_attention.spec import PagedSpec


class Items(NamedTuple):
    """Blocks of queries, `[items]` int32 each; those from `count` on mean nothing.

    Attributes:
      sequence: whose queries.
      token: index of the first query in the flat batch.
      position: position of that query in its sequence.
      first_page: first entry of the sequence's page table that any query of the block sees.
      end: the keys that the block sees end before this position.
      count: number of items, a scalar.
    """

    sequence: Any
    token: Any
    position: Any
    first_page: Any
    end: Any
    count: Any


class Runs(NamedTuple):
    """Sequences' runs of queries, `[sequences]` int32 each."""

    start: Any
    length: Any
    kv_len: Any


def runs(kv_lens: Any, cu_q_lens: Any, num_seqs: Any) -> Runs:
    """The runs; a sequence from `num_seqs` on has no queries."""
    index = jnp.arange(kv_lens.shape[0], dtype=jnp.int32)
    length = jnp.where(index < num_seqs, jnp.maximum(cu_q_lens[1:] - cu_q_lens[:-1], 0), 0)
    return Runs(cu_q_lens[:-1], length, kv_lens)


def most_items(spec: PagedSpec, block: int, least: int, most: int) -> int:
    """How many blocks of `block` queries there can be in sequences of `least` ... `most` queries (least >= 1)."""
    tokens, sequences = spec.tokens, min(spec.sequences, spec.tokens // least)
    # Each sequence may leave one block unfilled, all others are full.
    return max(1, min(tokens // block + sequences, sequences * -(-most // block)))


def items(spec: PagedSpec, of: Runs, block: int, least: int, most: int) -> Items:
    """The items of sequences of `least` ... `most` queries."""
    number = most_items(spec, block, least, most)
    blocks = jnp.where((of.length >= least) & (of.length <= most), -(-of.length // block), 0)
    ends = jnp.cumsum(blocks, dtype=jnp.int32)
    first = ends - blocks
    index = jnp.arange(number, dtype=jnp.int32)
    # The sequences before item i are those whose items end at i or before.
    sequence = jnp.sum(ends[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    sequence = jnp.minimum(sequence, of.start.shape[0] - 1)
    offset = (index - first[sequence]) * block
    kv_len = of.kv_len[sequence]
    position = kv_len - of.length[sequence] + offset
    end = jnp.clip(position + jnp.minimum(block, of.length[sequence] - offset), 0, kv_len)
    lowest = jnp.zeros_like(position) if spec.window is None else jnp.maximum(position - spec.window, 0)
    return Items(sequence, of.start[sequence] + offset, position, lowest // spec.page_size, end, ends[-1])
