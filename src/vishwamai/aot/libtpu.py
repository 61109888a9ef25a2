"""The only place that loads libtpu: its environment, its noise, its topologies.

libtpu is a compiler as well as a driver: without a TPU in the machine it still compiles for every generation, once it is told not to look for
one. That has to be said through environment variables before the library is loaded, and it prints warnings at C++ level while loading, which
only a redirection of file descriptor 2 can hold back; both happen here and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.metadata
import importlib.util
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.hardware import CHIPS, Chip, chip

INSTALL = 'pip install "vishwamai[aot]"  (or: pip install libtpu)'


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
        raise DeviceError(f"compiling for a TPU needs the package {error.name}, which is missing; {INSTALL}.") from None


def environment() -> dict[str, str]:
    """What libtpu needs to find in the environment to compile on a machine without a TPU; empty where there is one."""
    quiet = {"TPU_STDERR_LOG_LEVEL": "3", "TPU_MIN_LOG_LEVEL": "3"}
    if glob.glob("/dev/accel*") or glob.glob("/dev/vfio/[0-9]*"):
        return quiet  # a TPU host: its own settings stand, and the lock that guards the device stays
    return quiet | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


@contextlib.contextmanager
def quiet_stderr() -> Iterator[Any]:
    """Sends file descriptor 2 to a temporary file for the block, so that C++ code cannot print; yields that file."""
    with contextlib.suppress(ValueError, OSError):
        sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile("w+b") as sink:
        os.dup2(sink.fileno(), 2)
        try:
            yield sink
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def parse_target(target: str) -> tuple[Chip, str | None]:
    """Splits "v5e" or "v5e:4x4" into the chip and its topology (None where only a chip was named).

    Raises:
        DeviceError: no such chip, or the topology is not written as sizes joined by "x".

    Example:
        >>> found, shape = parse_target("v5e:4x4")
        >>> found.name, shape
        ('v5e', '4x4')
    """
    name, _, shape = target.partition(":")
    found = chip(name)
    if shape and not re.fullmatch(r"\d+(x\d+){1,2}", shape):
        raise DeviceError(f'target {target!r}: write a topology as sizes joined by "x", such as "{found.topology}".')
    return found, shape or None


def _guard(found: Chip, shape: str) -> None:
    """Refuses what no pod has: libtpu ends the whole process on some of it (v5e with a side over 16)."""
    sides = [int(side) for side in shape.split("x")]
    flat = len(found.topology.split("x")) == 2
    if math.prod(sides) > found.pod_chips or (flat and max(sides) > 16):
        raise DeviceError(
            f"topology {found.name}:{shape} has {math.prod(sides)} chips; a {found.name} pod has at most {found.pod_chips}"
            + (" in 16x16." if flat else ".")
        )


@functools.cache
def _describe(chip_name: str, topology: str) -> tuple[Any, ...]:
    if not has_libtpu():
        raise DeviceError(f"compiling for TPU {chip_name} needs the package libtpu, which is missing; {INSTALL}.")
    for key, value in environment().items():
        os.environ.setdefault(key, value)
    options = dict(CHIPS[chip_name].topology_options)
    with quiet_stderr() as noise:
        try:
            return tuple(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
        except Exception as error:
            noise.seek(0)
            said = noise.read().decode(errors="replace").strip()[-500:]
            raise DeviceError(
                f"libtpu gives no topology {topology!r}: {error}. {CHIPS[chip_name].topology!r} works; larger ones are "
                f"multiples of a host (v5e, v6e: 2x4, 4x4, 4x8, 8x8, 16x16; v4, v5p, tpu7x: 2x2x2, 2x2x4, 4x4x4). {said}"
            ) from error


def devices_for(target: str) -> tuple[Any, ...]:
    """The devices of a target, described and not present: one for "v5e", all of them for "v5e:4x4".

    Raises:
        DeviceError: libtpu is missing, or it knows no such chip or topology.
    """
    found, shape = parse_target(target)
    if shape is None:
        return _describe(found.name, found.topology)[:1]
    _guard(found, shape)
    return _describe(found.name, f"{found.name}:{shape}")


def mesh_for(target: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh over the devices of a topology, to write the shardings of a program with.

    Args:
        target: chip and topology, "v5e:4x4".
        axes: sizes of the mesh by axis name, `{"data": 4, "model": 4}`; their product is the number of devices.

    Raises:
        DeviceError: as `devices_for`.
        ShapeError: the product of the sizes is not the number of devices.
    """
    devices = devices_for(target)
    if math.prod(axes.values()) != len(devices):
        raise ShapeError(
            f"mesh_for: axes {dict(axes)} hold {math.prod(axes.values())} devices, but {target!r} has {len(devices)}; "
            "choose sizes whose product is that."
        )
    return Mesh(np.asarray(devices, dtype=object).reshape(tuple(axes.values())), tuple(axes))


def describe_device(target: str) -> Any:
    """The first device of a target, as jax sees it."""
    return devices_for(target)[0]
