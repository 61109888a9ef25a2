"""The time that a run of the benchmark may take: what would not end in it is not begun."""

from __future__ import annotations

import dataclasses
import math
import time


@dataclasses.dataclass
class Budget:
    """Counts from when it is made.

    Attributes:
      seconds: bound of the total; None = no bound.
    """

    seconds: float | None = None
    _start: float = dataclasses.field(default_factory=lambda: time.perf_counter())
    _slowest: float = 0.0

    def part(self, seconds: float | None, reserve: float = 0.0) -> Budget:
        """A budget from now on, of so many seconds at the most, that leaves `reserve` of this one.

        >>> whole = Budget(100.0)
        >>> whole.part(50.0).seconds, whole.part(None).part(None).seconds <= 100.0, Budget().part(None).seconds
        (50.0, True, None)
        """
        left = min(math.inf if seconds is None else seconds, self.left - reserve)
        return Budget(None if left == math.inf else max(0.0, left))

    @property
    def left(self) -> float:
        """Seconds; less than 0 where more was used, infinite without a bound."""
        return math.inf if self.seconds is None else self.seconds - (time.perf_counter() - self._start)

    @property
    def has_room(self) -> bool:
        """Whether one more step fits that takes as long as the longest so far."""
        return self.left > self._slowest

    def took(self, seconds: float) -> None:
        """Notes how long a step took."""
        self._slowest = max(self._slowest, seconds)
