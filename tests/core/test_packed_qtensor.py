"""Packed quantized weights: every way of packing gives the same bytes, products are what they say (float64, with the
other operand rounded as documented, or not at all), and gated and grouped products are made of the same.
"""

# Calls take NumPy arrays here, and values that are wrong on purpose.
# pyright: reportArgumentType=false

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
import vishwamai
from vishwamai import PackedQTensor, gated_linear_unit, gemm, grouped_gemm, pack_weight, quantize
from vishwamai.core import ffi
from vishwamai.core.qtensor import scale_values
from vishwamai.core.quantized import packed_qtensor
from vishwamai.core.quantized.packed_product import PACKED_PRODUCT
from vishwamai.ops.quantization.search import searched

NATIVE = ffi.why_not(None, "vishwamai_quantized_multiply") is None
IMPLEMENTATIONS = [
    pytest.param("native_cpu", marks=pytest.mark.skipif(not NATIVE, reason="the native module lacks the kernel")),
    "xla",
]
FORMATS = [("int8", None), ("int8", 32), ("int4", None), ("int4", 64), ("mxfp4", 32), ("fp4_e2m1", 16), ("uint4", 32)]
FORMATS += [("uint4", None), ("uint4", 64)]
FLOATS = [("fp8_e4m3", 128), ("fp8_e4m3", None), ("mxfp8_e4m3", 32), ("fp8_e4m3", 40)]  # 8-bit ones
EVERY = [*((form, activations) for form in FORMATS for activations in ("int8", "exact"))]
EVERY += [(form, "exact") for form in FLOATS]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def weight_of(format: str, block_size: int | None, *shape: int, seed: int = 0):
    x = jnp.asarray(draw(*shape, seed=seed) * shape[-2] ** -0.5)
    if format == "uint4":
        weight = searched(x + 0.02, format, block_size or shape[-2])
        return dataclasses.replace(weight, block_size=block_size)
    return quantize(x, format, axis=-2, block_size=block_size)


def rounded(x: np.ndarray, block: int) -> np.ndarray:
    """Rows as products of bytes take them: the nearest multiple of the block's largest magnitude / 127."""
    x = np.asarray(x, np.float32)
    out = np.zeros(x.shape)
    for k in range(0, x.shape[-1], block):
        part = x[..., k : k + block]
        largest = np.abs(part).max(axis=-1, keepdims=True)
        inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
        out[..., k : k + block] = np.rint(part * inverse).astype(np.float64) * (largest / np.float32(127))
    return out


def oracle(x, weight, activations: str) -> np.ndarray:
    dense, words = np.asarray(weight.values, np.float64), np.asarray(weight.scales)
    words = words if weight.block_size is None else np.repeat(words, weight.block_size, axis=-2)
    words = words[..., : dense.shape[-2], :]
    if weight.format == "uint4":  # the lowest byte of a scale counts sixteenths
        dense, words = dense - (words & 255) / 16, (words & ~np.uint32(255)).view(np.float32)
    dense = dense * np.asarray(scale_values(jnp.asarray(words), jnp.float32), np.float64)
    x = np.asarray(x, np.float32)
    return (rounded(x, weight.block_size or 128) if activations == "int8" else x.astype(np.float64)) @ dense


def close(got, want, dtype="float32") -> None:
    tolerance = 3e-6 if dtype == "float32" else 2.0**-8  # sums of up to 1000 terms, in an order that threads change
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=tolerance * np.abs(want).max() + 1e-7)


@pytest.mark.turns(3)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("format, block_size", [*FORMATS, *FLOATS])
def test_packing_keeps_every_bit(format, block_size, transpose):
    """Native and portable packing give the same bytes, which unpack to what was packed; columns are read alone."""
    weight = weight_of(format, block_size, 2, 100, 70)
    axes = -1 if transpose else -2
    given = jax.tree.map(lambda x: jnp.swapaxes(x, -1, -2), weight) if transpose else weight
    packed = pack_weight(vishwamai.QTensor(given.values, given.scales, format, axes, block_size), transpose=transpose)
    assert packed.shape == (100, 70) and packed.values.shape[:2] == (2, 3)
    back = packed.unpack()
    assert back.values.dtype == weight.values.dtype and back.scales.dtype == weight.scales.dtype
    as_bytes = packed_qtensor._as_bytes
    np.testing.assert_array_equal(as_bytes(back.values, format), as_bytes(weight.values, format))
    np.testing.assert_array_equal(back.scales, weight.scales)
    bytes_too = packed_qtensor.permuted(as_bytes(given.values, format), format, transpose)
    np.testing.assert_array_equal(bytes_too, packed.values)
    one = jax.tree.map(lambda x: x[1], packed)
    index = jnp.array([[69, 0, 31], [32, 5, 64]])
    np.testing.assert_allclose(one.columns(index), np.asarray(weight.dequantize()[1]).T[index], rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form, activations", rotation.in_turn(4, EVERY))
def test_product(form, activations, implementation):
    """Ragged, from one row to several blocks of them, in both dtypes."""
    weight = weight_of(*form, 1000, 100)
    packed = pack_weight(weight, activations=activations)
    for rows, dtype in ((1, "bfloat16"), (7, "float32"), (12, "bfloat16"), (40, "bfloat16"), (300, "float32")):
        x = jnp.asarray(draw(rows, 1000), dtype)
        got = gemm(x, packed, implementation=implementation)
        assert got.dtype == dtype
        close(got, oracle(x, weight, activations), dtype)


@pytest.mark.turns(5)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", rotation.in_turn(2, [((1, 1),), ((7, 33),), ((8, 32),), ((31, 1),), ((129, 40),)]))
def test_sizes_that_fill_no_block(shape, implementation):
    for format, block_size in (*FORMATS[1:], *FLOATS):
        weight = weight_of(format, block_size, *shape)
        for rows in (6, 18):
            x, packed = draw(2, rows // 2, shape[0]), pack_weight(weight)
            close(gemm(x, packed, implementation=implementation), oracle(x, weight, packed.activations))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_epilogue_and_what_is_not_finite(implementation):
    weight, bias = weight_of("int8", None, 300, 70), draw(70)
    packed = pack_weight(weight)
    x = draw(5, 300)
    out = gemm(x, packed, bias=bias, activation="relu", out_dtype="bfloat16", implementation=implementation)
    assert out.dtype == jnp.bfloat16
    close(out, np.maximum(oracle(x, weight, "int8") + bias, 0), "bfloat16")
    x[1, 7], x[2, 299], x[3] = np.nan, np.inf, 0
    out = np.asarray(gemm(x, packed, implementation=implementation))
    assert np.isnan(out[1:3]).all() and (out[3] == 0).all() and np.isfinite(out[[0, 4]]).all()


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_number_of_8_bit_floats(implementation):
    """All 256 codes, subnormal numbers and NaN among them, for few rows and for many, in float32 and bfloat16."""
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 256).repeat(8, axis=0)
    values = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    packed = pack_weight(vishwamai.QTensor(values, jnp.full((1, 256), 0.5), "fp8_e4m3", -2, None))
    want = np.asarray(values[0], np.float64) * 0.5
    for rows, dtype in ((1, "float32"), (3, "bfloat16"), (33, "float32"), (64, "bfloat16")):
        x = jnp.zeros((rows, 8), dtype).at[:, 5].set(1)
        out = np.asarray(gemm(x, packed, out_dtype="float32", implementation=implementation))
        np.testing.assert_array_equal(out, np.broadcast_to(want, out.shape))  # 0 times NaN is NaN too


@pytest.mark.turns(3)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_number_of_4_bit_floats(implementation):
    codes = jnp.arange(16, dtype=jnp.uint4).reshape(1, 16).repeat(32, axis=0)
    values = jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn)
    scales = jnp.arange(120, 136, dtype=jnp.uint8)[None]  # 2^-7 ... 2^8
    weight = vishwamai.QTensor(values, scales, "mxfp4", -2, 32)
    want = np.asarray(values[0], np.float64) * 2.0 ** (np.arange(120, 136) - 127)
    for activations in ("int8", "exact"):
        packed = pack_weight(weight, activations=activations)
        for rows in (1, 3, 40):
            x = jnp.zeros((rows, 32)).at[:, 5].set(127)
            out = np.asarray(gemm(x, packed, implementation=implementation))
            np.testing.assert_array_equal(out, np.broadcast_to(127 * want, out.shape))


@pytest.mark.turns(6)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("activations", ["int8", "exact"])
def test_gated_linear_unit(activations, implementation):
    for format, block_size in (*FORMATS[1:], *(FLOATS if activations == "exact" else ())):
        gate = weight_of(format, block_size, 160, 100)
        up = weight_of(format, block_size, 160, 100, seed=1)
        pair = [pack_weight(w, activations=activations) for w in (gate, up)]
        for rows in (1, 7, 50):
            x = draw(rows, 160)
            z, u = oracle(x, gate, activations), oracle(x, up, activations)
            got = gated_linear_unit(x, pair, implementation=implementation)
            want = z / (1 + np.exp(-z)) * u
            np.testing.assert_allclose(np.asarray(got), want, rtol=0, atol=3e-6 * np.abs(want).max())


@pytest.mark.turns(4)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "form, activations", [*EVERY[8:10], (("int4", 32), "int8"), (("uint4", 32), "int8"), (FLOATS[0], "exact")]
)
def test_grouped_gemm(form, activations, implementation):
    """Groups of no rows, of one and of many; rows after the last group give 0."""
    weight = weight_of(*form, 5, 160, 70)
    packed = pack_weight(weight, activations=activations)
    sizes = np.array([3, 0, 1, 300, 7])
    x = draw(320, 160)
    out = np.asarray(grouped_gemm(x, packed, sizes, implementation=implementation))
    row = 0
    for group, size in enumerate(sizes):
        one = jax.tree.map(lambda a, g=group: a[g], weight)
        if size:
            close(out[row : row + size], oracle(x[row : row + size], one, activations))
        row += size
    assert (out[row:] == 0).all() and row < 320
    # Traced sizes, of which known ones could not be: groups end with the rows.
    cut = jax.jit(lambda sizes: grouped_gemm(x[:5], packed, sizes, implementation=implementation))(sizes)
    close(np.asarray(cut), out[:5].astype(np.float64))


@pytest.mark.turns(3)
def test_transforms():
    """jit, vmap over rows and over weights; the gradient of the rows is straight-through, and the weight has none."""
    weight = weight_of("int8", 32, 64, 40)
    packed, x = pack_weight(weight), draw(2, 3, 64)
    want = gemm(x, packed)
    np.testing.assert_allclose(jax.jit(gemm)(x, packed), want, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(lambda x: gemm(x, packed))(x), want, rtol=1e-6)
    both = jax.tree.map(lambda a: jnp.stack([a, a]), packed)
    np.testing.assert_allclose(jax.vmap(lambda x, w: gemm(x, w, implementation="xla"))(x, both), want, atol=1e-5)
    cotangent = draw(2, 3, 40)
    dx = jax.grad(lambda x: jnp.sum(gemm(x, packed) * cotangent))(x)
    np.testing.assert_allclose(dx, cotangent @ np.asarray(weight.dequantize()).T, atol=1e-5)
    with pytest.raises(vishwamai.UnsupportedError, match="quantized values have no gradient"):
        jax.grad(lambda s: jnp.sum(gemm(x, PackedQTensor(packed.values, s, (64, 40), "int8", 32, "int8"))))(
            packed.scales
        )
    leaves, treedef = jax.tree.flatten(packed)
    assert len(leaves) == 2 and jax.tree.unflatten(treedef, leaves).block_size == 32


@pytest.mark.skipif(not NATIVE, reason="the native module lacks the kernel")
def test_the_native_kernel_is_chosen():
    weight = pack_weight(weight_of("int4", 32, 64, 40))
    assert "native_cpu" in str(vishwamai.explain(gemm, draw(3, 64), weight))
    assert PACKED_PRODUCT.implementations[0].platform == "cpu"


@pytest.mark.turns(3)
def test_errors_name_what_is_wrong():
    good = weight_of("int8", 32, 64, 40)
    packed, other = pack_weight(good), pack_weight(weight_of("int4", 32, 64, 40))
    for match, call in (
        (r"\[\.\.\., 64\]", lambda: gemm(jnp.ones((2, 5)), packed)),
        ("leave out scale_b", lambda: gemm(jnp.ones((2, 64)), packed, scale_b=1.0)),
        ("a multiple of 8", lambda: pack_weight(weight_of("int8", 12, 64, 40))),
        ("int8, int4, mxfp4", lambda: pack_weight(weight_of("fp8_e5m2", 32, 64, 40))),
        ("not products of bytes", lambda: pack_weight(weight_of("fp8", 32, 64, 40), activations="int8")),
        ("axis -1 of it", lambda: pack_weight(good, transpose=True)),
        ("'exact'", lambda: pack_weight(good, activations="int4")),
        ("not a QTensor", lambda: pack_weight(jnp.ones((4, 4)), activations="exact")),
        ("whose panels serve all", lambda: pack_weight(good, isa="avx2")),
        ("two of one shape", lambda: gated_linear_unit(jnp.ones((2, 64)), (packed, other))),
        ("two PackedQTensors", lambda: gated_linear_unit(jnp.ones((2, 64)), (packed, jnp.ones((64, 40))))),
        ("1 axes before K and N", lambda: grouped_gemm(jnp.ones((2, 64)), packed, jnp.array([2]))),
        (r"pass \(40,\)", lambda: gemm(jnp.ones((2, 64)), packed, bias=jnp.ones(3))),
        ("zero points need `pack_weight`", lambda: gemm(jnp.ones((2, 64)), weight_of("uint4", 32, 64, 40))),
        ("zero points need", lambda: gated_linear_unit(jnp.ones((2, 64)), (weight_of("uint4", 32, 64, 40),) * 2)),
        (
            "zero points need",
            lambda: grouped_gemm(jnp.ones((2, 64)), weight_of("uint4", 32, 1, 64, 40), jnp.array([2])),
        ),
    ):
        with pytest.raises(vishwamai.ShapeError, match=match):
            call()
