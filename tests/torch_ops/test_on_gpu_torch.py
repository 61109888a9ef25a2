"""torch's operators on a GPU as programs call them: derivatives of every kind, results changed in place, autocast, one
graph of the compiler. The truth is float64 on the CPU.
"""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import vishwamai.torch as vt  # noqa: E402
from on_gpu import DEVICE, needs_gpu  # noqa: E402

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]
F = torch.nn.functional
PAIR, SEEDS, SIZES = [[0, 1], [1, 0]], [[[1, 2], [3, 4]]], [3, 0, 5]
STARTS, LABELS = [0, 20, 50], [1, 0, 39, 7, 7, -100, 3, 2]


def ints(values, like, dtype=torch.int32):
    return torch.tensor(values, device=like.device, dtype=dtype)


# By name: a function of tensors, and their shapes.
CASES = {
    "gemm": (lambda a, b, c: vt.gemm(a, b, bias=c, activation="silu"), ((5, 32), (32, 48), (48,))),
    "gemm, batch": (lambda a, b: vt.gemm(a, b, transpose_b=True), ((2, 5, 32), (2, 16, 32))),
    "einsum": (lambda a, b: vt.einsum("bik,bkj->bij", a, b), ((2, 3, 16), (2, 16, 8))),
    "gated": (lambda x, g, u: vt.gated_linear_unit(x, (g, u)), ((6, 32), (32, 24), (32, 24))),
    "attention": (lambda q, k, v: vt.flash_attention(q, k, v, causal=True), ((1, 4, 24, 32), *((1, 2, 24, 32),) * 2)),
    "attention, bshd": (
        lambda q, b: vt.flash_attention(q, q, q, b, layout="bshd"),
        ((1, 20, 2, 16), (1, 1, 20, 20)),
    ),
    "attention, dropout": (
        lambda q: vt.flash_attention(q, q, q, dropout_rate=0.5, dropout_seed=ints(SEEDS, q)),
        ((1, 2, 16, 16),),
    ),
    "varlen": (
        lambda q, k: vt.flash_attention_varlen(q, k, k, ints(STARTS, q), ints(STARTS, q), 30, 30, causal=True),
        ((50, 4, 16), (50, 2, 16)),
    ),
    "rms_norm": (lambda x, r, s: vt.rms_norm(x, s, residual=r), ((6, 40), (6, 40), (40,))),
    "layer_norm": (lambda x, s, b: vt.layer_norm(x, s, b), ((6, 40), (40,), (40,))),
    "softmax": (lambda x: vt.softmax(x), ((6, 33),)),
    "log_softmax": (lambda x: vt.log_softmax(x, axis=0), ((6, 33),)),
    "activation": (lambda x: vt.fused_gelu_dropout(x, 0.3, seed=ints([5, -7], x)), ((6, 33),)),
    "rope": (lambda q, k: vt.apply_rope((q, k)), ((1, 4, 9, 16), (1, 2, 9, 16))),
    "loss": (
        lambda x, w: vt.linear_cross_entropy(x, w, ints(LABELS, x, torch.int64), softcap=5.0),
        ((8, 32), (40, 32)),
    ),
    "grouped": (lambda x, w: vt.grouped_gemm(x, w, ints(SIZES, x)), ((8, 32), (3, 32, 16))),
    "block_sparse_matmul": (
        lambda x, v: vt.block_sparse_matmul(x, v, ints(PAIR, x), shape=(32, 32)),
        ((6, 32), (2, 16, 16)),
    ),
    "experts": (
        lambda x, u, d: vt.moe_layer(x, x.new_ones(32, 3).cumsum(1), None, u, d, top_k=3).out,
        ((8, 32), (3, 32, 16), (3, 16, 32)),
    ),
}


def truth(name, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in CASES[name][1])


def on_device(tensors):
    return tuple(x.float().to(DEVICE) for x in tensors)


def tensors_of(results):
    return [results] if isinstance(results, torch.Tensor) else [y for x in results for y in tensors_of(x)]


def close(results, expected, factor=1.0):
    """In float32: 1e-4 of the largest entry."""
    for y, want in zip(tensors_of(results), tensors_of(expected), strict=True):
        assert y.device.type == DEVICE and y.shape == want.shape
        torch.testing.assert_close(
            y.cpu().double(), want.cpu().double(), rtol=0, atol=factor * 1e-4 * (1 + want.abs().max().item())
        )


def loss_of(name):
    return lambda *args: torch.stack([y.sin().sum() for y in tensors_of(CASES[name][0](*args))]).sum()


@pytest.mark.parametrize("name", CASES)
def test_values_and_derivatives(name):
    """By `backward`, `torch.func.grad` and `jvp`, dual tensors, and forward over reverse."""
    function, loss, args, directions = CASES[name][0], loss_of(name), truth(name), truth(name, 1)
    xs, ts, numbers = on_device(args), on_device(directions), tuple(range(len(args)))
    close(function(*xs), function(*args))
    expected = torch.func.grad(loss, numbers)(*args)
    close(torch.func.grad(loss, numbers)(*xs), expected)
    leaves = [x.clone().requires_grad_() for x in xs]
    loss(*leaves).backward()
    close([x.grad for x in leaves], expected)
    tangents = tensors_of(torch.func.jvp(function, args, directions)[1])
    close(torch.func.jvp(function, xs, ts)[1], tangents)
    with forward_ad.dual_level():
        results = tensors_of(function(*map(forward_ad.make_dual, xs, ts)))
        close([forward_ad.unpack_dual(y).tangent for y in results], tangents)
    second = torch.func.jvp(torch.func.grad(loss, numbers), args, directions)[1]
    close(torch.func.jvp(torch.func.grad(loss, numbers), xs, ts)[1], second)


@pytest.mark.parametrize("name", [name for name in CASES if name != "experts"])
def test_mapped_gradients(name):
    pair = tuple(torch.stack([x, 0.5 * x]) for x in truth(name))
    numbers = tuple(range(len(pair)))
    function = torch.func.vmap(torch.func.grad(loss_of(name), numbers))
    close(function(*on_device(pair)), function(*pair))


KEEPS_ITS_RESULT = (
    "attention",
    "varlen",
    "softmax",
    "log_softmax",
    "gemm, batch",
)  # for the gradient, as torch's own do


@pytest.mark.parametrize("name", CASES)
def test_results_can_be_changed_in_place(name):
    function = CASES[name][0]

    def run(change):
        args = [x.requires_grad_() for x in on_device(truth(name))]
        return change(tensors_of(function(*args))[0]), args

    def added(y):
        y += 2 * y.detach()
        return y

    y, _ = run(added)
    if y.ndim:
        y[:1] = 0
    F.relu(y, inplace=True)
    if not name.startswith(KEEPS_ITS_RESULT):
        gradients = [torch.autograd.grad(y.sum(), args) for y, args in map(run, (added, lambda y: y + 2 * y.detach()))]
        close(*gradients)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_is_torchs(dtype):
    a, b, q = on_device(torch.randn(shape, dtype=torch.float64) for shape in ((8, 64), (64, 48), (1, 2, 16, 32)))
    labels, sizes = ints([1, 2, 3, 4, 5, 6, 7, 8], a, torch.int64), ints([3, 5], a)
    pairs = {
        "gemm": (lambda: vt.gemm(a, b), lambda: a @ b),
        "two dtypes": (lambda: vt.gemm(a, b.bfloat16()), lambda: a @ b.bfloat16()),
        "bias": (lambda: vt.gemm(a, b, bias=b[0]), lambda: F.linear(a, b.T, b[0])),
        "einsum": (lambda: vt.einsum("ij,jk->ik", a, b), lambda: torch.einsum("ij,jk->ik", a, b)),
        "attention": (lambda: vt.flash_attention(q, q, q), lambda: F.scaled_dot_product_attention(q, q, q)),
        "gated": (lambda: vt.gated_linear_unit(a, (b, b)), lambda: F.silu(a @ b) * (a @ b)),
        "loss": (
            lambda: vt.linear_cross_entropy(a, b.T.contiguous(), labels),
            lambda: F.cross_entropy((a @ b).float(), labels),
        ),
        "grouped": (
            lambda: vt.grouped_gemm(a, torch.stack([b, -b]), sizes),
            lambda: torch.cat([a[:3] @ b, a[3:] @ -b]),
        ),
        "softmax": (lambda: vt.softmax(a.to(dtype)), lambda: F.softmax(a.to(dtype), -1)),
        "layer_norm": (lambda: vt.layer_norm(a.to(dtype)), lambda: F.layer_norm(a.to(dtype), (64,))),
        "gelu": (lambda: vt.gelu(a), lambda: F.gelu(a)),
    }
    for name, (ours, theirs) in pairs.items():
        with torch.autocast(DEVICE, dtype):
            y, want = ours(), theirs()
        torch.testing.assert_close(y, want, rtol=3e-2, atol=0.2, msg=lambda text, name=name: f"{name}: {text}")
    x = a.clone().requires_grad_()
    with torch.autocast(DEVICE, dtype):
        vt.gemm(x, b).float().sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_one_graph(name):
    """Compiled whole by inductor, forward and backward."""
    torch._dynamo.reset()
    function = CASES[name][0]
    fast = torch.compile(function, fullgraph=True)
    xs = on_device(truth(name))
    close(fast(*xs), function(*truth(name)))

    def gradients(f):
        leaves = [x.clone().requires_grad_() for x in xs]
        return torch.autograd.grad([y.sin().sum() for y in tensors_of(f(*leaves))], leaves)

    close(gradients(fast), gradients(function))


@pytest.mark.parametrize("form", ["int8", "fp8", "mxfp8"])
def test_one_graph_of_rounded_values(form):
    torch._dynamo.reset()
    (x,) = on_device([torch.randn(8, 64, dtype=torch.float64)])
    rounded = torch.compile(lambda x: vt.dequantize(vt.quantize(x, form)), fullgraph=True)(x)
    assert torch.equal(rounded, vt.dequantize(vt.quantize(x, form)))
    assert (rounded - x).abs().mean() < 0.05
