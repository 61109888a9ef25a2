"""How a batch goes over devices: the mesh, the rows of each device, and how many parts they take turns in."""

from __future__ import annotations

import dataclasses
import math

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core import hardware
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.numbers import divisors
from vishwamai.parallel.mesh import make_mesh


@dataclasses.dataclass(frozen=True)
class DataParallelConfig:
    """A batch over devices.

    Attributes:
      mesh: mesh with one explicit axis, "data".
      per_device_batch: rows that a device holds at once.
      accumulation: parts that the batch is cut into, one after the other; their gradients are added up.
      input_sharding: sharding of the arrays `[rows, ...]` of one part: the rows over "data".
    """

    mesh: Mesh
    per_device_batch: int
    accumulation: int
    input_sharding: NamedSharding

    @property
    def batch_size(self) -> int:
        """Rows of the whole batch."""
        return self.per_device_batch * self.mesh.size * self.accumulation


@checked
def configure_data_parallel(
    batch_size: int, num_devices: int, *, max_per_device: int | None = None
) -> DataParallelConfig:
    """A batch over the first `num_devices` devices, in as few parts as their memory allows.

    Where JAX has fewer devices, the mesh is that of a v5e slice to compile for (`vishwamai.aot`), by libtpu.

    Args:
      batch_size: rows of the batch, a multiple of the devices.
      num_devices: how many, at least 1.
      max_per_device: the most rows that a device can hold at once; the batch is cut into equal parts until it does.
        None for all at once.

    Raises:
      ShapeError: the devices do not divide the rows, or there are fewer and no slice has so many; the text lists what
        fits.
      DeviceError: there are fewer devices, and libtpu is not installed.

    >>> config = configure_data_parallel(32, 1, max_per_device=12)
    >>> config.per_device_batch, config.accumulation, config.input_sharding.spec
    (8, 4, P('data',))
    >>> jax.device_put(jax.numpy.ones((8, 128)), config.input_sharding).shape
    (8, 128)
    """
    count = num_devices
    if count < 1:
        raise ShapeError(f"configure_data_parallel: `num_devices` is {count}; pass 1 or more.")
    if batch_size < 1 or batch_size % count:
        near = sorted({max(1, batch_size // count) * count, (max(0, batch_size) // count + 1) * count})
        raise ShapeError(
            f"configure_data_parallel: `batch_size` is {batch_size}, which {count} devices do not divide; pass "
            f"{' or '.join(map(str, near))}."
        )
    if max_per_device is not None and max_per_device < 1:
        raise ShapeError(
            f"configure_data_parallel: `max_per_device` is {max_per_device}; pass a positive number, or None."
        )
    rows = batch_size // count
    most = rows if max_per_device is None else min(max_per_device, rows)
    group = max(n for n in divisors(rows) if n <= most)  # equal parts: their gradients average without weights
    mesh = _mesh(count)
    return DataParallelConfig(mesh, group, rows // group, NamedSharding(mesh, PartitionSpec("data")))


def _mesh(count: int) -> Mesh:
    """Of the first devices, or of a described slice that has as many."""
    if count <= jax.device_count():
        return make_mesh({"data": count}, devices=jax.devices()[:count])
    chip = hardware.TPUS["v5e"]
    sides = hardware.of_chips(chip, count)
    if sides is None:
        sizes = " or ".join(str(math.prod(sides)) for sides in hardware.nearest(chip, (count, 1)))
        raise ShapeError(
            f"configure_data_parallel: `num_devices` is {count}, but JAX has {jax.device_count()}, and no slice of "
            f"{chip.name} has as many; pass at most {jax.device_count()}, or {sizes}."
        )
    return make_mesh({"data": count}, topology=f"{chip.name}:{hardware.sides_text(sides)}")
