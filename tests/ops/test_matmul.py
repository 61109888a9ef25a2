"""gemm: its errors, what 8-bit numbers mean, how exact the products are, and what `explain` says; see test_contract.py
for every case.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from vishwamai import ShapeError, UnsupportedError, explain, gemm, kernel_config, pack_weight, quantize
from vishwamai.core.hardware import TPUS
from vishwamai.core.observe import record_plans
from vishwamai.core.pallas import vmem_limit
from vishwamai.core.target import Target
from vishwamai.ops.matmul import tpu_tiles as tiles
from vishwamai.ops.matmul.cases import CASES


def _exact(x) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _normal(shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _zeros(*shape, dtype=jnp.float32):
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: gemm(_zeros(3), _zeros(3, 4)), ["`a`", "(3,)", "`a[None, :]`"]),
        (lambda: gemm(_zeros(2, 3), _zeros(3)), ["`b`", "(3,)", "`b[:, None]`"]),
        (lambda: gemm(_zeros(2, 3), _zeros(4, 3)), ["`a` has k = 3", "(4, 3)", "pass `b.T`, or `transpose_b=True`"]),
        (
            lambda: gemm(_zeros(2, 3), _zeros(4, 5)),
            ["`b` has shape (4, 5)", "`a` has k = 3", "(3, n)"],
        ),
        (
            lambda: gemm(_zeros(2, 5, 3), _zeros(4, 3, 6)),
            ["(4, 3, 6)", "batch axes (2,)", "(2, 3, n)", "broadcast"],
        ),
        (lambda: gemm(_zeros(2, 3, dtype=jnp.int32), _zeros(3, 4)), ["`a`", "int32", "int8"]),
        (
            lambda: gemm(_zeros(2, 3, dtype=jnp.int8), _zeros(3, 4, dtype=jnp.float8_e5m2)),
            ["int8", "float8_e5m2", "`b.astype(int8)`"],
        ),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), activation="swish"), ["'swish'", "silu"]),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), bias=_zeros(2)), ["`bias`", "(2,)", "(4,)"]),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), bias=_zeros(4, dtype=jnp.int32)), ["`bias`", "int32"]),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), bias=_zeros(5, 4)), ["`bias`", "(5, 4)"]),
        (
            lambda: gemm(_zeros(2, 3), _zeros(3, 4), scale_a=_zeros(4)),
            ["`scale_a`", "(4,)", "m = 2", "each row, or"],
        ),
        (
            lambda: gemm(_zeros(2, 3), _zeros(3, 4), scale_b=_zeros(2)),
            ["`scale_b`", "(2,)", "n = 4", "each column, or"],
        ),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), out_dtype=jnp.int32), ["`out_dtype`", "int32", "float32"]),
        (lambda: gemm(_zeros(2, 3), _zeros(3, 4), out_dtype=jnp.int8), ["`out_dtype`", "int8"]),
        (
            lambda: gemm(_zeros(2, 3), _zeros(3, 4), block_size=128, config=128),
            ["`block_size`", "`config`", "pass one"],
        ),
    ],
)
def test_errors_name_the_argument_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


def test_float64_is_declined_by_the_tpu_kernel_with_a_reason():
    with jax.enable_x64(True), pytest.raises(UnsupportedError, match="`a` is float64.*These can: .*'xla'"):
        gemm(_zeros(2, 3, dtype=jnp.float64), _zeros(3, 4, dtype=jnp.float64), implementation="pallas_tpu")


@pytest.mark.parametrize("shape_a, shape_b", [((2, 3, 5, 7), (7, 4)), ((5, 7), (3, 7, 4)), ((2, 1, 5, 7), (3, 7, 4))])
def test_batch_axes_broadcast_as_in_matmul(shape_a, shape_b):
    a, b = _normal(shape_a), _normal(shape_b, seed=1)
    np.testing.assert_allclose(gemm(a, b), jnp.matmul(a, b, precision="highest"), rtol=1e-5, atol=1e-5)


@pytest.mark.turns(3)
@pytest.mark.parametrize("spec", [P("x", "y"), P("y"), P(None, "x", "y")], ids=str)
@pytest.mark.parametrize("batched", ["a", "a and b"])
def test_vectors_have_fewer_batch_axes_on_an_explicit_mesh(spec, batched):
    """The batch axes of the result are the matrices', whatever the vectors after them have."""
    rng = np.random.default_rng(0)
    a, b, bias, scale = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((4, 8, 16), (4, 16, 32) if batched == "a and b" else (16, 32), (32,), (8,))
    )
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    whole = [jax.device_put(x, NamedSharding(mesh, P())) for x in (b, bias, scale)]
    out = gemm(jax.device_put(a, NamedSharding(mesh, spec)), whole[0], bias=whole[1], scale_a=whole[2])
    np.testing.assert_allclose(out, gemm(a, b, bias=bias, scale_a=scale), rtol=1e-5, atol=1e-5)


def test_folding_does_not_copy_a_shared_operand():
    shapes = (jax.ShapeDtypeStruct((4, 5, 16, 32), jnp.bfloat16), jax.ShapeDtypeStruct((32, 8), jnp.bfloat16))
    (plan,) = record_plans(gemm, *shapes)
    assert (plan.spec.groups, plan.spec.m, plan.spec.operands.b.shape) == (1, 4 * 5 * 16, (1, 32, 8))
    (plan,) = record_plans(
        gemm, *reversed([jax.ShapeDtypeStruct((4, 32, 8), jnp.bfloat16), shapes[0].update(shape=(16, 32))])
    )
    assert (plan.spec.groups, plan.spec.operands.a.shape) == (4, (1, 16, 32))


def test_int8_sums_are_exact():
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (3, 5000), dtype=np.int8), rng.integers(-128, 128, (5000, 4), dtype=np.int8)
    a[0], b[:, 0] = -128, -128  # the largest sum there is: 5000 * 2^14, beyond float32's 24 bits
    out = gemm(jnp.asarray(a), jnp.asarray(b))
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b.astype(np.int64))


def test_scales_dequantize():
    a, b = _normal((20, 64)), _normal((64, 12), seed=1)
    scale_a, scale_b = jnp.max(jnp.abs(a), axis=1) / 127, jnp.max(jnp.abs(b), axis=0) / 127
    quantized_a = jnp.round(a / scale_a[:, None]).astype(jnp.int8)
    quantized_b = jnp.round(b / scale_b).astype(jnp.int8)
    out = gemm(quantized_a, quantized_b, scale_a=scale_a, scale_b=scale_b)
    want = (quantized_a * scale_a[:, None]) @ (quantized_b * scale_b)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)
    # The scales have gradients, the integers none.
    gradient = jax.grad(lambda s: gemm(quantized_a, quantized_b, scale_a=s, scale_b=scale_b).sum())(scale_a)
    np.testing.assert_allclose(gradient, ((quantized_a @ quantized_b.astype(jnp.float32)) * scale_b).sum(1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_fp8_products_are_exact_and_their_gradients_saturate(dtype):
    a, b = _normal((8, 32), dtype), _normal((32, 8), dtype, seed=1)
    out = gemm(a, b, out_dtype=jnp.float32)
    np.testing.assert_allclose(out, _exact(a) @ _exact(b), rtol=1e-6, atol=1e-6)
    gradient = jax.grad(lambda a: gemm(a, b, scale_a=1e9, out_dtype=jnp.float32).sum())(a)
    assert gradient.dtype == dtype
    assert jnp.abs(gradient.astype(jnp.float32)).max() == float(jnp.finfo(dtype).max)  # neither NaN nor infinity


def test_mixed_dtypes_promote():
    a = _normal((4, 8), jnp.bfloat16)
    for dtype, wanted in ((jnp.float32, jnp.float32), (jnp.int8, jnp.bfloat16), (jnp.float8_e5m2, jnp.bfloat16)):
        b = (4 * _normal((8, 4), seed=1)).astype(dtype)
        out = gemm(a, b)
        assert out.dtype == wanted
        np.testing.assert_allclose(
            _exact(out), _exact(a) @ _exact(b), rtol=1e-2 if wanted == jnp.bfloat16 else 1e-6, atol=1e-2
        )


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"])
def test_activations_are_those_of_torch(activation):
    torch = pytest.importorskip("torch", reason="torch is an optional dependency")
    functions = {
        "relu": torch.relu,
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }
    a, b, bias = (np.asarray(_normal(s, seed=i)) for i, s in enumerate([(6, 10), (10, 4), (4,)]))
    ta, tb, tbias = (torch.tensor(x, requires_grad=True) for x in (a, b, bias))
    want = functions[activation](ta @ tb + tbias)
    want.sum().backward()
    out, vjp = jax.vjp(lambda *x: gemm(x[0], x[1], bias=x[2], activation=activation), a, b, bias)
    np.testing.assert_allclose(out, want.detach(), rtol=1e-5, atol=1e-5)
    for gradient, x in zip(vjp(jnp.ones_like(out)), (ta, tb, tbias)):
        np.testing.assert_allclose(gradient, x.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.turns(3)
def test_second_derivative():
    a, b = _normal((3, 4)), _normal((4, 5), seed=1)

    def loss(product):
        return lambda a: jax.grad(lambda a: jnp.sum(jnp.square(product(a, b))))(a).sum()

    got = jax.grad(loss(lambda a, b: gemm(a, b, activation="silu")))(a)
    want = jax.grad(loss(lambda a, b: jax.nn.silu(a @ b)))(a)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def _interpreted(*args, **kwargs):
    from jax.experimental.pallas import tpu as pltpu

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        return np.asarray(gemm(*args, implementation="pallas_tpu", **kwargs))


@pytest.mark.parametrize("precision, bound", [("highest", 2e-7), ("high", 2.0**-15)])
def test_precision_of_float32_products(precision, bound):
    """ "high" keeps 16 bits of each factor: about 2^-16 of the product of the magnitudes, where one bfloat16 product
    keeps 2^-8.
    """
    a, b = np.asarray(_normal((16, 256))), np.asarray(_normal((256, 128), seed=1))
    error = np.abs(_interpreted(a, b, precision=precision) - _exact(a) @ _exact(b))
    magnitude = np.abs(a).astype(np.float64) @ np.abs(b)
    assert np.max(error / magnitude) < bound
    rough = np.abs(_exact(a.astype(jnp.bfloat16)) @ _exact(b.astype(jnp.bfloat16)) - _exact(a) @ _exact(b))
    assert np.max(rough / magnitude) > 2 * bound  # so the bound tells the precisions apart


def test_int8_sums_are_exact_without_an_int8_unit():
    a, b = np.full((8, 2100), -128, np.int8), np.full((2100, 128), -128, np.int8)
    b[1::2] = 127
    for config in (None, tiles.MatmulConfig(128, 128, 2048)):  # a tile deeper than float32 sums exactly is cut
        out = _interpreted(a, b, config=config)
        np.testing.assert_array_equal(out, a.astype(np.int64) @ b.astype(np.int64))


def test_nan_past_the_end_of_a_ragged_axis_does_not_leak():
    a, b = _normal((70, 300)), _normal((300, 200), seed=1)
    out = _interpreted(
        a, b, config=tiles.MatmulConfig(32, 128, 128)
    )  # ragged in every direction, in memory that starts as NaN
    np.testing.assert_allclose(out, _exact(a) @ _exact(b), rtol=1e-5, atol=1e-4)


def test_chunks_and_a_sum_kept_in_the_result():
    a, b = _normal((32, 512)), _normal((512, 128), seed=1)
    config = tiles.MatmulConfig(32, 128, 256, chunk_k=128)
    want = _exact(a) @ _exact(b)
    np.testing.assert_allclose(_interpreted(a, b, config=config), want, rtol=1e-5, atol=1e-4)
    biased = _interpreted(a, b, bias=jnp.ones(128), activation="relu", config=config)
    np.testing.assert_allclose(biased, np.maximum(want + 1, 0), rtol=1e-5, atol=1e-4)


@pytest.mark.turns(3)
@pytest.mark.parametrize("rows", [256, 384])  # an even number of rows of tiles, and an odd one
def test_tiles_visited_back_and_forth(rows):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-128, 128, (rows, 384), np.int8), rng.integers(-128, 128, (384, 384), np.int8)
    config = tiles.MatmulConfig(128, 128, 128, native_8bit=True, serpentine=True)
    want = a.astype(np.int64) @ b.astype(np.int64)
    np.testing.assert_array_equal(_interpreted(a, b, config=config), want)
    scale = jnp.linspace(1, 2, 384)
    scaled = _interpreted(a, b, scale_b=scale, config=config)
    np.testing.assert_allclose(scaled, want * _exact(scale), rtol=1e-6)


def test_tiles_visited_back_and_forth_in_groups_along_transposed_operands():
    a, b = _normal((2, 256, 128)), _normal((2, 256, 256), seed=1)
    config = tiles.MatmulConfig(128, 128, 128, chunk_k=128, serpentine=True)
    out = _interpreted(a, b, transpose_a=True, transpose_b=True, bias=jnp.arange(256.0), config=config)
    want = np.swapaxes(_exact(a), 1, 2) @ np.swapaxes(_exact(b), 1, 2) + np.arange(256)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "target, dtype, words",
    [
        ("v5e", jnp.int8, None),
        ("tpu7x", jnp.int8, "int8 is multiplied as bfloat16 in exact pieces, for tpu7x has no int8 unit"),
        ("tpu7x", jnp.float8_e4m3fn, None),
        ("v6e", jnp.float8_e5m2, None),
        ("v6e", jnp.float8_e4m3fn, "v6e has no unit for float8_e4m3fn"),
        ("v5p", jnp.float32, "by six bfloat16 products"),
    ],
)
def test_explain_says_how_narrow_numbers_are_multiplied(target, dtype, words):
    x = jax.ShapeDtypeStruct((256, 256), dtype)
    (call,) = explain(gemm, x, x, target=target).calls
    assert call.runs == "pallas_tpu"
    text = next(v.reason for v in call.verdicts if v.runs)
    assert words in text if words else "bfloat16" not in text


def test_int8_on_v4_is_left_to_xla():
    x = jax.ShapeDtypeStruct((256, 256), jnp.int8)
    (call,) = explain(gemm, x, x, target="v4").calls
    assert call.runs == "xla"
    assert "no int8 unit" in next(v.reason for v in call.verdicts if v.implementation == "pallas_tpu")


def test_explain_says_where_memory_bounds_the_product():
    weights = jax.ShapeDtypeStruct((4096, 14336), jnp.bfloat16)
    for rows, bounded in ((1, True), (4096, False)):
        text = str(explain(gemm, jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16), weights, target="v5e"))
        assert ("memory bounds this product" in text) == bounded


@pytest.mark.parametrize("chip", TPUS.values(), ids=TPUS)
@pytest.mark.parametrize("case", [c for c in CASES if "model" in c.tags], ids=lambda c: c.name)
def test_tiles_fit_the_chip(case, chip):
    with kernel_config(target=chip.name):
        (plan,) = record_plans(case.run, case.shapes())
    config = tiles.heuristic(plan.spec, Target("tpu", chip))
    limit = vmem_limit(config.vmem_bytes, tiles.VMEM_GRANULE)
    for which in ("forward", "grad_a", "grad_b"):
        problem = tiles.problem_of(plan.spec, which, Target("tpu", chip))
        assert problem.buffers(config.tiles(which)) <= chip.vmem_bytes * 3 // 4
        assert problem.vmem(config.tiles(which)) <= (limit or 16 << 20)
    assert config.block_k % config.chunk_k == 0
    assert (limit or 0) < chip.vmem_bytes


@pytest.mark.turns(3)
def test_long_sums_of_int8_do_not_wrap():
    """k of Qwen's vocab: no int32 holds 151,936 products of 127 x 127, so the definition sums in parts, or declines."""
    k = 151_936
    a, b = jnp.full((2, k), 127, jnp.int8), jnp.full((k, 3), 127, jnp.int8)
    ones = jnp.ones(3)
    results = [
        gemm(a, b, out_dtype=jnp.float32),
        gemm(a, b, scale_b=ones),
        gemm(a, b.T, transpose_b=True, scale_b=ones),
        gemm(a[None], b[None], scale_b=ones),
        gemm(a, pack_weight(b), scale_b=ones),
        gemm(quantize(a.astype(jnp.float32), axis=1), quantize(b.astype(jnp.float32), axis=0)),
    ]
    for result in results:
        np.testing.assert_allclose(result.reshape(2, 3), 127.0**2 * k, rtol=1e-6)
    for weight in (b, pack_weight(b)):
        with pytest.raises(ShapeError, match="out_dtype=float32"):
            gemm(a, weight)
