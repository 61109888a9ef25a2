"""Timing several ways to do the same thing, side by side, on a machine that others may be using.

The candidates take turns, in a random order, so a slow moment hits all of them; the figure is the median of many short
samples, its spread the distance between the quartiles. A sample repeats a short call until it is long enough for the
clock. Where another candidate's sample follows, a pause lets the threads of the one before go to sleep, which wait for
more work on a core for a while; one call that is not timed then fills the caches.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping

_SAMPLE_SECONDS = 2e-3
"""Shortest sample: a thousand times what the clock and the loop cost."""
_PAUSE_SECONDS = 20e-3
"""Between two candidates, for threads that spin before they sleep."""
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
        """Distance between the quartiles, as a share of the median; 0.1 = the middle half of the samples lies within 10
        %.
        """
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.median

    def ratio(self, peer: Timing) -> float:
        """How many times as fast as `peer` this is: the median over the rounds that both took part in."""
        return statistics.median(theirs / mine for mine, theirs in zip(self.samples, peer.samples))

    def best_ratio(self, peer: Timing) -> float:
        """How many times as fast as `peer` this is, by the best sample of each."""
        return peer.best / self.best


Call = Callable[[], object]
Sampler = Callable[[Call, int], float]
"""Seconds that so many calls in a row take."""


def sampler(clock: Callable[[], float] = time.perf_counter, warm: bool = False) -> Sampler:
    """Samples by a clock.

    Args:
      clock: seconds; `time.process_time` counts the CPU time of this process, for a machine that others use.
      warm: one call before every sample is not timed, so that a sample does not pay for its predecessor's caches.
    """

    def sample(call: Call, count: int) -> float:
        if warm:
            call()
        start = clock()
        for _ in range(count):
            call()
        return clock() - start

    return sample


def side_by_side(
    calls: Mapping[str, Call],
    budget: float = math.inf,
    rounds: int = _MAX_ROUNDS,
    sample: Sampler | None = None,
    sample_seconds: float = _SAMPLE_SECONDS,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Timing]:
    """Times every call, taking turns in a random order.

    Args:
      calls: callables by name; each returns when its work is done, and has run before (nothing is compiled any more).
      budget: seconds for all of them together, pauses included; three rounds are made whatever they cost, or fewer if
        `rounds` says so.
      rounds: how many samples of each to take at the most.
      sample: takes a sample; by default with the wall clock.
      sample_seconds: shortest sample; 0 takes one call each.
      pause: waits so many seconds before another candidate's sample.
    """
    sample = sampler() if sample is None else sample
    repeats = {name: max(1, round(sample_seconds / max(sample(call, 1), 1e-7))) for name, call in calls.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    order, shuffle = list(calls), random.Random(0).shuffle
    start, last = time.perf_counter(), None
    for i in range(rounds):
        spent = time.perf_counter() - start
        if i >= _MIN_ROUNDS and spent + spent / i > budget:
            break
        shuffle(
            order
        )  # in a fixed order a candidate would always follow the same other one, whose leftovers in the caches it meets
        for name in order:
            if name != last and len(calls) > 1:
                pause(_PAUSE_SECONDS)
                calls[name]()
                last = name
            samples[name].append(sample(calls[name], repeats[name]) / repeats[name])
    return {name: Timing(tuple(seconds), repeats[name]) for name, seconds in samples.items()}
