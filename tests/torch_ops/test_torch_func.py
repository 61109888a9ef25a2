"""Every operator of torch under `torch.func` and forward-mode differentiation, on the CPU in float64: tangents and
gradients next to differences of the function's values, or to reverse mode.
"""

import pytest

torch = pytest.importorskip("torch")

from torch.autograd import forward_ad  # noqa: E402

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from test_torch_promises import CASES as OPERATIONS  # noqa: E402
from test_torch_promises import draw  # noqa: E402
from vishwamai.core.errors import UnsupportedError  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
    pytest.mark.skipif(contract.INTERPRETED, reason="float64 is the CPU's"),
]

PAIR = torch.tensor([[0, 1], [1, 0]])
SEEDS = torch.tensor([[[1, 2], [3, 4]]])
# Every operation's small call, and forms of calls that lay the operands out in other ways.
CASES = OPERATIONS | {
    "gemm, transposed": (
        lambda a, b, c: vt.gemm(a, b, bias=c, activation="silu", transpose_b=True),
        draw((2, 3, 8), (4, 8), (4,)),
    ),
    "gemm, batch": (lambda a, b: vt.gemm(a, b, activation="relu"), draw((2, 3, 8), (2, 8, 4))),
    "einsum": (lambda a, b: vt.einsum("bik,bkj->bij", a, b), draw((2, 3, 4), (2, 4, 5))),
    "gated, a stack": (vt.gated_linear_unit, draw((6, 8), (2, 8, 4))),
    "attention, bshd": (
        lambda q, b: vt.flash_attention(q, q, q, b, causal=True, layout="bshd"),
        draw((1, 4, 2, 8), (1, 1, 4, 4)),
    ),
    "attention, logsumexp": (
        lambda q, k: vt.flash_attention(q, k, k, return_lse=True)[1],
        draw((1, 2, 4, 8), (1, 2, 5, 8)),
    ),
    "attention, dropout": (
        lambda q: vt.flash_attention(q, q, q, dropout_rate=0.5, dropout_seed=SEEDS),
        draw((1, 2, 4, 8)),
    ),
    "rope, a pair": (lambda q, k: vt.apply_rope((q, k)), draw((1, 2, 4, 8), (1, 1, 4, 8))),
    "norm, residual": (lambda x, y, s: vt.rms_norm(x, s, residual=y), draw((6, 8), (6, 8), (8,))),
    "log_softmax": (lambda x: vt.log_softmax(x, axis=0), draw((6, 8))),
    "merge": (lambda a, b: vt.merge_attention([a, b], [a.sum(-1), b.sum(-1)]), draw((2, 3), (2, 3))),
    "block_sparse_matmul, rows": (
        lambda x, v: vt.block_sparse_matmul(x, v, PAIR, shape=(8, 8)),
        draw((6, 8), (2, 4, 4)),
    ),
}


def first(outputs):
    return outputs if isinstance(outputs, torch.Tensor) else outputs[0]


def scalar(function):
    """A function whose gradient depends on every output and on the point."""

    def loss(*args):
        outputs = function(*args)
        return sum(y.sin().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))

    return loss


def drawn(args):
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in args)


def inner(xs, ys):
    return sum((x * y).sum() for x, y in zip(xs, ys, strict=True))


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", CASES)
def test_tangents_are_those_of_reverse_mode(name):
    """<J t, u> = <t, J^T u>; by `torch.func.jvp`, by dual tensors, by `linearize`, for each argument alone, too."""
    function, args = CASES[name][0], CASES[name][1]()
    t = drawn(args)
    out, tangent = torch.func.jvp(function, tuple(args), t)
    out, tangent = first(out), first(tangent)
    torch.testing.assert_close(out, first(function(*args)))
    (u,) = drawn([out])
    _, vjp = torch.func.vjp(lambda *args: first(function(*args)), *args)
    gradients = vjp(u)
    assert tangent.abs().max() > 0
    torch.testing.assert_close((tangent * u).sum(), inner(t, gradients))
    with forward_ad.dual_level():
        dual = function(*(forward_ad.make_dual(x, d) for x, d in zip(args, t, strict=True)))
        torch.testing.assert_close(forward_ad.unpack_dual(first(dual)).tangent, tangent)
    _, linear = torch.func.linearize(lambda *args: first(function(*args)), *args)
    torch.testing.assert_close(linear(*t), tangent)
    for n, (x, d, g) in enumerate(zip(args, t, gradients, strict=True)):
        only = torch.func.jvp(lambda x, n=n: first(function(*args[:n], x, *args[n + 1 :])), (x,), (d,))[1]
        torch.testing.assert_close((only * u).sum(), (d * g).sum())


@pytest.mark.parametrize("name", CASES)
def test_gradients_by_func(name):
    """`torch.func.grad` alone, mapped, and forward over reverse; its second derivative by reverse is our error."""
    function, args = CASES[name][0], CASES[name][1]()
    loss = scalar(function)
    numbers = tuple(range(len(args)))
    gradients = torch.func.grad(loss, numbers)(*args)
    leaves = [x.clone().requires_grad_() for x in args]
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(*leaves), leaves))
    pair = [torch.stack([x, x + 0.1 * d]) for x, d in zip(args, drawn(args), strict=True)]
    mapped = torch.func.vmap(torch.func.grad(loss, numbers))(*pair)
    each = [torch.func.grad(loss, numbers)(*(x[n] for x in pair)) for n in range(2)]
    torch.testing.assert_close(mapped, tuple(map(torch.stack, zip(*each, strict=True))))
    t = drawn(args)
    _, second = torch.func.jvp(torch.func.grad(loss, numbers), tuple(args), t)
    step = 1e-6
    ahead, behind = (
        torch.func.grad(loss, numbers)(*(x + sign * step * d for x, d in zip(args, t, strict=True))) for sign in (1, -1)
    )
    differences = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    torch.testing.assert_close(list(second), differences, rtol=1e-4, atol=1e-6)
    if name == "merge":  # torch's own operations
        return
    with pytest.raises(UnsupportedError, match=r"second derivative"):
        torch.func.grad(lambda *args: inner(torch.func.grad(loss, numbers)(*args), t), numbers)(*args)


SMALL = {name: case for name, case in CASES.items() if name in ("gemm", "norm", "softmax", "activation")}


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", SMALL)
def test_jacobians(name):
    """By `jacfwd`, and by `torch.autograd.functional.jacobian` in forward mode, vectorized; and the hessian."""
    function, args = SMALL[name][0], SMALL[name][1]()
    rest = args[1:]

    def of_part(part):
        x = torch.cat([part, args[0].flatten()[len(part) :]]).reshape(args[0].shape)
        return first(function(x, *rest))

    part = args[0].flatten()[:3].clone()
    want = torch.func.jacrev(of_part)(part)
    torch.testing.assert_close(torch.func.jacfwd(of_part)(part), want)
    forward = torch.autograd.functional.jacobian(of_part, part, strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(forward, want)
    hessian = torch.func.hessian(lambda part: of_part(part).sin().sum())(part)
    torch.testing.assert_close(hessian, hessian.mT)
    assert hessian.abs().max() > 0


def test_tangents_of_experts():
    """Of a layer whose router is float32: next to reverse mode."""
    tokens, *weights = (
        torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((6, 8), (3, 8, 4), (3, 4, 8))
    )
    router = torch.randn(8, 3, generator=torch.Generator().manual_seed(2))

    def layer(x, up, down):
        return vt.moe_layer(x, router, None, up, down).out

    args = (tokens, *weights)
    t = drawn(args)
    out, tangent = torch.func.jvp(layer, args, t)
    gradients = torch.func.vjp(layer, *args)[1](torch.ones_like(out))
    torch.testing.assert_close(tangent.sum(), inner(t, gradients), rtol=1e-4, atol=1e-3)


def test_what_has_no_derivative_says_it():
    """Pages and packed weights: an error of ours under every transform that differentiates."""
    pages, lens = torch.zeros(4, 1, 2, 1), torch.tensor([1], dtype=torch.int32)
    table, starts = torch.tensor([[3, 0]], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    row, w = torch.ones(1, 1, 1), torch.ones(3, 3)
    calls = (
        (lambda q: vt.ragged_paged_attention(q, pages, lens, table, starts).sum(), row),
        (lambda k: vt.update_pages(pages.clone(), k, k, lens, table, starts).sum(), row),
        (lambda w: vt.gemm(torch.ones(2, 3), vt.pack_weight(w)).sum(), w),
    )
    for function, x in calls:
        with pytest.raises(UnsupportedError):
            torch.func.jvp(function, (x,), (x,))
        with pytest.raises(UnsupportedError):
            torch.func.grad(function)(x)
        with forward_ad.dual_level(), pytest.raises(UnsupportedError):
            function(forward_ad.make_dual(x, x))


def test_a_tangent_has_no_derivative():
    w = torch.randn(3, 2)

    def tangent(x):
        return torch.func.jvp(lambda x: vt.gemm(x, w, activation="silu"), (x,), (torch.ones_like(x),))[1]

    x = torch.randn(2, 3)
    with pytest.raises(UnsupportedError, match="forward over reverse"):
        torch.func.jvp(tangent, (x,), (x,))
    with pytest.raises(UnsupportedError, match="forward over reverse"):
        torch.func.grad(lambda x: tangent(x).sum())(x)


KEEPS_ITS_RESULT = ("attention", "softmax", "log_softmax", "gemm, batch")  # for the gradient, as torch's own do


@pytest.mark.parametrize("name", CASES)
def test_results_can_be_changed_in_place(name):
    """As torch's own can: the gradient is the one of the same program out of place."""

    given = CASES[name][1]()

    def run(change):
        args = [x.detach().clone().requires_grad_() for x in given]
        return change(first(CASES[name][0](*args))), args

    def added(y):
        y += 2 * y.detach()
        return y

    y, _ = run(added)
    y[:1] = 0
    torch.nn.functional.relu(y, inplace=True)
    if not name.startswith(KEEPS_ITS_RESULT):
        gradients = [
            torch.autograd.grad(y.sum(), args, allow_unused=True)
            for y, args in map(run, (added, lambda y: y + 2 * y.detach()))
        ]
        torch.testing.assert_close(*gradients)
