"""A controller of memory: what to change when a step comes near the device's memory, a small pure function."""

from __future__ import annotations

import dataclasses

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.numbers import divisors

REMAT = ("none", "dots", "block_wise", "full")
"""Policies of `vishwamai.training` from the one that keeps most on the device to the one that keeps least."""

TARGET = 0.9
"""The share of `current_memory` that a step should take: what is left is for fragments and for what varies."""


@dataclasses.dataclass(frozen=True)
class MemorySettings:
    """How a step of the same global batch is computed.

    Attributes:
      microbatches: parts of the batch that are computed one after another; it divides the batch.
      remat: what the backward pass keeps, one of `REMAT`.
      predicted: bytes of the step's peak with these settings, by the rule of `optimize_memory_usage`.
      fits: whether that is within the target.
    """

    microbatches: int
    remat: str
    predicted: float
    fits: bool


# The activations of Llama 3 8B at 2048 tokens that a policy holds at once, relative to "none": what `analytic` counts
# as kept, and one layer computed again.
_KEPT = {"none": 1.0, "dots": 0.19, "block_wise": 0.12, "full": 0.09}


@checked
def optimize_memory_usage(
    current_memory: int,
    peak_memory: int,
    batch_size: int,
    *,
    fixed_memory: int | None = None,
    settings: MemorySettings | None = None,
) -> tuple[int, MemorySettings]:
    """The microbatch and the policy with which a step of the same global batch should fit.

    A pure function of its arguments. The part of the peak that is not fixed is taken to grow with the rows of a
    microbatch and with what the policy keeps. Recomputation comes first where it is enough, as it costs a share of the
    step; more microbatches cost overlap. Of the settings that are enough, those that change least are chosen: the
    fewest microbatches, then the policy that keeps most. More memory never gives more microbatches.

    Args:
      current_memory: bytes that the device has for the step.
      peak_memory: bytes that the step took, or was refused for, with `settings`.
      batch_size: rows of a step on one device.
      fixed_memory: bytes of the peak that do not depend on the batch: parameters, gradients, optimizer; None for 0.
      settings: those of the step that took `peak_memory`; None for one microbatch that keeps everything.

    Returns:
      The rows of a microbatch, and the settings. Where nothing fits, the settings that take least, with `fits` False.

    Raises:
      ShapeError: a size is not positive, the fixed part exceeds the peak, or `settings` do not divide the batch.

    >>> optimize_memory_usage(16 << 30, 12 << 30, 8)[0]
    8
    >>> rows, found = optimize_memory_usage(16 << 30, 40 << 30, 8, fixed_memory=8 << 30)
    >>> rows, found.microbatches, found.remat, found.fits
    (8, 1, 'dots', True)
    """
    if settings is not None and not isinstance(settings, MemorySettings):
        raise ShapeError(f"optimize_memory_usage: `settings` is {described(settings)}; pass MemorySettings or None.")
    before = settings or MemorySettings(1, "none", peak_memory, peak_memory <= TARGET * current_memory)
    fixed = fixed_memory or 0
    _check(current_memory, peak_memory, batch_size, fixed, before)
    scale = (peak_memory - fixed) / (batch_size / before.microbatches * _KEPT[before.remat])

    def predicted(microbatches: int, remat: str) -> MemorySettings:
        peak = fixed + scale * (batch_size / microbatches) * _KEPT[remat]
        return MemorySettings(microbatches, remat, peak, peak <= TARGET * current_memory)

    every = [predicted(n, remat) for n in divisors(batch_size) for remat in REMAT]
    chosen = next((settings_tried for settings_tried in every if settings_tried.fits), every[-1])
    return batch_size // chosen.microbatches, chosen


def _check(current: int, peak: int, batch_size: int, fixed: int, before: MemorySettings) -> None:
    for name, value in {"current_memory": current, "peak_memory": peak, "batch_size": batch_size}.items():
        if value < 1:
            raise ShapeError(f"optimize_memory_usage: `{name}` is {value}; pass a positive whole number.")
    if not 0 <= fixed <= peak:
        raise ShapeError(
            f"optimize_memory_usage: `fixed_memory` is {fixed}, but the peak is {peak}; the fixed part is within it."
        )
    if before.remat not in REMAT:
        raise ShapeError(f"optimize_memory_usage: remat is {before.remat!r}; expected one of {', '.join(REMAT)}.")
    if before.microbatches < 1 or batch_size % before.microbatches:
        raise ShapeError(
            f"optimize_memory_usage: {before.microbatches} microbatches do not divide batch_size={batch_size}."
        )
