"""JAX's private names. No other file of the package uses them (ruff checks it), so a new version of JAX breaks this
file only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util, stages
from jax._src.cloud_tpu_init import get_tpu_library_path
from jax._src.clusters import ClusterEnv
from jax._src.config import jax_platforms
from jax._src.distributed import global_state
from jax._src.interpreters.ad import LinearizeTracer
from jax._src.interpreters.pxla import UnloadedMeshExecutable
from jax._src.mesh import get_concrete_mesh
from jax._src.sharding import IndivisibleError
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.xla_bridge import backends_are_initialized
from jax.core import ShapedArray
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxlib import xla_client

from vishwamai.core.types import AnyArray


def partition_spec_of(sharding: Any, mesh: Mesh) -> PartitionSpec | None:
    """The partition spec of XLA's own form of a sharding; None if it splits by a part of a mesh axis, which no spec can
    express.
    """
    try:
        return parse_flatten_op_sharding(sharding._to_xla_hlo_sharding(0), mesh)[0]
    except IndivisibleError:
        return None


def cluster_of_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: int
) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """What the environment (TPU pod, SLURM, Open MPI, Kubernetes) says of the processes, where the arguments do not:
    the address of process 0, how many there are, which this one is, and the numbers of its GPUs (None for all).
    """
    return ClusterEnv.auto_detect_unset_distributed_params(coordinator, num_processes, process_id, None, None, timeout)


def devices_are_taken() -> bool:
    """Whether JAX has asked the platform for its devices, after which no process can join others."""
    return backends_are_initialized()


def load_libtpu_as_compiler() -> None:
    """Loads libtpu into a process that is told to use no TPU (by JAX_PLATFORMS), without its profiler.

    JAX loads the profiler with it, whose interface may be newer than jaxlib's: the process's next `jax.profiler.trace`
    is then a segmentation fault (jax 0.10.2 with libtpu 0.0.51).
    """
    platforms = jax_platforms.value
    path = get_tpu_library_path()
    if platforms and path and "tpu" not in platforms.split(",") and not xla_client.pjrt_plugin_loaded("tpu"):
        xla_client.load_pjrt_plugin_dynamically("tpu", path)


def _connection() -> Any:
    """To process 0, of a process that `vishwamai.parallel.initialize` joined to others."""
    return global_state.client


def tell(key: str, text: str) -> None:
    """Tells the processes that `vishwamai.parallel.initialize` joined a text by a key, which is used once."""
    _connection().key_value_set(key, text)


def heard(key: str) -> str:
    """What a process tells by a key, however long that takes; an error where the connection to process 0 closes."""
    return _connection().blocking_key_value_get(key, 30 * 24 * 3600 * 1000)


def is_linearized(arrays: object) -> bool:
    """Whether `jax.linearize` traces one of the arrays; under `jax.grad` and `jax.vjp` too, which trace with
    the same tracers.
    """

    def linearized(x: AnyArray) -> bool:
        return isinstance(x, LinearizeTracer) and (not x._trace.is_vjp or linearized(x.primal))

    return any(map(linearized, jax.tree.leaves(arrays)))


def source_of(eqn: Any) -> str:
    """The line of the caller's program that wrote an equation: "model.py:31 (attend)"."""
    return source_info_util.summarize(eqn.source_info).rpartition("/")[2] or "an unknown line"


def concrete_mesh() -> Mesh:
    """The mesh that `jax.set_mesh` has put in force, inside `jit` too; without axes where there is none."""
    return get_concrete_mesh()


def serialized(compiled: stages.Compiled) -> tuple[bytes, dict[str, object]] | None:
    """A compiled program as XLA writes it, and what JAX adds to it, as values for JSON; `deserialized` reads them.

    `jax.experimental.serialize_executable` writes the same as a pickle.

    Returns:
      None for a program that needs more: effects, calls of the host, constants of its own.
    """
    parts = getattr(compiled._executable, "_unloaded_executable", None)
    if parts is None or compiled._params.const_args or parts.mut or parts.pgle_profiler:
        return None
    more = (parts.unordered_effects, parts.ordered_effects, parts.host_callbacks, parts.keepalive)
    if any(more):
        return None
    specs = [[_spec(sharding) for sharding in group] for group in (parts.input_shardings, parts.output_shardings)]
    if _UNKNOWN in (*specs[0], *specs[1]):
        return None
    donated = [i for i, info in enumerate(jax.tree.leaves(compiled.args_info)) if info.donated]
    header = {
        "name": parts.name,
        "committed": parts.committed,
        "inputs": sorted(parts.kept_var_idx),
        "input_types": [_named(aval) for aval in parts.input_avals],
        "output_types": [_named(aval) for aval in parts.output_avals],
        "donated": donated,
    }
    if len(parts.device_list) > 1:
        header |= {"input_specs": specs[0], "output_specs": specs[1]}
    executable = parts.xla_executable
    if isinstance(executable, xla_client.LoadedExecutable):
        return parts.backend.serialize_executable(executable), header
    return executable.serialize(), header  # of devices that are described only


_UNKNOWN = ["?"]


def _spec(sharding: Any) -> list[Any] | None:
    """A sharding over a mesh for JSON, None on one device, `_UNKNOWN` of any other kind."""
    if isinstance(sharding, NamedSharding):
        return [list(axis) if isinstance(axis, tuple) else axis for axis in sharding.spec]
    return None if isinstance(sharding, SingleDeviceSharding) else _UNKNOWN


def deserialized(executable: bytes, header: dict[str, Any], place: object, in_tree: Any, out_tree: Any) -> Any:
    """The compiled program of what `serialized` gave.

    Args:
      executable: bytes that XLA wrote. They are machine code: their writer decides what the program does.
      header: values that `serialized` gave.
      place: device of the client that runs the program, or the mesh of a program of several.
      in_tree: structure of its arguments, `((...), {})`.
      out_tree: structure of its outputs.
    """
    mesh = place if isinstance(place, Mesh) else None
    devices = xla_client.DeviceList((place,) if mesh is None else tuple(mesh.devices.flat))
    client = devices[0].client
    input_shardings, output_shardings = (
        [_placed(spec, place) for spec in header.get(f"{name}_specs") or [None] * len(header[f"{name}_types"])]
        for name in ("input", "output")
    )
    inputs = [_aval(*entry) for entry in zip(header["input_types"], input_shardings, strict=True)]
    outputs = [_aval(*entry) for entry in zip(header["output_types"], output_shardings, strict=True)]
    if len(outputs) != out_tree.num_leaves or len(inputs) != len(header["inputs"]):
        raise ValueError("the header has another number of arrays than the program")
    parts = UnloadedMeshExecutable(
        xla_executable=client.deserialize_executable(executable, executable_devices=devices),
        device_list=devices,
        backend=client,
        input_avals=inputs,
        input_shardings=input_shardings,
        output_avals=outputs,
        output_shardings=output_shardings,
        committed=bool(header["committed"]),
        name=str(header["name"]),
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(header["inputs"]),
        mut=None,
        xla_in_layouts=[None] * len(inputs),
        dispatch_in_layouts=[None] * len(inputs),
        xla_out_layouts=[None] * len(outputs),
        all_args_info=None,
        pgle_profiler=None,
    )
    avals = dict(zip(header["inputs"], inputs))
    unused = ShapedArray((), jax.numpy.float32)
    infos = [stages.ArgInfo(avals.get(i, unused), i in header["donated"]) for i in range(in_tree.num_leaves)]
    return stages.Compiled(parts.load(), [], in_tree.unflatten(infos), out_tree)


def _named(aval: Any) -> list[object]:
    return [list(aval.shape), aval.dtype.name, aval.weak_type]


def _placed(spec: list[object] | None, place: object) -> NamedSharding | SingleDeviceSharding:
    if not isinstance(place, Mesh):
        return SingleDeviceSharding(place)
    axes = (tuple(axis) if isinstance(axis, list) else axis for axis in spec or ())
    return NamedSharding(place, PartitionSpec(*axes))


def _aval(entry: Any, sharding: NamedSharding | SingleDeviceSharding) -> ShapedArray:
    shape, dtype, weak_type = entry
    more: dict[str, Any] = {}
    if isinstance(sharding, NamedSharding):  # explicit axes are part of an array's type
        more = {"sharding": NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)}
    return ShapedArray(tuple(shape), jax.numpy.dtype(dtype), weak_type=weak_type, **more)
