"""Where devices stand on the torus of a TPU slice, and an order in which each is the neighbour of the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from vishwamai.core import hardware
from vishwamai.core.hardware import TpuChip
from vishwamai.core.links import Place, lattice, place, sides_of


def hops(a: Place, b: Place, sides: Sequence[int], wraps: Sequence[bool]) -> int:
    """Links between two chips, with wrap-around where the slice has it. Cores of one chip are 0 apart.

    >>> hops((0, 0, 0, 0), (3, 1, 0, 1), (4, 4, 1), (True, False, False))
    2
    """
    distances = [abs(x - y) for x, y in zip(a, b[: len(sides)])]
    # the shorter way around where the side is closed
    return sum(min(d, n - d) if wrap else d for d, n, wrap in zip(distances, sides, wraps))


def ring(sides: Sequence[int]) -> list[Place]:
    """An order of the points of a box in which each is next to the one before, and the last to the first where the box
    has an even side and is not a line.

    >>> ring((2, 3))
    [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]
    >>> ring((1, 3))
    [(0, 0), (0, 1), (0, 2)]
    """
    wide = [i for i, n in enumerate(sides) if n > 1]
    if not wide:
        return [(0,) * len(sides)]
    # The box is a grid of a path through all axes but one by that one; an even side is the one that is turned at.
    turned = next((i for i in wide if sides[i] % 2 == 0), wide[0])
    others = [i for i in range(len(sides)) if i != turned]
    path = _serpentine([sides[i] for i in others])
    rows, columns = sides[turned], len(path)
    if columns == 1 or rows % 2:  # no way back without a jump: a path, and not a ring
        cells = [(r, c) for r in range(rows) for c in (range(columns) if r % 2 == 0 else reversed(range(columns)))]
    else:  # up and down the rows in all columns but the first, and back in the first
        cells = [(0, 0)]
        for r in range(rows):
            cells += [(r, c) for c in (range(1, columns) if r % 2 == 0 else reversed(range(1, columns)))]
        cells += [(r, 0) for r in range(rows - 1, 0, -1)]
    points = []
    for r, c in cells:
        point = [0] * len(sides)
        point[turned] = r
        for i, x in zip(others, path[c]):
            point[i] = x
        points.append(tuple(point))
    return points


def _serpentine(sides: Sequence[int]) -> list[Place]:
    """All points of a box, each next to the one before."""
    if not sides:
        return [()]
    inner = _serpentine(sides[1:])
    return [(x, *rest) for x in range(sides[0]) for rest in (inner if x % 2 == 0 else reversed(inner))]


def on_neighbours(grid: np.ndarray, chip: TpuChip) -> np.ndarray:
    """The grid of devices with its last axis in the order of a ring, where its lines are boxes of the slice."""
    sides = sides_of(grid.reshape(-1).tolist())
    wraps = hardware.wraps(chip, sides)
    if length(grid, sides, wraps) == 0 or grid.shape[-1] < 3:  # two devices are neighbours either way
        return grid
    lines = grid.reshape(-1, grid.shape[-1])
    places = [
        place(device) for device in lines[0]
    ]  # an order for the first line, which `length` below judges on all lines
    corner = [min(axis) for axis in zip(*places)]
    box = [max(axis) - low + 1 for low, axis in zip(corner, zip(*places))]
    if math.prod(box) != len(places):  # not a box: no order is known to be a ring
        return grid
    index_of = {tuple(x - low for x, low in zip(coordinates, corner)): i for i, coordinates in enumerate(places)}
    reordered = grid[..., [index_of[point] for point in ring(box)]]
    return min((grid, reordered), key=lambda order: length(order, sides, wraps))  # never worse than before


def length(grid: np.ndarray, sides: Sequence[int], wraps: Sequence[bool]) -> int:
    """How many links beyond one the steps around the last axis take, over all of its lines; 0 is a ring of neighbours.

    The step from the last device to the first is counted, too.
    """
    lines = [[place(device) for device in line] for line in grid.reshape(-1, grid.shape[-1])]
    steps = itertools.chain.from_iterable(zip(line, [*line[1:], line[0]]) for line in lines)
    return sum(max(0, hops(a, b, sides, wraps) - 1) for a, b in steps)


def own_links(grid: np.ndarray) -> tuple[int, int]:
    """How many axes of more than one device lie on boxes of the slice, and how many on those or on evenly spaced chips,
    in all of their lines.
    """
    lines = [np.moveaxis(grid, axis, -1) for axis, size in enumerate(grid.shape) if size > 1]
    return sum(map(_is_boxes, lines)), sum(_is_boxes(line, spaced=True) for line in lines)


def _is_boxes(grid: np.ndarray, spaced: bool = False) -> bool:
    """Whether the chips of each line along the last axis are a box, or evenly spaced if they may be, with as many
    devices of each.
    """
    for line in grid.reshape(-1, grid.shape[-1]):
        places = {place(device)[:-1] for device in line}
        sides = lattice(places)
        if sides is None or len(line) % len(places) or (not spaced and any(step > 1 for _, step in sides)):
            return False
    return True


def along_sides(grid: np.ndarray) -> list[np.ndarray]:
    """The same devices in the same shape, taken along the sides of their slice in every order of the sides; none where
    they are not TPUs or do not fill a box.
    """
    devices = grid.reshape(-1).tolist()
    places = [place(device) for device in devices]
    if () in places or not _is_boxes(grid.reshape(1, -1)):
        return []
    orders = itertools.permutations(range(len(places[0])))
    keys = ([tuple(cells[side] for side in order) for cells in places] for order in orders)
    orders_of_devices = ([devices[i] for i in sorted(range(len(devices)), key=key.__getitem__)] for key in keys)
    grids = []
    for order in orders_of_devices:
        cells = np.empty(len(order), dtype=object)  # filled afterwards: NumPy would look into the devices for sequences
        cells[:] = order
        grids.append(cells.reshape(grid.shape))
    return grids
