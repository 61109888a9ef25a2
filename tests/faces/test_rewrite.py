"""Programs rewritten before they are compiled: passes that keep every bit, and operations recognised."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rotation
import vishwamai
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.rewrite import explain_xla_compilation, optimize_xla_compilation
from vishwamai.rewrite.graph import lossless
from vishwamai.rewrite.masks import band, options

B, H, T, D = 2, 2, 8, 16


def run(program, *args):
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)


def names(program):
    return [eqn.primitive.name for eqn in program.eqns]


def random_program(rng):
    """A function of two arrays with repeated, dead and cast values, inner programs and an effect-free random key."""
    plan = [(rng.integers(9), rng.integers(1 << 16), rng.integers(1 << 16)) for _ in range(24)]

    def function(x, y):
        values = [x, y, jnp.float32(0.0) * x, jnp.float32(-0.0) * x]
        for kind, i, j in plan:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == 0:
                new = a * b
            elif kind == 1:
                new = jnp.sin(a) - b
            elif kind == 2:
                new = a.astype(jnp.bfloat16).astype(jnp.float32)
            elif kind == 3:
                new = a.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16).astype(jnp.float32) + b
            elif kind == 4:
                new = jnp.where(a > b, a, jnp.maximum(a, b))
            elif kind == 5:
                new = jax.jit(lambda p, q: (jnp.tanh(p), jnp.tanh(p) * jnp.tanh(p), q))(a, b)[1]
            elif kind == 6:
                new = lax.scan(lambda c, p: (c + jnp.cos(p) * jnp.cos(p), jnp.cos(p) + 0 * jnp.exp(p)), a[0], b)[1]
            elif kind == 7:
                new = lax.cond(a[0, 0] > 0, lambda p: p + jnp.abs(p) + jnp.abs(p), lambda p: -p, b)
            else:
                new = a + jax.random.uniform(jax.random.key(int(i) % 2), a.shape)
            values.append(new)
        return values[-1], values[-3], values[-5] + values[-1]

    return function


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(s, marks=pytest.mark.long) for s in range(2, 8))])
def test_values_are_kept_bit_for_bit(seed):
    rng = np.random.default_rng([rotation.SEED, seed])
    args = [jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) for _ in range(2)]
    program = jax.make_jaxpr(random_program(rng))(*args)
    report = explain_xla_compilation(program, "v5e")
    assert report.after < report.before and not report.findings
    for before, after in zip(run(program, *args), run(report.program, *args), strict=True):
        assert before.dtype == after.dtype and before.tobytes() == after.tobytes()


def test_only_casts_that_lose_nothing_are_undone():
    x = jnp.ones(3, jnp.bfloat16)
    there_and_back = optimize_xla_compilation(jax.make_jaxpr(lambda x: x.astype(jnp.float32).astype(jnp.bfloat16))(x))
    assert not there_and_back.eqns
    rounded = jax.make_jaxpr(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32))(jnp.ones(3))
    assert names(optimize_xla_compilation(rounded)) == ["convert_element_type"] * 2
    assert not lossless(jnp.float32, jnp.float16) and not lossless(jnp.int32, jnp.float32)
    for narrow in (jnp.int8, jnp.uint8, jnp.int16, jnp.bfloat16, jnp.float16, jnp.bool_):
        assert lossless(narrow, jnp.float32)


def test_zeros_of_either_sign_and_keys_stay_apart():
    def function(x, a, b):
        return x * 0.0, x * -0.0, jax.random.uniform(a), jax.random.uniform(b), jax.random.uniform(a)

    args = jnp.ones(2), *jax.random.split(jax.random.key(1))
    program = jax.make_jaxpr(function)(*args)
    report = explain_xla_compilation(program)
    before, after = run(program, *args), run(report.program, *args)
    assert report.repeated and all(np.array_equal(np.signbit(p), np.signbit(q)) for p, q in zip(before, after))
    assert after[2] == after[4] != after[3]


def test_effects_stay_and_donated_values_are_left_alone():
    said = []

    def function(x):
        jax.debug.callback(lambda v: said.append(float(v)), jnp.sum(x) + 1)
        jax.debug.callback(lambda v: said.append(float(v)), jnp.sum(x) + 1)
        return x * 2

    program = optimize_xla_compilation(jax.make_jaxpr(function)(jnp.ones(3)))
    run(program, jnp.ones(3))
    jax.effects_barrier()
    assert said == [4.0, 4.0]

    inner = jax.jit(lambda x: x + 1, donate_argnums=0)
    given = jax.make_jaxpr(lambda x: (inner(jnp.sin(x)), jnp.sin(x)))(jnp.ones(3))
    out = run(optimize_xla_compilation(given), jnp.ones(3))
    assert np.array_equal(out[0], out[1] + 1)


def scores(q, k):
    return jnp.einsum("bhqd,bhkd->bhqk", q, k) / np.sqrt(D)


def output(weights, v):
    return jnp.einsum("bhqk,bhkd->bhqd", weights, v)


def causal(q, k, v):
    return output(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores(q, k), -1e9)), v)


def window(q, k, v):
    i, s = jnp.arange(T), 30.0 * jnp.tanh(scores(q, k) / 30.0)
    s = jnp.where((i[:, None] >= i) & (i[:, None] - i < 3), s, -jnp.inf)
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return output(e / e.sum(-1, keepdims=True), v)


def additive(q, k, v):
    hidden = jnp.where(jnp.arange(T)[None] > jnp.arange(T)[:, None], -1e9, 0.0)
    return output(jax.nn.softmax(scores(q, k) + hidden + jnp.sin(jnp.arange(1.0, 1 + T)) * q[0, 0, 0, 0]), v)


def bounded(q, k):
    return 3.0 * jnp.tanh(scores(q, k) / 3.0)


def biased(q, k, v):
    bias = jnp.sin(jnp.arange(1.0, 1 + T)) * q[0, 0, 0, 0]
    s = 1.5 * (bounded(q, k) - bias)
    return output(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((T, T), bool)), s, -1e9)), v)


def sequence_first(q, k, v):
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], is_causal=True).transpose(0, 2, 1, 3)


def plain(q, k, v):
    return jax.nn.softmax(q[0, 0] @ k[0, 0].T) @ v[0, 0]


def jitted(q, k, v):
    return jax.jit(causal)(q, k, v) * 2


def scanned(q, k, v):
    return lax.scan(lambda c, x: (c, causal(*(y[None] for y in x))[0]), 0, (q, k, v))[1]


def heads(seed=0):
    return list(jax.random.normal(jax.random.key(seed), (3, B, H, T, D)))


def close(function, args, target="v5e", expected="flash_attention", words=""):
    """The function and its gradients, rewritten and not."""
    report = explain_xla_compilation(jax.make_jaxpr(function)(*args), target)
    assert [(f.operation, f.replaced) for f in report.findings] == [(expected, True)], str(report)
    assert words in report.findings[0].reason and report.recognised

    def new(*args):
        return run(report.program, *args)[0]

    floats = tuple(i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating))
    both = [
        jax.jit(jax.value_and_grad(lambda *a, f=f: jnp.sum(jnp.sin(f(*a))), floats))(*args) for f in (function, new)
    ]
    for before, after in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(function(*args), new(*args), rtol=1e-5, atol=1e-5)
    return report


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (causal, "scale 0.25, causal"),
        (window, "causal, window=(2, None), softcap=30.0"),
        (additive, "causal, 1 bias"),
        (biased, "causal, softcap=4.5, 1 bias after the soft-cap"),
        (sequence_first, "heads 4/2"),
        (plain, "scale 1"),
        (jitted, "causal"),
        (scanned, "causal"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_attention_is_recognised(function, words):
    close(function, heads(), words=words)


@pytest.mark.parametrize("fill", [-1e30, -np.inf])
def test_rows_that_see_nothing_keep_their_value(fill):
    mask = jax.random.bernoulli(jax.random.key(1), 0.6, (B, 1, T, T)).at[0, 0, 3].set(False)
    args = [*heads(), mask]

    def function(q, k, v, mask):
        return output(jax.nn.softmax(jnp.where(mask, scores(q, k), fill)), v)

    if np.isfinite(fill):
        close(function, args, words="the mean of the values")
        return
    program = optimize_xla_compilation(jax.make_jaxpr(function)(*args), "v5e")
    found = run(program, *args)[0]
    assert np.isnan(found[0, :, 3]).all()
    np.testing.assert_allclose(found, function(*args), rtol=1e-5, atol=1e-5)


def test_narrow_attention_is_no_less_accurate():
    def function(q, k, v):
        s = jnp.einsum("bhqd,bhkd->bhqk", q, k, preferred_element_type=jnp.float32) * 0.25
        return output(jax.nn.softmax(s).astype(q.dtype), v)

    args = [x.astype(jnp.bfloat16) for x in heads()]
    program = optimize_xla_compilation(jax.make_jaxpr(function)(*args), "v5e")
    q, k, v = (np.asarray(x, np.float64) for x in args)
    p = np.exp(np.einsum("bhqd,bhkd->bhqk", q, k) / 4)
    exact = np.einsum("bhqk,bhkd->bhqd", p / p.sum(-1, keepdims=True), v)
    hand, ours = (np.abs(np.asarray(x, np.float64) - exact).max() for x in (function(*args), run(program, *args)[0]))
    assert ours <= 2 * hand + 1e-3

    wide = jax.make_jaxpr(lambda q, k, v: jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(
        jnp.einsum("bhqd,bhkd->bhqk", q, k)), v, preferred_element_type=jnp.float32))(*args)  # fmt: skip
    assert "rounds it" in explain_xla_compilation(wide, "v5e").findings[0].reason


def dropped(q, k, v):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, (B, H, T, T))
    return output(jnp.where(keep, jax.nn.softmax(scores(q, k)), 0.0), v)


def twice_biased(q, k, v):
    return output(jax.nn.softmax(jnp.tanh(scores(q, k) + q[..., :1]) + q[..., 1:2]), v)


def read_twice(q, k, v):
    weights = jax.nn.softmax(scores(q, k))
    return output(weights, v), weights


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda q, k, v: output(jax.nn.softmax(scores(q, k), axis=-2), v), "sums over another axis"),
        (lambda q, k, v: output(jax.nn.softmax(scores(q, k), axis=(-1, -2)), v), "over 2 axes"),
        (lambda q, k, v: output(jax.nn.softmax(scores(q, k) * q[0, 0, 0, 0]), v), "not a constant of the program"),
        (lambda q, k, v: output(jax.nn.softmax(jnp.sin(scores(q, k))), v), "`sin` is between the product"),
        (dropped, "`select_n` is between the softmax and the product"),
        (read_twice, "the weights are used elsewhere"),
        (twice_biased, "another one after"),
        (lambda q, k, v: output(jax.nn.softmax(jnp.where(q[..., :1] > 0, scores(q, k), -5.0)), v), "need not hide"),
        (lambda q, k, v: output(jax.nn.softmax(jnp.tril(scores(q, k))), v), "need not hide"),
    ],
)  # fmt: skip
def test_what_looks_like_attention_is_left_with_the_reason(function, reason):
    program = jax.make_jaxpr(function)(*heads())
    report = explain_xla_compilation(program, "v5e")
    assert [f.replaced for f in report.findings] == [False] and reason in report.findings[0].reason, str(report)
    before, after = run(program, *heads()), run(report.program, *heads())
    assert all(np.array_equal(p, q) for p, q in zip(before, after, strict=True))


def rms(x, w, b):
    x32 = x.astype(jnp.float32)
    return (x32 * lax.rsqrt(jnp.mean(x32**2, -1, keepdims=True) + 1e-5)).astype(x.dtype) * w


def layer(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def by_squares(x, w, b):
    mean, square = x.mean(-1, keepdims=True), (x * x).mean(-1, keepdims=True)
    return (x - mean) * (lax.rsqrt(jnp.maximum(square - mean**2, 0.0) + 1e-5) * w) + b


@pytest.mark.parametrize(("function", "name"), [(rms, "rms_norm"), (layer, "layer_norm"), (by_squares, "layer_norm")])
def test_norms_are_recognised(function, name):
    x = jax.random.normal(jax.random.key(0), (4, 3, 32))
    close(function, [x, jnp.linspace(0.5, 2, 32), jnp.linspace(-1, 1, 32)], expected=name, words="eps 1e-05")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * lax.rsqrt(jnp.mean(x * x, 0, keepdims=True) + 1e-6), "other axes than the last"),
        (lambda x: x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6), "eps is added after"),
        (lambda x: (x + 1) * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6), "not the array whose squares"),
        (lambda x: x * lax.rsqrt(jnp.mean(x * x, -1) + 1e-6), "not the array whose squares"),
        (lambda x: x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) / 3 + 1e-6), "divided by 3"),
    ],
)
def test_what_looks_like_a_norm_is_left_with_the_reason(function, reason):
    x = jax.random.normal(jax.random.key(0), (32, 32))
    report = explain_xla_compilation(jax.make_jaxpr(function)(x), "v5e")
    assert [f.replaced for f in report.findings] == [False] and reason in report.findings[0].reason, str(report)
    assert np.array_equal(run(report.program, x)[0], function(x))


@pytest.mark.parametrize("target", ["v5e", "h100", "cpu:avx2", "cpu"])
def test_the_target_decides(target):
    x = jnp.ones((4, 32))
    report = explain_xla_compilation(jax.make_jaxpr(lambda x: rms(x, x[0], None))(x), target)
    runs = vishwamai.explain(vishwamai.rms_norm, x, x[0], target=target).calls[0].runs
    assert report.findings[0].replaced == (runs != "xla")
    assert report.findings[0].plan is None or report.findings[0].plan.runs == runs


def test_a_program_of_a_gradient_is_left_alone():
    program = jax.make_jaxpr(jax.grad(lambda *a: causal(*a).sum(), (0, 1, 2)))(*heads())
    report = explain_xla_compilation(program, "v5e")
    assert not any(f.replaced for f in report.findings)
    for before, after in zip(run(program, *heads()), run(report.program, *heads()), strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-6, atol=1e-6)


def test_bands():
    rng = np.random.default_rng(rotation.SEED)
    for _ in range(50):
        rows, columns = rng.integers(1, 7, 2)
        low, high = sorted(rng.integers(-6, 7, 2))
        d = np.arange(columns) - np.arange(rows)[:, None]
        seen = (d >= low) & (d <= high)
        found = band(seen)
        if found is not None:
            a, b = (-99 if found[0] is None else found[0]), (99 if found[1] is None else found[1])
            assert np.array_equal(seen, (d >= a) & (d <= b))
        else:
            assert not seen.any()
        flipped = seen.copy()
        flipped[rng.integers(rows), rng.integers(columns)] ^= True
        assert band(flipped) is None or band(flipped) != found
    assert options(None, 2, 4, 6) == {"causal": True, "causal_align": "bottom_right"}


def test_wrong_arguments():
    with pytest.raises(KernelError, match=r"pass the program that `jax.make_jaxpr"):
        optimize_xla_compilation(jnp.sin)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="no target is called"):
        optimize_xla_compilation(jax.make_jaxpr(jnp.sin)(1.0), "v99")
    held = jax.make_jaxpr(lambda x: x + np.ones(3))(jnp.ones(3)).jaxpr
    if held.constvars:
        with pytest.raises(KernelError, match="without the values of its 1 constants"):
            optimize_xla_compilation(held)
