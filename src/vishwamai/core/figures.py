"""Figures that say where they come from: an `Estimate` with its level, and a `Measurement` with its device."""

from __future__ import annotations

import dataclasses
from typing import Literal

from vishwamai.core.numbers import human

Level = Literal["analytic", "probe", "verified"]
LEVELS: tuple[Level, ...] = ("analytic", "probe", "verified")
"""How an estimate was made, the weakest first: by formulas from shapes, by the compiler's answer before it has made the
program, by the program that the compiler made.
"""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure that nobody measured.

    Sums and multiples of estimates are estimates of the weakest level among them. An estimate and a measurement do not
    add up: that is a TypeError.

    Attributes:
      value: the figure.
      level: source of the figure, one of `LEVELS`.
      unit: "bytes", "s", "B/s", or "of peak" for a share of a device's peak.

    >>> whole = Estimate(2 << 30, "verified") + Estimate(1 << 30, "analytic")
    >>> print(whole)
    3.0 GiB (analytic)
    >>> print(2 * Estimate(0.25, "analytic", "s"))
    500 ms (analytic)
    """

    value: float
    level: Level
    unit: str = "bytes"

    def __add__(self, second: Estimate) -> Estimate:
        if not isinstance(second, Estimate) or second.unit != self.unit:
            return NotImplemented
        weakest = self.level if LEVELS.index(self.level) <= LEVELS.index(second.level) else second.level
        return Estimate(self.value + second.value, weakest, self.unit)

    def __mul__(self, factor: float) -> Estimate:
        if isinstance(factor, bool) or not isinstance(factor, int | float):
            return NotImplemented
        return Estimate(self.value * factor, self.level, self.unit)

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"{_formatted(self.value, self.unit)} ({self.level})"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A figure that a device gave.

    Attributes:
      value: the figure.
      device: device of the measurement, such as `jax.Device.device_kind`.
      unit: "bytes", "s", "B/s", or "of peak" for a share of a device's peak.

    >>> print(Measurement(3 << 20, "cpu"))
    3.0 MiB (measured on cpu)
    """

    value: float
    device: str
    unit: str = "bytes"

    def __str__(self) -> str:
        return f"{_formatted(self.value, self.unit)} (measured on {self.device})"


def cost_of_tokens(price: float, step: Estimate, tokens: float, chips: float) -> Estimate:
    """USD for a million tokens.

    Args:
      price: USD for a chip and hour. step: seconds in which `tokens` are made. chips: how many are paid for.

    >>> print(cost_of_tokens(1.2, Estimate(0.5, "verified", "s"), 3e6, 4))
    0.0002222 USD per million tokens (verified)
    """
    return Estimate(price * chips * step.value / 3600 / tokens * 1e6, step.level, "USD per million tokens")


def _formatted(value: float, unit: str) -> str:
    if unit == "bytes":
        return human(value)
    if unit == "s" and value < 1:
        return f"{value * 1e3:.3g} ms"
    return f"{value:.4g} {unit}"
