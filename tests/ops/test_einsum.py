"""einsum: values and gradients against NumPy and jax.numpy, which contractions reach gemm and in what layout,
errors.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rotation
from vishwamai import ShapeError, einsum, explain
from vishwamai.core.observe import record_plans

SIZES = dict(
    zip("abcdefghijklmnopqrstuvwxyz", (2, 3, 4, 5, 6, 7, 3, 2, 4, 5, 6, 3, 2, 5, 4, 3, 2, 6, 4, 3, 2, 5, 7, 2, 3, 4))
)


def arrays_for(equation, dtype=np.float32, seed=0) -> Any:
    rng = np.random.default_rng(seed)
    inputs = equation.split("->")[0].split(",")
    return [rng.standard_normal([SIZES[i] for i in term]).astype(dtype) for term in inputs]


# Equation, and how many products reach gemm.
EQUATIONS = [
    ("ij,jk->ik", 1),
    ("ji,jk->ik", 1),
    ("ij,kj->ik", 1),
    ("ij,kj->ki", 1),
    ("ji,kj->ik", 1),
    ("bij,bjk->bik", 1),
    ("bij,jk->bik", 1),
    ("bij,cjk->bcik", 1),
    ("bhqd,bhkd->bhqk", 1),
    ("bqhd,bkhd->bhqk", 1),
    ("bhqk,bkhd->bqhd", 1),
    ("abij,abjk->baki", 1),
    ("ijk,jkl->il", 1),
    ("ijk,kjl->il", 1),
    ("ij,j->i", 1),
    ("j,jk->k", 1),
    ("bij,bj->bi", 1),
    ("ij,jk", 1),
    ("ij,jk,kl->il", 2),
    ("ab,bc,cd,de->ea", 3),
    ("bij,jk,bkl->il", 2),
    ("ijl,jk->ik", 1),  # l is summed before
    ("iij,jk->ik", 1),  # a diagonal is taken before
    ("i,j->ij", 0),
    ("ij,ij->ij", 0),
    ("bi,bi->b", 0),
    ("ij,ij->", 0),
    ("ii->i", 0),
    ("ii->", 0),
    ("ijk->kj", 0),
    ("ij->", 0),
]


@pytest.mark.parametrize("equation, products", rotation.in_turn(2, EQUATIONS))
def test_values_gradients_and_what_reaches_gemm(equation, products):
    arrays = arrays_for(equation)
    exact = [a.astype(np.float64) for a in arrays]
    np.testing.assert_allclose(einsum(equation, *arrays), np.einsum(equation, *exact), rtol=1e-5, atol=1e-5)
    plans = record_plans(lambda *a: einsum(equation, *a), *arrays)
    assert [plan.op.name for plan in plans] == ["gemm"] * products
    cotangent = np.cos(np.arange(np.einsum(equation, *exact).size)).reshape(np.einsum(equation, *exact).shape)
    got = jax.vjp(lambda *a: einsum(equation, *a), *arrays)[1](jnp.asarray(cotangent, jnp.float32))
    with jax.enable_x64(True):
        want = jax.vjp(lambda *a: jnp.einsum(equation, *a), *exact)[1](jnp.asarray(cotangent))
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "equation, shapes",
    [
        ("...ij,...jk->...ik", ((2, 3, 4, 5), (2, 3, 5, 6))),
        ("...ij,jk->...ik", ((2, 3, 4, 5), (5, 6))),
        ("...ij,...jk", ((4, 5), (3, 5, 6))),
        ("...ij,...jk->...ik", ((2, 1, 4, 5), (1, 3, 5, 6))),  # both are broadcast
        ("b...d,d->b...", ((2, 3, 4), (4,))),
        ("...i->...", ((2, 3),)),
    ],
)
def test_ellipsis_and_broadcasting(equation, shapes):
    rng = np.random.default_rng(0)
    arrays: Any = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    np.testing.assert_allclose(einsum(equation, *arrays), np.einsum(equation, *arrays), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", ["bqhd,bkhd->bhqk", "ji,jk->ik", "ij,kj->ki", "ji,kj->ik", "bij,jk->bik"])
def test_a_layout_that_gemm_reads_is_not_copied(equation):
    """Only "bqhd,bkhd" has to be moved, heads before rows: everything else is read as it lies, the result too."""
    moved = sum("transpose" in str(eqn.primitive) for eqn in _equations(equation))
    assert moved == (2 if equation.startswith("bqhd") else 0)


def _equations(equation):
    jaxpr = jax.make_jaxpr(lambda *a: einsum(equation, *a))(*arrays_for(equation))
    return [
        e
        for e in jaxpr.jaxpr.eqns
        if not (
            str(e.primitive) == "transpose" and tuple(e.params["permutation"]) == tuple(range(e.invars[0].aval.ndim))
        )
    ]


def test_the_path_is_the_cheap_one():
    """A matrix times a matrix times a vector: the vector first."""
    shapes = [(300, 400), (400, 500), (500,)]
    structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    specs = [plan.spec for plan in record_plans(lambda *a: einsum("ij,jk,k->i", *a), *structs)]
    assert sum(spec.flops for spec in specs) == 2 * (400 * 500 + 300 * 400)
    given = [
        plan.spec for plan in record_plans(lambda *a: einsum("ij,jk,k->i", *a, optimize=[(0, 1), (0, 1)]), *structs)
    ]
    assert sum(spec.flops for spec in given) == 2 * (300 * 400 * 500 + 300 * 500)
    assert not record_plans(lambda *a: einsum("ij,jk,k->i", *a, optimize=False), *structs)


@pytest.mark.parametrize("optimize", ["optimal", "greedy", "auto", True, False])
def test_every_strategy_gives_the_same(optimize):
    arrays = arrays_for("ab,bc,cd->ad")
    want = np.einsum("ab,bc,cd->ad", *arrays)
    np.testing.assert_allclose(einsum("ab,bc,cd->ad", *arrays, optimize=optimize), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "int8", "complex64", "bool"])
def test_dtypes_are_those_of_jax(dtype):
    arrays = [jnp.asarray(a).astype(dtype) for a in arrays_for("ij,jk->ik")]
    got, want = einsum("ij,jk->ik", *arrays), jnp.einsum("ij,jk->ik", *arrays)
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got.astype(np.complex64), want.astype(np.complex64), rtol=1e-2, atol=1e-2)
    mixed = einsum("ij,jk->ik", jnp.ones((2, 3), jnp.bfloat16), jnp.ones((3, 4), jnp.float32))
    assert mixed.dtype == jnp.float32


def test_precision_and_implementation_reach_gemm():
    a, b = jnp.ones((4, 8)), jnp.ones((8, 4))
    (plan,) = record_plans(lambda a, b: einsum("ij,jk->ik", a, b, precision="high"), a, b)
    assert plan.spec.precision == "high"
    assert explain(lambda a, b: einsum("ij,jk->ik", a, b, implementation="xla"), a, b).calls[0].runs == "xla"


def test_transforms():
    q, k = arrays_for("bhqd,bhkd->bhqk")
    want = np.einsum("bhqd,bhkd->bhqk", q, k)
    got = jax.jit(jax.vmap(lambda q, k: einsum("hqd,hkd->hqk", q, k)))(q, k)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert einsum("ij,jk->ik", jnp.ones((2, 0)), jnp.ones((0, 3))).tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda a: einsum("ij,jk->ik", a), ["`equation`", "'ij,jk->ik'", "1 operands", "(3, 4)"]),
        (lambda a: einsum("ij,jk->ik", a, a), ["'j'", "4 and 3", "(3, 4)"]),
        (lambda a: einsum("ijk->i", a), ["'ijk'", "(3, 4)"]),
        (lambda a: einsum("ij->k", a), ["'ij->k'", "pass"]),
        (lambda a: einsum("i!->i", a), ["'i!->i'"]),
        (lambda a: einsum(a, a), ["`equation`", "pass a string"]),
    ],
)
def test_errors_name_the_equation_the_values_and_the_fix(call, words):
    with pytest.raises(ShapeError) as caught:
        call(jnp.ones((3, 4)))
    for word in ("einsum", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize("operands", [1, 2, 3])
@pytest.mark.parametrize(
    "optimize, words",
    [
        ("bogus", "`optimize` is 'bogus', which opt_einsum does not know; pass 'optimal'"),
        (None, "`optimize` is None; pass"),
        (3, "`optimize` is 3, of type int; pass"),
        (np.ones(3), r"`optimize` is an array of shape \(3,\)"),
        ([0, 1], r"`optimize` is \[0, 1\], of type list; pass"),
        ([(0, 1.5)], r"`optimize` is \[\(0, 1.5\)\]"),
        ([()], r"step 0 of `optimize` is \(\)"),
        ([(0, 0)], r"step 0 of `optimize` is \(0, 0\).* different positions"),
        ([(0, 7)], r"step 0 of `optimize` is \(0, 7\), and . operands are left"),
    ],
)
def test_a_wrong_order_is_an_error_of_any_number_of_operands(optimize, words, operands):
    square = jnp.ones((2, 2))
    with pytest.raises(ShapeError, match=words):
        einsum(",".join(("ij", "jk", "kl")[:operands]), *[square] * operands, optimize=optimize)


def test_a_path_ends_with_one_result():
    square = jnp.ones((2, 2))
    for path in ((), [], [(0, 1)]):
        with pytest.raises(
            ShapeError, match=r"leaves [23] of 3 operands; pass pairs of positions, such as \[\(0, 1\), "
        ):
            einsum("ij,jk,kl->il", square, square, square, optimize=path)
    for path in ([(0, 1, 2)], [(1,), (0, 1), (0, 1)], [(np.int64(0), 1), (0, 1)], "dp"):
        got = einsum("ij,jk,kl->il", square, square, square, optimize=path)
        assert got.tolist() == [[4.0, 4.0]] * 2
