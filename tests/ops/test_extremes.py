"""What every implementation gives at the ends of the range: tails of activations, infinite arguments, huge logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import contract
from vishwamai import (
    flash_attention,
    gated_linear_unit,
    gelu,
    gemm,
    layer_norm,
    ragged_paged_attention,
    relu2,
    rms_norm,
    silu,
)
from vishwamai.core.activations import activate, derivative

pytestmark = pytest.mark.interpreter


def implementations(name):
    """The implementations of an operation that this process runs."""
    found = [impl for op, impl in contract.pairs() if op.name == name]
    return pytest.mark.parametrize("impl", found, ids=lambda impl: impl.name)


def run(impl, function, *arrays):
    """`function(*arrays)` under jit, in the implementation's surroundings."""
    contract.skip_unless_built(impl)
    with contract.running(impl):
        return jax.tree.map(np.asarray, jax.block_until_ready(jax.jit(function)(*arrays)))


@functools.cache
def attention_and_gradients(implementation):
    """Attention and its gradients, for `run`: one function for all tests, so one program for all values of a shape."""
    call = functools.partial(flash_attention, scale=0.37, implementation=implementation)

    def both(q, k, v):
        out, pull = jax.vjp(call, q, k, v)
        return out, pull(jnp.ones_like(out))

    return both


def value_and_slope(function):
    """(f(x), f'(x)) element by element."""

    def both(x):
        y, pull = jax.vjp(function, x)
        return y, pull(jnp.ones_like(y))[0]

    return both


def true_gelu(x, approximate=False):
    x = np.asarray(x, np.float64)
    if not approximate:
        below, density = 0.5 * special.erfc(-x / np.sqrt(2)), np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
        return x * below, below + x * density
    inner, slope = (np.sqrt(8 / np.pi) * of for of in (x + 0.044715 * x**3, 1 + 3 * 0.044715 * x**2))
    below = special.expit(inner)
    return x * below, below + x * below * (1 - below) * slope


TAIL = np.linspace(-12, -1, 600, dtype=np.float32).reshape(4, 150)
SLOPE_AT_0 = 0.76  # gelu's slope is 0 there: it has no relative accuracy within a tenth


def check_tail(got, true, x, tolerance):
    near = np.abs(np.abs(np.asarray(x, np.float64)) - SLOPE_AT_0) < 0.35
    for ours, right in zip(got, true, strict=True):
        error = np.abs(np.asarray(ours, np.float64) / right - 1)[~near]
        assert error.max() < tolerance


@implementations("activation")
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-5), ("bfloat16", 2**-7)])
@pytest.mark.parametrize("approximate", [False, True])
def test_the_tail_of_gelu_has_relative_accuracy(impl, dtype, tolerance, approximate):
    """1 + erf(x), or 1 + tanh, would leave nothing of it below -5."""
    x = jnp.asarray(TAIL[TAIL > -8] if approximate else TAIL, dtype)  # gelu_tanh is 0 in float32 below about -10
    function = functools.partial(gelu, approximate=approximate, implementation=impl.name)
    got = run(impl, value_and_slope(function), x)
    check_tail(got, true_gelu(np.asarray(x, np.float64), approximate), x, tolerance)


@implementations("gemm")
def test_the_tail_of_gelu_after_a_product(impl):
    x = TAIL[:, ::2]

    def both(x):
        y, pull = jax.vjp(
            lambda x: gemm(x, jnp.eye(75), activation="gelu", precision="highest", implementation=impl.name), x
        )
        return y, pull(jnp.ones_like(y))[0]

    check_tail(run(impl, both, x), true_gelu(x), x, 2e-4)  # the product itself is within a few 2^-24


@implementations("gated_linear_unit")
def test_the_tail_of_gelu_in_a_gated_unit(impl):
    x = TAIL[:, ::2]

    def unit(x):
        up = jnp.zeros((75, 75)).at[0].set(1.0)
        shift = jnp.concatenate([jnp.ones((4, 1)), x[:, 1:]], axis=1)
        return gated_linear_unit(shift, (jnp.eye(75), up), activation="gelu", implementation=impl.name)

    got = run(impl, unit, x)[:, 1:]
    np.testing.assert_allclose(got, true_gelu(x)[0][:, 1:], rtol=2e-4)


@implementations("activation")
@pytest.mark.parametrize(
    "function",
    [gelu, functools.partial(gelu, approximate=True), silu, relu2],
    ids=["gelu", "gelu_tanh", "silu", "relu2"],
)
def test_infinite_arguments_give_the_limits(impl, function):
    """0 and infinity, with slopes of 0 and 1 (relu2: infinity), and NaN for NaN."""
    ends = np.array([-np.inf, -1e30, -200.0, 1e30, np.inf, np.nan], np.float32)
    y, slope = run(impl, value_and_slope(functools.partial(function, implementation=impl.name)), ends)
    assert (np.abs(y[:3]) < 1e-30).all() and np.isnan(y[5])  # the CPU's kernels stay at silu(-80), -1e-33
    assert (np.abs(slope[:3]) < 1e-30).all() and np.isnan(slope[5])
    if function is not relu2:
        assert (y[3:5] == ends[3:5]).all() and (slope[3:5] == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_the_formulas_are_finite_everywhere(activation, dtype):
    with jax.enable_x64(True):
        z = jnp.concatenate([jnp.linspace(-800, 800, 3201), jnp.array([-jnp.inf, -1e30, 1e30, jnp.inf])]).astype(dtype)
        y, slope = activate(activation, z), derivative(activation, z)
        by_jax = jax.vmap(jax.grad(lambda z: activate(activation, z)))(z[:-4])
    assert not np.isnan(y).any() and not np.isnan(slope).any()
    np.testing.assert_allclose(slope[:-4][z[:-4] != 0], by_jax[z[:-4] != 0], rtol=1e-4, atol=1e-6)


def one_hot_attention(dtype, size):
    """Operands whose logits are about `size`, all of them far from each other: the output is one key's value."""
    rng = np.random.default_rng(0)
    keys, dim = 40, 64
    q = jnp.asarray(np.sqrt(size) * rng.uniform(0.3, 1.0, (1, 2, 33, dim)), dtype)
    q = q.at[:, :, 0, 7].mul(4)  # the row that is taken alone has one maximum
    k = jnp.asarray(np.sqrt(size) * np.eye(keys, dim)[None, None].repeat(2, 1), dtype)
    v = jnp.asarray(rng.standard_normal((1, 2, keys, dim)), dtype)
    chosen = np.argmax(np.asarray(q, np.float64)[..., :keys], axis=-1)
    return q, k, v, np.take_along_axis(np.asarray(v, np.float64), chosen[..., None], axis=2)


@pytest.mark.turns(4)
@implementations("attention")
@pytest.mark.parametrize("rows", [33, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1e9, 3e11])
def test_attention_of_huge_logits(impl, dtype, size, rows):
    """Forward and backward: a fused multiply-add after the maximum must not make infinity of it."""
    q, k, v, want = one_hot_attention(dtype, size)
    q, want = q[:, :, :rows], want[:, :, :rows]
    out, gradients = run(impl, attention_and_gradients(impl.name), q, k, v)
    ties = np.sort(np.asarray(q, np.float64)[..., :40], axis=-1)
    clear = ties[..., -1] > 1.02 * ties[..., -2]  # bfloat16 has rows with two maxima, float32 such within a rounding
    assert clear.any()
    np.testing.assert_allclose(out.astype(np.float64)[clear], want[clear], rtol=1e-2)
    assert all(np.isfinite(g.astype(np.float64)).all() for g in gradients)


@pytest.mark.turns(4)
@implementations("paged_attention")
@pytest.mark.parametrize("size", [1e9, 3e11])
def test_paged_attention_of_huge_logits(impl, size):
    q, k, v, want = one_hot_attention("float32", size)
    pages = tuple(np.moveaxis(np.asarray(x[0]), 0, 1).reshape(5, 8, 2, 64) for x in (k, v))
    out = run(
        impl,
        lambda q, k, v: ragged_paged_attention(
            q, (k, v), jnp.array([40]), jnp.arange(5)[None], jnp.array([0, 1]), scale=0.37, implementation=impl.name
        ),
        np.asarray(q[0, :, -1])[None],
        *pages,
    )
    np.testing.assert_allclose(out[0], want[0, :, -1], rtol=1e-2)


@pytest.mark.skipif(contract.TRITON, reason="the README of normalizations has the range of the Triton kernels")
@pytest.mark.parametrize("name", ["xla", "native_cpu"])
@pytest.mark.parametrize("call", [rms_norm, layer_norm])
def test_normalizations_of_tiny_and_huge_rows(call, name):
    """Squares of these rows leave the range of float32, or come so near its lower end that they lose digits."""
    impl = next(impl for op, impl in contract.pairs() if (op.name, impl.name) == ("norm", name))
    sizes = np.array([1e-25, 1e-20, 1e-18, 1.0, 1e13, 1e18, 1e20, 1e30])[:, None]
    x = (sizes * np.random.default_rng(0).standard_normal((8, 70))).astype(np.float32)
    dy = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    for eps in (0.0, 1e-6):

        def both(x, dy, eps=eps):
            y, pull = jax.vjp(functools.partial(call, eps=eps, implementation=name), x)
            return y, pull(dy)[0]

        y, dx = run(impl, both, x, dy)
        centred = x.astype(np.float64)
        centred -= centred.mean(-1, keepdims=True) * (call is layer_norm)
        rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
        slope = dy - centred * rstd * (dy * centred * rstd).mean(-1, keepdims=True)
        slope = (slope - dy.mean(-1, keepdims=True) * (call is layer_norm)) * rstd
        for result, expected in ((y, centred * rstd), (dx, slope)):
            largest = np.abs(expected).max(-1, keepdims=True)
            np.testing.assert_allclose(result / largest, expected / largest, atol=1e-6)
    constant = np.full((1, 70), 1e25, np.float32)
    assert np.all(np.abs(run(impl, functools.partial(layer_norm, implementation=name), constant)) < 1e3)
