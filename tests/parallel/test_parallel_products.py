"""Products in pieces around a ring are the products with their collective, forward and backward, on any devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import rotation
from vishwamai import aot, explain, gated_linear_unit, gemm
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.hardware import TPUS
from vishwamai.parallel import (
    AxisLinks,
    all_gather_gated_linear_unit,
    all_gather_gemm,
    estimate_overlap,
    gemm_reduce_scatter,
    make_mesh,
)

ROWS, COLUMNS = P(None, "tensor", None), P(None, "tensor")


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def mapped(function, devices, specs, out):
    mesh = jax.make_mesh((devices,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=out)


def gather(devices, overlap: bool | None = True, **options):
    def run(x, w, bias=None):
        return all_gather_gemm(x, w, bias=bias, axis="tensor", overlap=overlap, **options)

    return lambda *arrays: mapped(run, devices, (ROWS, COLUMNS, P("tensor"))[: len(arrays)], P(None, None, "tensor"))(
        *arrays
    )


def scatter(devices, overlap: bool | None = True, **options):
    def run(x, w, bias=None):
        return gemm_reduce_scatter(x, w, bias=bias, axis="tensor", overlap=overlap, **options)

    return lambda *arrays: mapped(run, devices, (P(None, None, "tensor"), P("tensor"), P())[: len(arrays)], ROWS)(
        *arrays
    )


def gated(devices, overlap: bool | None = True, **options):
    def run(x, *weights):
        return all_gather_gated_linear_unit(x, weights, axis="tensor", overlap=overlap, **options)

    return mapped(run, devices, (ROWS, COLUMNS, COLUMNS), P(None, None, "tensor"))


def of_one_device(x, *weights, **options):
    return gated_linear_unit(x, weights, **options)


def value_and_gradients(function, arrays):
    y, pull = jax.vjp(function, *arrays)
    return y, *pull(jnp.cos(y))


def compare(ours, theirs, arrays, tolerance=2e-5):
    found, wanted = (jax.jit(functools.partial(value_and_gradients, f))(arrays) for f in (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1.0, np.abs(b).max()))


CASES = [
    (devices, activation, bias) for devices in (2, 4, 8) for activation, bias in ((None, 0), ("relu", 1), ("gelu", 1))
]


@pytest.mark.parametrize("ring", [gather, scatter])
@pytest.mark.parametrize("case", [pytest.param(c, marks=rotation.one_in(9, i)) for i, c in enumerate(CASES)], ids=str)
def test_a_ring_is_one_product(ring, case):
    devices, activation, bias = case
    arrays = (normal(0, 2, 3 * devices, 16), normal(1, 16, 24), *[normal(2, 24)][:bias])

    def one(x, w, bias=None):
        return gemm(x, w, bias=bias, activation=activation)

    compare(ring(devices, activation=activation), one, arrays)


@pytest.mark.parametrize("case", [pytest.param(n, marks=rotation.one_in(3, i)) for i, n in enumerate((2, 4, 8))])
def test_a_ring_of_gated_units(case):
    arrays = (normal(0, 2, 3 * case, 16), normal(1, 16, 24), normal(2, 16, 24))
    compare(gated(case), of_one_device, arrays)


@pytest.mark.long
@pytest.mark.parametrize("ring", [gather, scatter, gated])
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_bfloat16_and_odd_rings(ring, implementation):
    """Sums of a ring are float32 in each product, and travel in the dtype of the result, as XLA's own do."""
    arrays = (normal(0, 1, 15, 40, dtype=jnp.bfloat16), *(normal(i, 40, 25, dtype=jnp.bfloat16) for i in (1, 2)))
    arrays = arrays if ring is gated else arrays[:2]
    plain = ring(5, False, implementation=implementation)
    compare(ring(5, implementation=implementation), plain, arrays, tolerance=3e-2)


@pytest.mark.parametrize(
    "ring", [pytest.param(r, marks=rotation.one_in(2, i)) for i, r in enumerate((gather, scatter))]
)
def test_the_plain_form_is_one_product(ring):
    arrays = (normal(0, 1, 8, 16), normal(1, 16, 8), normal(2, 8))
    one = functools.partial(_biased, activation="silu")
    compare(ring(4, False, activation="silu"), one, arrays)


def _biased(x, w, bias, activation):
    return gemm(x, w, bias=bias, activation=activation)


def test_what_travels():
    """Pieces go both ways: of eight devices four hops on and three back, and nothing is gathered."""
    text = str(jax.make_jaxpr(gather(8))(normal(0, 1, 16, 16), normal(1, 16, 8)))
    assert text.count("ppermute[") == 7 and "all_gather" not in text
    text = str(jax.make_jaxpr(scatter(8))(normal(0, 1, 16, 16), normal(1, 16, 8)))
    assert text.count("ppermute[") == 7 and "reduce_scatter" not in text


def test_the_sums_travel_in_the_dtype_of_the_result():
    x, w = normal(0, 1, 8, 16, dtype=jnp.bfloat16), normal(1, 16, 8, dtype=jnp.bfloat16)
    for out_dtype in (jnp.bfloat16, jnp.float32):
        text = str(jax.make_jaxpr(scatter(2, out_dtype=out_dtype))(x, w))
        line = next(line for line in text.splitlines() if "ppermute[" in line)
        assert {jnp.bfloat16: ":bf16[", jnp.float32: ":f32["}[out_dtype] in line


@pytest.mark.long
def test_a_second_derivative():
    x, w = normal(0, 1, 4, 8), normal(1, 8, 4)

    def slope(overlap):
        def total(x):
            return jnp.sum(gather(2, overlap)(x, w) ** 3)

        return jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(total)(x) ** 2)), x)

    assert slope(False).shape == x.shape
    with pytest.raises(UnsupportedError, match="differentiable once.*overlap=False"):
        slope(True)


RING, LINE = AxisLinks(TPUS["v5p"], (8,), (True,)), AxisLinks(TPUS["v5e"], (8,), (False,))


def test_the_model_by_hand():
    """Rows of 1024 for each of eight: the product of a piece is bound by its arithmetic, and hides its transfer."""
    found = estimate_overlap("all_gather", 8192, 8192, 4096, "bfloat16", RING)
    piece = 2 * 1024 * 8192 * 4096 / 459e12
    assert found.product == pytest.approx(8 * piece) and found.piece == pytest.approx(piece)
    assert found.transfer == pytest.approx(1024 * 8192 * 2 / 90e9)
    assert found.collective == pytest.approx(7 * 1024 * 8192 * 2 / 180e9)
    assert found.exposed == pytest.approx(max(0, found.transfer - piece) + 3 * max(0, found.transfer - 2 * piece))
    assert found.pays and found.ring < found.plain


def test_where_a_ring_does_not_pay():
    """A few rows read the whole weight for each piece. On a line, what goes around the end takes the way back."""
    small = estimate_overlap("reduce_scatter", 8, 8192, 4096, "bfloat16", RING)
    assert not small.pays and small.ring > 4 * small.plain
    on_line = estimate_overlap("all_gather", 8192, 512, 512, "bfloat16", LINE)
    closed = estimate_overlap("all_gather", 8192, 512, 512, "bfloat16", AxisLinks(TPUS["v5e"], (8,), (True,)))
    assert on_line.transfer == pytest.approx(2 * closed.transfer)
    assert estimate_overlap("all_gather", 8, 8, 8, "bfloat16", AxisLinks(TPUS["v5e"], (), ())).exposed == 0.0


def test_the_model_decides_and_explain_says_so():
    x, w = jax.ShapeDtypeStruct((1, 65536, 8192), jnp.bfloat16), jax.ShapeDtypeStruct((8192, 32768), jnp.bfloat16)
    (note,) = explain(gather(8, None, links=RING), x, w).notes
    assert "all_gather_gemm over tensor (8): ring: " in note and "one after the other take" in note
    x, w = jax.ShapeDtypeStruct((1, 64, 8192), jnp.bfloat16), w
    (note,) = explain(scatter(8, None, links=RING), x, w).notes
    assert "gemm_reduce_scatter over tensor (8): plain: " in note
    (note,) = explain(gather(8, None), x, w).notes
    assert "the links of 'tensor' are not known" in note


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_the_compiler_puts_products_between_transfers(name):
    """The program of a v5e slice, with its gradients: transfers are under way while our kernel runs."""
    mesh = make_mesh("tensor=8", topology="v5e:2x4")
    specs = {"gather": (P("tensor", None), P(None, "tensor")), "scatter": (P(None, "tensor"), P("tensor", None))}[name]
    function = {"gather": all_gather_gemm, "scatter": gemm_reduce_scatter}[name]
    run = functools.partial(function, axis="tensor", overlap=True)
    shapes = ((4096, 2048), (2048, 8192))
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=jax.NamedSharding(mesh, p)) for s, p in zip(shapes, specs)]

    def total(x, w):
        out = specs[0] if name == "scatter" else specs[1]
        return jnp.sum(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=out)(x, w).astype(jnp.float32) ** 2)

    text = jax.jit(jax.grad(total, argnums=(0, 1))).lower(*arrays).compile().as_text() or ""
    assert "all-gather" not in text and "reduce-scatter" not in text
    steps = re.findall(r" (collective-permute-start|collective-permute-done|custom-call)\(", text)
    under_way, hidden = 0, 0
    for step in steps:
        under_way += {"collective-permute-start": 1, "collective-permute-done": -1}.get(step, 0)
        hidden += step == "custom-call" and under_way > 0
    assert steps.count("collective-permute-start") >= 14 and hidden >= 8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w: all_gather_gemm(x, w, axis="tensor"), r"`axis` is \('tensor',\), which this call"),
        (lambda x, w: gather(2)(x, w[:5]), "`w`.*features"),
        (lambda x, w: gather(2)(x, w.astype(jnp.bfloat16)), "`w` is bfloat16, but `x` is float32"),
        (lambda x, w: gather(2, activation="swish")(x, w), "`activation` is 'swish'"),
        (lambda x, w: gather(2)(x, w, normal(0, 6)), "`bias`"),
        (lambda x, w: scatter(4)(x[:, :6], w), "the 4 devices of 'tensor' do not divide the 6 rows of `x`"),
        (lambda x, w: all_gather_gated_linear_unit(x, w, axis="tensor"), "`weights` is not a pair"),
        (lambda x, w: estimate_overlap("gather", 8, 8, 8, "bfloat16", RING), "`kind` is 'gather'"),  # pyright: ignore
        (lambda x, w: estimate_overlap("all_gather", 9, 8, 8, "bfloat16", RING), "8 devices do not divide the 9 rows"),
        (lambda x, w: estimate_overlap("all_gather", 8, 0, 8, "bfloat16", RING), "sizes of at least 1"),
    ],
)  # fmt: skip
def test_wrong_arguments(call, message):
    with pytest.raises(ShapeError, match=message):
        call(normal(0, 1, 8, 8), normal(1, 8, 8))
