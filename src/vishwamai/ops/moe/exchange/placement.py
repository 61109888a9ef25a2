"""Where experts lie: permuted over devices between steps, so that the devices' measured loads are even.

A step takes as long as its fullest device. Two experts change places where that lowers the larger of two devices'
loads most, beginning with the fullest device, until nothing does: a descent that moves few experts. Liu et al.,
"DeepSeek-V3 Technical Report" (2024), section 3.4, balances a deployment so; here no expert has copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from vishwamai.core.arguments import check_instances, checked, checks_its_own, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.links import AxisLinks, estimate_collective
from vishwamai.core.types import AnyArray, PyTree


@checks_its_own("order")
@dataclasses.dataclass(frozen=True)
class ExpertPlacement:
    """Which expert lies where: place p, on device `p // (experts / devices)`, holds expert `order[p]`.

    Attributes:
      order: the expert of each place.
      devices: number of devices, which hold equal shares of the places.

    Raises:
      ShapeError: `order` is not a permutation, or `devices` does not divide it.

    >>> ExpertPlacement((2, 0, 1, 3), devices=2).places.tolist()
    [1, 2, 0, 3]
    """

    order: tuple[int, ...]
    devices: int

    def __post_init__(self) -> None:
        if not isinstance(self.order, (tuple, list)) or not all(isinstance(expert, int) for expert in self.order):
            raise ShapeError(f"ExpertPlacement: `order` is {described(self.order)}; pass a tuple of integers.")
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != list(range(len(self.order))):
            raise ShapeError(
                f"ExpertPlacement: `order` is {self.order}; pass each of 0 ... {len(self.order) - 1} once."
            )
        if self.devices < 1 or len(self.order) % self.devices:
            raise ShapeError(
                f"ExpertPlacement: `devices` is {self.devices}; pass a number that divides {len(self.order)} experts."
            )

    @property
    def places(self) -> np.ndarray:
        """The place of each expert, int32: `expert_places` of `moe_layer`."""
        return np.argsort(self.order).astype(np.int32)

    def loads(self, counts: Sequence[float] | np.ndarray) -> np.ndarray:
        """What each device has of the experts' counts."""
        return np.asarray(counts, np.float64)[list(self.order)].reshape(self.devices, -1).sum(1)


@dataclasses.dataclass(frozen=True)
class PlacementChange:
    """A new placement, what it gains and what it costs.

    Attributes:
      placement: the new one.
      before: load of the fullest device as a multiple of the mean, of the old placement. after: of the new one.
      moves: experts that change their device.
      bytes: size of the moved experts, of all their arrays.
      seconds: lower bound of the move's time, by the links; None where they are not known.
    """

    placement: ExpertPlacement
    before: float
    after: float
    moves: int
    bytes: int
    seconds: float | None

    def pays_after(self, expert_seconds: float) -> float:
        """Steps until the move is paid for; infinity where nothing is gained, 0 where it costs nothing that is known.

        Args:
          expert_seconds: time of a step's products of experts on a device with the mean load.
        """
        gain = (self.before - self.after) * expert_seconds
        return (self.seconds or 0.0) / gain if gain > 0 else float("inf")

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", {1e6 * self.seconds:.0f} us at the least"
        return (
            f"the fullest device has {self.before:.2f} times the mean load, and {self.after:.2f} after {self.moves} "
            f"experts move ({self.bytes / 2**20:.1f} MiB{time})"
        )


@checked
def place_experts(
    counts: object, placement: ExpertPlacement | int, *, expert_bytes: int = 0, links: AxisLinks | None = None
) -> PlacementChange:
    """The placement that evens the measured loads of experts out.

    Args:
      counts: `[experts]` tokens that chose each expert, `Routing.expert_counts` of a step, or a mean over steps.
      placement: the one in force, or a number of devices, over which experts lie in their order.
      expert_bytes: size of one expert's weights and of everything that moves with them, such as an optimizer's moments.
      links: `AxisLinks` of the axis of the experts (`axis_links`), for the time of the move.

    Raises:
      ShapeError: the counts are not one number of zero or more for each expert.

    >>> change = place_experts([9, 7, 1, 1], 2, expert_bytes=2**20)
    >>> change.placement.order, change.moves
    ((2, 1, 0, 3), 2)
    >>> print(change)
    the fullest device has 1.78 times the mean load, and 1.11 after 2 experts move (2.0 MiB)
    """
    try:
        load = np.asarray(counts, np.float64)
    except (TypeError, ValueError):
        raise ShapeError(f"place_experts: `counts` is {described(counts)}; pass a number for each expert.") from None
    if isinstance(placement, bool) or not isinstance(placement, (int, ExpertPlacement)):
        raise ShapeError(f"place_experts: `placement` is {described(placement)}; pass an ExpertPlacement, or devices.")
    check_instances("place_experts", {"links": AxisLinks}, {"links": links})
    if expert_bytes < 0:
        raise ShapeError(f"place_experts: `expert_bytes` is {expert_bytes}; pass a number of bytes.")
    if load.ndim != 1 or not load.size or not np.isfinite(load).all() or (load < 0).any():
        raise ShapeError(f"place_experts: `counts` is {described(counts)}; pass a number of zero or more for each.")
    if isinstance(placement, int):
        placement = ExpertPlacement(tuple(range(load.size)), placement)
    if len(placement.order) != load.size:
        raise ShapeError(
            f"place_experts: `counts` has {load.size} experts, but `placement` {len(placement.order)}; pass as many."
        )
    order = np.array(placement.order).reshape(placement.devices, -1)
    while (swap := _best_swap(load[order])) is not None:
        a, b = swap
        order[a], order[b] = order[b], order[a]
    balanced = ExpertPlacement(tuple(int(expert) for expert in order.reshape(-1)), placement.devices)
    local = order.shape[1]
    moves = int((placement.places // local != balanced.places // local).sum())
    nbytes = moves * expert_bytes
    seconds = None if links is None else estimate_collective("all_to_all", nbytes, links) if nbytes else 0.0
    mean = load.sum() / placement.devices or 1.0
    before, after = (float(places.loads(load).max() / mean) for places in (placement, balanced))
    return PlacementChange(balanced, before, after, moves, nbytes, seconds)


def _best_swap(load: np.ndarray) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Two places of `[devices, local]` loads whose exchange lowers the larger load most; None where none does."""
    totals = load.sum(1)
    full = int(totals.argmax())
    gain = load[full][:, None, None] - load[None]  # [local of the fullest, devices, local]
    larger = np.maximum(totals[full] - gain, totals[None, :, None] + gain)
    larger[:, full] = np.inf
    best = int(larger.argmin())
    if not larger.reshape(-1)[best] < totals[full] * (1 - 1e-12):
        return None
    i, device, j = (int(k) for k in np.unravel_index(best, larger.shape))
    return (full, i), (device, j)


def move_experts(tree: object, old: ExpertPlacement, new: ExpertPlacement) -> PyTree:
    """The arrays `[experts, ...]` of a tree, of weights or moments, from one placement to another, bit for bit.

    Of an array that is split along its first axis over the devices of this process, experts travel from device to
    device, and only those that change it.

    Raises:
      ShapeError: an array's first axis is not that of the experts.

    >>> old, new = ExpertPlacement((0, 1, 2), 1), ExpertPlacement((2, 0, 1), 1)
    >>> move_experts(jnp.array([10.0, 11.0, 12.0]), old, new).tolist()
    [12.0, 10.0, 11.0]
    """
    for name, value in (("old", old), ("new", new)):
        if not isinstance(value, ExpertPlacement) or len(value.order) != len(getattr(new, "order", ())):
            raise ShapeError(f"move_experts: `{name}` is {described(value)}; pass placements of the same experts.")
    source = old.places[list(new.order)]  # the old place of what each new place holds

    def move(x: AnyArray) -> jax.Array:
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise ShapeError(f"move_experts: a leaf of `tree` is {described(x)}; pass a pytree of arrays.")
        if not x.ndim or x.shape[0] != len(source):
            raise ShapeError(
                f"move_experts: an array has shape {np.shape(x)}; pass arrays whose first axis has the "
                f"{len(source)} experts."
            )
        if isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.is_fully_addressable:
            if not x.sharding.is_fully_replicated:
                return _between_devices(x, source)
        return jnp.take(x, source, axis=0)

    return jax.tree.map(move, tree)


def _between_devices(x: jax.Array, source: np.ndarray) -> jax.Array:
    """`x[source]` in the sharding of x, whose parts are made on the devices that hold them."""
    shards = {shard.device: shard for shard in x.addressable_shards}
    parts = []
    for device, shard in shards.items():
        rows, *rest = shard.index
        start, stop, _ = rows.indices(x.shape[0])
        pieces = []
        for place in source[start:stop]:
            # The holder of the same part of the other axes, this device if it is one.
            holders = [s for s in shards.values() if list(s.index[1:]) == rest and _holds(s, int(place), x.shape[0])]
            holder = next((s for s in holders if s.device == device), holders[0])
            first = holder.index[0].indices(x.shape[0])[0]
            pieces.append(jax.device_put(holder.data[int(place) - first], device))
        parts.append(jnp.stack(pieces))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def _holds(shard: Any, place: int, size: int) -> bool:
    start, stop, _ = shard.index[0].indices(size)
    return start <= place < stop
