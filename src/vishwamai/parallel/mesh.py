"""Meshes of explicit axes, laid on the links of a TPU slice; everything is checked before libtpu is asked."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from vishwamai.aot.compile.libtpu import devices_for
from vishwamai.core import hardware, jax_cache
from vishwamai.core.arguments import checked, described
from vishwamai.core.errors import CacheWarning, DeviceError, ShapeError
from vishwamai.core.hardware import TpuChip, tpu_for
from vishwamai.core.target import Target
from vishwamai.core.types import Device
from vishwamai.parallel import torus

_SIZES = re.compile(r"\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*")


@checked
def make_mesh(
    axes: str | Mapping[str, int], *, topology: str | None = None, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh of explicit axes, the last of which lies on neighbours where the slice allows it.

    Name the axes from the least busy to the busiest: the first goes over slices (DCN) where there are several, the last
    goes around a ring of links. On a TPU, JAX's `mesh_utils` places the axes on the torus, and a last axis that spans
    several sides of it is put in the order of a ring.

    Args:
      axes: "fsdp=4,tensor=2,sequence=2", or the sizes by name. One size may be -1: all devices that are left.
      topology: a slice to compile for, "v5p:4x4x4" (needs libtpu); None for `devices`.
      devices: the devices; None for all of `jax.devices()`.

    Raises:
      ShapeError: `axes` cannot be read, or its sizes do not give the number of devices; the text lists what does.
      DeviceError: the topology does not exist; the text lists the nearest ones.

    >>> dict(make_mesh("data=1,tensor=-1", devices=jax.devices()[:1]).shape)
    {'data': 1, 'tensor': 1}
    """
    sizes = axis_sizes(axes)
    if topology is not None and devices is not None:
        raise ShapeError("make_mesh: `topology` and `devices` are both given; pass one of them.")
    available = _described(topology) if topology is not None else list(jax.devices() if devices is None else devices)
    for device in available:
        if not isinstance(device, jax.Device):
            raise ShapeError(
                f"make_mesh: `devices` has {described(device)}; pass devices, as jax.devices() gives them."
            )
    if len(set(available)) < len(available) or not available:
        raise ShapeError(f"make_mesh: `devices` has {len(available)} devices, {len(set(available))} of them different.")
    return _mesh("make_mesh", sizes, available, topology)


@checked
def configure_tpu_mesh(
    num_cores: int = 8, topology: str = "2x2x2", axes: str | Mapping[str, int] | None = None
) -> Mesh:
    """The mesh of a TPU slice, as `make_mesh` lays it out.

    Args:
      num_cores: devices of the slice as JAX counts them: chips, and two to a chip on TPU7x.
      topology: the sides of the slice, "2x2x2", or a chip with them, "v5p:2x2x2". Sides alone are those of the TPU of
        this machine; without one, of v4 for three sides and of v5e for two, compiled for by libtpu.
      axes: argument of `make_mesh`; None for one axis "data".

    Raises:
      ShapeError: the slice has another number of devices; the text lists slices that have it.
      DeviceError: the topology does not exist, or libtpu is missing.

    >>> dict(configure_tpu_mesh(4, "2x2", "data=2,tensor=2").shape)  # doctest: +SKIP
    {'data': 2, 'tensor': 2}
    """
    if num_cores < 1:
        raise ShapeError(f"configure_tpu_mesh: `num_cores` is {num_cores}; pass a positive number.")
    local_chip = tpu_for(jax.devices()[0].device_kind)
    name = slice_name("configure_tpu_mesh", topology)
    chip, sides = slice_of("configure_tpu_mesh", name)
    count = math.prod(sides) * chip.devices
    if count != num_cores:
        near = ", ".join(
            hardware.sides_text(s) for s in hardware.nearest(chip, _like(sides, num_cores // chip.devices))
        )
        raise ShapeError(
            f"configure_tpu_mesh: {chip.name}:{hardware.sides_text(sides)} has {count} devices, but `num_cores` is "
            f"{num_cores}; pass {count}, or another topology: the nearest are {near}."
        )
    sizes = {"data": count} if axes is None else axis_sizes(axes)
    if local_chip is chip and len(jax.devices()) == count:
        return _mesh("configure_tpu_mesh", sizes, list(jax.devices()), name)
    return _mesh("configure_tpu_mesh", sizes, _described(name), name)


def sides_of(topology: str) -> tuple[int, ...] | None:
    """The sides of a topology without a chip, "2x2x2"; None for others."""
    text = topology.strip()
    return tuple(map(int, text.split("x"))) if re.fullmatch(r"[0-9]+(x[0-9]+)*", text) else None


def slice_name(function: str, topology: str) -> str:
    """A topology with its chip: of sides alone the TPU of this machine, else v4 for three sides and v5e for two.

    Raises:
      DeviceError: it is neither.
    """
    if (sides := sides_of(topology)) is not None:
        chip = tpu_for(jax.devices()[0].device_kind) or hardware.TPUS["v5e" if len(sides) < 3 else "v4"]
        return f"{chip.name}:{topology.strip()}"
    if not re.match(r"\s*(v[0-9]|tpu)", topology, re.IGNORECASE):
        raise DeviceError(
            f"{function}: `topology` is {topology!r}; pass the sides of a slice such as '2x4', or a chip with them "
            "such as 'v5e:2x4'."
        )
    return topology


def slice_of(function: str, topology: str) -> tuple[TpuChip, tuple[int, ...]]:
    """The chip and the sides of a slice, "v5e:4x4".

    Raises:
      ShapeError: no sides are named.
      DeviceError: there is no such slice.
    """
    target = Target.parse_tpu(topology)
    assert target.tpu is not None
    if target.topology is None:
        raise ShapeError(
            f"{function}: `topology` is {topology!r}; pass the sides of a slice, {target.tpu.topology!r} for example."
        )
    return target.tpu, target.topology


def _like(sides: tuple[int, ...], chips: int) -> tuple[int, ...]:
    """Sides of about so many chips."""
    return (max(1, chips), *[1] * (len(sides) - 1))


def _described(topology: str) -> list[Device]:
    if Target.parse_tpu(topology).topology is None:
        chip = Target.parse_chip(topology)
        raise ShapeError(f"make_mesh: `topology` is {topology!r}; pass a slice, such as {chip.topology!r}.")
    return list(devices_for(topology))


def axis_sizes(axes: object) -> dict[str, int]:
    """The sizes by name, as `make_mesh` reads them.

    Raises:
      ShapeError: they cannot be read.
    """
    if isinstance(axes, str):
        matches = [_SIZES.fullmatch(item) for item in axes.split(",")]
        if not all(matches):
            raise ShapeError(f'make_mesh: `axes` is {axes!r}; write names and sizes, "fsdp=4,tensor=2".')
        pairs = [(match[1], int(match[2])) for match in matches if match]
    elif isinstance(axes, Mapping):
        pairs = list(axes.items())
    else:
        raise ShapeError(f'make_mesh: `axes` is {described(axes)}; pass "fsdp=4,tensor=2", or a dict of sizes.')
    names = [name for name, _ in pairs]
    for name, size in pairs:
        # True is an int to Python
        valid = isinstance(size, int) and not isinstance(size, bool) and (size > 0 or size == -1)
        if not isinstance(name, str) or not valid or names.count(name) > 1 or size > 2**31:
            raise ShapeError(
                f"make_mesh: `axes` has {name!r}: {size!r}; pass every name once, with a positive size, or -1 for all "
                "devices that are left."
            )
    sizes = dict(pairs)
    if not sizes or list(sizes.values()).count(-1) > 1:
        raise ShapeError(f"make_mesh: `axes` is {axes!r}; pass at least one axis, and -1 for at most one.")
    return sizes


def _mesh(function: str, sizes: dict[str, int], devices: list[Device], topology: str | None) -> Mesh:
    count = len(devices)
    product = math.prod(size for size in sizes.values() if size != -1)
    # at least 1, so that the error below names a size
    sizes = {name: max(1, count // product) if size == -1 else size for name, size in sizes.items()}
    required = math.prod(sizes.values())
    chip = tpu_for(devices[0].device_kind)
    if required != count:
        raise ShapeError(
            f"{function}: axes {sizes} hold {required} devices, but {topology or 'the list'} has {count}; "
            f"{_advice(sizes, count, required, chip)}"
        )
    try:
        grid = laid_out(tuple(sizes.values()), devices)
    except ValueError as error:
        raise DeviceError(f"{function}: axes {sizes} cannot be laid on the devices: {error}") from error
    compile_collectives_anew(devices)
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))


def _advice(sizes: dict[str, int], count: int, required: int, chip: TpuChip | None) -> str:
    """How to make the numbers agree."""
    fits = []
    for name, size in sizes.items():
        rest = required // size
        if count % rest == 0:
            fits.append(",".join(f"{n}={count // rest if n == name else s}" for n, s in sizes.items()))
    advice = f"pass {' or '.join(fits)}" if fits else f"choose sizes whose product is {count}"
    if chip is None:
        local = jax.device_count()
        if required <= local:
            return f"{advice}, or the first {required} devices."
        fix = f"; on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count={required} makes them"
        return f"{advice}{fix if jax.default_backend() == 'cpu' else ''}."
    near = hardware.nearest(chip, (-(-required // chip.devices),))
    return f"{advice}, or another slice: {', '.join(f'{chip.name}:{hardware.sides_text(s)}' for s in near)}."


def compile_collectives_anew(devices: Sequence[Device]) -> None:
    """Turns JAX's compilation cache off in this process, with a warning, where the devices are several of a CPU.

    A compiled program of several CPU devices runs its collectives one after the other. Read back from the cache
    (jaxlib 0.10.2) it runs those that do not need one another at the same time, in any order: devices then meet in
    different collectives, and the process waits for ever, or ends.
    """
    if jax_cache.directory() is None or len(devices) == 1 or devices[0].platform != "cpu":
        return
    jax_cache.turn(on=False)
    warnings.warn(
        "JAX's compilation cache is turned off: programs of several CPU devices that are read from it may run their "
        "collectives in another order on each device.",
        CacheWarning,
        stacklevel=2,
    )


def laid_out(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices in the shape of a mesh, as `make_mesh` places them.

    Raises:
      ValueError: the first axis does not go over the slices.
    """
    grid, chip = on_sides(shape, devices), tpu_for(devices[0].device_kind)
    return grid if chip is None else torus.on_neighbours(grid, chip)


def on_sides(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices in the shape of a mesh, before its last axis is put in the order of a ring. The first axis goes over
    slices.

    Raises:
      VishwamaiError: as `laid_out`.
    """
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        if shape[0] % slices:
            raise ValueError(
                f"there are {slices} slices, which do not divide the first axis of {shape[0]}; the first axis goes "
                "over slices, whose links are slow."
            )
        # the first axis crosses slices, all others stay inside one
        inner, outer = (shape[0] // slices, *shape[1:]), (slices, *[1] * (len(shape) - 1))
        return _whole_sides_first(
            lambda split: mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=split)
        )
    grid = _whole_sides_first(
        lambda split: mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=split)
    )
    # every axis has links of its own: JAX's layout stands
    if torus.own_links(grid)[0] == sum(size > 1 for size in shape):
        return grid
    # JAX lays a small slice of v5e, v6e or TPU7x out as one ring and cuts that, whatever the shape of the mesh.
    return max((grid, *torus.along_sides(grid)), key=torus.own_links)


def _whole_sides_first(make: Callable[..., np.ndarray]) -> np.ndarray:
    """Each axis on whole sides of the torus if that goes, else on parts of sides."""
    try:
        return make(False)
    except NotImplementedError:
        return make(True)
