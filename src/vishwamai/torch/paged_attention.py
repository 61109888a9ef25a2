"""`ragged_paged_attention` of torch tensors; the pages stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention import checks
from vishwamai.ops.paged_attention.api import PAGED_ATTENTION
from vishwamai.ops.paged_attention.checks import (
    check_num_seqs,
    check_window,
    describe,
    kv_heads_of,
    logit_scale,
    no_gradient,
    page_pools,
    wide_query,
)
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec, has_token_scales, signature
from vishwamai.ops.paged_attention.table_checks import check_table_values
from vishwamai.torch import bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.attention_options import statistics_dtype
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.value_checks import check_values

_NAME = "ragged_paged_attention"


def pools(name: str, kv_pages: AnyArray) -> tuple[Tensor, Tensor | None, Any]:
    """(k_pages, v_pages or None, form)."""
    k_pages, v_pages, form = page_pools(name, kv_pages)
    for pool in (k_pages, v_pages):
        if pool is not None and pool.stride(-1) != 1:
            raise ShapeError(
                f"{name}: `kv_pages` has strides {tuple(pool.stride())}; a row's columns must lie side by side (a last "
                "stride of 1): pages are not copied."
            )
    return k_pages, v_pages, form


def aligned(name: str, *pools: Tensor | None) -> None:
    """A kernel takes pools that begin at a multiple of 16 bytes; a launch would copy others, which are large or are to
    be written.
    """
    for pool in pools:
        if pool is not None and pool.data_ptr() % 16:
            raise ShapeError(
                f"{name}: `kv_pages` begins {pool.data_ptr() % 16} bytes past a multiple of 16; cut pools at multiples "
                "of 16 bytes."
            )


def scales(name: str, like: Tensor, heads: int, of_tokens: bool = False, **numbers: Any) -> list[Tensor | None]:
    """Each `[heads]` float32, or None; or, where they may be scales `of_tokens` of the pages `like`, `[pages,
    page_size, heads, 1]`.
    """
    tensors: list[Tensor | None] = []
    for label, scale in numbers.items():
        if of_tokens and isinstance(scale, Tensor) and scale.dim() == like.dim() and label != "q_scale":
            checks.check_token_scale(name, label, scale, heads, tuple(like.shape))
            tensors.append(scale.reshape(*like.shape[:2], heads, 1))
            continue
        if isinstance(scale, (int, float)):
            scale = torch.full((heads,), float(scale), dtype=torch.float32, device=like.device)
        elif scale is not None:
            scale = torch.as_tensor(scale, dtype=torch.float32, device=like.device)
            if tuple(scale.shape) not in ((), (1,), (heads,)):
                raise ShapeError(
                    f"{name}: `{label}` has shape {tuple(scale.shape)}; pass a number or ({heads},), one for each kv "
                    "head."
                )
            scale = scale.expand(heads).contiguous()
        tensors.append(scale)
    return tensors


def check_tables(
    name: str,
    pool: Tensor,
    rows: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor | None],
    max_q_len: int | None = None,
    positions: int | None = None,
) -> None:
    """Raises ShapeError where the page tables contradict one another, the pages or the `rows`; the values of those on a
    GPU are read under `KernelConfig(checks=True)` alone.
    """
    checks.check_tables(name, *tables)

    def check(kv_lens: np.ndarray, *rest: np.ndarray) -> None:
        count = () if len(rest) == 3 else (np.array([len(kv_lens)]),)
        of = name, (pool.shape[0], pool.shape[1]), len(rows), max_q_len
        check_table_values(*of, kv_lens, *rest, *count, positions=positions)

    if rows.dim():
        check_values(check, *(x for x in tables if x is not None))


def count(name: str, num_seqs: AnyArray, like: Tensor) -> Tensor | None:
    """`[1]` int32 of how many sequences of `kv_lens`, which is `like`, count; None where all do."""
    if isinstance(num_seqs, int):
        check_num_seqs(name, num_seqs, like.numel())
        return torch.full((1,), num_seqs, dtype=torch.int32, device=like.device)
    return None if num_seqs is None else num_seqs.reshape(-1)


def _pack(spec: PagedSpec, tensors: Operands) -> Operands:
    """Pools stay where they are, of whatever strides; the query gets the columns that latent pages have beyond it."""
    query, k_pages, v_pages, *tables, num_seqs, sinks, k_scale, v_scale, slopes, tree_mask = tensors
    query = torch.nn.functional.pad(query, (0, spec.head_dim - query.shape[2]))
    if bridge.platform_of(query) == "cuda":
        aligned(_NAME, k_pages, v_pages)
    elif num_seqs is None:  # which only Triton's kernels do without
        num_seqs = count(_NAME, spec.sequences, tensors.kv_lens)
    rest = (*tables, num_seqs, sinks, k_scale, v_scale, slopes, tree_mask)
    rest = (None if x is None else x.contiguous()[None] for x in rest)
    pages = (None if x is None else x[None] for x in (k_pages, v_pages))
    return Operands(query.contiguous()[None], *pages, *rest)


def _value_dim(call: Any) -> int:
    _, k_pages, v_pages, *_ = call.operands
    columns = (k_pages if v_pages is None else v_pages).shape[-1]
    return columns if call.latent_dim is None else call.latent_dim


_attend = TorchOperator(
    PAGED_ATTENTION,
    Outputs,
    lambda call: signature(call.latent_dim is not None, call.return_lse, has_token_scales(call.operands)),
    describe,
    dtypes=statistics_dtype,
    sizes=lambda call: {"value_dim": _value_dim(call)},
    pack=_pack,
    backward=no_gradient,
    one_by_one=True,  # tokens of several calls have no table in common
)


@checked
def ragged_paged_attention(
    query: Tensor,
    kv_pages: Any,
    kv_lens: Tensor,
    page_indices: Tensor,
    cu_q_lens: Tensor,
    num_seqs: int | Tensor | None = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    tree_mask: Tensor | None = None,
    q_scale: float | Tensor | Sequence[float] | None = None,
    k_scale: float | Tensor | Sequence[float] | None = None,
    v_scale: float | Tensor | Sequence[float] | None = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Causal attention of many sequences' latest tokens over keys and values that lie in pages; see
    `vishwamai.ragged_paged_attention`, whose arguments these are.

    The pages stay where they are, of any strides but the last, which is 1; so the pair `kv[:, 0], kv[:, 1]` of pages
    `[pages, 2, page_size, kv_heads, dim]` will do. What the tables hold is checked on the CPU, and on a GPU under
    `KernelConfig(checks=True)`, where the host waits for it. float64 is for the CPU. A gradient is an UnsupportedError.

    >>> import torch
    >>> pages = torch.arange(8.0).reshape(4, 1, 2, 1)  # 4 pages of one token: keys 0 2 4 6, values 1 3 5 7
    >>> lens, table = torch.tensor([2], dtype=torch.int32), torch.tensor([[3, 0]], dtype=torch.int32)
    >>> query, starts = torch.zeros(1, 1, 1), torch.tensor([0, 1], dtype=torch.int32)
    >>> ragged_paged_attention(query, pages, lens, table, starts)  # the mean of values 7 and 1
    tensor([[[4.]]])
    """
    k_pages, v_pages, form = pools(_NAME, kv_pages)
    query = wide_query(query, None if out_dtype is None else str(out_dtype).removeprefix("torch."))
    numbers = dict(q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    q_scale, k_scale, v_scale = scales(_NAME, k_pages, kv_heads_of(k_pages, form), True, **numbers)
    factors = logit_scale(q_scale, k_scale), v_scale
    sequences = count(_NAME, num_seqs, kv_lens)
    tables = kv_lens, page_indices, cu_q_lens, sequences
    check_tables(_NAME, k_pages, query, tables, max_q_len)
    tensors = Operands(query, k_pages, v_pages, *tables, sinks, *factors, slopes=alibi_slopes, tree_mask=tree_mask)
    out, logsumexp = _attend(*tensors, scale, check_window(window), softcap, latent_dim, max_q_len, return_lse)
    return (out, logsumexp) if return_lse else out
