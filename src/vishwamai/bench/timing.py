"""Timing several ways to do the same thing, side by side, on a machine that others may be using.

The candidates take turns, in an order that rotates, so a slow moment hits all of them; the figure is the median of many short samples, its spread the
distance between the quartiles. A sample repeats a short call until it is long enough for the clock.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping

_SAMPLE_SECONDS = 2e-3
"""Shortest sample: a thousand times what the clock and the loop cost."""
_MAX_ROUNDS = 40
_MIN_ROUNDS = 3


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds per call: one figure for each sample, in the order of the rounds.

    >>> Timing((3.0, 1.0, 2.0, 2.0), 1).median
    2.0
    """

    samples: tuple[float, ...]
    calls_per_sample: int

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def best(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, as a share of the median; 0.1 = the middle half of the samples lies within 10 %."""
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, other: Timing) -> float:
        """How many times as fast as `other` this is: the median over the rounds that both took part in."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.samples, other.samples))


def once(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def side_by_side(
    calls: Mapping[str, Callable[[], object]], budget: float, rounds: int = _MAX_ROUNDS
) -> dict[str, Timing]:
    """Times every call, taking turns.

    Args:
      calls: by name; each returns when its work is done, and has run before (nothing is compiled any more).
      budget: seconds for all of them together; three rounds are made whatever they cost.
      rounds: how many samples of each to take at the most.
    """
    names = list(calls)
    repeats = {}
    for name in names:
        seconds = max(once(calls[name]), 1e-7)
        repeats[name] = max(1, round(_SAMPLE_SECONDS / seconds))
    samples: dict[str, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    for i in range(max(rounds, _MIN_ROUNDS)):
        spent = time.perf_counter() - start
        if i >= _MIN_ROUNDS and spent + spent / i > budget:
            break
        for name in (*names[i % len(names) :], *names[: i % len(names)]):
            call, count = calls[name], repeats[name]
            begin = time.perf_counter()
            for _ in range(count):
                call()
            samples[name].append((time.perf_counter() - begin) / count)
    return {name: Timing(tuple(found), repeats[name]) for name, found in samples.items()}
