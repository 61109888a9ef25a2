"""The faces on torch functions: what the operations inside read of the configuration, forward and in a backward pass of
another thread; explain; strict mode.
"""

import dataclasses
import threading

import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import rotation  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.core import observe  # noqa: E402
from vishwamai.core import op as op_module  # noqa: E402
from vishwamai.core.config import ambient_target  # noqa: E402
from vishwamai.core.errors import FallbackWarning, KernelError, UnsupportedError  # noqa: E402
from vishwamai.core.target import Target  # noqa: E402
from vishwamai.kernels import cpu_kernel, gpu, gpu_kernel, kernel_config  # noqa: E402
from vishwamai.ops.norm.api import NORM  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = [
    pytest.mark.skipif(contract.INTERPRETED, reason="the faces are the same"),
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
]


def layer(x, weight):
    return vt.softmax(vt.gemm(vt.rms_norm(x), weight))


def tensors():
    return torch.randn(6, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)


def in_a_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_operations_read_the_configuration_forward_and_backward():
    """Autograd's threads know nothing of the block that the forward pass stood in; the operators do."""
    x, weight = tensors()
    with observe.recording() as found:
        y = gpu_kernel(layer, implementation="xla", precision="high")(x, weight)
        forward = len(found)
        in_a_thread(y.sum().backward)
    assert forward == 3 and len(found) == 6
    assert [plan.choices[0].implementation.name for plan in found] == ["xla"] * 6
    assert {plan.spec.precision for plan in found if plan.op.name == "gemm"} == {"high"}
    with observe.recording() as found:
        cpu_kernel(layer)(x, weight)
    assert "xla" not in {plan.choices[0].implementation.name for plan in found if plan.op.name in ("norm", "gemm")}


def test_block_size_reaches_the_tiles(monkeypatch):
    """Of the Triton kernels: what is chosen for a tensor on a GPU."""
    from vishwamai.core import triton_launch

    monkeypatch.setattr(bridge, "target_of", lambda tensor: Target("cuda", None, "torch", local=True))
    monkeypatch.setattr(triton_launch, "why_not", lambda: None)
    seen = []

    class Stop(Exception):
        pass

    def forward(plan, *rest):
        seen.append(plan.choices[0].config)
        raise Stop

    monkeypatch.setattr(bridge, "forward", forward)
    x, weight = tensors()
    for call in (gpu_kernel(vt.gemm, block_size=32), lambda x, w: gpu.gemm(x, w, block_size=32), vt.gemm):
        with pytest.raises((Stop, KernelError)):
            call(x, weight)
    small, face, tuned = seen
    assert small == face == tuned.with_block_size(32) != tuned


def test_explain_runs_the_function_once():
    """Reasons, in the order of the calls; strict mode does not stop the answer, and what is chosen is what runs."""
    calls = []

    @cpu_kernel(strict=True)
    def kernel(x, weight):
        calls.append(x)
        return layer(x, weight)

    explanation = kernel.explain(*tensors())
    assert len(calls) == 1 and [call.op for call in explanation.calls] == ["norm", "gemm", "softmax"]
    text = str(explanation)
    assert text.startswith(f"On {ambient_target()}:") and "is for tpu" in text and "is for cuda" in text
    assert str(vt.explain(torch.sin, torch.ones(2))) == "On cpu: the function calls no vishwamai operation."
    with pytest.raises(KernelError, match="`target` is 'v5e', but torch tensors are explained for the device"):
        kernel.explain(*tensors(), target="v5e")
    with pytest.raises(KernelError, match="torch tensor of shape"):
        kernel.lower(*tensors())


def test_a_fallback_is_told_or_forbidden(monkeypatch):
    declined = [
        dataclasses.replace(impl, why_not=lambda spec, target: "not today.") if impl.platform == "cpu" else impl
        for impl in NORM.implementations
    ]
    monkeypatch.setattr(NORM, "implementations", tuple(declined))
    bridge._choose.cache_clear()
    op_module._warn_once.cache_clear()
    x = torch.ones(3, 8)
    with pytest.warns(FallbackWarning, match="norm: 'native_cpu' declined, so 'xla' runs on cpu: not today"):
        vt.rms_norm(x)
    with kernel_config(strict=True), pytest.raises(UnsupportedError, match="strict=True.*forbids the fallback"):
        vt.rms_norm(x)
    bridge._choose.cache_clear()


WIDE = torch.rand(6, 16), torch.rand(16, 8), torch.rand(2, 16, 8)
HEADS = torch.rand(1, 6, 2, 16)
STARTS = torch.tensor([0, 2, 6])


def packed(x, w, both):
    rows = HEADS[0].to(x.dtype)
    return vt.flash_attention_varlen(rows, rows, rows, STARTS, STARTS, 4, 4)


PRODUCTS = {
    "gemm": lambda x, w, both: vt.gemm(x, w),
    "gated_linear_unit": lambda x, w, both: vt.gated_linear_unit(x, both),
    "grouped": lambda x, w, both: vt.grouped_gemm(x, both, torch.tensor([2, 3])),
    "block_sparse_matmul": lambda x, w, both: vt.block_sparse_matmul(x, w[None], torch.tensor([[0, 0]]), shape=(16, 8)),
    "linear_cross_entropy": lambda x, w, both: vt.linear_cross_entropy(x, w.T, torch.arange(6), reduction="none"),
    "attention": lambda x, w, both: vt.flash_attention(HEADS.to(x.dtype), HEADS.to(x.dtype), HEADS.to(x.dtype)),
    "packed": packed,
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=rotation.one_in(3, i)) for i, n in enumerate(PRODUCTS)])
def test_narrow_products(name):
    """Under `use_bfloat16` a product is that of the rounded operands, in the dtype that it would have had; gradients
    arrive in float32.
    """
    args = [x.clone().requires_grad_() for x in WIDE]
    exact = PRODUCTS[name](*args)
    y = gpu_kernel(PRODUCTS[name], use_bfloat16=True)(*args)
    rounded = PRODUCTS[name](*(x.bfloat16() for x in WIDE))
    assert y.dtype == exact.dtype == torch.float32
    assert 0 < (y - exact).abs().max() < 0.05 * exact.abs().max()
    torch.testing.assert_close(y, rounded.float(), rtol=2**-7, atol=2**-7)
    if y.requires_grad:
        assert {g.dtype for g in torch.autograd.grad(y.sum(), args, allow_unused=True) if g is not None} == {
            torch.float32
        }
