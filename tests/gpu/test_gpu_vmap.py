"""`torch.vmap` of the custom operators: what a loop over the elements gives, forward and in batched gradients, in one
call where the axis can be folded.
"""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning"),
    pytest.mark.skipif(contract.INTERPRETED, reason="the rules are the same"),
]
SEED = torch.tensor([5, -7])


def turned(layout):
    return lambda q, k: vt.apply_rope((q, k), torch.arange(3) * 7, layout=layout)


def with_tables(q, cos, sin):
    return (vt.apply_rope(q, tables=(cos, sin)),)


def product(a, b, bias, scale):
    return (vt.gemm(a, b, bias=bias, scale_a=scale, activation="silu"),)


def attended(q, k, v, *extras):
    ids = torch.arange(5).expand(2, 5) // 3
    seed = torch.arange(2 * 4 * 2).reshape(2, 4, 2) * 77
    names = ("bias", "sinks")[: len(extras)]
    options: Any = {"segment_ids": (ids, ids), "dropout_rate": 0.3, "dropout_seed": seed, "return_lse": True}
    return vt.flash_attention(q, k, v, causal=True, **dict(zip(names, extras, strict=True)), **options)


def sloped(q, k, v):
    slopes = torch.tensor([[0.5, 0.25, 0.1, 0.0], [0.1, 0.2, 0.3, 0.4]])
    return vt.flash_attention(q, k, v, window=(3, 2), alibi_slopes=slopes, return_lse=True)


HEADS = (2, 4, 5, 8), (2, 2, 5, 8), (2, 2, 5, 8)

# name: (function, the elements' shapes, mapped dimensions, calls of a kernel; None: as many as elements)
CASES: dict[str, tuple[Any, Any, Any, int | None]] = {
    "norm": (lambda x, s: (vt.rms_norm(x, s),), ((4, 8), (8,)), (1, None), 1),
    "norm residual": (lambda x, r: vt.layer_norm(x, residual=r), ((4, 8), (4, 8)), (0, None), 1),
    "norm of many scales": (lambda x, s: (vt.rms_norm(x, s),), ((4, 8), (8,)), (0, 1), None),
    "softmax": (lambda x: (vt.softmax(x, axis=0), vt.log_softmax(x)), ((4, 8),), (2,), 2),
    "gelu of numbers": (lambda x: (vt.fused_gelu_dropout(x, deterministic=True),), ((),), (0,), 1),
    "dropout": (lambda x: (vt.fused_gelu_dropout(x, 0.5, seed=SEED),), ((4, 8),), (1,), 1),
    "dropout of numbers": (lambda x: (vt.fused_gelu_dropout(x, 0.5, seed=SEED),), ((),), (0,), 1),
    "rope": (turned("bhsd"), ((2, 4, 3, 8), (2, 2, 3, 8)), (0, 2), 1),
    "rope of one key": (turned("bshd"), ((2, 3, 4, 8), (2, 3, 2, 8)), (4, None), 1),
    "rope tables": (with_tables, ((1, 2, 3, 8), (1, 3, 4), (1, 3, 4)), (None, 0, 0), 1),
    "attention": (attended, HEADS, (1, None, 4), 1),
    "attention bias": (attended, (*HEADS, (4, 5, 5)), (0, 0, 0, 1), 1),
    "attention slopes": (sloped, HEADS, (0, None, 0), 1),
    "attention sinks": (attended, (*HEADS, (5, 5), (4,)), (0, None, None, None, 0), None),
    "gemm": (product, ((5, 6), (6, 8), (8,), (5,)), (0, None, None, None), 1),
    "gemm batches": (product, ((5, 6), (2, 6, 8), (8,), ()), (1, None, 1, 0), 1),
    "gemm of many vectors": (product, ((5, 6), (6, 8), (8,), (5,)), (None, None, 0, 1), 1),
    "gemm of many weights": (product, ((2, 5, 6), (6, 8), (2, 8), (2, 1)), (None, 2, None, None), 1),
}


DEFAULT = {"norm", "gemm batches", "attention"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.long) for n in CASES])
def test_mapped_calls(name, monkeypatch):
    """Values, the number of calls, and gradients, those of several cotangents at once among them."""
    function, shapes, dims, calls = CASES[name]
    generator = torch.Generator().manual_seed(0)
    size = 3
    args = []
    for shape, d in zip(shapes, dims, strict=True):
        shape = shape if d is None else (*shape[:d], size, *shape[d:])
        args.append(torch.rand(shape, generator=generator).add(0.5).requires_grad_("tables" not in name or d is None))
    elements = [
        function(*(x if d is None else x.select(d, i) for x, d in zip(args, dims, strict=True))) for i in range(size)
    ]
    wanted = [torch.stack(ys) for ys in zip(*elements, strict=True)]
    seen = []
    forward = bridge.forward
    monkeypatch.setattr(bridge, "forward", lambda *a, **k: seen.append(a) or forward(*a, **k))
    got = torch.vmap(function, in_dims=dims)(*args)
    assert len(seen) == (calls or size)
    leaves = [x for x in args if x.requires_grad]
    cotangents = [torch.randn((2, *y.shape), generator=generator) for y in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    batched = torch.autograd.grad(got, leaves, cotangents, is_grads_batched=True)
    for i in range(2):
        one = torch.autograd.grad(wanted, leaves, [c[i] for c in cotangents], retain_graph=True)
        for ours, theirs in zip(batched, one, strict=True):
            torch.testing.assert_close(ours[i], theirs, rtol=1e-4, atol=1e-4)
