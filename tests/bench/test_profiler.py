"""`TPUProfiler`: what is measured of a model, how its FLOP are counted, and how a trace is read."""

import dataclasses
import functools
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import vishwamai
from vishwamai import aot
from vishwamai.core.errors import ConfigError, DeviceError, KernelError, ShapeError, UnsupportedError
from vishwamai.measure import trace
from vishwamai.measure.flops import program_flops
from vishwamai.models import Decoder, ModelConfig
from vishwamai.performance import Estimate, Measurement, TPUProfiler, profiler
from vishwamai.performance.subject import input_values, subject_of
from vishwamai.training.flops import flops_per_token

PEAK = 1e15
needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")


@pytest.fixture
def known_peak(monkeypatch):
    """A peak that nothing here reaches, in place of a second of measuring."""
    found = SimpleNamespace(published=False, how="a test's peak", flops=lambda dtype: PEAK)
    monkeypatch.setattr(profiler, "local_peaks", lambda: found)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


@functools.cache
def decoder():
    keys = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    keys |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64}
    return Decoder(ModelConfig.from_dict(keys), rngs=nnx.Rngs(0))


REAL_TRACE = """
import sys
import types
import jax
import jax.numpy as jnp
import vishwamai
from vishwamai.performance import profiler
peak = types.SimpleNamespace(published=False, how="a test's", flops=lambda dtype: 1e15)
profiler.local_peaks = lambda: peak

def model(x):
    with jax.named_scope("mixer"):
        y = vishwamai.gemm(x, x)
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), None), y, None, length=4)[0]

found = profiler.TPUProfiler(trace_directory=sys.argv[1]).profile_execution(model, (64, 64), 1, 3)
calls = {one.name: one.calls for one in found.operations}
assert max(calls.values()) == 4, calls  # what the loop holds
assert any(name.startswith("mixer/") for name in calls), calls
assert not any("while" in name for name in calls), calls
assert abs(sum(one.share for one in found.operations) - 1) < 1e-6
assert all(one.seconds > 0 for one in found.operations)
seconds = [one.seconds for one in found.operations]
assert seconds == sorted(seconds, reverse=True)
assert found.trace.is_file() and found.trace.is_relative_to(sys.argv[1]), found.trace
assert jax.profiler.ProfileData.from_file(str(found.trace)).find_plane_with_name("/host:CPU")
assert not found.notes, found.notes
print(found)
"""


@pytest.mark.turns(3)
def test_a_trace_is_written_and_read_back(tmp_path):
    """In a process of its own: one with libtpu loaded takes no trace."""
    ended = subprocess.run(
        [sys.executable, "-c", REAL_TRACE, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "operation (traced steps)" in ended.stdout and max(map(len, ended.stdout.splitlines())) <= 80 + len(
        str(tmp_path)
    )


TPU_TRACE = """
planes {
  name: "/device:TPU:0"
  lines { name: "XLA Modules" events { metadata_id: 3 duration_ps: 9000000 } }
  lines {
    name: "XLA Ops"
    events { metadata_id: 1 offset_ps: 0 duration_ps: 2000000 }
    events { metadata_id: 1 offset_ps: 4000000 duration_ps: 4000000 }
    events { metadata_id: 2 offset_ps: 8000000 duration_ps: 2000000 }
    events { metadata_id: 4 offset_ps: 8000000 duration_ps: 9000000 }
  }
  event_metadata { key: 1 value { id: 1 name: "%kernel.3 = f32[8]{0} custom-call(f32[8]{0} %x)" } }
  event_metadata { key: 2 value { id: 2 name: "%fusion.1 = f32[8]{0} fusion(f32[8]{0} %kernel.3)" } }
  event_metadata { key: 3 value { id: 3 name: "jit_f(1)" } }
  event_metadata { key: 4 value { id: 4 name: "%while.1 = f32[8]{0} while(f32[8]{0} %x)" } }
}
"""
KERNEL = 'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/block/pallas_call"}'
TPU_TEXT = f"""HloModule jit_f, is_scheduled=true
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %kernel.3 = f32[8]{{0}} custom-call(%x), {KERNEL}
  %while.1 = f32[8]{{0}} while(%x), condition=%c, body=%b, metadata={{op_name="jit(f)/while"}}
  ROOT %fusion.1 = f32[8]{{0}} fusion(%kernel.3), kind=kLoop, metadata={{op_name="jit(f)/block/jit(silu)/mul"}}
}}"""


def test_operations_of_a_tpu_are_those_of_its_line():
    data = jax.profiler.ProfileData.from_text_proto(TPU_TRACE)
    found = trace.operation_times(data, TPU_TEXT, steps=2)
    assert [(one.name, one.calls, round(one.seconds * 1e6, 6), one.share) for one in found] == [
        ("block/kernel", 1, 3, 0.75),
        ("block/silu/mul", 0.5, 1, 0.25),
    ]


def test_no_trace_where_libtpu_is_loaded(monkeypatch, tmp_path, known_peak):
    monkeypatch.setattr(trace, "why_no_trace", lambda: "a reason")
    monkeypatch.setattr(profiler, "why_no_trace", lambda: "a reason")
    with pytest.raises(DeviceError, match="a reason"):
        trace.record_trace(lambda: None, 1, tmp_path)
    found = TPUProfiler(trace_directory=tmp_path).profile_execution(jnp.tanh, (8,), 0, 2)
    assert found.notes == ("no trace and no time by operation: a reason.",) and found.trace is None
    assert "a reason" in str(found) and not found.operations


def test_a_trace_that_runs_already_is_an_error_of_ours(monkeypatch, tmp_path):
    def running(*_, **__):
        raise RuntimeError("Profile has already been started.")

    monkeypatch.setattr(trace, "why_no_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, "start_trace", running)
    with pytest.raises(KernelError, match="already been started"):
        trace.record_trace(lambda: None, 1, tmp_path)


@pytest.fixture
def no_trace(monkeypatch):
    monkeypatch.setattr(profiler, "why_no_trace", lambda: "a test")


def test_figures_are_those_of_the_steps(known_peak, no_trace):
    found = TPUProfiler().profile_execution(lambda x: x @ x, (64, 64), 2, 7)
    assert len(found.times) == 7 and all(one > 0 for one in found.times)
    assert found.flops.by_dtype == {"float32": 2 * 64**3} and found.flops_source.startswith("products")
    assert found.step.value == sorted(found.times)[3] == found.percentiles[50].value
    assert min(found.times) <= found.percentiles[50].value <= found.percentiles[90].value <= max(found.times)
    assert found.mfu.value == pytest.approx(2 * 64**3 / PEAK / found.step.value)
    assert found.mfu.unit == "of peak" and found.peaks == "a test's peak"
    assert found.bandwidth.value == pytest.approx(2 * 64 * 64 * 4 / found.step.value)
    assert isinstance(found.step, Measurement) and isinstance(found.memory, Estimate)
    assert found.memory.value >= 2 * 64 * 64 * 4 and found.memory.level == "verified"
    assert found.estimate is None and "estimate" not in str(found)


def test_a_busy_machine_is_said(known_peak, no_trace, monkeypatch):
    monkeypatch.setattr(profiler.Usage, "complaint", lambda self, limit: "others used 1.9 of 2 cores")
    found = TPUProfiler().profile_execution(jnp.tanh, (8,), 0, 1)
    assert "BUSY MACHINE" in str(found) and "others used 1.9 of 2 cores" in str(found)
    assert "BUSY" not in str(dataclasses.replace(found, busy=""))
    assert max(map(len, str(found).splitlines())) <= 80


def test_a_published_peak_that_is_passed_gives_no_figure(no_trace, monkeypatch):
    low = SimpleNamespace(published=True, how="published", flops=lambda dtype: 1.0)
    monkeypatch.setattr(profiler, "local_peaks", lambda: low)
    found = TPUProfiler().profile_execution(lambda x: x @ x, (8, 8), 0, 1)
    assert found.mfu is None and "the clock or the count" in found.notes[-1]
    low.published = False
    found = TPUProfiler().profile_execution(lambda x: x @ x, (8, 8), 0, 1)
    assert found.mfu.value > 1 and "measured too low" in found.notes[-1]


def test_a_module_is_profiled_with_its_own_inputs(known_peak, no_trace):
    seen = []

    class Model(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))

        def __call__(self, x, y):
            self.count[...] += 1
            seen.append((x.shape, x.dtype, y.shape, y.dtype))
            return self.linear(x) * y

    model = Model()
    found = TPUProfiler(dtype="bfloat16").profile_execution(model, ((3, 8), shape(4, dtype=jnp.int32)), 0, 1)
    assert set(seen) == {((3, 8), jnp.dtype("bfloat16"), (4,), jnp.dtype("int32"))}
    assert found.name == "Model(bfloat16[3, 8], int32[4])" and found.flops.total == 2 * 3 * 8 * 4
    assert int(model.count[...]) == 0


def test_values_come_from_the_seed():
    def values(seed, given):
        subject = subject_of(lambda *x: x, given, None, seed)
        return [np.asarray(one) for one in input_values(subject, seed)]

    given = (shape(100), shape(100, dtype=jnp.int32), shape(100, dtype=jnp.bool_), shape(9, dtype=jnp.float8_e4m3fn))
    one, same, other = values(1, given), values(1, given), values(2, given)
    assert all((a == b).all() for a, b in zip(one, same)) and (one[0] != other[0]).any()
    assert set(one[1].tolist()) == {0, 1} and one[2].dtype == bool and one[3].dtype == jnp.float8_e4m3fn
    tokens = input_values(subject_of(decoder(), (4, 50), None, 0), 0)[0]
    assert tokens.dtype == jnp.int32 and 2 < tokens.max() < 64 and tokens.min() >= 0


@pytest.mark.parametrize(
    "function, arguments, expected",
    [
        (lambda x, w: x @ w, (shape(3, 5), shape(5, 7)), {"float32": 2 * 3 * 5 * 7}),
        (lambda x, w: vishwamai.gemm(x, w), (shape(3, 5), shape(5, 7)), {"float32": 2 * 3 * 5 * 7}),
        (
            lambda x, w: jax.grad(lambda x: vishwamai.gemm(x, w).sum())(x),
            (shape(3, 5), shape(5, 7)),
            {"float32": 2 * 3 * 5 * 7 * 3},  # forward, and both gradients
        ),
        (
            lambda x: jax.lax.conv(x, jnp.ones((6, 4, 3, 3)), (1, 1), "SAME"),
            (shape(1, 4, 8, 8),),
            {"float32": 2 * 8 * 8 * 6 * 4 * 9},
        ),
        (
            lambda x: jax.lax.scan(lambda c, _: (c @ c, None), x, None, length=10)[0],
            (shape(4, 4, dtype=jnp.bfloat16),),
            {"bfloat16": 10 * 2 * 4**3},
        ),
        (
            lambda x: jax.checkpoint(lambda x: jax.vmap(lambda y: y @ y)(x))(x),
            (shape(5, 4, 4),),
            {"float32": 5 * 2 * 4**3},
        ),
        (
            lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x, lambda x: x @ x, x),
            (shape(4, 4),),
            {"float32": 2 * 4**3},
        ),
        (lambda x, w: jax.lax.ragged_dot(x, w, jnp.array([2, 1])), (shape(3, 5), shape(2, 5, 7)), {"float32": 210.0}),
        (
            lambda x, w: jax.grad(lambda w: jax.lax.ragged_dot(x, w, jnp.array([2, 1])).sum())(w),
            (shape(3, 5), shape(2, 5, 7)),
            {"float32": 420.0},
        ),
        (jnp.tanh, (shape(3),), {}),
    ],
    ids=["product", "ours", "gradient", "convolution", "loop", "vmap", "branch", "ragged", "ragged gradient", "none"],
)
def test_flops_of_a_program(function, arguments, expected):
    found = program_flops(function, *arguments)
    assert found.by_dtype == expected and found.unknown_loops == 0


def test_a_loop_of_unknown_length_counts_once():
    found = program_flops(lambda x: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ c, x), shape(4, 4))
    assert found.total == 2 * 4**3 and found.unknown_loops == 1


def test_flops_of_a_decoder_are_those_of_its_formula():
    """The forward pass is a third of a step; the hidden state needs no head."""
    model = decoder()
    tokens = 32
    graph, state = nnx.split(model)
    found = program_flops(lambda state, x: nnx.merge(graph, state)(x), state, shape(1, tokens, dtype=jnp.int32))
    formula = (flops_per_token(model.config, tokens) / 3 - 2 * 64 * 32) * tokens
    assert formula / 2 < found.total < 1.5 * formula  # the formula has neither causality nor norms


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"target": "v5x"}, DeviceError, "v5x"),
        ({"target": "h100"}, DeviceError, "is a GPU"),
        ({"target": "v5e:2x2"}, UnsupportedError, "for one device"),
        ({"target": jnp.ones(3)}, ShapeError, "`target`"),
        ({"trace_directory": ""}, ConfigError, "pass the path of a directory"),
        ({"trace_directory": jnp.ones(3)}, ConfigError, "an array of shape"),
        ({"trace_directory": __file__}, ConfigError, "is not a directory"),
        ({"dtype": "float7"}, ShapeError, "`dtype`"),
        ({"dtype": "U"}, ShapeError, "not one of numbers"),
        ({"seed": -1}, ShapeError, "`seed` is -1"),
        ({"seed": "x"}, ShapeError, "`seed`"),
    ],
)
def test_a_profiler_that_cannot_be_made(options, error, words):
    with pytest.raises(error, match=words):
        TPUProfiler(**options)


def never(*_):
    raise AssertionError("the model ran or was traced")


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ((3, (2,)), KernelError, "`model` is 3"),
        ((None, (2,)), KernelError, "`model` is None"),
        ((never, 3), ShapeError, "`input_shape`"),
        ((never, None), ShapeError, "`input_shape`"),
        ((never, "ab"), ShapeError, "`input_shape`"),
        ((never, (2, -1)), ShapeError, "`input_shape`"),
        ((never, (2, 1.5)), ShapeError, "`input_shape`"),
        ((never, (True, 2)), ShapeError, "`input_shape`"),
        ((never, (2**40,)), ShapeError, "`input_shape`"),
        ((never, ((2,), 3)), ShapeError, "`input_shape`"),
        ((never, jnp.ones(3)), ShapeError, "`input_shape`"),
        ((never, jax.eval_shape(lambda: jax.random.key(0))), ShapeError, "not one of numbers|`dtype`"),
        ((never, (2**30, 2**30)), DeviceError, "pass smaller shapes"),
        ((never, (2,), -1), ShapeError, "`warmup_steps` is -1"),
        ((never, (2,), 0, 0), ShapeError, "`profile_steps` is 0"),
        ((never, (2,), 0, 2**31), ShapeError, "`profile_steps`"),
        ((never, (2,), 1.5), ShapeError, "`warmup_steps`"),
        ((never, (2,), "x"), ShapeError, "`warmup_steps`"),
        ((lambda x: x @ jnp.ones(7), (2,)), ShapeError, "does not take inputs of `input_shape`"),
        ((lambda x, y: x, (2,)), ShapeError, "does not take inputs of `input_shape`"),
        ((lambda x: "text", (2,)), ShapeError, "does not take inputs of `input_shape`"),
        ((lambda x: jnp.zeros((2**20, 2**20)) + x, (1,)), DeviceError, "the program takes"),
        ((lambda x: vishwamai.gemm(x, x), (2, 3)), ShapeError, "gemm"),
    ],
)
def test_what_cannot_be_profiled(arguments, error, words, no_trace):
    with pytest.raises(error, match=words):
        TPUProfiler().profile_execution(*arguments)


def test_a_target_needs_libtpu(monkeypatch):
    monkeypatch.setattr(profiler, "has_libtpu", lambda: False)
    with pytest.raises(DeviceError, match="needs libtpu"):
        TPUProfiler("v5e").profile_execution(never, (2,))


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    found = TPUProfiler(trace_directory=tmp_path / "file" / "below")
    with pytest.raises(ConfigError, match="cannot be written"):
        found.profile_execution(never, (2,))


@needs_libtpu
@pytest.mark.long
def test_the_estimate_of_a_target_stands_apart(known_peak, no_trace, monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))
    found = TPUProfiler("v5e").profile_execution(lambda x: x @ x, shape(512, 512, dtype=jnp.bfloat16), 0, 2)
    estimate = found.estimate
    assert estimate.target == "v5e" and isinstance(estimate.step, Estimate) and isinstance(found.step, Measurement)
    assert estimate.step.value >= 2 * 512**3 / 197e12 and estimate.step.level == "verified"
    assert estimate.mfu.value == pytest.approx(2 * 512**3 / 197e12 / estimate.step.value)
    assert estimate.memory.fits and estimate.memory.parts["arguments"].value == 2 * 512 * 512
    assert "estimate for v5e" in str(found) and max(map(len, str(found).splitlines())) <= 80
    with pytest.raises(TypeError):
        _ = estimate.step + found.step  # type: ignore[operator]
    assert "libtpu is loaded" in (trace.why_no_trace() or "")


def test_a_measurement_outlives_a_compiler_that_declines(known_peak, no_trace, monkeypatch):
    def declines(*_):
        raise UnsupportedError("kernel 'k' does not compile for v5e")

    monkeypatch.setattr(profiler, "has_libtpu", lambda: True)
    monkeypatch.setattr(profiler, "_estimate", declines)
    found = TPUProfiler("v5e").profile_execution(jnp.sin, (8, 8), 0, 2)
    assert len(found.times) == 2 and found.estimate is None
    assert found.notes[-1] == "no estimate for v5e: kernel 'k' does not compile for v5e"
    assert "does not compile for v5e" in str(found)


def test_an_mfu_above_the_peak_is_marked(monkeypatch):
    slow = SimpleNamespace(published=False, how="measured", flops=lambda dtype: 1.0)
    monkeypatch.setattr(profiler, "local_peaks", lambda: slow)
    found = TPUProfiler().profile_execution(lambda x: x @ x, (16, 16), warmup_steps=0, profile_steps=1)
    assert "ABOVE 100 %" in str(found) and any("which no device reaches" in note for note in found.notes)
