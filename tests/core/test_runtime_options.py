"""Options of the compiler and of JAX: what is refused and by whom, and what a set of them gives."""

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from vishwamai import aot, planning
from vishwamai.aot.compile import child
from vishwamai.aot.compile.options import ask, config, trials
from vishwamai.aot.compile.options.table import TPU_OPTIONS
from vishwamai.aot.schedule import inspection
from vishwamai.core.errors import ConfigError, DeviceError, KernelError, ShapeError
from vishwamai.performance import RuntimeConfig, configure_runtime_options

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")

LIMIT = "xla_tpu_scoped_vmem_limit_kib"
BOTH = RuntimeConfig(
    ((LIMIT, "32768"), ("xla_backend_optimization_level", "3")),
    (("jax_enable_compilation_cache", True), ("jax_platforms", "cpu")),
    frozenset({"xla_backend_optimization_level"}),
)


@pytest.fixture
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture
def no_process(monkeypatch):
    def started(process, question):
        raise AssertionError(f"a process was started for {question}")

    monkeypatch.setattr(child.Child, "ask", started)


WRONG = {
    "names near": ({"jax_default_matmul_precisio": "high"}, "near: jax_default_matmul_precision"),
    "no such name": ({"a": 1}, "no option 'a'; options of the compiler begin with xla_"),
    "not a name": ({1: 1}, "pass the names of options"),
    "an array": ({LIMIT: jnp.ones(3)}, "pass True, False, a finite number or a text"),
    "nan": ({LIMIT: float("nan")}, "finite"),
    "a number for a flag": ({"xla_tpu_rwb_fusion": 1}, "pass True or False"),
    "a flag for a number": ({LIMIT: True}, "pass an integer"),
    "a fraction": ({LIMIT: 1.5}, "pass an integer"),
    "text for a number": ({LIMIT: "32768"}, "pass an integer"),
    "too small": ({LIMIT: -5}, "an integer of 1 or more"),
    "too large": ({LIMIT: 2**70}, "pass an integer"),
    "too large outside the table": ({"xla_unheard_of": 2**70}, "64 bits"),
    "neither on nor off": ({"xla_enable_async_all_gather": "maybe"}, 'True, False or "auto"'),
    "a dump": ({"xla_dump_to": "/tmp/x"}, "write files"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_known_to_be_wrong_starts_no_process(case, no_process):
    options, words = WRONG[case]
    with pytest.raises(ConfigError, match=words):
        configure_runtime_options(options)


def test_nothing_is_a_set_too(no_process):
    assert configure_runtime_options({}) == RuntimeConfig()
    assert RuntimeConfig().environment() == {} and str(RuntimeConfig()) == "no options"
    with pytest.raises(ShapeError, match="pass a dict"):
        configure_runtime_options(3)  # type: ignore[arg-type]


def test_the_three_forms():
    assert BOTH.compiler_options == {LIMIT: "32768", "xla_backend_optimization_level": "3"}
    assert BOTH.environment({"LIBTPU_INIT_ARGS": "--a=1", "HOME": "/"}) == {
        "LIBTPU_INIT_ARGS": f"--a=1 --{LIMIT}=32768",
        "XLA_FLAGS": "--xla_backend_optimization_level=3",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_PLATFORMS": "cpu",
    }
    assert "jax_platforms = cpu" in str(BOTH) and hash(BOTH)


def test_what_comes_too_late_is_said(monkeypatch):
    monkeypatch.setattr(config, "devices_are_taken", lambda: False)
    assert BOTH.too_late() == ()
    monkeypatch.setattr(config, "devices_are_taken", lambda: True)
    assert [line.partition(":")[0] for line in BOTH.too_late()] == [
        "jax_platforms",
        f"{LIMIT}, xla_backend_optimization_level",
    ]
    with pytest.raises(DeviceError, match="jax_platforms no more"):
        BOTH.apply()


def test_apply_sets_options_of_jax():
    before = jax.config.values["jax_traceback_in_locations_limit"]
    try:
        RuntimeConfig(settings=(("jax_traceback_in_locations_limit", before + 1),)).apply()
        assert jax.config.values["jax_traceback_in_locations_limit"] == before + 1
    finally:
        jax.config.update("jax_traceback_in_locations_limit", before)


def test_the_worker_puts_options_of_jax_back():
    before = dict(jax.config.values)
    assert trials.answer({"setting": "jax_default_matmul_precision", "value": "highest"}) == {"refused": None}
    assert "enum" in str(trials.answer({"setting": "jax_default_matmul_precision", "value": "bogus"})["refused"])
    assert trials.answer({"setting": "jax_enable_x64", "value": "maybe"}) == {"refused": "it takes True or False"}
    assert dict(jax.config.values) == before


def test_answers_are_kept(fresh_cache, monkeypatch):
    calls = []

    def answer(process, question):
        calls.append(question)
        return {"refused": None}

    monkeypatch.setattr(child.Child, "ask", answer)
    options = {"jax_default_matmul_precision": "highest", "jax_enable_x64": True}
    found = configure_runtime_options(options)
    assert found == configure_runtime_options(dict(reversed(options.items()))) and len(calls) == 2
    assert found.jax_options == options
    assert len(list((fresh_cache / "options").glob("*.json"))) == 2


def test_a_process_that_ends_is_blamed_on_its_question_and_not_kept(fresh_cache, monkeypatch):
    calls = []

    def answer(process, question):
        calls.append(question["setting"])
        if len(calls) > 1:
            raise child.Ended("the compiler ended its process by signal 6: Check failed")
        return {"refused": None}

    monkeypatch.setattr(child.Child, "ask", answer)
    found = ask.ask([{"setting": name, "value": 1} for name in "abc"])
    assert found[0] == {"refused": None}
    assert (
        found[1:]
        == [{"refused": "it ends libtpu's process: the compiler ended its process by signal 6: Check failed"}] * 2
    )
    assert calls == ["a", "b", "c"] and len(list((fresh_cache / "options").glob("*.json"))) == 1


def test_a_worker_that_fails_is_an_error(fresh_cache, monkeypatch):
    monkeypatch.setattr(child, "COMMAND", ("-c", "raise SystemError('broken')"))
    with pytest.raises(KernelError, match="broken"):
        configure_runtime_options({"jax_enable_x64": True})


@needs_libtpu
def test_options_are_part_of_the_key_of_a_program():
    made = planning.Program("program", "v5e", b"program", (), "a" * 32)
    one = made.with_options({"a": "1", "b": "2"})
    assert one.options == {"a": "1", "b": "2"} and one.fingerprint != made.fingerprint
    assert made.with_options({"b": "2", "a": "1"}).fingerprint == one.fingerprint
    assert made.with_options({"a": "1", "b": "3"}).fingerprint != one.fingerprint
    assert made.with_options({}) is made


@needs_libtpu
def test_options_of_the_environment_are_part_of_the_keys(monkeypatch):
    """Those that can change a program of a TPU; the host's devices cannot."""
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

    def keys():
        made = inspection.prepare(jnp.sin, (x,), {}, "v5e"), planning.trace(jnp.sin, x, target="v5e")
        return [one.fingerprint for one in made]

    monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    seen = [keys()]
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert keys() == seen[0]
    for name, value in (("LIBTPU_INIT_ARGS", f"--{LIMIT}=32768"), ("XLA_FLAGS", "--xla_dump_hlo_as_text")):
        monkeypatch.setenv(name, value)
        seen.append(keys())
    assert all(len(set(column)) == 3 for column in zip(*seen))


def test_compile_for_takes_no_options_of_jax(no_process):
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    wrong: Any
    for wrong, words in ((3, "a dict of options"), (BOTH, "RuntimeConfig.apply"), ({"a": 1}, "no option 'a'")):
        for call in (aot.inspect, lambda fn, args, **more: aot.compile_for(fn, *args, **more)):
            with pytest.raises(ConfigError, match=words):
                call(jnp.sin, (x,), compiler_options=wrong)


@pytest.mark.long
@needs_libtpu
def test_the_compiler_checks_names_and_values(fresh_cache):
    with pytest.raises(ConfigError, match=f"near: {LIMIT}"):
        configure_runtime_options({"xla_tpu_scoped_vmem_limit_kb": 1})
    with pytest.raises(ConfigError, match="'NONE', 'SAFE_IFF_KERNEL_REQUIRED', 'SAFE', 'AGGRESSIVE'"):
        configure_runtime_options({"xla_tpu_vmem_scavenging_mode": "zz"})
    with pytest.raises(ConfigError, match="no field named .bogus."):
        configure_runtime_options({"xla_tpu_memory_bound_loop_optimizer_options": "bogus:1"})
    with pytest.raises(ConfigError, match="any text"):
        configure_runtime_options({"xla_jf_bounds_check": "x"})
    with pytest.raises(ConfigError, match="pass an integer"):  # not in the table: the compiler gives its type
        configure_runtime_options({"xla_jf_debug_level": "high"})
    found = configure_runtime_options({LIMIT: 32768, "xla_backend_optimization_level": 3})
    assert found.of_xla == {"xla_backend_optimization_level"}
    assert dict(found.versions) == {name: aot.versions()[name] for name in ("jax", "libtpu")}


@pytest.mark.long
@needs_libtpu
def test_the_table_agrees_with_the_compiler(fresh_cache):
    """Every option of the table is of its type wherever the installed libtpu has it; most exist."""
    values = {"bool": "true", "auto": "auto", "int": "1", "float": "1.5", "choice": "NONE"}
    options = TPU_OPTIONS.values()
    found = ask.ask([{"option": o.name, "value": values[o.kind]} for o in options])
    wrong = {o.name: f["kind"] for o, f in zip(options, found) if not f.get("unknown") and f["kind"] != o.kind}
    assert not wrong
    assert sum(not f.get("unknown") for f in found) > 0.8 * len(TPU_OPTIONS)


@pytest.mark.long
@needs_libtpu
def test_options_reach_the_compiler(fresh_cache):
    """HBM of 1 MiB is too little for a product that fits otherwise, and the error is not kept for the program
    without the option.
    """
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    config = configure_runtime_options({"xla_tpu_max_hbm_size_mib": 1})
    for options in (config, {"xla_tpu_max_hbm_size_mib": 1}):
        with pytest.raises(DeviceError, match="1.0 MiB"):
            aot.compile_for(jnp.matmul, x, x, compiler_options=options)
    assert aot.compile_for(jnp.matmul, x, x).memory.fits
    with pytest.raises(DeviceError, match="1.0 MiB"):
        aot.inspect(jnp.matmul, (x, x), compiler_options=config)
    assert aot.inspect(jnp.matmul, (x, x)).seconds > 0
    (lost,) = aot.inspect_many([aot.Inspection(jnp.matmul, (x, x), compiler_options={"a": 1})])
    assert isinstance(lost, ConfigError)


@pytest.mark.long
@needs_libtpu
def test_the_environment_gives_a_process_the_options(fresh_cache):
    config = configure_runtime_options({"xla_tpu_max_hbm_size_mib": 1, "jax_default_matmul_precision": "highest"})
    code = """
import jax, jax.numpy as jnp
from vishwamai import aot
x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
assert jax.config.jax_default_matmul_precision == "highest"
try:
    aot.compile_for(jnp.matmul, x, x)
except aot.compile.diagnose.DeviceError as error:
    print(error)
"""
    environment = os.environ | config.environment(os.environ)
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "1.0 MiB" in ended.stdout
