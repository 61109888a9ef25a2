"""Which queries meet which pages: the ragged batch cut into items, each a block of one sequence's queries and the run
of pages that it sees.

Everything here is integer arithmetic on [sequences]- or [items]-sized arrays inside the program, so lengths may change
from call to call without a new compilation. Items stand in the order of their sequences, without gaps, and only those
that exist are walked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp

from vishwamai.core.arrays import namespace
from vishwamai.core.spec import is_symbolic, static_size
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.paged_attention.spec import PagedSpec

if TYPE_CHECKING:
    import jax


class Items(NamedTuple):
    """Blocks of queries, `[items]` int32 each; those from `count` on mean nothing.

    Attributes:
      sequence: whose queries.
      token: index of the first query in the flat batch.
      position: position of that query in its sequence.
      first_page: first entry of the sequence's page table that any query of the block sees.
      end: the keys that the block sees end before this position.
      queries: how many queries the block has.
      count: number of items, a scalar.
    """

    sequence: jax.Array
    token: jax.Array
    position: jax.Array
    first_page: jax.Array
    end: jax.Array
    queries: jax.Array
    count: jax.Array


class Runs(NamedTuple):
    """Sequences' runs of queries, `[sequences]` int32 each."""

    start: jax.Array
    length: jax.Array
    kv_len: jax.Array


def runs(kv_lens: AnyArray, cu_q_lens: AnyArray, num_seqs: AnyArray) -> Runs:
    """The runs; a sequence from `num_seqs` on has no queries."""
    xp = namespace(kv_lens)
    index = xp.arange(kv_lens.shape[0], dtype=xp.int32)
    length = xp.where(index < num_seqs, xp.clip(cu_q_lens[1:] - cu_q_lens[:-1], 0, None), 0)
    return Runs(cu_q_lens[:-1], length, kv_lens)


def most_items(spec: PagedSpec, block: int, least: int, most: int) -> int:
    """How many blocks of `block` queries there can be in sequences of `least` ... `most` queries (least >= 1)."""
    if is_symbolic(spec.operands):  # the definition's alone, whose `least` is 1
        return spec.tokens // block + spec.sequences
    tokens, sequences = spec.tokens, min(spec.sequences, spec.tokens // least)
    # Each sequence may leave one block unfilled, all others are full.
    return max(1, min(tokens // block + sequences, sequences * -(-most // block)))


def items(spec: PagedSpec, of: Runs, block: int, least: int, most: int) -> Items:
    """The items of sequences of `least` ... `most` queries."""
    number = most_items(spec, block, least, most)
    blocks = _blocks(of, block, least, most)
    ends = prefix_sum(blocks)
    index = jnp.arange(number, dtype=jnp.int32)[:, None]
    # Item i belongs to the sequence whose items begin at i or before and end after it. Sums over that mask are gathers
    # that XLA fuses into one loop.
    mine = (ends - blocks <= index) & (index < ends)  # [items, sequences]

    def of_item(values: AnyArray) -> AnyArray:
        return jnp.sum(jnp.where(mine, values, 0), axis=1, dtype=jnp.int32)

    sequence = of_item(jnp.arange(ends.shape[0], dtype=jnp.int32))
    offset = of_item(index - (ends - blocks)) * block
    kv_len, length = of_item(of.kv_len), of_item(of.length)
    position = kv_len - length + offset
    queries = jnp.minimum(block, length - offset)
    end = jnp.clip(position + queries, 0, kv_len)
    lowest = jnp.zeros_like(position) if spec.window is None else jnp.maximum(position - spec.window, 0)
    token = of_item(of.start) + offset
    return Items(
        sequence,
        token,
        position,
        lowest // spec.page_size,
        end,
        queries,
        jnp.sum(blocks, dtype=jnp.int32),
    )


def _blocks(of: Runs, block: int, least: int, most: int) -> AnyArray:
    """How many items each sequence has, `[sequences]`."""
    return jnp.where((of.length >= least) & (of.length <= most), -(-of.length // block), 0)


def query_of(spec: PagedSpec, of: Runs, block: int, least: int, most: int) -> tuple[PyTree, PyTree]:
    """Where each token stands among the queries of all items, `block` to an item, and whether it is one of them;
    `[tokens]` each.
    """
    blocks = _blocks(of, block, least, most)
    first = block * (prefix_sum(blocks) - blocks)
    token = jnp.arange(spec.tokens, dtype=jnp.int32)[:, None]
    mine = (blocks > 0) & (of.start <= token) & (token < of.start + of.length)  # [tokens, sequences]
    return jnp.sum(jnp.where(mine, first + token - of.start, 0), axis=1, dtype=jnp.int32), mine.any(1)


def at_tokens(x: AnyArray, before: AnyArray, place: AnyArray, exists: AnyArray) -> AnyArray:
    """`before`, `[tokens, ...]`, with the results `[items, block, ...]` of the items at their tokens, which `query_of`
    gives. A gather: XLA's scatter takes one row after the other on a TPU.
    """
    exists = exists.reshape(-1, *(1,) * (before.ndim - 1))
    return jnp.where(exists, x.reshape(-1, *x.shape[2:])[place].astype(before.dtype), before)


def prefix_sum(x: AnyArray) -> AnyArray:
    """Inclusive sums of an int32 vector; a short one as a masked sum, which fuses with what is around it."""
    if static_size(x.shape[0], 513) > 512:
        return jnp.cumsum(x, dtype=jnp.int32)
    index = jnp.arange(x.shape[0])
    return jnp.sum(jnp.where(index[None, :] <= index[:, None], x[None, :], 0), axis=1, dtype=jnp.int32)
