"""How many tokens a step that decodes takes, so that its time stays within a target time between tokens.

A step of `n` tokens is taken to last `base + n * rate` seconds. Both numbers are medians of the last few steps: `base`
of those that only decode, `rate` of those that compute prompts. A median leaves out a step during which a program was
compiled.
"""

from __future__ import annotations

import bisect
import statistics
from collections import deque
from collections.abc import Iterable

_STEPS = 5


class Pace:
    """The token budget of the steps in which sequences decode.

    Args:
      target: seconds that such a step may last.
      sizes: tokens of the compiled steps that compute prompts; a step lasts as long as the next larger of them.
      tokens: the budget before any step was measured.

    >>> pace = Pace(target=0.1, sizes=(32, 64, 128), tokens=64)
    >>> pace.record(tokens=2, seconds=0.02, prompts=False)
    >>> pace.record(tokens=60, seconds=0.084, prompts=True)  # 1 ms a token more
    >>> pace.tokens
    64
    >>> pace.record(tokens=2, seconds=0.05, prompts=False)  # decoding alone slows down
    >>> pace.record(tokens=2, seconds=0.05, prompts=False)
    >>> pace.tokens
    32
    """

    def __init__(self, target: float, sizes: Iterable[int], tokens: int):
        self.target, self.tokens = target, tokens
        self._sizes = sorted(sizes)
        self._bases: deque[float] = deque(maxlen=_STEPS)
        self._rates: deque[float] = deque(maxlen=_STEPS)

    def seconds(self, tokens: int) -> float:
        """Expected time of a step of so many tokens; 0 before one was measured."""
        base = statistics.median(self._bases) if self._bases else 0.0
        return base + tokens * (statistics.median(self._rates) if self._rates else 0.0)

    def record(self, tokens: int, seconds: float, prompts: bool) -> None:
        """Takes in a step.

        Args:
          tokens: number of its tokens.
          seconds: its time.
          prompts: bool, whether it computed more than a token of any sequence.
        """
        if prompts:
            size = self._sizes[min(bisect.bisect_left(self._sizes, tokens), len(self._sizes) - 1)]
            self._rates.append(max(seconds - self.seconds(0), 0.0) / size)
        else:
            self._bases.append(seconds)
        if self._rates:
            fitting = [size for size in self._sizes if self.seconds(size) <= self.target]
            self.tokens = max(fitting, default=self._sizes[0])
