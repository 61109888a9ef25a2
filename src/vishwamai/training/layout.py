"""Where the arrays of a run lie on the devices of a mesh, and what each device computes of a step.

The axis "fsdp" splits parameters. Each layer's are gathered where the layer runs, and the gradient of that gather adds
up and splits the gradients: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023). "expert" and
"tensor" split them too, by the logical names of their axes; these parts are not gathered (`models.axes`). "pipeline"
splits the layers (`stages.py`). The loss and its gradient run in one `shard_map`, so every operation sees the arrays of
one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core.qtensor import QTensor
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.parallel import to_zigzag
from vishwamai.parallel.in_order import among_processes
from vishwamai.training.fp8 import SCALES
from vishwamai.training.packing import REFERENCE
from vishwamai.training.parts import gathered, in_layers, parameter_name, split_axis

Tree = Any
ROWS = ("data", "fsdp", "expert")
"""The mesh axes that split the rows of a batch."""

TOKENS = (*ROWS, "sequence")
"""Those that split its tokens."""

PIPELINE = "pipeline"
"""The mesh axis that splits the stacked layers; each of its devices has the same rows."""

_PIECE = 1 << 28
"""Bytes that processes fetch at once."""

ALL = (PIPELINE, *TOKENS, "tensor")
"""The mesh axes, the busiest last."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie.

    Attributes:
      mesh: of the axes `ALL`; None for one device.
      axes: for the last name of a parameter's path, the axis that is split over "fsdp", counted from the end. A name
        that is not here is whole along that axis of the mesh.
      apart: the same for each mesh axis of `mesh.KEPT_APART`.
      ends: the same for "pipeline", of the embedding and the head, which a step makes whole (`pipelined`).
      in_parts: names of parameters that "fsdp" splits and that are used split, `MeshAxes.features`; no device gathers
        them.
      zigzag: a split sequence lies on its devices in zig-zag order.
    """

    mesh: Mesh | None = None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    apart: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
    ends: Mapping[str, int] = dataclasses.field(default_factory=dict)
    in_parts: frozenset[str] = frozenset()
    zigzag: bool = False

    @property
    def devices(self) -> int:
        """How many there are."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """The names of the mesh's axes whose devices compute the same layers."""
        return () if self.mesh is None else tuple(axis for axis in ALL if axis != PIPELINE)

    @property
    def model_axes(self) -> MeshAxes:
        """What the model has to know of the mesh."""
        if self.mesh is None:
            return ONE_DEVICE
        wide: dict[str, Any] = {name: name for name in ("expert", "sequence", "tensor") if self.mesh.shape[name] > 1}
        features = "fsdp" if self.in_parts else None
        return MeshAxes(TOKENS, **wide, features=features, heads=self.stages > 1)

    @property
    def copies(self) -> int:
        """How many devices compute the loss of one token."""
        return 1 if self.mesh is None else self.mesh.shape["tensor"]

    def specs(self, tree: Tree, placed: bool = True) -> Tree:
        """A `PartitionSpec` for each leaf of a tree of parameters, or of what an optimizer keeps for them; without
        `placed`, of a tree whose layers `Stages.place` has not placed.
        """
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._spec(path, leaf.shape, placed), tree)

    def _spec(self, path: Any, shape: tuple[int, ...], placed: bool) -> PartitionSpec:
        name = parameter_name(path)
        spec: list[str | None] = [None] * len(shape)
        if placed and self._staged(path) and shape and shape[0] % self.stages == 0:
            spec[0] = PIPELINE
        for split, axes in self._splits:
            axis = split_axis(axes, name)
            if self.mesh is None or axis is None or -axis > len(shape) or shape[axis] % self.mesh.shape[split]:
                continue
            if spec[axis] is None:
                spec[axis] = split
        return PartitionSpec(*spec) if any(spec) else PartitionSpec()

    @property
    def _splits(self) -> tuple[tuple[str, Mapping[str, int]], ...]:
        return (("fsdp", self.axes), (PIPELINE, self.ends), *self.apart.items())

    @property
    def stages(self) -> int:
        """Over how many devices the layers are split."""
        return 1 if self.mesh is None else self.mesh.shape[PIPELINE]

    def _staged(self, path: Any) -> bool:
        """Whether a leaf belongs to layers that stages share out."""
        return self.stages > 1 and _of_layers(path)

    def shardings(self, tree: Tree, placed: bool = True) -> Tree:
        """A sharding for each leaf, as `specs`; on one device None."""
        if self.mesh is None:
            return None
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), self.specs(tree, placed))

    def put(self, tree: Tree) -> Tree:
        """A tree of parameters or of an optimizer's state, laid out over the mesh. Every process passes the same."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, self.shardings(tree))

    def made(self, make: Callable[..., Tree], *args: Tree) -> Tree:
        """What `make(*args)` gives, laid out over the mesh: no device has the whole. It takes the memory of `args`."""
        if self.mesh is None:
            return make(*args)
        places = self.shardings(jax.eval_shape(make, *args))
        return jax.jit(make, out_shardings=places, donate_argnums=tuple(range(len(args))))(*args)

    def on_host(self, tree: Tree) -> Tree:
        """A tree that `put` laid out, whole: NumPy arrays on process 0 and None on the others, in which every process
        takes part; on one process the tree itself.
        """
        if jax.process_count() == 1:
            return tree
        keep = jax.process_index() == 0
        return jax.tree.map(lambda x: fetched(x, keep), tree)

    @property
    def reader(self) -> tuple[int, int]:
        """Which part of each batch this process reads, and of how many. Processes that have the same rows read the
        same part; where parts would differ in size, each process reads all.
        """
        if self.mesh is None:
            return 0, 1
        rows: dict[int, set[int]] = {}
        grid = np.moveaxis(self.mesh.devices, ALL.index(PIPELINE), -1)
        for row, devices in enumerate(grid.reshape(math.prod(self.mesh.shape[a] for a in ROWS), -1)):
            for device in devices:
                rows.setdefault(device.process_index, set()).add(row)
        parts = sorted({tuple(sorted(mine)) for mine in rows.values()})
        joined = [row for part in parts for row in part]
        if joined != list(range(len(joined))) or len({len(part) for part in parts}) > 1:
            return 0, 1
        return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)

    def put_batch(self, batch: Tree) -> Tree:
        """Arrays `[rows, ...]` split over the devices: this process's part of the rows, as `reader` says."""
        if self.mesh is None:
            return batch
        mesh, (index, count) = self.mesh, self.reader

        def put(name: str, x: Any) -> Any:
            if self.zigzag and name != REFERENCE:
                x = to_zigzag(x, mesh.shape["sequence"], axis=1)
            sharding = NamedSharding(mesh, batch_spec(name))
            if sharding.is_fully_addressable:
                return jax.device_put(x, sharding)
            first = index * x.shape[0]

            def of_device(place: Any) -> Any:
                begin, end, _ = place[0].indices(x.shape[0] * count)
                return x[(slice(begin - first, end - first), *place[1:])]

            return jax.make_array_from_callback((x.shape[0] * count, *x.shape[1:]), sharding, of_device)

        return {name: put(name, x) for name, x in batch.items()}

    def gather(self, arrays: Tree) -> Tree:
        """Inside `over_devices`: whole parameters from this device's parts, by the last name of each path."""
        if self.mesh is None:
            return arrays

        def one(path: Any, x: Any) -> Any:
            return self.whole(parameter_name(path), x)

        return jax.tree_util.tree_map_with_path(one, arrays, is_leaf=is_quantized)

    def summed(self, gradients: Tree) -> Tree:
        """Inside `over_devices`: the gradients of a microbatch, those that "fsdp" splits added up before others are.

        The compiler for TPUs moves a sum over devices out of a loop that only adds its results up. For the embedding
        and the head every device would then keep the whole gradient: on 16 devices, 3.6 GiB more of Llama 3 8B. The
        gradients of layers come out of a loop of their own.
        """

        def one(path: Any, g: Any) -> Any:
            split = split_axis(self.axes, parameter_name(path)) is not None
            return jax.lax.optimization_barrier(g) if split and not _of_layers(path) else g

        return jax.tree_util.tree_map_with_path(one, gradients)

    def whole(self, name: str, x: Any) -> Any:
        """Inside `over_devices`: one of them, an array or a `QTensor`, by its name; those `in_parts` stay split."""
        axis = self.gathered_axis(name)
        return x if axis is None else gathered(x, axis, "fsdp")

    def gathered_axis(self, name: str) -> int | None:
        """The axis along which devices gather a parameter, counted from the end; None where they do not."""
        return None if name in self.in_parts else split_axis(self.axes, name)

    def over_devices(
        self, compute: Callable[..., Any], params: Tree, gradients: bool = True, frozen: Tree = None
    ) -> Callable[..., Any]:
        """`compute(params, batch, *scalars)` to (gradients, sums) of each device's tokens, as one function of all.

        The gradients are those of the sum over all devices, which counts a token `copies` times; they come out split
        like the parameters. The sums count it once. Without `gradients`, `compute` gives None in their place. It takes
        `frozen` by that name, parameters without gradients, where there are some.
        """
        if self.mesh is None:
            return compute if frozen is None else functools.partial(compute, frozen=frozen)
        specs, others = self.specs(params), self.specs(frozen)

        def local(params: Tree, batch: Tree, scalars: Tree, frozen: Tree) -> tuple[Tree, Tree]:
            found, sums = compute(params, batch, *scalars, **({} if frozen is None else {"frozen": frozen}))

            def total(path: Any, g: Any) -> Any:
                staged = {PIPELINE} if self._staged(path) else set()
                if path[0] == jax.tree_util.DictKey(SCALES):
                    return jax.lax.pmax(g, tuple(axis for axis in ALL if axis not in staged))
                # The gradient of a gather has been added up already, and what is apart has no copies.
                name = parameter_name(path)
                done = {split for split, axes in self._splits if split_axis(axes, name) is not None}
                return jax.lax.psum(g, tuple(axis for axis in ALL if axis not in done | staged))

            return jax.tree_util.tree_map_with_path(total, found), jax.lax.psum(sums, TOKENS)

        def call(params: Tree, batch: Tree, *scalars: Any) -> tuple[Tree, Tree]:
            places = (specs, batch_specs(batch), PartitionSpec(), others)
            out = (specs if gradients else PartitionSpec(), PartitionSpec())
            run = jax.shard_map(among_processes(local), mesh=self.mesh, in_specs=places, out_specs=out, check_vma=False)
            return run(params, batch, scalars, frozen)

        return call

    def by_part(self, compute: Callable[..., Tree]) -> Callable[..., Tree]:
        """`compute(*trees)`, as a function of the parts that each device has of every array: of parameters, of what an
        optimizer keeps for them, and of scalars. What it computes of an element takes no other element.
        """
        if self.mesh is None:
            return compute

        def call(*trees: Tree) -> Tree:
            out = self.specs(jax.eval_shape(compute, *trees))
            run = jax.shard_map(compute, mesh=self.mesh, in_specs=self.specs(trees), out_specs=out, check_vma=False)
            return run(*trees)

        return call

    def by_row(self, compute: Callable[..., Any], params: Tree) -> Callable[..., Any]:
        """`compute(params, batch)` to arrays `[rows, ...]` of each device's rows, as one function of all rows."""
        if self.mesh is None:
            return compute
        specs = self.specs(params)

        def call(params: Tree, batch: Tree) -> Any:
            places = (specs, batch_specs(batch))
            run = jax.shard_map(
                among_processes(compute),
                mesh=self.mesh,
                in_specs=places,
                out_specs=PartitionSpec(ROWS),
                check_vma=False,
            )
            return run(params, batch)

        return call


def batch_spec(name: str) -> PartitionSpec:
    """How an array of a batch, `[rows, ...]`, lies over the mesh."""
    return PartitionSpec(ROWS) if name == REFERENCE else PartitionSpec(ROWS, "sequence")


def batch_specs(batch: Mapping[str, Any]) -> dict[str, PartitionSpec]:
    """The same for each array."""
    return {name: batch_spec(name) for name in batch}


def _of_layers(path: Any) -> bool:
    """Whether a leaf belongs to layers."""
    return any(in_layers(getattr(entry, "key", None)) for entry in path)


def _put(x: Any, sharding: NamedSharding) -> Any:
    """An array that every process has, or one that lies on the mesh already, with a sharding."""
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    # A copy for each device, whose memory may be donated.
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.array(whole[index]))


def fetched(x: jax.Array, keep: bool = True, piece: int = _PIECE) -> np.ndarray | None:
    """An array of all processes, where `keep`; every process calls it. The devices have a whole piece for a moment, of
    so many bytes or one row, not the whole array.

    >>> fetched(jax.numpy.arange(3.0), piece=4)
    array([0., 1., 2.], dtype=float32)
    """
    length = len(x) if x.ndim else 1
    rows = max(1, piece * length // max(x.nbytes, 1))
    if rows >= length:
        found = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(found) if keep else None
    whole = np.empty(x.shape, x.dtype) if keep else None
    for begin in range(0, length, rows):
        begin = min(begin, length - rows)
        found = multihost_utils.process_allgather(jax.lax.dynamic_slice_in_dim(x, begin, rows), tiled=True)
        if whole is not None:
            whole[begin : begin + rows] = found
    return whole


def is_quantized(leaf: Any) -> bool:
    return isinstance(leaf, QTensor)
