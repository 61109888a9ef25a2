"""A plan of the scheduler as arrays for the device, and the step that was sent off with them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from vishwamai.core.types import PyTree
from vishwamai.inference.answers import TokenLogprobs
from vishwamai.inference.programs import Programs
from vishwamai.inference.requests import Branch
from vishwamai.inference.sampling import Rows, Sampled, bar_tokens, empty_rows, set_row
from vishwamai.inference.step_shapes import StepShape
from vishwamai.inference.streams import Stream, Work


@dataclasses.dataclass(frozen=True)
class Sent:
    """A step that was sent off: its work, the first row of logits of each, and the arrays that it will draw.

    Attributes:
      guessed: guesses of a draft model, `[sequences]` for each place; none where the works name their guesses.
    """

    works: tuple[tuple[Work, Branch, int], ...]
    sampled: Sampled
    guessed: tuple[PyTree, ...] = ()

    def guesses(self, place: int) -> tuple[int, ...]:
        """What work number `place` guessed; waits for the device."""
        drafts = self.works[place][0].drafts
        return (
            tuple(int(np.asarray(tokens)[place]) for tokens in self.guessed[: len(drafts)]) if self.guessed else drafts
        )


def send(
    admitted: Iterable[Stream],
    works: Mapping[Work, np.ndarray | None],
    branches: Mapping[Stream, Branch],
    programs: Programs,
) -> Sent:
    """Sends a step off; nothing here waits for the device.

    Args:
      admitted: sequences whose tokens the device does not have yet.
      works: parts of the step, each with the mask of its grammar.
      branches: the answers of the sequences.
      programs: the model's programs.
    """
    for stream in admitted:
        assert stream.slot is not None
        programs.place(stream.slot, 0, stream.tokens)
    order = sorted(works, key=lambda work: -len(work.drafts))  # as `draft_step` takes them
    counts = [work.count for work in order]
    logit_rows = sum(len(work.drafts) + 1 for work in order)
    needed = StepShape(sum(counts), len(counts), logit_rows, max(counts))
    drafting = programs.draft is not None and bool(order[0].drafts)
    shape = programs.shape_for(needed, drafting)  # a compiled shape that holds it: the rest is padding
    tables = programs.tables(shape)
    rows = empty_rows(shape.rows, programs.limits.max_sequences, programs.vocab)
    firsts = empty_rows(shape.sequences, programs.limits.max_sequences, programs.vocab)
    masks: dict[int, np.ndarray] = {}
    tables["cu_q_lens"][:] = needed.tokens  # padding sequences have no tokens
    tables["cu_q_lens"][: len(counts) + 1] = [0, *itertools.accumulate(counts)]
    rows_of, row = [], 0
    for i, work in enumerate(order):
        stream, branch = work.stream, branches[work.stream]
        assert stream.slot is not None
        tables["slots"][i] = stream.slot
        tables["kv_lens"][i] = work.start + work.count
        tables["lengths"][i] = max(work.start + work.count, stream.turned)  # chooses the rotation of LongRoPE
        tables["table"][i, : len(stream.pages)] = stream.pages
        if branch.request.adapter is not None:
            tables["adapters"][i] = branch.request.adapter.place
        if "states" in tables:
            tables["states"][:, i] = work.states
        for window, span in stream.spans.items():
            tables["windows"][window][i, span.first : span.first + len(span.pages)] = span.pages
        if work.drafts and programs.draft is None:
            programs.place(stream.slot, len(stream.tokens), work.drafts)
        rows_of.append((work, branch, row))
        position = work.start + work.count - len(work.drafts)
        if drafting:
            _set(firsts, i, branch, position)
        for place in range(len(work.drafts) + 1) if work.samples else ():  # one row of logits a guess, one after them
            # The token whose logits are read.
            tables["rows"][row] = tables["cu_q_lens"][i + 1] - 1 - len(work.drafts) + place
            _set(rows, row, branch, position + place)
            if drafting and place < len(work.drafts):
                # Proposals are stacked by place: `[places * sequences]`
                rows.proposal[row] = place * shape.sequences + i
            if (mask := works[work]) is not None:
                masks[row] = mask
            row += 1
    allowed = None
    if masks:
        # One bit for each token of the vocab; all of them in rows without a mask.
        allowed = np.full((shape.rows, -(-programs.vocab // 32)), -1, np.int32)
        for index, mask in masks.items():
            allowed[index] = mask
    proposals = ()
    if drafting:
        count = np.zeros(shape.sequences, np.int32)
        count[: len(order)] = [len(work.drafts) for work in order]
        proposals = programs.propose(shape, tables, firsts, count)
    sampled = programs.step(shape, tables, rows, allowed, proposals)
    return Sent(tuple(rows_of), sampled, tuple(proposal.tokens for proposal in proposals))


def _set(rows: Rows, row: int, branch: Branch, position: int) -> None:
    """Writes a request's options to one row, which draws the token at `position`."""
    options = branch.request.options
    set_row(rows, row, options)
    if position - branch.stream.prompt_length < options.min_new_tokens:
        bar_tokens(rows, row, branch.writer.ends, len(options.logit_bias))
    rows.slot[row], rows.position[row] = branch.stream.slot, position
    rows.prompt_length[row] = branch.stream.prompt_length
    rows.seed[row], rows.choice[row] = branch.seed, branch.choice


def logprobs_of(sampled: Sampled, row: int, count: int) -> TokenLogprobs:
    """The log probabilities of a row: the token's own, and those of the `count` most likely."""
    top = zip(sampled.top_tokens[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist())
    return TokenLogprobs(int(sampled.tokens[row]), float(sampled.logprobs[row]), tuple(top))
