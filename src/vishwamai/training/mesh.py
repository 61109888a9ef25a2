"""Devices: the batch split over all of them, parameters and optimizer state split over the axis "fsdp".

Each layer's parameters are gathered where the layer runs, and the gradient of that gather adds up and splits the
gradients: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch FSDP" (2023). The loss and its gradient run in one
`shard_map`, so every operation sees the arrays of one device.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core.errors import ConfigError
from vishwamai.models.axes import ONE_DEVICE, Axes
from vishwamai.models.parameters import LOGICAL_NAMES
from vishwamai.parallel import LogicalRules
from vishwamai.parallel.rules import Names
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.fp8 import SCALES

Tree = Any
ALL = ("data", "fsdp", "expert")
"""The mesh axes, all of which split the batch."""

EXPERTS = LogicalRules({**dict.fromkeys(LOGICAL_NAMES), "experts": "expert"})
"""What the mesh axis "expert" splits. What "fsdp" splits goes by size: every parameter is gathered where it is used."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie.

    Attributes:
      mesh: of the axes `ALL`; None for one device.
      axes: for the last name of a parameter's path, the axis that is split over "fsdp", counted from the end. A name
        that is not here is whole along that axis of the mesh.
      experts: the same for "expert"; these parts are not gathered.
    """

    mesh: Mesh | None = None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    experts: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def devices(self) -> int:
        """How many there are."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def model_axes(self) -> Axes:
        """What the model has to know of the mesh."""
        if self.mesh is None:
            return ONE_DEVICE
        return Axes(ALL, "expert" if self.mesh.shape["expert"] > 1 else None)

    def specs(self, tree: Tree) -> Tree:
        """A `PartitionSpec` for each leaf of a tree of parameters, or of what an optimizer keeps for them."""
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._spec(_last(path), leaf.shape), tree)

    def _spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        spec: list[str | None] = [None] * len(shape)
        for split, axis in (("fsdp", self.axes.get(name)), ("expert", self.experts.get(name))):
            if self.mesh is None or axis is None or -axis > len(shape) or shape[axis] % self.mesh.shape[split]:
                continue
            spec[axis] = split
        return PartitionSpec(*spec) if any(spec) else PartitionSpec()

    def put(self, tree: Tree) -> Tree:
        """A tree of parameters or of an optimizer's state, laid out over the mesh."""
        if self.mesh is None:
            return tree
        return jax.device_put(tree, jax.tree.map(functools.partial(NamedSharding, self.mesh), self.specs(tree)))

    def put_batch(self, batch: Tree) -> Tree:
        """Arrays `[rows, ...]` with the rows split over all devices."""
        return batch if self.mesh is None else jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec(ALL)))

    def gather(self, arrays: Tree) -> Tree:
        """Inside `gradients`: whole parameters from this device's parts, by the last name of each path."""

        def whole(path: Any, x: Any) -> Any:
            axis = self.axes.get(_last(path))
            return x if axis is None else jax.lax.all_gather(x, "fsdp", axis=axis + x.ndim, tiled=True)

        return jax.tree_util.tree_map_with_path(whole, arrays) if self.mesh is not None else arrays

    def over_devices(self, compute: Callable[..., Any], params: Tree, gradients: bool = True) -> Callable[..., Any]:
        """`compute(params, batch, *scalars)` to (gradients, sums) of each device's rows, as one function of all rows.

        The gradients come out split like the parameters; without `gradients`, `compute` gives None in their place.
        """
        if self.mesh is None:
            return compute
        specs = self.specs(params)

        def local(params: Tree, batch: Tree, scalars: Tree) -> tuple[Tree, Tree]:
            found, sums = compute(params, batch, *scalars)

            def total(path: Any, g: Any) -> Any:
                if path[0] == jax.tree_util.DictKey(SCALES):
                    return jax.lax.pmax(g, ALL)
                # The gradient of a gather has been added up over "fsdp" already, and experts have seen all tokens.
                done = {"fsdp": _last(path) in self.axes, "expert": _last(path) in self.experts}
                return jax.lax.psum(g, tuple(axis for axis in ALL if not done.get(axis)))

            return jax.tree_util.tree_map_with_path(total, found), jax.lax.psum(sums, ALL)

        def call(params: Tree, batch: Tree, *scalars: Any) -> tuple[Tree, Tree]:
            places = (specs, PartitionSpec(ALL), PartitionSpec())
            out = (specs if gradients else PartitionSpec(), PartitionSpec())
            run = jax.shard_map(local, mesh=self.mesh, in_specs=places, out_specs=out, check_vma=False)
            return run(params, batch, scalars)

        return call

    def by_row(self, compute: Callable[..., Any], params: Tree) -> Callable[..., Any]:
        """`compute(params, batch)` to arrays `[rows, ...]` of each device's rows, as one function of all rows."""
        if self.mesh is None:
            return compute
        places = (self.specs(params), PartitionSpec(ALL))
        return jax.shard_map(compute, mesh=self.mesh, in_specs=places, out_specs=PartitionSpec(ALL), check_vma=False)


def over_all_devices(config: TrainConfig, devices: int) -> TrainConfig:
    """The configuration whose mesh has all devices, where `optimization.use_pjit` asks for it: `mesh.fsdp`, unless the
    mesh names them all.

    Raises:
      ConfigError: the mesh contradicts `use_pjit`.
    """
    sizes = dataclasses.astuple(config.mesh)
    if not config.optimization.over(devices, math.prod(sizes), "the section mesh"):
        return config
    return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, fsdp=devices))


def make_layout(
    section: MeshSection,
    params: Tree,
    names: Mapping[str, Names],
    batch_size: int,
    microbatches: int,
    devices: Sequence[Any] | None = None,
) -> Layout:
    """The layout of parameters on the first `data * fsdp * expert` devices.

    A parameter is split along its longest axis that "fsdp" divides in every parameter of that name; norms and biases
    stay whole.

    Args:
      section: of the configuration.
      params: the parameters or their shapes.
      names: logical names of the axes of each parameter without that of stacked layers, by the last name of its path.
      batch_size: rows of a step. microbatches: into which a step is cut.
      devices: which there are; None for those of JAX.

    Raises:
      ConfigError: there are fewer devices, or they do not divide the rows of a microbatch.
    """
    count = section.data * section.fsdp * section.expert
    if count == 1:
        return Layout()
    devices = jax.devices() if devices is None else devices
    if count > len(devices):
        raise ConfigError(
            f"config: mesh.data={section.data} times mesh.fsdp={section.fsdp} times mesh.expert={section.expert} needs "
            f"{count} devices; JAX has {len(devices)}. On a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them."
        )
    if batch_size % (count * microbatches):
        raise ConfigError(
            f"config: batch_size={batch_size} is not a multiple of {count} devices times microbatches={microbatches}."
        )
    mesh = Mesh(np.array(devices[:count]).reshape(section.data, section.fsdp, section.expert), ALL)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        shapes.setdefault(_last(path), []).append(leaf.shape)
    found = {n: _axis(those, section.fsdp) for n, those in shapes.items() if len(names[n]) >= 2 and not _is_bias(n)}
    splits = {n: tuple(EXPERTS.partition(names[n], where=n)) for n in shapes} if section.expert > 1 else {}
    experts = {n: split.index("expert") - len(split) for n, split in splits.items() if "expert" in split}
    counts = {those[0][experts[n]] for n, those in shapes.items() if n in experts}
    if section.expert > 1 and (not counts or any(n % section.expert for n in counts)):
        raise ConfigError(
            f"config: mesh.expert={section.expert}, but the model has {next(iter(counts), 'no')} experts; pass a "
            "number that divides them."
        )
    return Layout(mesh, {name: axis for name, axis in found.items() if axis is not None}, experts)


def _is_bias(name: str) -> bool:
    """The biases of experts have two axes, of which the first is that of the experts."""
    return name.endswith("_bias")


def _axis(shapes: list[tuple[int, ...]], parts: int) -> int | None:
    """The longest of the last two axes that `parts` divides in every shape, from the end."""
    if parts == 1:
        return None
    fitting = [axis for axis in (-1, -2) if all(shape[axis] % parts == 0 for shape in shapes)]
    return max(fitting, key=lambda axis: shapes[0][axis], default=None)


def _last(path: Any) -> str:
    """The name of the parameter: what is below it in the tree, such as the parts of a quantized moment, has no keys."""
    keys = [entry for entry in path if isinstance(entry, jax.tree_util.DictKey)]
    return str(keys[-1].key) if keys else ""
