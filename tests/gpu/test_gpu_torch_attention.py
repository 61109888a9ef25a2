"""Attention of torch tensors, dense and packed: values and gradients against float64, opcheck, torch.compile, strides,
what is visited, errors.

Run as they are, the tensors on the CPU are served by the native kernels; under TRITON_INTERPRET=1 (`make test-gpu`) by
the Triton kernels, interpreted.
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import contract  # noqa: E402
import rotation  # noqa: E402
import vishwamai.torch as vt  # noqa: E402
from triton_kernels import triton_serves  # noqa: E402
from vishwamai import kernels  # noqa: E402
from vishwamai.core.config import current_config, kernel_config  # noqa: E402
from vishwamai.core.errors import KernelError, ShapeError, UnsupportedError  # noqa: E402
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig  # noqa: E402
from vishwamai.torch import bridge  # noqa: E402

pytestmark = [pytest.mark.interpreter, pytest.mark.filterwarnings("ignore::vishwamai.core.errors.FallbackWarning")]

long = pytest.mark.long


@pytest.fixture(autouse=True)
def here():
    with triton_serves() if contract.TRITON else contextlib.nullcontext():
        yield


def oracle(
    q,
    k,
    v,
    bias=None,
    mask=None,
    *,
    causal=False,
    causal_align="top_left",
    window=None,
    segment_ids=None,
    softcap=None,
    bias_after_softcap=False,
    sinks=None,
    alibi_slopes=None,
    scale=None,
    kept=None,
    rate=0.0,
    layout="bhsd",
):
    """(out, logsumexp) in float64, by the definition."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    bias = 0 if bias is None else bias.double()
    s = (q @ k.mT) * (scale or q.shape[-1] ** -0.5) + (0 if bias_after_softcap else bias)
    s = (s if softcap is None else softcap * torch.tanh(s / softcap)) + (bias if bias_after_softcap else 0)
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    if causal_align == "bottom_right":
        i = i + k.shape[2] - q.shape[2]
    if alibi_slopes is not None:
        s = s - alibi_slopes.double().reshape(-1, s.shape[1], 1, 1) * (i - j).abs()
    left, right = window or (None, None)
    seen = torch.ones(s.shape, dtype=torch.bool)
    seen &= torch.tensor(True) if not causal else j <= i
    seen &= torch.tensor(True) if left is None else j >= i - left
    seen &= torch.tensor(True) if right is None else j <= i + right
    seen &= torch.tensor(True) if mask is None else mask
    if segment_ids is not None:
        seen &= (segment_ids[0][:, :, None] == segment_ids[1][:, None, :])[:, None]
    s = s.masked_fill(~seen, -math.inf)
    others = [] if sinks is None else [sinks.double()[None, :, None, None].expand(*s.shape[:3], 1)]
    logsumexp = torch.logsumexp(torch.cat([s, *others], -1), -1)
    p = torch.where(seen, torch.exp(s - torch.where(logsumexp == -math.inf, 0.0, logsumexp)[..., None]), 0.0)
    out = (p if kept is None else torch.where(kept, p / (1 - rate), 0.0)) @ v
    return out.transpose(1, 2) if layout == "bshd" else out, logsumexp


def tensors(*shapes, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def agree(function, reference, leaves, tolerance=2e-5):
    """(out, logsumexp) of both functions of the leaves, and the leaves' gradients, to `tolerance` of the largest
    gradient.
    """
    outputs, expected = function(*leaves), reference(*leaves)
    weights = []
    for got, want in zip(outputs, expected, strict=True):
        alive = want.detach() > -math.inf
        assert got.shape == want.shape and torch.equal(got.detach() > -math.inf, alive)
        assert (got - want)[alive].abs().max() <= tolerance * want[alive].abs().max()
        weights.append(torch.randn(got.shape, generator=torch.Generator().manual_seed(7)) * alive)
    ours = torch.autograd.grad(outputs, leaves, [w.to(y.dtype) for w, y in zip(weights, outputs, strict=True)])
    theirs = torch.autograd.grad(expected, leaves, [w.double() for w in weights])
    largest = max(g.abs().max() for g in theirs)
    for got, want, leaf in zip(ours, theirs, leaves, strict=True):
        assert got.dtype == leaf.dtype and got.shape == leaf.shape
        assert (got - want).abs().max() <= tolerance * largest
    return outputs


def kept(seed, rows, columns, rate):
    """Which positions dropout keeps, as JAX's arithmetic says."""
    from vishwamai.core import dropout

    bits: Any = np.asarray(seed.to(torch.int64).numpy() % 2**32, np.uint32)[..., None, None]
    i: Any = np.arange(rows)[:, None]
    j: Any = np.arange(columns)[None]
    return torch.from_numpy(np.array(dropout.keep_mask(bits[:, :, 0], bits[:, :, 1], i, j, rate)))


def parts_of_one(packed, heads, kv_heads):
    """Query, key and value as views of one projection's result, `[batch, seq, heads, dim]`."""
    return packed.split([heads, kv_heads, kv_heads], 2)


@pytest.mark.parametrize("layout", ["bhsd", pytest.param("bshd", marks=long if contract.TRITON else ())])
def test_views_of_one_tensor(layout):
    """Any strides, grouped heads, and both outputs' gradients; nothing is copied on the way to a kernel for GPUs."""
    (packed,) = tensors((2, 19, 8, 16))

    def call(function):
        def run(packed):
            arrays = parts_of_one(packed, 4, 2)
            if layout == "bhsd":
                arrays = tuple(x.transpose(1, 2) for x in arrays)
            return function(*arrays, causal=True, window=(9, None), layout=layout)

        return run

    out, _ = agree(call(lambda *a, **o: vt.flash_attention(*a, return_lse=True, **o)), call(oracle), (packed,))
    assert out.is_contiguous()


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_the_backward_pass_reads_the_configuration_of_the_call(packed, monkeypatch):
    """Autograd runs it later, where another configuration is in force."""
    seen, choose = [], bridge.choose

    def record(*args, **kwargs):
        seen.append(current_config().auto_optimize)
        return choose(*args, **kwargs)

    monkeypatch.setattr(bridge, "choose", record)
    x = torch.randn(1, 16, 2, 16, requires_grad=True)
    starts = torch.tensor([0, 16])
    with kernel_config(auto_optimize=False):
        if packed:
            out = vt.flash_attention_varlen(x[0], x[0], x[0], starts, starts, 16, 16)
        else:
            out = vt.flash_attention(x, x, x, layout="bshd")
    out.sum().backward()
    assert seen == [False, False]


def test_nothing_is_copied(monkeypatch):
    from vishwamai.core import gpu
    from vishwamai.torch import launch

    if not contract.TRITON:
        pytest.skip("the way to the kernels for GPUs")
    seen = []
    before: Any = gpu.launcher("torch")

    def record(how, inputs, outputs):
        seen.append({name: x.data_ptr() for name, x in inputs.items()})
        return before(how, inputs, outputs)

    (packed,) = tensors((1, 16, 6, 16))
    monkeypatch.setitem(gpu._LAUNCHERS, "torch", record)
    assert before is not launch.launch
    q, k, v = parts_of_one(packed, 2, 2)
    vt.flash_attention(q, k, v, layout="bshd").backward(torch.ones_like(q))
    forward, _, keys, queries = seen
    for call in (forward, keys, queries):
        assert (call["query.ptr"], call["key.ptr"], call["value.ptr"]) == (q.data_ptr(), k.data_ptr(), v.data_ptr())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=long)], ids=str)
def test_everything(dtype):
    """Bias with its gradient, mask, segments, window, soft-cap, sinks, dropout, more keys than queries, heads that
    share keys.
    """
    q, k, v, bias, sinks = tensors((2, 4, 18, 16), (2, 2, 25, 16), (2, 2, 25, 8), (1, 4, 18, 25), (4,), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand((2, 1, 1, 25), generator=generator) < 0.8
    ids = tuple((torch.arange(n) > n // 2).long().expand(2, n) for n in (18, 25))
    seed = torch.randint(-(2**31), 2**31, (2, 4, 2), generator=generator)
    options: dict[str, Any] = dict(
        causal=True, causal_align="bottom_right", window=(14, 3), softcap=4.0, scale=0.3, segment_ids=ids
    )
    agree(
        lambda q, k, v, bias, sinks: vt.flash_attention(
            q, k, v, bias, mask, sinks=sinks, dropout_rate=0.25, dropout_seed=seed, return_lse=True, **options
        ),
        lambda q, k, v, bias, sinks: oracle(
            q, k, v, bias, mask, sinks=sinks, kept=kept(seed, 18, 25, 0.25), rate=0.25, **options
        ),
        (q, k, v, bias, sinks),
        2e-5 if dtype == torch.float32 else 2e-2,
    )


def test_a_bias_after_the_soft_cap():
    q, k, v, bias = tensors((2, 4, 18, 16), (2, 2, 25, 16), (2, 2, 25, 8), (1, 4, 18, 25))
    options: dict[str, Any] = dict(softcap=1.5, bias_after_softcap=True, causal=True, causal_align="bottom_right")
    agree(
        lambda *a: vt.flash_attention(*a, return_lse=True, **options), lambda *a: oracle(*a, **options), (q, k, v, bias)
    )


SLOPES = torch.tensor([0.5, 0.25, 0.0625, 0.01])


@pytest.mark.parametrize("layout", ["bhsd", pytest.param("bshd", marks=long if contract.TRITON else ())])
def test_slopes_of_alibi(layout):
    """By head and by batch element, two-sided and causal, with a soft-cap, more keys than queries."""
    q, k, v = tensors((2, 4, 18, 16), (2, 2, 25, 16), (2, 2, 25, 8))
    two_sided = dict(alibi_slopes=torch.stack([SLOPES, SLOPES.flip(0)]), softcap=4.0, window=(9, 5))
    causal = dict(alibi_slopes=SLOPES, causal=True, causal_align="bottom_right")
    for options in (two_sided, causal):
        options: dict[str, Any]

        def call(function, options=options):
            def run(*arrays):
                if layout == "bshd":
                    arrays = tuple(x.transpose(1, 2) for x in arrays)
                return function(*arrays, layout=layout, **options)

            return run

        agree(call(lambda *a, **o: vt.flash_attention(*a, return_lse=True, **o)), call(oracle), (q, k, v))


def test_slopes_of_alibi_and_a_block_mask():
    q, k, v = tensors((1, 4, 40, 16), (1, 4, 40, 16), (1, 4, 40, 16))
    blocks = np.array([[True, False, False], [True, True, False], [False, True, True]])
    mask = torch.from_numpy(blocks.repeat(16, 0).repeat(16, 1)[:40, :40])
    agree(
        lambda *a: vt.block_sparse_attention(
            *a, block_mask=blocks, block_size=16, alibi_slopes=SLOPES, return_lse=True
        ),
        lambda *a: oracle(*a, mask=mask, alibi_slopes=SLOPES),
        (q, k, v),
    )


def test_a_bias_that_needs_no_gradient_and_an_expanded_mask():
    q, k, v = tensors((2, 2, 9, 16), (2, 2, 12, 16), (2, 2, 12, 16))
    bias, mask = torch.randn(9, 12), (torch.rand(2, 1, 1, 12) < 0.7).expand(2, 2, 9, 12)
    agree(
        lambda q, k, v: vt.flash_attention(q, k, v, bias, mask, return_lse=True),
        lambda q, k, v: oracle(q, k, v, bias, mask),
        (q, k, v),
    )


def test_dropout_draws_from_torch():
    q, k, v = tensors((1, 2, 12, 16), (1, 2, 12, 16), (1, 2, 12, 16))
    torch.manual_seed(0)
    first, second = (vt.flash_attention(q, k, v, dropout_rate=0.5) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(first, vt.flash_attention(q, k, v, dropout_rate=0.5)) and not torch.equal(first, second)


def dense_arguments():
    q, k, v, bias, sinks = tensors((1, 2, 5, 8), (1, 1, 6, 8), (1, 1, 6, 8), (2, 5, 6), (2,))
    slopes = torch.tensor([0.5, 0.25])
    seed = torch.tensor([[[1, -2], [3, 4]]], dtype=torch.int32)
    common = (softcap, bias_after_softcap, scale, q_offset) = (None, False, None, None)
    del softcap, bias_after_softcap, scale, q_offset
    plain = (q.detach(), k.detach(), v.detach(), *[None] * 8)
    return [
        (
            q,
            k,
            v,
            bias,
            None,
            None,
            None,
            sinks,
            seed,
            None,
            slopes,
            True,
            True,
            3,
            None,
            *common,
            0.5,
            None,
            "default",
            None,
            None,
            None,
            [],
        ),
        (
            *(x.transpose(1, 2) for x in plain[:3]),
            *plain[3:],
            False,
            False,
            None,
            None,
            5.0,
            False,
            0.1,
            1,
            0.0,
            "bshd",
            "default",
            None,
            None,
            None,
            [],
        ),
    ]


PLACES = {
    "an int": dict(q_offset=3, causal=True),
    "a first row each": dict(q_offset=torch.tensor([2, 4]), window=(2, 1), kv_starts=torch.tensor([2, 3])),
    "every row": dict(q_offset=torch.tensor([[4, 0, 1, 7, 3]]), causal=True, kv_lens=torch.tensor([9, 6])),
    "padding": dict(kv_lens=torch.tensor(8), kv_starts=torch.tensor([2, 9]), layout="bshd"),
    "padding of segments": dict(kv_lens=torch.tensor([0, 7]), segment_ids=(torch.arange(5) // 2, torch.arange(9) // 4)),
}


def placed(name):
    """The options of a case of `PLACES`, and query, key and value."""
    options = dict(PLACES[name])
    swap = options.get("layout") == "bshd"
    shapes = ((2, 5, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)) if swap else ((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    if "segment_ids" in options:
        options["segment_ids"] = tuple(x.expand(2, -1) for x in options["segment_ids"])
    return options, tensors(*shapes)


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", PLACES)
def test_places(name):
    """Against a mask of the same; what is outside of the lengths may be NaN; eager, in one graph, and mapped."""
    options, leaves = placed(name)
    offset, columns = torch.as_tensor(options.get("q_offset", 0)), torch.arange(9)
    stands = (offset if offset.dim() == 2 else offset.reshape(-1, 1) + torch.arange(5))[..., None]
    lens, starts = (torch.as_tensor(options.get(n, d)).reshape(-1, 1, 1) for n, d in (("kv_lens", 9), ("kv_starts", 0)))
    left, right = options.get("window", (99, 0 if options.get("causal") else 99))
    seen = (columns >= stands - left) & (columns <= stands + right) & (columns < lens) & (columns >= starts)
    rest = {n: x for n, x in options.items() if n in ("segment_ids", "layout")}
    ours = functools.partial(vt.flash_attention, **options, return_lse=True)
    agree(ours, lambda q, k, v: oracle(q, k, v, mask=seen[:, None], **rest), leaves)
    if not contract.TRITON:
        fast = torch.compile(ours, fullgraph=True, backend="aot_eager")
        for got, want in zip(fast(*leaves), ours(*leaves), strict=True):
            assert torch.equal(got, want)
        mapped = torch.vmap(lambda q: ours(q, *leaves[1:])[0])(torch.stack([leaves[0], 2 * leaves[0]]))
        torch.testing.assert_close(mapped[1], ours(2 * leaves[0], *leaves[1:])[0])
        wide = [x.detach().double().requires_grad_() for x in leaves]
        assert torch.autograd.gradcheck(lambda *x: ours(*x)[0], wide, fast_mode=True)


@pytest.mark.parametrize("name", ["a first row each", "every row", "padding", "padding of segments"])
def test_places_among_blocks(name):
    """With blocks left out, next to a mask of the same."""
    options, leaves = placed(name)
    kept = np.array([[True, False, True], [True, True, False]])
    dense = torch.from_numpy(np.kron(kept, np.ones((3, 3), bool))[:5, :9])
    ours = functools.partial(vt.block_sparse_attention, block_mask=kept, block_size=3, **options, return_lse=True)
    if contract.TRITON and "q_offset" in options:
        with pytest.raises(UnsupportedError, match="rows have positions of their own .* next to a block mask"):
            ours(*leaves)
        return
    agree(ours, lambda q, k, v: vt.flash_attention(q, k, v, mask=dense, **options, return_lse=True), leaves)


def test_errors_of_places():
    q, k = torch.ones(2, 1, 3, 8), torch.ones(2, 1, 5, 8)
    attend = functools.partial(vt.flash_attention, q, k, k)
    wrong = {
        r"`q_offset` has shape \(3,\), but there are 2 batch": dict(q_offset=torch.zeros(3, dtype=torch.int64)),
        "`q_offset` has dtype float32; pass integers": dict(q_offset=torch.zeros(())),
        "`q_offset` is 1073741824; pass a position": dict(q_offset=1 << 30),
        "`q_offset` holds 2147483648": dict(q_offset=torch.tensor(1 << 31)),
        "`causal_align` is 'bottom_right', but `q_offset`": dict(q_offset=1, causal=True, causal_align="bottom_right"),
        "`kv_lens` holds 6; pass values from 0 to 5": dict(kv_lens=torch.tensor([1, 6])),
        r"`kv_starts` has shape \(2, 1\)": dict(kv_starts=torch.ones(2, 1, dtype=torch.int32)),
    }
    for text, options in wrong.items():
        if "holds" in text and bridge.platform_of(q) != "cpu":
            continue
        with pytest.raises(ShapeError, match=text):
            attend(**options)


@pytest.mark.skipif(contract.TRITON, reason="the same operator")
@pytest.mark.parametrize("arguments", dense_arguments(), ids=["gradients", "bshd"])
def test_opcheck(arguments):
    assert set(torch.library.opcheck(torch.ops.vishwamai.attention.default, arguments).values()) == {"SUCCESS"}


@pytest.mark.skipif(contract.TRITON, reason="the same graph")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=long)])
def test_compiles_in_one_graph(dynamic):
    def model(q, k, v):
        out, logsumexp = vt.flash_attention(q * 2, k, v, causal=True, window=(5, 0), layout="bshd", return_lse=True)
        return out.sin(), logsumexp

    args = tensors((1, 12, 2, 16), (1, 12, 1, 16), (1, 12, 1, 16))
    fast = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, want in zip(fast(*args), model(*args), strict=True):
        assert torch.allclose(got, want, atol=1e-6)
    total = sum(y.sum() for y in fast(*args))
    expected = torch.autograd.grad(sum(y.sum() for y in model(*args)), args)
    for got, want in zip(torch.autograd.grad(total, args), expected, strict=True):
        assert torch.allclose(got, want, atol=1e-5)


def test_tiles_of_the_callers_own():
    """A config reaches the kernels for GPUs, forward and backward; the backward pass that adds in any order has the
    same gradients, in the same memory order.
    """
    q, k, v = tensors((1, 20, 2, 16), (1, 20, 2, 16), (1, 20, 2, 16))
    config = AttentionGpuConfig(16, 16, 4, 1, 16, 16, 4, 1, deterministic=False)
    agree(
        lambda q, k, v: vt.flash_attention(q, k, v, causal=True, layout="bshd", return_lse=True, config=config),
        lambda q, k, v: oracle(q, k, v, causal=True, layout="bshd"),
        (q, k, v),
    )


Q_STARTS, KV_STARTS = torch.tensor([0, 5, 5, 23, 24]), torch.tensor([0, 7, 12, 28, 28])
"""One sequence without queries, one without keys."""


def by_sequence(q, k, v, **options):
    """`oracle` of each sequence; zeros behind the last."""
    outs, lses = [], []
    for n in range(4):
        rows, columns = slice(*Q_STARTS[n : n + 2]), slice(*KV_STARTS[n : n + 2])
        arrays = (x[at].transpose(0, 1)[None] for x, at in ((q, rows), (k, columns), (v, columns)))
        out, lse = oracle(*arrays, **{name: of(n) if callable(of) else of for name, of in options.items()})
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    behind = len(q) - Q_STARTS[-1]
    outs.append(torch.zeros(behind, *outs[0].shape[1:], dtype=torch.float64))
    return torch.cat(outs), torch.cat([*lses, torch.full((q.shape[1], behind), -math.inf)], 1)


def packed_tensors(dtype=torch.float32):
    """Grouped heads; what lies behind the last sequence is NaN."""
    q, k, v = tensors((27, 4, 16), (30, 2, 16), (30, 2, 16), dtype=dtype)
    with torch.no_grad():
        for x, starts in ((q, Q_STARTS), (k, KV_STARTS), (v, KV_STARTS)):
            x[starts[-1] :] = math.nan
    return q, k, v


def nan_is_0(reference):
    """The oracle's gradient of what lies behind: torch gives none, as nothing reads it."""

    def run(*leaves):
        return reference(*(torch.where(x.isnan(), 0.0, x) for x in leaves))

    return run


VARLEN: dict[str, dict[str, Any]] = {
    "causal": dict(causal=True),
    "window": dict(window=(3, 2), softcap=5.0),
    "top left": dict(causal=True, causal_align="top_left", scale=0.3),
}


@pytest.mark.parametrize("name", ["causal", *(pytest.param(n, marks=long) for n in ("window", "top left"))])
def test_packed_sequences(name):
    options = {"causal_align": "bottom_right", **VARLEN[name]}
    agree(
        lambda q, k, v: vt.flash_attention_varlen(
            q, k, v, Q_STARTS, KV_STARTS.int(), 18, 16, return_lse=True, **VARLEN[name]
        ),
        nan_is_0(lambda q, k, v: by_sequence(q, k, v, **options)),
        packed_tensors(),
    )


@pytest.mark.parametrize("align", ["bottom_right", pytest.param("top_left", marks=long)])
def test_packed_sequences_with_slopes_of_alibi(align):
    options: dict[str, Any] = dict(causal=align == "bottom_right", causal_align=align, alibi_slopes=SLOPES)
    agree(
        lambda q, k, v: vt.flash_attention_varlen(q, k, v, Q_STARTS, KV_STARTS, 18, 16, return_lse=True, **options),
        nan_is_0(lambda q, k, v: by_sequence(q, k, v, **options)),
        packed_tensors(),
    )


@pytest.mark.long
def test_packed_sequences_with_sinks_and_dropout():
    sinks = torch.randn(4, requires_grad=True)
    seed = torch.randint(-(2**31), 2**31, (4, 4, 2))
    lengths = list(zip(Q_STARTS.diff().tolist(), KV_STARTS.diff().tolist(), strict=True))
    agree(
        lambda q, k, v, sinks: vt.flash_attention_varlen(
            q, k, v, Q_STARTS, KV_STARTS, 18, 16, sinks=sinks, dropout_rate=0.3, dropout_seed=seed, return_lse=True
        ),
        nan_is_0(
            lambda q, k, v, sinks: by_sequence(
                q, k, v, sinks=sinks, rate=0.3, kept=lambda n: kept(seed[n : n + 1], lengths[n][0], lengths[n][1], 0.3)
            )
        ),
        (*packed_tensors(), sinks),
    )


@pytest.mark.skipif(contract.TRITON, reason="the same graph")
def test_packed_sequences_opcheck_and_compile():
    q, k, v = tensors((8, 2, 8), (9, 1, 8), (9, 1, 8))
    starts, ends = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 9])
    sinks = torch.zeros(2, requires_grad=True)
    options = (5, 5, True, True, None, None, None, False, None, None, 0.0, None, "default", None, None, None, [])
    slopes = torch.tensor([0.5, 0.25])
    arguments = (q, k, v, sinks, None, slopes, starts, ends, *options)
    assert set(torch.library.opcheck(torch.ops.vishwamai.attention_varlen.default, arguments).values()) == {"SUCCESS"}
    fast = torch.compile(vt.flash_attention_varlen, fullgraph=True, backend="aot_eager")
    want = vt.flash_attention_varlen(q, k, v, starts, ends, 5, 5, causal=True)
    assert torch.equal(fast(q, k, v, starts, ends, 5, 5, causal=True), want)


@pytest.mark.skipif(not contract.TRITON, reason="the CPU asks and raises")
def test_a_sequence_longer_than_the_longest_shows():
    q = torch.randn(40, 1, 16)
    starts = torch.tensor([0, 40])
    out = vt.flash_attention_varlen(q, q, q, starts, starts, 16, 16)
    assert out[:16].isfinite().all() and out[16:].isnan().all()


@pytest.mark.skipif(not contract.INTERPRETED, reason="counts the products of the interpreted kernels")
def test_blocks_of_other_sequences_are_not_visited(monkeypatch):
    """Four sequences of two blocks each: 16 of 64 blocks are multiplied, forward and backward, packed or told apart by
    segment ids.
    """
    config = AttentionGpuConfig(16, 16, 4, 1, 16, 16, 4, 1)
    q = torch.randn(1, 1, 128, 16, requires_grad=True)
    ids = torch.arange(128)[None] // 32
    starts = torch.arange(0, 129, 32)
    import triton_inside

    triton_inside.correct()
    builder = triton_inside.interpreter_builder
    products, dot = [], builder.create_dot
    monkeypatch.setattr(builder, "create_dot", lambda *a, **k: products.append(1) or dot(*a, **k))

    def count(run):
        products.clear()
        out = run()
        forward = len(products)
        products.clear()
        out.sum().backward()
        return out.detach(), (forward, len(products))

    together, segments = count(lambda: vt.flash_attention(q, q, q, segment_ids=(ids, ids), config=config))
    x = q[0].transpose(0, 1)
    apart, varlen = count(lambda: vt.flash_attention_varlen(x, x, x, starts, starts, 32, 32, config=config))
    assert segments == varlen == (2 * 16, (4 + 3) * 16)
    assert torch.allclose(together[0, 0], apart[:, 0], atol=1e-5)


def recorded(run):
    """The launches that a function of torch tensors makes, none of which happens."""
    from vishwamai.aot.compile.gpu import RecordedLaunch
    from vishwamai.core import gpu
    from vishwamai.core.triton_launch import POINTERS
    from vishwamai.torch.launch import allocate

    found = []

    def record(how, inputs, outputs):
        named = {name: str(x.dtype).removeprefix("torch.") for name, x in {**inputs, **outputs}.items()}
        found.append(RecordedLaunch(how, tuple((name, POINTERS[dtype]) for name, dtype in named.items())))
        return list(allocate(outputs, torch.device("cpu")).values())

    before: Any = gpu.register_launcher("torch", record)
    try:
        run()
    finally:
        gpu.register_launcher("torch", before)
    return found


@pytest.mark.parametrize("slopes", rotation.in_turn(2, [None, 0.25 * torch.ones(8)]))
@pytest.mark.skipif(contract.INTERPRETED, reason="a process with the interpreter cannot compile")
def test_code_of_packed_sequences(slopes):
    """For Hopper: tensor cores, the copy engine, nothing spilled."""
    pytest.importorskip("triton")
    from vishwamai.aot.compile.gpu import inspect_launch

    q, k = (torch.zeros(4096, heads, 64, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 2))
    starts = torch.tensor([0, 1000, 4096])
    launches = recorded(
        lambda: (
            vt.flash_attention_varlen(q, k, k, starts, starts, 3096, 3096, causal=True, alibi_slopes=slopes)
            .sum()
            .backward()
        )
    )
    kernels = [launch.launch.kernel.name for launch in launches]
    assert kernels == ["forward", "delta", "key_gradients", "query_gradients"]
    for launch, name in zip(launches, kernels, strict=True):
        code = inspect_launch(launch)
        assert code.spill == 0, code
        assert name == "delta" or (code.wgmma and code.tma), code


def test_the_face_takes_tensors():
    q, k, v = tensors((1, 2, 9, 16), (1, 2, 9, 16), (1, 2, 9, 16))
    mask = torch.rand(9, 9) < 0.8
    want = vt.flash_attention(q, k, v, None, mask, causal=True)
    assert torch.equal(kernels.gpu.flash_attention(q, k, v, mask, causal=True), want)
    attend = kernels.gpu_kernel(lambda q: kernels.gpu.flash_attention(q, k, v, mask, block_size=16, causal=True))
    assert torch.allclose(attend(q), want, atol=1e-6)

    def plain():
        return kernels.gpu.flash_attention(q, k, v, mask, use_flash=False, causal=True)

    if contract.TRITON:
        with pytest.raises(UnsupportedError, match="'xla' is JAX code, and the arrays are torch's on cuda"):
            plain()
    else:
        assert torch.allclose(plain(), want, atol=1e-6)


def test_errors():
    q, k, v = tensors((1, 4, 9, 16), (1, 3, 9, 16), (1, 3, 9, 16))
    with pytest.raises(ShapeError, match="`key` of shape .1, heads, kv_len, 16. where heads divides 4"):
        vt.flash_attention(q, k, v)
    with pytest.raises(ShapeError, match="pass `query` of shape .batch, heads, q_len"):
        vt.flash_attention(q[0], k, v)
    declined: tuple[tuple[dict[str, Any], str], ...] = (
        (dict(causal_align="left"), "`causal_align` is 'left'"),
        (dict(window=(1, -2)), "its right side is -2"),
        (dict(dropout_rate=1.5), "`dropout_rate` is 1.5"),
        (dict(dropout_rate=0.5, dropout_seed=torch.zeros(2, dtype=torch.int64)), r"`dropout_seed` has shape \(2,\)"),
        (dict(segment_ids=q), "`segment_ids` is Tensor; pass a pair"),
        (dict(softcap=-1.0), "`softcap` is -1.0"),
    )
    for options, message in declined:
        with pytest.raises(ShapeError, match=message):
            vt.flash_attention(q, q, q, **options)
    with pytest.raises(KernelError, match="`config` is a str"):
        vt.flash_attention(q, q, q, config="fast")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="there is no implementation 'cudnn'"):
        vt.flash_attention(q, q, q, implementation="cudnn")
    with pytest.raises(ShapeError, match=r"`alibi_slopes` has shape \(3,\)"):
        vt.flash_attention(q, q, q, alibi_slopes=torch.ones(3))
    with pytest.raises(ShapeError, match="`alibi_slopes` has dtype int64"):
        vt.flash_attention(q, q, q, alibi_slopes=torch.ones(4, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="`alibi_slopes` has no gradient, but requires one; pass `alibi"):
        vt.flash_attention(q, q, q, alibi_slopes=torch.ones(4, requires_grad=True))
    x, starts = torch.ones(9, 2, 16), torch.tensor([0, 4, 9])
    with pytest.raises(ShapeError, match=r"`alibi_slopes` has shape \(2, 2\)"):
        vt.flash_attention_varlen(x, x, x, starts, starts, 5, 5, alibi_slopes=torch.ones(2, 2))
    with pytest.raises(ShapeError, match="flash_attention_varlen: `query` has shape"):
        vt.flash_attention_varlen(q, q, q, starts, starts, 5, 5)
    with pytest.raises(ShapeError, match=r"`cu_seqlens_k` has shape \(2,\).*`cu_seqlens_q` has 3 starts"):
        vt.flash_attention_varlen(x, x, x, starts, starts[1:], 5, 5)
    if not contract.TRITON:
        with pytest.raises(ShapeError, match="`max_seqlen_q` is 3, but a sequence has 5"):
            vt.flash_attention_varlen(x, x, x, starts, starts, 3, 5)
        with pytest.raises(ShapeError, match="starts that rise from 0 to 9"):
            vt.flash_attention_varlen(x, x, x, starts + 1, starts, 5, 5)


def test_every_field_of_a_config_crosses():
    """The operator takes a config as integers: none but powers, counts and flags may be added to it."""
    assert all(field.type in ("int", "bool") for field in dataclasses.fields(AttentionGpuConfig))
