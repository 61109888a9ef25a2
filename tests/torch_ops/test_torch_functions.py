"""The public functions of torch that have JAX's plan or a thin operator: values, gradients and errors, against JAX's of
the same name.
"""

import functools
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import contract  # noqa: E402
import rotation  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.core.errors import ShapeError, UnsupportedError  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
    pytest.mark.skipif(contract.INTERPRETED, reason="against JAX on the CPU"),
]


def draw(*shape, seed=0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def close(got, want, tolerance=1e-5):
    want = np.asarray(want, np.float64)
    got = got.detach().double().numpy()
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max(initial=1e-6))


def test_every_public_function_is_here():
    """What takes arrays, except for what is JAX's alone: configurations, and functions whose torch form is another."""
    functions = {n for n in vishwamai.__all__ if n[0].islower() and not n.endswith("_config")}
    assert functions - set(vt.__all__) == {"load_codes", "save_codes"}  # files of JAX arrays


@pytest.mark.parametrize("name, options", [("gelu", {}), ("gelu", {"approximate": True}), ("silu", {}), ("relu2", {})])
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4)], ids=str)
def test_activations(name, options, shape):
    x = np.asarray(3 * draw(*shape), np.float32)
    given = torch.tensor(x, requires_grad=True)
    got = getattr(vt, name)(given, **options)
    function = getattr(vishwamai, name)
    close(got, function(x, **options))
    (gradient,) = torch.autograd.grad(got.sum(), given)
    close(gradient, jax.grad(lambda x: function(x, **options).sum())(x))
    with pytest.raises(ShapeError, match=f"{name}: `x` has dtype int32"):
        getattr(vt, name)(torch.ones(3, dtype=torch.int32))


def test_parts_of_attention_merge():
    """As the whole, with its gradient; a part that a row does not see counts for nothing."""
    q, k, v = (torch.tensor(draw(1, 2, 9, 4, seed=i), requires_grad=True) for i in range(3))
    halves = [vt.flash_attention(q, k[:, :, h], v[:, :, h], return_lse=True) for h in (slice(0, 3), slice(3, 9))]
    nothing = (torch.zeros_like(halves[0][0]), torch.full((1, 2, 9), -math.inf))
    got = vt.merge_attention(*zip(*halves, nothing, strict=True))
    want = vt.flash_attention(q, k, v, return_lse=True)
    for ours, whole in zip(got, want, strict=True):
        close(ours, whole.detach().numpy())
    for ours, whole in zip(*(torch.autograd.grad(x[0].square().sum(), (q, k, v)) for x in (got, want)), strict=True):
        close(ours, whole.numpy(), 1e-4)
    with pytest.raises(ShapeError, match=r"`lses\[0\]` has shape \(2, 9, 1\)"):
        vt.merge_attention([got[0]], [torch.zeros(2, 9, 1)])


EQUATIONS = {
    "bhqd,bhkd->bhqk": ((2, 3, 4, 5), (2, 3, 6, 5)),
    "ij,jk,kl": ((3, 4), (4, 5), (5, 2)),
    "...i,ij->...j": ((2, 3, 4), (4, 5)),
    "ii,ij->j": ((4, 4), (4, 5)),
    "i,j->ij": ((3,), (4,)),
    "bij,jk->bk": ((2, 3, 4), (1, 5)),
}


@pytest.mark.turns(3)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_einsum(equation):
    arrays: list[Any] = [draw(*shape, seed=i) for i, shape in enumerate(EQUATIONS[equation])]
    given = [torch.tensor(x, requires_grad=True) for x in arrays]
    got = vt.einsum(equation, *given)
    close(got, vishwamai.einsum(equation, *arrays))
    gradients = torch.autograd.grad(got.sum(), given)
    wanted = jax.grad(lambda xs: jnp.einsum(equation, *xs, precision="highest").sum())(arrays)
    for ours, theirs in zip(gradients, wanted, strict=True):
        close(ours, theirs)
    with pytest.raises(ShapeError, match="einsum: index 'j'"):
        vt.einsum("ij,jk->ik", torch.ones(2, 3), torch.ones(4, 5))


FORMATS = ["int8", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2"]


@pytest.mark.turns(3)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("axis, block_size", [(-1, None), (0, None), (None, None), (-2, 32)])
def test_quantize(format, axis, block_size):
    """The same values and scales (XLA multiplies by a reciprocal where torch divides); zeros, and an infinity."""
    if format.startswith("mx") and axis is None:
        pytest.skip("blocks lie along an axis")
    if format.startswith("mx"):
        block_size = 32
    x: Any = draw(70, 40) * np.exp(3 * draw(70, 1, seed=1))
    x[:, 3], x[5] = 0.0, 0.0
    x[40, 7] = np.inf
    got = vt.quantize(torch.tensor(x), format, axis=axis, block_size=block_size)
    want = vishwamai.quantize(x, format, axis=axis, block_size=block_size)
    assert (got.format, got.axis, got.block_size, got.nbytes) == (want.format, want.axis, want.block_size, want.nbytes)
    np.testing.assert_array_equal(got.values.float().numpy(), np.asarray(want.values, np.float32))
    np.testing.assert_allclose(got.scales.numpy(), np.asarray(want.scales), rtol=2e-7)
    np.testing.assert_allclose(vt.dequantize(got).numpy(), np.asarray(vishwamai.dequantize(want)), rtol=3e-7)
    assert repr(got) == repr(want)


def test_quantize_by_percentile_and_stochastically():
    x = draw(64, 8)
    got = vt.quantize(torch.tensor(x), axis=0, scale="percentile", percentile=90.0)
    want = vishwamai.quantize(x, axis=0, scale="percentile", percentile=90.0)
    close(got.scales, want.scales, 1e-6)
    ones = torch.full((4000,), 0.3)
    ones[0] = 127.0
    drawn = vt.quantize(ones, rounding="stochastic", generator=torch.Generator().manual_seed(0))
    assert abs(drawn.values[1:].double().mean() - 0.3) < 0.03
    given = torch.tensor(x, requires_grad=True)
    loss = vt.fake_quantize(given, axis=0, scale="percentile", percentile=90.0).square().sum()
    (gradient,) = torch.autograd.grad(loss, given)
    how = {"axis": 0, "scale": "percentile", "percentile": 90.0}
    close(gradient, jax.grad(lambda x: (vishwamai.fake_quantize(x, "int8", **how) ** 2).sum())(x), 1e-4)


def test_errors_of_quantize():
    with pytest.raises(UnsupportedError, match="quantize: torch has no numbers of int4"):
        vt.quantize(torch.ones(4), "int4")
    with pytest.raises(ShapeError, match="quantize: `axis` is 3"):
        vt.quantize(torch.ones(4), axis=3)
    with pytest.raises(ShapeError, match="dequantize: `q` is a Tensor"):
        vt.dequantize(torch.ones(4))  # type: ignore[arg-type]


@pytest.mark.parametrize("format, block_size", [("int8", None), ("fp8", None), ("int8", 32), ("mxfp8", None)])
def test_gemm_of_a_quantized_weight(format, block_size):
    a, b = draw(5, 64), draw(64, 9, seed=1)
    how = {"axis": -2, "block_size": block_size}
    given = torch.tensor(a, requires_grad=True)
    got = vt.gemm(given, vt.quantize(torch.tensor(b), format, **how), activation="silu")
    close(got, vishwamai.gemm(a, vishwamai.quantize(b, format, **how), activation="silu"))
    assert torch.autograd.grad(got.sum(), given)[0].abs().max() > 0
    with pytest.raises(ShapeError, match="`b` of shape .* shares its scales along axis -1"):
        vt.gemm(given, vt.quantize(torch.tensor(b), format, axis=-1, block_size=block_size))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("isa", [None, "generic"])
def test_packed_weight(dtype, isa):
    generator = torch.Generator().manual_seed(0)
    if dtype == "int8":
        a, b = (torch.randint(-9, 10, s, dtype=torch.int8, generator=generator) for s in ((2, 3, 70), (70, 33)))
    else:
        a, b = (torch.randn(s, generator=generator).to(getattr(torch, dtype)) for s in ((2, 3, 70), (70, 33)))
    packed = vt.pack_weight(b, isa=isa)
    assert torch.equal(packed.unpack(), b)
    assert packed.shape == (70, 33) and str(packed) == str(vt.pack_weight(b.T.contiguous(), transpose=True, isa=isa))
    bias, scale = torch.randn(33, generator=generator), torch.rand(3, generator=generator)
    for options in ({}, {"bias": bias, "activation": "gelu"}, {"scale_a": scale, "out_dtype": torch.float32}):
        got, want = vt.gemm(a, packed, **options), vt.gemm(a, b, **options)
        assert got.dtype == want.dtype and got.shape == want.shape
        close(got, want.double(), 2e-2 if got.dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("activation", [None, "relu", "silu"])
def test_gradients_beside_a_packed_weight(activation):
    a, weight, bias, scale = (torch.tensor(draw(*s, seed=i)) for i, s in enumerate(((4, 70), (70, 33), (33,), (33,))))
    leaves = [x.requires_grad_() for x in (a, bias, scale)]
    packed = vt.pack_weight(weight)
    how = {"bias": bias, "scale_b": scale, "activation": activation}
    ours = torch.autograd.grad(vt.gemm(a, packed, **how).square().sum(), leaves)
    theirs = torch.autograd.grad(vt.gemm(a, weight, **how).square().sum(), leaves)
    for got, want in zip(ours, theirs, strict=True):
        close(got, want.double(), 1e-4)
    with pytest.raises(ShapeError, match="PackedWeight `b` is float32 of shape"):
        vt.gemm(torch.ones(3, 5), packed)


ROUTINGS = {
    "softmax": {},
    "sigmoid": dict(scoring="sigmoid", bias=draw(8, seed=3), num_groups=4, top_groups=2, scale=2.5, top_k=3),
    "not normalized": dict(normalize=False, top_k=1, logit_bias=draw(8, seed=3)),
    "best groups": dict(num_groups=4, top_groups=2, group_score="max"),
    "gpt-oss": dict(
        logit_bias=draw(8, seed=3),
        biases=[draw(8, 6, seed=8), draw(8, 6, seed=9), draw(8, 16, seed=10)],
        activation="swigluoai",
        limit=1.5,
    ),
    "a bias alone": dict(biases=(None, None, draw(8, 16, seed=10))),
}


@pytest.mark.turns(5)
@pytest.mark.parametrize("name", rotation.in_turn(2, ROUTINGS))
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_moe(name, capacity_factor):
    """Routing, dispatch, the layer, its losses and all gradients."""
    tokens, router = draw(2, 9, 16), draw(16, 8, seed=1)
    tokens[0, 1] = tokens[0, 0]
    router[:, 3] = router[:, 2]  # equal scores: the lower expert wins
    weights = [0.3 * draw(*s, seed=4 + i) for i, s in enumerate(((8, 16, 6), (8, 16, 6), (8, 6, 16)))]
    how = dict(ROUTINGS[name])
    biases = how.pop("biases", ())
    given = {n: torch.tensor(x) if isinstance(x, np.ndarray) else x for n, x in how.items()}
    arrays = [tokens, router, *weights, *(b for b in biases if b is not None)]
    leaves = [torch.tensor(x, requires_grad=True) for x in arrays]

    def call(layer, arrays, options):
        """With the biases among the arrays, whose gradients are compared too."""
        own = iter(arrays[5:])
        options = options | {"biases": tuple(b if b is None else next(own) for b in biases) or None}
        return layer(*arrays[:5], capacity_factor=capacity_factor, **options)

    def theirs(arrays):
        result = call(vishwamai.moe_layer, arrays, how)
        return (result.out**2).sum() + result.routing.load_balance_loss + result.routing.z_loss, result

    got = call(vt.moe_layer, leaves, given)
    gradients, want = jax.jit(jax.grad(theirs, has_aux=True))(arrays)
    for ours, wanted in zip(got.routing, want.routing, strict=True):
        close(ours, wanted)
    assert int(got.dropped) == int(want.dropped) and (capacity_factor is None) == (int(got.dropped) == 0)
    close(got.out, want.out)
    loss = got.out.square().sum() + got.routing.load_balance_loss + got.routing.z_loss
    for ours, wanted in zip(torch.autograd.grad(loss, leaves), gradients, strict=True):
        close(ours, wanted, 1e-4)
    dispatch = vt.moe_dispatch(leaves[0], got.routing, capacity_factor=capacity_factor)
    wanted = vishwamai.moe_dispatch(tokens, want.routing, capacity_factor=capacity_factor)
    for field in ("group_sizes", "choice", "place"):
        np.testing.assert_array_equal(getattr(dispatch, field).numpy(), np.asarray(getattr(wanted, field)))


@pytest.mark.turns(4)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_moe_of_a_gate_of_minus_infinity(activation):
    """The unit's limit, 0, in JAX and in torch."""
    gate, up, down = np.zeros((1, 2, 1), np.float32), np.zeros((1, 2, 1), np.float32), np.ones((1, 1, 2), np.float32)
    biases = [np.array([[-np.inf]], np.float32), np.ones((1, 1), np.float32), None]
    arrays: Any = (np.ones((1, 2), np.float32), np.ones((2, 1), np.float32), gate, up, down)
    theirs = vishwamai.moe_layer(*arrays, top_k=1, activation=activation, biases=biases)
    given = [None if b is None else torch.tensor(b) for b in biases]
    ours = vt.moe_layer(*map(torch.tensor, arrays), top_k=1, activation=activation, biases=given)
    for out in (np.asarray(theirs.out), ours.out.numpy()):
        assert (np.abs(out) < 1e-30).all()


@pytest.mark.turns(5)
def test_the_clamped_layer_compiles_in_one_graph():
    leaves = [torch.tensor(draw(*s)) for s in ((5, 8), (8, 4), (4, 8, 6), (4, 8, 6), (4, 6, 8), (4, 6), (4, 6), (4, 8))]

    def layer(*arrays):
        return vt.moe_layer(*arrays[:5], biases=arrays[5:], activation="swigluoai").out

    fast = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(fast(*leaves), layer(*leaves))


def test_moe_without_tokens_and_errors():
    weights = [torch.tensor(draw(*s)) for s in ((4, 8, 6), (4, 8, 6), (4, 6, 8))]
    result = vt.moe_layer(torch.zeros(0, 8), torch.zeros(8, 4), *weights)
    assert result.out.shape == (0, 8) and float(result.routing.z_loss) == 0
    with pytest.raises(ShapeError, match="moe_routing: `top_k` is 9"):
        vt.moe_routing(torch.ones(3, 8), torch.ones(8, 4), top_k=9)
    with pytest.raises(ShapeError, match="moe_layer: `down` has shape"):
        vt.moe_layer(torch.ones(3, 8), torch.ones(8, 4), weights[0], weights[1], weights[0])
    with pytest.raises(ShapeError, match="moe_layer: torch's has all experts on one device"):
        vt.moe_layer(torch.ones(3, 8), torch.ones(8, 4), *weights, expert_axis="x")
    layer = functools.partial(vt.moe_layer, torch.ones(3, 8), torch.ones(8, 4))
    with pytest.raises(ShapeError, match="moe_layer: `activation` is 'swigluoai' with limit 7.0 and no `gate`"):
        layer(None, *weights[1:], activation="swigluoai")
    with pytest.raises(ShapeError, match=r"the bias of `down` has shape \(4, 6\); pass \(4, 8\)"):
        layer(*weights, biases=(None, None, torch.ones(4, 6)))
    with pytest.raises(ShapeError, match="moe_layer: `biases` is tuple of 2"):
        layer(*weights, biases=(None, None))
    with pytest.raises(ShapeError, match="moe_combine: `routing` is 3, of type int; pass a Routing"):
        routing = vt.moe_routing(torch.ones(3, 8), torch.ones(8, 4))
        vt.moe_combine(torch.ones(6, 8), vt.moe_dispatch(torch.ones(3, 8), routing), 3)  # type: ignore[arg-type]
    torch.manual_seed(0)
    first, second = (vt.moe_routing(torch.ones(3, 8), torch.tensor(draw(8, 4)), jitter=0.5).weights for _ in range(2))
    assert not torch.equal(first, second)
