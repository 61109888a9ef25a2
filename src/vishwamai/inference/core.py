"""The engine's core: it plans a step, sends it off, and hands out what the step before drew. One thread calls it.

    plan = what the scheduler decides -> send it off -> read what the step before drew

The step before is read while the present one is computed. Only a request with a grammar, or with guesses, waits for its
last token's value, and then the core reads before it plans. Grammars are followed on other threads (`masks`).

What goes wrong for one answer ends that answer. A step that fails ends the answers in it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.inference.answers import Delta, Finish, Writer
from vishwamai.inference.drafting import UNREAD, first_guess
from vishwamai.inference.masks import Masks
from vishwamai.inference.pace import Pace
from vishwamai.inference.page_tiers import PageTiers
from vishwamai.inference.programs import Programs
from vishwamai.inference.requests import Branch, Request, Statistics
from vishwamai.inference.sampling import NO_TOKEN, Sampled
from vishwamai.inference.scheduler import Scheduler, StepPlan
from vishwamai.inference.speculative import accepted, lookup
from vishwamai.inference.step_arrays import Sent, logprobs_of, send
from vishwamai.inference.streams import Stream, Work

if TYPE_CHECKING:
    from vishwamai.models.tokenizer import Tokenizer

_LOG = logging.getLogger(__name__)
_MOST_FAILURES = 3
"""Steps that may fail one after another before the engine gives up."""


class EngineCore:
    """Requests that wait or run, their scheduler and the programs of their steps.

    Args:
      programs: compiled programs of the model and of its draft.
      scheduler: decides the steps.
      tokenizer, end_tokens: arguments of `Engine`.
      tiers: places for prefixes that gave way, or None.
    """

    def __init__(
        self,
        programs: Programs,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        end_tokens: frozenset[int],
        tiers: PageTiers | None = None,
    ):
        self.programs, self.scheduler, self.tokenizer, self.end_tokens = programs, scheduler, tokenizer, end_tokens
        self.tiers = tiers
        self.statistics = Statistics()
        self._branches: dict[Stream, Branch] = {}
        self._masks = Masks()
        limits = scheduler.limits
        self.pace = None
        if limits.token_seconds is not None:
            self.pace = Pace(limits.token_seconds, limits.mixed_sizes, limits.mixed)
        self.clock = time.monotonic
        self._sent: Sent | None = None
        self._sent_at = self._read_at = 0.0
        self._failures = 0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.unfinished == 0 and self._sent is None

    def take(self, request: Request, length: int) -> None:
        """Puts a request's answers among the waiting; `length` tokens is each one's most, prompt included."""
        options, now = request.options, time.monotonic()
        # One seed for all choices of a request, whose keys differ by the number of the choice.
        seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed % 2**32
        for choice in range(options.n):
            try:
                self._take(request, choice, length, seed, now)
            except Exception as error:
                _LOG.exception("a request ends in an error")
                _tell(request, Delta(choice, finish="error", error=_text(error)))

    def _take(self, request: Request, choice: int, length: int, seed: int, now: float) -> None:
        detokenizer = None if self.tokenizer is None else self.tokenizer.stream(keep=request.keep_special)
        writer = Writer(request.options, self.end_tokens, detokenizer, choice)
        matcher = None if request.grammar is None else request.grammar.matcher()
        stream = Stream(list(request.prompt), length, self.scheduler.rank(now, request.priority))
        stream.shared = request.shared
        if request.adapter is not None:
            stream.root = request.adapter.root
        stream.deadline = now + (np.inf if request.deadline is None else request.deadline)
        stream.synchronous = bool(self.programs.drafts) or matcher is not None
        shares = self.scheduler.pool.shared and request.branches
        stream.leader = request.branches[0].stream if shares else None  # the first choice computes the prompt for all
        branch = Branch(request, choice, seed, stream, writer, matcher)
        self.scheduler.add(stream)
        request.branches.append(branch)
        self._branches[stream] = branch
        if matcher is not None:
            self._masks.begin(branch, (), None)
        self.statistics.prompt_tokens += stream.prompt_length

    def cancel(self, request: Request) -> None:
        """Ends a request's answers."""
        for branch in request.branches:
            if not branch.stream.finished:
                self._end(branch, "cancelled")

    def abandon(self, finish: Finish, error: str | None) -> None:
        """Ends all answers, and forgets the step that was sent off."""
        self._sent = None
        for branch in list(self._branches.values()):
            self._end(branch, finish, error)

    def store_prefixes(self) -> None:
        """Stores the prefixes on the device for a later start, where they have tiers; waits until they are written."""
        if self.tiers is not None:
            self.tiers.flush(self.scheduler)

    def step(self) -> None:
        """Plans a step, sends it off, and hands out what the one before drew."""
        # Their next step depends on the values of the last tokens: no overlap with the device.
        if any(stream.synchronous for stream in self.scheduler.running):
            self._read()
        self._follow_grammars()
        if self.tiers is not None:
            self.tiers.seek(self.scheduler)
        if self.pace is not None:
            self.scheduler.mixed = self.pace.tokens
        plan = self.scheduler.schedule(time.monotonic(), self._guess)
        for stream in plan.expired:
            self._end(self._branches[stream], "deadline")
        self.statistics.preemptions += len(plan.preempted)
        works = {work: self._branches[work.stream].mask if work.samples else None for work in plan.works}
        sent, sent_at = None, self.clock()
        try:
            if self.tiers is not None:
                self.tiers.exchange(self.scheduler, plan.restored)
            sent = self._send(plan, works) if works else None
        except Exception as error:
            self._failed((self._branches[work.stream] for work in works), error)
        self._read()
        self._sent, self._sent_at = sent, sent_at
        if sent is None:
            self._masks.wait()  # all that is left to do
            if self.tiers is not None:
                self.tiers.wait()

    def _follow_grammars(self) -> None:
        """Hands out what grammars have taken; an answer whose grammar gives up ends."""
        for branch, turn in self._masks.complete():
            try:
                branch.mask, finished = turn.result.result()
                if turn.delta is not None:
                    ends = finished and turn.delta.finish is None
                    self._deliver(branch, branch.writer.end(turn.delta) if ends else turn.delta)
            except Exception as error:
                declined = isinstance(error, ShapeError)
                if not declined:
                    _LOG.error("an answer ends in an error", exc_info=error)
                self._end(branch, "error", _text(error), declined)

    def _failed(self, branches: Iterable[Branch], error: Exception) -> None:
        """Ends the answers of a step that failed; raises its error where the next would fail, too."""
        self._failures += 1
        if self._failures >= _MOST_FAILURES or not self.programs.intact:
            raise error
        _LOG.error("a step failed", exc_info=error)
        for branch in branches:
            if not branch.stream.finished:
                self._end(branch, "error", _text(error))
        self.scheduler.forget_prefixes()  # pages are known from when a step is planned, and this one wrote none

    def _end(self, branch: Branch, finish: Finish, error: str | None = None, declined: bool = False) -> None:
        self.scheduler.finish(branch.stream)
        self._forget(branch, finish)
        _tell(
            branch.request,
            Delta(branch.choice, finish=finish, error=error, declined=declined, cached=branch.stream.cached),
        )

    def _forget(self, branch: Branch, finish: Finish) -> None:
        self._masks.forget(branch)
        if self.tiers is not None:
            self.tiers.forget(branch.stream)
        del self._branches[branch.stream]
        self.statistics.finished[finish] = self.statistics.finished.get(finish, 0) + 1

    def _guess(self, stream: Stream, most: int) -> Sequence[int]:
        # A grammar's mask is known for the next token alone.
        if self._branches[stream].matcher is not None or stream.computed < first_guess(self.programs.draft):
            return ()
        most = min(most, self.programs.drafts)
        return lookup(stream.tokens, most) if self.programs.draft is None else (UNREAD,) * most

    def _send(self, plan: StepPlan, works: dict[Work, np.ndarray | None]) -> Sent:
        admitted = [stream for stream in plan.admitted if not stream.finished]
        self.statistics.cached_tokens += sum(stream.cached for stream in admitted if stream.preemptions == 0)
        self.statistics.steps += 1
        self.statistics.computed_tokens += sum(work.count for work in works)
        self.statistics.guesses += sum(len(work.drafts) for work in works)
        return send(admitted, works, self._branches, self.programs)

    def _read(self) -> None:
        """Waits for the step that was sent off last, and hands out what it drew."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        try:
            sampled: Sampled = jax.tree.map(np.asarray, sent.sampled)
        except Exception as error:  # the device reports here what went wrong in a step
            self._failed((branch for _, branch, _ in sent.works), error)
            return
        self._failures = 0
        self._measure(sent)
        for i, (work, branch, row) in enumerate(sent.works):
            if branch.stream.finished or not work.samples:
                continue
            try:
                self._hand_out(branch, sent.guesses(i), sampled, row, len(work.drafts))
            except Exception as error:  # of its text
                _LOG.exception("an answer ends in an error")
                self._end(branch, "error", _text(error))

    def _measure(self, sent: Sent) -> None:
        """Tells the pace how long a step took that was just read: it began when the one before it had ended."""
        begin, self._read_at = max(self._sent_at, self._read_at), self.clock()
        if self.pace is not None:
            counts = [work.count - len(work.drafts) for work, _, _ in sent.works]
            self.pace.record(sum(counts), self._read_at - begin, prompts=max(counts) > 1)

    def _hand_out(self, branch: Branch, guesses: Sequence[int], sampled: Sampled, row: int, drafts: int) -> None:
        """Hands out what a step drew for one answer."""
        stream, options = branch.stream, branch.request.options
        tokens = accepted(guesses, sampled.tokens[row : row + drafts + 1].tolist())
        if NO_TOKEN in tokens:
            self._end(
                branch, "error", "the logits of its next token are not finite; check the model's weights and dtype."
            )
            return
        self.statistics.guesses_accepted += len(tokens) - 1 if drafts else 0
        logprobs = ()
        if options.logprobs is not None:
            logprobs = [logprobs_of(sampled, row + offset, options.logprobs) for offset in range(len(tokens))]
        room = stream.max_length - len(stream.tokens)  # before `read` adds the tokens
        self.scheduler.read(stream, tokens)
        delta = branch.writer.add(tokens, logprobs, room, stream.cached)
        if branch.matcher is None:
            self._deliver(branch, delta)
        else:
            self._masks.begin(branch, tokens, delta)

    def _deliver(self, branch: Branch, delta: Delta) -> None:
        self.statistics.new_tokens += len(delta.token_ids)
        if delta.finish is not None:
            self.scheduler.finish(branch.stream)
            self._forget(branch, delta.finish)
        _tell(branch.request, delta)


def _tell(request: Request, delta: Delta) -> None:
    """Hands a delta to a request's sink, whose failure is nobody else's: its event loop may have ended."""
    try:
        request.sink(delta)
    except Exception:
        _LOG.exception("the sink of a request failed")


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ShapeError) else f"{type(error).__name__}: {error}"
