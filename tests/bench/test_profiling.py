"""What `profile_kernel` tells: every call of every operation in every kind of program, real times, and no figure above
a peak.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import toy
import vishwamai
from vishwamai.core import execute
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.core.jax_errors import out_of_memory_named
from vishwamai.kernels import cpu_kernel, profile_kernel, tpu_kernel
from vishwamai.measure import peaks, profiling
from vishwamai.measure.measurement import measure_compiled


def names(profile):
    return [(row.name, row.calls) for row in profile.operations]


def square(n=32, seed=0):
    return jax.random.normal(jax.random.key(seed), (n, n))


def test_loops_gradients_and_vmap_are_counted():
    """A scan of three steps is three calls; the backward pass has rows of its own; a mapped call is one call of the
    folded size.
    """

    def function(x):
        step = lambda c, _: (vishwamai.rms_norm(vishwamai.gemm(c, x)), None)  # noqa: E731
        return jax.checkpoint(lambda c: jax.lax.scan(step, c, None, length=3)[0])(x).sum()

    x = square()
    wanted = jax.jit(jax.grad(function))(x)
    with profiling.profile_kernel(repeats=1) as prof:
        got = jax.jit(jax.grad(function))(x)
        jax.vmap(lambda y: vishwamai.gemm(y, x))(jnp.stack([x, x]))
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    counted = dict(names(prof))
    assert counted["gemm backward"] == counted["norm backward"] == 3
    assert counted["gemm forward (for a gradient)"] == 6  # `jax.checkpoint` runs the forward pass again
    mapped = prof.operations[-1]
    assert (mapped.name, mapped.calls, mapped.flops) == ("gemm forward", 1, 2 * 2 * 32**3)


def test_times_are_those_of_the_operation(monkeypatch):
    """An operation that sleeps for 20 ms takes 20 ms, and is told to."""

    def slow(plan, direction, *arguments):
        def wait(x):
            time.sleep(0.02)
            return x

        result = dispatch(plan, direction, *arguments)
        return jax.tree.map(lambda y: jax.pure_callback(wait, jax.ShapeDtypeStruct(y.shape, y.dtype), y), result)

    dispatch = execute._dispatch_now
    monkeypatch.setattr(execute, "_dispatch_now", slow)
    with profiling.profile_kernel(repeats=3) as prof:
        toy.toy(*toy.inputs(length=8))
        toy.toy(*toy.inputs(length=8))
    (row,) = prof.operations
    assert row.calls == 2 and min(row.times) >= 0.02 and min(row.times) < 0.2
    assert f"{row.seconds * 1e3:.3f}" in prof.summary()


@pytest.mark.turns(4)
def test_a_kernel_is_timed_whole_and_taken_apart():
    @tpu_kernel
    def kernel(x):
        return vishwamai.layer_norm(vishwamai.gemm(x, x) + 1)

    x = square(64)
    wanted = kernel(x)
    with profile_kernel(repeats=2) as prof:
        got = kernel(x)
        kernel(x)
    assert (np.asarray(got) == np.asarray(wanted)).all()  # the compiled program's own result
    assert names(prof) == [("gemm forward", 2), ("norm forward", 2)]
    (whole,) = prof.kernels
    assert whole.name == "kernel" and whole.calls == 2 and whole.flops == 2 * 64**3 + 8 * 64**2
    text = prof.summary()
    assert "whole kernel" in text and "cpu" in text and "GFLOP/s" in text
    for row in prof.operations:
        assert row.memory >= 2 * 64 * 64 * 4
        share = prof.share(row)
        assert share is not None and share > 0


def test_a_kernel_is_compiled_once():
    traces = []

    @cpu_kernel
    def kernel(x, *, times=2):
        traces.append(times)
        return vishwamai.rms_norm(x * times)

    x = square(8)
    with profiling.profile_kernel(repeats=1) as prof:
        for _ in range(4):
            kernel(x)
        kernel(x, times=3)
        jax.grad(lambda x: kernel(x).sum())(x)  # traced: its operations are timed, not the whole
    assert [row.calls for row in prof.kernels] == [4, 1]
    assert traces.count(3) == 2 and traces.count(2) == 1 + 4 + 1  # compiled once, taken apart at every call


def test_what_cannot_be_taken_apart_is_named():
    mesh = jax.make_mesh((2,), ("x",))
    spec = jax.P("x")
    x = jax.device_put(square(), jax.NamedSharding(mesh, spec))
    with profiling.profile_kernel(repeats=1) as prof:
        jax.shard_map(lambda a: vishwamai.rms_norm(a), mesh=mesh, in_specs=spec, out_specs=spec)(x)
    assert prof.untimed == {"norm": 1} and not prof.operations
    assert "not timed: norm" in prof.summary()


def test_after_the_block_nothing_is_profiled():
    x = square()
    jitted = jax.jit(lambda x: vishwamai.gemm(x, x))
    with profiling.profile_kernel(repeats=1) as prof:
        jitted(x)
    jitted(x)
    vishwamai.gemm(x, x)
    assert names(prof) == [("gemm forward", 1)]
    assert "vishwamai_operation" not in str(jax.make_jaxpr(jitted)(x))


def test_a_figure_above_the_published_peak_is_an_error():
    with profiling.profile_kernel(repeats=1, peaks=lambda: peaks.ChipPeaks(TPUS["v5e"])) as prof:
        vishwamai.gemm(square(), square())
    (row,) = prof.operations
    share = prof.share(row)
    assert share is not None and 0 < share < 1 and "v5e" in prof.summary()
    row.times[:] = [1e-12]
    with pytest.raises(KernelError, match="gemm forward.*times the peak.*v5e.*left out"):
        prof.share(row)
    lines = prof.summary().splitlines()
    assert lines[1].split()[4:7] == ["-", "-", "error"] and "times the peak" in lines[-1]


class Unknown:
    """A device whose peaks are unknown."""

    published, how = False, "not known"

    def flops(self, dtype):
        return None

    def bandwidth(self, nbytes):
        return None


def test_unknown_peaks_are_a_dash():
    with profiling.profile_kernel(repeats=1, peaks=Unknown) as prof:
        vishwamai.gemm(square(), square())
    assert prof.share(prof.operations[0]) is None
    assert prof.summary().splitlines()[1].split()[6] == "-"


def test_out_of_memory_that_arrives_with_the_wait_is_named():
    """XLA allocates when the program runs, not when it is called."""
    n = 1 << 45  # float32: 128 TiB
    too_much = cpu_kernel(lambda x: (jnp.zeros(n) + x).sum() + jnp.broadcast_to(x, n)[::2].sort()[0])
    program = jax.jit(lambda: jnp.zeros(n)).lower().compile()
    with pytest.raises(DeviceError, match="measure: JaxRuntimeError: RESOURCE_EXHAUSTED.*make the batch smaller"):
        measure_compiled(program)
    with pytest.raises(DeviceError, match="<lambda>: .*RESOURCE_EXHAUSTED.* Out of memory"):
        with profiling.profile_kernel(repeats=1):
            too_much(jnp.float32(1))
    with pytest.raises(ZeroDivisionError), out_of_memory_named("bench"):
        raise ZeroDivisionError
    with pytest.raises(DeviceError, match="bench: MemoryError: no message Out of memory"), out_of_memory_named("bench"):
        raise MemoryError
