"""`flash_attention_varlen`: packed sequences, each over its own keys, by segments and the positions of rows."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.config import current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import explicit_mesh, mesh_axes
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values, is_known
from vishwamai.ops.attention.api import flash_attention
from vishwamai.ops.attention.split.ring import to_zigzag

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

NAME = "flash_attention_varlen"


@overload
def flash_attention_varlen(
    query: Float[Array, "total_q heads qk_dim"],
    key: Float[Array, "total_k kv_heads qk_dim"],
    value: Float[Array, "total_k kv_heads v_dim"],
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: Literal[False] = False,
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "total_q heads v_dim"]: ...


@overload
def flash_attention_varlen(
    query: Float[Array, "total_q heads qk_dim"],
    key: Float[Array, "total_k kv_heads qk_dim"],
    value: Float[Array, "total_k kv_heads v_dim"],
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: Literal[True],
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "total_q heads v_dim"], Float[Array, "total_q heads"]]: ...


@overload
def flash_attention_varlen(
    query: Float[Array, "total_q heads qk_dim"],
    key: Float[Array, "total_k kv_heads qk_dim"],
    value: Float[Array, "total_k kv_heads v_dim"],
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: bool,
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any: ...


@checks_its_own("window", "softcap", "scale")
def flash_attention_varlen(
    query: Float[Array, "total_q heads qk_dim"],
    key: Float[Array, "total_k kv_heads qk_dim"],
    value: Float[Array, "total_k kv_heads v_dim"],
    cu_seqlens_q: Int[Array, " sequences+1"],
    cu_seqlens_k: Int[Array, " sequences+1"],
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    causal_align: Literal["top_left", "bottom_right"] = "bottom_right",
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    alibi_slopes: Float[Array, " heads"] | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Attention of sequences of any lengths, packed one after another: the queries of a sequence see the keys of the
    sequence of the same number.

    Tiles without a pair of one sequence are not computed. Where queries and keys have the same starts (one array passed
    twice, or equal values that are known), `causal` and `window` belong to the static mask too, and tiles outside it
    are left out when the program is compiled. Else they compare the positions of rows (see `q_offset` of
    `flash_attention`).

    Args:
      query: `[total_q, heads, qk_dim]`, bfloat16, float16, float32 or float64.
      key: `[total_k, kv_heads, qk_dim]`.
      value: `[total_k, kv_heads, v_dim]`.
      cu_seqlens_q: integers `[sequences + 1]` from 0 on: where each sequence begins, and where the last one ends. Rows
        after that see nothing.
      cu_seqlens_k: the same for the keys; keys after the last sequence are not seen.
      max_seqlen_q: length of the longest sequence, or more. It is only checked, where the starts are known; kernels
        read the lengths from the starts.
      max_seqlen_k: the same for the keys.
      causal: argument of `flash_attention`, for each sequence by itself.
      causal_align: argument of `flash_attention`, but "bottom_right" by default, as in FlashAttention.
      window: argument of `flash_attention`, for each sequence by itself.
      softcap: argument of `flash_attention`.
      sinks: argument of `flash_attention`.
      alibi_slopes: `[heads]`, as in `flash_attention`, for each sequence by itself.
      scale: argument of `flash_attention`.
      return_lse: return the logsumexp too.
      block_size: argument of `flash_attention`.
      config: argument of `flash_attention`.
      implementation: argument of `flash_attention`.

    Returns:
      `out`, `[total_q, heads, v_dim]`; with `return_lse`, the pair of it and the natural logsumexp `[heads, total_q]`.

    Raises:
      ShapeError: an argument is not legal or does not fit the others. Starts are checked where they are known, and in
        the program under `KernelConfig(checks=True)`.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax, jax.numpy as jnp
    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 10, 2, 16))
    >>> starts = jnp.array([0, 3, 10], jnp.int32)
    >>> out = flash_attention_varlen(q, k, v, starts, starts, 7, 7, causal=True)
    >>> bool(jnp.allclose(out[0], v[0], atol=1e-6) and jnp.allclose(out[3], v[3], atol=1e-6))
    True
    """
    named = {"query": query, "key": key, "value": value}
    arrays = {name: as_array(NAME, name, x) for name, x in named.items()}
    for name, x in arrays.items():
        if x.ndim != 3:
            _fail(f"`{name}` has shape {tuple(x.shape)}; pass packed sequences, [total, heads, head_dim].")
    cu_seqlens = {"q": cu_seqlens_q, "k": cu_seqlens_k}
    starts_of = {side: as_array(NAME, f"cu_seqlens_{side}", x) for side, x in cu_seqlens.items()}
    totals = {"q": arrays["query"].shape[0], "k": arrays["key"].shape[0]}
    longest = {"q": max_seqlen_q, "k": max_seqlen_k}
    for side, starts in starts_of.items():
        if starts.ndim != 1 or starts.shape[0] < 2 or not jnp.issubdtype(starts.dtype, jnp.integer):
            _fail(
                f"`cu_seqlens_{side}` is {starts.dtype.name} of shape {tuple(starts.shape)}; pass integers "
                "[sequences + 1], from 0 to the end of the last sequence."
            )
        check_values(functools.partial(check_starts, side, longest[side], totals[side]), cu_seqlens[side])
    (q_starts, kv_starts), (total_q, total_k) = starts_of.values(), totals.values()
    if q_starts.shape != kv_starts.shape:
        _fail(
            f"`cu_seqlens_q` has {q_starts.shape[0]} entries and `cu_seqlens_k` {kv_starts.shape[0]}; pass as many: "
            "one for each sequence, and the end."
        )
    same = cu_seqlens_q is cu_seqlens_k or (
        all(map(is_known, cu_seqlens.values())) and np.array_equal(cu_seqlens_q, cu_seqlens_k)
    )
    q_ids, kv_ids = _sequence_of(q_starts, total_q), _sequence_of(kv_starts, total_k)
    offset = None
    if not same and (causal or window is not None or alibi_slopes is not None):
        offset = _positions(q_ids, q_starts, kv_starts, causal_align == "bottom_right")[None]
    # What follows the last sequence belongs to none: -1 among the queries, -2 among the keys.
    last = q_starts.shape[0] - 1
    q_ids, kv_ids = jnp.where(q_ids < last, q_ids, -1), jnp.where(kv_ids < last, kv_ids, -2)
    if current_config().split_sequence == "zigzag":
        q_ids, kv_ids = _in_zigzag(q_ids, arrays["query"]), _in_zigzag(kv_ids, arrays["key"])
    results = flash_attention(
        *(x[None] for x in arrays.values()),
        causal=causal,
        window=window,
        q_offset=offset,
        segment_ids=(q_ids[None], kv_ids[None]),
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        scale=scale,
        return_lse=return_lse,
        block_size=block_size,
        config=config,
        layout="bshd",
        implementation=implementation,
    )
    return jax.tree.map(lambda x: x[0], results)


def _sequence_of(starts: jax.Array, total: int) -> AnyArray:
    """The number of the sequence of every position; the count of sequences after the last one."""
    positions = jnp.arange(total, dtype=starts.dtype)
    if not isinstance(starts.shape[0], int):  # of a symbol of jax.export, which no search takes
        return (starts <= positions[:, None]).sum(1, dtype=jnp.int32) - 1
    return jnp.searchsorted(starts, positions, side="right").astype(jnp.int32) - 1


def _in_zigzag(ids: Any, x: AnyArray) -> Any:
    """The ids of the rows of `x`, which lie in zig-zag order on the devices over which they are split."""
    mesh = explicit_mesh(x)
    devices = 1 if mesh is None else math.prod(mesh.shape[axis] for axis in mesh_axes(jax.typeof(x).sharding.spec[0]))
    return ids if devices == 1 else to_zigzag(ids, devices, axis=0)


def _positions(q_ids: jax.Array, q_starts: jax.Array, kv_starts: jax.Array, bottom_right: bool) -> AnyArray:
    """The packed key that every row stands at."""
    ends = slice(1, None) if bottom_right else slice(None, -1)
    shift = (kv_starts[ends] - q_starts[ends]).astype(jnp.int32)
    return jnp.arange(q_ids.shape[0], dtype=jnp.int32) + shift[jnp.minimum(q_ids, shift.shape[0] - 1)]


def check_starts(side: str, longest: int | None, total: int, starts: np.ndarray) -> None:
    """Raises ShapeError where the starts of the sequences of a side, "q" or "k", are not legal."""
    lengths = np.diff(starts)
    if starts[0] != 0 or lengths.min() < 0 or starts[-1] > total:
        _fail(f"`cu_seqlens_{side}` is {starts[:8].tolist()} ...; pass starts that rise from 0 to {total} at most.")
    if longest is not None and lengths.max() > longest:
        _fail(f"`max_seqlen_{side}` is {longest}, but a sequence has {lengths.max()} positions; pass the longest.")


def _fail(text: str) -> NoReturn:
    raise ShapeError(f"{NAME}: {text}")
