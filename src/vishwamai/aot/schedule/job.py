"""A program to be inspected: traced and exported here, with its scalar operands and a fingerprint for the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax import export

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.program import in_words, place, tracing_for
from vishwamai.aot.schedule import known
from vishwamai.core.errors import DeviceError, UnsupportedError
from vishwamai.core.installing import install_line
from vishwamai.core.target import Target, devices_of

FORMAT = 4
"""Counts up when the layout of the cache changes."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A traced program, ready to be compiled.

    Attributes:
        blob: the serialised export of the function over flat arguments; `target`: what for.
        operand_values: scalar operands of kernels that are known ahead, by kernel, call and operand.
        io_bytes: bytes of arguments and results together, on one device.
        fingerprint: hash of program, target, versions and options, including the environment's.
        options: compiler options by name.
    """

    blob: bytes
    target: str
    operand_values: Mapping[str, Sequence[Mapping[int, np.ndarray]]]
    io_bytes: int
    fingerprint: str
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


_EXPORTING = threading.Lock()


@contextmanager
def exact_export() -> Iterator[None]:
    """Exports the program as jit would lower it, and the same program always as the same bytes.

    An export otherwise keeps to older forms for older compilers; and the places in the source that every operation
    carries hold the whole stack of callers, of which only the innermost says anything here.
    """
    settings = {"jax_export_ignore_forward_compatibility": True, "jax_traceback_in_locations_limit": 1}
    with _EXPORTING:
        before = {name: getattr(jax.config, name) for name in settings}
        try:
            for name, value in settings.items():
                jax.config.update(name, value)
            yield
        finally:
            for name, value in before.items():
                jax.config.update(name, value)


def _bytes(shape: Any, sharding: Any) -> int:
    dims = sharding.shard_shape(shape.shape) if sharding is not None else shape.shape
    return int(np.prod(dims)) * getattr(shape.dtype, "itemsize", 4)


def over_arrays(fn: Callable[..., Any], leaves: Sequence[Any], tree: Any, arrays: Sequence[int]) -> Callable[..., Any]:
    """`fn` as a function of the arrays among its arguments alone, which gives a tuple of arrays.

    Args:
        leaves, tree: the flattened pair of positional and keyword arguments; `arrays`: which of the leaves are arrays.
    """

    def flat(*values: Any) -> tuple[Any, ...]:
        filled = list(leaves)
        for index, value in zip(arrays, values):
            filled[index] = value
        positional, named = jax.tree.unflatten(tree, filled)
        return tuple(jax.tree.leaves(fn(*positional, **named)))

    flat.__name__ = getattr(fn, "__name__", "program").replace("<lambda>", "program")
    return flat


def integers(arrays: Sequence[Any]) -> dict[int, np.ndarray]:
    """Those of a function's flat arguments that are arrays of integers, not shapes alone, by position."""
    arrays_by_place = {i: x for i, x in enumerate(arrays) if isinstance(x, (np.ndarray, jax.Array))}
    return {i: np.asarray(x) for i, x in arrays_by_place.items() if np.issubdtype(x.dtype, np.integer)}


def check_one_device(caller: str, target: str) -> None:
    """Raises UnsupportedError, which names `caller`, where a target has several devices."""
    if devices_of(target) > 1:
        raise UnsupportedError(
            f"{caller}: target {target!r} is a slice, and schedules count no communication; pass a chip and the part "
            "of one device, or take vishwamai.planning.step_time, which adds the collectives."
        )


def prepare(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: str,
    options: Mapping[str, str] | None = None,
) -> Job:
    """Traces `fn(*args, **kwargs)` for `target` and exports it, to be compiled with `options`.

    Raises:
        whatever `fn` raises while it is traced; DeviceError where libtpu or flatbuffers is missing; UnsupportedError
        where Pallas cannot lower a kernel, or the target is a slice of several devices.
    """
    target = Target.parse_tpu(target).name or target  # one program has one entry in the cache, however it is written
    check_one_device("inspect", target)
    leaves, tree = jax.tree.flatten((tuple(args), dict(kwargs)))
    arrays = [i for i, leaf in enumerate(leaves) if _is_array(leaf)]

    flat = over_arrays(fn, leaves, tree, arrays)
    placed = place([leaves[i] for i in arrays], target)
    shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, weak_type=s.weak_type) for s in placed]
    identity = libtpu.identity()
    with tracing_for(target), in_words(Target.parse_chip(target)):
        traced = jax.jit(flat).trace(*shapes)
        scalars = known.scalar_operands(traced.jaxpr, integers([leaves[index] for index in arrays]))
        with exact_export():
            exported = export.export(jax.jit(flat), platforms=["tpu"])(*shapes)
    try:
        blob = bytes(exported.serialize())
    except ImportError as error:
        raise DeviceError(f"inspecting a schedule needs flatbuffers: {install_line('aot')} ({error}).") from error
    total = sum(_bytes(s, s.sharding) for s in placed) + sum(_bytes(s, None) for s in exported.out_avals)
    digest = hashlib.sha256(exported.mlir_module_serialized)
    digest.update(json.dumps([FORMAT, target, identity], sort_keys=True).encode())
    return with_options(Job(blob, target, scalars, total, digest.hexdigest()[:32]), options or {})


def with_options(job: Job, options: Mapping[str, str]) -> Job:
    """The job of a program without options, to be compiled with some."""
    assert not job.options, "its fingerprint has options"
    if not options:
        return job
    text = json.dumps([job.fingerprint, sorted(options.items())])
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    return dataclasses.replace(job, fingerprint=fingerprint, options=dict(options))
