"""Quantized weights in formats that are data: `CodeFormat`, `CodeTensor`, next to float64 and published tables."""

# Formats and options are wrong on purpose here.
# pyright: reportArgumentType=false, reportCallIssue=false

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from jax.experimental.pallas import tpu as pltpu

import vishwamai
from vishwamai import CodeFormat, CodeTensor, KernelError, UnsupportedError, gemm, quantize
from vishwamai.core.quantized import code_product

EXAMPLES = Path(__file__).parents[2] / "examples"

# Appendix E of the QLoRA paper.
NF4_TABLE = [
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
]
# Table I of Max (1960), 8 levels.
MAX_TABLE = [0.2451, 0.7560, 1.344, 2.152]


def _example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NF4, LLOYD3 = _example("nf4").NF4, _example("lloyd3").LLOYD3
FORMATS = [
    NF4,
    LLOYD3,
    CodeFormat("int3", 3, 32),
    CodeFormat("uint2", 2, 16, "float16", True),
    CodeFormat("ternary", 2, None, "e8m0", codebook=(0, 1, -1)),
    CodeFormat("sign", 1, 24, "bfloat16", codebook=(-1, 1)),
    CodeFormat("skewed", 5, 48, zero_point=True, codebook=tuple((i / 31) ** 2 for i in range(32))),
    CodeFormat("uint8", 8, 64, zero_point=True),
]


def _normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _weights(form, *shape, seed=0):
    return _normal(*shape, seed=seed) + (0.7 if form.zero_point else 0)


def _oracle(form, w):
    """Encoding and decoding in float64, one block of a column at a time."""
    levels, out = np.array(form.levels, np.float64), np.empty(w.shape)
    size = form.block_size or w.shape[0]
    for first in range(0, w.shape[0], size):
        for n in range(w.shape[1]):
            block = w[first : first + size, n].astype(np.float64)
            if form.zero_point:
                scale = (max(block.max(), 0) - min(block.min(), 0)) / (levels.max() - levels.min())
            else:
                largest = levels.max() if form.codebook is None else abs(levels).max()
                scale = abs(block).max() / largest
            if form.scale_dtype == "e8m0":
                scale = 2.0 ** np.ceil(np.log2(scale))
            scale = float(jnp.asarray(scale, "float32" if form.scale_dtype == "e8m0" else form.scale_dtype))
            zero = 0.0
            if form.zero_point:
                zero = levels[abs(levels - (levels.min() - min(block.min(), 0) / scale)).argmin()]
            near = abs(block[:, None] / scale + zero - levels).argmin(1)
            out[first : first + size, n] = scale * (levels[near] - zero)
    return out


def test_the_examples_have_the_published_levels():
    np.testing.assert_allclose(NF4.levels, NF4_TABLE, atol=1e-6)
    np.testing.assert_allclose(LLOYD3.levels[4:], MAX_TABLE, atol=6e-4)
    np.testing.assert_allclose(LLOYD3.levels[:4], [-x for x in MAX_TABLE[::-1]], atol=6e-4)


@pytest.mark.turns(3)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_numbers_are_the_nearest_levels(form):
    w = _weights(form, 100, 5)  # neither blocks nor bytes divide 100
    packed = quantize(w, form, axis=-2)
    want = _oracle(form, w)
    result = np.asarray(packed.dequantize(), np.float64)
    step = np.ptp(want) / len(form.levels)
    off = abs(result - want) > 1e-5 * abs(want).max()
    assert off.mean() <= 0.01 and abs(result - want).max() <= 2 * step  # float32 may tip what lies in the middle
    assert packed.codes.shape == (form.bits, 13, 5)
    assert packed.codes.nbytes == form.bits * 13 * 5


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    "form, implementation",
    [(NF4, None), (NF4, "xla"), (NF4, "pallas_tpu"), (LLOYD3, None), (FORMATS[3], None)],
    ids=lambda value: getattr(value, "name", value),
)
def test_products_next_to_float64(form, implementation, monkeypatch):
    """In tiles of 128 columns and a last one of 44; on the CPU, by XLA, and by the TPU's kernel in the interpreter."""
    monkeypatch.setattr(code_product, "TILE_BYTES", 1)
    x, w, u = _normal(6, 96), _weights(form, 96, 300, seed=1), _weights(form, 96, 300, seed=2)
    bias, sizes = _normal(300, seed=3), jnp.array([2, 0, 3])
    gate, up = (quantize(each, form, axis=-2) for each in (w, u))
    experts = quantize(np.stack([w, u, w + u]), form, axis=-2)
    dense, dense_up = (np.asarray(each.dequantize(), np.float64) for each in (gate, up))
    matrices = np.asarray(experts.dequantize(), np.float64)
    with pltpu.force_tpu_interpret_mode():
        product = gemm(x, gate, bias=bias, activation="relu", implementation=implementation)
        unit = vishwamai.gated_linear_unit(x, (gate, up), "relu", implementation=implementation)
        rows = vishwamai.grouped_gemm(x, experts, sizes, implementation=implementation)
    close = {"rtol": 2e-4, "atol": 2e-4}
    np.testing.assert_allclose(product, np.maximum(x @ dense + bias, 0), **close)
    np.testing.assert_allclose(unit, np.maximum(x @ dense, 0) * (x @ dense_up), **close)
    want = np.concatenate([x[:2] @ matrices[0], x[2:5] @ matrices[2], np.zeros((1, 300))])
    np.testing.assert_allclose(rows, want, **close)


@pytest.mark.turns(4)
def test_transforms_and_the_gradient_of_the_other_operand(monkeypatch):
    """No array of the dense weight's size is in the gradient's program."""
    monkeypatch.setattr(code_product, "TILE_BYTES", 1)
    x, w = _normal(2, 3, 40), _normal(2, 40, 256)
    packed = jax.vmap(lambda w: quantize(w, NF4, axis=-2))(w)
    assert packed.shape == (2, 40, 256) and packed.matrix == (40, 256)
    want = np.einsum("bmk,bkn->bmn", x, np.asarray(packed.dequantize()))
    np.testing.assert_allclose(jax.jit(jax.vmap(gemm))(x, packed), want, rtol=1e-4, atol=1e-4)
    scanned = jax.lax.scan(lambda carry, pair: (carry, gemm(*pair)), 0, (x, packed))[1]
    np.testing.assert_allclose(scanned, want, rtol=1e-4, atol=1e-4)
    one = quantize(w[0], NF4, axis=-2)
    slope = jax.jit(jax.grad(lambda x: gemm(x, one, activation="relu").sum()))
    dense = np.asarray(one.dequantize())
    np.testing.assert_allclose(slope(x[0]), (x[0] @ dense > 0) @ dense.T, rtol=1e-4, atol=1e-4)
    assert "f32[40,256]" not in slope.lower(x[0]).as_text() and "40x256xf32" not in slope.lower(x[0]).as_text()
    with pytest.raises(UnsupportedError, match="a weight is a CodeTensor.*no gradient"):
        jax.grad(lambda scales: gemm(x[0], CodeTensor(one.codes, scales, None, one.matrix, NF4)).sum())(one.scales)


@pytest.mark.turns(4)
def test_experts_of_a_layer():
    tokens, router = jnp.asarray(_normal(5, 32)), jnp.asarray(_normal(32, 4, seed=1))
    gate, up, down = (_normal(4, *s, seed=i) for i, s in enumerate([(32, 64), (32, 64), (64, 32)]))
    packed = [quantize(w, NF4, axis=-2) for w in (gate, up, down)]
    out = vishwamai.moe_layer(tokens, router, *packed, top_k=2).out
    want = vishwamai.moe_layer(tokens, router, *(w.dequantize() for w in packed), top_k=2).out
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-4)


@pytest.mark.turns(3)
def test_files_hold_weights_bit_for_bit(tmp_path):
    path = tmp_path / "weights.safetensors"
    packed = {form.name: quantize(_weights(form, 3, 50, 7), form, axis=-2) for form in FORMATS}
    vishwamai.save_codes(path, packed)
    read = vishwamai.load_codes(path)
    for name, tensor in packed.items():
        assert read[name].format == tensor.format
        for a, b in zip(jax.tree.leaves(read[name]), jax.tree.leaves(tensor), strict=True):
            assert a.dtype == b.dtype and np.array_equal(a, b)
    assert safetensors.numpy.load_file(path)["nf4.codes"].shape == (3, 4, 7, 7)  # any reader sees arrays
    safetensors.numpy.save_file({"w": np.ones(3)}, path)
    with pytest.raises(KernelError, match="lacks the metadata entry.*save_codes"):
        vishwamai.load_codes(path)


@pytest.mark.turns(3)
def test_blocks_that_are_zero_or_not_finite():
    x = np.ones((64, 4), np.float32)
    x[3, 0], x[40, 1], x[:, 2] = np.nan, np.inf, 0
    for form in (CodeFormat("a", 4, 32), CodeFormat("b", 4, 32, "e8m0"), CodeFormat("c", 4, 32, "float16", True)):
        result = np.asarray(quantize(x, form, axis=-2).dequantize())
        bad = np.isnan(result)
        assert bad[:32, 0].all() and bad[32:, 1].all() and bad.sum() == 64
        assert (result[:, 2] == 0).all()
    tiny = np.full((8, 1), 1e-9, np.float32)
    assert np.isfinite(quantize(tiny, CodeFormat("d", 4, None, "float16"), axis=-2).dequantize()).all()


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: CodeFormat("f", 9), "CodeFormat: `bits` is 9; pass an integer from 1 to 8"),
        (lambda: CodeFormat("f", 1), "`bits` is 1; pass 2 or more, a zero point, or a codebook"),
        (lambda: CodeFormat("f", 2, codebook=(1, 1)), "`codebook` is .*; pass 2 to 4 finite numbers that differ"),
        (lambda: CodeFormat("f", 2, codebook="levels"), "`codebook` is 'levels'; pass 2 to 4 finite numbers"),
        (lambda: CodeFormat("f", 2, scale_dtype="int8"), "`scale_dtype` is 'int8'; pass one of float32"),
        (lambda: CodeFormat("f", 2, block_size=0), "`block_size` is 0; pass a positive integer"),
        (lambda: CodeFormat.from_json("{}"), "is not an object with the fields"),
        (lambda: quantize(jnp.ones((8, 8)), NF4), "`axis` is -1; with a CodeFormat pass axis=-2"),
        (lambda: quantize(jnp.ones(8), NF4, axis=-2), r"of shape \(8,\); with a CodeFormat pass floating-point"),
        (lambda: quantize(jnp.ones((8, 8)), NF4, axis=-2, block_size=4), "`block_size` is 4; leave it out"),
        (lambda: gemm(jnp.ones((2, 9)), quantize(jnp.ones((8, 8)), NF4, axis=-2)), "gemm: .*9"),
        (lambda: gemm(jnp.ones((2, 8)), quantize(jnp.ones((8, 8)), NF4, axis=-2), transpose_b=True), "`transpose_b`"),
        (
            lambda: vishwamai.gated_linear_unit(
                jnp.ones((2, 8)), (quantize(jnp.ones((8, 8)), NF4, axis=-2), jnp.ones((8, 8)))
            ),
            "another is not a CodeTensor",
        ),
        (lambda: vishwamai.save_codes("/tmp/none", {"w": jnp.ones(3)}), "save_codes: 'w' is a .*; pass CodeTensors"),
    ],
)
def test_errors(call, words):
    with pytest.raises(KernelError, match=words):
        call()
