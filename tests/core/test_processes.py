"""Several processes as one: the same numbers as one process, and errors that say who is missing."""

import concurrent.futures
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import processes_inside
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.parallel import Processes, initialize, roll_call

NAMES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        return one.getsockname()[1]


def start(count: int, *arguments: object, devices: int = 2, **environment: str) -> list[subprocess.Popen[str]]:
    """Processes of `python ARGUMENTS`, which know one another by the environment."""
    address = f"127.0.0.1:{free_port()}"
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    found = []
    for index in range(count):
        known = dict(zip(NAMES, (address, str(count), str(index))))
        values = {**os.environ, "XLA_FLAGS": flags, "OMP_NUM_THREADS": "1", **known, **environment}
        values["PYTHONFAULTHANDLER"] = "1"
        command = [sys.executable, *map(str, arguments)]
        output = subprocess.PIPE
        found.append(subprocess.Popen(command, env=values, stdout=output, stderr=subprocess.STDOUT, text=True))
    return found


def finish(processes: list[subprocess.Popen[str]], timeout: float = 250, status: int = 0) -> list[str]:
    """The outputs of processes, which end with a status; of some that hang, where each of them was."""
    until = time.monotonic() + timeout
    try:
        texts = [one.communicate(timeout=max(1.0, until - time.monotonic()))[0] for one in processes]
    except subprocess.TimeoutExpired:
        for one in processes:
            one.send_signal(signal.SIGABRT)
        texts = [one.communicate()[0][-3000:] for one in processes]
        raise AssertionError("\n".join((f"no end in {timeout} s", *texts))) from None
    finally:
        for one in processes:
            one.kill()
    for one, text in zip(processes, texts):
        assert one.returncode == status, text[-3000:]
    return texts


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize(
    "name", ["pieces", "loading", "fsdp", "ring", "pipeline", "experts", "experts_of_slices", "experts_ragged"]
)
def test_processes_compute_what_one_computes(name, count, tmp_path):
    file = tmp_path / "found.npz"
    finish(start(count, processes_inside.__file__, name, file))
    expected = getattr(processes_inside, name)(2 * count)
    with np.load(file) as found:
        assert len(found.files) == len(expected) > 1
        for one, other in zip(found.values(), expected):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * np.abs(other).max())
    if name == "fsdp":
        for one, other in zip(processes_inside.fsdp(1), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6 * np.abs(other).max())


@pytest.mark.long
def test_slurm_is_found(tmp_path):
    """The variables that SLURM sets are enough."""
    address = free_port()
    program = (
        "from vishwamai.parallel import initialize; print(initialize(timeout=120)); import jax; print(jax.devices())"
    )
    processes = []
    for index in range(2):
        job = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
        values = {**job, "SLURM_PROCID": str(index), "JAX_COORDINATOR_PORT": str(address), "JAX_PLATFORMS": "cpu"}
        processes += start(1, "-c", program, **values, **dict.fromkeys(NAMES, ""))
    texts = finish(processes)
    for index, text in enumerate(texts):
        assert f"Processes(index={index}, count=2, coordinator='localhost:{address}')" in text
        assert text.count("CpuDevice") == 4


@pytest.mark.long
def test_gke_is_found():
    """The variables that GKE sets for two slices of one host each are enough."""
    program = (
        "import jax._src.clusters.cloud_tpu_cluster as cluster; cluster.running_in_cloud_tpu_vm = True; "
        "from vishwamai.parallel import initialize; print(initialize(timeout=120)); import jax; print(jax.devices())"
    )
    port, processes = free_port(), []
    for index in range(2):
        slices = {"MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080", "MEGASCALE_NUM_SLICES": "2"}
        values = {**slices, "MEGASCALE_SLICE_ID": str(index), "TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}
        values |= {"JAX_COORDINATOR_PORT": str(port), "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}
        processes += start(1, "-c", program, **values, **dict.fromkeys(NAMES, ""))
    for index, text in enumerate(finish(processes)):
        assert f"Processes(index={index}, count=2, coordinator='localhost:{port}')" in text
        assert text.count("CpuDevice") == 4


@pytest.mark.long
def test_a_process_that_dies_ends_the_others():
    """No process waits forever for one that is gone."""
    program = """
import os, sys, jax, jax.numpy as jnp
from vishwamai.parallel import initialize, make_mesh
from vishwamai.core.errors import ShapeError
me = initialize(timeout=120, heartbeat=5)
try:
    make_mesh("data=8")
except ShapeError as error:
    print(error, flush=True)
mesh = make_mesh("data=-1")
x = jax.device_put(jnp.ones(4), jax.NamedSharding(mesh, jax.P("data")))
total = jax.jit(lambda x: x.sum(), out_shardings=jax.NamedSharding(mesh, jax.P()))
print(float(total(x)), flush=True)
if me.index == 1:
    os._exit(1)
for _ in range(10000):
    float(total(x))
"""
    processes = start(2, "-c", program)
    try:
        texts = [one.communicate(timeout=300)[0] for one in processes]
    finally:
        for one in processes:
            one.kill()
    assert all(one.returncode != 0 for one in processes), texts
    for text in texts:
        assert "4.0" in text
        assert "hold 8 devices, but the list has 4; pass data=4" in text


def called(address: str, count: int, given: list[tuple[int, int]], timeout: float = 20.0) -> list[BaseException | None]:
    """What process 0 of `count` and those of (number, count) get from a roll call."""

    def one(process: int, count: int) -> None:
        if process == 0:
            roll_call.answer(address, count, timeout)
        else:
            roll_call.call(address, process, count, timeout)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return [f.exception() for f in [pool.submit(one, *each) for each in [(0, count), *given]]]


def test_a_roll_call_ends_when_all_are_there():
    port = free_port()
    for _ in range(2):  # the port is free afterwards
        assert called(f"127.0.0.1:{port}", 4, [(3, 4), (1, 4), (2, 4)]) == [None] * 4


def test_a_missing_process_is_named_to_all():
    found = called(f"127.0.0.1:{free_port()}", 4, [(2, 4)], timeout=0.4)
    for error in found:
        assert isinstance(error, DeviceError)
        assert "of 4 processes, processes 1, 3 did not come to 127.0.0.1" in str(error) and "within 0.4 s" in str(error)
    with pytest.raises(DeviceError, match="process 2 of 4 could not reach process 0 at 127.0.0.1:.* within 0.2 s"):
        roll_call.call(f"127.0.0.1:{free_port()}", 2, 4, 0.2)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([(1, 3)], "process 1 says that there are 3 processes, process 0 says 2"),
        ([(5, 2)], "two processes have the number 5"),
    ],
)
def test_processes_that_disagree_are_named(given, text):
    for error in called(f"127.0.0.1:{free_port()}", 2, given):
        assert isinstance(error, ConfigError) and text in str(error)


def test_strangers_do_not_disturb():
    """A connection that says something else is not a process."""
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        zero = pool.submit(roll_call.answer, f"127.0.0.1:{port}", 2, 20.0)
        while True:
            try:
                with socket.create_connection(("127.0.0.1", port)) as one:
                    one.sendall(b"GET / HTTP/1.1\n")
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        roll_call.call(f"127.0.0.1:{port}", 1, 2, 20.0)
        assert zero.exception() is None


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server, pytest.raises(DeviceError, match="process 0 cannot listen at port"):
        roll_call.answer(f"127.0.0.1:{server.getsockname()[1]}", 2, 1.0)


def test_alone_nothing_happens(monkeypatch):
    for name in [*NAMES, "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"]:
        monkeypatch.delenv(name, raising=False)
    assert initialize() == Processes(0, 1)
    assert initialize("127.0.0.1:80", 1, 0) == Processes(0, 1)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        (
            ("10.0.0.1:80", 2),
            {},
            ConfigError,
            "`process_id` of the processes is not known; pass it, or set JAX_PROCESS_ID",
        ),
        (
            ("10.0.0.1", 2, 0),
            {},
            ConfigError,
            "`coordinator` is '10.0.0.1'; pass the address of process 0 as host:port",
        ),
        (("10.0.0.1:80", 2, 2), {}, ConfigError, "`process_id` is 2 of `num_processes`=2; the numbers go from 0"),
        ((), {"timeout": 0.0}, ConfigError, "`timeout` is 0.0"),
        (("10.0.0.1:80", 2, 1), {}, DeviceError, "JAX has taken this machine's devices already"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, error, text, monkeypatch):
    for name in [*NAMES, "SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "KUBERNETES_SERVICE_HOST"]:
        monkeypatch.delenv(name, raising=False)
    assert jax.devices()
    with pytest.raises(error, match=text):
        initialize(*arguments, **options)


def test_a_wrong_variable_is_named(monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match="JAX_NUM_PROCESSES is 'two'; set it to a number"):
        initialize()


@pytest.mark.long
def test_the_example_is_the_same_script_everywhere():
    """Alone with four devices, and as two processes with two each: the same losses."""
    script = Path(__file__).parents[2] / "examples" / "train_on_many.py"
    alone = finish(start(1, script, "--steps", 3, devices=4, **dict.fromkeys(NAMES, "")))[0]
    both = finish(start(2, script, "--steps", 3))
    assert "4 devices in 1 processes" in alone and "4 devices in 2 processes" in both[0]
    losses = [[float(x) for x in re.findall(r"loss ([0-9.]+)", text)] for text in (alone, both[0])]
    assert len(losses[0]) == 3
    np.testing.assert_allclose(losses[1], losses[0], atol=1.1e-4)  # four digits are printed
    assert "loss" not in both[1]
