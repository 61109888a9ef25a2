"""API keys, and how many requests and tokens each may have.

A budget is a token bucket: it holds the amount of one period and fills up evenly. The tokens of a request are known at
its end, so the level may fall below 0; the next request then waits until it is 1 again.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from vishwamai.core.errors import ShapeError

PERIODS: Mapping[str, tuple[str, float]] = {
    "requests_per_minute": ("requests", 60.0),
    "requests_per_day": ("requests", 86_400.0),
    "tokens_per_minute": ("tokens", 60.0),
    "tokens_per_day": ("tokens", 86_400.0),
}
"""Limits of a line of the file of keys: what is counted, and seconds of the period."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of clients.

    Attributes:
      secret: text that clients send.
      limits: numbers by the names of `PERIODS`; one that is absent is no limit.
      name: name of the client in the log, or None.
    """

    secret: str
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    name: str | None = None

    @classmethod
    def parse(cls, line: str) -> Key:
        """The key of a line: the secret, then `name=...` and limits.

        Raises:
          ShapeError: a further entry is neither a name nor a limit; the text does not repeat the secret.

        >>> Key.parse("sk-1 name=web requests_per_minute=60").limits
        {'requests_per_minute': 60}
        """
        secret, *entries = line.split()
        name, limits = None, {}
        for entry in entries:
            key, _, value = entry.partition("=")
            if key == "name" and value:
                name = value
            elif key in PERIODS and value.isdecimal() and int(value) > 0:
                limits[key] = int(value)
            else:
                raise ShapeError(
                    f"{entry[:100]!r} behind a key is neither name=NAME nor a limit above 0; the limits are "
                    f"{', '.join(f'{name}=N' for name in PERIODS)}."
                )
        return cls(secret, limits, name)


class Budget:
    """What is left of a key's limits. One thread, that of the event loop, calls it.

    Args:
      limits: limits of the key.
      clock: seconds, which only grow.
    """

    def __init__(self, limits: Mapping[str, int], clock: Callable[[], float] = time.monotonic):
        self._limits, self._clock, self._time = limits, clock, clock()
        self._levels = {name: float(limit) for name, limit in limits.items()}

    def take(self) -> tuple[str, int] | None:
        """Counts a request; the limit that declines it and the seconds to wait, or None."""
        self._fill()
        waits = {}
        for name, level in self._levels.items():
            if level < 1.0:
                waits[name] = max(1, math.ceil((1.0 - level) * PERIODS[name][1] / self._limits[name]))
        if waits:
            longest = max(waits, key=lambda name: waits[name])
            return longest, waits[longest]
        self._add("requests", -1)
        return None

    def spend(self, tokens: int) -> None:
        """Counts the tokens of a request, of its prompts and answers."""
        self._fill()
        self._add("tokens", -tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's headers about the shortest period of requests and of tokens."""
        self._fill()
        values: dict[str, str] = {}
        for name in self._limits:
            kind = PERIODS[name][0]
            if f"x-ratelimit-limit-{kind}" not in values or PERIODS[name][1] < 3600:
                values[f"x-ratelimit-limit-{kind}"] = str(self._limits[name])
                values[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(self._levels[name])))
        return values

    def _add(self, kind: str, amount: float) -> None:
        for name in self._levels:
            if PERIODS[name][0] == kind:
                self._levels[name] += amount

    def _fill(self) -> None:
        now = self._clock()
        for name, limit in self._limits.items():
            rate = limit / PERIODS[name][1]
            self._levels[name] = min(float(limit), self._levels[name] + rate * (now - self._time))
        self._time = now
