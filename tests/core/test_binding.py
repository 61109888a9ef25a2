"""`--threads` and `--numa`: which processors and memory nodes a process gets, and that it stays there."""

import json
import os
import subprocess
import sys

import pytest

import world
from test_numa import _describe
from vishwamai import DeviceError
from vishwamai.cli import main, model
from vishwamai.core.errors import ConfigError
from vishwamai.core.hardware import binding
from vishwamai.core.hardware.binding import Binding, choose

LINUX = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="processors are bound on Linux")


@pytest.fixture
def two_sockets(tmp_path, monkeypatch):
    """Two nodes of four cores with two threads each, and memory without processors; the directory of its cores."""
    nodes = _describe(tmp_path / "nodes", "0-3,8-11", "4-7,12-15", "")
    monkeypatch.setenv("VISHWAMAI_CPU_NODES", nodes)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for processor in range(16):
        topology = tmp_path / f"cores/cpu{processor}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{processor % 8},{processor % 8 + 8}\n")
    return str(tmp_path / "cores")


def test_choice_takes_cores_before_their_second_threads_and_nodes_in_turn(two_sockets):
    for threads, numa, expected in (
        (4, None, Binding((0, 1, 4, 5), 4)),
        (3, None, Binding((0, 1, 4), 3)),
        (4, "1", Binding((4, 5, 6, 7), 4, (1,))),
        (6, "0", Binding((0, 1, 2, 3, 8, 9), 6, (0,))),
        (None, "0", Binding((0, 1, 2, 3, 8, 9, 10, 11), None, (0,))),
        (2, "0-1", Binding((0, 4), 2)),
        (2, "interleave", Binding((0, 4), 2, (0, 1, 2), True)),
    ):
        assert choose(threads, numa, two_sockets) == expected, (threads, numa)
    assert str(choose(4, "1", two_sockets)) == "bound to processors 4-7, 4 threads, memory first from node 1"


def test_choice_is_among_the_processors_of_the_process(two_sockets, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 10, 13})
    assert choose(2, None, two_sockets).processors == (2, 13)
    assert choose(3, None, two_sockets).processors == (2, 3, 13)
    with pytest.raises(ConfigError, match=r"--threads is 4, but this process may use 3 processors of node 0; pass"):
        choose(4, "0", two_sockets)


def test_wrong_values_are_errors_before_anything_is_loaded(two_sockets, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(model, "fetch", lambda *_: pytest.fail("fetched"))
    monkeypatch.setattr(binding, "apply", lambda *_: pytest.fail("bound"))
    text = tmp_path / "a.txt"
    text.write_text("some text")
    commands = (["serve", "none"], ["generate", "none", "--prompt", "a"], ["evaluate", "none", "--text", str(text)])
    for command in commands:
        for words, complaint in (
            (["--threads", "17"], "--threads is 17, but this process may use 16 processors; pass at most 16."),
            (["--numa", "2"], "--numa is 2, but the memory nodes with processors for this process are 0-1; pass some"),
            (["--numa", "0-3"], "--numa is 0-3, but"),
            (["--numa", "1-0"], "--numa is 1-0, but"),
        ):
            assert main([*command, *words]) == 2
            assert complaint in capsys.readouterr().err
    for words, complaint in (
        (["--threads", "0"], "'0' is not a number of processors"),
        (["--threads", "2.5"], "'2.5' is not a number of processors"),
        (["--numa", "all"], "'all' is neither interleave nor numbers of memory nodes"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["serve", "none", *words])
        assert stop.value.code == 2 and complaint in capsys.readouterr().err


def test_a_policy_that_the_system_denies_is_said(monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None, raising=False)
    monkeypatch.setattr(binding, "_set_policy", lambda *_: "Operation not permitted")
    assert "Operation not permitted; memory comes from the node" in str(binding.apply(Binding((0,), None, (0,))))
    with pytest.raises(DeviceError, match="cannot be set: Operation not permitted; in a container, add the capability"):
        binding.apply(Binding((0,), None, (0,), True))
    monkeypatch.delattr(os, "sched_setaffinity")
    with pytest.raises(DeviceError, match="needs Linux; set VISHWAMAI_CPU_THREADS instead"):
        binding.apply(Binding((0,)))


_BOUND = """
import os, re, threading
from vishwamai.core.hardware import binding
release, before = threading.Event(), threading.Thread(target=lambda: release.wait())
before.start()
chosen = binding.choose(1, "interleave")
complaint = binding.apply(chosen)
masks = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
release.set()
assert complaint is None and masks == [set(chosen.processors)] * 2 and len(chosen.processors) == 1, masks
assert os.environ["PJRT_NPROC"] == os.environ["VISHWAMAI_CPU_THREADS"] == os.environ["OMP_NUM_THREADS"] == "1"
if os.path.exists("/proc/self/numa_maps"):
    assert "interleave:" in open("/proc/self/numa_maps").read()
"""


def _outcome(*arguments, **environment):
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done


@LINUX
def test_threads_that_exist_are_bound_too():
    if binding._set_policy(0, ()) is not None:  # the default policy, as it is
        pytest.skip("the system denies set_mempolicy")
    _outcome("-c", _BOUND)


_GENERATE = """
import json, os, sys
from vishwamai import cli
from vishwamai.core import ffi
assert cli.main(sys.argv[1:]) == 0
limit = None if ffi.why_not() else ffi.native().thread_limit()
masks = [os.sched_getaffinity(int(thread)) for thread in os.listdir("/proc/self/task")]
print(json.dumps([limit, max(map(len, masks))]))
"""


@LINUX
@pytest.mark.long
def test_generate_runs_on_its_processors(tmp_path):
    words = ["generate", world.tiny("llama2"), "--token-ids", "1,2,3", "--max-new-tokens", "2", "--max-length", "64"]
    words += ["--threads", "1", "--compile", "lazy", "--no-keep-packed", "--temperature", "0"]
    done = _outcome("-c", _GENERATE, *map(str, words))
    limit, most = json.loads(done.stdout.splitlines()[-1])
    assert limit in (1, None) and most == 1
    assert "bound to processors" in done.stderr and ", 1 threads" in done.stderr
