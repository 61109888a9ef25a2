"""The gated linear unit: one array of weights, what is kept for the gradient, errors, tiles; see test_contract.py for
every case.
"""

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
from vishwamai import ShapeError, UnsupportedError, explain, gated_linear_unit, gemm, kernel_config, quantize
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.spec import ArraySpec
from vishwamai.core.target import Target
from vishwamai.ops.gated import has_kernel, reference, tpu
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs


def normal(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_swiglu_is_that_of_torch():
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    arrays = [np.asarray(normal(s, seed=i)) for i, s in enumerate([(2, 5, 16), (16, 24), (16, 24), (2, 5, 24)])]
    x, gate, up, dh = (torch.tensor(a, requires_grad=True) for a in arrays)
    want = torch.nn.functional.silu(x @ gate) * (x @ up)
    want.backward(dh)
    h, pull = jax.vjp(lambda x, *w: gated_linear_unit(x, w), *arrays[:3])
    np.testing.assert_allclose(h, want.detach(), rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(pull(arrays[3]), (x, gate, up), strict=True):
        np.testing.assert_allclose(ours, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", ["xla", "pallas_tpu"])
def test_one_array_of_weights_is_a_pair(implementation):
    from jax.experimental.pallas import tpu as pltpu

    x, both, dh = normal((9, 20)), 0.2 * normal((2, 20, 24), seed=1), normal((9, 24), seed=2)

    def run(weights):
        h, pull = jax.vjp(lambda x, w: gated_linear_unit(x, w, "gelu", implementation=implementation), x, weights)
        return h, *pull(dh)

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        (h, dx, dw), (h2, dx2, pair) = jax.jit(lambda both: (run(both), run((both[0], both[1]))))(both)
    for ours, theirs in zip((h, dx, dw), (h2, dx2, jnp.stack(pair)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("activation", rotation.in_turn(3, ["silu", "gelu", None]))
def test_when_it_gates_changes_no_number(every, activation):
    """Three steps along a ragged K, ragged rows and columns, both places of the gate, with and without a gradient,
    whose kernels have several ragged tiles along each axis, too.
    """
    from jax.experimental.pallas import tpu as pltpu

    x, gate, up, dh = normal((40, 300)), *(normal((300, 150), seed=i) / 17 for i in (1, 2)), normal((40, 150), seed=3)
    config = tpu.GatedConfig(32, 128, 128, every, grad_x=(32, 128, 128), grad_w=(128, 128, 32))

    def run(**how):
        @jax.jit
        def both_ways(x, gate, up):
            h, pull = jax.vjp(lambda *a: gated_linear_unit(a[0], a[1:], activation, **how), x, gate, up)
            return gated_linear_unit(x, (gate, up), activation, **how), h, *pull(dh)

        return jax.block_until_ready(both_ways(x, gate, up))

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = run(implementation="pallas_tpu", config=config)
    for ours, theirs in zip(got, run(implementation="xla"), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_without_a_gradient_only_the_result_is_stored():
    """On a TPU the kernel's results are h alone, and h with both products where a gradient is asked for."""
    x, w = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256, 512), jnp.bfloat16)

    def results(function):
        found = []

        def visit(jaxpr):
            for equation in jaxpr.eqns:
                if equation.primitive.name == "pallas_call":
                    found.append(len(equation.outvars))
                for inner in jax.extend.core.jaxprs_in_params(equation.params):
                    visit(inner)

        visit(jax.make_jaxpr(function)(x, w, w).jaxpr)
        return found

    def run(x, *w):
        return gated_linear_unit(x, w, implementation="pallas_tpu")

    assert results(run) == [1]
    # Then dx with the slopes, and the gradients of both weights.
    gradients = jax.grad(lambda *a: run(*a).astype(jnp.float32).sum(), (0, 1, 2))
    assert results(gradients) == [3, 3, 2]


def test_groups_that_share_an_operand_have_the_sum_of_their_gradients():
    """Two groups of rows share the weights: XLA has that gradient, with tiles of our own too."""
    x, w, dh = jnp.ones((2, 5, 8)), 0.1 * normal((1, 8, 16)), normal((2, 5, 16), seed=1)
    wide = ArraySpec(w.shape, w.dtype)
    specs = Operands(ArraySpec(x.shape, x.dtype), wide, wide, None)
    spec, arrays = GatedSpec(specs, precision="highest"), Operands(x, w, w, None)
    config = tpu.GatedConfig(8, 128, 128, grad_x=(8, 128, 128), grad_w=(128, 128, 8))
    _, kept = reference.forward(spec, arrays, True)
    assert kept is not None
    got = tpu.backward(spec, config, arrays, kept, Outputs(dh))
    want = jax.grad(lambda w: jnp.vdot(gated_linear_unit(x.reshape(10, 8), (w, w)), dh.reshape(10, 16)))(w[0])
    np.testing.assert_allclose(got.gate[0] + got.up[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": jnp.ones((3, 9))}, ["`weights[0]`", "(8, 16)", "9 features", "(9, hidden)"]),
        (
            {"weights": (jnp.ones((8, 16)), jnp.ones((8, 15)))},
            ["`weights[1]`", "(8, 15)", "`weights[0]`", "hidden = 16", "pass", "(8, 16)"],
        ),
        ({"weights": (jnp.ones((8, 16)),)}, ["`weights`", "sequence of 1", "(gate, up)"]),
        ({"weights": jnp.ones((8, 32))}, ["`weights`", "(8, 32)", "(2, 8, hidden)"]),
        ({"weights": jnp.ones((2, 8, 16), jnp.bfloat16)}, ["`weights`", "bfloat16", "float32", "astype"]),
        ({"weights": (quantize(jnp.ones((8, 16)), axis=-2), jnp.ones((8, 16)))}, ["`weights[1]`", "quantize both"]),
        ({"weights": [quantize(jnp.ones((8, 16)), axis=-1)] * 2}, ["`weights[0]`", "axis=-1", "axis=-2", "`gemm`"]),
        (
            {"weights": [quantize(jnp.ones((8, 16)), axis=-2, block_size=4)] * 2},
            ["`weights[0]`", "block_size=4", "without `block_size`"],
        ),
        (
            {"weights": [quantize(jnp.ones((8, 16)), form, axis=-2) for form in ("int8", "int4")]},
            ["`weights[0]`", "int8", "`weights[1]`", "int4", "one format"],
        ),
        ({"activation": "swish"}, ["`activation`", "'swish'", "silu"]),
        ({"x": jnp.ones((3, 8), jnp.int32)}, ["`x`", "int32"]),
        ({"x": jnp.float32(1)}, ["`x`", "scalar"]),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(change, words):
    good = {"x": jnp.ones((3, 8)), "weights": (jnp.ones((8, 16)), jnp.ones((8, 16)))}
    with pytest.raises(ShapeError) as caught:
        gated_linear_unit(**(good | change))
    for word in ("gated_linear_unit", *words):
        assert word in str(caught.value)


def quantized_pair(format="int8", axis: int | None = -2, block_size=None):
    return [quantize(normal((300, 150), seed=i) / 17, format, axis=axis, block_size=block_size) for i in (1, 2)]


@pytest.mark.parametrize("format, axis", rotation.in_turn(3, [("int8", -2), ("int8", None), ("fp8_e5m2", -2)]))
def test_quantized_weights_multiply_as_in_gemm(format, axis):
    """The result and the gradient of x; a batch of weights is several groups. Tiles are several along every axis."""
    from jax.experimental.pallas import tpu as pltpu

    x, weights, dh = (
        normal((40, 300), jnp.bfloat16),
        quantized_pair(format, axis),
        normal((40, 150), jnp.bfloat16, seed=3),
    )

    def by_products(x):
        gate, up = (gemm(x, w, out_dtype=jnp.float32, implementation="xla") for w in weights)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    def by_kernel(x, weights):
        return gated_linear_unit(x, weights, implementation="pallas_tpu", config=tpu.GatedConfig(32, 128, 128, True))

    @jax.jit
    def run(x, weights):
        h, pull = jax.vjp(lambda x: by_kernel(x, weights), x)
        several = jax.vmap(by_kernel, (None, 0))(x[:8], jax.tree.map(lambda w: jnp.stack([w, w]), weights))
        return h, *pull(dh), several

    h, pull = jax.vjp(by_products, x)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got, dx, several = jax.block_until_ready(run(x, weights))
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (got, h)), rtol=2e-2, atol=2e-2)
    np.testing.assert_allclose(*(np.asarray(y, np.float32) for y in (dx, *pull(dh))), rtol=4e-2, atol=4e-2)
    np.testing.assert_array_equal(several, jnp.stack([got[:8]] * 2))


def test_quantized_weights_have_no_gradient():
    x, (gate, up) = normal((4, 300)), quantized_pair()
    with pytest.raises(UnsupportedError, match=r"gated_linear_unit: `weights\[0\]` is a QTensor"):
        jax.grad(lambda w: gated_linear_unit(x, (w, up), implementation="xla").sum(), allow_int=True)(gate)


@pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")
def test_a_second_derivative_through_quantized_weights():
    x, weights = normal((4, 300)), quantized_pair()

    def second(**how):
        def total(x):
            return gated_linear_unit(x, weights, "tanh", **how).sum()

        return jax.jit(jax.grad(lambda x: jnp.vdot(jax.grad(total)(x), x)))(x)

    np.testing.assert_allclose(second(), second(implementation="xla"), rtol=1e-3, atol=1e-3)


def test_which_quantized_weights_have_a_kernel():
    x, (gate, up) = normal((4, 300)), quantized_pair()
    (blocks, _), (other, _) = quantized_pair(block_size=32), quantized_pair("fp8")
    with kernel_config(target="v6e"):
        assert has_kernel(x, (gate, up), "silu")
        assert not any(has_kernel(x, pair, "silu") for pair in ((gate, blocks), (gate, other), (gate, x)))
    with kernel_config(target="v4"):
        many = jnp.ones((2048, 4096), jnp.bfloat16)
        pair = [jax.eval_shape(lambda: quantize(jnp.ones((4096, 14336)), axis=-2))] * 2
        assert not has_kernel(many[:64], pair, "silu") and has_kernel(many, pair, "silu")
    assert not has_kernel(x, (gate, up), "silu")  # on a CPU


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("m, k, n", [(4096, 4096, 14336), (1, 4096, 14336), (1000, 1000, 1000), (5, 63, 100)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_tiles_fit_the_chip(m, k, n, dtype, chip):
    x, w = jax.ShapeDtypeStruct((m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    with kernel_config(target=chip.name):
        (plan,) = record_plans(lambda x, g, u: gated_linear_unit(x, (g, u)), x, w, w)
    config = tpu.heuristic(plan.spec, Target("tpu", chip))
    assert config.vmem_bytes <= chip.vmem_bytes * 3 // 4
    assert config.grad_vmem_bytes <= chip.vmem_bytes * 3 // 4
    for block, size, multiple in ((config.block_m, m, 8), (config.block_n, n, 128), (config.block_k, k, 128)):
        assert block == size or block % multiple == 0


def test_explain_says_what_a_kernel_gains():
    x, w = jax.ShapeDtypeStruct((1, 4096), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
    text = str(explain(lambda x, g, u: gated_linear_unit(x, (g, u)), x, w, w, target="v5e"))
    assert "memory bounds" in text and "gradient" not in text
    text = str(explain(lambda x, g, u: gated_linear_unit(x, (g, u)), x, w, w, target="v4"))
    assert "gradient's products are XLA's" in text
