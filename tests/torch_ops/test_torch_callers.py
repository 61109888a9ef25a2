"""torch's operations as programs of torch call them: under `torch.autocast`, in one graph, on meta tensors."""

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402

pytestmark = pytest.mark.skipif(contract.INTERPRETED, reason="these paths are the CPU's")
F = torch.nn.functional


def numbers(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=dtype)


X, W, Q, EXPERTS, DOWN = numbers(4, 8), numbers(8, 6), numbers(1, 2, 4, 8), numbers(3, 8, 6), numbers(3, 6, 8)
ROUTER = numbers(8, 3)
NARROW, LABELS, SIZES = W.bfloat16(), torch.tensor([0, 1, 2, 3]), torch.tensor([1, 2, 1])
STARTS = torch.tensor([0, 4])


# By name: ours, and the same by torch, whose dtype under autocast is ours.
AUTOCAST = {
    "gemm": (lambda: vt.gemm(X, W), lambda: X @ W),
    "gemm, two dtypes": (lambda: vt.gemm(X, NARROW), lambda: X @ NARROW),
    "gemm, float64": (lambda: vt.gemm(X.double(), W.double()), lambda: X.double() @ W.double()),
    "gemm, bias": (lambda: vt.gemm(X, W, bias=W[0]), lambda: F.linear(X, W.T, W[0])),
    "einsum": (lambda: vt.einsum("ij,jk->ik", X, W), lambda: torch.einsum("ij,jk->ik", X, W)),
    "attention": (
        lambda: vt.flash_attention(Q.bfloat16(), Q, Q),
        lambda: F.scaled_dot_product_attention(Q.bfloat16(), Q, Q),
    ),
    "gated": (lambda: vt.gated_linear_unit(X, (W, NARROW)), lambda: F.silu(X @ W) * (X @ NARROW)),
    "loss": (
        lambda: vt.linear_cross_entropy(X, W.T, LABELS),
        lambda: F.cross_entropy(F.linear(X, W.T).float(), LABELS),
    ),
    "grouped": (
        lambda: vt.grouped_gemm(X, EXPERTS, SIZES),
        lambda: torch.cat([X[:1] @ EXPERTS[0], X[1:3] @ EXPERTS[1], X[3:] @ EXPERTS[2]]),
    ),
    "softmax": (lambda: vt.softmax(X.bfloat16()), lambda: F.softmax(X.bfloat16(), -1)),
    "layer_norm": (lambda: vt.layer_norm(X.bfloat16()), lambda: F.layer_norm(X.bfloat16(), (8,))),
    "gelu": (lambda: vt.gelu(X), lambda: F.gelu(X)),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_is_torchs(name):
    ours, theirs = AUTOCAST[name]
    with torch.autocast("cpu", torch.bfloat16):
        got, want = ours(), theirs()
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    x = X.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        vt.gemm(x, W).float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


def test_a_router_stays_float32_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        routing = vt.moe_routing(X, ROUTER)
    assert torch.equal(routing.weights, vt.moe_routing(X, ROUTER).weights)


GRAPHS = {
    "einsum": lambda x: vt.einsum("ij,jk->ik", x, W),
    "einsum of three": lambda x: vt.einsum("ij,jk,kl->il", x, W, DOWN[0]),
    "quantize": lambda x: vt.quantize(x).values,
    "quantize, blocks": lambda x: vt.quantize(x, "mxfp8", axis=0).scales,
    "dequantize": lambda x: vt.dequantize(vt.quantize(x, "fp8", block_size=3)),
    "fake_quantize": lambda x: vt.fake_quantize(x, "fp8"),
    "fake_quantize, percentile": lambda x: vt.fake_quantize(x, "int8", scale="percentile"),
    "experts": lambda x: vt.moe_layer(x, ROUTER, EXPERTS, EXPERTS, DOWN).out,
    "autocast": lambda x: torch.autocast("cpu", torch.bfloat16)(lambda x: vt.gemm(x, W))(x),
}


@pytest.mark.turns(4)
@pytest.mark.parametrize("name", GRAPHS)
def test_one_graph(name):
    torch._dynamo.reset()
    fast = torch.compile(GRAPHS[name], fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(X), GRAPHS[name](X))
    assert torch.equal(fast(X.clone().requires_grad_()), GRAPHS[name](X))


def test_stochastic_rounding_in_one_graph():
    torch._dynamo.reset()
    fast = torch.compile(lambda x: vt.quantize(x, rounding="stochastic").values, fullgraph=True, backend="aot_eager")
    assert (fast(X).int() - vt.quantize(X).values.int()).abs().max() == 1


ROWS = Q[0].transpose(0, 1)
META = {
    "gemm": lambda m: vt.gemm(m(X), m(W)),
    "norm": lambda m: vt.rms_norm(m(X), m(X[0])),
    "softmax": lambda m: vt.log_softmax(m(X), axis=0),
    "activation": lambda m: vt.gelu(m(X)),
    "attention": lambda m: vt.flash_attention(m(Q), m(Q), m(Q), kv_lens=m(torch.tensor([3]))),
    "varlen": lambda m: vt.flash_attention_varlen(*(m(ROWS), m(ROWS), m(ROWS)), m(STARTS), m(STARTS), 4, 4),
    "rope": lambda m: vt.apply_rope(m(Q)),
    "gated": lambda m: vt.gated_linear_unit(m(X), (m(W), m(W))),
    "loss": lambda m: vt.linear_cross_entropy(m(X), m(W.T), m(LABELS)),
    "grouped": lambda m: vt.grouped_gemm(m(X), m(EXPERTS), m(SIZES)),
    "experts": lambda m: vt.moe_layer(m(X), m(ROUTER), m(EXPERTS), m(EXPERTS), m(DOWN)).out,
    "quantize": lambda m: vt.quantize(m(X)).values,
}


@pytest.mark.parametrize("name", META)
def test_meta_tensors_have_the_shapes_of_results(name):
    got, want = META[name](lambda x: x.to("meta")), META[name](lambda x: x)
    assert got.is_meta and got.shape == want.shape and got.dtype == want.dtype


@pytest.mark.turns(4)
def test_importing_does_not_import_the_compiler():
    check = "import sys, vishwamai.torch; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
