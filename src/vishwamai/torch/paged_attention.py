"""`ragged_paged_attention` and `update_pages` of torch tensors, as custom operators: the pages stay where they are, and are written in place."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.spec import array_spec
from vishwamai.ops.paged_attention import gpu
from vishwamai.ops.paged_attention.api import PAGED_ATTENTION
from vishwamai.ops.paged_attention.checks import check_options, check_query, check_tables, no_gradient, page_pools
from vishwamai.ops.paged_attention.spec import Operands, PagedSpec
from vishwamai.ops.paged_attention.update import check_rows
from vishwamai.torch import bridge

_NAME, _UPDATE = "ragged_paged_attention", "update_pages"


def _form(k_pages: Tensor, v_pages: Tensor | None) -> Any:
    return "separate" if v_pages is not None else "latent" if k_pages.dim() == 3 else "combined"


def _kv_heads(k_pages: Tensor, form: str) -> int:
    return {"combined": k_pages.shape[-2] // 2, "separate": k_pages.shape[-2], "latent": 1}[form]


def _pools(name: str, kv_pages: Any) -> tuple[Tensor, Tensor | None]:
    """(k_pages, v_pages or None)."""
    k_pages, v_pages, _ = page_pools(name, kv_pages)
    for pool in (k_pages, v_pages):
        if pool is not None and pool.stride(-1) != 1:
            raise ShapeError(
                f"{name}: `kv_pages` has strides {tuple(pool.stride())}; a row's columns must lie side by side (a last stride of 1): pages are not copied."
            )
    return k_pages, v_pages


def _aligned(name: str, *pools: Tensor | None) -> None:
    """A kernel takes pools that begin at a multiple of 16 bytes; a launch would copy others, which are large or are to be written."""
    for pool in pools:
        if pool is not None and pool.data_ptr() % 16:
            raise ShapeError(
                f"{name}: `kv_pages` begins {pool.data_ptr() % 16} bytes past a multiple of 16; cut pools at multiples of 16 bytes."
            )


def _scales(name: str, label: str, scale: Any, like: Tensor, form: str) -> Tensor | None:
    """`[kv_heads]` float32, or None."""
    if scale is None:
        return None
    heads = _kv_heads(like, form)
    if isinstance(scale, (int, float)):
        return torch.full((heads,), float(scale), dtype=torch.float32, device=like.device)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=like.device)
    if tuple(scale.shape) not in ((), (1,), (heads,)):
        raise ShapeError(
            f"{name}: `{label}` has shape {tuple(scale.shape)}; pass a number or ({heads},), one for each kv head."
        )
    return scale.expand(heads).contiguous()


def _count(num_seqs: Any, page_indices: Tensor) -> Tensor | None:
    """`[1]` int32, or None where all sequences count."""
    if isinstance(num_seqs, int):
        return torch.full((1,), num_seqs, dtype=torch.int32, device=page_indices.device)
    return None if num_seqs is None else num_seqs.reshape(-1)


@torch.library.custom_op("vishwamai::ragged_paged_attention", mutates_args=())
def _attend(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor | None,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    latent_dim: int | None,
    max_q_len: int | None,
) -> Tensor:
    """See `ragged_paged_attention`."""
    form = _form(k_pages, v_pages)
    check_tables(_NAME, kv_lens, page_indices, cu_q_lens, num_seqs)
    values = None if v_pages is None else array_spec(v_pages)
    check_query(_NAME, array_spec(query), array_spec(k_pages), values, form, latent_dim)
    scale, window = check_options(_NAME, scale, window, softcap, max_q_len, form, query.shape[2])
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ShapeError(
            f"{_NAME}: `sinks` has shape {tuple(sinks.shape)}, but `query` has {query.shape[1]} heads; pass ({query.shape[1]},)."
        )
    tokens = query.shape[0]
    query = torch.nn.functional.pad(query, (0, k_pages.shape[-1] - query.shape[2])).contiguous()
    if bridge.platform_of(query) == "cuda":
        _aligned(_NAME, k_pages, v_pages)
    elif num_seqs is None:
        num_seqs = _count(page_indices.shape[0], page_indices)
    tables = (kv_lens, page_indices, cu_q_lens, num_seqs, sinks, k_scale, v_scale)
    rest = (None if x is None else x.contiguous()[None] for x in tables)
    operands = Operands(query[None], k_pages[None], None if v_pages is None else v_pages[None], *rest)
    spec = PagedSpec(
        Operands(*(None if x is None else array_spec(x) for x in operands)),
        form,
        scale,
        window,
        softcap,
        latent_dim,
        min(max_q_len or tokens, max(tokens, 1)),
    )
    choice = bridge.choose(PAGED_ATTENTION, spec, query)
    return bridge.forward(choice, spec, operands)[0].out[0]


@_attend.register_fake
def _(query: Tensor, k_pages: Tensor, v_pages: Tensor | None, *rest: Any) -> Tensor:
    latent_dim = rest[-2]
    columns = k_pages.shape[-1] if v_pages is None else v_pages.shape[-1]
    return query.new_empty((*query.shape[:2], columns if latent_dim is None else latent_dim))


def _refuse(ctx: Any, *cotangents: Any) -> NoReturn:
    no_gradient(ctx, *cotangents)


_attend.register_autograd(_refuse)


def ragged_paged_attention(
    query: Tensor,
    kv_pages: Any,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Any = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
) -> Tensor:
    """Causal attention of many sequences' latest tokens over keys and values that lie in pages; see `vishwamai.ragged_paged_attention`.

    Args:
      query: `[tokens, heads, head_dim]`, bfloat16, float16 or float32 (float64 on the CPU).
      kv_pages: `[pages, page_size, 2 * kv_heads, head_dim]` (k0 v0 k1 v1 ...), `(k_pages, v_pages)` of `[pages, page_size, kv_heads, dim]` each, or
        latent pages `[pages, page_size, latent_dim + rope_dim]`. Any strides but the last, which is 1; so `kv[:, 0], kv[:, 1]` of
        `[pages, 2, page_size, kv_heads, dim]` do too. The query's dtype (narrower with float32 queries), int8, float8_e4m3fn or float8_e5m2.
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included.
      page_indices: `[sequences, pages_per_sequence]` int32; entries past a sequence's end are never read.
      cu_q_lens: `[sequences + 1]` int32 from 0 on, where each sequence's queries start.
      num_seqs: how many of the sequences count, an int or an int32 tensor of one element; None means all.
      scale: factor of the products, default `1 / sqrt(head_dim)`; latent pages have none.
      window: a query sees this many keys before its own; None means all.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sinks: `[heads]` logits that enter the denominators only.
      k_scale, v_scale: what stored keys and values are multiplied by: a number, or `[kv_heads]`.
      latent_dim: for latent pages, columns of the value.
      max_q_len: no sequence has more queries than this; 1 for a step of decoding.

    Returns:
      `[tokens, heads, value_dim]` in the query's dtype; 0 where a token belongs to no sequence or sees no key.

    Raises:
      ShapeError: an argument does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device; or, from backward, a gradient was asked for.

    >>> import torch
    >>> pages = torch.arange(8.0).reshape(4, 1, 2, 1)  # 4 pages of one token: keys 0 2 4 6, values 1 3 5 7
    >>> lens, table = torch.tensor([2], dtype=torch.int32), torch.tensor([[3, 0]], dtype=torch.int32)
    >>> query, starts = torch.zeros(1, 1, 1), torch.tensor([0, 1], dtype=torch.int32)
    >>> ragged_paged_attention(query, pages, lens, table, starts)  # the mean of values 7 and 1
    tensor([[[4.]]])
    """
    k_pages, v_pages = _pools(_NAME, kv_pages)
    form = _form(k_pages, v_pages)
    if isinstance(window, tuple):
        _, window = check_options(_NAME, 1.0, window, None, None, form, 0)
    scales = (_scales(_NAME, label, s, k_pages, form) for label, s in (("k_scale", k_scale), ("v_scale", v_scale)))
    softcap = None if softcap is None else float(softcap)
    count = _count(num_seqs, page_indices)
    return _attend(
        *(query, k_pages, v_pages, kv_lens, page_indices, cu_q_lens, count, sinks, *scales),
        *(scale, window, softcap, latent_dim, max_q_len),
    )


# --- New tokens ------------------------------------------------------------------------------------------------------------------------------------


@torch.library.custom_op("vishwamai::update_pages", mutates_args=("k_pages", "v_pages"))
def _update(
    k_pages: Tensor,
    v_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """See `update_pages`."""
    form = _form(k_pages, v_pages)
    check_tables(_UPDATE, kv_lens, page_indices, cu_q_lens, num_seqs)
    columns = k_pages.shape[-1]
    short = form == "latent" and key.dim() == 2 and 0 < key.shape[1] < columns
    check_rows(key.new_empty((len(key), columns)) if short else key, value, k_pages, v_pages, form)
    if key.numel() == 0 or page_indices.numel() == 0:
        return
    if bridge.platform_of(key) == "cpu":
        _scatter(k_pages, v_pages, key, value, kv_lens, page_indices, cu_q_lens, num_seqs, k_scale, v_scale)
        return
    _aligned(_UPDATE, k_pages, v_pages)
    rows = [x if x is None else x.contiguous() for x in (key, value, kv_lens, page_indices, cu_q_lens, num_seqs)]
    gpu.update(k_pages[None], v_pages if v_pages is None else v_pages[None], *rows, k_scale=k_scale, v_scale=v_scale)


@_update.register_fake
def _(k_pages: Tensor, *rest: Any) -> None:
    del k_pages, rest


def _scatter(
    k_pages: Tensor,
    v_pages: Tensor | None,
    key: Tensor,
    value: Tensor | None,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    """The update on the CPU: the tokens that have a place, by torch's own assignment."""
    sequences, entries = page_indices.shape
    if num_seqs is not None:
        sequences = min(sequences, int(num_seqs))
    starts = cu_q_lens[: sequences + 1].long()
    token = torch.arange(min(len(key), int(starts[-1])))
    sequence = torch.searchsorted(starts[1:], token, right=True)
    position = kv_lens.long()[sequence] - starts[1:][sequence] + token
    page_size = k_pages.shape[1]
    placed = (position >= 0) & (position < entries * page_size)
    token, sequence, position = token[placed], sequence[placed], position[placed]
    page = page_indices.long()[sequence, position // page_size]
    known = (page >= 0) & (page < len(k_pages))
    at, token = (page[known], position[known] % page_size), token[known]
    key = _stored(key[token], k_scale, k_pages.dtype)
    if value is None:
        k_pages[at] = torch.nn.functional.pad(key, (0, k_pages.shape[-1] - key.shape[-1]))
        return
    value = _stored(value[token], v_scale, k_pages.dtype)
    if v_pages is None:
        k_pages[at] = torch.stack((key, value), 2).flatten(1, 2)
        return
    k_pages[at] = key
    v_pages[at] = value


def _stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`x / scale` in the pages' dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    if scale is not None:
        x = x.to(wide) / (scale[:, None] if x.dim() == 3 else scale)
    if dtype == torch.int8:
        return x.to(wide).round().clamp(-127, 127).to(dtype)
    if dtype.itemsize == 1:
        most = torch.finfo(dtype).max
        return x.to(wide).clamp(-most, most).to(dtype)
    return x.to(dtype)


def update_pages(
    kv_pages: Any,
    key: Tensor,
    value: Tensor | None,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Writes the keys and values of new tokens into the pages, in place; see `vishwamai.update_pages`.

    Args:
      kv_pages: any of the three forms of `ragged_paged_attention`; its tensors are changed.
      key: `[tokens, kv_heads, head_dim]`; for latent pages `[tokens, latent_dim + rope_dim]`, further columns become 0.
      value: `[tokens, kv_heads, value_dim]`, None for latent pages.
      kv_lens, page_indices, cu_q_lens, num_seqs: as there; the lengths include the new tokens.
      k_scale, v_scale: what stored entries will be multiplied by, a number or `[kv_heads]`: keys and values are divided by it, and for int8 rounded to
        the nearest and clipped to -127 ... 127; for 8-bit floats clipped to the largest finite number.

    Returns:
      `kv_pages` itself.

    Raises:
      ShapeError: an argument does not fit the others.
      UnsupportedError: a gradient would be needed: the keys require one, and it is not switched off.

    >>> import torch
    >>> pages = torch.zeros(3, 2, 2, 1)  # 3 pages of 2 tokens, one head of one column
    >>> new = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> lens, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[2, 0]], dtype=torch.int32)
    >>> _ = update_pages(pages, new, -new, lens, table, torch.tensor([0, 3], dtype=torch.int32))
    >>> pages[..., 0].int().tolist()
    [[[3, -3], [0, 0]], [[0, 0], [0, 0]], [[1, -1], [2, -2]]]
    """
    k_pages, v_pages = _pools(_UPDATE, kv_pages)
    form = _form(k_pages, v_pages)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (k_pages, v_pages, key, value)):
        raise UnsupportedError(f"{_UPDATE}: pages have no gradient; call it under torch.no_grad(), or detach the keys.")
    k_scale = _scales(_UPDATE, "k_scale", k_scale, k_pages, form)
    v_scale = _scales(_UPDATE, "v_scale", v_scale, k_pages, form)
    count = _count(num_seqs, page_indices)
    _update(k_pages, v_pages, key, value, kv_lens, page_indices, cu_q_lens, count, k_scale, v_scale)
    return kv_pages
