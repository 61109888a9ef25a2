"""The public attention: `flash_attention` and `block_sparse_attention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp
import numpy as np

from vishwamai.core import dropout
from vishwamai.core.config import current_config, narrowed
from vishwamai.core.errors import KernelError
from vishwamai.core.op import Op
from vishwamai.core.precision import resolve_precision
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import as_array
from vishwamai.ops.attention.block_mask import BlockMask
from vishwamai.ops.attention.checks import make_spec
from vishwamai.ops.attention.chunked import XLA_CHUNKED
from vishwamai.ops.attention.cpu import NATIVE
from vishwamai.ops.attention.gpu import TRITON
from vishwamai.ops.attention.reference import XLA
from vishwamai.ops.attention.spec import SHAREABLE, AttentionSpec, Operands, attention_axes, caller_dims, splittable
from vishwamai.ops.attention.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Bool, Float, Int, Key

ATTENTION: Op[AttentionSpec] = Op(
    "attention", (PALLAS_TPU, TRITON, NATIVE, XLA_CHUNKED, XLA), attention_axes, shareable=SHAREABLE
)


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
    segment_ids: tuple[Int[Array, "#batch q_len"], Int[Array, "#batch kv_len"]] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Key[Array, ""] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: Any = None,
    layout: Literal["bhsd", "bshd"] | None = None,
    implementation: str | None = None,
) -> Any:
    """Exact attention in memory linear in the sequences: softmax(softcap(scale * query key^T + bias)) value, masked.

    Dao, "FlashAttention-2" (2023). All options compose, in the forward and the backward pass; a row with nothing to attend to gives output 0,
    logsumexp -inf and gradients of exactly 0.

    Args:
      query: `[batch, heads, q_len, qk_dim]`, bfloat16, float16, float32 or float64. Logits and sums are float32 (float64 for float64).
      key: `[batch, kv_heads, kv_len, qk_dim]`, where `heads` is a multiple of `kv_heads`: query head h reads kv head h // (heads // kv_heads).
      value: `[batch, kv_heads, kv_len, v_dim]`.
      bias: added to the scaled logits; broadcasts to `[batch, heads, q_len, kv_len]`. -inf forbids a position (but for `softcap`, which bounds
        it like every logit: use `mask` there).
      mask: bool, True = attend; broadcasts the same way.
      causal: query i sees no key after it.
      causal_align: where the diagonal of `causal` and `window` starts when q_len != kv_len. "top_left": query 0 stands at key 0 (`jax.nn`, torch).
        "bottom_right": the last query stands at the last key (decoding; FlashAttention).
      window: (left, right): query i, standing at key i, sees keys i-left ... i+right, inclusive; None = unbounded.
      segment_ids: (q_ids, kv_ids), integers `[batch, q_len]` and `[batch, kv_len]`; a query sees the keys of its own segment.
      softcap: bounds the logits: softcap * tanh(logits / softcap).
      sinks: `[heads]`, one logit a head that enters the softmax's denominator only.
      dropout_rate: share of the probabilities to drop, in [0, 1).
      dropout_key: the random key of the dropout; the same key drops the same positions on every platform. Batch elements and heads count from 0
        in the arrays given: inside your own `shard_map`, fold the shard's index into the key.
      scale: multiplies query.key; None for 1/sqrt(qk_dim).
      return_lse: return the logsumexp of the logits too, for merging with attention over other keys.
      block_size: edge of the tiles, in elements.
      config: tiles as a config of the implementation that runs; excludes `block_size`.
      layout: of query, key, value and the output: "bhsd", `[batch, heads, seq, dim]`; "bshd", `[batch, seq, heads, dim]`. None reads them as
        "bhsd" and refuses sizes that look swapped.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `out`, `[batch, heads, q_len, v_dim]` in `layout` and the query's dtype; with `return_lse`, the pair of it and the natural logsumexp
      `[batch, heads, q_len]` (in either layout), float32 (float64 for float64).

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
        segment_ids=segment_ids,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        scale=scale,
        return_lse=return_lse,
        config=_config(block_size, config),
        layout=layout,
        implementation=implementation,
    )


def block_sparse_attention(
    query: Float[Array, "batch heads q_len qk_dim"],
    key: Float[Array, "batch kv_heads kv_len qk_dim"],
    value: Float[Array, "batch kv_heads kv_len v_dim"],
    block_mask: np.ndarray | BlockMask | Callable[[Any, Any], Any] | None = None,
    *,
    block_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> Any:
    """Attention over the blocks of the score matrix that `block_mask` keeps, in the time that those blocks take and memory linear in the sequences.

    The mask is a constant of the compiled program: no tile that it leaves empty is visited, forward or backward (but for "xla", the definition). Child et al., "Generating Long
    Sequences with Sparse Transformers" (2019); Zaheer et al., "Big Bird" (2020). Common masks are in `vishwamai.ops.sparse.patterns`.

    Args:
      query, key, value: as in `flash_attention`.
      block_mask: which key blocks each query block sees. Bool `[q_blocks, kv_blocks]`, or `[heads, q_blocks, kv_blocks]` for a mask to each head,
        True = attend, with q_blocks = ceil(q_len / block_size). Or a function `(q_index, kv_index) -> bool` of absolute positions, arrays
        `[rows, 1]` and `[1, columns]`, which is evaluated on the host at every trace: blocks may then be full, empty or partly visible. Or a
        `BlockMask`, which keeps what a function gave. None keeps everything.
      block_size: positions of a block, or (queries, keys); 128 unless the `BlockMask` says otherwise. It need not be the size of a kernel's tiles,
        but blocks of 128 or its multiples leave the least to mask.
      options: every other keyword of `flash_attention`, with the same meaning (`block_size` there is `config` here): a key is seen where the block
        mask and all the others let it be. Where heads have masks of their own, a sharding over heads is gathered.

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
    return _attend(query, key, value, block_mask=block_mask, mask_block_size=block_size, **options)


def _attend(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    causal: bool = False,
    causal_align: str = "top_left",
    window: Any = None,
    segment_ids: Any = None,
    softcap: float | None = None,
    sinks: Any = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    config: Any = None,
    layout: str | None = None,
    implementation: str | None = None,
    block_mask: Any = None,
    mask_block_size: Any = None,
) -> Any:
    name = "flash_attention" if block_mask is None else "block_sparse_attention"
    query, key, value = (as_array(name, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    out_dtype = query.dtype
    query, key, value = narrowed(query, key, value)
    bias, mask, sinks = (
        None if x is None else as_array(name, n, x) for n, x in (("bias", bias), ("mask", mask), ("sinks", sinks))
    )
    dropout_key = None if dropout_key is None else jnp.asarray(dropout_key)
    q_ids, kv_ids = segments = _segments(segment_ids)
    spec = make_spec(
        query,
        key,
        value,
        bias,
        mask,
        causal=causal,
        causal_align=causal_align,
        window=window,
        segment_ids=segment_ids if q_ids is None else segments,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        scale=scale,
        return_lse=return_lse,
        layout=layout,
        precision=resolve_precision(None, current_config().precision, query.dtype),
        block_mask=block_mask,
        block_size=mask_block_size,
    )
    if implementation is None and not current_config().use_flash:
        implementation = XLA.name
    seed = None
    if dropout_key is not None and spec.dropout_rate:
        seed = dropout.seeds(dropout_key, spec.batch, spec.q_heads)

    def inner(x: Any) -> Any:
        return x.swapaxes(1, 2) if layout == "bshd" else x

    def filled(x: Any, ndim: int) -> Any:
        return None if x is None else x.reshape((1,) * (ndim - x.ndim) + x.shape)

    def ids(x: Any) -> Any:
        return None if x is None else filled(x.astype(jnp.int32), 2)

    def run(arrays: Operands) -> Any:
        operands = Operands(
            inner(arrays.query),
            inner(arrays.key),
            inner(arrays.value),
            filled(arrays.bias, 4),
            filled(arrays.mask, 4),
            ids(arrays.q_segment_ids),
            ids(arrays.kv_segment_ids),
            filled(arrays.sinks, 2),
            arrays.dropout_seed,
        )
        local = spec.localize(operands)  # of a shard, where the arrays live on explicit mesh axes
        outputs = ATTENTION(local, operands, config=config, implementation=implementation)
        out = inner(outputs.out).astype(out_dtype)
        return (out, outputs.logsumexp) if return_lse else out

    arrays = Operands(query, key, value, bias, mask, q_ids, kv_ids, sinks, seed)
    dims = caller_dims(layout or "bhsd")
    given = Operands(*(None if x is None else d[len(d) - x.ndim :] for d, x in zip(dims, arrays, strict=True)))
    out_dims = (*dims.query[:3], "v")
    results = (out_dims, ("b", "h", "q")) if return_lse else out_dims
    return follow_explicit_axes(run, Axes((given,), results, frozenset(splittable(spec))), arrays)


def _segments(segment_ids: Any) -> tuple[Any, Any]:
    """Both id arrays; (None, None) where there are none, or what the checks will refuse."""
    if isinstance(segment_ids, (tuple, list)) and len(segment_ids) == 2 and all(ids is not None for ids in segment_ids):
        return jnp.asarray(segment_ids[0]), jnp.asarray(segment_ids[1])
    return None, None


def _config(block_size: int | None, config: Any) -> Any:
    """One wish of the two ways to say it."""
    if block_size is None:
        return config
    if config is not None:
        raise KernelError(
            f"flash_attention: `block_size` is {block_size} and `config` is {config}; pass one of them, since a config names its own blocks."
        )
    if isinstance(block_size, bool) or not isinstance(block_size, int) or block_size < 1:
        raise KernelError(
            f"flash_attention: `block_size` is {block_size!r}; pass a positive number of elements, such as 128, or None."
        )
    return block_size
