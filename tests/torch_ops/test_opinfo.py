"""torch's own samples (OpInfo) of the functions that we have too: same values, right gradients, or our error."""

import math
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")

from torch.testing._internal.common_methods_invocations import op_db  # noqa: E402

import vishwamai.torch as vt  # noqa: E402
from vishwamai import VishwamaiError  # noqa: E402

OF_ROWS = "nothing along axis|is a scalar"


def rows(function):
    """A norm over the last axes, as torch writes it, by a norm over the last axis."""

    def norm(x, shape, *parameters, eps=None):
        features = math.prod(shape)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        rows = x.reshape(x.numel() // features, features)
        y = function(rows, *(None if p is None else p.reshape(-1) for p in parameters), eps=eps)
        return y.reshape(x.shape)

    return norm


def layer_norm(x, shape, weight=None, bias=None, eps=1e-5):
    return rows(vt.layer_norm)(x, shape, weight, bias, eps=eps)


def rms_norm(x, shape, weight=None, eps=None):
    return rows(vt.rms_norm)(x, shape, weight, eps=eps)


def attention(q, k, v, attn_mask=None, is_causal=False, scale=None, dropout_p=0.0, enable_gqa=False):
    extra = {} if attn_mask is None else {"mask" if attn_mask.dtype == torch.bool else "bias": attn_mask}
    return vt.flash_attention(q, k, v, causal=is_causal, scale=scale, dropout_rate=dropout_p, **extra)


# Of each function: ours, and what our errors say of the samples that we decline.
FUNCTIONS = {
    "nn.functional.layer_norm": (layer_norm, "zero or more"),
    "nn.functional.rms_norm": (rms_norm, "zero or more"),
    "softmax": (lambda x, dim, dtype=None: vt.softmax(x if dtype is None else x.to(dtype), axis=dim), OF_ROWS),
    "log_softmax": (lambda x, dim, dtype=None: vt.log_softmax(x if dtype is None else x.to(dtype), axis=dim), OF_ROWS),
    "nn.functional.gelu": (lambda x, approximate="none": vt.gelu(x, approximate=approximate == "tanh"), None),
    "nn.functional.silu": (lambda x, inplace=False: vt.silu(x), None),
    "mm": (vt.gemm, None),
    "bmm": (vt.gemm, None),
    "matmul": (vt.gemm, "a vector as one row"),
    "einsum": (lambda operands, equation: vt.einsum(equation, *operands), None),
    "nn.functional.linear": (lambda x, w, b=None: vt.gemm(x, w, bias=b, transpose_b=True), "a vector as one row"),
    "nn.functional.scaled_dot_product_attention": (attention, r"of shape \(batch, heads, q_len, qk_dim\)"),
}
INFOS = [
    pytest.param(info, id=f"{info.name} {info.variant_test_name}".strip())
    for info in op_db
    if info.name in FUNCTIONS and info.variant_test_name not in ("complex", "triton_optimized")
]


def samples(info, dtype):
    """The samples whose result does not depend on a draw."""
    found = [s for s in info.sample_inputs("cpu", dtype, requires_grad=True) if not s.kwargs.get("dropout_p")]
    assert found
    return found


def declined(function, sample, declines):
    """Whether we decline a sample with the error that is expected; another one is raised."""
    try:
        function(sample.input, *sample.args, **sample.kwargs)
    except VishwamaiError as error:
        if declines is None or not re.search(declines, str(error)):
            raise
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("info", INFOS)
def test_values_are_torchs(info, dtype):
    function, declines = FUNCTIONS[info.name]
    compared = 0
    for sample in samples(info, dtype):
        if declined(function, sample, declines):
            continue
        wide = sample.transform(lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x)
        true = info.op(wide.input, *wide.args, **wide.kwargs)
        theirs = info.op(sample.input, *sample.args, **sample.kwargs)
        ours = function(sample.input, *sample.args, **sample.kwargs)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), sample
        error, allowed = (ours - true).abs(), 2 * (theirs - true).abs().max() if true.numel() else 0.0
        scale = true.abs().max() if true.numel() else 0.0
        assert (error <= allowed + 4 * torch.finfo(dtype).eps * scale).all(), sample
        compared += 1
    assert compared


@pytest.mark.long
@pytest.mark.parametrize("info", INFOS)
def test_gradients_are_those_of_differences(info):
    function, declines = FUNCTIONS[info.name]
    checked = 0
    for sample in samples(info, torch.float64)[:8]:
        if declined(function, sample, declines):
            continue
        operands = sample.input if isinstance(sample.input, (tuple, list)) else [sample.input]
        leaves = [x for x in (*operands, *sample.args, *sample.kwargs.values()) if requires_gradient(x)]
        if not leaves or not all(x.numel() for x in leaves):
            continue

        def run(*_, sample=sample):
            return function(sample.input, *sample.args, **sample.kwargs)

        assert torch.autograd.gradcheck(run, leaves, fast_mode=True), sample
        checked += 1
    assert checked


def requires_gradient(x):
    return isinstance(x, torch.Tensor) and x.requires_grad
