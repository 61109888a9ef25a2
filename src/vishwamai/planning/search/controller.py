"""A controller of memory: what to change when a step comes near the device's memory, a small pure function."""

from __future__ import annotations

from collections.abc import Mapping

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.numbers import divisors

REMAT = ("none", "dots", "block_wise", "full")
"""Policies of `vishwamai.training` from the one that keeps most on the device to the one that keeps least."""

TARGET = 0.9
"""The share of `current_memory` that a step should take: what is left is for fragments and for what varies."""


FIXED = ("parameters", "gradients", "optimizer", "kv", "states")
"""Classes of a `MemoryPlanner`'s dict that do not depend on the rows of a microbatch."""


class MemorySettings(dict[str, int]):
    """How a step of the same global batch is computed, and the bytes of each class that it then takes.

    Attributes:
      microbatches: parts of the batch that are computed one after another; it divides the batch.
      remat: policy of the backward pass, one of `REMAT`.
      predicted: bytes of the step's peak with these settings, by the rule of `optimize_memory_usage`.
      fits: True where that is within the target.
    """

    def __init__(
        self, microbatches: int, remat: str, predicted: float, fits: bool, parts: Mapping[str, int] | None = None
    ):
        super().__init__(parts or {})
        self.microbatches, self.remat, self.predicted, self.fits = microbatches, remat, predicted, fits

    def __repr__(self) -> str:
        return (
            f"MemorySettings(microbatches={self.microbatches}, remat={self.remat!r}, predicted={self.predicted:.0f}, "
            f"fits={self.fits}, {super().__repr__()})"
        )


# The activations of Llama 3 8B at 2048 tokens that a policy holds at once, relative to "none": what `analytic` counts
# as kept, and one layer computed again.
_KEPT = {"none": 1.0, "dots": 0.19, "block_wise": 0.12, "full": 0.09}


@checked
def optimize_memory_usage(
    current_memory: int | Mapping[str, int],
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
      current_memory: the bytes by class that `MemoryPlanner.allocate` gives, with "total" and "free": the device has
        their sum for the step. Or that sum itself.
      peak_memory: bytes that the step took, or was refused for, with `settings`.
      batch_size: rows of a step on one device.
      fixed_memory: bytes of the peak that do not depend on the batch: parameters, gradients, optimizer. None takes them
        from the dict, and 0 without one.
      settings: settings of the step that took `peak_memory`; None for one microbatch that keeps everything.

    Returns:
      The rows of a microbatch, and the settings, a dict of the bytes by class with them. If nothing fits, the settings
      that take least, with `fits` False.

    Raises:
      ShapeError: a size is not positive, the fixed part exceeds the peak, or `settings` do not divide the batch.

    >>> optimize_memory_usage(16 << 30, 12 << 30, 8)[0]
    8
    >>> rows, found = optimize_memory_usage(16 << 30, 40 << 30, 8, fixed_memory=8 << 30)
    >>> rows, found.microbatches, found.remat, found.fits
    (8, 1, 'dots', True)
    >>> plan = {"parameters": 8 << 30, "activations": 32 << 30, "total": 40 << 30, "free": -24 << 30}
    >>> rows, found = optimize_memory_usage(plan, 40 << 30, 8)
    >>> rows, found.remat, found["total"] + found["free"] == 16 << 30, found["parameters"] >> 30
    (8, 'dots', True, 8)
    """
    if settings is not None and not isinstance(settings, MemorySettings):
        raise ShapeError(f"optimize_memory_usage: `settings` is {described(settings)}; pass MemorySettings or None.")
    parts = dict(current_memory) if isinstance(current_memory, Mapping) else {}
    current = _device_memory(parts) if isinstance(current_memory, Mapping) else current_memory
    before = MemorySettings(1, "none", peak_memory, peak_memory <= TARGET * current) if settings is None else settings
    fixed = sum(parts.get(name, 0) for name in FIXED) if fixed_memory is None else fixed_memory
    _check(current, peak_memory, batch_size, fixed, before)
    scale = (peak_memory - fixed) / (batch_size / before.microbatches * _KEPT[before.remat])

    def predicted(microbatches: int, remat: str) -> MemorySettings:
        peak = fixed + scale * (batch_size / microbatches) * _KEPT[remat]
        return MemorySettings(
            microbatches, remat, peak, peak <= TARGET * current, _by_class(parts, fixed, peak, current)
        )

    every = [predicted(n, remat) for n in divisors(batch_size) for remat in REMAT]
    chosen = next((settings_tried for settings_tried in every if settings_tried.fits), every[-1])
    return batch_size // chosen.microbatches, chosen


def _device_memory(parts: Mapping[str, int]) -> int:
    """Bytes that the device has for the step, by a planner's dict."""
    for name in ("total", "free"):
        if name not in parts:
            raise ShapeError(
                f"optimize_memory_usage: `current_memory` has no {name!r}, and the device's memory is the sum of "
                "'total' and 'free'; pass what MemoryPlanner.allocate gives, or the bytes of the device."
            )
    for name, value in parts.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise ShapeError(f"optimize_memory_usage: `current_memory` has {name!r}: {described(value)}; pass bytes.")
    return parts["total"] + parts["free"]


def _by_class(parts: Mapping[str, int], fixed: int, peak: float, current: int) -> dict[str, int]:
    """The bytes of a step with this peak: the classes that are not fixed change in proportion."""
    variable = {name: size for name, size in parts.items() if name not in (*FIXED, "total", "free")}
    before = sum(variable.values())
    shares = {name: size / before for name, size in variable.items()} if before else {"activations": 1.0}
    classes = {name: parts[name] for name in FIXED if name in parts} or {"fixed": fixed}
    classes |= {name: round(share * (peak - fixed)) for name, share in shares.items()}
    total = sum(classes.values())
    return classes | {"total": total, "free": current - total}


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
