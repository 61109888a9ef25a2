"""Activations, dropout and softmaxes beside jax.nn and torch, the mask that is never stored, errors; see
test_contract.py for every case.
"""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
from vishwamai import (
    ShapeError,
    UnsupportedError,
    explain,
    fused_gelu_dropout,
    gelu,
    kernel_config,
    log_softmax,
    relu2,
    silu,
    softmax,
)
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.target import Target
from vishwamai.ops.softmax import tpu

KEY = jax.random.key(7)


def normal(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "ours, theirs",
    [
        (gelu, functools.partial(jax.nn.gelu, approximate=False)),
        (functools.partial(gelu, approximate=True), jax.nn.gelu),
        (silu, jax.nn.silu),
        (relu2, lambda x: jnp.square(jax.nn.relu(x))),
        (softmax, jax.nn.softmax),
        (log_softmax, jax.nn.log_softmax),
        (functools.partial(softmax, axis=0), functools.partial(jax.nn.softmax, axis=0)),
    ],
    ids=["gelu", "gelu tanh", "silu", "relu2", "softmax", "log_softmax", "softmax axis 0"],
)
def test_values_and_gradients_are_those_of_jax(ours, theirs):
    x, dy = 3 * normal((5, 7, 40)), normal((5, 7, 40), seed=1)
    y, pull = jax.vjp(ours, x)
    with jax.enable_x64(True):  # in float32, the tail of JAX's gelu by tanh is 1 + tanh, which cancels
        want, pull_want = jax.vjp(theirs, np.float64(x))
        gradient = pull_want(np.float64(dy))[0]
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull(dy)[0], gradient, rtol=1e-4, atol=1e-5)


def test_gelu_is_exact_as_in_torch():
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    x = np.linspace(-6, 6, 1001, dtype=np.float32)
    np.testing.assert_allclose(gelu(x), torch.nn.functional.gelu(torch.tensor(x)), atol=1e-6)


def test_the_mask_is_the_one_written_down():
    """A pure function of key, row and column: the mixing of `core/dropout.py`, done on Python-sized integers."""
    x = 1 + jnp.abs(normal((3, 20, 50)))
    seeds = np.asarray(jax.random.bits(KEY, (1, 1, 2), jnp.uint32))
    keep = oracle.keep_mask(seeds, 60, 50, 0.3).reshape(x.shape)
    y = fused_gelu_dropout(x, 0.3, key=KEY)
    np.testing.assert_array_equal(y != 0, keep)
    np.testing.assert_allclose(y, np.where(keep, gelu(x) / 0.7, 0), rtol=1e-6)
    assert abs(keep.mean() - 0.7) < 0.03


def test_nothing_of_the_mask_is_kept():
    """What the gradient needs is x (and the result, which the caller holds anyway): not a byte an element more."""
    x = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    pull = jax.eval_shape(lambda x: jax.vjp(lambda x: fused_gelu_dropout(x, 0.5, key=KEY), x)[1], x)
    kept = jax.tree.leaves(pull)
    assert all(leaf.dtype != jnp.bool_ for leaf in kept)
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in kept) <= 2 * 2 * x.size + 4 * (512 + 1024) + 8 + 64

    # And after XLA has had its way: the program that ends with the residuals returns the result and x's bytes.
    def forward(x):
        y, pull = jax.vjp(lambda x: fused_gelu_dropout(x, 0.5, key=KEY), x)
        return y, pull

    text = jax.jit(forward).lower(x).compile().as_text() or ""
    assert "pred[512,1024]" not in text.split("ENTRY", 1)[1]


def test_forward_and_backward_drop_the_same():
    x = normal((33, 130))
    y, pull = jax.vjp(lambda x: fused_gelu_dropout(x, 0.5, key=KEY), x)
    dx = pull(jnp.ones_like(x))[0]
    plain = jax.vjp(gelu, x)[1](jnp.ones_like(x))[0]
    np.testing.assert_allclose(dx, np.where(y != 0, 2 * plain, 0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("spec", [P("x"), P(None, "x", "y"), P("y", None, "x")], ids=str)
def test_any_number_of_devices_drops_the_same(kind, spec):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind,) * 2)
    x = normal((4, 8, 16))

    def run(x):
        y, pull = jax.vjp(lambda x: fused_gelu_dropout(x, 0.4, key=jax.random.key(3)), x)
        return y, pull(jnp.cos(y))[0]

    expected = jax.jit(run)(x)
    with jax.set_mesh(mesh):
        got = jax.jit(run)(jax.device_put(x, NamedSharding(mesh, spec)))
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_vmap_of_x_shares_the_mask_and_vmap_of_the_key_does_not():
    x = normal((3, 8, 16))
    shared = jax.vmap(lambda x: fused_gelu_dropout(x, 0.5, key=KEY))(x)
    for i in range(3):
        np.testing.assert_allclose(shared[i], fused_gelu_dropout(x[i], 0.5, key=KEY), rtol=1e-6)
    keys = jax.random.split(KEY, 3)
    own = jax.vmap(lambda x, k: fused_gelu_dropout(x, 0.5, key=k))(x, keys)
    for i in range(3):
        np.testing.assert_allclose(own[i], fused_gelu_dropout(x[i], 0.5, key=keys[i]), rtol=1e-6)


def test_dropping_nothing_needs_no_key():
    x = normal((4, 6))
    for how in ({"rate": 0.0}, {"deterministic": True}, {"deterministic": True, "key": KEY}):
        np.testing.assert_array_equal(fused_gelu_dropout(x, **how), gelu(x))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: gelu(x.astype(jnp.int32)), ["gelu", "`x`", "int32", "float32"]),
        (lambda x: fused_gelu_dropout(x, 1.0, key=KEY), ["fused_gelu_dropout", "`rate`", "1.0"]),
        (lambda x: fused_gelu_dropout(x, 0.1), ["`rate` is 0.1", "`key` is None", "deterministic=True"]),
        (lambda x: fused_gelu_dropout(x, 0.1, key=jax.random.split(KEY, 2)), ["`key`", "(2,)", "one key"]),
        (lambda x: softmax(x, axis=2), ["softmax", "`axis` is 2", "(4, 6)", "from -2 to 1"]),
        (lambda x: log_softmax(x[:, :0]), ["log_softmax", "(4, 0)", "nothing along axis -1"]),
        (lambda x: softmax(x[0, 0]), ["softmax", "scalar"]),
        (lambda x: log_softmax(x > 0), ["log_softmax", "bool"]),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call(normal((4, 6)))
    for word in words:
        assert word in str(caught.value)


def test_explain_says_why_there_is_no_kernel():
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    for call in (gelu, silu, relu2, lambda x: fused_gelu_dropout(x, key=jax.random.key(0))):
        (found,) = explain(call, x, target="v5e").calls
        (verdict,) = [verdict for verdict in found.verdicts if verdict.implementation == found.runs]
        assert (
            found.runs == "xla"
            and verdict.runs
            and "XLA's own fusion is as fast" in verdict.reason
            and "%" in verdict.reason
        )


def test_strict_mode_takes_what_has_no_kernel():
    """XLA is no fallback where nothing else was written."""
    with kernel_config(target="v5e", strict=True):
        jax.eval_shape(gelu, jnp.ones((8, 8)))


def test_softmax_of_another_axis_is_left_to_xla_in_words():
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    (found,) = explain(functools.partial(softmax, axis=0), x, target="v5e").calls
    assert found.runs == "xla" and "not the last" in str(found)
    with pytest.raises(UnsupportedError, match="not the last"):
        softmax(jnp.ones((8, 8)), axis=0, implementation="pallas_tpu")


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("shape", [(8192, 8192), (32768, 128), (5, 100), (7, 16383)])
def test_softmax_blocks_fit_the_chip(shape, chip):
    with kernel_config(target=chip.name):
        (plan,) = record_plans(softmax, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert tpu.why_not(plan.spec, Target("tpu", chip)) is None
    config = tpu.heuristic(plan.spec, Target("tpu", chip))
    assert config.block_rows % config.chunk_rows == 0
    assert config.vmem_bytes <= chip.vmem_bytes * 3 // 4


@pytest.mark.turns(3)
@pytest.mark.parametrize("log", [False, True])
def test_softmax_over_several_steps_and_a_ragged_one(log):
    from jax.experimental.pallas import tpu as pltpu

    call = log_softmax if log else softmax
    x, dy = 3 * normal((37, 100)), normal((37, 100), seed=1)

    def run(**how):
        y, pull = jax.vjp(lambda x: call(x, **how), x)
        return y, pull(dy)[0]

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = run(implementation="pallas_tpu", config=tpu.SoftmaxConfig(16, 8))
    for ours, theirs in zip(got, run(implementation="xla"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow():
    x = jnp.array([[1e30, 0.0], [-jnp.inf, 5.0]])
    np.testing.assert_array_equal(softmax(x), [[1, 0], [0, 1]])
    assert log_softmax(x)[1, 1] == 0


def test_one_feature_has_no_gradient():
    y, pull = jax.vjp(softmax, normal((9, 1)))
    np.testing.assert_array_equal(y, np.ones((9, 1)))
    np.testing.assert_array_equal(pull(normal((9, 1), seed=1))[0], np.zeros((9, 1)))
