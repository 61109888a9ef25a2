"""The links that the axes of a training mesh have on a slice, without libtpu: `parallel.make_mesh` lays the axes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.links import AxisLinks, box_links
from vishwamai.core.target import Target
from vishwamai.parallel.mesh import on_sides
from vishwamai.training.config import MeshSection
from vishwamai.training.sharding import ALL


@dataclasses.dataclass(frozen=True)
class _Device:
    """What the placement of a mesh reads of a device."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str
    process_index: int = 0
    slice_index: int = 0
    platform: str = "tpu"


def links_of(mesh: MeshSection, target: str, *axes: str) -> AxisLinks:
    """The links of the devices that differ in these axes alone.

    Devices that are neither a box of the slice nor evenly spaced share links with others: they count as a line.

    Args:
      mesh: mesh that has all devices of the target. target: a chip or slice.

    >>> links_of(MeshSection(data=4, tensor=4), "v5e:4x4", "tensor").sides
    (4,)
    """
    wide = tuple(axis for axis in ALL if getattr(mesh, axis) > 1)
    sizes = tuple(getattr(mesh, axis) for axis in wide)
    among = tuple(i for i, axis in enumerate(wide) if axis in axes)
    return _links(Target.parse_tpu(target).name or target, sizes, among)


@functools.lru_cache(maxsize=4096)
def _links(target: str, sizes: tuple[int, ...], among: Sequence[int]) -> AxisLinks:
    chip = Target.parse_chip(target)
    if not among:
        return AxisLinks(chip, (), (), 1)
    grid, box = _grid(target, sizes), _sides(target)
    index = tuple(slice(None) if i in among else 0 for i in range(len(sizes)))
    group = grid[index].reshape(-1).tolist()
    try:
        return box_links(chip, box, group)
    except UnsupportedError:
        chips = len({device.coords for device in group})
        return AxisLinks(chip, (chips,), (False,), len(group) // chips)


def _sides(target: str) -> tuple[int, ...]:
    sides = Target.parse_tpu(target).topology or ()
    return (*sides, *[1] * (3 - len(sides)))


@functools.lru_cache(maxsize=512)
def _grid(target: str, sizes: tuple[int, ...]) -> np.ndarray:
    return on_sides(sizes, _devices(target))


@functools.lru_cache(maxsize=8)
def _devices(target: str) -> list[_Device]:
    chip, sides = Target.parse_chip(target), _sides(target)
    places = itertools.product(*(range(side) for side in reversed(sides)), range(chip.devices))
    devices = [_Device(i, (x, y, z), core, chip.device_kinds[0]) for i, (z, y, x, core) in enumerate(places)]
    assert len(devices) == math.prod(sides) * chip.devices
    return devices
