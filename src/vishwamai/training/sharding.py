"""Where the arrays of a run lie on the devices of a mesh: the axis that each mesh axis splits, by a parameter's name.

"fsdp" splits any axis that it divides; each layer's parameters are gathered where the layer runs (`gather`). "expert"
and "tensor" split by the logical names of axes (`parallel.rules`), and their parts are not gathered (`models.axes`).
"pipeline" splits the layers (`pipeline.stages`). "data", "fsdp" and "expert" split the rows of a batch, "sequence" its
tokens.
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
from vishwamai.core.numbers import divisors
from vishwamai.core.pallas import LANES
from vishwamai.core.qtensor import QTensor
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.models.attend import sequence_placement
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import ModelConfig
from vishwamai.models.parameters import LOGICAL_NAMES, split_units
from vishwamai.parallel import LogicalRules, to_zigzag
from vishwamai.parallel.mesh import compile_collectives_anew, laid_out
from vishwamai.parallel.rules import Names
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.packing import REFERENCE
from vishwamai.training.parameter_names import is_bias, of_layers, parameter_name

ROWS = ("data", "fsdp", "expert")
"""The mesh axes that split the rows of a batch."""

TOKENS = (*ROWS, "sequence")
"""Those that split its tokens."""

PIPELINE = "pipeline"
"""The mesh axis that splits the stacked layers; each of its devices has the same rows."""

ALL = (PIPELINE, *TOKENS, "tensor")
"""The mesh axes, the busiest last."""

UNGATHERED = {"expert": ("experts",), "tensor": ("heads", "kv_heads", "mlp", "vocab")}
"""The logical axes that a mesh axis splits, by mesh axis; no device gathers these parts. What "fsdp" splits goes by
size: every parameter is gathered where it is used."""

ADAPTER_AXES = {"down": (-2, -3), "up": (-1, -3)}
"""The axes of a weight that the arrays of its adapter have too (`lora.Adapted`); they are split as the weight is."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the arrays of a run lie.

    Attributes:
      mesh: mesh of the axes `ALL`; None for one device.
      axes: axis by the last name of a parameter's path: the one that is split over "fsdp", counted from the end. A name
        that is not here is whole along that axis of the mesh.
      ungathered: the same for each mesh axis of `UNGATHERED`.
      ends: the same for "pipeline", of the embedding and the head, which a step makes whole (`pipeline.loss`).
      in_parts: names of parameters that "fsdp" splits and that are used split, `MeshAxes.features`; no device gathers
        them.
      zigzag: a split sequence lies on its devices in zig-zag order.
    """

    mesh: Mesh | None = None
    axes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    ungathered: Mapping[str, Mapping[str, int]] = dataclasses.field(default_factory=dict)
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

    def specs(self, tree: PyTree, placed: bool = True) -> PyTree:
        """A `PartitionSpec` for each leaf of a tree of parameters, or of what an optimizer keeps for them; without
        `placed`, of a tree whose layers `Stages.place` has not placed.
        """
        return jax.tree_util.tree_map_with_path(lambda path, leaf: self._spec(path, leaf.shape, placed), tree)

    def _spec(self, path: jax.tree_util.KeyPath, shape: tuple[int, ...], placed: bool) -> PartitionSpec:
        name = parameter_name(path)
        spec: list[str | None] = [None] * len(shape)
        if placed and self.staged(path) and shape and shape[0] % self.stages == 0:  # the axis of stacked layers
            spec[0] = PIPELINE
        for split, axes in self.splits:
            axis = split_axis(axes, name)
            if self.mesh is None or axis is None or -axis > len(shape) or shape[axis] % self.mesh.shape[split]:  # whole
                continue
            if spec[axis] is None:  # an axis is split by one mesh axis at most: the first of `splits`
                spec[axis] = split
        return PartitionSpec(*spec) if any(spec) else PartitionSpec()

    @property
    def splits(self) -> tuple[tuple[str, Mapping[str, int]], ...]:
        return (("fsdp", self.axes), (PIPELINE, self.ends), *self.ungathered.items())

    @property
    def stages(self) -> int:
        """Over how many devices the layers are split."""
        return 1 if self.mesh is None else self.mesh.shape[PIPELINE]

    def staged(self, path: jax.tree_util.KeyPath) -> bool:
        """Whether a leaf belongs to layers that stages share out."""
        return self.stages > 1 and of_layers(path)

    def shardings(self, tree: PyTree, placed: bool = True) -> PyTree:
        """A sharding for each leaf, as `specs`; on one device None."""
        if self.mesh is None:
            return None
        return jax.tree.map(functools.partial(NamedSharding, self.mesh), self.specs(tree, placed))

    def put(self, tree: PyTree) -> PyTree:
        """A tree of parameters or of an optimizer's state, laid out over the mesh. Every process passes the same."""
        return tree if self.mesh is None else jax.tree.map(_put, tree, self.shardings(tree))

    def create(self, make: Callable[..., PyTree], *args: PyTree) -> PyTree:
        """What `make(*args)` gives, laid out over the mesh: no device has the whole. It takes the memory of `args`."""
        if self.mesh is None:
            return make(*args)
        places = self.shardings(jax.eval_shape(make, *args))  # shapes alone: nothing is computed yet
        return jax.jit(make, out_shardings=places, donate_argnums=tuple(range(len(args))))(*args)

    @property
    def reader(self) -> tuple[int, int]:
        """Which part of each batch this process reads, and of how many. Processes that have the same rows read the
        same part; where parts would differ in size, each process reads all.
        """
        if self.mesh is None:
            return 0, 1
        rows: dict[int, set[int]] = {}
        grid = np.moveaxis(self.mesh.devices, ALL.index(PIPELINE), -1)  # stages of one part have the same rows
        for row, devices in enumerate(grid.reshape(math.prod(self.mesh.shape[a] for a in ROWS), -1)):
            for device in devices:
                rows.setdefault(device.process_index, set()).add(row)
        parts = sorted({tuple(sorted(mine)) for mine in rows.values()})
        joined = [row for part in parts for row in part]
        if joined != list(range(len(joined))) or len({len(part) for part in parts}) > 1:
            return 0, 1
        return parts.index(tuple(sorted(rows[jax.process_index()]))), len(parts)

    def put_batch(self, batch: PyTree) -> PyTree:
        """Arrays `[rows, ...]` split over the devices: this process's part of the rows, as `reader` says."""
        if self.mesh is None:
            return batch
        mesh, (index, count) = self.mesh, self.reader

        def put(name: str, x: AnyArray) -> jax.Array:
            if self.zigzag and name != REFERENCE:
                x = to_zigzag(x, mesh.shape["sequence"], axis=1)
            sharding = NamedSharding(mesh, batch_spec(name))
            if sharding.is_fully_addressable:  # one process
                return jax.device_put(x, sharding)
            first = index * x.shape[0]  # this process's first row in the global batch

            def of_device(place: tuple[slice, ...] | None) -> np.ndarray:
                assert place is not None
                begin, end, _ = place[0].indices(x.shape[0] * count)
                return x[(slice(begin - first, end - first), *place[1:])]

            return jax.make_array_from_callback((x.shape[0] * count, *x.shape[1:]), sharding, of_device)

        return {name: put(name, x) for name, x in batch.items()}


def batch_spec(name: str) -> PartitionSpec:
    """How an array of a batch, `[rows, ...]`, lies over the mesh."""
    return PartitionSpec(ROWS) if name == REFERENCE else PartitionSpec(ROWS, "sequence")


def batch_specs(batch: Mapping[str, PyTree]) -> dict[str, PartitionSpec]:
    """The same for each array."""
    return {name: batch_spec(name) for name in batch}


def _put(x: PyTree, sharding: NamedSharding) -> PyTree:
    """An array that every process has, or one that lies on the mesh already, with a sharding."""
    if sharding.is_fully_addressable or (isinstance(x, jax.Array) and not x.is_fully_addressable):
        return jax.device_put(x, sharding)
    values = np.asarray(x)
    # A copy for each device, whose memory may be donated.
    return jax.make_array_from_callback(values.shape, sharding, lambda index: np.array(values[index]))


def split_axis(axes: Mapping[str, int], name: str) -> int | None:
    """The axis of a parameter that a mesh axis splits, from the end; None where it is whole.

    Args:
      axes: the split axis of weights by their name.
      name: result of `parameter_name`.

    >>> [split_axis({"query": -1}, name) for name in ("query", "query/up", "query/down", "key")]
    [-1, -1, None, None]
    """
    weight, _, part = name.partition("/")
    axis = axes.get(weight)
    return axis if not part or axis in ADAPTER_AXES.get(part, ()) else None


def is_quantized(leaf: PyTree) -> bool:
    return isinstance(leaf, QTensor)


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
    params: PyTree,
    names: Mapping[str, Names],
    batch_size: int,
    microbatches: int,
    devices: Sequence[Any] | None = None,
    model: ModelConfig | None = None,
) -> Layout:
    """The layout of parameters on the first devices, as many as the mesh has.

    "fsdp" splits a parameter along its rows, or else its columns, where no other mesh axis splits them and it divides
    them in every parameter of that name; norms and biases stay whole. "pipeline" splits what is outside of the layers
    likewise, along an axis that is left.

    Args:
      section: section of the configuration.
      params: the parameters or their shapes.
      names: logical names of the axes of each parameter without that of stacked layers, by the last name of its path.
      batch_size: rows of a step. microbatches: into which a step is cut.
      devices: available devices; None for those of JAX. All devices of a TPU slice are laid on its links, as
        `parallel.make_mesh` lays them.
      model: model of the parameters; where "expert", "sequence" and "tensor" are 1, it is not read.

    Raises:
      ConfigError: there are fewer devices, or a mesh axis does not divide what it splits.
    """
    sizes = vars(section)
    count = math.prod(sizes.values())
    if count == 1:
        return Layout()
    devices = jax.devices() if devices is None else devices
    check_sizes(section, len(devices), batch_size, microbatches, model)
    compile_collectives_anew(devices[:count])
    ungathered: dict[str, dict[str, int]] = {}
    for axis, split in UNGATHERED.items():
        if sizes[axis] > 1 and model is not None:
            ungathered[axis] = _ungathered_axes(axis, split, names)
    mesh = Mesh(_placed(tuple(sizes[axis] for axis in ALL), devices[:count], count == len(devices)), ALL)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        shapes.setdefault(parameter_name(path), []).append(leaf.shape)

    def free(parts: int, inside: Sequence[str], *others: Mapping[str, int]) -> dict[str, int]:
        used = {name: {axes[name] for axes in (*ungathered.values(), *others) if name in axes} for name in inside}
        chosen = {name: _axis(shapes[name], parts, used[name]) for name in inside}
        return {name: axis for name, axis in chosen.items() if axis is not None}

    matrices = [name for name in shapes if len(names[name]) >= 2 and not is_bias(name)]
    axes = free(section.fsdp, matrices)
    ends = free(section.pipeline, [name for name in matrices if name in params], axes)
    in_parts = _in_parts(section, shapes, names, params)
    axes |= dict.fromkeys(in_parts, -1)  # features, in place of rows
    ring = section.sequence > 1 and section.pipeline == 1
    zigzag = ring and model is not None and sequence_placement(model) == "zigzag"
    return Layout(mesh, axes, ungathered, ends, in_parts, zigzag)


def _in_parts(
    section: MeshSection, shapes: Mapping[str, list[tuple[int, ...]]], names: Mapping[str, Names], params: PyTree
) -> frozenset[str]:
    """The embedding table and the head where "fsdp" splits their features into whole lanes of a TPU; they are then used
    as they lie. Narrower parts would be filled up to a lane, stages have both whole, and quantized ones are read whole.
    """
    tables = {name for name in shapes if name in params and "vocab" in names[name] and len(names[name]) == 2}
    unsplit = section.fsdp == 1 or section.pipeline > 1 or any(is_quantized(params[name]) for name in tables)
    fits = all(shape[-1] % (section.fsdp * LANES) == 0 for name in tables for shape in shapes[name])
    return frozenset() if unsplit or not fits else frozenset(tables)


def _placed(shape: tuple[int, ...], devices: Sequence[Any], all_of_them: bool) -> np.ndarray:
    """The devices in the shape of a mesh; those of a whole TPU slice so that the busiest axes have links of their own.

    Several slices, whose first axis need not go over them, and a part of a slice keep JAX's order.
    """
    one_slice = len({getattr(device, "slice_index", 0) for device in devices}) == 1
    if all_of_them and one_slice and hasattr(devices[0], "coords"):
        return laid_out(shape, list(devices))
    return np.array(devices, dtype=object).reshape(shape)


def mesh_text(section: MeshSection) -> str:
    """The sizes of a mesh, as errors write them.

    >>> mesh_text(MeshSection(fsdp=4, tensor=2))
    'mesh.fsdp=4 times mesh.tensor=2'
    """
    return " times ".join(f"mesh.{name}={size}" for name, size in vars(section).items() if size > 1) or "mesh.data=1"


def row_parts(section: MeshSection) -> int:
    """Into how many parts a mesh splits the rows of a batch."""
    return math.prod(getattr(section, axis) for axis in ROWS)


def check_sizes(
    section: MeshSection, devices: int, batch_size: int, microbatches: int, model: ModelConfig | None
) -> None:
    """Raises ConfigError where a mesh needs more devices than there are, or does not divide the rows of a microbatch or
    the parts of a model; without one, those are not looked at.
    """
    count = math.prod(vars(section).values())
    if count > devices:
        raise ConfigError(
            f"config: {mesh_text(section)} needs {count} devices; JAX has {devices}. On a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them."
        )
    check_rows(section, batch_size, microbatches)
    for axis in UNGATHERED:
        if model is not None and (size := getattr(section, axis)) > 1:
            check_units(axis, size, model)


def check_rows(section: MeshSection, batch_size: int, microbatches: int) -> None:
    """Raises ConfigError where a mesh does not divide the rows of a microbatch."""
    parts = row_parts(section)
    if batch_size % (parts * microbatches):
        axes = " times ".join(f"mesh.{axis}" for axis in ROWS)
        raise ConfigError(
            f"config: batch_size={batch_size} is not a multiple of {parts} devices ({axes}) times "
            f"microbatches={microbatches}."
        )


def check_units(axis: str, size: int, model: ModelConfig) -> None:
    """Raises ConfigError where the size of a mesh axis of `UNGATHERED` does not divide what it splits of a model."""
    units = {name: entry for name, entry in split_units(model).items() if name in UNGATHERED[axis]}
    if not units:
        raise ConfigError(f"config: mesh.{axis}={size}, but the model has no {axis}s; set mesh.{axis}=1.")
    for name, (unit, number) in units.items():
        if number % size:
            fits = ", ".join(str(n) for n in divisors(math.gcd(*(count for _, count in units.values()))))
            larger = f", or model.config.vocab_size={-(-number // size) * size}" if name == "vocab" else ""
            raise ConfigError(
                f"config: mesh.{axis}={size} does not divide the model's {number} {unit}; set mesh.{axis} to one of "
                f"{fits}{larger}."
            )


def _ungathered_axes(axis: str, split: Sequence[str], names: Mapping[str, Names]) -> dict[str, int]:
    """The axis that a mesh axis splits, from the end, by the last name of a parameter's path."""
    rules = LogicalRules({**dict.fromkeys(LOGICAL_NAMES), **dict.fromkeys(split, axis)})
    specs = {name: tuple(rules.partition(of, where=name)) for name, of in names.items()}
    return {name: spec.index(axis) - len(spec) for name, spec in specs.items() if axis in spec}


def _axis(shapes: list[tuple[int, ...]], parts: int, used: set[int]) -> int | None:
    """The last axis but one, else the last, if `parts` divides it in every shape and it is not in `used`; from the end.

    Parts along rows are whole in memory. The compiler for TPUs splits a sum along rows, and makes others whole first.
    """
    if parts == 1:
        return None
    fitting = (axis for axis in (-2, -1) if axis not in used and all(shape[axis] % parts == 0 for shape in shapes))
    return next(fitting, None)
