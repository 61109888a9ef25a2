"""The public function `ragged_paged_attention`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Literal, overload

import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.config import current_config
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.value_checks import check_values
from vishwamai.ops.paged_attention.checks import (
    as_num_seqs,
    check_scale,
    check_window,
    describe,
    kv_heads_of,
    logit_scale,
    page_pools,
    wide_query,
)
from vishwamai.ops.paged_attention.cpu import NATIVE
from vishwamai.ops.paged_attention.gpu import TRITON
from vishwamai.ops.paged_attention.reference import XLA
from vishwamai.ops.paged_attention.spec import Operands, PagedSpec, signature_of
from vishwamai.ops.paged_attention.table_checks import check_table_values
from vishwamai.ops.paged_attention.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Bool, Float, Int, Num

PAGED_ATTENTION: Op[PagedSpec] = Op("paged_attention", (PALLAS_TPU, TRITON, NATIVE, XLA), split="batch heads")

_NAME = "ragged_paged_attention"


@overload
def ragged_paged_attention(
    query: Num[Array, "tokens heads head_dim"],
    kv_pages: object,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Int[Array, ...] | int | None = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    tree_mask: Bool[Array, "tokens columns"] | None = None,
    q_scale: Float[Array, ...] | float | None = None,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: Literal[False] = False,
    out_dtype: DTypeLike | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "tokens heads v_dim"]: ...


@overload
def ragged_paged_attention(
    query: Num[Array, "tokens heads head_dim"],
    kv_pages: object,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Int[Array, ...] | int | None = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    tree_mask: Bool[Array, "tokens columns"] | None = None,
    q_scale: Float[Array, ...] | float | None = None,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: Literal[True],
    out_dtype: DTypeLike | None = None,
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens heads v_dim"], Float[Array, "tokens heads"]]: ...


@overload
def ragged_paged_attention(
    query: Num[Array, "tokens heads head_dim"],
    kv_pages: object,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Int[Array, ...] | int | None = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    tree_mask: Bool[Array, "tokens columns"] | None = None,
    q_scale: Float[Array, ...] | float | None = None,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: bool,
    out_dtype: DTypeLike | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any: ...


@checked
def ragged_paged_attention(
    query: Num[Array, "tokens heads head_dim"],
    kv_pages: object,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Int[Array, ...] | int | None = None,
    *,
    scale: float | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    tree_mask: Bool[Array, "tokens columns"] | None = None,
    q_scale: Float[Array, ...] | float | None = None,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    latent_dim: int | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
    out_dtype: DTypeLike | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Causal attention of many sequences' latest tokens over keys and values that lie in pages: prefill, decoding or
    both in one call.

    The queries of sequence s are `query[cu_q_lens[s] : cu_q_lens[s + 1]]`, the last tokens of its `kv_lens[s]`: query i
    stands at position `kv_lens[s] - q_len + i` and sees the keys up to its own. Their keys and values must be in the
    pages already (`update_pages`). Key j of sequence s is row `j % page_size` of page
    `page_indices[s, j // page_size]`. Kwon et al., "Efficient Memory Management for LLM Serving with PagedAttention"
    (2023).

    Args:
      query: `[tokens, heads, head_dim]`, bfloat16, float16, float32 or float64; or quantized, int8, float8_e4m3fn or
        float8_e5m2 with `q_scale`: such queries are widened to `out_dtype` before the kernel, which is exact.
      kv_pages: `[pages, page_size, 2 * kv_heads, head_dim]`, each head's key and value in turn (k0 v0 k1 v1 ...), the
        layout of `jax.experimental.pallas.ops.tpu.ragged_paged_attention`; or `(k_pages, v_pages)`, each
        `[pages, page_size, kv_heads, dim]`; or latent pages (MLA) `[pages, page_size, latent_dim + rope_dim]` of one
        head, whose first `latent_dim` columns are the value too. Latent pages may have more columns than the query,
        which hold 0: on TPU make them a multiple of 128 (640 for 576), for XLA lays other widths out in columns and
        copies the whole pool at every call. The query's dtype, or int8, int4, float8_e4m3fn or
        float8_e5m2 with scales. int4 takes half of int8's memory. "pallas_tpu" reads it where the kv heads are a
        multiple of 4 (8 in separate pools), "triton" and "native_cpu" where head_dim is even, "xla" always.
      kv_lens: `[sequences]` int32, tokens of each sequence, the new ones included.
      page_indices: `[sequences, pages_per_sequence]` int32; entries past a sequence's end are never read.
      cu_q_lens: `[sequences + 1]` int32 from 0 on, where each sequence's queries start; `query` may be longer than the
        last entry.
      num_seqs: how many of the sequences count, an int or an int32 array of one element; None means all.
      scale: factor of the products, default `1 / sqrt(head_dim)`; latent pages have no default (1 / sqrt of the heads'
        dim before absorption).
      window: a query sees this many keys before its own and no others: `left`, `(left, 0)`; None means all.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sinks: `[heads]` logits that enter the denominators only.
      alibi_slopes: `[heads]`: the logit of a query at position p and of key j is less by `slope * (p - j)`, after the
        soft-cap (Press et al. 2022).
      tree_mask: `[tokens, columns]` bool, for a tree of guesses (speculative decoding; Miao et al., "SpecInfer", 2024):
        query t sees the new token j of its own sequence, key `kv_lens[s] - q_len + j`, only if `tree_mask[t, j]`: its
        ancestors and itself, in any order in which none comes after its descendants. Keys before the new tokens are
        seen by all; so are new tokens from `columns` on up to the query's own, so a batch may hold prefills beside
        trees whose rows are True. `window` and `alibi_slopes` count keys, not depths. "pallas_tpu" takes up to 1024
        columns.
      q_scale: factor of the queries: a number, or `[kv_heads]` (of the query heads that share a kv head, as
        FlashAttention's `q_descale`). It becomes a factor of `k_scale`, so every implementation serves it.
      k_scale: factor of stored keys: a number, or `[kv_heads]`; or one of each token, float32 `[pages, page_size,
        kv_heads, 1]` (latent pages: `[pages, page_size, 1]`), which `update_pages` writes as pools of one column.
        "native_cpu" and "xla" read scales of tokens.
      v_scale: the same for stored values; of tokens where `k_scale` is.
      latent_dim: columns of the value, for latent pages. `query` then holds the absorbed queries `[latent_dim]` and the
        rotated part `[rope_dim]` in a row.
      max_q_len: no sequence has more queries than this. 1 promises that the call is a step of decoding, whose program
        is smaller; None promises nothing.
      return_lse: return the logsumexp of the logits too, for merging with attention over other keys
        (`merge_attention`): pages that are split over devices, or a prefix that sequences share.
      out_dtype: dtype of the result of quantized queries, one of the floating ones above; None for bfloat16. Others
        have their own.
      config: tiles (a `PagedConfig`), keys of a step, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[tokens, heads, head_dim]` (value_dim, latent_dim) in the query's dtype, or `out_dtype`; 0 where a token
      belongs to no sequence or sees no key. With `return_lse`, the pair of it and the natural logsumexp
      `[tokens, heads]`, float32 (float64 for float64), which is -inf there.

    Raises:
      ShapeError: an argument does not fit the others. Values of the tables are checked where they are known; where they
        are traced, under `KernelConfig(checks=True)`.
      UnsupportedError: the implementation asked for cannot serve the call, or a gradient is asked for: train with
        `flash_attention`, or pass `implementation="xla"`.

    >>> import jax, jax.numpy as jnp
    >>> pages = jax.random.normal(jax.random.key(0), (8, 4, 2, 16))  # 8 pages of 4 tokens, one kv head
    >>> query = jnp.ones((4, 2, 16))  # sequence 0 decodes one token, sequence 1 brings three
    >>> lens, table = jnp.array([6, 3], jnp.int32), jnp.array([[5, 2], [7, 0]], jnp.int32)
    >>> out = ragged_paged_attention(query, pages, lens, table, jnp.array([0, 1, 4], jnp.int32))
    >>> out.shape, bool(jnp.allclose(out[1], pages[7, 0, 1], atol=1e-5))  # the first of three sees its own key only
    ((4, 2, 16), True)

    Two guesses at the token after the first of sequence 1; the second guess does not see the first:

    >>> tree = jnp.array([[1, 0, 0], [1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    >>> tables = lens, table, jnp.array([0, 1, 4], jnp.int32)
    >>> attend = lambda pages: ragged_paged_attention(query, pages, *tables, tree_mask=tree)
    >>> bool((attend(pages)[3] == attend(pages.at[7, 1].set(0.0))[3]).all())
    True
    """
    out_dtype = None if out_dtype is None else as_jax_dtype(_NAME, "out_dtype", out_dtype)
    query = wide_query(as_array(_NAME, "query", query), out_dtype)
    k_pages, v_pages, form = page_pools(_NAME, kv_pages)
    named = (("kv_lens", kv_lens), ("page_indices", page_indices), ("cu_q_lens", cu_q_lens))
    kv_lens, page_indices, cu_q_lens = (as_array(_NAME, name, x) for name, x in named)
    num_seqs = as_num_seqs(_NAME, num_seqs, kv_lens.size)
    sinks = None if sinks is None else as_array(_NAME, "sinks", sinks)
    slopes = None if alibi_slopes is None else as_array(_NAME, "alibi_slopes", alibi_slopes)
    tree = None if tree_mask is None else as_array(_NAME, "tree_mask", tree_mask)
    kv_heads = kv_heads_of(k_pages, form)
    q_scale = check_scale(_NAME, "q_scale", q_scale, kv_heads)
    k_scale = logit_scale(q_scale, check_scale(_NAME, "k_scale", k_scale, kv_heads, k_pages.shape))
    v_scale = check_scale(_NAME, "v_scale", v_scale, kv_heads, k_pages.shape)
    tables = kv_lens, page_indices, cu_q_lens, num_seqs
    arrays = Operands(query, k_pages, v_pages, *tables, sinks, k_scale, v_scale, slopes, tree)
    spec = describe(array_specs(arrays), scale, check_window(window), softcap, latent_dim, max_q_len, return_lse)
    pool = k_pages.shape[:2]
    check_values(
        functools.partial(check_table_values, _NAME, pool, query.shape[0], max_q_len),
        *tables,
    )
    if spec.head_dim != query.shape[2]:
        columns = spec.head_dim - query.shape[2]
        arrays = arrays._replace(query=jnp.pad(query, ((0, 0), (0, 0), (0, columns))))
    of_caller = signature_of(form, return_lse, spec.token_scales)
    if implementation is None and not current_config().use_flash:
        implementation = XLA.name
    outputs = public_call(PAGED_ATTENTION, of_caller, spec, arrays, config=config, implementation=implementation)
    return (outputs.out, outputs.logsumexp) if return_lse else outputs.out
