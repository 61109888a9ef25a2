"""How long a search goes on: estimated by the time that the compiler's answers took so far."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator
from time import monotonic

COMPILED = 8.0
"""A compilation takes about as long as so many probes (Llama 3 8B on v5e:4x4): what is expected before the first one.
"""


class Pace:
    """The seconds of probes and compilations.

    Args:
      verify: True to compile programs that fit.
    """

    def __init__(self, verify: bool):
        self.probes: list[float] = []
        self.compilations: list[float] = []
        self.verify = verify

    def left(self, finalists: int, probed: bool = False) -> float | None:
        """Seconds until so many more programs fit; None before anything was timed.

        Args:
          finalists: programs that are still to be found. probed: the first of them is being compiled.

        >>> pace = Pace(verify=True)
        >>> pace.probes.append(2.0)
        >>> pace.left(3), pace.left(3, probed=True)
        (54.0, 52.0)
        """
        if not self.probes:
            return None
        probe = statistics.mean(self.probes)
        compilation = statistics.mean(self.compilations) if self.compilations else COMPILED * probe
        return finalists * (probe + compilation * self.verify) - probe * probed


@contextlib.contextmanager
def timed(durations: list[float]) -> Iterator[None]:
    """Adds the seconds of the block to a list, unless it raises."""
    start = monotonic()
    yield
    durations.append(monotonic() - start)
