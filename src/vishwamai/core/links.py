"""How long a collective takes over the links of a TPU slice: a model, not a measurement.

Bandwidth and latency bound it from below: what the busiest link carries, and the hops to the farthest chip. The
formulas are those of "How to Scale Your Model", chapter "Sharded matrices and how to multiply them", for axes of any
sides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from vishwamai.core import hardware
from vishwamai.core.arguments import checked
from vishwamai.core.config import ambient_target, current_config
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TpuChip, tpu_for
from vishwamai.core.jax_private import concrete_mesh

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
Place = tuple[int, ...]

LINKS_UNKNOWN = "no TPU, several slices, or chips that share their links with another axis"
"""When `links_known` gives None."""


@checked
@dataclasses.dataclass(frozen=True)
class AxisLinks:
    """The links that a mesh axis has for itself.

    Attributes:
      chip: the TPU.
      sides: chips along each side of the slice that the axis spans; () where it stays on one chip.
      wraps: a bool for each side: it closes into a ring.
      on_chip: devices of each chip that the axis has; 0 for all. TPU7x has two devices on each chip.
      strides: links between neighbours of the axis along each side; () for 1 each. As many groups of the same axis
        interleave, and share these links.

    Raises:
      ShapeError: a side or a stride is not a number of chips, `wraps` or `strides` is not as long as `sides`, or the
        chip has fewer devices.

    >>> from vishwamai.core.hardware import TPUS
    >>> AxisLinks(TPUS["v5p"], (4, 8), (True, True)).links
    4.0
    >>> AxisLinks(TPUS["v5e"], (2, 4), (False, False), strides=(2, 1)).links
    1.5
    >>> AxisLinks(TPUS["tpu7x"], (4,), (True,)).devices
    8
    """

    chip: TpuChip
    sides: tuple[int, ...]
    wraps: tuple[bool, ...]
    on_chip: int = 0
    strides: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        strides = self.strides or (1,) * len(self.sides)
        if min((*self.sides, *strides), default=1) < 1 or not len(self.wraps) == len(self.sides) == len(strides):
            raise ShapeError(
                f"AxisLinks: `sides` is {self.sides}, `wraps` is {self.wraps} and `strides` is {self.strides}; pass "
                "chips along each side, whether each closes, and links between neighbours (or () for 1 each)."
            )
        if not 0 <= self.on_chip <= self.chip.devices:
            raise ShapeError(
                f"AxisLinks: `on_chip` is {self.on_chip}; pass 1 to {self.chip.devices}, the devices of a chip of "
                f"{self.chip.name}, or 0 for all of them."
            )
        object.__setattr__(self, "on_chip", self.on_chip or self.chip.devices)
        object.__setattr__(self, "strides", strides)

    @property
    def chips(self) -> int:
        """How many chips the axis has."""
        return math.prod(self.sides)

    @property
    def devices(self) -> int:
        """How many jax devices the axis has."""
        return self.chips * self.on_chip

    @property
    def ways(self) -> tuple[float, ...]:
        """Links along each side into the chip that has the fewest: two where the side closes, else one; a part of them
        where groups interleave.
        """
        return tuple((2 if wrap else 1) / stride for wrap, stride in zip(self.wraps, self.strides))

    @property
    def links(self) -> float:
        """Links into the chip that has the fewest, of all sides."""
        return math.fsum(self.ways)

    @property
    def hops(self) -> int:
        """Links to the farthest chip."""
        return sum(
            stride * (side // 2 if wrap else side - 1)
            for side, wrap, stride in zip(self.sides, self.wraps, self.strides)
        )

    def __str__(self) -> str:
        """For instance "v5p, a ring of 8 chips"."""
        devices = f", {self.devices} devices" if self.chip.devices > 1 else ""
        if self.chips == 1:
            return f"{self.chip.name}, one chip{devices}"
        spacing = "" if set(self.strides) == {1} else f", {hardware.sides_text(self.strides)} links apart"
        if len(self.sides) == 1:
            return f"{self.chip.name}, a {'ring' if self.wraps[0] else 'line'} of {self.chips} chips{spacing}{devices}"
        return f"{self.chip.name}, a box of {hardware.sides_text(self.sides)} chips{spacing}{devices}"


@checked
def axis_links(mesh: Mesh, axis: str) -> AxisLinks:
    """The links of an axis of a mesh of TPUs.

    Args:
      mesh: mesh of devices that you have, or of those that `make_mesh(..., topology=...)` describes.
      axis: its axis.

    Raises:
      ShapeError: the mesh has no such axis, or its devices are not TPUs.
      UnsupportedError: the axis goes over several slices, or its devices are neither a box of the slice nor evenly
        spaced along its sides.

    >>> from vishwamai.parallel import make_mesh
    >>> axis_links(make_mesh("data=4,tensor=4", topology="v5e:4x4"), "tensor").sides  # doctest: +SKIP
    (4,)
    """
    if axis not in mesh.shape:
        raise ShapeError(f"axis_links: `axis` is {axis!r}, but the mesh has {', '.join(mesh.axis_names)}.")
    return _links_of_axes(mesh, (axis,))


def _links_of_axes(mesh: Mesh, axes: Sequence[str]) -> AxisLinks:
    places = [mesh.axis_names.index(axis) for axis in axes]
    lines = np.moveaxis(mesh.devices, places, range(-len(places), 0))
    line = lines.reshape(-1, math.prod(mesh.shape[axis] for axis in axes))[0]
    return group_links(line.tolist(), mesh.devices.reshape(-1).tolist(), ", ".join(map(repr, axes)))


def links_known(mesh: Any, axes: Sequence[str]) -> AxisLinks | None:
    """The links of mesh axes, as far as they are known where a program is traced: of the mesh that `jax.set_mesh` has
    put in force, else a line of neighbours for each axis, of the ambient target's chip or the chip that the mesh is of.

    None where that is not a TPU, or where the axes go over several slices or share their links with others.

    Args:
      mesh: an abstract mesh. axes: one or more of its axes.
    """
    named = current_config().target
    device = mesh.abstract_device
    chip = ambient_target().tpu if named is not None else None if device is None else tpu_for(device.device_kind)
    concrete = concrete_mesh()
    if dict(concrete.shape) == dict(mesh.shape):
        real = tpu_for(concrete.devices.flat[0].device_kind)
        if real is not None and (named is None or chip is real):
            try:
                return _links_of_axes(concrete, axes)
            except UnsupportedError:  # over several slices, or sharing its links: nothing to go by
                return None
    if chip is None:
        return None
    return line_links(chip, [mesh.shape[axis] for axis in axes])


def line_links(chip: TpuChip, sizes: Sequence[int]) -> AxisLinks:
    """The links of mesh axes of these sizes where each is a line of neighbours.

    >>> from vishwamai.core.hardware import TPUS
    >>> str(line_links(TPUS["v5e"], (4,)))
    'v5e, a line of 4 chips'
    """
    sides = list(sizes)
    on_chip = 1 if sides[-1] % chip.devices else chip.devices  # the devices of a chip are neighbours on the last axis
    sides[-1] //= on_chip
    spanned = tuple(side for side in sides if side > 1)
    return AxisLinks(chip, spanned, (False,) * len(spanned), on_chip)


def place(device: object) -> Place:
    """The coordinates of a TPU's device, with its core on the chip last; () for any other device."""
    coords = getattr(device, "coords", None)
    return () if coords is None else (*coords, getattr(device, "core_on_chip", 0))


def sides_of(devices: Sequence[object]) -> tuple[int, ...]:
    """The sides of the smallest box that holds the devices, from coordinates of three numbers."""
    places = np.array([place(device)[:-1] for device in devices])
    return tuple(int(n) for n in places.max(0) - places.min(0) + 1)


def lattice(places: Collection[Place]) -> list[tuple[int, int]] | None:
    """(chips, links from one to the next) along each side, of different places that are evenly spaced along the sides
    of a slice; None where they are not. Those of a box are one link apart.

    >>> lattice([(0, 0), (0, 1), (2, 0), (2, 1)]), lattice([(0, 0), (1, 1)])
    ([(2, 2), (2, 1)], None)
    """
    marks = [sorted(set(axis)) for axis in zip(*places)]
    steps = [{b - a for a, b in itertools.pairwise(side)} or {1} for side in marks]
    if math.prod(map(len, marks)) != len(places) or any(len(step) > 1 for step in steps):
        return None
    return [(len(side), min(step)) for side, step in zip(marks, steps)]


def group_links(group: Sequence[Any], devices: Sequence[Any], name: str = "the group") -> AxisLinks:
    """The links of some devices of a slice that communicate among themselves.

    Args:
      group: the devices that do. devices: all of the slice. name: of the group, for errors.

    Raises: the errors of `axis_links`.
    """
    chip = tpu_for(devices[0].device_kind)
    if chip is None:
        raise ShapeError(
            f"axis_links: the devices are {devices[0].device_kind}; pass a mesh of TPUs, such as make_mesh(..., "
            'topology="v5e:4x4").'
        )
    if len({getattr(device, "slice_index", 0) for device in group}) > 1:
        raise UnsupportedError(f"axis_links: {name} goes over several slices, and this model has the links of one.")
    return box_links(chip, sides_of(devices), group, name)


def box_links(chip: TpuChip, slice_sides: Sequence[int], group: Sequence[object], name: str = "the group") -> AxisLinks:
    """As `group_links`, of a slice with the sides `slice_sides`.

    Raises:
      UnsupportedError: the devices are neither a box of the slice nor evenly spaced along its sides.
    """
    places = {place(device)[: len(slice_sides)] for device in group}
    sides = lattice(places)
    if sides is None or len(group) % len(places):
        raise UnsupportedError(
            f"axis_links: the {len(places)} chips of {name} are neither a box of the slice nor evenly spaced along its "
            "sides, so other axes use their links, too; make the mesh with make_mesh, or choose sizes that divide the "
            "sides."
        )
    closed = hardware.wraps(chip, tuple(slice_sides[: hardware.rank(chip)]))
    spanned = [(i, side, step) for i, (side, step) in enumerate(sides) if side > 1]
    return AxisLinks(
        chip,
        tuple(side for _, side, _ in spanned),
        # Only a whole side closes. A side of two has one link, there and back.
        tuple(i < len(closed) and closed[i] and side * step == slice_sides[i] > 2 for i, side, step in spanned),
        len(group) // len(places),
        tuple(step for _, _, step in spanned),
    )


@checked
def estimate_collective(
    kind: Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"],
    bytes: float,
    axis: AxisLinks,
) -> float:
    """Seconds that a collective takes at the least: a lower bound from the figures of the chip, not a measurement.

    Args:
      kind: which collective.
      bytes: size of the gathered result ("all_gather"), of one device's operand ("reduce_scatter", "all_reduce",
        "permute"), or of all operands of the axis together ("all_to_all").
      axis: the links, of `axis_links`.

    Raises:
      ShapeError: there is no such kind, or `bytes` is negative.

    >>> from vishwamai.core.hardware import TPUS
    >>> ring = AxisLinks(TPUS["v5p"], (8,), (True,))
    >>> f"{1e6 * estimate_collective('all_gather', 64e6, ring):.0f} us"
    '311 us'
    """
    if kind not in KINDS:
        raise ShapeError(f"estimate_collective: `kind` is {kind!r}; pass one of {', '.join(KINDS)}.")
    if not isinstance(axis, AxisLinks):
        raise ShapeError("estimate_collective: pass what `axis_links(mesh, axis)` gives as `axis`.")
    if not 0 <= bytes < math.inf:
        raise ShapeError(f"estimate_collective: `bytes` is {bytes!r}; pass a number of bytes.")
    if axis.chips == 1:
        return 0.0
    bandwidth, latency = axis.chip.ici_bandwidth, axis.chip.ici_latency
    if kind == "permute":  # to the neighbour, one way
        return max(axis.strides) * max(bytes / bandwidth, latency)
    if kind == "all_to_all":
        # Half of the data of half of the chips crosses the middle of a side, over all links that cross it.
        crossing = ((axis.chips // side) * ways for side, ways in zip(axis.sides, axis.ways, strict=True))
        return max(bytes / 4 / (bandwidth * min(crossing)), latency * axis.hops)
    once = max(bytes * (axis.chips - 1) / axis.chips / (bandwidth * axis.links), latency * axis.hops)
    return 2 * once if kind == "all_reduce" else once
