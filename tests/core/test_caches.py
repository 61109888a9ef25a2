"""What is kept between runs: where, how it is written, and what happens where it cannot be."""

import functools
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from vishwamai.aot.compile import answers
from vishwamai.aot.compile.child import Child
from vishwamai.aot.compile.traced import Program
from vishwamai.aot.schedule import dump
from vishwamai.aot.tuning import tables
from vishwamai.cli import main
from vishwamai.core import caches, tuning
from vishwamai.core.errors import CacheWarning, ConfigError, DeviceError, KernelError
from vishwamai.core.target import Target

JOBS = [Program("program", "v5e", b"program", (), digit * 32) for digit in "ab"]
NAMED = ("HOME", "XDG_CACHE_HOME", "VISHWAMAI_TUNING_DIR", "VISHWAMAI_AOT_CACHE", "VISHWAMAI_CACHE_MIB")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in NAMED:
        monkeypatch.delenv(name, raising=False)

    def forget():
        caches.warn_once.cache_clear()
        caches._directory.cache_clear()
        tuning.reload()

    forget()
    yield
    forget()


@pytest.fixture
def homeless(monkeypatch):
    """A container's user: HOME is not set, and /etc/passwd has no entry."""

    def nobody(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)


@pytest.fixture
def aot(monkeypatch, tmp_path):
    root = tmp_path / "aot"
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(root))
    return root


@pytest.fixture
def compiled(monkeypatch):
    """The jobs that the compiler's process got, which rejects each."""
    seen = []

    def answer(process, question):
        seen.append(int(question["out"][-1]))
        return {"rejected": "too large", "problem": None}

    monkeypatch.setattr(Child, "ask", answer)
    return seen


def rejections(jobs=JOBS):
    found = list(dump.dump_many(jobs))
    assert all(isinstance(error, KernelError) and "too large" in str(error) for error in found)
    return len(found)


def test_directories(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    assert str(caches.cache_directory("jax")) == "/home/me/.cache/vishwamai/jax"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert str(caches.cache_directory("aot")) == "/home/me/.cache/vishwamai/aot"
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert str(caches.cache_directory("tuning")) == "/var/cache/vishwamai/tuning"
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", "mine")
    assert str(tuning.user_directory()) == "mine"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_nothing_is_kept_and_that_is_said_once(compiled):
    assert [caches.cache_directory(cache) for cache in caches.CACHES] == [None] * 4
    with pytest.warns(CacheWarning, match="no home directory to keep the aot cache in; set VISHWAMAI_AOT_CACHE"):
        assert rejections() == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert rejections() == 2
    assert compiled == [0, 1, 0, 1]
    with pytest.warns(CacheWarning, match="answers are not kept"):
        assert not answers.write("plans", "k" * 32, {}) and answers.read("plans", "k" * 32) is None


@pytest.mark.usefixtures("homeless")
def test_without_a_home_kernels_are_chosen(capsys):
    import jax
    import jax.numpy as jnp

    import vishwamai

    x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    found = vishwamai.explain(vishwamai.rms_norm, x, jax.ShapeDtypeStruct((512,), jnp.bfloat16), target="v5e")
    assert "pallas_tpu" in str(found)
    with pytest.raises(DeviceError, match="set VISHWAMAI_TUNING_DIR to a directory"):
        tuning.writable_directory(None)
    assert main(["cache"]) == 0
    assert capsys.readouterr().out.count("no home directory") == 4


def test_dumps_are_kept(aot, compiled):
    assert rejections() == rejections() == 2
    assert compiled == [0, 1]
    assert sorted(path.name for path in aot.iterdir()) == ["a" * 32, "b" * 32]


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"rejected": "x"}', b'{"memory": {}}', b"\xff"])
def test_a_damaged_dump_is_made_again(aot, compiled, content):
    rejections()
    result = aot / JOBS[0].fingerprint / "result.json"
    if content is None:
        result.unlink()
        assert rejections() == 2  # the rest of it is not an entry
    else:
        result.write_bytes(content)
        with pytest.warns(CacheWarning, match="is damaged .* compiled again"):
            assert rejections() == 2
    assert compiled == [0, 1, 0]
    assert rejections() == 2 and len(compiled) == 3


def test_a_cache_that_cannot_be_written_costs_time_only(aot, compiled):
    aot.write_text("in the way")
    with pytest.warns(CacheWarning, match="programs are not kept: .*VISHWAMAI_AOT_CACHE names another directory"):
        assert rejections() == 2
    assert rejections() == 2 and compiled == [0, 1, 0, 1]


def test_a_full_disk_leaves_the_old_file(monkeypatch, tmp_path):
    path = tmp_path / "table.json"
    caches.write(path, "old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space .*table\.json"):
        caches.write(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def _writer(directory, start):
    for index in range(start, start + 20):
        tables.write(directory, "v5e", "toy", "rows", str(index), {"config": {}})


def test_two_tuners_lose_no_entry(tmp_path):
    with ThreadPoolExecutor(2) as pool:  # a lock is of an open file, so it holds between threads as between processes
        list(pool.map(functools.partial(_writer, tmp_path), (0, 20)))
    assert len(tables.read(tmp_path / "v5e" / "toy.json")["rows"]) == 40


def test_tables_that_cannot_be_written_are_an_error_before_the_search(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DeviceError, match="no table can be written: .*VISHWAMAI_TUNING_DIR"):
        tuning.writable_directory(tmp_path / "file" / "tables")
    assert tuning.writable_directory(tmp_path / "new") == tmp_path / "new"
    assert list((tmp_path / "new").iterdir()) == []


def test_a_tuning_directory_that_is_a_file_is_left_out(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "file"))
    assert "norm" not in tuning._folders(tuning.user_directory())
    assert tuning._tables("v5e", "norm", tuning.user_directory())[0] == {}
    assert Target.parse("v5e").tpu.name in tuning._folders(tuning.user_directory())


def fill(aot, name, size, used):
    entry = aot / (name * 32)
    entry.mkdir(parents=True)
    (entry / "result.json").write_bytes(b"x" * size)
    for path in (entry / "result.json", entry):
        os.utime(path, (used, used))
    return entry


def test_the_longest_unused_goes_first(aot):
    old, new = fill(aot, "a", 3 << 20, 1000), fill(aot, "b", 3 << 20, 2000)
    (aot / "notes.txt").write_text("not ours")
    (aot / ".vishwamai-1-2").mkdir()  # in use
    caches.trim("aot", 7 << 20)
    assert old.exists()
    caches.trim("aot", 4 << 20)
    assert new.exists() and not old.exists()
    caches.trim("aot", 0)
    assert sorted(path.name for path in aot.iterdir()) == [".vishwamai-1-2", "notes.txt"]


def test_the_limit(monkeypatch):
    assert caches.limit() == caches.LIMIT_MIB << 20
    monkeypatch.setenv("VISHWAMAI_CACHE_MIB", "5")
    assert caches.limit() == 5 << 20
    for text in ("", "0", "-1", "1e3"):
        monkeypatch.setenv("VISHWAMAI_CACHE_MIB", text)
        with pytest.raises(ConfigError, match="VISHWAMAI_CACHE_MIB is .* positive number of MiB"):
            caches.limit()


def test_the_command(aot, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("VISHWAMAI_TUNING_DIR", str(tmp_path / "tables"))
    entry = fill(aot, "a", 1 << 20, 1000)
    answers.write("plans", "c" * 32 + "-full", {})
    tables.write(tmp_path / "tables", "v5e", "toy", "rows", "key", {"config": {}})
    assert main(["cache"]) == 0
    said = capsys.readouterr().out
    assert f"2 entries, 1.0 of at most {caches.LIMIT_MIB} MiB" in said and str(aot) in said
    assert main(["cache", "clear"]) == 0
    assert "aot: 2 entries removed, 1.0 MiB" in capsys.readouterr().out
    assert not entry.exists() and tables.read(tmp_path / "tables" / "v5e" / "toy.json")
    assert main(["cache", "clear", "tuning"]) == 0
    assert not (tmp_path / "tables" / "v5e" / "toy.json").exists()
    assert main(["cache", "clear", "all"]) == 2
    assert "there is no cache 'all'; name tuning, aot, jax, weights" in capsys.readouterr().err


INTERRUPTED = """
import json, sys, tempfile, pathlib
from vishwamai import cli
from vishwamai.aot.compile import child
from vishwamai.aot.compile.traced import Program
from vishwamai.aot.schedule import dump

tempfile.tempdir = sys.argv[1]
SLEEP = "import os, pathlib, sys, time; pid = os.getpid(); "
SLEEP += "pathlib.Path(sys.argv[1], f'pid-{pid}').write_text(str(pid)); time.sleep(300)"
child.COMMAND = ("-c", SLEEP, sys.argv[1])
module = type("M", (), dict(
    __doc__="", configure=lambda parser: None,
    run=lambda arguments: list(dump.dump_many([Program("", "v5e", b"", (), d * 32) for d in "ab"], workers=2)),
))
sys.modules["vishwamai.cli.doctor"] = module
sys.exit(cli.main(["doctor"]))
"""


@pytest.mark.long
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_the_compilers_and_removes_their_files(tmp_path, aot, number, status):
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], stderr=subprocess.PIPE, text=True)
    pids = []
    for _ in range(600):
        pids = [int(text) for path in tmp_path.glob("pid-*") if (text := path.read_text())]
        if len(pids) == 2 or process.poll() is not None:
            break
        time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == status, said
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith("vishwamai-")]


def test_a_directory_that_another_process_removes_meanwhile_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    for name in ("a" * 16, ".vishwamai-other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "answer").write_bytes(b"1234")
    iterdir = pathlib.Path.iterdir

    def vanishing(path):
        if path.name == ".vishwamai-other":
            shutil.rmtree(path, ignore_errors=True)
        return iterdir(path)

    monkeypatch.setattr(pathlib.Path, "iterdir", vanishing)
    assert [entry.path.name for entry in caches.entries("aot")] == ["a" * 16]
    caches.trim("aot", 0)
    assert not list(tmp_path.glob("*"))
