"""The engine's core: it plans a step, sends it off, and hands out what the step before drew. One thread calls it.

    plan = what the scheduler decides -> send it off -> read what the step before drew

The step before is read while the present one is computed. Only a request with a grammar, or with guesses, waits for its
last token's value, and then the core reads before it plans.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vishwamai.inference.answers import Delta, Finish, Writer
from vishwamai.inference.drafting import UNREAD
from vishwamai.inference.programs import Programs
from vishwamai.inference.requests import Branch, Request, Statistics
from vishwamai.inference.sampling import Sampled
from vishwamai.inference.scheduler import Plan, Scheduler, Stream
from vishwamai.inference.speculative import accepted, lookup
from vishwamai.inference.steps import Sent, logprobs_of, send


class EngineCore:
    """Requests that wait or run, their scheduler and the programs of their steps.

    Args:
      programs: of the model, and of its draft.
      scheduler: decides the steps.
      tokenizer, end_tokens: as `Engine`.
    """

    def __init__(self, programs: Programs, scheduler: Scheduler, tokenizer: Any, end_tokens: frozenset[int]):
        self.programs, self.scheduler, self.tokenizer, self.end_tokens = programs, scheduler, tokenizer, end_tokens
        self.statistics = Statistics()
        self._branches: dict[Stream, Branch] = {}
        self._sent: Sent | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return self.scheduler.unfinished == 0 and self._sent is None

    def take(self, request: Request, length: int) -> None:
        """Puts a request's answers among the waiting; `length` tokens is each one's most, prompt included."""
        options, now = request.options, time.monotonic()
        seed = int.from_bytes(os.urandom(4), "little") if options.seed is None else options.seed % 2**32
        for choice in range(options.n):
            detokenizer = None if self.tokenizer is None else self.tokenizer.stream(keep=request.keep_special)
            stream = Stream(list(request.prompt), length, self.scheduler.rank(now, request.priority))
            stream.deadline = now + (np.inf if request.deadline is None else request.deadline)
            matcher = None if request.grammar is None else request.grammar.matcher()
            stream.synchronous = bool(self.programs.drafts) or matcher is not None
            shares = self.scheduler.pool.shared and request.branches
            stream.leader = request.branches[0].stream if shares else None
            branch = Branch(
                request, choice, seed, stream, Writer(options, self.end_tokens, detokenizer, choice), matcher
            )
            request.branches.append(branch)
            self._branches[stream] = branch
            self.scheduler.add(stream)
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

    def step(self) -> None:
        """Plans a step, sends it off, and hands out what the one before drew."""
        waits = any(stream.synchronous for stream in self.scheduler.running)
        if waits:
            self._read()
        plan = self.scheduler.schedule(time.monotonic(), self._guess)
        for stream in plan.expired:
            self._end(self._branches[stream], "deadline")
        self.statistics.preemptions += len(plan.preempted)
        sent = self._send(plan) if plan.works else None
        self._read()
        self._sent = sent

    def _end(self, branch: Branch, finish: Finish, error: str | None = None) -> None:
        self.scheduler.finish(branch.stream)
        self._forget(branch, finish)
        branch.request.sink(Delta(branch.choice, finish=finish, error=error, cached=branch.stream.cached))

    def _forget(self, branch: Branch, finish: Finish) -> None:
        del self._branches[branch.stream]
        self.statistics.finished[finish] = self.statistics.finished.get(finish, 0) + 1

    def _guess(self, stream: Stream, most: int) -> Sequence[int]:
        # A grammar's mask is known for the next token alone.
        if self._branches[stream].matcher is not None:
            return ()
        most = min(most, self.programs.drafts)
        return lookup(stream.tokens, most) if self.programs.draft is None else (UNREAD,) * most

    def _send(self, plan: Plan) -> Sent:
        for stream in plan.admitted:
            if stream.preemptions == 0:
                self.statistics.cached_tokens += stream.cached
        self.statistics.steps += 1
        self.statistics.computed_tokens += sum(work.count for work in plan.works)
        self.statistics.guesses += sum(len(work.drafts) for work in plan.works)
        return send(plan, self._branches, self.programs)

    def _read(self) -> None:
        """Waits for the step that was sent off last, and hands out what it drew."""
        sent, self._sent = self._sent, None
        if sent is None:
            return
        drawn: Sampled = jax.tree.map(np.asarray, sent.sampled)
        for i, (work, branch, row) in enumerate(sent.works):
            stream, options = work.stream, branch.request.options
            if stream.finished or not work.samples:
                continue
            tokens = accepted(sent.guesses(i), drawn.tokens[row : row + len(work.drafts) + 1].tolist())
            self.statistics.guesses_accepted += len(tokens) - 1 if work.drafts else 0
            logprobs = ()
            if options.logprobs is not None:
                logprobs = [logprobs_of(drawn, row + at, options.logprobs) for at in range(len(tokens))]
            room = stream.max_length - len(stream.tokens)
            error = None if branch.matcher is None else branch.matcher.advance(tokens)
            self.scheduler.read(stream, tokens)
            delta = branch.writer.add(tokens, logprobs, room, stream.cached)
            if delta.finish is None and branch.matcher is not None and branch.matcher.ended:
                delta = branch.writer.end(delta)
            self.statistics.new_tokens += len(delta.token_ids)
            if error is not None:
                self._end(branch, "error", error)
                continue
            if delta.finish is not None:
                self.scheduler.finish(stream)
                self._forget(branch, delta.finish)
            branch.request.sink(delta)
