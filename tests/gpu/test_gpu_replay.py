"""A pass whose launches are repeated gives what the pass itself gives, bit by bit: `vishwamai.torch.replay`, on the
Triton kernels.
"""

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai.bench.gradient import gradient_case, gradient_peer  # noqa: E402
from vishwamai.bench.subject import subject  # noqa: E402
from vishwamai.core import gpu  # noqa: E402
from vishwamai.ops.catalogue import operations  # noqa: E402
from vishwamai.torch import bridge, replay  # noqa: E402

pytestmark = [
    pytest.mark.interpreter,
    pytest.mark.skipif(not contract.TRITON, reason="needs a process of its own: make test-gpu"),
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    monkeypatch.setattr(replay, "_PROGRAMS", {})
    with triton_serves():
        yield


def plain(monkeypatch, call):
    """The results of a call in which nothing is repeated."""
    with monkeypatch.context() as here:
        here.setattr(bridge, "repeatable", lambda of, function, *arguments: function(*arguments))
        return call()


def leaves(results):
    found = results if isinstance(results, tuple) else (results,)
    return [x.detach() for x in found if isinstance(x, torch.Tensor)]


def case_of(name):
    """A small case with gradients, of those that torch computes."""
    about, operation = subject(name), operations()[name]
    cases = (case for case in operation.tagged("contract") if about.in_torch(case) is not None)
    sized = sorted(
        cases, key=lambda case: (not case.differentiable, sum(np.prod(i.shape) for i in case.arrays.values()))
    )
    declined = operation.facts.declines.get("triton", {})
    wide = {"float64"}
    return next(
        case
        for case in sized
        if case.name not in declined
        and not wide & {init.dtype for init in case.arrays.values()}
        and all(np.prod(init.shape) for init in case.arrays.values())
    )


OPERATIONS = [
    name
    for name, op in operations().items()
    if op.has_kernel("cuda") and op.facts.small.call.__module__.startswith("vishwamai.")
]


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation(name, monkeypatch):
    """Three calls on other numbers: as it is, recorded, and repeated."""
    case = case_of(name)
    peer, run = subject(name).in_torch(case), gradient_case(case) or case
    assert peer is not None
    function = peer if run is case else gradient_peer(peer, case)
    arrays = run.make()
    for factor in (1, 2, 3):
        scaled = {n: (x * factor).astype(x.dtype) if x.dtype.kind == "f" else x for n, x in arrays.items()}
        call = functools.partial(function.call, *function.prepare(scaled))
        want, got = leaves(plain(monkeypatch, call)), leaves(call())
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    known = list(replay._PROGRAMS.values())
    assert known and all(known), f"{name} is not repeated: {known}"


def test_the_same_tensor_thrice_is_another_call(monkeypatch):
    """What was recorded of `f(x, x, x)` is not repeated for three tensors."""
    q, k, v = torch.randn(3, 1, 2, 16, 16)
    for _ in range(3):
        vt.flash_attention(q, q, q)
    want = plain(monkeypatch, lambda: vt.flash_attention(q, k, v))
    for _ in range(3):
        assert torch.equal(vt.flash_attention(q, k, v), want)


def test_parts_of_one_tensor_and_of_several(monkeypatch):
    """Operands that lie among each other are found again where they are."""
    for seed in range(4):
        whole = torch.randn(1, 16, 6, 16, generator=torch.Generator().manual_seed(seed))
        q, k, v = whole.split(2, dim=2)
        if seed == 3:  # with the same strides, in memory of their own
            q, k, v = (torch.empty_like(whole).split(2, dim=2)[0].copy_(x) for x in (q, k, v))
        want = plain(monkeypatch, lambda q=q, k=k, v=v: vt.flash_attention(q, k, v, layout="bshd", causal=True))
        assert torch.equal(vt.flash_attention(q, k, v, layout="bshd", causal=True), want)


def test_what_torch_computes_in_between_is_not_repeated():
    x = torch.ones(4)

    def doubled(x):
        return x * 2

    for _ in range(3):
        assert torch.equal(replay.repeatable("doubled", doubled, x), x * 2)
    assert list(replay._PROGRAMS.values()) == [None]


def test_a_pass_in_parts_is_not_repeated():
    """A record would hold the memory of every part: the loss would hold its logits."""

    def parts(x):
        def body(step, carry):
            vt.softmax(carry[0])
            return (carry[0].view(carry[0].shape),)

        return gpu.repeat(0, 3, body, (x,))[0]

    x = torch.ones(2, 16)
    for _ in range(3):
        with gpu.recorded() as launches:
            assert torch.equal(replay.repeatable("parts", parts, x), x)
        assert not launches
    known = {key[0]: value for key, value in replay._PROGRAMS.items()}
    assert known["parts"] is None


def test_many_kinds_are_forgotten(monkeypatch):
    monkeypatch.setattr(replay, "MOST", 3)
    for features in range(16, 26):
        for _ in range(3):
            vt.rms_norm(torch.ones(2, features))
        assert len(replay._PROGRAMS) <= 3


def test_launches_of_a_repeated_pass_are_those_of_the_pass(monkeypatch):
    x, scale = torch.randn(4, 16), torch.ones(16)
    with gpu.recorded() as first:
        vt.rms_norm(x, scale)
    seen = []
    serve: Any = gpu.launcher("torch")
    gpu.register_launcher("torch", lambda how, *rest: seen.append(how) or serve(how, *rest))
    vt.rms_norm(x, scale)
    vt.rms_norm(x, scale)
    gpu.register_launcher("torch", serve)
    assert seen == [how for how, *_ in first] * 2
