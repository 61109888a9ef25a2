"""Grammars of answers, followed on threads of their own: an answer waits for its next mask while the others go on."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.inference.answers import Delta
from vishwamai.inference.requests import Branch
from vishwamai.inference.threads import roomy_stack

if TYPE_CHECKING:
    from vishwamai.inference.barred import BarredMatcher
    from vishwamai.inference.guided import Matcher
    from vishwamai.inference.thinking import ThinkingMatcher

THREADS = 2

GRACE = 0.02
"""Seconds from a mask's start during which a step waits for it: most take less than one millisecond, and the answer
then has its part in that step. This is the most by which a mask holds up a step of other answers."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """An answer whose grammar takes its last tokens.

    Attributes:
      result: future of the next mask, or None where there is none; and whether the grammar has ended.
      delta: text of those tokens, which is not sent before; None at an answer's start.
      started: when, in the seconds of `time.monotonic`.
    """

    result: concurrent.futures.Future[tuple[np.ndarray | None, bool]]
    delta: Delta | None
    started: float


class Masks:
    """The grammars of an engine's answers. One thread calls it.

    A stream whose turn is under way is `blocked`, so that the scheduler leaves it out.
    """

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._turns: dict[Branch, Turn] = {}

    def begin(self, branch: Branch, tokens: Sequence[int], delta: Delta | None) -> None:
        """Begins to take an answer's last tokens, and to compute its next mask unless `delta` is the answer's end."""
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(THREADS, "masks")
        assert branch.matcher is not None
        goes_on = delta is None or delta.finish is None
        with roomy_stack():  # of the pool's threads, which start here
            result = self._pool.submit(_follow, branch.matcher, tokens, goes_on)
        self._turns[branch] = Turn(result, delta, time.monotonic())
        branch.stream.blocked = True

    def forget(self, branch: Branch) -> None:
        """Drops an answer that has ended."""
        turn = self._turns.pop(branch, None)
        if turn is not None:
            turn.result.cancel()

    def complete(self) -> Iterator[tuple[Branch, Turn]]:
        """The answers whose turn is complete; waits for those that began within the last `GRACE` seconds."""
        now = time.monotonic()
        recent = [turn for turn in self._turns.values() if now < turn.started + GRACE]
        if recent:
            latest = max(turn.started for turn in recent)
            concurrent.futures.wait([turn.result for turn in recent], latest + GRACE - now)
        for branch, turn in list(self._turns.items()):
            if turn.result.done():
                del self._turns[branch]
                branch.stream.blocked = False
                yield branch, turn

    def wait(self) -> None:
        """Waits until a turn is complete, for at most `GRACE` seconds."""
        if self._turns:
            results = [turn.result for turn in self._turns.values()]
            concurrent.futures.wait(results, GRACE, concurrent.futures.FIRST_COMPLETED)


def _follow(
    matcher: Matcher | ThinkingMatcher | BarredMatcher, tokens: Sequence[int], goes_on: bool
) -> tuple[np.ndarray | None, bool]:
    reason = matcher.advance(tokens) if tokens else None
    if reason is not None:
        raise ShapeError(reason)
    finished = bool(tokens) and matcher.finished  # an answer does not end before its first token
    return (matcher.mask() if goes_on and not finished else None), finished
