"""Many processes as one JAX: each runs the same program, and `jax.devices()` has the devices of all of them."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from vishwamai.core import jax_private
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.parallel import roll_call

_ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
      index: number of this process, from 0. count: number of processes.
      coordinator: address of process 0, host:port; None for one process.
    """

    index: int
    count: int
    coordinator: str | None = None


@checked
def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: float = 300.0,
    heartbeat: float = 100.0,
) -> Processes:
    """Joins this process with the others, before anything else asks JAX for devices.

    The arguments come first, then the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID, then what JAX finds by itself: a TPU pod, SLURM, Open MPI, Kubernetes. Where there is none of these,
    this is the only process, and nothing happens: the same script runs on a laptop.

    All processes are counted first (`roll_call`), so that a missing one is an error that names it. A process that dies
    later ends the others: a collective fails as soon as its connection closes, and JAX ends every process that has
    waited `heartbeat` seconds.

    Args:
      coordinator: host:port of process 0, which has to be free there.
      num_processes: how many there are.
      process_id: which this one is, from 0.
      timeout: seconds to wait for the others.
      heartbeat: seconds of silence after which JAX takes a process for dead.

    Returns:
      This process and their number.

    Raises:
      ConfigError: some of the three are missing, a value is impossible, or the processes disagree.
      DeviceError: others did not come in time, or JAX has already taken its devices.

    >>> initialize()  # doctest: +SKIP
    Processes(index=0, count=1, coordinator=None)
    """
    if not (0 < timeout <= 1e6 and 1 <= heartbeat <= 1e6):
        raise ConfigError(
            f"initialize: `timeout` is {timeout} and `heartbeat` {heartbeat}; pass numbers of seconds, "
            "the heartbeat at least 1."
        )
    coordinator = _of_environment("coordinator") if coordinator is None else coordinator
    num_processes = _of_environment("num_processes") if num_processes is None else num_processes
    process_id = _of_environment("process_id") if process_id is None else process_id
    cluster = jax_private.cluster_of_processes(coordinator, num_processes, process_id, round(timeout))
    address, count, index, gpus = cluster
    missing = [name for name, value in zip(_ENVIRONMENT, cluster) if value is None]
    if len(missing) == len(_ENVIRONMENT):
        return Processes(0, 1)
    if address is None or count is None or index is None:
        raise ConfigError(
            f"initialize: {', '.join(f'`{name}`' for name in missing)} of the processes is not known; pass it, or set "
            f"{', '.join(_ENVIRONMENT[name] for name in missing)}."
        )
    roll_call.split_address(address)
    if count < 1 or not 0 <= index < count:
        raise ConfigError(
            f"initialize: `process_id` is {index} of `num_processes`={count}; the numbers go from 0 to the "
            "count less 1."
        )
    if jax.distributed.is_initialized():  # a second call answers what the first one made
        return Processes(jax.process_index(), jax.process_count(), address)
    if count == 1:
        return Processes(0, 1)
    if jax_private.devices_are_taken():
        raise DeviceError(
            "initialize: JAX has taken this machine's devices already; call it before jax.devices() and before any "
            "array is made."
        )
    if index == 0:
        roll_call.answer(address, count, timeout)
    else:
        roll_call.call(address, index, count, timeout)
    jax.distributed.initialize(
        address,
        count,
        index,
        local_device_ids=gpus,
        cluster_detection_method="deactivate",  # found above already; JAX must not look again and disagree
        initialization_timeout=max(1, round(timeout)),
        heartbeat_timeout_seconds=round(heartbeat),
    )
    return Processes(index, count, address)


def _of_environment(name: str) -> Any:
    text = os.environ.get(_ENVIRONMENT[name])
    if not text:
        return None
    if name == "coordinator":
        return text
    if not text.isdecimal():
        raise ConfigError(f"initialize: {_ENVIRONMENT[name]} is {text!r}; set it to a number.")
    return int(text)
