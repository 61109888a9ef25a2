"""The native CPU kernels beyond the contract suite: every instruction set, threads, edges of the numbers, and a machine
without the module.
"""

import os
import platform
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from vishwamai.core import ffi
from vishwamai.core.errors import ConfigError, DeviceError

NATIVE: dict[str, Any] = {"implementation": "native_cpu"}

needs_native = pytest.mark.skipif(ffi.why_not() is not None, reason=str(ffi.why_not()))


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs code in a fresh process."""
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=540)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b by the native kernel."""
    return np.asarray(vishwamai.gemm(jnp.asarray(a), jnp.asarray(b), **NATIVE))


# One call of each kernel, ragged and with every feature, against the reference in float64.
EVERY_KERNEL = """
import jax, jax.numpy as jnp, numpy as np, vishwamai
from vishwamai.core import ffi
jax.config.update("jax_enable_x64", True)
print("isa", ffi.isa())
rng = np.random.default_rng(0)
def near(got, true, tolerance):
    got, true = (np.asarray(x, np.float64) for x in (got, true))
    error = np.abs(got - true).max() / np.abs(true).max()
    assert error <= tolerance, error
for dtype, tolerance in (("float32", 3e-6), ("bfloat16", 2e-2), ("float16", 2e-3), ("float64", 1e-13)):
    def array(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)
    q, k, v = array(2, 4, 63, 80), array(2, 2, 100, 80), array(2, 2, 100, 33)
    bias, sinks, mask = array(1, 4, 63, 100), array(4), jnp.asarray(rng.random((2, 1, 1, 100)) < 0.8)
    def attention(arrays, how):
        q, k, v, bias, sinks = arrays
        return vishwamai.flash_attention(q, k, v, bias, mask, sinks=sinks, window=(40, 30), softcap=9.0,
            implementation=how, dropout_rate=0.2, dropout_key=jax.random.key(1))
    def norm(arrays, how):
        return vishwamai.layer_norm(*arrays, implementation=how)
    def gemm(arrays, how):
        return vishwamai.gemm(*arrays[:2], bias=arrays[2], activation="gelu", transpose_b=True, implementation=how)
    def decode(arrays, how):
        return vishwamai.flash_attention(*arrays, causal=True, causal_align="bottom_right", implementation=how)
    def softmax(arrays, how):
        return vishwamai.softmax(*arrays, implementation=how) - vishwamai.log_softmax(*arrays, implementation=how)
    def dropout(arrays, how):
        dropped = vishwamai.fused_gelu_dropout(*arrays, 0.3, key=jax.random.key(2), implementation=how)
        gate = vishwamai.silu(*arrays, implementation=how)
        return dropped + vishwamai.gelu(gate, approximate=True, implementation=how)
    def rope(arrays, how):
        turned = vishwamai.apply_rope(arrays, rotary_dim=50, interleaved=True, implementation=how)
        return jnp.concatenate(vishwamai.apply_rope(turned, implementation=how), axis=1)
    def paged(arrays, how):
        lens, table, starts = (jnp.asarray(x, jnp.int32) for x in ([19, 24], [[5, 2, 0], [1, 3, 4]], [0, 1, 6]))
        options = dict(window=12, softcap=9.0, implementation=how)
        return vishwamai.ragged_paged_attention(*arrays, lens, table, starts, **options)
    def gated(arrays, how):
        return vishwamai.gated_linear_unit(arrays[0], arrays[1:], "gelu", implementation=how)
    def loss(arrays, how):
        return vishwamai.linear_cross_entropy(arrays[0], arrays[1], jnp.arange(33) * 7, bias=arrays[2],
            softcap=9.0, label_smoothing=0.1, reduction="none", implementation=how)
    def sparse(arrays, how):
        at = np.array([[2, 1], [0, 0], [2, 1], [1, 1], [0, 1]])
        return vishwamai.block_sparse_matmul(*arrays, at, shape=(60, 70), implementation=how)
    def blocks(arrays, how):
        live = np.random.default_rng(3).random((4, 9, 2)) < 0.5
        options = dict(block_size=(7, 50), bias=arrays[3], implementation=how)
        return vishwamai.block_sparse_attention(*arrays[:3], live, **options)
    cases = ((attention, (q, k, v, bias, sinks)), (norm, (array(7, 100), array(100), array(100))),
             (gemm, (array(33, 100), array(65, 100), array(65))), (decode, (array(2, 4, 2, 80), k, v)),
             (softmax, (array(7, 100),)), (dropout, (array(9, 100),)), (rope, (array(2, 3, 5, 70), array(2, 1, 5, 70))),
             (paged, (array(7, 4, 70), array(6, 8, 4, 70))))
    for function, arrays in cases:
        wide = [x.astype(jnp.float64) for x in arrays]
        shape = jax.eval_shape(lambda a: function(a, "native_cpu"), arrays)
        w = jnp.asarray(rng.standard_normal(shape.shape), shape.dtype)
        got, pull = jax.vjp(lambda a: function(a, "native_cpu"), arrays)
        true, true_pull = jax.vjp(lambda a: function(a, "xla"), tuple(wide))
        near(got, true, tolerance)
        for a, b in zip(pull(w)[0], true_pull(w.astype(jnp.float64))[0]):
            near(a, b, 4 * tolerance)
a, b = (jnp.asarray(rng.integers(-127, 128, shape), jnp.int8) for shape in ((33, 130), (130, 65)))
got = vishwamai.gemm(a, b, implementation="native_cpu")
np.testing.assert_array_equal(got, np.asarray(a, int) @ np.asarray(b, int))
a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 14336), (14336, 40)))
for rows in (1, 16, 64):  # sums as long as Llama's
    got = vishwamai.gemm(a[:rows], b, implementation="native_cpu")
    near(got, np.asarray(a, float)[:rows] @ np.asarray(b, float), 1e-6)
from vishwamai.ops.delta import PooledStates
heads, width = jnp.asarray(rng.standard_normal((2, 1, 4, 9, 19))), jnp.asarray(rng.standard_normal((1, 4, 9, 75)))
pool = jnp.asarray(rng.standard_normal((5, 4, 19, 75)))
slots, starts = jnp.array([[1, 3, -1], [3, 1, 0]]), jnp.array([0, 1, 8, 9])
def step(how, dtype):
    q, k, v, states = (x.astype(dtype) for x in (*heads, width, pool))
    states = PooledStates(states, slots, starts)
    return vishwamai.gated_delta_rule(q, 0.1 * k, v, initial_state=states, return_state=True, implementation=how)
for got, true in zip(jax.jit(lambda: step("native_cpu", "float32"))(), jax.jit(lambda: step("xla", "float64"))()):
    near(got, true, 3e-6)
print("passed")
"""


@pytest.mark.long
@needs_native
@pytest.mark.parametrize("isa", ffi.ISAS)
def test_every_instruction_set(isa):
    """Each path that this machine has gives right values and gradients, and scratch memory that starts as NaN never
    shows.
    """
    if isa not in ffi.isas():
        pytest.skip(f"this machine has no {isa}")
    result = python(EVERY_KERNEL, VISHWAMAI_CPU_ISA=isa, VISHWAMAI_CPU_POISON="1")
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["isa", isa, "passed"]


# Products of dot instructions: int8 as far from zero as it goes, steps that are not whole, and what bfloat16 passes on.
DOT_PRODUCTS = """
import jax.numpy as jnp, numpy as np, vishwamai
from vishwamai.core import ffi
rng = np.random.default_rng(0)
for m, k, n in ((33, 1, 5), (5, 67, 40), (300, 130, 70)):
    a, b = (rng.choice([-128, -127, 1, 127], shape).astype(np.int8) for shape in ((m, k), (k, n)))
    b[:, 0], a[-1] = -128, -128
    for weight in (jnp.asarray(b), vishwamai.pack_weight(jnp.asarray(b))):
        got = vishwamai.gemm(jnp.asarray(a), weight)
        np.testing.assert_array_equal(got, a.astype(int) @ b.astype(int))
    x, y = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((m, k), (k, n)))
    true = np.asarray(x, float) @ np.asarray(y, float)
    for weight in (y, vishwamai.pack_weight(y)):
        got = vishwamai.gemm(x, weight, out_dtype="float32")
        np.testing.assert_allclose(got, true, atol=4e-6 * np.abs(true).max(), rtol=0)
    for rows in (1, 3, 16):
        got = vishwamai.gemm(x[:rows], y.T, transpose_b=True, out_dtype="float32")
        np.testing.assert_allclose(got, true[:rows], atol=4e-6 * np.abs(true).max(), rtol=0)
x = x.at[7, 3].set(jnp.inf).at[250, 129].set(jnp.nan)
bad = ~np.isfinite(np.asarray(vishwamai.gemm(x, y), np.float32)).all(1)
print(ffi.isa(), np.flatnonzero(bad))
"""


@pytest.mark.turns(4)
@needs_native
def test_dot_products():
    """The set of AVX-512 with BF16 and VNNI but without tiles: int8 is exact, bfloat16 is summed in float32, and a NaN
    stays in its row.
    """
    if "avx512_bf16" not in ffi.isas():
        pytest.skip("this machine has no avx512_bf16")
    result = python(DOT_PRODUCTS, VISHWAMAI_CPU_ISA="avx512_bf16", VISHWAMAI_CPU_POISON="1")
    assert result.stdout.split() == ["avx512_bf16", "[", "7", "250]"], result.stdout + result.stderr[-2000:]


@needs_native
def test_an_unknown_instruction_set_is_said():
    code = "import warnings; warnings.simplefilter('error')\nfrom vishwamai.core import ffi; ffi.isa()"
    result = python(code, VISHWAMAI_CPU_ISA="sse9")
    assert result.returncode != 0 and "none of generic, avx2, avx512, avx512_bf16, amx" in result.stderr


def test_a_missing_module_names_the_fix(monkeypatch):
    """Without the module every native kernel declines with the command that builds it, and asking for it is an
    error.
    """
    monkeypatch.setitem(sys.modules, "vishwamai.core._cpu", None)
    monkeypatch.delenv("VISHWAMAI_CPU_MODULE", raising=False)  # it would name another build
    ffi._load.cache_clear()
    try:
        assert "pip install" in (ffi.why_not() or "")
        with pytest.raises(DeviceError, match="pip install"):
            ffi.isa()
        with pytest.raises(vishwamai.UnsupportedError, match="native CPU kernels"):
            vishwamai.rms_norm(jnp.ones((2, 8)), **NATIVE)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            np.testing.assert_allclose(vishwamai.rms_norm(jnp.ones((2, 8)), eps=0.0), 1.0, rtol=1e-6)
    finally:
        monkeypatch.undo()
        ffi._load.cache_clear()


@needs_native
def test_calls_within_calls_finish():
    """Many calls at once, from many devices of one process, share one small pool: nobody waits for a thread that never
    comes.
    """
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 300, 260)), jnp.float32)

    def step(x):
        return vishwamai.rms_norm(vishwamai.gemm(x, x.T, **NATIVE), **NATIVE)

    expected = np.asarray(jax.vmap(lambda x: vishwamai.rms_norm(x @ x.T, implementation="xla"))(x))
    devices = jax.devices()
    pending = [jax.jit(step)(jax.device_put(x[i % 8], devices[i % len(devices)])) for i in range(32)]
    for i, y in enumerate(pending):
        np.testing.assert_allclose(np.asarray(y), expected[i % 8], rtol=2e-4, atol=2e-5)


# The kernels for few float32 rows (to 48) and small bfloat16 products (rows and depth in multiples of 32), at their
# limits and just beyond.
@needs_native
@pytest.mark.parametrize(
    ("dtype", "m", "k", "n"),
    [
        ("float32", 5, 17, 65),
        ("float32", 48, 100, 131),
        ("float32", 49, 100, 131),
        ("bfloat16", 544, 288, 90),
        ("bfloat16", 288, 513, 33),
    ],
)
def test_products_beside_the_blocks(dtype, m, k, n):
    rng = np.random.default_rng(0)
    a, b, bias = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, k), (k, n), (n,)))
    wide = [np.asarray(x, np.float64) for x in (a, b, bias)]
    true = np.maximum(wide[0] @ wide[1] + wide[2], 0)
    limit = 3e-6 if dtype == "float32" else 5e-3  # of the largest sum: bfloat16 rounds the result to 2^-9
    for y, transposed in ((b, False), (b.T, True)):
        got = vishwamai.gemm(a, y, bias=bias, activation="relu", transpose_b=transposed, **NATIVE)
        assert np.abs(np.asarray(got, np.float64) - true).max() <= limit * np.abs(true).max()


@pytest.mark.turns(4)
@needs_native
def test_thread_limit_changes_no_bit_of_a_product():
    code = """
import numpy as np, jax.numpy as jnp, vishwamai, hashlib
rng = np.random.default_rng(0)
a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((300, 700), (700, 200)))
print(hashlib.sha256(np.asarray(vishwamai.gemm(a, b, implementation="native_cpu")).tobytes()).hexdigest())
"""
    digests = {python(code, VISHWAMAI_CPU_THREADS=n).stdout for n in ("1", "2")}
    assert len(digests) == 1 and digests != {""}


@needs_native
@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan, 3.4e38])
def test_numbers_that_do_not_split(special):
    """A float32 product with infinities, NaN or numbers at the limit is float32's own: only the entry's row sees it."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    a[5, 7] = special
    b[7] = np.abs(b[7]) * 0.01 + 0.001
    with np.errstate(all="ignore"):
        true = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    got = product(a, b)
    np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4 * np.abs(np.delete(true, 5, 0)).max())


@needs_native
def test_small_numbers_keep_their_digits():
    """Splitting a tiny float32 would lose its lower parts to underflow; such products take the plain path."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    plain = product(a, b).astype(np.float64)
    scaled = product(a * np.float32(2.0**-100), b).astype(np.float64) * 2.0**100
    np.testing.assert_allclose(scaled, plain, atol=1e-5)


@needs_native
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_activations_over_their_whole_range(activation):
    """The epilogue's functions, from the most negative numbers through zero to the largest, with NaN passed on."""
    z = np.concatenate([-np.geomspace(1e30, 1e-30, 200), [0.0], np.geomspace(1e-30, 1e15, 200), [np.nan]]).astype(
        np.float32
    )
    got = np.asarray(vishwamai.gemm(jnp.asarray(z)[:, None], jnp.ones((1, 1)), activation=activation, **NATIVE))[:, 0]
    with jax.enable_x64(True):
        wide = jnp.asarray(z, jnp.float64)[:, None]
        true = np.asarray(
            vishwamai.gemm(wide, jnp.ones((1, 1), jnp.float64), activation=activation, implementation="xla")
        )[:, 0]
    assert np.isnan(got[-1])
    np.testing.assert_allclose(got[:-1], true[:-1], rtol=3e-6, atol=4e-7)


@needs_native
def test_activations_tend_to_their_limits():
    """The activations themselves, from the most negative numbers to the largest: 0 or x in the tails, infinities and
    NaN passed on.
    """
    functions = {
        "gelu": vishwamai.gelu,
        "gelu_tanh": lambda x, **how: vishwamai.gelu(x, approximate=True, **how),
        "silu": vishwamai.silu,
        "relu2": vishwamai.relu2,
    }
    z = np.concatenate([-np.geomspace(1e30, 1e-30, 200), [0.0], np.geomspace(1e-30, 1e15, 200)]).astype(np.float32)
    edges = jnp.asarray([-np.inf, np.inf, np.nan], jnp.float32)
    for name, function in functions.items():
        got = np.asarray(function(jnp.asarray(z), **NATIVE))
        with jax.enable_x64(True):
            true = np.asarray(function(jnp.asarray(z, jnp.float64), implementation="xla"))
        np.testing.assert_allclose(got, true, rtol=3e-6, atol=4e-7, err_msg=name)
        np.testing.assert_allclose(function(edges, **NATIVE), [0.0, np.inf, np.nan], atol=4e-7, err_msg=name)


@needs_native
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "float16"])
def test_every_stored_number_is_read(dtype):
    """One sequence of one key: the output is the value, so each of a narrow type's numbers can be seen, denormal ones,
    infinities and NaN among them.
    """
    every = np.arange(1 << 8 * jnp.dtype(dtype).itemsize, dtype=f"uint{8 * jnp.dtype(dtype).itemsize}")
    values = every.view(jnp.dtype(dtype)).reshape(-1, 1, 1, 64)  # a page for 64 numbers
    pages = jnp.asarray(np.concatenate([np.zeros_like(values), values], axis=2))  # key 0, value
    number = len(values)
    lens, table, starts = np.ones(number), np.arange(number)[:, None], np.arange(number + 1)
    tables = (jnp.asarray(x, jnp.int32) for x in (lens, table, starts))
    out = vishwamai.ragged_paged_attention(jnp.zeros((number, 1, 64)), pages, *tables, scale=1.0, **NATIVE)
    np.testing.assert_array_equal(np.asarray(out).ravel(), values.astype(np.float32).ravel())


@needs_native
@pytest.mark.parametrize("q_len", [1, 3, 16, 17])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_few_queries_over_a_cache(q_len, dtype):
    """The decode kernel (to 16 rows of a kv head) and the block kernel agree with the reference over a long, masked
    cache.
    """
    rng = np.random.default_rng(q_len)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), dtype)
        for shape in ((2, 4, q_len, 64), (2, 4, 1100, 64), (2, 4, 1100, 40))
    )
    mask = jnp.asarray(np.arange(1100) < np.array([700, 1100])[:, None])[:, None, None]

    def run(implementation, *arrays):
        return vishwamai.flash_attention(
            *arrays, mask=mask, causal=True, causal_align="bottom_right", return_lse=True, implementation=implementation
        )

    got, true = run("native_cpu", q, k, v), run("xla", *(x.astype(jnp.float32) for x in (q, k, v)))
    for a, b in zip(got, true, strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(
            a, b, atol=(2e-2 if dtype == "bfloat16" else 3e-6) * max(1.0, float(np.abs(b).max()))
        )


@pytest.mark.turns(3)
@needs_native
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is about glibc's allocator")
@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer's allocator stands for glibc's"
)
@pytest.mark.parametrize("threshold", (None, pytest.param("131072", marks=pytest.mark.long)))
def test_freed_results_are_kept(threshold):
    """Results of 2 MiB are not given back to the system at every call, unless the user has set glibc's threshold."""
    code = """
import resource, jax, jax.numpy as jnp, vishwamai
x = jnp.ones((512, 1024), jnp.float32)
call = jax.jit(lambda x: vishwamai.layer_norm(x, residual=x, implementation="native_cpu"))
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(50):
        jax.block_until_ready(call(x))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print("faults a call", min(faults() for _ in range(10)) / 50)
"""
    result = python(code, **({"MALLOC_TRIM_THRESHOLD_": threshold} if threshold else {}))
    faults = float(result.stdout.split()[-1])
    assert faults > 256 if threshold else faults < 16, (result.stdout, result.stderr)  # the results are 1024 pages


@needs_native
@pytest.mark.parametrize("layout", ("plain", "packed", "transposed"))
def test_long_sums_keep_their_digits(layout):
    """A product over 14336 of k (Llama's way down) is as exact with 1, 2, 4, 16 and 64 rows as XLA's of 64, which it
    takes in blocks of k: one chain is not.
    """
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((64, 14336), (14336, 40)))
    true = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    allowed = 2 * np.sqrt(np.mean((np.asarray(jax.jit(jnp.dot)(a, b)) - true) ** 2))
    weight = {"plain": b, "packed": vishwamai.pack_weight(b), "transposed": b.T}[layout]
    options = {**NATIVE, "transpose_b": layout == "transposed"}
    for rows in (1, 2, 4, 16, 64):
        error = np.sqrt(np.mean((np.asarray(vishwamai.gemm(a[:rows], weight, **options)) - true[:rows]) ** 2))
        assert error <= allowed, (rows, error, allowed)


def long_attention(queries: int, keys: int) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """The output and the gradients of one head that are sums over the longer axis, as a function of arrays and
    implementation; its arrays; the truth in float64.
    """
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((n, 64)).astype(np.float32) for n in (queries, keys, keys, queries)]
    q, k, v, w = (x.astype(np.float64) for x in arrays)
    s = q @ k.T / 8
    p = np.exp(s - s.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    out = p @ v
    ds = p * (w @ v.T - np.sum(w * out, -1, keepdims=True)) / 8

    def run(how, *arrays):
        *qkv, w = (jnp.asarray(x)[None, None] for x in arrays)
        out, pull = jax.vjp(lambda *qkv: vishwamai.flash_attention(*qkv, implementation=how), *qkv)
        return [x[0, 0] for x in (out, *pull(w))][long]

    long = slice(0, 2) if keys > queries else slice(2, 4)
    return run, arrays, [out, ds @ k, ds.T @ q, p.T @ w][long]


def long_norm(features: int) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """A layer norm of rows of mean 3 and its gradients."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, features)).astype(np.float32) + 3
    scale, w = (
        rng.standard_normal(features).astype(np.float32),
        rng.standard_normal((2, features)).astype(np.float32) + 1,
    )
    wide, g = x.astype(np.float64), (w * scale.astype(np.float64))
    mean, rstd = wide.mean(-1, keepdims=True), 1 / np.sqrt(wide.var(-1, keepdims=True) + 1e-6)
    normal = (wide - mean) * rstd
    dx = rstd * (g - g.mean(-1, keepdims=True) - normal * (g * normal).mean(-1, keepdims=True))

    def run(how, *arrays):
        x, scale, w = map(jnp.asarray, arrays)
        y, pull = jax.vjp(lambda x, scale: vishwamai.layer_norm(x, scale, eps=1e-6, implementation=how), x, scale)
        return [y, *pull(w)]

    return run, [x, scale, w], [normal * scale, dx, np.sum(w * normal, 0)]


def long_sparse(blocks: int, rows: int) -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """One column of blocks of 256 x 32, its product with `rows` rows and the gradients."""
    rng = np.random.default_rng(0)
    shapes = (rows, blocks * 256), (blocks, 256, 32), (rows, 32)
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    dense, values, w = (x.astype(np.float64) for x in arrays)
    flat = values.reshape(-1, 32)
    indices = np.stack([np.arange(blocks), np.zeros(blocks, int)], 1)

    def run(how, *arrays):
        dense, values, w = map(jnp.asarray, arrays)
        how = {"shape": (blocks * 256, 32), "implementation": how}
        y, pull = jax.vjp(lambda d, v: vishwamai.block_sparse_matmul(d, v, indices, **how), dense, values)
        return [y, *pull(w)]

    return run, arrays, [dense @ flat, w @ flat.T, (dense.T @ w).reshape(values.shape)]


@pytest.mark.turns(3)
@needs_native
@pytest.mark.parametrize(
    "case, size",
    [
        (long_attention, (24, 32768)),
        pytest.param(long_attention, (32768, 32), marks=pytest.mark.long),
        (long_norm, (1_000_000,)),
        (long_sparse, (64, 48)),
        pytest.param(long_sparse, (1, 16384), marks=pytest.mark.long),
    ],
    ids=["keys", "queries", "features", "blocks", "rows"],
)
def test_long_sums_of_other_operations(case, size):
    """Over keys, queries, features, blocks and rows, forward and in the gradients, float32 is as exact as XLA's, which
    sums up in blocks.
    """
    run, arrays, truth = case(*size)
    names = zip(run("native_cpu", *arrays), run("xla", *arrays), truth, strict=True)
    for i, (got, reference, true) in enumerate(names):
        unit = np.sqrt(np.mean(true**2))
        error, allowed = (np.sqrt(np.mean((np.asarray(x, np.float64) - true) ** 2)) / unit for x in (got, reference))
        assert error <= 2 * allowed + 1e-7, (i, error, allowed)


@needs_native
def test_padding_of_ours_never_shows():
    """NaN in the caller's masked-out tail of the cache stays there: probabilities of masked keys are exactly zero in
    the gradient.
    """
    rng = np.random.default_rng(0)
    q, k, v, w = (jnp.asarray(rng.standard_normal((1, 2, 70, 32)), jnp.float32) for _ in range(4))
    mask = jnp.arange(70) < 50

    def loss(k, v):
        return jnp.sum(vishwamai.flash_attention(q, k, v, mask=mask[None, None, None], **NATIVE) * w)

    dk, dv = jax.grad(loss, argnums=(0, 1))(k, v)
    assert np.all(np.asarray(dk)[:, :, 50:] == 0) and np.all(np.asarray(dv)[:, :, 50:] == 0)
    assert np.all(np.any(np.asarray(dv)[:, :, :50] != 0, axis=-1))


@needs_native
@pytest.mark.parametrize("text", ["abc", "0", "-1", "1.5"])
def test_a_thread_limit_that_is_no_number(monkeypatch, text):
    monkeypatch.setenv("VISHWAMAI_CPU_THREADS", text)
    with pytest.raises(ConfigError, match=f"VISHWAMAI_CPU_THREADS is '{text}'; set it to the number of threads"):
        ffi._load.__wrapped__()
