"""The mesh of a training run: what each axis splits of a model and of its batches, checked, and their `Layout`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vishwamai.core.errors import ConfigError
from vishwamai.core.numbers import divisors
from vishwamai.core.pallas import LANES
from vishwamai.models.attend import sequence_placement
from vishwamai.models.config import ModelConfig
from vishwamai.models.parameters import LOGICAL_NAMES, split_units
from vishwamai.parallel import LogicalRules
from vishwamai.parallel.mesh import compile_collectives_anew, laid_out
from vishwamai.parallel.rules import Names
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.layout import ALL, ROWS, Layout, Tree, is_quantized
from vishwamai.training.parts import is_bias, parameter_name

KEPT_APART = {"expert": ("experts",), "tensor": ("heads", "kv_heads", "mlp", "vocab")}
"""The logical axes that a mesh axis splits, by mesh axis; no device gathers these parts. What "fsdp" splits goes by
size: every parameter is gathered where it is used."""


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
    model: ModelConfig | None = None,
) -> Layout:
    """The layout of parameters on the first devices, as many as the mesh has.

    "fsdp" splits a parameter along its rows, or else its columns, where no other mesh axis splits them and it divides
    them in every parameter of that name; norms and biases stay whole. "pipeline" splits what is outside of the layers
    likewise, along an axis that is left.

    Args:
      section: of the configuration.
      params: the parameters or their shapes.
      names: logical names of the axes of each parameter without that of stacked layers, by the last name of its path.
      batch_size: rows of a step. microbatches: into which a step is cut.
      devices: which there are; None for those of JAX. All devices of a TPU slice are laid on its links, as
        `parallel.make_mesh` lays them.
      model: which the parameters are of; where "expert", "sequence" and "tensor" are 1, it is not read.

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
    apart: dict[str, dict[str, int]] = {}
    for axis, split in KEPT_APART.items():
        if sizes[axis] > 1 and model is not None:
            apart[axis] = _apart(axis, split, names)
    mesh = Mesh(_placed(tuple(sizes[axis] for axis in ALL), devices[:count], count == len(devices)), ALL)
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantized):
        shapes.setdefault(parameter_name(path), []).append(leaf.shape)

    def free(parts: int, inside: Sequence[str], *others: Mapping[str, int]) -> dict[str, int]:
        taken = {name: {axes[name] for axes in (*apart.values(), *others) if name in axes} for name in inside}
        found = {name: _axis(shapes[name], parts, taken[name]) for name in inside}
        return {name: axis for name, axis in found.items() if axis is not None}

    matrices = [name for name in shapes if len(names[name]) >= 2 and not is_bias(name)]
    found = free(section.fsdp, matrices)
    ends = free(section.pipeline, [name for name in matrices if name in params], found)
    in_parts = _in_parts(section, shapes, names, params)
    found |= dict.fromkeys(in_parts, -1)
    ring = section.sequence > 1 and section.pipeline == 1
    zigzag = ring and model is not None and sequence_placement(model) == "zigzag"
    return Layout(mesh, found, apart, ends, in_parts, zigzag)


def _in_parts(
    section: MeshSection, shapes: Mapping[str, list[tuple[int, ...]]], names: Mapping[str, Names], params: Tree
) -> frozenset[str]:
    """The embedding table and the head where "fsdp" splits their features into whole lanes of a TPU; they are then used
    as they lie. Narrower parts would be filled up to a lane, stages have both whole, and quantized ones are read whole.
    """
    tables = {name for name in shapes if name in params and "vocab" in names[name] and len(names[name]) == 2}
    whole = section.fsdp == 1 or section.pipeline > 1 or any(is_quantized(params[name]) for name in tables)
    fits = all(shape[-1] % (section.fsdp * LANES) == 0 for name in tables for shape in shapes[name])
    return frozenset() if whole or not fits else frozenset(tables)


def _placed(shape: tuple[int, ...], devices: Sequence[Any], all_of_them: bool) -> np.ndarray:
    """The devices in the shape of a mesh; those of a whole TPU slice so that the busiest axes have links of their own.

    Several slices, whose first axis need not go over them, and a part of a slice keep JAX's order.
    """
    one_slice = len({getattr(device, "slice_index", 0) for device in devices}) == 1
    if all_of_them and one_slice and hasattr(devices[0], "coords"):
        return laid_out(shape, list(devices))
    return np.array(devices, dtype=object).reshape(shape)


def written(section: MeshSection) -> str:
    """The sizes of a mesh, as errors write them.

    >>> written(MeshSection(fsdp=4, tensor=2))
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
            f"config: {written(section)} needs {count} devices; JAX has {devices}. On a CPU, "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={count} makes them."
        )
    check_rows(section, batch_size, microbatches)
    for axis in KEPT_APART:
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
    """Raises ConfigError where the size of a mesh axis of `KEPT_APART` does not divide what it splits of a model."""
    units = {name: unit for name, unit in split_units(model).items() if name in KEPT_APART[axis]}
    if not units:
        raise ConfigError(f"config: mesh.{axis}={size}, but the model has no {axis}s; set mesh.{axis}=1.")
    for name, (what, number) in units.items():
        if number % size:
            fits = ", ".join(str(n) for n in divisors(math.gcd(*(count for _, count in units.values()))))
            larger = f", or model.config.vocab_size={-(-number // size) * size}" if name == "vocab" else ""
            raise ConfigError(
                f"config: mesh.{axis}={size} does not divide the model's {number} {what}; set mesh.{axis} to one of "
                f"{fits}{larger}."
            )


def _apart(axis: str, split: Sequence[str], names: Mapping[str, Names]) -> dict[str, int]:
    """The axis that a mesh axis splits, from the end, by the last name of a parameter's path."""
    rules = LogicalRules({**dict.fromkeys(LOGICAL_NAMES), **dict.fromkeys(split, axis)})
    specs = {name: tuple(rules.partition(of, where=name)) for name, of in names.items()}
    return {name: spec.index(axis) - len(spec) for name, spec in specs.items() if axis in spec}


def _axis(shapes: list[tuple[int, ...]], parts: int, taken: set[int]) -> int | None:
    """The last axis but one, else the last, if `parts` divides it in every shape and it is not taken; from the end.

    Parts along rows are whole in memory. The compiler for TPUs splits a sum along rows, and makes others whole first.
    """
    if parts == 1:
        return None
    fitting = (axis for axis in (-2, -1) if axis not in taken and all(shape[axis] % parts == 0 for shape in shapes))
    return next(fitting, None)
