"""The only place that loads libtpu: its environment, its noise, its topologies.

libtpu is a compiler as well as a driver: without a TPU in the machine it still compiles for every generation, once it
is told not to look for one. That has to be said through environment variables before the library is loaded, and it
prints warnings at C++ level while loading, which only a redirection of file descriptor 2 can hold back; both happen
here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from vishwamai.core.arguments import checked
from vishwamai.core.environment import libtpu_environment
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.hardware import TPUS, sides_text
from vishwamai.core.installing import install_line
from vishwamai.core.jax_private import load_libtpu_as_compiler
from vishwamai.core.target import Target
from vishwamai.core.types import Device


def install_hint() -> str:
    """The line that installs libtpu."""
    return f"{install_line('aot')} (or: pip install libtpu)"


_OF_OTHERS = ("--xla_force_host_platform_device_count", "--xla_cpu_", "--xla_gpu_")
"""Flags of XLA that change no program of a TPU."""


def has_libtpu() -> bool:
    """Whether the libtpu package is installed; loads nothing."""
    return importlib.util.find_spec("libtpu") is not None


def versions() -> dict[str, str]:
    """The versions that decide what the compiler makes of a program: jax, jaxlib and libtpu.

    Raises:
        DeviceError: libtpu is not installed.
    """
    try:
        return {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
    except importlib.metadata.PackageNotFoundError as error:
        raise DeviceError(
            f"compiling for a TPU needs the package {error.name}, which is missing; {install_hint()}."
        ) from None


def identity() -> Mapping[str, object]:
    """What decides what the compiler makes of a program: `versions`, and the options that the environment has for it.

    Options of XLA's other platforms are left out. Kept answers have this in their keys.

    Raises:
        DeviceError: libtpu is not installed.
    """
    options = os.environ.get("LIBTPU_INIT_ARGS", "").split()
    options += [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_OF_OTHERS)]
    return versions() | ({"options": options} if options else {})


@contextlib.contextmanager
def quiet_stderr() -> Iterator[IO[bytes]]:
    """Sends file descriptor 2 to a file in memory for the block, so that C++ code cannot print; yields that file."""
    with contextlib.suppress(ValueError, OSError):
        sys.stderr.flush()
    saved = os.dup(2)
    # In memory: there may be no directory for temporary files, or no room in it.
    with open(os.memfd_create("stderr"), "w+b") if hasattr(os, "memfd_create") else tempfile.TemporaryFile() as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield sink
        finally:
            os.dup2(saved, 2)
            os.close(saved)


_reader: list[bool] = []


def stderr_has_a_reader() -> None:
    """Says that another process reads this one's stderr, for what C++ code says there before it ends the process:
    `quiet_compiler` then leaves it.
    """
    _reader.append(True)


def quiet_compiler() -> contextlib.AbstractContextManager[object]:
    """Keeps what the compiler's C++ code prints, stack traces among it, from the terminal; its errors say it too."""
    return contextlib.nullcontext() if _reader else quiet_stderr()


@functools.cache
def _describe(chip_name: str, topology: str) -> tuple[Device, ...]:
    if not has_libtpu():
        raise DeviceError(
            f"compiling for TPU {chip_name} needs the package libtpu, which is missing; {install_hint()}."
        )
    for key, value in libtpu_environment().items():
        os.environ.setdefault(key, value)
    options = dict(TPUS[chip_name].topology_options)
    with quiet_stderr() as noise:
        try:
            load_libtpu_as_compiler()
            return tuple(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
        except Exception as error:
            noise.seek(0)
            output = noise.read().decode(errors="replace").strip()[-500:]
            raise DeviceError(
                f"libtpu gives no topology {topology!r}, though {chip_name} has this slice: {error}. "
                f"{TPUS[chip_name].topology!r} is known to work. {output}"
            ) from error


def local_devices() -> list[Device]:
    """This machine's devices; libtpu, where it is installed without a TPU, is kept from complaining about that, as it
    does when JAX first asks.
    """
    with quiet_stderr():
        return jax.devices()


def devices_for(target: str) -> tuple[Device, ...]:
    """The devices of a target, described and not present: one for "v5e", all of them for "v5e:4x4".

    Raises:
        DeviceError: libtpu is missing, or it knows no such chip or topology.
    """
    chip, sides = Target.parse_chip(target), Target.parse_tpu(target).topology
    if sides is None:
        return _describe(chip.name, chip.topology)[:1]
    return _describe(chip.name, f"{chip.name}:{sides_text(sides)}")


@checked
def mesh_for(target: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh of explicit axes over the devices of a topology, to write the shardings of a program with.

    The axes are explicit (sharding in types), which kernels follow.

    Args:
        target: chip and topology, "v5e:4x4".
        axes: sizes of the mesh by axis name, `{"data": 4, "model": 4}`; their product is the number of devices.

    Raises:
        DeviceError: as `devices_for`.
        ShapeError: the product of the sizes is not the number of devices.

    Example:
        >>> mesh = mesh_for("v5e:2x2", {"data": 2, "model": 2})  # doctest: +SKIP
        >>> mesh.shape, len(mesh.explicit_axes)  # doctest: +SKIP
        (OrderedDict({'data': 2, 'model': 2}), 2)
    """
    for name, size in axes.items():
        if not isinstance(name, str) or isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ShapeError(
                f'mesh_for: `axes` has {name!r}: {size!r}; pass a positive size for each name, {{"data": 4}}.'
            )
    devices = devices_for(target)
    if math.prod(axes.values()) != len(devices):
        raise ShapeError(
            f"mesh_for: axes {dict(axes)} hold {math.prod(axes.values())} devices, but {target!r} has {len(devices)}; "
            "choose sizes whose product is that."
        )
    grid = np.asarray(devices, dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Explicit,) * len(axes))


def describe_device(target: str) -> Device:
    """The first device of a target, as jax sees it."""
    return devices_for(target)[0]
