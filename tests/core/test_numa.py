"""Threads of the CPU kernels by memory node, on described machines of several nodes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Options are wrong on purpose here.
# pyright: reportArgumentType=false
from vishwamai import KernelConfig, KernelError, cli, kernel_config
from vishwamai.core import ffi
from vishwamai.core.config import without_effect
from vishwamai.core.environment import share_threads
from vishwamai.core.hardware.nodes import memory_nodes, usable_processors

ROOT = Path(__file__).parents[2]
TWO_PROCESSORS = len(getattr(os, "sched_getaffinity", lambda _: ())(0)) >= 2 and {0, 1} <= os.sched_getaffinity(0)


def _describe(folder, *cpulists):
    """A directory as Linux has it for the nodes of a machine."""
    for number, cpulist in enumerate(cpulists):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        (node / "cpulist").write_text(f"{cpulist}\n")
        (node / "meminfo").write_text(f"Node {number} MemTotal:       {4 << 20} kB\n")
        (node / "distance").write_text(" ".join("10" if i == number else "21" for i in range(len(cpulists))) + "\n")
    return str(folder)


def test_nodes_as_linux_describes_them(tmp_path):
    """Two sockets with hyper-threads, and memory without processors, such as CXL's."""
    nodes = memory_nodes(_describe(tmp_path, "0-3,8-11", "4-7,12-15", ""))
    assert [node.processors[:5] for node in nodes] == [(0, 1, 2, 3, 8), (4, 5, 6, 7, 12), ()]
    assert nodes[1].memory == 4 << 30 and nodes[1].distances == (21, 10, 21)
    usable = usable_processors(nodes)
    assert len(usable) == 3 and set(sum(usable, [])) == os.sched_getaffinity(0) & set(range(16))
    assert memory_nodes(str(tmp_path / "none"))[0].processors == tuple(sorted(os.sched_getaffinity(0)))


@pytest.mark.long  # a compiler
@pytest.mark.skipif(not TWO_PROCESSORS or shutil.which("g++") is None, reason="needs g++ and processors 0 and 1")
def test_threads_stay_on_nodes_and_begin_with_their_share(tmp_path):
    program = tmp_path / "nodes"
    sources = ["tests/cpp/nodes.cc", "src/vishwamai/core/cpp/parallel.cc"]
    subprocess.run(["g++", "-std=c++20", "-O1", "-pthread", "-Isrc", *sources, "-o", program], check=True, cwd=ROOT)
    done = subprocess.run([program], capture_output=True, text=True, timeout=60, env={"VISHWAMAI_CPU_THREADS": "4"})
    assert done.returncode == 0 and "nodes: ok" in done.stdout, done.stderr


_PROGRAM = """
import hashlib, jax, jax.numpy as jnp, numpy as np
from vishwamai import gemm, kernel_config, pack_weight, rms_norm
from vishwamai.core import ffi
x, w = (jnp.asarray(np.random.default_rng(i).standard_normal((300, 300)), jnp.float32) for i in range(2))
digests = set()
for options in ({}, {"threads": 1}, {"numa": 1}, {"numa": "off"}, {"threads": 2, "numa": 0}):
    with kernel_config(implementation="native_cpu", **options):
        out = gemm(x, w) + gemm(x, pack_weight(w)) + rms_norm(x, w[0])
        program = jax.jit(gemm).lower(x, w).as_text()
    assert ("vishwamai_threads" in program) == bool(options), options
    digests.add(hashlib.sha256(np.asarray(out).tobytes()).hexdigest())
print(len(digests), ffi.native().thread_limit())
"""


def _python(*arguments, **environment):
    rest = {name: value for name, value in os.environ.items() if name != "VISHWAMAI_CPU_THREADS"}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=rest | environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.turns(4)
@pytest.mark.skipif(ffi.why_not() is not None, reason="the native kernels are not built")
def test_no_placement_changes_a_bit(tmp_path):
    nodes = _describe(tmp_path, "0", "1")
    assert _python("-c", _PROGRAM, VISHWAMAI_CPU_NODES=nodes, OMP_NUM_THREADS="2,1").split() == ["1", "2"]


def test_doctor_lists_the_nodes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_CPU_NODES", _describe(tmp_path, "0-1,4", "2-3"))
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "memory node 0         processors 0-1,4, 4 GiB, distances 10 21" in out
    assert "memory node 1         processors 2-3, 4 GiB, distances 21 10" in out


@pytest.mark.parametrize(
    "before, after",
    [
        ({"OMP_NUM_THREADS": "3"}, ("3", "3", "3")),
        ({"OMP_NUM_THREADS": "4,2"}, ("4", "4,2", "4")),
        ({"VISHWAMAI_CPU_THREADS": "2", "OMP_NUM_THREADS": "5"}, ("2", "5", "2")),
        ({"PJRT_NPROC": "6"}, ("6", "6", "6")),
        ({}, (None, None, None)),
        ({"OMP_NUM_THREADS": "many"}, (None, "many", None)),
    ],
)
def test_one_variable_governs_all(monkeypatch, before, after):
    names = ("VISHWAMAI_CPU_THREADS", "OMP_NUM_THREADS", "PJRT_NPROC")
    environment = dict(before)
    monkeypatch.setattr(os, "environ", environment)
    share_threads()
    assert tuple(environment.get(name) for name in names) == after


def test_errors_and_what_has_no_effect():
    for options, words in (
        ({"threads": 0}, "`threads` is 0; pass a positive number"),
        ({"threads": True}, "`threads` is True"),
        ({"numa": "spread"}, "`numa` is 'spread'; pass the number of a memory node"),
        ({"numa": 99}, "`numa` is 99, but this machine has the memory nodes 0"),
    ):
        with pytest.raises(KernelError, match=words):
            KernelConfig(**options)
    assert len(without_effect(KernelConfig(threads=2, numa="off"), "tpu")) == 2
    with kernel_config(threads=2) as config:
        assert config.threads == 2 and ffi.PLACEMENT.value == (2, -1)
    assert ffi.PLACEMENT.value is None
