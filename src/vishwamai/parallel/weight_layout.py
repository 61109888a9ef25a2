"""Weights laid out for a TPU: over the chips of a slice so that each holds least, and padded to whole tiles.

XLA pads the last two axes of every array to tiles, per device. So the same weights take more or less memory by which
axis is split over which side of the slice; `optimize_memory_layout` counts all ways and takes the one that holds least.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import tpu_for
from vishwamai.core.pallas import round_up
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.parallel.mesh import make_mesh, sides_of, slice_name, slice_of
from vishwamai.parallel.placement import ShardingTable, explain_sharding, tiled

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Shaped

_SIDES = ("x", "y", "z")


class MemoryLayout(dict[str, PyTree]):
    """Weights laid out over a slice: arrays where its devices are there, otherwise shapes with their shardings.

    Attributes:
      mesh: an axis for each side of the slice ("x", "y", "z", and "core" where a chip has two devices), so that a
        gather over one axis goes along one side.
      shardings: sharding of every weight, a tree like the weights.
      shapes: the weights as shapes with these shardings, to compile with.
      table: contents of each device.
      whole: bytes that a device would hold of all weights, unsplit.
    """

    def __init__(self, weights: Mapping[str, object], mesh: Mesh):
        def sharding(x: AnyArray) -> NamedSharding:
            return NamedSharding(mesh, _least(x.shape, jnp.dtype(x.dtype).itemsize, mesh))

        self.mesh = mesh
        self.shardings = jax.tree.map(sharding, dict(weights))
        self.shapes = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), dict(weights), self.shardings
        )
        self.table: ShardingTable = explain_sharding(self.shapes)
        self.nbytes = sum(tiled(x.shape, jnp.dtype(x.dtype).itemsize) for x in jax.tree.leaves(self.shapes))
        local = set(mesh.devices.flat) <= set(jax.devices())  # a described slice has no memory to place in
        values = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(dict(weights)))
        super().__init__(self.place(dict(weights)) if local and not values else self.shapes)

    @property
    def saved(self) -> int:
        """Bytes that each device holds less than all weights."""
        return self.nbytes - self.table.bytes_per_device

    def place(self, weights: PyTree) -> PyTree:
        """The weights on the devices of the slice, which have to be there."""
        return jax.device_put(weights, self.shardings)

    def compiled_bytes(self) -> tuple[int, int]:
        """Bytes of the weights on a device as the TPU's compiler lays them out: unsplit, and split so."""
        unsplit = NamedSharding(self.mesh, PartitionSpec())
        before = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=unsplit), self.shapes)
        return _argument_bytes(before), _argument_bytes(self.shapes)


@checked
def optimize_memory_layout(weights: Mapping[str, object], tpu_topology: str) -> MemoryLayout:
    """The split of weights over a TPU slice that leaves least on each device, tiles' padding included.

    Every weight is split on its own: each side of the slice goes to one of the weight's axes that it divides, or to
    none. All ways are counted. Of ways that hold the same, the one with the fewest split axes counts, then the one that
    splits the first axes, whose parts are contiguous.

    Args:
      weights: arrays or `jax.ShapeDtypeStruct`s by name; a value may be a tree of them.
      tpu_topology: the sides of a slice, "2x2x2", or a chip with them, "v5e:4x4". Sides alone are laid over the devices
        of this machine if it has as many, and else are those of `configure_tpu_mesh`. A slice that is not this
        machine's needs libtpu.

    Returns:
      The weights by name, each on the devices of the slice; a slice that is not here gives shapes with shardings.

    Raises:
      ShapeError: a leaf is not an array, or holds random keys.
      DeviceError: the topology does not exist, or libtpu is missing.

    >>> layout = optimize_memory_layout({"up": jnp.ones((512, 2048))}, "v5e:2x2")  # doctest: +SKIP
    >>> layout["up"].sharding.spec, layout.saved  # doctest: +SKIP
    (P(('x', 'y'), None), 3145728)
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ShapeError(
                f"optimize_memory_layout: weights{jax.tree_util.keystr(path)} is {described(leaf)}; pass arrays, or "
                "jax.ShapeDtypeStruct."
            )
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ShapeError(
                f"optimize_memory_layout: weights{jax.tree_util.keystr(path)} has the dtype {leaf.dtype}; pass arrays "
                "of numbers, without random keys."
            )
    return MemoryLayout(weights, _mesh_of_sides(tpu_topology))


def _mesh_of_sides(topology: str) -> Mesh:
    sides = sides_of(topology)
    if sides is not None and len(sides) <= len(_SIDES) and math.prod(sides) == jax.device_count():
        axes = {name: side for name, side in zip(_SIDES, sides) if side > 1}
        return make_mesh(axes or {"x": 1}, devices=jax.devices())
    topology = slice_name("optimize_memory_layout", topology)
    chip, sides = slice_of("optimize_memory_layout", topology)
    sizes = {name: side for name, side in zip(_SIDES, sides) if side > 1}
    if chip.devices > 1:
        sizes["core"] = chip.devices
    sizes = sizes or {"x": 1}
    devices = jax.devices()
    if tpu_for(devices[0].device_kind) is chip and len(devices) == math.prod(sizes.values()):
        return make_mesh(sizes, devices=devices)
    return make_mesh(sizes, topology=topology)


def _least(shape: tuple[int, ...], item: int, mesh: Mesh) -> PartitionSpec:
    """The split that holds least."""
    axes = mesh.axis_names
    best: tuple[tuple[int, int, list[int]], PartitionSpec] | None = None
    # each side of the slice to one axis, or to none: few enough to count all
    for places in itertools.product((*range(len(shape)), None), repeat=len(axes)):
        entries = [tuple(a for a, place in zip(axes, places) if place == i) for i in range(len(shape))]
        parts = [math.prod(mesh.shape[axis] for axis in entry) for entry in entries]
        if any(size % n for size, n in zip(shape, parts)):
            continue
        nbytes = tiled(tuple(size // n for size, n in zip(shape, parts)), item)
        # of equals, fewer split axes, then the first ones
        cost = nbytes, sum(n > 1 for n in parts), [-n for n in parts]
        if best is None or cost < best[0]:
            spec = PartitionSpec(*(None if not e else e[0] if len(e) == 1 else e for e in entries))
            best = cost, spec
    assert best is not None, "unsplit fits always"
    return best[1]


@functools.partial(jax.tree_util.register_dataclass, data_fields=("padded",), meta_fields=("shape", "block_size"))
@dataclasses.dataclass(frozen=True)
class KernelLayout:
    """A weight padded to whole blocks, and the way back.

    Operations of this library and of jax.numpy take it in place of the weight: they see the weight without the padding.

    Attributes:
      padded: the weight, zeros behind its own rows and columns.
      shape: shape before padding.
      block_size: divisors of the last two axes of `padded`.
    """

    padded: Array
    shape: tuple[int, ...]
    block_size: int

    @property
    def dtype(self) -> Any:
        return self.padded.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __jax_array__(self) -> Array:
        return self.restore()

    @property
    def padding(self) -> float:
        """Share of the elements of `padded` that are zeros of ours."""
        return 1 - math.prod(self.shape) / self.padded.size if self.padded.size else 0.0

    def restore(self, padded: Array | None = None) -> Array:
        """The weight, or another array in this layout (its gradient, say), without the padding.

        Raises:
          ShapeError: the array is not in this layout.
        """
        array = self.padded if padded is None else padded
        if jnp.shape(array) != self.padded.shape:
            raise ShapeError(
                f"KernelLayout.restore: the array has shape {jnp.shape(array)}; pass one of shape {self.padded.shape}."
            )
        return array[tuple(slice(size) for size in self.shape)]


@checked
def optimize_kernel_layout(kernel: Shaped[Array, "*batch rows columns"], block_size: int = 128) -> KernelLayout:
    """A weight with its last two axes padded by zeros to multiples of `block_size`, once, and the inverse.

    Products with zeros add nothing: `x @ kernel` is the first `columns` columns of `pad(x) @ padded`. XLA and our
    kernels take any size, and pad or mask in each call what does not fill a tile.

    Args:
      kernel: the weight; one axis is padded alone, as columns.
      block_size: 128 is the width of a TPU's registers and of the matrix unit up to v5.

    Raises:
      ShapeError: `kernel` is a scalar, or `block_size` is not from 1 to 65536.

    >>> layout = optimize_kernel_layout(jnp.ones((100, 300)))
    >>> layout.padded.shape, layout.restore().shape, round(layout.padding, 2)
    ((128, 384), (100, 300), 0.39)
    >>> (jnp.ones((5, 100)) @ layout).shape
    (5, 300)
    """
    if jnp.ndim(kernel) < 1:
        raise ShapeError("optimize_kernel_layout: `kernel` is a scalar; pass at least one axis.")
    if not 1 <= block_size <= 65536:
        raise ShapeError(
            f"optimize_kernel_layout: `block_size` is {block_size}; pass a number from 1 to 65536, as 128."
        )
    kernel = jnp.asarray(kernel)
    first = max(0, kernel.ndim - 2)
    ends = [round_up(size, block_size) - size if i >= first else 0 for i, size in enumerate(kernel.shape)]
    padded = jnp.pad(kernel, [(0, end) for end in ends]) if any(ends) else kernel
    return KernelLayout(padded, tuple(kernel.shape), block_size)


def _argument_bytes(shapes: object) -> int:
    # unused arguments would be dropped, and their bytes with them
    memory = jax.jit(lambda weights: 0, keep_unused=True).lower(shapes).compile().memory_analysis()
    assert memory is not None, "libtpu has it of every program"
    return memory.argument_size_in_bytes
