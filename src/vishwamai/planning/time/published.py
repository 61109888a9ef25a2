"""How far estimated times were from steps that others published: the range that every printed time carries.

`benchmarks/plans.py published` has the rows with their sources, and makes the estimates; a test compares them.
"""

from __future__ import annotations

import dataclasses

from vishwamai.core.figures import Estimate
from vishwamai.core.target import Target


@dataclasses.dataclass(frozen=True)
class PublishedStep:
    """A training step that others measured, next to the estimates of this library's step of the same size.

    Attributes:
      target: the slice.
      experts: the model is a mixture of experts.
      seconds: published seconds.
      estimates: seconds by formulas, and of the compiled program where it was compiled.
    """

    target: str
    experts: bool
    seconds: float
    estimates: tuple[float, ...]

    @property
    def ratios(self) -> tuple[float, ...]:
        """The published time over each estimate."""
        return tuple(self.seconds / estimate for estimate in self.estimates)


STEPS = (
    PublishedStep("v6e:4x4", False, 3.393, (2.201, 2.171)),
    PublishedStep("v6e:16x16", False, 4.546, (2.669, 3.350)),
    PublishedStep("v5e:16x16", False, 10.306, (8.931,)),
    PublishedStep("v5e:16x16", False, 12.092, (12.275,)),
    PublishedStep("v5e:16x16", False, 13.472, (13.842,)),
    PublishedStep("v5p:4x4x4", False, 8.516, (7.253,)),
    PublishedStep("v5p:4x4x4", False, 7.383, (6.393,)),
    PublishedStep("v6e:16x16", True, 8.409, (5.014,)),
)
"""The rows of `benchmarks/plans.py published`, in its order."""


@dataclasses.dataclass(frozen=True)
class PublishedRange:
    """What published training steps took of their estimates.

    Attributes:
      low, high: the smallest and the largest ratio.
      count: steps that were compared.
      experts: they are mixtures of experts.
      chip: chip of the steps; None for all chips, where none is published of the chip in question.
    """

    low: float
    high: float
    count: int
    experts: bool
    chip: str | None

    def of(self, step: Estimate) -> tuple[float, float]:
        """The seconds that an estimate stands for."""
        return self.low * step.value, self.high * step.value

    def describe(self, step: Estimate, target: str) -> str:
        """One line with the range of an estimated time."""
        low, high = (f"{seconds * 1e3:.4g}" for seconds in self.of(step))
        return f"{low} to {high} ms, for {self.comparison(target)}"

    def comparison(self, target: str) -> str:
        """One clause with the ratios, and the steps that they are of."""
        kind = "mixtures of experts" if self.experts else "dense models"
        steps = f"{self.count} published training step{'s' * (self.count > 1)} of {kind}"
        where = f"on {self.chip}" if self.chip else f"on other chips (none of {Target.parse_chip(target).name})"
        low, high = f"{self.low:.2f}", f"{self.high:.2f}"
        return f"{steps} {where} took {low if low == high else f'{low} to {high}'} of such estimates"


def published_range(target: str, experts: bool) -> PublishedRange:
    """The range for a chip and a kind of model: of its published steps, else of those of all chips.

    Args:
      target: a chip or slice.
      experts: the model is a mixture of experts.

    >>> found = published_range("v6e:4x4", experts=False)
    >>> round(found.low, 2), round(found.high, 2), found.chip
    (1.36, 1.7, 'v6e')
    >>> published_range("v4", experts=False).chip is None
    True
    """
    chip = Target.parse_chip(target).name
    kind = [step for step in STEPS if step.experts == experts]
    same = [step for step in kind if Target.parse_chip(step.target).name == chip]
    ratios = [ratio for step in same or kind for ratio in step.ratios]
    return PublishedRange(min(ratios), max(ratios), len(same or kind), experts, chip if same else None)
