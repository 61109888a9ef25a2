"""What every operator of torch promises, on the CPU: float64 in float64 with its gradient, an error of ours for a
second derivative, one graph under `torch.compile`, no warning of torch's under `torch.vmap`, a row in a profile.
"""

import warnings
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.bench.subject import subject  # noqa: E402
from vishwamai.core import observe  # noqa: E402
from vishwamai.core.config import kernel_config  # noqa: E402
from vishwamai.core.errors import UnsupportedError  # noqa: E402
from vishwamai.measure.profiling import profile_kernel  # noqa: E402
from vishwamai.ops import catalogue  # noqa: E402
from vishwamai.torch.sharding import RULES  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
    pytest.mark.skipif(contract.INTERPRETED, reason="float64 is the CPU's"),
]
STARTS = torch.tensor([0, 2, 5])
SEED = torch.tensor([5, -7])
LONG: dict[str, Any] = {"scaling": vishwamai.NtkScaling(2.0, 3)}
BLOCKS = torch.eye(3, dtype=torch.bool).numpy()


def small_call(operation):
    """(function of float64 tensors, what makes them) of the operation's small case; None where it has no function of
    torch.
    """
    case = operation.facts.small
    peer = subject(operation.name).in_torch(case)
    if peer is None:
        return None
    moved = [n for n in peer.arguments if n in case.differentiable]

    def arrays():
        made = case.make()
        return made | {name: made[name].astype(np.float64) for name in moved}

    fixed = dict(zip(peer.arguments, peer.prepare(arrays()), strict=True))

    def function(*tensors):
        return peer.call(*(fixed | dict(zip(moved, tensors, strict=True))).values())

    return function, lambda: [x for n, x in zip(peer.arguments, peer.prepare(arrays()), strict=True) if n in moved]


def draw(*shapes):
    generator = torch.Generator().manual_seed(0)
    return lambda: [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


# Every operation that has a function of torch, and what no small case calls.
CASES: dict[str, tuple[Any, Any]] = {
    name: call for name, operation in catalogue.operations().items() if (call := small_call(operation)) is not None
}
CASES |= {
    "activation, dropout": (lambda x: vt.fused_gelu_dropout(x, 0.3, seed=SEED), draw((3, 4))),
    "attention_varlen": (
        lambda q, k, v: vt.flash_attention_varlen(q, k, v, STARTS, STARTS, 3, 3, causal=True),
        draw((5, 2, 4), (5, 1, 4), (5, 1, 4)),
    ),
}


def arguments(name):
    return [x.requires_grad_() for x in CASES[name][1]()]


def test_every_operator_is_here(monkeypatch):
    """Except for the one of packed weights, which are not float64."""
    monkeypatch.setattr(catalogue, "PACKAGES", ("vishwamai.ops",))  # not the operations of tests
    shipped = catalogue.operations.__wrapped__()  # past its cache, which may hold them
    names = {name for name in RULES if name.removesuffix("_varlen") in shipped}
    assert names - {"packed_gemm"} <= set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_float64_and_its_gradient(name):
    """In float64 throughout: the derivative agrees with differences of 1e-6, which float32 would drown."""
    function, args = CASES[name][0], arguments(name)
    outputs = function(*args)
    assert all(y.dtype == torch.float64 for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
    assert torch.autograd.gradcheck(function, args, fast_mode=True)


def test_gemm_of_float64_is_one():
    a, b = torch.randn(9, 70, dtype=torch.float64), torch.randn(70, 8, dtype=torch.float64)
    assert (vt.gemm(a, b) - a @ b).abs().max() < 1e-13


@pytest.mark.parametrize("name", CASES)
def test_a_second_derivative_is_an_error_of_ours(name):
    function, args = CASES[name][0], arguments(name)
    outputs = function(*args)
    first = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    (gradient,) = torch.autograd.grad(first.square().sum(), args[0], create_graph=True)
    with pytest.raises(UnsupportedError, match=r"second derivative.*create_graph=False"):
        gradient.square().sum().backward()


@pytest.mark.turns(5)
@pytest.mark.parametrize("scaling", [None, "dynamic"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_rope_of_positions_compiles_in_one_graph(scaling, dynamic):
    torch._dynamo.reset()
    options: dict[str, Any] = LONG if scaling else {}

    def model(x, positions):
        return vt.apply_rope(x, positions, **options) * 2

    x = torch.randn(2, 3, 5, 8)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for positions in (torch.arange(5) * 2, torch.arange(10).reshape(2, 5)):
        assert torch.equal(fast(x, positions), model(x, positions))


@pytest.mark.turns(3)
def test_rope_counts_from_0_in_one_graph():
    x = torch.randn(1, 2, 5, 8)
    fast = torch.compile(vt.apply_rope, fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(x), vt.apply_rope(x))


def test_packed_sequences_are_mapped_without_a_warning():
    q = torch.randn(3, 5, 2, 4, requires_grad=True)
    seed = torch.arange(2 * 2 * 2).reshape(2, 2, 2)

    def attend(q):
        return vt.flash_attention_varlen(q, q, q, STARTS, STARTS, 3, 3, dropout_rate=0.3, dropout_seed=seed)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mapped = torch.vmap(attend)(q)
        cotangents = torch.randn(2, *mapped.shape)
        torch.autograd.grad(mapped, q, cotangents, is_grads_batched=True)
    assert torch.equal(mapped, torch.stack([attend(x) for x in q]))


def test_a_profile_times_the_operations_of_torch():
    """Forward and backward, each with the work of its spec; results and gradients are those of the program."""
    a, b = (torch.randn(s, requires_grad=True) for s in ((8, 16), (16, 4)))
    with profile_kernel(repeats=2) as profile:
        y = vt.gemm(a, b, activation="silu")
        (got,) = torch.autograd.grad(vt.rms_norm(y).sum(), a)
    (want,) = torch.autograd.grad(vt.rms_norm(vt.gemm(a, b, activation="silu")).sum(), a)
    assert torch.equal(got, want)
    names = [row.name for row in profile.operations]
    assert names == ["gemm forward (for a gradient)", "norm forward", "norm backward", "gemm backward"]
    assert profile.operations[0].flops == 2 * 8 * 16 * 4 and all(row.seconds > 0 for row in profile.operations)
    q = torch.randn(5, 2, 4)
    with profile_kernel(repeats=2) as profile:
        vt.flash_attention_varlen(q, q, q, STARTS, STARTS, 3, 3)
    assert [row.calls for row in profile.operations] == [1, 1]  # two sequences of two lengths


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_has_the_configuration_of_its_call(compiled):
    """Forward and backward, also where a graph was compiled under another one."""
    q = torch.randn(1, 2, 4, 8, requires_grad=True)

    def attend(q):
        return vt.flash_attention(q, q, q)

    if compiled:
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
        attend(q)
    with kernel_config(use_flash=False), observe.recording() as found:
        out = attend(q)
        out.sum().backward()
    assert [plan.choices[0].implementation.name for plan in found] == ["xla", "xla"]


def test_block_sparse_attention():
    """Blocks of an array, of a function and of a `BlockMask`, as JAX has them; one graph; and heads of their own."""
    import jax.numpy as jnp

    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(s, generator=generator, requires_grad=True) for s in ((1, 2, 12, 8),) * 3)
    own = torch.rand(2, 3, 3, generator=generator).numpy() < 0.6

    def dilated(i, j):
        return (i - j) % 3 == 0

    for blocks in (BLOCKS, own, dilated):
        got = vt.block_sparse_attention(q, k, v, blocks, block_size=4, causal=True)
        a, b, c = (jnp.asarray(x.detach().numpy()) for x in (q, k, v))
        want = vishwamai.block_sparse_attention(a, b, c, blocks, block_size=4, causal=True)
        assert (got.detach() - torch.tensor(want.tolist())).abs().max() < 1e-5
    mask = vishwamai.BlockMask.from_function(dilated, 12, 12, (4, 4))
    (first,) = torch.autograd.grad(vt.block_sparse_attention(q, k, v, mask).sum(), v)
    seen = torch.tensor(mask.positions(12, 12))
    (second,) = torch.autograd.grad(vt.flash_attention(q, k, v, mask=seen).sum(), v)
    assert torch.allclose(first, second, atol=1e-5)
    fast = torch.compile(lambda q: vt.block_sparse_attention(q, k, v, mask), fullgraph=True, backend="aot_eager")
    assert torch.equal(fast(q), vt.block_sparse_attention(q, k, v, mask))
