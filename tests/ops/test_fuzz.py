"""Random calls: legal ones give what the oracle gives, illegal ones an error that names the argument, its value and the
fix.
"""

import os
import warnings
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

import contract
import draws
import oracle
import vishwamai
from test_lowering import compile_and_check
from vishwamai import aot
from vishwamai.core import ffi
from vishwamai.core.errors import FallbackWarning, KernelError, ShapeError, UnsupportedError

SIZES = st.sampled_from([1, 2, 3, 5, 8, 13, 17, 33])
SEEDS = st.integers(0, 2**32 - 1)
FLOATS = ("float32", "bfloat16")

CI = os.environ.get("HYPOTHESIS_PROFILE", "ci") == "ci"
SLOW: dict[str, Any] = {  # every legal example compiles its own programs
    "suppress_health_check": list(hypothesis.HealthCheck),
    "max_examples": 10 if CI else 200,
}
QUICK: dict[str, Any] = SLOW | {"max_examples": 60 if CI else 500}


def normal(rng, shape, dtype, scale=1.0):
    return (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def check_call(call, arrays, options, implementations, seed, units=24):
    """Outputs and gradients of every implementation against the oracle."""
    names = tuple(n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating))
    outputs, gradients = oracle.evaluate(call, arrays, options, names)
    rest = {n: x for n, x in arrays.items() if n not in names}
    rng = np.random.default_rng(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        shapes = jax.eval_shape(lambda a: call(**a, **options), arrays)
    cotangents = jax.tree.map(lambda y: normal(rng, y.shape, y.dtype), shapes)
    expected = (outputs, gradients(cotangents))
    for name in implementations:

        @jax.jit
        def run(chosen, name=name):
            y, pull = jax.vjp(lambda c: call(**rest, **c, **options, implementation=name), chosen)
            return y, pull(cotangents)[0]

        got = jax.tree.map(np.asarray, run({n: arrays[n] for n in names}))
        for path, ours in jax.tree_util.tree_leaves_with_path(got):
            true: Any = expected
            for key in path:
                true = true[key.key if hasattr(key, "key") else key.idx]
            size = max(contract.magnitude(true).largest, 1e-2)
            # a product of 16-bit numbers is rounded before it is summed over; the smallest dtype of the call decides
            unit = max(float(jnp.finfo(x.dtype).eps) for x in (ours, *(arrays[n] for n in names)))
            error = contract.errors(ours, true).largest if true.size else 0.0
            assert error <= units * unit * size, f"{name} {jax.tree_util.keystr(path)}: {error:.3g} of {size:.3g}"


@pytest.mark.turns(6)
@hypothesis.settings(**SLOW)
@hypothesis.given(st.data())
def test_legal_norm(data):
    draw = data.draw
    rng = np.random.default_rng(draw(SEEDS))
    call = draw(st.sampled_from([vishwamai.layer_norm, vishwamai.rms_norm]))
    dtype = draw(st.sampled_from(FLOATS))
    shape = (*draw(st.lists(SIZES, max_size=3)), draw(SIZES))
    arrays = {"x": normal(rng, shape, dtype)}
    for name in ("scale", "offset"):
        if draw(st.booleans()):
            arrays[name] = normal(rng, shape[-1:], draw(st.sampled_from(FLOATS)))
    if draw(st.booleans()):
        arrays["residual"] = normal(rng, shape, dtype)
    options = {"eps": draw(st.sampled_from([0.01, 0.1, 1.0]))}
    check_call(call, arrays, options, ["xla", None], draw(SEEDS))


@pytest.mark.turns(4)
@hypothesis.settings(**SLOW)
@hypothesis.given(st.data())
def test_legal_gemm(data):
    draw = data.draw
    rng = np.random.default_rng(draw(SEEDS))
    dtype = draw(st.sampled_from(FLOATS))
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    shared_b = draw(st.booleans())
    ta, tb = draw(st.booleans()), draw(st.booleans())
    arrays = {
        "a": normal(rng, (*batch, *((k, m) if ta else (m, k))), dtype),
        "b": normal(rng, (*(() if shared_b else batch), *((n, k) if tb else (k, n))), dtype, k**-0.5),
    }
    if draw(st.booleans()):
        arrays["bias"] = normal(rng, (n,), dtype)
    for name, extent in (("scale_a", m), ("scale_b", n)):
        kind = draw(st.sampled_from(["none", "one", "each"]))
        if kind != "none":
            arrays[name] = np.float32(1 + 0.2 * rng.standard_normal(() if kind == "one" else (extent,)))
            arrays[name] = np.asarray(arrays[name], np.float32)
    activation = draw(st.sampled_from([None, "relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"]))
    options = {"activation": activation, "transpose_a": ta, "transpose_b": tb}
    check_call(vishwamai.gemm, arrays, options, ["xla", None], draw(SEEDS), units=48)


@pytest.mark.long
@hypothesis.settings(**SLOW)
@hypothesis.given(st.data())
def test_legal_attention(data):
    draw = data.draw
    rng = np.random.default_rng(draw(SEEDS))
    dtype = draw(st.sampled_from(FLOATS))
    batch, kv_heads, group = (draw(st.sampled_from([1, 2])) for _ in range(3))
    heads = kv_heads * group
    tq, tk, d, dv = (draw(SIZES) for _ in range(4))
    arrays = {
        "query": normal(rng, (batch, heads, tq, d), dtype),
        "key": normal(rng, (batch, kv_heads, tk, d), dtype),
        "value": normal(rng, (batch, kv_heads, tk, dv), dtype),
    }
    extents = (batch, heads, tq, tk)

    def broadcast():
        keep = draw(st.tuples(*(st.booleans(),) * 4))
        return tuple(e if kept else 1 for e, kept in zip(extents, keep, strict=True))

    if draw(st.booleans()):
        arrays["bias"] = normal(rng, broadcast(), dtype)
        if draw(st.booleans()):
            arrays["bias"] = np.where(rng.random(arrays["bias"].shape) < 0.2, -np.inf, arrays["bias"]).astype(
                arrays["bias"].dtype
            )
    if draw(st.booleans()):
        arrays["mask"] = rng.random(broadcast()) < 0.6
    if draw(st.booleans()):
        arrays["sinks"] = normal(rng, (heads,), dtype)
    options = {"return_lse": draw(st.booleans()), "causal": draw(st.booleans())}
    options["causal_align"] = draw(st.sampled_from(["top_left", "bottom_right"]))
    side = st.one_of(st.none(), st.integers(0, 9))
    if draw(st.booleans()):
        options["window"] = (draw(side), draw(side))
    if draw(st.booleans()):
        options["segment_ids"] = tuple(rng.integers(0, 3, (batch, t)).astype(np.int32) for t in (tq, tk))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([2.0, 10.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.1, 0.5]))
    if draw(st.booleans()):
        options["dropout_rate"] = draw(st.sampled_from([0.1, 0.5]))
        arrays["dropout_key"] = np.array([rng.integers(2**32), rng.integers(2**32)], np.uint32)
    hypothesis.note(str({**{n: (x.shape, x.dtype) for n, x in arrays.items()}, **options}))
    check_call(vishwamai.flash_attention, arrays, options, ["xla", "xla_chunked"], draw(SEEDS), units=64)


SEARCH: dict[str, Any] = SLOW | (
    {"phases": [hypothesis.Phase.generate]} if CI else {}
)  # shrinking takes many compilations
COMPILE: dict[str, Any] = SEARCH | {"max_examples": 12 if CI else 300}
COMPARE: dict[str, Any] = SEARCH | {"max_examples": 8 if CI else 300}


def platforms(op):
    return [impl.platform for impl in contract.OPERATIONS[op].op.implementations]


def any_case(data, largest, platform):
    """(operation, case) of any op with a kernel for the platform, at the edges of tiles; hypothesis shrinks it to the
    smallest call that fails.
    """
    op = data.draw(st.sampled_from(sorted(n for n in draws.DRAWS if platform in platforms(n))))
    case = draws.draw_case(op, lambda options: data.draw(st.sampled_from(options)), largest)
    hypothesis.note(case.name)
    return contract.OPERATIONS[op], case


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
@hypothesis.settings(**COMPILE)
@hypothesis.given(st.data())
def test_any_call_compiles_for_a_tpu(data):
    """Outputs and gradients, with the kernel in the program or with its reason."""
    try:
        compile_and_check(*any_case(data, 300, None), data.draw(st.sampled_from(["v5e", "tpu7x", "v4"])))
    except KernelError as error:  # of some programs for TPU7x, as in test_lowering.py
        if "the program compiled, but jaxlib cannot read its text back" not in str(error):
            raise


@pytest.mark.long
@pytest.mark.skipif(ffi.why_not() is not None, reason=str(ffi.why_not()))
@hypothesis.settings(**COMPARE)
@hypothesis.given(st.data())
def test_any_call_is_right_on_the_cpu(data):
    """Outputs and gradients of the native kernels are as near the oracle as the contract demands."""
    operation, case = any_case(data, 130, "cpu")
    (native,) = (impl for impl in operation.op.implementations if impl.platform == "cpu")
    hypothesis.assume(contract.declines(native, case) is None)
    # Next to operands of 8 bits a product's gradient takes its float32 cotangent in bfloat16; and it takes the argument
    # of an activation in the result's dtype.
    narrow = any(case.arrays[name].dtype.startswith("float8") for name in case.differentiable)
    rounded = case.options.get("activation") is not None and case.options.get("out_dtype") == "bfloat16"
    unit = 2.0**-8 if narrow or rounded else 0.0
    contract.check_all(contract.evaluate(case, native), contract.truth(case), contract.by_reference(case), unit)


def declined(call, *needles, **arguments):
    """The call raises before anything runs, and its text holds the function's name and every needle."""
    with pytest.raises((ShapeError, UnsupportedError)) as caught:
        call(**arguments)
    text = str(caught.value)
    for needle in (call.__name__, *needles):
        assert str(needle) in text, f"{needle!r} is not in: {text}"
    # the fix: what to pass instead
    assert any(word in text for word in ("pass", "choose", "use", "set", "reshape", "make")), text
    return text


@pytest.mark.turns(3)
@hypothesis.settings(**QUICK)
@hypothesis.given(st.data())
def test_illegal_norm(data):
    draw = data.draw
    call = draw(st.sampled_from([vishwamai.layer_norm, vishwamai.rms_norm]))
    rows, features, other = draw(SIZES), draw(SIZES), draw(SIZES)
    x = np.ones((rows, features), np.float32)
    kind = draw(st.sampled_from(["scale", "offset", "residual", "residual dtype", "eps", "integers", "scalar", "name"]))
    if kind in ("scale", "offset"):
        hypothesis.assume(other != features)
        declined(call, f"`{kind}`", f"({other},)", features, x=x, **{kind: np.ones(other, np.float32)})
    elif kind == "residual":
        hypothesis.assume(other != rows)
        declined(call, "`residual`", other, rows, x=x, residual=np.ones((other, features), np.float32))
    elif kind == "residual dtype":
        declined(call, "`residual`", "bfloat16", "float32", x=x, residual=jnp.ones((rows, features), jnp.bfloat16))
    elif kind == "eps":
        eps = draw(st.one_of(st.floats(max_value=-1e-9), st.just(float("nan")), st.just("small")))
        declined(call, "`eps`", repr(eps), x=x, eps=eps)
    elif kind == "integers":
        dtype = draw(st.sampled_from(["int32", "int8", "bool"]))
        declined(call, "`x`", dtype, "float32", x=x.astype(dtype))
    elif kind == "scalar":
        declined(call, "`x`", "scalar", x=np.float32(1.0))
    else:
        declined_name(call, x=x)


def declined_name(call, **arguments):
    with pytest.raises(UnsupportedError, match=r"no implementation 'fastest'; choose one of .*'xla'"):
        call(**arguments, implementation="fastest")


@hypothesis.settings(**QUICK)
@hypothesis.given(st.data())
def test_illegal_gemm(data):
    draw = data.draw
    m, n, k, other = draw(SIZES), draw(SIZES), draw(SIZES), draw(SIZES)
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    call: Any = vishwamai.gemm
    kinds = ("depth", "bias", "scale_a", "scale_b", "activation", "vector", "batch", "precision", "name")
    kind = draw(st.sampled_from(kinds))
    if kind == "depth":
        hypothesis.assume(other != k)
        declined(call, "`a`", "`b`", k, other, a=a, b=np.ones((other, n), np.float32))
    elif kind == "bias":
        hypothesis.assume(other not in (n, 1))
        declined(call, "`bias`", other, n, a=a, b=b, bias=np.ones(other, np.float32))
    elif kind in ("scale_a", "scale_b"):
        extent = m if kind == "scale_a" else n
        hypothesis.assume(other not in (extent, 1))
        declined(call, f"`{kind}`", other, extent, a=a, b=b, **{kind: np.ones(other, np.float32)})
    elif kind == "activation":
        declined(call, "`activation`", "'swish2'", "silu", a=a, b=b, activation="swish2")
    elif kind == "vector":
        declined(call, "`a`", f"({k},)", a=np.ones(k, np.float32), b=b)
    elif kind == "batch":
        declined(call, "`a`", "`b`", 3, 2, a=np.ones((3, m, k), np.float32), b=np.ones((2, k, n), np.float32))
    elif kind == "precision":
        with pytest.raises(vishwamai.KernelError, match="'exact'.*highest"):
            call(a, b, precision="exact")
    else:
        declined_name(call, a=a, b=b)


@pytest.mark.turns(3)
@hypothesis.settings(**QUICK)
@hypothesis.given(st.data())
def test_illegal_attention(data):
    draw = data.draw
    call = vishwamai.flash_attention
    t, d, other = draw(st.sampled_from([8, 17, 33])), draw(SIZES), draw(SIZES)
    batch, heads, kv_heads = draw(st.sampled_from([(1, 4, 2), (2, 6, 3), (2, 2, 2)]))
    good = {
        "query": np.ones((batch, heads, t, d), np.float32),
        "key": np.ones((batch, kv_heads, t, d), np.float32),
        "value": np.ones((batch, kv_heads, t, d), np.float32),
    }
    wrong = {
        "head_dim": lambda: (
            hypothesis.assume(other != d)
            and declined(call, "`key`", other, d, **good | {"key": np.ones((batch, kv_heads, t, other), np.float32)})
        ),
        "batch": lambda: declined(call, "`key`", 7, batch, **good | {"key": np.ones((7, kv_heads, t, d), np.float32)}),
        "heads": lambda: declined(
            call,
            "`key`",
            heads,
            5,
            **good | {n: np.ones((batch, 5, t, d), np.float32) for n in ("key", "value")},
        ),
        "value length": lambda: (
            hypothesis.assume(other != t)
            and declined(
                call, "`value`", other, t, **good | {"value": np.ones((batch, kv_heads, other, d), np.float32)}
            )
        ),
        "rank": lambda: declined(call, "`query`", (t, d), **good | {"query": np.ones((t, d), np.float32)}),
        "dtype": lambda: declined(call, "`query`", "int32", **good | {"query": good["query"].astype(np.int32)}),
        "mixed dtypes": lambda: declined(
            call, "`key`", "bfloat16", "float32", **good | {"key": jnp.asarray(good["key"], jnp.bfloat16)}
        ),
        "bias": lambda: declined(call, "`bias`", 7, t, **good, bias=np.ones((t, 7), np.float32)),
        "mask": lambda: declined(call, "`mask`", 7, t, **good, mask=np.ones((t, 7), bool)),
        "mask dtype": lambda: declined(call, "`mask`", "float32", **good, mask=np.ones((t, t), np.float32)),
        "segments": lambda: declined(
            call,
            "segment_ids",
            t + 1,
            t,
            **good,
            segment_ids=(np.zeros((batch, t + 1), np.int32), np.zeros((batch, t), np.int32)),
        ),
        "segments alone": lambda: declined(call, "segment_ids", **good, segment_ids=np.zeros((batch, t), np.int32)),
        "sinks": lambda: declined(call, "`sinks`", heads + 1, heads, **good, sinks=np.ones(heads + 1, np.float32)),
        "window": lambda: declined(call, "`window`", -3, **good, window=(-3, 0)),
        "align": lambda: declined(call, "`causal_align`", "'left'", "bottom_right", **good, causal_align="left"),
        "softcap": lambda: declined(call, "`softcap`", -1.0, **good, softcap=-1.0),
        "rate": lambda: declined(call, "`dropout_rate`", 1.5, **good, dropout_rate=1.5, dropout_key=jax.random.key(0)),
        "no key": lambda: declined(call, "`dropout_key`", 0.1, **good, dropout_rate=0.1),
        "layout": lambda: declined(call, "`layout`", "'sbhd'", "bshd", **good, layout="sbhd"),
        "name": lambda: declined_name(call, **good),
    }
    wrong[draw(st.sampled_from(sorted(wrong)))]()
