"""`update_pages` of torch tensors, as a custom operator that writes into the pages in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.errors import UnsupportedError
from vishwamai.ops.paged_attention import gpu_update
from vishwamai.ops.paged_attention.checks import check_tables, form_of, kv_heads_of
from vishwamai.ops.paged_attention.key_rotation import check_rope_tables, rotated
from vishwamai.ops.paged_attention.update import check_rows, places, stored_rows
from vishwamai.torch import bridge
from vishwamai.torch.arguments import check_tensors, checks_its_own
from vishwamai.torch.paged_attention import aligned, count, pools, scales
from vishwamai.torch.paged_attention import check_tables as check_page_tables
from vishwamai.torch.torch_private import has_tangent

_NAME = "update_pages"


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
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> None:
    """See `update_pages`."""
    form = form_of(k_pages, v_pages)
    check_tables(_NAME, kv_lens, page_indices, cu_q_lens, num_seqs)
    check_rows(key, value, k_pages, v_pages, form)
    rope_tables = None if cos is None or sin is None else (cos, sin)
    check_rope_tables(_NAME, key, rope_tables, interleaved)
    if key.numel() == 0 or page_indices.numel() == 0:
        return
    if bridge.platform_of(key) == "cpu":
        pools: Any = k_pages, v_pages
        count = len(kv_lens) if num_seqs is None else num_seqs
        page, row, position = places(k_pages.shape[:2], len(key), kv_lens, page_indices, cu_q_lens, count)
        inside = page == page.clip(0, len(k_pages) - 1)
        if not inside.all():
            page, row, position, key = (x[inside] for x in (page, row, position, key))
            value = None if value is None else value[inside]
        if rope_tables is not None:
            key = rotated(key, position, rope_tables, interleaved, form == "latent")
        for pool, new in zip(pools, stored_rows(k_pages, v_pages, key, value, k_scale, v_scale)):
            pool[page, row] = new
        return
    aligned(_NAME, k_pages, v_pages)
    rows = (key, value, kv_lens, page_indices, cu_q_lens, num_seqs, k_scale, v_scale, cos, sin)
    rows = [x if x is None else x.contiguous() for x in rows]
    gpu_update.update(k_pages[None], v_pages if v_pages is None else v_pages[None], *rows, interleaved=interleaved)


_update.register_fake(lambda *_: None)


@checks_its_own("rope_tables")
def update_pages(
    kv_pages: Any,
    key: Tensor,
    value: Tensor | None,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: int | Tensor | None = None,
    *,
    k_scale: float | Tensor | Sequence[float] | None = None,
    v_scale: float | Tensor | Sequence[float] | None = None,
    rope_tables: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> Any:
    """Writes the keys and values of new tokens into the pages; see `vishwamai.update_pages`, whose arguments these are.

    The pages themselves are changed, and returned. A gradient that would be needed is an UnsupportedError. On a GPU one
    kernel rotates the keys and writes them. `rope_tables` may have the leading axis of 1 that
    `rope_tables(count, head_dim)` gives them; values of the page tables are checked
    as those of `ragged_paged_attention`.

    >>> import torch
    >>> pages = torch.zeros(3, 2, 2, 1)  # 3 pages of 2 tokens, one head of one column
    >>> new = torch.tensor([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> lens, table = torch.tensor([3], dtype=torch.int32), torch.tensor([[2, 0]], dtype=torch.int32)
    >>> _ = update_pages(pages, new, -new, lens, table, torch.tensor([0, 3], dtype=torch.int32))
    >>> pages[..., 0].int().tolist()
    [[[3, -3], [0, 0]], [[0, 0], [0, 0]], [[1, -1], [2, -2]]]
    """
    k_pages, v_pages, form = pools(_NAME, kv_pages)
    angles: Any = rope_tables
    check_tensors(_NAME, "rope_tables", rope_tables)
    if isinstance(rope_tables, (tuple, list)):
        angles = tuple(x[0] if x.dim() == 3 and x.shape[0] == 1 else x for x in rope_tables)
    check_rope_tables(_NAME, key, angles, interleaved)
    floats = k_pages, v_pages, key, value
    if has_tangent(floats) or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in floats)):
        raise UnsupportedError(f"{_NAME}: pages have no gradient; call it under torch.no_grad(), or detach the keys.")
    factors = scales(_NAME, k_pages, kv_heads_of(k_pages, form), k_scale=k_scale, v_scale=v_scale)
    sequences = count(_NAME, num_seqs, kv_lens)
    of_tables = None if angles is None else angles[0].shape[0]
    check_page_tables(_NAME, k_pages, key, (kv_lens, page_indices, cu_q_lens, sequences), positions=of_tables)
    cos, sin = angles or (None, None)
    _update(k_pages, v_pages, key, value, kv_lens, page_indices, cu_q_lens, sequences, *factors, cos, sin, interleaved)
    return kv_pages
