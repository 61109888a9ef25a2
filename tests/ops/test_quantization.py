"""quantize, and gemm of QTensors: what the contract suite's cases do not show."""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false, reportCallIssue=false

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from vishwamai import QTensor, ShapeError, UnsupportedError, aot, dequantize, fake_quantize, gemm, quantize
from vishwamai.core.qtensor import FORMATS
from vishwamai.ops.matmul.tpu_tiles import MatmulConfig

# The largest error of rounding to the nearest, as a share of the largest number of a block: half a step of the format
# there, or what saturates.
STEP = {
    "int8": 0.51 / 127,
    "int4": 0.51 / 7,
    "fp8_e4m3": 2.0**-4,
    "fp8_e5m2": 2.0**-3,
    "fp4_e2m1": 0.17,
    "mxfp8_e4m3": 2.0**-3,
    "mxfp8_e5m2": 2.0**-3,
    "mxfp4": 0.26,
}


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.turns(4)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis", [-1, -2])
def test_rounding_is_to_the_nearest_of_a_block(format, axis):
    x = _normal(63, 100)
    block_size = None if format.startswith("mx") else 32
    q = jax.jit(lambda x: quantize(x, format, axis=axis, block_size=block_size))(x)
    assert q.values.dtype == FORMATS[format].dtype and q.shape == x.shape
    size = x.shape[axis]
    largest = np.stack(
        [np.abs(np.take(x, range(i, min(i + 32, size)), axis)).max(axis) for i in range(0, size, 32)], axis
    )
    allowed = STEP[format] * np.take(largest, np.arange(size) // 32, axis)
    assert (np.abs(jax.jit(dequantize)(q) - x) <= allowed).all()


def test_mx_scales_are_those_of_the_specification():
    """2^(floor(log2 of the largest) - the format's largest exponent), section 6.3: 2 for e2m1, 8 for e4m3."""
    x = np.zeros((2, 32), np.float32)
    x[0, 3], x[1, 5] = 7.9, 448.0
    assert quantize(x, "mxfp4").scales[:, 0].tolist() == [127 + 2 - 2, 127 + 8 - 2]
    assert quantize(x, "mxfp8").scales[:, 0].tolist() == [127 + 2 - 8, 127]


@pytest.mark.parametrize("format", ["int8", "int4", "fp8_e5m2"])
def test_stochastic_rounding_has_the_right_mean(format):
    x = jnp.tile(jnp.linspace(0.05, 1, 20), (4000, 1))
    key = jax.random.key(0)
    mean = jax.jit(lambda x: dequantize(quantize(x, format, rounding="stochastic", key=key)).mean(0))(x)
    assert np.abs(mean - x[0]).max() < 0.01
    assert np.abs(dequantize(quantize(x[:1], format)) - x[:1]).max() > 0.001  # to the nearest is not


def test_a_percentile_lets_outliers_saturate():
    x = jnp.concatenate([jnp.linspace(-1, 1, 999), jnp.array([100.0])])
    q = jax.jit(lambda x: quantize(x, scale="percentile", percentile=99.0))(x)
    assert float(dequantize(q)[-1]) < 1.1 and int(q.values[-1]) == 127
    gradient = jax.jit(jax.grad(lambda x: fake_quantize(x, scale="percentile", percentile=99.0).sum()))(x)
    assert gradient[-1] == 0 and gradient[500] == 1


@pytest.mark.turns(3)
def test_a_block_longer_than_the_axis_costs_no_memory():
    from vishwamai import torch as vt

    x = np.arange(-5.0, 7).astype(np.float32).reshape(3, 4)
    whole, long = quantize(x, axis=0), quantize(x, axis=0, block_size=2**40)
    np.testing.assert_array_equal(long.dequantize(), whole.dequantize())
    np.testing.assert_array_equal(
        vt.quantize(torch.tensor(x), axis=0, block_size=2**40).dequantize(), whole.dequantize()
    )


def test_what_is_not_finite_spoils_its_block_and_no_other():
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[1, 40] = np.nan, np.inf
    for format in ("int8", "mxfp4"):
        bad = np.isnan(jax.jit(lambda x: dequantize(quantize(x, format, block_size=32)))(x))  # noqa: B023
        assert bad[0, :32].all() and bad[1, 32:].all() and bad.sum() == 64
    assert (dequantize(quantize(jnp.zeros((3, 4)))) == 0).all()


@pytest.mark.turns(3)
def test_a_qtensor_goes_through_transforms():
    w = _normal(3, 64, 16)
    stacked = jax.vmap(lambda w: quantize(w, "int4", axis=-2, block_size=32))(w)
    x = _normal(5, 64, seed=1)
    want = np.stack([x @ np.asarray(dequantize(quantize(part, "int4", axis=-2, block_size=32))) for part in w])
    np.testing.assert_allclose(jax.jit(jax.vmap(gemm, (None, 0)))(x, stacked), want, rtol=1e-4, atol=1e-4)
    scanned = jax.lax.scan(lambda c, q: (c, gemm(x, q)), 0, stacked)[1]
    np.testing.assert_allclose(scanned, want, rtol=1e-4, atol=1e-4)


@pytest.mark.turns(3)
def test_gradients():
    """Activations have one through a QTensor; its own is an error that names it, and `fake_quantize` is
    straight-through.
    """
    x, w, q = _normal(5, 64), _normal(64, 16), quantize(_normal(64, 16), "fp8", axis=-2, block_size=32)
    np.testing.assert_allclose(
        jax.grad(lambda x: gemm(x, q).sum())(x), np.ones((5, 16)) @ np.asarray(dequantize(q)).T, rtol=1e-5, atol=1e-5
    )
    with pytest.raises(UnsupportedError, match="`b` is a QTensor.*fake_quantize"):
        jax.grad(lambda scales: gemm(x, QTensor(q.values, scales, q.format, q.axis, q.block_size)).sum())(q.scales)
    through = jax.grad(lambda w: gemm(x, fake_quantize(w, "int8", axis=-2)).sum())(w)
    np.testing.assert_allclose(through, np.tile(x.sum(0)[:, None], (1, 16)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda x: quantize(x, "int3"), ["'int3'", "int8"]),
        (lambda x: quantize(x, axis=2), ["axis", "2", "(4, 64)"]),
        (lambda x: quantize(x, "mxfp4", block_size=16), ["16", "32"]),
        (lambda x: quantize(x, axis=None, block_size=8), ["block_size", "axis"]),
        (lambda x: quantize(x, rounding="stochastic"), ["key", "stochastic"]),
        (lambda x: quantize(x.astype(jnp.int32)), ["int32"]),
        (lambda x: gemm(x, quantize(x.T, axis=-1)), ["`b`", "axis -1", "axis=-2"]),
        (lambda x: gemm(x, quantize(x.T, axis=-2), scale_b=2.0), ["`scale_b`", "leave"]),
        (lambda x: gemm(quantize(x, block_size=32), quantize(x.T, axis=-2, block_size=16)), ["32", "16", "same"]),
    ],
)
def test_errors(call, words):
    with pytest.raises(ShapeError) as caught:
        call(jnp.ones((4, 64)))
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "format, block_size, transposed, cores", [("int4", 32, False, 2), ("mxfp4", 32, True, 1), ("int8", None, False, 1)]
)
def test_tiles_stream_through_a_ring(format, block_size, transposed, cores):
    """The kernel for few rows, in the simulator: the same numbers as the reference."""
    x = jnp.asarray(_normal(5, 512), jnp.bfloat16)
    w = _normal(512, 512)
    q = quantize(w.T if transposed else w, format, axis=-1 if transposed else -2, block_size=block_size)
    config = MatmulConfig(5, 128, 256, chunk_k=256, ring=4, cores=cores)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = gemm(x, q, transpose_b=transposed, implementation="pallas_tpu", config=config)
    want = gemm(x, q, transpose_b=transposed, implementation="xla")
    np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=2e-2, atol=0.2)


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "format, block_size, unpack, cores",
    [
        ("fp8_e4m3", 128, "b11fnuz", 1),
        *(
            pytest.param(*row, marks=pytest.mark.long)
            for row in (("int4", None, "words", 2), ("int8", None, "words", 1))
        ),
        pytest.param("int4", 128, "words", 1, marks=pytest.mark.long),
    ],
)
def test_weights_unpacked_from_words(format, block_size, unpack, cores):
    """Every code of the format, -0 and NaN among them; the scales of deep blocks multiply sums, so nothing is rounded
    to bfloat16.
    """
    x = jnp.asarray(_normal(3, 256), jnp.bfloat16)
    q = quantize(_normal(256, 128 * cores), format, axis=-2, block_size=block_size)
    codes = np.asarray(lax.bitcast_convert_type(q.values, jnp.uint8) if format != "int4" else q.values.astype(jnp.int8))
    codes = codes.copy()
    codes[:256, 0] = np.arange(256) % 16 - 8 if format == "int4" else np.arange(256)
    if format == "fp8_e4m3":
        codes[:256, 1] = np.where(np.arange(256) % 128 == 127, 128, np.arange(256))  # all but the NaN
    values = jnp.asarray(codes)
    values = values.astype(jnp.int4) if format == "int4" else lax.bitcast_convert_type(values, q.values.dtype)
    q = QTensor(values, q.scales, format, -2, block_size)
    config = MatmulConfig(3, 128, 256, chunk_k=256, ring=3, cores=cores, unpack=unpack)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory="nan")):
        got = gemm(x, q, implementation="pallas_tpu", config=config, out_dtype=jnp.float32)
    exact = np.asarray(values.astype(jnp.float32), np.float64)
    scales = np.repeat(np.asarray(q.scales, np.float64), 256 // q.scales.shape[0], axis=0)
    rows = np.asarray(x.astype(jnp.float32), np.float64)
    want, magnitude = rows @ (exact * scales), np.abs(rows) @ np.abs(exact * scales)
    assert np.isnan(want[:, 0]).all() == (format == "fp8_e4m3") and not np.isnan(want[:, 1:]).any()
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert np.nanmax(np.abs(got - want) / magnitude) < 1e-6


@pytest.mark.skipif(not aot.has_libtpu(), reason="needs libtpu: pip install '.[aot]'")
@pytest.mark.parametrize("format, block_size", [("int4", 128), ("int8", None), ("mxfp8", None)])
def test_no_dequantized_copy_in_hbm(format, block_size):
    """The program's arguments are the quantized bytes, and its temporaries smaller than any copy of the weight."""
    q = jax.eval_shape(lambda: quantize(jnp.zeros((4096, 4096)), format, axis=-2, block_size=block_size))
    a = jax.ShapeDtypeStruct((16, 4096), jnp.bfloat16)
    program = aot.compile_for(gemm, a, q, target="v5e")
    assert any(kernel.pallas for kernel in program.kernels)
    assert program.memory.arguments < 1.1 * (q.nbytes + 2 * a.size) and program.memory.temporaries < q.nbytes / 4
