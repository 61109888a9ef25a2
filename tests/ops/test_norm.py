"""The norms: their errors, agreement with torch, numerics at a large mean, and the plan of the TPU kernel; see
test_contract.py for every case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vishwamai import ShapeError, UnsupportedError, explain, kernel_config, layer_norm, rms_norm
from vishwamai.aot.tuning.variations import neighbours
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops.norm import tpu
from vishwamai.ops.norm.cases import CASES
from vishwamai.ops.norm.tpu import NormConfig


def _exact(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _normal(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: layer_norm(jnp.float32(1.0)), ["layer_norm", "`x` is a scalar"]),
        (lambda: layer_norm(jnp.zeros((2, 4), jnp.int32)), ["`x`", "int32", "float32"]),
        (lambda: layer_norm(jnp.zeros((2, 0))), ["`x`", "(2, 0)", "no features"]),
        (lambda: layer_norm(jnp.zeros((2, 4)), jnp.zeros(3)), ["`scale`", "(3,)", "of shape (4,)"]),
        (lambda: layer_norm(jnp.zeros((2, 4)), None, jnp.zeros((2, 4))), ["`offset`", "(2, 4)", "of shape (4,)"]),
        (lambda: rms_norm(jnp.zeros((2, 4)), jnp.zeros(4, jnp.int32)), ["rms_norm", "`scale`", "int32"]),
        (lambda: rms_norm(jnp.zeros((2, 4)), residual=jnp.zeros((2, 5))), ["`residual`", "[2,5]", "[2,4]"]),
        (lambda: rms_norm(jnp.zeros((2, 4)), eps=-1.0), ["`eps`", "-1.0", "1e-6"]),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_values_and_gradients_are_those_of_torch(kind):
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    x, scale, offset, dy = (np.asarray(_normal(s, seed=i)) for i, s in enumerate([(6, 40), (40,), (40,), (6, 40)]))
    tx, tscale, toffset = (torch.tensor(a, requires_grad=True) for a in (x, scale, offset))
    if kind == "layer":
        want = torch.nn.functional.layer_norm(tx, (40,), tscale, toffset, eps=1e-5)
    else:
        want = torch.nn.functional.rms_norm(tx, (40,), tscale, eps=1e-5) + toffset
    want.backward(torch.tensor(dy))
    norm = layer_norm if kind == "layer" else rms_norm
    y, vjp = jax.vjp(lambda *a: norm(*a, eps=1e-5), x, scale, offset)
    np.testing.assert_allclose(y, want.detach(), rtol=1e-5, atol=1e-5)
    for gradient, t in zip(vjp(dy), (tx, tscale, toffset)):
        np.testing.assert_allclose(gradient, t.grad, rtol=1e-4, atol=1e-5)


def test_variance_survives_a_large_mean():
    x = _normal((4, 512)) + 3000.0  # E[x^2] - E[x]^2 would be off by more than the variance itself
    exact = _exact(x)
    want = (exact - exact.mean(-1, keepdims=True)) / exact.std(-1, keepdims=True)
    np.testing.assert_allclose(layer_norm(x, eps=0.0), want, atol=2e-3)


def test_the_sum_is_rounded_once_and_returned():
    x, residual = _normal((3, 64), jnp.bfloat16), _normal((3, 64), jnp.bfloat16, seed=1)
    y, total = layer_norm(x, residual=residual)
    np.testing.assert_array_equal(total, x + residual)
    np.testing.assert_array_equal(y, layer_norm(total))


def test_rows_too_long_for_vmem_are_declined_in_words():
    x = jax.ShapeDtypeStruct((32, 1 << 17), jnp.float32)
    with kernel_config(target="v4"), pytest.raises(UnsupportedError, match="131072 features take .* bytes of VMEM"):
        jax.eval_shape(lambda x: layer_norm(x, implementation="pallas_tpu"), x)
    assert explain(layer_norm, x, target="v4").calls[0].runs == "xla"
    assert explain(layer_norm, x, target="v6e").calls[0].runs == "pallas_tpu"


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("shape", [(8192, 8192), (32768, 1024), (5, 100), (100, 8192)])
def test_blocks_fit_the_chip_and_split_evenly(shape, chip):
    with kernel_config(target=chip.name):
        (plan,) = record_plans(layer_norm, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert tpu.why_not(plan.spec, Target("tpu", chip)) is None
    config = tpu.heuristic(plan.spec, Target("tpu", chip))
    assert config.block_rows % config.chunk_rows == 0
    assert config.vmem_bytes <= chip.vmem_bytes * 3 // 4
    if shape[0] >= 8192:  # both cores of a megacore chip have the same number of steps
        assert shape[0] % (2 * config.block_rows) == 0


@pytest.mark.turns(4)
@pytest.mark.parametrize("rows", [40, 33])
def test_several_steps_and_a_ragged_one(rows):
    """Parameter gradients leave out what lies past the last row, which starts as NaN in the interpreter."""
    from jax.experimental.pallas import tpu as pltpu

    x, scale, offset, dy = (_normal(s, seed=i) for i, s in enumerate([(rows, 100), (100,), (100,), (rows, 100)]))

    def gradients(**how):
        run = jax.jit(lambda *a: jax.vjp(lambda *a: layer_norm(*a, **how), *a)[1](dy))
        return jax.block_until_ready(run(x, scale, offset))

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = gradients(implementation="pallas_tpu", config=tpu.NormConfig(16, 8))
    for g, w in zip(got, gradients(implementation="xla")):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-4)


def test_tiles_that_would_leave_rows_out_are_an_error():
    with pytest.raises(KernelError, match=r"chunk_rows is 64 and block_rows 32"):
        NormConfig(32, 64)
    with pytest.raises(KernelError, match=r"multiple of 8"):
        NormConfig(32, 4)


def test_the_tuner_leaves_them_out():
    case = CASES[0]
    (plan,) = record_plans(case.run, case.shapes())
    found = list(neighbours(NormConfig(32, 32), ["block_rows", "chunk_rows"], plan.spec, Target("tpu", TPUS["v5e"])))
    assert {(t.block_rows, t.chunk_rows) for t in found} == {(64, 32), (32, 16), (64, 16)}
