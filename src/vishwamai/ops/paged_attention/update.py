"""`update_pages`: new tokens' keys and values into their pages, in place where the caller donates them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.ops.paged_attention.checks import check_tables, page_pools
from vishwamai.ops.paged_attention.schedule import runs

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NAME = "update_pages"


def update_pages(
    kv_pages: Any,
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads value_dim"] | None,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Any = None,
    *,
    k_scale: Any = None,
    v_scale: Any = None,
) -> Any:
    """Writes the keys and values of new tokens to where `ragged_paged_attention`, called with the same tables, reads them.

    Token i of sequence s, `key[cu_q_lens[s] + i]`, becomes key `kv_lens[s] - q_len + i` of the sequence; all other rows stay. Under
    `jax.jit(..., donate_argnums=...)` of the pages the program writes in place, without a second pool. XLA's own scatter does it on every platform: it
    moves the new rows only, so there is no kernel to prefer to it (latent pages: if their columns are a multiple of 128; see there).

    Args:
      kv_pages: any of the three forms of `ragged_paged_attention`.
      key: `[tokens, kv_heads, head_dim]`; for latent pages `[tokens, latent_dim + rope_dim]`, further columns become 0.
      value: `[tokens, kv_heads, value_dim]`, None for latent pages.
      kv_lens, page_indices, cu_q_lens, num_seqs: as there; the lengths include the new tokens.
      k_scale, v_scale: what stored entries will be multiplied by, a number or `[kv_heads]`: keys and values are divided by it, and for int8 rounded to
        the nearest and clipped to -127 ... 127; for 8-bit floats clipped to the largest finite number.

    Returns:
      The pages, of the form, shape and dtype of `kv_pages`.

    Raises:
      ShapeError: an argument does not fit the others.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((3, 2, 2, 1))  # 3 pages of 2 tokens, one head of one column
    >>> new = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> lens, table = jnp.array([3], jnp.int32), jnp.array([[2, 0]], jnp.int32)
    >>> update_pages(pages, new, -new, lens, table, jnp.array([0, 3], jnp.int32))[..., 0].astype(int).tolist()
    [[[3, -3], [0, 0]], [[0, 0], [0, 0]], [[1, -1], [2, -2]]]
    """
    k_pages, v_pages, form = page_pools(_NAME, kv_pages)
    key = jnp.asarray(key)
    value = None if value is None else jnp.asarray(value)
    kv_lens, page_indices, cu_q_lens = (jnp.asarray(x) for x in (kv_lens, page_indices, cu_q_lens))
    num_seqs = jnp.asarray(page_indices.shape[0] if num_seqs is None else num_seqs, jnp.int32).reshape(-1)
    check_tables(_NAME, kv_lens, page_indices, cu_q_lens, num_seqs)
    if form == "latent" and key.ndim == 2 and 0 < key.shape[1] < k_pages.shape[2]:
        key = jnp.pad(key, ((0, 0), (0, k_pages.shape[2] - key.shape[1])))
    check_rows(key, value, k_pages, v_pages, form)
    pages, page_size = k_pages.shape[:2]
    sequences, entries = page_indices.shape
    tokens = key.shape[0]
    of = runs(kv_lens, cu_q_lens, num_seqs[0])
    token = jnp.arange(tokens, dtype=jnp.int32)
    # A token is in the sequence whose run holds it; in none if it is past the last.
    inside = (of.start <= token[:, None]) & (token[:, None] < of.start + of.length)  # [tokens, sequences]
    sequence = jnp.argmax(inside, axis=1)
    position = (kv_lens - of.length - of.start)[sequence] + token
    entry = position // page_size
    written = inside.any(axis=1) & (position >= 0) & (entry < entries)
    page = jnp.where(written, page_indices[sequence, jnp.clip(entry, 0, entries - 1)], pages)  # out of range: dropped
    row = position % page_size

    def put(pool: Any, rows: Any) -> Any:
        return pool.at[page, row].set(rows, mode="drop")

    stored = _stored(key, k_scale, k_pages.dtype)
    if value is None:
        return put(k_pages, stored)
    values = _stored(value, v_scale, k_pages.dtype)
    if form == "separate":
        return put(k_pages, stored), put(v_pages, values)
    return put(k_pages, jnp.stack((stored, values), axis=2).reshape(tokens, -1, key.shape[-1]))


def _stored(x: Any, scale: Any, dtype: Any) -> Any:
    """`x / scale` in the pages' dtype."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    if scale is not None:
        scale = jnp.asarray(scale, wide)
        x = x.astype(wide) / (scale[:, None] if scale.ndim == 1 and x.ndim == 3 else scale)
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x.astype(wide)), -127, 127).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        return jnp.clip(x.astype(wide), -most, most).astype(dtype)
    return x.astype(dtype)


def check_rows(key: Any, value: Any, k_pages: Any, v_pages: Any, form: str) -> None:
    """Checks new rows against the pools that they are for.

    Raises:
      ShapeError: they do not fit.
    """
    if form == "latent":
        if value is not None:
            raise ShapeError(
                f"{_NAME}: `value` is {array_spec(value)} with latent pages, which hold keys only; pass None."
            )
        wanted: dict[str, tuple[Any, tuple[int, ...]]] = {"key": (key, k_pages.shape[2:])}
    else:
        heads = k_pages.shape[2] // (2 if form == "combined" else 1)
        last = k_pages.shape[3] if v_pages is None else v_pages.shape[3]
        wanted = {"key": (key, (heads, k_pages.shape[3])), "value": (value, (heads, last))}
    for label, (x, shape) in wanted.items():
        if x is None or x.shape[1:] != shape or x.shape[0] != key.shape[0]:
            got = None if x is None else tuple(x.shape)
            raise ShapeError(
                f"{_NAME}: `{label}` has shape {got}; for pages of shape {tuple(k_pages.shape)} pass ({key.shape[0]}, {', '.join(map(str, shape))})."
            )
