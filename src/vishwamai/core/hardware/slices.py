"""The slices that a TPU generation comes in: which topologies exist, and which are nearest to one that does not.

libtpu describes more than exists, and ends the process on some of it: a side of 0 divides by zero, v5e:1x32 fails a
check while it compiles, v5e:6x10 is described but has no routing table. This table decides before libtpu is asked.

Sources: the slice shapes of Google Cloud's pages on v4, v5e, v5p, v6e and TPU7x. From v4 on, a 3D slice of whole cubes
is AxBxC with all sides multiples of 4, up to the pod ("TPU types and topologies"). The slices of up to 256
chips, and the largest ones, compile with libtpu 0.0.51 (`tests/core/test_target.py`).
"""

from __future__ import annotations

import functools
import itertools
import math

from vishwamai.core.hardware.tpu import TpuChip

Sides = tuple[int, ...]

_FLAT: tuple[Sides, ...] = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SMALL: tuple[Sides, ...] = ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))


def rank(chip: TpuChip) -> int:
    """Dimensions of the chip's network: 2 or 3."""
    return len(chip.topology.split("x"))


@functools.cache
def slices(chip: TpuChip) -> tuple[Sides, ...]:
    """Every slice of a chip, smallest first and of as many chips the one nearest to a cube first, which is the default.

    >>> from vishwamai.core.hardware import TPUS
    >>> slices(TPUS["v5e"])[:3], slices(TPUS["v4"])[-1]
    (((1, 1), (2, 2), (2, 4)), (4, 4, 256))
    """
    if rank(chip) == 2:
        return _FLAT
    cubes = range(4, chip.pod_chips // 16 + 1, 4)
    boxes = [
        (a, b, c)
        for a, b in itertools.combinations_with_replacement(cubes, 2)
        if a * b * b <= chip.pod_chips
        for c in range(b, chip.pod_chips // (a * b) + 1, 4)
    ]
    return (*_SMALL, *sorted(boxes, key=lambda sides: (math.prod(sides), max(sides))))


def is_slice(chip: TpuChip, sides: Sides) -> bool:
    """Whether the chip comes in this topology; the order of the sides does not matter.

    >>> from vishwamai.core.hardware import TPUS
    >>> is_slice(TPUS["v5e"], (4, 2)), is_slice(TPUS["v5e"], (2, 2, 2))
    (True, False)
    """
    return sorted(sides) in (sorted(shape) for shape in slices(chip) if math.prod(shape) == math.prod(sides))


def nearest(chip: TpuChip, sides: Sides, count: int = 3) -> tuple[Sides, ...]:
    """The slices nearest to `sides`, by the number of chips and by each side.

    >>> from vishwamai.core.hardware import TPUS
    >>> nearest(TPUS["v5e"], (3, 5)), nearest(TPUS["v5p"], (0, 1, 1), 1)
    (((4, 4), (2, 4), (4, 8)), ((1, 1, 1),))
    """

    def logs(sides: Sides) -> list[float]:
        return [math.log(max(1, side)) for side in sorted((*sides, *[1] * (3 - len(sides))))]

    target = logs(sides)

    def distance(shape: Sides) -> float:
        logarithms = logs(shape)
        return abs(sum(logarithms) - sum(target)) + math.dist(logarithms, target[-3:])

    return tuple(sorted(slices(chip), key=distance)[:count])


def of_chips(chip: TpuChip, chips: int) -> Sides | None:
    """The default slice of so many chips, None where there is none.

    >>> from vishwamai.core.hardware import TPUS
    >>> of_chips(TPUS["v5e"], 16), of_chips(TPUS["v5p"], 4), of_chips(TPUS["v4"], 5)
    ((4, 4), (2, 2, 1), None)
    """
    return next((sides for sides in slices(chip) if math.prod(sides) == chips), None)


def sides_text(sides: Sides) -> str:
    """The sides as users write them, "4x8"."""
    return "x".join(map(str, sides))


def wraps(chip: TpuChip, sides: Sides) -> tuple[bool, ...]:
    """Whether each side of a slice closes into a ring.

    A 3D slice of whole cubes of 4x4x4 chips closes on every side, by optical switches; a smaller one on none. A 2D
    slice closes on the sides of 16 chips, the pod's own ("How to Scale Your Model", chapter "How to think about TPUs";
    Google Cloud's pages on v4 and v5p).

    >>> from vishwamai.core.hardware import TPUS
    >>> wraps(TPUS["v5p"], (4, 4, 8)), wraps(TPUS["v5p"], (2, 2, 4)), wraps(TPUS["v5e"], (8, 16))
    ((True, True, True), (False, False, False), (False, True))
    """
    if rank(chip) == 2:
        return tuple(side == 16 for side in sides)
    return (all(side % 4 == 0 for side in sides),) * len(sides)
