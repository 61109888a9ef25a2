"""JAX's private names. No other file of the package uses them (ruff checks it), so a new version of JAX breaks this
file only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import source_info_util
from jax._src.cloud_tpu_init import get_tpu_library_path
from jax._src.clusters import ClusterEnv
from jax._src.config import jax_platforms
from jax._src.distributed import global_state
from jax._src.interpreters.ad import LinearizeTracer
from jax._src.mesh import get_concrete_mesh
from jax._src.sharding import IndivisibleError
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.xla_bridge import backends_are_initialized
from jax.sharding import Mesh, PartitionSpec
from jaxlib import xla_client


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


def is_linearized(arrays: Any) -> bool:
    """Whether `jax.linearize` traces one of the arrays; under `jax.grad` and `jax.vjp` too, which trace with
    the same tracers.
    """

    def linearized(x: Any) -> bool:
        return isinstance(x, LinearizeTracer) and (not x._trace.is_vjp or linearized(x.primal))

    return any(map(linearized, jax.tree.leaves(arrays)))


def source_of(eqn: Any) -> str:
    """The line of the caller's program that wrote an equation: "model.py:31 (attend)"."""
    return source_info_util.summarize(eqn.source_info).rpartition("/")[2] or "an unknown line"


def concrete_mesh() -> Mesh:
    """The mesh that `jax.set_mesh` has put in force, inside `jit` too; without axes where there is none."""
    return get_concrete_mesh()
