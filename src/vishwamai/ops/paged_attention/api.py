"""The public function `ragged_paged_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import array_spec, as_array
from vishwamai.ops.paged_attention.checks import check_options, check_query, check_tables, page_pools
from vishwamai.ops.paged_attention.cpu import NATIVE
from vishwamai.ops.paged_attention.gpu import TRITON
from vishwamai.ops.paged_attention.reference import XLA
from vishwamai.ops.paged_attention.spec import SHARED, Operands, PagedSpec, paged_axes
from vishwamai.ops.paged_attention.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

PAGED_ATTENTION: Op[PagedSpec] = Op("paged_attention", (PALLAS_TPU, TRITON, NATIVE, XLA), paged_axes, shareable=SHARED)

_NAME = "ragged_paged_attention"


def ragged_paged_attention(
    query: Float[Array, "tokens heads head_dim"],
    kv_pages: Any,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Any = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    k_scale: Any = None,
    v_scale: Any = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads value_dim"]:
    """Causal attention of many sequences' latest tokens over keys and values that lie in pages: prefill, decoding or both in one call.

    The queries of sequence s are `query[cu_q_lens[s] : cu_q_lens[s + 1]]`, the last tokens of its `kv_lens[s]`: query i stands at position
    `kv_lens[s] - q_len + i` and sees the keys up to its own. Their keys and values must be in the pages already (`update_pages`). Key j of sequence s is row
    `j % page_size` of page `page_indices[s, j // page_size]`. Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention" (2023).

    Args:
      query: `[tokens, heads, head_dim]`, bfloat16, float16, float32 or float64.
      kv_pages: `[pages, page_size, 2 * kv_heads, head_dim]`, each head's key and value in turn (k0 v0 k1 v1 ...), the layout of
        `jax.experimental.pallas.ops.tpu.ragged_paged_attention`; or `(k_pages, v_pages)`, each `[pages, page_size, kv_heads, dim]`; or latent pages (MLA)
        `[pages, page_size, latent_dim + rope_dim]` of one head, whose first `latent_dim` columns are the value too. Latent pages may have more columns
        than the query, which hold 0: on TPU make them a multiple of 128 (640 for 576), for XLA lays other widths out in columns and copies the whole
        pool at every call. The query's dtype, or int8, float8_e4m3fn or float8_e5m2 with scales.
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included.
      page_indices: `[sequences, pages_per_sequence]` int32; entries past a sequence's end are never read.
      cu_q_lens: `[sequences + 1]` int32 from 0 on, where each sequence's queries start; `query` may be longer than the last entry.
      num_seqs: how many of the sequences count, an int or an int32 array of one element; None means all.
      scale: factor of the products, default `1 / sqrt(head_dim)`; latent pages have no default (1 / sqrt of the heads' dim before absorption).
      window: a query sees this many keys before its own and no others: `left`, `(left, 0)`; None means all.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sinks: `[heads]` logits that enter the denominators only.
      k_scale, v_scale: what stored keys and values are multiplied by: a number, or `[kv_heads]`.
      latent_dim: for latent pages, columns of the value. `query` then holds the absorbed queries `[latent_dim]` and the rotated part `[rope_dim]` in a row.
      max_q_len: no sequence has more queries than this. 1 promises that the call is a step of decoding, whose program is smaller; None promises nothing.
      config: tiles (a `PagedConfig`), keys of a step, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[tokens, heads, head_dim]` (value_dim, latent_dim) in the query's dtype; 0 where a token belongs to no sequence or sees no key.

    Raises:
      ShapeError: an argument does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call, or a gradient is asked for: train with `flash_attention`, or pass
        `implementation="xla"`.

    >>> import jax, jax.numpy as jnp
    >>> pages = jax.random.normal(jax.random.key(0), (8, 4, 2, 16))  # 8 pages of 4 tokens, one kv head
    >>> query = jnp.ones((4, 2, 16))  # sequence 0 decodes one token, sequence 1 brings three
    >>> lens, table = jnp.array([6, 3], jnp.int32), jnp.array([[5, 2], [7, 0]], jnp.int32)
    >>> out = ragged_paged_attention(query, pages, lens, table, jnp.array([0, 1, 4], jnp.int32))
    >>> out.shape, bool(jnp.allclose(out[1], pages[7, 0, 1], atol=1e-5))  # the first of three sees its own key only
    ((4, 2, 16), True)
    """
    query = as_array(_NAME, "query", query)
    k_pages, v_pages, form = page_pools(_NAME, kv_pages)
    named = (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens))
    kv_lens, page_indices, cu_q_lens = (as_array(_NAME, name, x) for name, x in named)
    if num_seqs is None:
        num_seqs = kv_lens.shape[0] if kv_lens.ndim else 0
    num_seqs = jnp.asarray(num_seqs, jnp.int32 if isinstance(num_seqs, int) else None)
    num_seqs = num_seqs.reshape(1) if num_seqs.size == 1 else num_seqs
    check_tables(_NAME, kv_lens, page_indices, cu_q_lens, num_seqs)
    values = None if v_pages is None else array_spec(v_pages)
    check_query(_NAME, array_spec(query), array_spec(k_pages), values, form, latent_dim)
    scale, left = check_options(_NAME, scale, window, softcap, max_q_len, form, query.shape[2])
    missing = k_pages.shape[-1] - query.shape[2]
    if missing:  # columns of latent pages beyond the query's
        query = jnp.pad(query, ((0, 0), (0, 0), (0, missing)))
    kv_heads = {"combined": k_pages.shape[2] // 2, "separate": k_pages.shape[2], "latent": 1}[form]
    sinks = None if sinks is None else as_array(_NAME, "sinks", sinks)
    if sinks is not None and sinks.shape != query.shape[1:2]:
        raise ShapeError(
            f"{_NAME}: `sinks` has shape {sinks.shape}, but `query` has {query.shape[1]} heads; pass ({query.shape[1]},)."
        )
    k_scale, v_scale = (_scales(label, s, kv_heads) for label, s in (("k_scale", k_scale), ("v_scale", v_scale)))

    def run(*arrays: Any) -> Any:
        operands = Operands(*(None if x is None else x[None] for x in arrays))
        longest = min(max_q_len or arrays[0].shape[0], max(arrays[0].shape[0], 1))
        spec = PagedSpec(
            Operands(*(None if x is None else array_spec(x) for x in operands)),
            cast(Literal["combined", "separate", "latent"], form),
            scale,
            left,
            None if softcap is None else float(softcap),
            latent_dim,
            longest,
        )
        return PAGED_ATTENTION(spec, operands, config=config, implementation=implementation).out[0]

    arrays = (query, k_pages, v_pages, kv_lens, page_indices, cu_q_lens, num_seqs, sinks, k_scale, v_scale)
    # Query and kv heads share a factor: whole groups go to a device. Rows k0 v0 k1 v1 divide as the heads do where every device gets pairs.
    shared = None if form == "latent" else "h"
    pages = (None, None, shared, None)[: k_pages.ndim]
    dims = ((None, "h", None), pages, pages, (None,), (None, None), (None,), (None,), ("h",), (shared,), (shared,))
    given = tuple(None if x is None else d for x, d in zip(arrays, dims, strict=True))
    return follow_explicit_axes(run, Axes(given, (None, "h", None), frozenset("h")), *arrays)


def _scales(label: str, scale: Any, kv_heads: int) -> Any:
    """`[kv_heads]` float32, or None."""
    if scale is None:
        return None
    scale = jnp.asarray(scale, jnp.float32)
    if scale.shape not in ((), (1,), (kv_heads,)):
        raise ShapeError(
            f"{_NAME}: `{label}` has shape {scale.shape}; pass a number or ({kv_heads},), one for each kv head."
        )
    return jnp.broadcast_to(scale, (kv_heads,))
