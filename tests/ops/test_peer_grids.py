"""The parameter grids of flash-attention's and vLLM's own attention tests, on our kernels for torch tensors.

A seed draws combinations of each grid. They are flash-attention 2's `test_flash_attn_output` and vLLM's
`test_varlen_with_paged_kv`; a result may be as far from float64 as they allow: twice the error of the same formula in
the operands' dtype.
"""

import itertools

import pytest

import rotation

torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[torch]'")

import vishwamai.torch as vt  # noqa: E402

HEAD_DIMS = (32, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
LENGTHS = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
)
FLASH = list(
    itertools.product(
        (torch.float16, torch.bfloat16), (6, 1, 2), (False, True), (False, True), HEAD_DIMS, LENGTHS, (0.0, 50.0)
    )
)
PAGED = list(
    itertools.product(
        ([(1, 1328), (5, 18), (129, 463)], [(1, 523), (1, 37), (1, 2011)]),
        ((4, 4), (8, 2), (5, 1)),
        (128, 256),
        (16, 32),
        (None, 64, 128, 256),
        (None, 10.0, 50.0),
    )
)
SHARE, COUNT = 10, 40


def attend(query, key, value, see, softcap):
    """Attention `[heads, rows, features]` by its formula, in the dtype of its operands."""
    group = len(query) // len(key)
    key, value = (x.repeat_interleave(group, 0) for x in (key, value))
    logits = query @ key.mT * query.shape[-1] ** -0.5
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    weights = torch.softmax(logits.masked_fill(~see, float("-inf")), -1).nan_to_num(0.0)
    return weights.masked_fill(~see, 0.0) @ value


def visible(rows, columns, causal, window):
    i, j = torch.arange(rows)[:, None] + columns - rows, torch.arange(columns)[None, :]
    see = torch.ones(rows, columns, dtype=torch.bool)
    if causal:
        see &= j <= i
    if window is not None:
        see &= (j >= i - window[0]) & (j <= i + window[1])
    return see


def close(ours, same, true):
    assert ours.shape == true.shape and not ours.isnan().any()
    allowed = 2 * (same.double() - true).abs().max() + 1e-5
    assert (ours.double() - true).abs().max() <= allowed


@pytest.mark.parametrize(
    ("dtype", "kv_heads", "causal", "local", "dim", "lengths", "softcap"), rotation.drawn(FLASH, SHARE, COUNT)
)
def test_flash_attention_2(dtype, kv_heads, causal, local, dim, lengths, softcap):
    generator = torch.Generator().manual_seed(0)
    rows, columns = lengths
    shapes = ((6, rows, dim), (kv_heads, columns, dim), (kv_heads, columns, dim), (6, rows, dim))
    *operands, cotangent = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
    if softcap:
        operands[0] = operands[0] * softcap  # as there: so that the cap bends the logits
    window = tuple(torch.randint(0, columns, (2,), generator=generator).tolist()) if local else None
    see = visible(rows, columns, causal, window)

    def run(function, wide):
        leaves = [x.to(wide).requires_grad_() for x in operands]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, cotangent.to(wide))

    def kernel(*x):
        options = {"causal": causal, "causal_align": "bottom_right", "window": window, "softcap": softcap or None}
        return vt.flash_attention(*(a[None] for a in x), **options)[0]

    def formula(query, key, value):
        return attend(query, key, value, see, softcap)

    for ours, same, true in zip(run(kernel, dtype), run(formula, dtype), run(formula, torch.float64), strict=True):
        close(ours, same, true)


@pytest.mark.parametrize(("runs", "heads", "dim", "page", "window", "softcap"), rotation.drawn(PAGED, SHARE, COUNT))
def test_vllm_paged(runs, heads, dim, page, window, softcap):
    generator = torch.Generator().manual_seed(0)
    q_lens, kv_lens = (torch.tensor(x, dtype=torch.int32) for x in zip(*runs, strict=True))
    query = torch.randn(int(q_lens.sum()), heads[0], dim, generator=generator).bfloat16()
    pool = torch.randn(2048, page, 2 * heads[1], dim, generator=generator).bfloat16()
    table = torch.randint(0, len(pool), (len(runs), -(-int(kv_lens.max()) // page)), generator=generator)
    starts = torch.cat([torch.zeros(1), q_lens.cumsum(0)]).int()
    ours = vt.ragged_paged_attention(query, pool, kv_lens, table.int(), starts, window=window, softcap=softcap)
    for n, (q_len, kv_len) in enumerate(runs):
        held = pool[table[n]].flatten(0, 1)[:kv_len]
        operands = [x.transpose(0, 1) for x in (query[starts[n] : starts[n + 1]], held[:, 0::2], held[:, 1::2])]
        see = visible(q_len, kv_len, True, None if window is None else (window, 0))
        same = attend(operands[0], operands[1], operands[2], see, softcap)
        true = attend(operands[0].double(), operands[1].double(), operands[2].double(), see, softcap)
        close(ours[starts[n] : starts[n + 1]].transpose(0, 1), same, true)
