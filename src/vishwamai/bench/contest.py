"""One comparison: every candidate is checked, and those whose numbers are right are timed side by side."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vishwamai.bench import numbers
from vishwamai.bench.candidates import Contestant, TooLarge
from vishwamai.bench.numbers import Numbers
from vishwamai.bench.subject import Arrays
from vishwamai.core.interrupt import raise_interrupt
from vishwamai.core.jax_errors import device_error, out_of_memory, out_of_memory_named
from vishwamai.measure.timing import Call, Timing

Timer = Callable[[Mapping[str, Call]], dict[str, Timing]]
"""Times calls by name."""

_FAR = 4.0
"""How many times as long as the fastest candidate one may take that is timed however slow both are."""


@dataclasses.dataclass(frozen=True)
class ContestOutcome:
    """What came out for one candidate.

    Attributes:
      numbers: result of the check; None where it did not run, or where there is nothing to compare it with.
      timing: None where its numbers are wrong or it did not run; `note` says why it did not.
      memory: bytes that it takes, where XLA planned it.
    """

    candidate: Contestant
    numbers: Numbers | None = None
    timing: Timing | None = None
    memory: int | None = None
    note: str = ""


def contest(
    able: Sequence[Contestant],
    arrays: Arrays,
    check: Callable[[Contestant, tuple[Any, ...]], Numbers],
    timer: Timer,
    slowest: float = math.inf,
) -> list[ContestOutcome]:
    """The outcome of every candidate, in their order.

    Args:
      arrays: the case's arrays.
      check: tells of a candidate's whole result whether it is right.
      timer: `measure.timing.side_by_side` with its options.
      slowest: a candidate is not timed where the call that was checked took more seconds, and `_FAR` times those of
        the fastest.
    """
    calls: dict[str, Call] = {}
    took: dict[str, float] = {}
    outcomes: dict[str, ContestOutcome] = {}
    for candidate in able:
        memory = None
        try:
            call, outputs, memory = candidate.build(arrays)
            start = time.perf_counter()
            result = call()
            took[candidate.name] = time.perf_counter() - start
            result = outputs(result)
            verdict = check(candidate, result) if candidate.checked else None
        except TooLarge as reason:
            outcomes[candidate.name] = ContestOutcome(candidate, note=str(reason))
            continue
        except Exception as error:  # it counts as wrong, with what it raised, and the others still get their turn
            raise_interrupt()
            if out_of_memory(error):
                outcomes[candidate.name] = ContestOutcome(candidate, note=str(device_error(candidate.name, error)))
                continue
            verdict = numbers.raised(error)
        outcomes[candidate.name] = ContestOutcome(candidate, verdict, memory=memory)
        if verdict is None or verdict.right:
            calls[candidate.name] = call
    fastest = min((took[name] for name in calls), default=0.0)
    for name in [name for name in calls if took[name] > max(slowest, _FAR * fastest)]:
        del calls[name]
        note = f"one call takes {took[name]:.3g} s, and the fastest candidate's {fastest:.3g} s"
        outcomes[name] = dataclasses.replace(outcomes[name], note=note)
    with out_of_memory_named("bench"):
        timings = timer(calls) if calls else {}
    for name, timing in timings.items():
        outcomes[name] = dataclasses.replace(outcomes[name], timing=timing)
    return [outcomes[candidate.name] for candidate in able]
