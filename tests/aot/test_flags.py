"""`tune_flags`: what it chooses among programs of known time and memory, what it rejects, and real programs."""

import types

import jax
import jax.numpy as jnp
import pytest

from vishwamai import aot, planning
from vishwamai.aot.compile.options.config import RuntimeConfig
from vishwamai.aot.tuning import flags
from vishwamai.core.errors import ConfigError, KernelError, ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.performance import tune_flags

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
A, B, C = "xla_tpu_rwb_fusion", "xla_tpu_dot_dot_fusion", "xla_tpu_scoped_vmem_limit_kib"
X = jax.ShapeDtypeStruct((8, 128), jnp.float32)
HBM = 1 << 30


@pytest.fixture
def compiler(monkeypatch):
    """A compiler of which the test states time and memory, by options; every other set fails."""
    programs = {(): (1.0, 100)}
    seen = []

    def dump_many(jobs, workers):
        for job in jobs:
            key = tuple(sorted(job.options.items()))
            seen.append(key)
            found = programs.get(key, KernelError("no such program"))
            if isinstance(found, KernelError):
                yield found
                continue
            memory = {"arguments": found[1], "outputs": 0, "temporaries": 0, "code": 0, "aliased": 0, "limit": HBM}
            yield types.SimpleNamespace(memory=memory, seconds=found[0])

    def schedule_of(case, job, found):
        return types.SimpleNamespace(seconds=found.seconds, guessed=("a loop",))

    program = planning.Program("matmul", "v5e", b"", ())
    monkeypatch.setattr(flags, "prepare", lambda *args: program)
    monkeypatch.setattr(flags, "dump_many", dump_many)
    monkeypatch.setattr(flags, "schedule_of", schedule_of)
    monkeypatch.setattr(
        flags,
        "configure_runtime_options",
        lambda options: RuntimeConfig(tuple((n, str(v)) for n, v in options.items())),
    )
    return types.SimpleNamespace(programs=programs, seen=seen)


def tune(options, **more):
    return tune_flags(jnp.sin, (X,), "v5e", options=options, **more)


def test_options_that_gain_are_tried_together_and_kept_where_they_gain_more(compiler):
    compiler.programs |= {
        ((A, "false"),): (0.9, 100),
        ((A, "true"),): (0.95, 100),
        ((B, "true"),): (0.8, 200),
        ((C, "32768"),): (0.85, 100),
        ((B, "true"), (C, "32768")): (0.81, 100),
        ((B, "true"), (A, "false")): (0.7, 150),
    }
    found = tune({A: [True, False], B: [True], C: [32768]})
    assert dict(found.best.options) == {A: False, B: True} and found.best.time.value == 0.7
    assert found.gain == pytest.approx(1 / 0.7) and found.baseline.time.value == 1.0
    assert found.config.compiler_options == {A: "False", B: "True"}
    assert found.uncertain == ("a loop",) and not found.untried and len(compiler.seen) == len(set(compiler.seen)) == 7
    lines = str(found).splitlines()
    assert lines[0] == "v5e: 1.429x as fast by the schedule" and lines[1:3] == [f"* {B}=true", f"  {A}=false"]
    assert max(map(len, lines)) <= 80


def test_nothing_that_is_slower_or_does_not_fit_is_chosen(compiler):
    compiler.programs |= {((A, "true"),): (1.0, 50), ((B, "true"),): (0.1, HBM + 1)}
    found = tune({A: [True], B: [True], C: [1]})
    assert found.best == found.baseline and found.gain == 1.0 and found.config == RuntimeConfig()
    assert [t.fits for t in found.trials] == [True, True, False, False]
    assert found.trials[-1].problem == "no such program"
    text = str(found)
    assert f"{C}=1\n      no such program" in text and "does not fit" in text


def test_what_is_the_same_program_is_named_in_a_line(compiler):
    compiler.programs |= {((A, "true"),): (1.0, 100)}
    assert f"  no change: {A}=true" in str(tune({A: [True]})).splitlines()


def test_an_option_may_make_a_program_fit(compiler):
    compiler.programs |= {(): (1.0, HBM + 1), ((C, "1"),): (1.5, 100)}
    assert dict(tune({C: [1]}).best.options) == {C: 1}


@pytest.mark.parametrize("count, alone", [(2, 1), (5, 3), (9, 6), (100, 8)])
def test_no_more_is_compiled_than_asked_for(compiler, count, alone):
    values = list(range(8))
    compiler.programs |= {((C, str(n)),): (0.5 + n / 100, 100) for n in values}
    found = tune({C: values}, compilations=count)
    assert len(compiler.seen) == 1 + alone <= count
    assert len(found.untried) == 8 - alone and all("compilations are over" in text for text in found.untried)


def test_the_error_of_the_baseline_is_the_calls(compiler):
    compiler.programs[()] = KernelError("the program does not compile")
    with pytest.raises(KernelError, match="the program does not compile"):
        tune({A: [True]})


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({}, ShapeError, "`options` is empty"),
        ({A: True}, ConfigError, "pass a list"),
        ({A: []}, ConfigError, "pass a list"),
        ({"jax_platforms": ["cpu"]}, ConfigError, "no option of the compiler"),
        ({3: [1]}, ConfigError, "no option of the compiler"),
        ({"xla_tpu_detect_nan": [True]}, ConfigError, "no schedule shows what `xla_tpu_detect_nan` does"),
        ({"xla_enable_async_all_gather": [True]}, ConfigError, "(collectives)"),
    ],
)
def test_wrong_options_compile_nothing(compiler, options, error, words):
    with pytest.raises(error) as raised:
        tune(options)
    assert words in str(raised.value) and not compiler.seen


@pytest.mark.parametrize("more", [{"compilations": 1}, {"compilations": True}, {"workers": 0}, {"workers": 1.5}])
def test_wrong_counts_compile_nothing(compiler, more):
    with pytest.raises(ShapeError, match=next(iter(more))):
        tune({A: [True]}, **more)
    assert not compiler.seen


def test_a_slice_is_rejected(compiler):
    with pytest.raises(UnsupportedError, match="tune_flags: target .* is a slice"):
        tune_flags(jnp.sin, (X,), "v5e:2x2", options={A: [True]})


@pytest.mark.long
@needs_libtpu
def test_the_compilers_programs():
    """The result compiles, in the memory that it says, and is not slower."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    options = {C: [32768], "xla_jf_conv_output_fusion": [False]}
    found = tune_flags(lambda a, b: jax.nn.gelu(a @ b), (x, x), "v5e", options=options)
    assert found.gain >= 1.0 and len(found.trials) >= 3 and all(trial.problem is None for trial in found.trials)
    compiled = aot.compile_for(lambda a, b: jax.nn.gelu(a @ b), x, x, target="v5e", compiler_options=found.config)
    assert compiled.memory.total == found.best.memory.value


@pytest.mark.long
@needs_libtpu
def test_what_is_tried_by_default_is_what_the_compiler_has():
    tries, untried = flags._default_tries(TPUS["v5e"])
    assert {name for name, _ in tries} > {A, B, C} and not untried
