"""Packed weights: every order unpacks to the same bits, the product is the product, and where a weight cannot be used
as it lies it is unpacked, loudly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vishwamai
from vishwamai import PackedWeight, gemm, pack_weight
from vishwamai.core import ffi
from vishwamai.ops.matmul import packed_weight

needs_native = pytest.mark.skipif(ffi.why_not() is not None, reason=str(ffi.why_not()))


def draw(dtype: str, *shape: int) -> jax.Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(rng.integers(-100, 100, shape) if dtype == "int8" else rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("isa", ffi.ISAS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_every_order_unpacks_to_the_same_bits(isa, dtype):
    weight = draw(dtype, 70, 33)
    packed = pack_weight(weight.T, transpose=True, isa=isa)
    assert packed.shape == (70, 33) and packed.dtype == dtype
    np.testing.assert_array_equal(np.asarray(packed.unpack()), np.asarray(weight))
    index = jnp.array([[32, 0], [7, 31]])
    np.testing.assert_array_equal(np.asarray(packed.columns(index)), np.asarray(weight).T[index])


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
@pytest.mark.parametrize("shape", [(70, 33), (1, 1), (200, 300)])
def test_packing_natively_is_the_permutation(shape, dtype):
    """In either layout, what the native kernel packs is what jax.numpy packs."""
    weight = draw(dtype, *shape)
    native = [pack_weight(weight).data, pack_weight(weight.T, transpose=True).data]
    want = packed_weight.permuted(weight, False, ffi.isa())
    for got in native:
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("isa", ffi.ISAS)
def test_a_bfloat16_weight_takes_its_own_bytes(isa):
    """Also where there are no products of bfloat16: decoding is bound by reading the weights."""
    weight = draw("bfloat16", 64, 64)
    assert pack_weight(weight, isa=isa).data.nbytes == weight.nbytes


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_a_weight_without_rows_gives_zero(dtype):
    assert not np.asarray(gemm(jnp.zeros((3, 0), dtype), pack_weight(jnp.zeros((0, 5), dtype)))).any()


@needs_native
@pytest.mark.parametrize("dtype, tolerance", [("bfloat16", 8e-3), ("float32", 2e-6), ("int8", 0)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 13, 16, 40, 70])
def test_product_with_its_epilogue(dtype, tolerance, rows):
    """Ragged, by few rows (one run through each panel) and by many (blocks), against float64."""
    a, weight, bias = draw(dtype, rows, 700), draw(dtype, 700, 100), draw("float32", 100)
    packed = pack_weight(weight)
    true = np.asarray(a, np.float64) @ np.asarray(weight, np.float64)
    got = np.asarray(jax.jit(gemm)(a, packed), np.float64)
    np.testing.assert_allclose(got, true, atol=tolerance * np.abs(true).max(), rtol=0)
    scaled = gemm(a, packed, bias=bias, activation="relu", scale_b=jnp.full(100, 0.5), out_dtype="float32")
    want = np.maximum(0.5 * true + np.asarray(bias, np.float64), 0)
    np.testing.assert_allclose(np.asarray(scaled, np.float64), want, atol=2e-6 * np.abs(want).max(), rtol=0)


@pytest.mark.turns(3)
@needs_native
def test_transforms():
    """grad of the other arguments, vmap over rows and over weights, donation; the weight itself has no gradient and
    says so.
    """
    a, weight, bias = draw("float32", 2, 3, 64), draw("float32", 64, 40), draw("float32", 40)
    packed = pack_weight(weight)

    def loss(weight):
        return lambda a, bias: jnp.sum(jnp.sin(gemm(a, weight, bias=bias, activation="gelu")))

    for got, true in zip(jax.grad(loss(packed), (0, 1))(a, bias), jax.grad(loss(weight), (0, 1))(a, bias), strict=True):
        np.testing.assert_allclose(got, true, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(jax.vmap(lambda a: gemm(a, packed))(a), a @ weight, atol=1e-4)
    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), packed)
    with pytest.warns(vishwamai.FallbackWarning, match="several weights"):
        each = jax.vmap(gemm)(a, both)
    np.testing.assert_allclose(each, jnp.stack([a[0] @ weight, 2 * a[1] @ weight]), atol=1e-4)
    moved = jax.jit(lambda p: jax.tree.map(lambda x: x + 0, p), donate_argnums=0)(pack_weight(weight))
    assert isinstance(moved, PackedWeight) and moved.isa == packed.isa
    np.testing.assert_allclose(gemm(a, moved), a @ weight, atol=1e-4)
    with pytest.raises(vishwamai.UnsupportedError, match="PackedWeight, which has no gradient"):
        jax.grad(lambda p: jnp.sum(gemm(a, p)))(packed)


@needs_native
def test_another_instruction_set_is_unpacked_and_said():
    a, weight = draw("float32", 3, 64), draw("float32", 64, 40)
    other = pack_weight(weight, isa="avx2" if ffi.isa() != "avx2" else "generic")
    with pytest.raises(vishwamai.UnsupportedError, match="in the order of"):
        gemm(a, other, implementation="native_cpu")
    np.testing.assert_allclose(gemm(a, other, implementation="xla"), a @ weight, atol=1e-4)


def test_errors_name_what_is_wrong():
    packed = pack_weight(jnp.ones((4, 3)))
    with pytest.raises(vishwamai.ShapeError, match=r"\[\.\.\., M, 4\] and float32"):
        gemm(jnp.ones((2, 5)), packed)
    with pytest.raises(vishwamai.ShapeError, match="neither transpose_a"):
        gemm(jnp.ones((4, 2)), packed, transpose_a=True)
    with pytest.raises(vishwamai.ShapeError, match="float16"):
        pack_weight(jnp.ones((2, 2), jnp.float16))
    with pytest.raises(vishwamai.ShapeError, match="sse9"):
        pack_weight(jnp.ones((2, 2)), isa="sse9")
