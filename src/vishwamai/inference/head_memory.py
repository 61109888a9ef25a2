"""What a head that predicts further tokens (`models.next_token`) has between steps, and its part of a step.

A pair is the hidden state of a token and the token after it, and it has the position of the former. So a step of tokens
s ... e - 1 completes the pairs s - 1 ... e - 2, for which it needs the hidden state of token s - 1. That is kept in two
places: the last few of each sequence that runs, in a ring, because a step may go back behind refused guesses; and the
last one of each page, because a sequence whose prefix is cached starts after pages that another one computed.

The last pair of a shared page has a token behind the page. Where sequences part there, it is that of the one that was
computed last: a guess of the others may be worse for it, and no answer changes, for guesses are checked.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.types import PyTree
from vishwamai.inference.pools import zeros
from vishwamai.inference.sharding import gathered, place_of, put, replicated
from vishwamai.models.pages import PagedBatch

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from vishwamai.inference.limits import Limits
    from vishwamai.models.config import ModelConfig
    from vishwamai.models.next_token import NextTokenHead


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadMemory:
    """Arrays of a head; a pytree.

    Attributes:
      pools: pages of its layer.
      ring: `[slots, drafts + 2, hidden]`, the model's hidden states of the last tokens by their position modulo the
        ring's length.
      ends: `[pages, hidden]`, that of the last token of each page.
      guessed: `[slots, hidden]`, the head's hidden state of its last guess.
      page_size: tokens of a page. Static.
    """

    pools: tuple[PyTree, ...]
    ring: Array
    ends: Array
    guessed: Array
    page_size: int = dataclasses.field(metadata={"static": True})


def pool_dtype(stored: DTypeLike, dtype: DTypeLike) -> jnp.dtype:
    """The dtype of a head's pages: its own where the model's are in 8 bits, whose scales are not measured for it."""
    return jnp.dtype(stored) if jnp.dtype(stored).itemsize > 1 else jnp.dtype(dtype)


def hidden_bytes(config: ModelConfig, limits: Limits, drafts: int, itemsize: int) -> tuple[int, int]:
    """Bytes of the hidden states of one page, and of those of the sequences that run."""
    row = config.hidden_size * itemsize
    return row, limits.max_sequences * (drafts + 3) * row


def head_memory(
    head: NextTokenHead, pools: tuple[PyTree, ...], limits: Limits, num_pages: int, drafts: int, mesh: Mesh | None
) -> HeadMemory:
    """The memory before the first step.

    Args:
      head: arrays or shapes.
      pools: result of `make_pools`.
      limits: sizes of steps and sequences.
      num_pages: pages of one layer.
      drafts: guesses of a step.
      mesh: mesh of the head.
    """
    slots, size = limits.max_sequences, head.config.hidden_size
    sizes = ((slots, drafts + 2, size), (num_pages, size), (slots, size))
    shapes = tuple(jax.ShapeDtypeStruct(shape, head.dtype) for shape in sizes)
    place = place_of(head)
    arrays: tuple[PyTree, ...] = zeros(shapes) if place is None else shapes
    arrays = put(arrays, place) if mesh is None and place is not None else replicated(arrays, mesh)
    ring, ends, guessed = arrays
    return HeadMemory(pools, ring, ends, guessed, limits.page_size)


def follow(
    head: NextTokenHead,
    memory: HeadMemory,
    tokens: Array,
    hidden: Array,
    batch: PagedBatch,
    slots: Array,
    mesh: Mesh | None,
) -> HeadMemory:
    """The memory after a step of the model: its pairs are in the pages, its hidden states are kept.

    Args:
      tokens: `[tokens]` of the step.
      hidden: `[tokens, hidden]`, the model's hidden states of them.
      batch: the step's sequences.
      slots: `[sequences]`, their rows in the ring.
    """
    hidden = gathered(hidden, mesh).astype(memory.ring.dtype)
    counts = batch.cu_q_lens[1:] - batch.cu_q_lens[:-1]
    start = batch.kv_lens - counts
    before = _before(memory, batch.page_table, slots, start)
    # The first token of a sequence completes no pair.
    first = ((start == 0) & (counts > 0)).astype(jnp.int32)
    ends = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts - first, dtype=jnp.int32)])
    pairs = dataclasses.replace(batch, kv_lens=jnp.maximum(batch.kv_lens - 1, 0), cu_q_lens=ends, states=None)
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    sequence = pairs.sequences(tokens.shape[0])
    offset = index - ends[sequence] + first[sequence]  # among the sequence's tokens of this step
    place = jnp.minimum(batch.cu_q_lens[sequence] + offset, tokens.shape[0] - 1)
    earlier = jnp.where((offset > 0)[:, None], hidden[jnp.maximum(place - 1, 0)], before[sequence])
    _, pools = head.predict(tokens[place], earlier, memory.pools, pairs)
    return dataclasses.replace(_with_hidden(memory, hidden, batch, slots, counts), pools=pools)


def guess(
    head: NextTokenHead,
    memory: HeadMemory,
    tokens: Array,
    batch: PagedBatch,
    slots: Array,
    active: Array,
    place: Array,
    mesh: Mesh | None,
) -> tuple[Array, HeadMemory]:
    """The head's hidden states for guess number `place`, and the memory with them.

    Args:
      tokens: `[sequences]`, the last token of each sequence, or its last guess.
      batch: a step of these tokens.
      slots: `[sequences]`, their rows in the ring.
      active: bool `[sequences]`, those that have so many guesses.
      place: int32.
    """
    model_hidden = _before(memory, batch.page_table, slots, batch.kv_lens - 1)
    earlier = jnp.where(place == 0, model_hidden, memory.guessed[slots])
    pairs = dataclasses.replace(batch, kv_lens=jnp.maximum(batch.kv_lens - 1, 0))
    hidden, pools = head.predict(tokens, earlier, memory.pools, pairs)
    rows = jnp.where(active, slots, memory.guessed.shape[0])
    new = gathered(hidden, mesh).astype(memory.guessed.dtype)
    return hidden, dataclasses.replace(memory, pools=pools, guessed=memory.guessed.at[rows].set(new, mode="drop"))


def _before(memory: HeadMemory, table: Array, slots: Array, start: Array) -> Array:
    """The model's hidden state of the token before position `start`, `[sequences, hidden]`."""
    last = jnp.maximum(start - 1, 0)
    pages = table[jnp.arange(table.shape[0]), last // memory.page_size]
    in_ring = memory.ring[slots, last % memory.ring.shape[1]]
    return jnp.where((start % memory.page_size == 0)[:, None], memory.ends[pages], in_ring)


def _with_hidden(memory: HeadMemory, hidden: Array, batch: PagedBatch, slots: Array, counts: Array) -> HeadMemory:
    """The memory with the hidden states of a step's tokens."""
    length = memory.ring.shape[1]
    back = jnp.arange(length, dtype=jnp.int32)[None]  # the last tokens of each sequence, from the end
    rows = jnp.where(back < counts[:, None], slots[:, None], memory.ring.shape[0])
    index = jnp.maximum(batch.cu_q_lens[1:, None] - 1 - back, 0)
    position = jnp.maximum(batch.kv_lens[:, None] - 1 - back, 0)
    ring = memory.ring.at[rows, position % length].set(hidden[index], mode="drop")
    tokens, size = hidden.shape[0], memory.page_size
    positions = batch.positions(tokens)
    last = (jnp.arange(tokens) < batch.cu_q_lens[-1]) & (positions % size == size - 1)
    pages = batch.page_table[batch.sequences(tokens), positions // size]
    ends = memory.ends.at[jnp.where(last, pages, memory.ends.shape[0])].set(hidden, mode="drop")
    return dataclasses.replace(memory, ring=ring, ends=ends)
