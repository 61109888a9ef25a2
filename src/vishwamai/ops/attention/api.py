"""The public attention: `flash_attention` and `block_sparse_attention`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, overload

import jax.numpy as jnp
import numpy as np

from vishwamai.core import dropout
from vishwamai.core.arguments import checks_its_own
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.precision import resolve_precision
from vishwamai.core.signature import array_specs, as_arrays, public_call
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.alibi import constant_slopes
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.checks import (
    Options,
    check_blocks,
    check_dropout_key,
    make_spec,
    one_request,
    segment_pair,
    signature_of,
)
from vishwamai.ops.attention.op import ATTENTION
from vishwamai.ops.attention.places import existing_keys, row_positions, static_offset
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import SIGNATURE, Operands
from vishwamai.ops.attention.split.sequence import attend_split

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key


@overload
def flash_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ...] | None = None,
    kv_lens: Int[Array, ...] | None = None,
    kv_starts: Int[Array, ...] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, "#batch heads"] | Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    block_size: int | None = None,
    config: object = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch heads q_len v_dim"]: ...


@overload
def flash_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ...] | None = None,
    kv_lens: Int[Array, ...] | None = None,
    kv_starts: Int[Array, ...] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, "#batch heads"] | Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    block_size: int | None = None,
    config: object = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch heads q_len v_dim"], Float[Array, "batch heads q_len"]]: ...


@overload
def flash_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ...] | None = None,
    kv_lens: Int[Array, ...] | None = None,
    kv_starts: Int[Array, ...] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, "#batch heads"] | Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: bool,
    block_size: int | None = None,
    config: object = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Any: ...


@checks_its_own("window", "segment_ids", "softcap", "scale")
def flash_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    bias: Float[Array, "#batch #heads #q_len #kv_len"] | None = None,
    mask: Bool[Array, "#batch #heads #q_len #kv_len"] | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "top_left",
    window: tuple[int | None, int | None] | None = None,
    q_offset: int | Int[Array, ...] | None = None,
    kv_lens: Int[Array, ...] | None = None,
    kv_starts: Int[Array, ...] | None = None,
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    bias_after_softcap: bool = False,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, "#batch heads"] | Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: object = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact attention in memory linear in the sequences: softmax(softcap(scale * query key^T + bias)) value, masked.

    Dao, "FlashAttention-2" (2023). All options compose, in the forward and the backward pass; a row with nothing to
    attend to gives output 0, logsumexp -inf and gradients of exactly 0.

    Keys and values that a query sees must be finite. Those that no query of their batch element sees may hold anything,
    infinity and NaN included, where they lie outside of `kv_lens` or `kv_starts`, or past the last query's reach
    (`causal`, `window`). Keys that `mask`, `segment_ids`, a block mask or the left side of `window` hides from every
    query must be finite for "triton", and those of a `mask` with a row for each query for "pallas_tpu". A `bias` of
    -inf shields nothing.

    Args:
      query: `[batch, heads, q_len, qk_dim]`, bfloat16, float16, float32 or float64. Logits and sums are float32
        (float64 for float64).
      key: `[batch, kv_heads, kv_len, qk_dim]`, where `heads` is a multiple of `kv_heads`: query head h reads kv head h
        // (heads // kv_heads).
      value: `[batch, kv_heads, kv_len, v_dim]`.
      bias: added to the scaled logits; broadcasts to `[batch, heads, q_len, kv_len]`. -inf forbids a position (except
        for `softcap`, which bounds it like every logit: use `mask` there, or `bias_after_softcap`).
      mask: bool, True = attend; broadcasts the same way.
      causal: query i sees no key after it.
      causal_align: start of the diagonal of `causal` and `window` when q_len != kv_len. "top_left": query 0 stands
        at key 0 (`jax.nn`, torch). "bottom_right": the last query stands at the last key (decoding; FlashAttention).
      window: (left, right): query i, standing at key i, sees keys i-left ... i+right, inclusive; None = unbounded.
      q_offset: the key that the queries stand at, for `causal` and `window`, instead of `causal_align`. An int (of
        any sign) is a part of the compiled program. An array of integers is an operand: `[]` or `[batch]`, where the
        first query stands; `[batch, q_len]`, where every query stands, in any order. With an array every tile applies
        the mask, and tiles that it hides are left out while the kernel runs.
      kv_lens: integers `[]` or `[batch]`: no query sees the keys from this one on.
      kv_starts: integers `[]` or `[batch]`: no query sees the keys before this one (padding on the left).
      segment_ids: (q_ids, kv_ids), integers `[batch, q_len]` and `[batch, kv_len]`; a query sees the keys of its own
        segment.
      softcap: bounds the logits: softcap * tanh(logits / softcap).
      bias_after_softcap: add the bias to the capped logits, softcap * tanh(scale * query key^T / softcap) + bias, so
        that the cap bounds the products alone and -inf forbids a position; FlashAttention adds ALiBi's bias there.
      sinks: `[heads]`, one logit a head that enters the softmax's denominator only.
      alibi_slopes: `[heads]` or `[batch, heads]`: the logit of a query that stands at key p and of key j is less by
        `slope * |p - j|`, after the soft-cap. Where queries stand says `q_offset` or `causal_align` ("bottom_right" in
        FlashAttention). They have no gradient.
      dropout_rate: share of the probabilities to drop, in [0, 1).
      dropout_key: the random key of the dropout; the same key drops the same positions on every platform. Batch
        elements and heads count from 0 in the arrays given: inside your own `shard_map`, fold the shard's index into
        the key.
      scale: multiplies query.key; None for 1/sqrt(qk_dim).
      return_lse: return the logsumexp of the logits too, for merging with attention over other keys.
      block_size: edge of the tiles, in elements.
      config: tiles as a config of the implementation that runs; excludes `block_size`.
      layout: axes of query, key, value and the output: "bhsd", `[batch, heads, seq, dim]`; "bshd",
        `[batch, seq, heads, dim]`. None reads them as "bhsd" and rejects sizes that look swapped.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `out`, `[batch, heads, q_len, v_dim]` in `layout` and the query's dtype; with `return_lse`, the pair of it and the
      natural logsumexp `[batch, heads, q_len]` (in either layout), float32 (float64 for float64).

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 4, 100, 64))
    >>> flash_attention(q, k[:, :2], v[:, :2], causal=True, window=(15, 0)).shape
    (1, 4, 100, 64)
    """
    return _attend(
        query,
        key,
        value,
        bias,
        mask,
        causal=causal,
        causal_align=causal_align,
        window=window,
        q_offset=q_offset,
        kv_lens=kv_lens,
        kv_starts=kv_starts,
        segment_ids=segment_ids,
        softcap=softcap,
        bias_after_softcap=bias_after_softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        scale=scale,
        return_lse=return_lse,
        config=one_request(block_size, config),
        layout=layout,
        implementation=implementation,
    )


@checks_its_own("block_size")
def block_sparse_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    block_mask: np.ndarray | BlockMask | Callable[[Any, Any], Any] | None = None,
    *,
    block_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> Any:
    """Attention over the blocks of the score matrix that `block_mask` keeps, in the time that those blocks take and
    memory linear in the sequences.

    The mask is a constant of the compiled program: no tile that it leaves empty is visited, forward or backward (except
    for "xla", the definition). Child et al., "Generating Long Sequences with Sparse Transformers" (2019); Zaheer et
    al., "Big Bird" (2020). Common masks are in `vishwamai.ops.sparse.patterns`.

    Args:
      query: argument of `flash_attention`.
      key: argument of `flash_attention`.
      value: argument of `flash_attention`.
      block_mask: which key blocks each query block sees. Bool `[q_blocks, kv_blocks]`, or
        `[heads, q_blocks, kv_blocks]` for a mask to each head, True = attend, with q_blocks = ceil(q_len / block_size).
        Or a function `(q_index, kv_index) -> bool` of absolute positions, arrays `[rows, 1]` and `[1, columns]`, which
        is evaluated on the host at every trace: blocks may then be full, empty or partly visible. Or a `BlockMask`,
        which keeps what a function gave. None keeps everything.
      block_size: positions of a block, or (queries, keys); 128 unless the `BlockMask` says otherwise. It need not be
        the size of a kernel's tiles, but blocks of 128 or its multiples leave the least to mask.
      options: every other keyword of `flash_attention`, with the same meaning (`block_size` there is `config` here): a
        key is seen where the block mask and all the others let it be. Where heads have masks of their own, a sharding
        over heads is gathered.

    Returns:
      What `flash_attention` returns.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax, numpy as np
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 2, 256, 32))
    >>> local = np.abs(np.subtract.outer(range(8), range(8))) <= 1
    >>> block_sparse_attention(q, k, v, local, block_size=32, causal=True).shape
    (1, 2, 256, 32)
    >>> dilated = lambda i, j: (i - j) % 4 == 0
    >>> block_sparse_attention(q, k, v, dilated, block_size=64).shape
    (1, 2, 256, 32)
    """
    return _attend(query, key, value, blocks=(block_mask, block_size), **options)


def _attend(
    query: AnyArray,
    key: AnyArray,
    value: AnyArray,
    bias: AnyArray = None,
    mask: AnyArray = None,
    *,
    q_offset: AnyArray = None,
    kv_lens: AnyArray = None,
    kv_starts: AnyArray = None,
    segment_ids: PyTree = None,
    sinks: AnyArray = None,
    alibi_slopes: AnyArray = None,
    dropout_key: AnyArray = None,
    config: object = None,
    implementation: str | None = None,
    blocks: tuple[AnyArray, AnyArray] | None = None,
    **options: object,
) -> PyTree:
    """`options` are the other ones of `Options`; `blocks` is the block mask and its block size."""
    name = "flash_attention" if blocks is None else "block_sparse_attention"
    call_options = Options(**options, q_offset=static_offset(name, q_offset))
    arrays = as_arrays(
        name,
        Operands(query, key, value, bias, mask, *segment_pair(segment_ids), sinks, slopes=alibi_slopes),
        SIGNATURE.labels,
    )
    out_dtype = arrays.query.dtype
    query, key, value = cast_for_matmul(*arrays[:3])
    slopes = None if arrays.slopes is None else constant_slopes(arrays.slopes)
    arrays = arrays._replace(query=query, key=key, value=value, slopes=slopes)
    if query.ndim == key.ndim == 4:  # others are errors of the spec
        seq = 1 if call_options.layout == "bshd" else 2
        batch, q_len, kv_len = query.shape[0], query.shape[seq], key.shape[seq]
        if q_offset is not None and call_options.q_offset is None:
            arrays = arrays._replace(q_positions=row_positions(name, q_offset, batch, q_len))
        if kv_lens is not None or kv_starts is not None:
            q_ids, kv_ids = existing_keys(name, arrays[5:7], kv_lens, kv_starts, batch, q_len, kv_len)
            arrays = arrays._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    spec = make_spec(
        array_specs(arrays), resolve_precision(None, current_config().precision, query.dtype), *call_options
    )
    if blocks is not None:
        spec = dataclasses.replace(spec, blocks=check_blocks(*blocks, spec.q_heads, spec.q_len, spec.kv_len))
    dropout_key = None if dropout_key is None else jnp.asarray(dropout_key)
    check_dropout_key(spec.dropout_rate, dropout_key)
    if implementation is None and not current_config().use_flash:
        implementation = XLA.name
    q_ids, kv_ids = (None if x is None else x.astype(jnp.int32) for x in arrays[5:7])
    seed = dropout.seeds(dropout_key, spec.batch, spec.q_heads) if spec.dropout_rate else None
    positions = None if spec.operands.q_positions is None else arrays.q_positions
    arrays = arrays._replace(q_segment_ids=q_ids, kv_segment_ids=kv_ids, dropout_seed=seed, q_positions=positions)
    signature = signature_of(call_options.layout)
    outputs = attend_split(spec, signature, arrays, config=config, implementation=implementation)
    if outputs is None:
        outputs = public_call(ATTENTION, signature, spec, arrays, config=config, implementation=implementation)
    out = outputs.out.astype(out_dtype)
    return (out, outputs.logsumexp) if call_options.return_lse else out
