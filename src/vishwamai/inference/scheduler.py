"""Which sequences compute which tokens in the next step: decisions about plain values, without a clock or a device.

Every step gives each decoding sequence its next token and fills the rest of the token budget with chunks of prompts, so
that a long prompt never stops the others (Agrawal et al., "Sarathi-Serve", 2024). Sequences have a total order, the
rank: arrival, moved forward by priority. It never changes, so a request waits only for those that came before it or,
with a higher priority, not much later; nobody starves. When pages run out, the sequence of the last rank gives its up
and is computed again later ("recompute" of vLLM).

A step may be planned before the tokens of the step before it were read: `in_flight` counts those. What they are need
not be known here, only that they exist.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence

from vishwamai.inference.limits import Limits
from vishwamai.inference.pages import TURNED, PagePool, chain
from vishwamai.inference.prefixes import Part, Prefixes, Restored
from vishwamai.inference.states import StatePool
from vishwamai.inference.streams import Stream, Work
from vishwamai.inference.windows import WindowPages


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """A step: its work, in the order of the batch, whom planning it admitted, preempted and ended, and what comes back
    of their prefixes before it.
    """

    works: tuple[Work, ...] = ()
    admitted: tuple[Stream, ...] = ()
    preempted: tuple[Stream, ...] = ()
    expired: tuple[Stream, ...] = ()
    restored: tuple[Restored, ...] = ()


def _no_drafts(stream: Stream, most: int) -> Sequence[int]:
    del stream, most
    return ()


class Scheduler:
    """The streams that wait and run, and the pages that they hold.

    Args:
      limits: sizes of steps and sequences.
      pool: the pages.
      switch: a sequence of more tokens than this rotates all its keys otherwise (LongRoPE), so one that grows past it
        gives up its pages and is computed anew, as transformers does; None: there is no such length.
      rings: most pages that a sequence holds in layers with a window, by window (`windows.WindowPages`).
      num_states: int, slots of the model's states; 0 for a model without.
      restores: bool, True where prefixes may come back from elsewhere (`page_tiers`): a stream then waits until it is
        `ready`.

    >>> scheduler = Scheduler(Limits(max_sequences=2, max_tokens=4, page_size=2), PagePool(8))
    >>> long, short = Stream([1, 2, 3, 4, 5, 6], max_length=7), Stream([7], max_length=9)
    >>> for stream in (long, short):
    ...     stream.rank = scheduler.rank(now=0.0)
    ...     scheduler.add(stream)
    >>> [(w.start, w.count, w.samples) for w in scheduler.schedule(now=0.0).works]  # four tokens of the long prompt
    [(0, 4, False)]
    >>> [(w.start, w.count, w.samples) for w in scheduler.schedule(now=0.0).works]  # its end, and the short one
    [(4, 2, True), (0, 1, True)]
    """

    def __init__(
        self,
        limits: Limits,
        pool: PagePool,
        switch: int | None = None,
        rings: Mapping[int, int] | None = None,
        num_states: int = 0,
        restores: bool = False,
    ):
        self.limits = limits
        self.mixed = limits.mixed  # tokens of a step in which any sequence decodes
        self.switch = switch
        self.pool = pool
        self.windows = WindowPages(rings or {}, limits.max_sequences, limits.page_size, pool.shared)
        self.states = StatePool(num_states, pool) if num_states else None
        self.prefixes = Prefixes(pool, self.windows, self.states) if restores else None
        self._restored: list[Restored] = []
        self.waiting: list[Stream] = []  # by rank
        self.running: list[Stream] = []
        # A sequence that runs holds states too, so there are no more of them than slots of states.
        self._free_slots = list(reversed(range(min(limits.max_sequences, num_states or limits.max_sequences))))
        self._arrivals = 0

    @property
    def unfinished(self) -> int:
        """Streams that wait or run."""
        return len(self.waiting) + len(self.running)

    def rank(self, now: float, priority: float = 0.0) -> tuple[float, int]:
        """The rank of a request that arrives now; a unit of priority counts as `aging` seconds of waiting."""
        self._arrivals += 1
        return now - priority * self.limits.aging, self._arrivals

    def add(self, stream: Stream) -> None:
        """Puts a stream among the waiting.

        Raises:
          ShapeError: it is empty, or longer than a sequence or the pool can be.
        """
        self.limits.check(stream.prompt_length, stream.max_length, self.pool.num_pages)
        bisect.insort(self.waiting, stream, key=lambda s: s.rank)

    def schedule(self, now: float, drafts: Callable[[Stream, int], Sequence[int]] = _no_drafts) -> StepPlan:
        """Decides the next step and counts it as sent off.

        Args:
          now: the time, in any unit that ranks and deadlines share with it.
          drafts: guesses of a stream's next tokens, at most so many; asked for if the whole step decodes.

        Returns:
          The plan; without work if there is nothing to do before tokens in flight are read.
        """
        expired = [s for s in (*self.running, *self.waiting) if s.deadline <= now]
        for stream in expired:
            self.finish(stream)
        counts: dict[Stream, int] = {}
        preempted: list[Stream] = []
        for stream in [s for s in self.running if s.remaining and not s.turned and self._past(s.length)]:
            self._preempt(stream, counts, preempted)
        ready = [s for s in self.running if s.remaining and not s.blocked and not (s.synchronous and s.in_flight)]
        decodes = any(stream.remaining == 1 for stream in ready)
        budget = self.mixed if decodes else self.limits.max_tokens
        for stream in sorted(ready, key=lambda s: (s.remaining > 1, s.rank)):
            count = self._chunk(stream, budget - sum(counts.values()))
            if stream.slot is not None and count and self._grow(stream, stream.computed + count, counts, preempted):
                counts[stream] = count
        # What was just taken from one is not given to another: it would be taken back in the next step.
        admitted = [] if preempted else self._admit(budget, counts, preempted)
        guesses = self._guesses(counts, drafts)
        works = tuple(self._send(stream, count, guesses.get(stream, ())) for stream, count in counts.items())
        restored, self._restored = tuple(self._restored), []
        return StepPlan(works, tuple(admitted), tuple(preempted), tuple(expired), restored)

    def read(self, stream: Stream, tokens: Sequence[int]) -> None:
        """What a step sampled for a stream: one token, or the accepted guesses and the token after them."""
        if stream.finished:
            return
        stream.tokens.extend(tokens)
        stream.in_flight -= 1
        if self.states is not None and stream.checkpoint is not None:
            self._settle(self.states, stream, stream.checkpoint)
        stream.computed = min(stream.computed, stream.length - 1)  # what was computed for wrong guesses does not count
        if stream.slot is not None:
            self._publish(stream)

    def finish(self, stream: Stream) -> None:
        """Ends a stream, done or not: its pages and its slot are free. Steps in flight still write to those pages, but
        before any later step, so whoever gets them next is safe.
        """
        if stream.finished:
            return
        if stream.slot is None:
            self.waiting.remove(stream)
        else:
            self._leave(stream)
        stream.finished = True

    def lacking(self, stream: Stream, stored: Container[Part]) -> list[Part]:
        """The parts of `stored` with which a stream that waits could go on after a longer prefix."""
        assert self.prefixes is not None
        self._prepare(stream)
        return self.prefixes.lacking(self._prefix(stream), len(self._digests_of(stream)), stored)[1]

    def forget_prefixes(self) -> None:
        """Makes every page and state that nobody holds blank: no later prompt goes on after an earlier one."""
        if self.states is not None:
            self.states.forget_all()
        for pool in (self.pool, *self.windows.pools.values()):
            pool.forget()

    def _past(self, length: int) -> bool:
        return self.switch is not None and length > self.switch

    def _leave(self, stream: Stream) -> None:
        assert stream.slot is not None
        self.running.remove(stream)
        self._free_slots.append(stream.slot)
        self.pool.release(stream.pages)
        self.windows.release(stream.spans)
        if self.states is not None:
            if stream.checkpoint is not None:
                self.states.release(stream.checkpoint[0])
            self.states.release(stream.state, stream.digests[: stream.published])
            stream.state = stream.checkpoint = None
        stream.slot, stream.pages, stream.spans, stream.published, stream.computed = None, [], {}, 0, 0

    def _preempt(self, stream: Stream, counts: dict[Stream, int], preempted: list[Stream]) -> None:
        self._leave(stream)
        stream.preemptions += 1
        stream.ready = False  # its pages may give way, and come back
        counts.pop(stream, None)
        preempted.append(stream)
        bisect.insort(self.waiting, stream, key=lambda s: s.rank)

    def _grow(self, stream: Stream, tokens: int, counts: dict[Stream, int], preempted: list[Stream]) -> bool:
        """Gives a running stream pages for its first `tokens`, if need be those of the last ranks; False where it is
        the last itself and gave up its own.
        """
        missing = self.limits.pages_of(tokens) - len(stream.pages)
        while missing > 0:
            pages = self._take(missing)
            if pages is not None:
                stream.pages += pages
                break
            last = max(self.running, key=lambda s: s.rank)
            self._preempt(last, counts, preempted)
            if last is stream:
                return False
        return True

    def _admit(self, budget: int, counts: dict[Stream, int], preempted: list[Stream]) -> list[Stream]:
        """Admits requests in rank order while pages allow; a running request of a later rank makes room.

        No request overtakes another, or a long prompt would wait for ever; only requests that wait for a leader or are
        blocked are passed over.
        """
        admitted: list[Stream] = []
        while (stream := self._first_in_queue()) is not None and not stream.in_flight:
            self._prepare(stream)
            if sum(counts.values()) >= budget or (digests := self._make_room(stream, counts, preempted)) is None:
                break
            self.waiting.remove(stream)
            if self.prefixes is not None and stream.parts:
                prefix = self._prefix(stream)
                count, restored = self.prefixes.restore(prefix, len(digests), stream.parts)
                digests, stream.parts = prefix[:count], {}
                self._restored += restored
            if self.states is not None:
                sizes = len(stream.tokens), len(digests)
                stream.marks = self.states.marks(stream.digests, *sizes, self.limits, stream.shared)
                stream.state = self.states.share(digests)
            stream.pages, stream.spans = self.pool.share(digests), self.windows.share(digests)
            stream.computed = len(stream.pages) * self.limits.page_size
            stream.published = len(stream.pages)
            if stream.preemptions == 0:
                stream.cached = stream.computed
            more = self._take(self.limits.pages_of(len(stream.tokens)) - len(stream.pages))
            assert more is not None
            stream.pages += more
            stream.slot = self._free_slots.pop()
            self.running.append(stream)
            counts[stream] = self._chunk(stream, budget - sum(counts.values()))
            admitted.append(stream)
        return admitted

    def _first_in_queue(self) -> Stream | None:
        waiting = (s for s in self.waiting if s.ready or self.prefixes is None)
        return next((s for s in waiting if not s.blocked and not self._waits_for_leader(s)), None)

    def _prepare(self, stream: Stream) -> None:
        """Extends the digests of a stream that waits over all that is known of it."""
        if self.switch is not None and not stream.turned and self._past(len(stream.tokens)):
            stream.turned, stream.digests = self.switch + 1, []
        self._digest(stream, len(stream.tokens))

    def _prefix(self, stream: Stream) -> list[bytes]:
        """The digests of the pages that a stream may have without computing them; its last token is computed."""
        return stream.digests[: (len(stream.tokens) - 1) // self.limits.page_size]

    def _waits_for_leader(self, stream: Stream) -> bool:
        """Whether pages that it can share are being computed."""
        leader = stream.leader
        shared = (stream.prompt_length - 1) // self.limits.page_size
        return leader is not None and leader.slot is not None and leader.published < shared

    def _digests_of(self, stream: Stream) -> list[bytes]:
        """The digests of the first pages of a stream that waits which it need not compute."""
        digests = self._prefix(stream)
        count = len(self.pool.cached(digests))
        if self.states is None:
            return digests[: self.windows.usable(digests[:count])]
        while (count := self.states.usable(digests, count)) and self.windows.usable(digests[:count]) != count:
            count -= 1
        return digests[:count]

    def _chunk(self, stream: Stream, most: int) -> int:
        """How many tokens a stream computes in the next step, at most so many: a chunk ends where its states are to be
        kept.
        """
        end = next((mark for mark in stream.marks if mark > stream.computed), stream.length)
        return min(stream.remaining, most, end - stream.computed)

    def _take(self, count: int) -> list[int] | None:
        if self.states is not None:
            self.states.make_pages(count)
        return self.pool.take(count)

    def _make_room(self, stream: Stream, counts: dict[Stream, int], preempted: list[Stream]) -> list[bytes] | None:
        """What is `_known` of a stream for which there is room now; None where none can be made."""
        while True:
            digests = self._digests_of(stream)
            cached = self.pool.cached(digests)
            # Idle pages of the prefix are available until they are shared, and then count as held.
            missing = self.limits.pages_of(len(stream.tokens)) - sum(self.pool.holders(page) > 0 for page in cached)
            if self._free_slots and missing <= self.pool.available:
                return digests
            last = max(self.running, key=lambda s: s.rank, default=None)
            if last is None or last.rank <= stream.rank:
                return None
            self._preempt(last, counts, preempted)

    def _guesses(
        self, counts: dict[Stream, int], drafts: Callable[[Stream, int], Sequence[int]]
    ) -> dict[Stream, tuple[int, ...]]:
        if any(stream.remaining > 1 for stream in counts):  # of a prompt, if only one token of it
            return {}
        guesses = {}
        for stream in counts:
            # Guesses take no page from another, and do not go past the end of the sequence.
            space = (len(stream.pages) + self.pool.available) * self.limits.page_size - stream.computed - 1
            most = min(space, stream.max_length - stream.length - 1)
            if self.switch is not None and not stream.turned:
                most = min(most, self.switch - stream.length)
            if self.states is not None:
                # Another slot for the checkpoint; and no step goes past the end of a page, where states are kept.
                spare = self.states.available > len(guesses) + len(counts)
                most = min(most, -(stream.computed + 1) % self.limits.page_size) if spare else 0
            guess = tuple(drafts(stream, most))[:most] if most > 0 and not stream.in_flight else ()
            if guess:
                missing = self.limits.pages_of(stream.computed + 1 + len(guess)) - len(stream.pages)
                stream.pages += self.pool.take(max(0, missing)) or []
                guesses[stream] = guess
        return guesses

    def _send(self, stream: Stream, count: int, guess: tuple[int, ...]) -> Work:
        start = stream.computed
        self.windows.advance(stream.spans, start, start + count + len(guess))
        states = (0, 0)
        if self.states is not None:
            states = self.states.advance(stream.state, checkpoint=bool(guess))
            stream.state, stream.checkpoint = states[1], (states[0], start) if guess else None
        stream.computed += count
        samples = stream.computed == stream.length
        stream.computed += len(guess)
        stream.in_flight += samples
        if not guess:
            self._publish(stream)
        return Work(stream, start, count + len(guess), samples, guess, states)

    def _settle(self, states: StatePool, stream: Stream, checkpoint: tuple[int, int]) -> None:
        """Takes the states after a step's guesses, or goes back to those before them where a guess was wrong: the next
        step computes the right ones once more, next to the token after them.
        """
        slot, start = checkpoint
        if stream.computed >= stream.length:
            slot, stream.state, stream.computed = stream.state, slot, start
        states.release(slot)
        stream.checkpoint = None

    def _digest(self, stream: Stream, tokens: int) -> None:
        """Extends the chain of digests over the full pages of the first `tokens`."""
        size = self.limits.page_size
        for page in range(len(stream.digests), tokens // size):
            first = stream.root if not stream.turned else stream.root + TURNED  # other keys for the same tokens
            previous = stream.digests[-1] if stream.digests else first
            stream.digests.append(chain(previous, stream.tokens[page * size : (page + 1) * size]))

    def _publish(self, stream: Stream) -> None:
        """Makes known the pages that are full of tokens whose values are known."""
        count = min(stream.computed, len(stream.tokens))
        self._digest(stream, count)
        for page in range(stream.published, count // self.limits.page_size):
            self.pool.publish(stream.pages[page], stream.digests[page])
            self.windows.publish(stream.spans, page, stream.digests[page])
            stream.published = page + 1
        if self.states is not None and stream.computed == count:
            self._keep_state(self.states, stream)

    def _keep_state(self, states: StatePool, stream: Stream) -> None:
        """Keeps the states of a stream that has come to a mark of its prompt, or to the end of a page of its answer; of
        the latter the last one, and one every so many pages.
        """
        pages, rest = divmod(stream.computed, self.limits.page_size)
        answers = stream.computed >= stream.prompt_length
        if rest or not pages or stream.state is None or not (answers or stream.computed in stream.marks):
            return
        if states.keep(stream.state, stream.digests[:pages], stream.pages) and answers:
            if stream.rolling is not None:
                states.forget(stream.rolling)
            stream.rolling = stream.digests[pages - 1] if pages % self.limits.state_pages else None
