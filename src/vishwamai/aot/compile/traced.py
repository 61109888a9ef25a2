"""A traced program: exported here for its target, and serialised for the compiler's process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.child import Question
from vishwamai.aot.compile.compiled import in_words, place, tracing_for
from vishwamai.aot.compile.known import scalar_operands
from vishwamai.core.errors import DeviceError
from vishwamai.core.installing import install_line
from vishwamai.core.target import Target
from vishwamai.core.types import Device, PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


ScalarOperands = Mapping[str, Sequence[Mapping[int, np.ndarray]]]

FORMAT = 5
"""Counts up when what the compiler's process answers, or what the cache has of it, changes."""

_EXPORTING = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Argument:
    """One array argument of a program.

    Attributes:
      path: path in the caller's arguments, such as "[0].params['embed']".
      nbytes: bytes of one device's part of it, without padding.
      donated: the program may write its results there.
      place: its sharding, as `write_sharding` writes it; None on one device.
    """

    path: str
    nbytes: int
    donated: bool
    place: str | None


@dataclasses.dataclass(frozen=True)
class Program:
    """A traced program for one target.

    Attributes:
      name: name of the function. target: target of the program.
      blob: the serialised export over the flat array arguments.
      arguments: the arrays, in the blob's order.
      fingerprint: digest of the program, the target and the versions that compile it.
      result_bytes: bytes of the results, of all devices together.
      read_scalars: computes `scalars`.
      ticks: the table of the schedule by which the stages of a pipeline run, `parallel.pipeline.ticks.Ticks.table`.
      options: options of the compiler, with which the program is compiled.
    """

    name: str
    target: str
    blob: bytes = dataclasses.field(repr=False)
    arguments: tuple[Argument, ...] = dataclasses.field(repr=False)
    fingerprint: str = ""
    result_bytes: int = 0
    read_scalars: Callable[[], ScalarOperands] = dataclasses.field(default=dict, repr=False, compare=False)
    ticks: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    options: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)

    @functools.cached_property
    def scalars(self) -> ScalarOperands:
        """Scalar operands of kernels that are known ahead, by kernel, call and operand; they steer the program's time,
        not what is compiled.
        """
        return self.read_scalars()

    def with_options(self, options: Mapping[str, str]) -> Program:
        """The program of a trace, to be compiled with options of the compiler."""
        assert not self.options, "its fingerprint has options"
        if not options:
            return self
        text = json.dumps([self.fingerprint, sorted(options.items())])
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
        return dataclasses.replace(self, options=dict(options), fingerprint=fingerprint)

    def question(self, directory: pathlib.Path) -> Question:
        """What the compiler's process is asked about the program (`aot.worker`); its export lies in a directory."""
        blob = directory / "program"
        blob.write_bytes(self.blob)
        return {
            "blob": str(blob),
            "target": self.target,
            "donated": [argument.donated for argument in self.arguments],
            "places": [argument.place for argument in self.arguments],
            "options": dict(self.options),
        }

    @property
    def io_bytes(self) -> int:
        """Bytes of the arguments and results of a program for one device."""
        return sum(argument.nbytes for argument in self.arguments) + self.result_bytes

    @property
    def limit(self) -> int:
        """HBM that the compiler lets one device use, in bytes."""
        return Target.parse_chip(self.target).hbm_usable_bytes


def trace(fn: Callable[..., object], *args: object, target: str, **kwargs: object) -> Program:
    """Traces `fn(*args, **kwargs)` for a target; nothing is compiled.

    Args: as `vishwamai.aot.compile_for`. A jitted function's donated arguments stay donated. What arrays of integers
      hold, such as page tables, tells how often the loops of kernels run.

    Raises:
      DeviceError: libtpu or flatbuffers is missing, or the target is unknown.
      UnsupportedError: Pallas cannot lower a kernel.
      Whatever `fn` raises while it is traced.
    """
    return trace_call(fn, args, kwargs, target)


def trace_call(fn: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], target: str) -> Program:
    """`trace`, with the arguments of `fn` as a sequence and a mapping."""
    target = Target.parse_tpu(target).name or target
    chip = Target.parse_chip(target)
    call = tuple(args), dict(kwargs)
    operands = jax.tree.leaves(call)
    args, kwargs = _one_mesh(place(call, target))
    with tracing_for(target), in_words(chip):
        donated = _donated(fn, args, kwargs)
        leaves, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
        arrays = [i for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        flat = _over_arrays(fn, [leaf for _, leaf in leaves], tree, arrays)
        many = len(libtpu.devices_for(target)) > 1
        shapes = [leaves[i][1] for i in arrays]
        if not many:
            shapes = [jax.ShapeDtypeStruct(s.shape, s.dtype, weak_type=s.weak_type) for s in shapes]
        jitted = jax.jit(flat)
        jaxpr, values = jitted.trace(*shapes).jaxpr, _integers([operands[i] for i in arrays])
        with _exact_export():
            exported = export.export(jitted, platforms=["tpu"])(*shapes)
    try:
        blob = bytes(exported.serialize())
    except ImportError as error:
        raise DeviceError(f"exporting a program needs flatbuffers: {install_line('aot')} ({error}).") from error
    arguments = tuple(
        Argument(
            _path(leaves[i][0]),
            _nbytes(leaves[i][1]),
            jax.tree_util.keystr(leaves[i][0]) in donated,
            write_sharding(leaves[i][1].sharding) if many else None,
        )
        for i in arrays
    )
    digest = hashlib.sha256(exported.mlir_module_serialized)
    about = [FORMAT, target, libtpu.identity(), [(a.donated, a.place) for a in arguments]]
    digest.update(json.dumps(about, sort_keys=True).encode())
    results = sum(_size(result.shape, result.dtype) for result in exported.out_avals)
    fingerprint = digest.hexdigest()[:32]
    return Program(flat.__name__, target, blob, arguments, fingerprint, results, lambda: scalar_operands(jaxpr, values))


@contextlib.contextmanager
def _exact_export() -> Iterator[None]:
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


def _over_arrays(
    fn: Callable[..., object], leaves: Sequence[object], tree: object, arrays: Sequence[int]
) -> Callable[..., tuple[jax.Array, ...]]:
    """`fn` as a function of the arrays among its arguments alone, which gives a tuple of arrays.

    Args:
        leaves, tree: the flattened pair of positional and keyword arguments; `arrays`: which of the leaves are arrays.
    """

    def flat(*values: jax.Array) -> tuple[jax.Array, ...]:
        filled = list(leaves)
        for index, value in zip(arrays, values):
            filled[index] = value
        positional, named = jax.tree.unflatten(tree, filled)
        return tuple(jax.tree.leaves(fn(*positional, **named)))

    flat.__name__ = getattr(fn, "__name__", "program").replace("<lambda>", "program")
    return flat


def _integers(arrays: Sequence[object]) -> dict[int, np.ndarray]:
    """Those of a function's flat arguments that are arrays of integers, not shapes alone, by position."""
    arrays_by_place = {i: x for i, x in enumerate(arrays) if isinstance(x, (np.ndarray, jax.Array))}
    return {i: np.asarray(x) for i, x in arrays_by_place.items() if np.issubdtype(x.dtype, np.integer)}


def _donated(fn: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> set[str]:
    """Paths of the donated arguments of a jitted function."""
    if not hasattr(fn, "trace"):
        return set()
    leaves = jax.tree_util.tree_leaves_with_path(
        fn.trace(*args, **kwargs).args_info, is_leaf=lambda leaf: hasattr(leaf, "donated")
    )
    return {jax.tree_util.keystr(path) for path, leaf in leaves if leaf.donated}


def _path(path: jax.tree_util.KeyPath) -> str:
    """The path without the level that parts positional from keyword arguments."""
    return jax.tree_util.keystr(path[1:])


def _nbytes(leaf: Any) -> int:
    return _size(leaf.sharding.shard_shape(leaf.shape), leaf.dtype)


def _size(shape: Sequence[int], dtype: DTypeLike) -> int:
    return math.prod(shape) * getattr(dtype, "itemsize", 4)


def _one_mesh(tree: PyTree) -> PyTree:
    """The placed arguments, with those that are whole on every device on the mesh of the others."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree)]
    split = [s.mesh for s in shardings if isinstance(s, NamedSharding) and any(s.spec)]
    if not split:
        return tree
    replicated = NamedSharding(split[0], PartitionSpec())

    def replicate(leaf: Any) -> object:
        sharding = getattr(leaf, "sharding", None)
        return (
            leaf.update(sharding=replicated) if isinstance(sharding, NamedSharding) and not any(sharding.spec) else leaf
        )

    return jax.tree.map(replicate, tree)


def write_sharding(sharding: NamedSharding) -> str:
    """A sharding over all devices of a target as text, which `read_sharding` reads in another process."""
    mesh: Any = sharding.mesh
    types, order = [kind.name for kind in mesh.axis_types], [int(device.id) for device in mesh.devices.flat]
    return json.dumps([list(mesh.axis_names), list(mesh.shape.values()), types, order, list(sharding.spec)])


def read_sharding(text: str, devices: tuple[Device, ...]) -> NamedSharding:
    """The sharding that `write_sharding` wrote, over these devices."""
    names, sizes, types, order, spec = json.loads(text)
    by_id = {int(device.id): device for device in devices}
    grid = np.asarray([by_id[i] for i in order], dtype=object).reshape(sizes)
    mesh = Mesh(grid, tuple(names), axis_types=tuple(AxisType[kind] for kind in types))
    return NamedSharding(mesh, PartitionSpec(*(tuple(axis) if isinstance(axis, list) else axis for axis in spec)))


def devices_in_order(program: Program) -> tuple[Device, ...]:
    """The devices of a program in the order of its mesh, by which the compiler numbers them."""
    devices = libtpu.devices_for(program.target)
    places = (argument.place for argument in program.arguments if argument.place is not None)
    first = next(places, None)
    if first is None:
        return devices
    mesh = read_sharding(first, devices).mesh
    assert isinstance(mesh, Mesh)  # `write_sharding` writes of no other
    return tuple(mesh.devices.flat)
