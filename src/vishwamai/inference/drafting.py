"""Guesses of the next tokens by a draft (Leviathan et al. 2023; Chen et al. 2023): a smaller model, or the model's own
head that predicts further tokens (`models.next_token`).

    K times: the draft computes one token of each sequence and draws the next -> one step of the model checks all K

The draft has pools of its own, which the same page tables and the same scheduler serve: every step of the model is a
step of the draft too, so the pages of both hold keys and values of the same tokens, shared prefixes included. What the
draft draws never changes the distribution of an answer, by one of two rules:

- Greedy rows, and those with a seed, count a guess if it is what the model itself draws there, with the key of the
  position. The tokens are those without a draft.
- Other rows take a guess with probability min(1, p / q), which accepts more of them: `sampling.propose`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp
from jax.sharding import Mesh

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.inference.head_memory import HeadMemory, follow, guess
from vishwamai.inference.sampling import Proposals, Rows, propose
from vishwamai.inference.sharding import gathered
from vishwamai.models.config import ModelConfig
from vishwamai.models.next_token import NextTokenHead
from vishwamai.models.pages import PagedBatch
from vishwamai.models.rotation import rotation_switch

if TYPE_CHECKING:
    from jax import Array

    from vishwamai.models.decoder import Decoder

DraftPages = tuple[PyTree, ...] | HeadMemory
"""Pools of a draft model, or what a head has."""

UNREAD = -1
"""A guess in the plan of a step whose value only the device knows."""


def check_draft(config: ModelConfig, draft: ModelConfig, drafts: int, max_length: int) -> None:
    """Raises an error for a draft that cannot guess for a model.

    Args:
      config: the model's config.
      drafts: guesses in a step.
      max_length: tokens of a sequence.

    Raises:
      ShapeError: there are no guesses to make, the vocabs differ, or the draft has too few positions.
      UnsupportedError: the draft's layers have states, or its rotation changes at a length at which the model's does
        not.
    """
    if drafts < 1:
        raise ShapeError(
            f"a draft model guesses tokens, but the number of them in a step is {drafts}; pass at least 1."
        )
    if draft.vocab_size != config.vocab_size:
        raise ShapeError(
            f"the draft model ({draft.family}) has a vocab of {draft.vocab_size} tokens, the model ({config.family}) "
            f"one of {config.vocab_size}; pass a draft with the same tokenizer and vocab size."
        )
    if draft.max_positions < max_length:
        raise ShapeError(
            f"the draft model has {draft.max_positions} positions, but a sequence may have {max_length} tokens; pass a "
            f"`max_length` of at most {draft.max_positions}."
        )
    for kind in draft.layers:
        if kind.mixer.state(draft):
            raise UnsupportedError(
                f"the draft model ({draft.family}) has layers of type '{kind.mixer.layer_type}', whose state does not "
                "go back to the last guess that was right; pass a draft of attention layers alone, or --guesses."
            )
    if rotation_switch(draft) not in (None, rotation_switch(config)):
        raise UnsupportedError(
            f"the draft model's rotation changes at {rotation_switch(draft)} tokens (LongRoPE), the model's does not "
            "change there; pass another draft."
        )


def computed(
    draft: Decoder,
    pages: DraftPages,
    tokens: Array,
    hidden: Array,
    batch: PagedBatch,
    slots: Array,
    mesh: Mesh | None,
) -> DraftPages:
    """The draft's pages after a step of the model, with the same tokens.

    Args:
      pages: pools of a draft model, or the `HeadMemory` of a head.
      tokens: `[tokens]` of the step.
      hidden: `[tokens, hidden]`, the model's hidden states of them.
      batch: sequences of the step.
      slots: `[sequences]`, their rows in the history.
    """
    if isinstance(draft, NextTokenHead):
        assert isinstance(pages, HeadMemory)
        return follow(draft, pages, tokens, hidden, batch, slots, mesh)
    assert not isinstance(pages, HeadMemory)
    return draft.step(tokens, pages, batch)[1]


def first_guess(draft: Decoder | None) -> int:
    """Tokens of a sequence that are computed before a draft guesses: a head reads a hidden state of the model."""
    return 1 if isinstance(draft, NextTokenHead) else 0


def draft_step(
    draft: Decoder,
    pages: PyTree,
    history: Array,
    slots: Array,
    kv_lens: Array,
    lengths: Array,
    table: Array,
    windows: Mapping[int, Array] | None,
    rows: Rows,
    allowed: Array,
    guesses: Array,
    place: Array,
    *,
    mesh: Mesh | None,
) -> tuple[Proposals, PyTree, Array]:
    """Guess number `place` of each sequence: drawn, and written to the history.

    Args:
      slots, table, windows: results of `host_tables`, sequences with most guesses first.
      kv_lens, lengths: `[sequences]`, as of a step of one token each, before the first guess.
      rows: sampling rows of the draw after that token.
      guesses: `[sequences]` int32, how many each one has; those with `place` of them or fewer compute nothing.
      place: int32.

    Returns:
      The proposals `[sequences]`, the draft's pages and the history.
    """
    count = slots.shape[0]
    active = jnp.sum(guesses > place, dtype=jnp.int32)
    starts = jnp.minimum(jnp.arange(count + 1, dtype=jnp.int32), active)
    batch = PagedBatch(kv_lens + place, table, starts, 1, lengths + place, windows)
    tokens = history[slots, kv_lens + place - 1]
    if isinstance(draft, NextTokenHead):
        hidden, pages = guess(draft, pages, tokens, batch, slots, guesses > place, place, mesh)
    else:
        hidden, pages = draft.step(tokens, pages, batch)
    rows = rows._replace(position=rows.position + place)
    proposals = propose(gathered(draft.logits(hidden), mesh), rows, history, allowed)
    return proposals, pages, history.at[rows.slot, rows.position].set(proposals.tokens, mode="drop")
