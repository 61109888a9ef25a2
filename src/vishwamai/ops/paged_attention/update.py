"""`update_pages`: new tokens' keys and values into their pages, in place where the caller donates them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.arrays import cast, namespace, padded, widened
from vishwamai.core.errors import ShapeError
from vishwamai.core.shape_checks import Argument, check_shapes
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values
from vishwamai.ops.paged_attention.checks import as_num_seqs, check_scale, check_tables, kv_heads_of, page_pools
from vishwamai.ops.paged_attention.key_rotation import check_rope_tables, rotated
from vishwamai.ops.paged_attention.rows import put
from vishwamai.ops.paged_attention.schedule import runs
from vishwamai.ops.paged_attention.spec import PAIRS, POOLS, Form
from vishwamai.ops.paged_attention.table_checks import check_table_values

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

_NAME = "update_pages"


@checked
def update_pages(
    kv_pages: object,
    key: Float[Array, "tokens kv_heads head_dim"],
    value: Float[Array, "tokens kv_heads value_dim"] | None,
    kv_lens: Int[Array, " sequences"],
    page_indices: Int[Array, "sequences pages_per_sequence"],
    cu_q_lens: Int[Array, " sequences+1"],
    num_seqs: Int[Array, ...] | int | None = None,
    *,
    k_scale: Float[Array, ...] | float | None = None,
    v_scale: Float[Array, ...] | float | None = None,
    rope_tables: tuple[Float[Array, "positions pairs"], Float[Array, "positions pairs"]] | None = None,
    interleaved: bool = False,
) -> Any:
    """Writes the keys and values of new tokens to where `ragged_paged_attention`, called with the same tables, reads
    them.

    Token i of sequence s, `key[cu_q_lens[s] + i]`, becomes key `kv_lens[s] - q_len + i` of the sequence; all other rows
    stay. Under `jax.jit(..., donate_argnums=...)` of the pages the program writes in place, without a second pool.
    On TPUs a kernel copies many rows at once, where they have a multiple of 128 columns and a token's rows are 1, 2, 4
    or a multiple of 8 words of 32 bits; elsewhere on accelerators it is XLA's own scatter, which moves the new rows
    only (latent pages: if their columns are a multiple of 128; see there), and for int4 on GPUs a kernel. On the CPU a
    native kernel copies the rows; int4 rows that are not whole bytes have XLA's scatter there, which widens the pool.

    Args:
      kv_pages: any of the three forms of `ragged_paged_attention`.
      key: `[tokens, kv_heads, head_dim]`; for latent pages `[tokens, latent_dim + rope_dim]`, further columns become 0.
      value: `[tokens, kv_heads, value_dim]`, None for latent pages.
      kv_lens: argument of `ragged_paged_attention`; the lengths include the new tokens.
      page_indices: argument of `ragged_paged_attention`.
      cu_q_lens: argument of `ragged_paged_attention`.
      num_seqs: argument of `ragged_paged_attention`.
      k_scale: later factor of stored keys, a number or `[kv_heads]`. Keys are divided by it; for int8
        and int4 they are rounded to the nearest and clipped to -127 ... 127 and -7 ... 7, for 8-bit floats clipped to
        the largest finite number.
      v_scale: the same for values.
      rope_tables: cos and sin, `[positions, pairs]` by position, such as `(cache.cos, cache.sin)` of a `RotaryCache`;
        None for keys that are rotated already. Keys are turned by their positions in the sequence as `apply_rope` turns
        them: in float32, rounded to the key's dtype, then scaled and stored. The stored rows are those of `apply_rope`,
        then `update_pages`, or differ by one rounding of float32. The first 2 `pairs` features of a head turn, of
        latent pages the last 2 `pairs` columns of `key`. A position past the tables stores NaN (any number in
        pages of integers). `tree_mask`'s guesses, whose positions are depths, need `apply_rope`.
      interleaved: which features are a pair, as in `apply_rope`.

    Returns:
      The pages, of the form, shape and dtype of `kv_pages`.

    Raises:
      ShapeError: an argument does not fit the others. Values of the tables are checked where they are known, and that
        `rope_tables` have every new token's position; where they are traced, under `KernelConfig(checks=True)`.

    >>> import jax.numpy as jnp
    >>> pages = jnp.zeros((3, 2, 2, 1))  # 3 pages of 2 tokens, one head of one column
    >>> new = jnp.array([1.0, 2.0, 3.0]).reshape(3, 1, 1)
    >>> lens, table = jnp.array([3], jnp.int32), jnp.array([[2, 0]], jnp.int32)
    >>> update_pages(pages, new, -new, lens, table, jnp.array([0, 3], jnp.int32))[..., 0].astype(int).tolist()
    [[[3, -3], [0, 0]], [[0, 0], [0, 0]], [[1, -1], [2, -2]]]

    Token i here is at position i + 1, and turns by i + 1 quarters of a circle:

    >>> cos, sin = jnp.array([[1.0], [0.0], [-1.0]]), jnp.array([[0.0], [1.0], [0.0]])
    >>> key, lens, table, new = jnp.array([[[1.0, 2.0]], [[3.0, 4.0]]]), [3], [[0]], [0, 2]
    >>> tables = (jnp.array(x, jnp.int32) for x in (lens, table, new))
    >>> pages = update_pages(jnp.zeros((1, 4, 2, 2)), key, key, *tables, rope_tables=(cos, sin))
    >>> pages[0, :, 0].astype(int).tolist()
    [[0, 0], [-2, 1], [-3, -4], [0, 0]]
    """
    k_pages, v_pages, form = page_pools(_NAME, kv_pages)
    key = jnp.asarray(key)
    value = None if value is None else jnp.asarray(value)
    kv_lens, page_indices, cu_q_lens = (jnp.asarray(x) for x in (kv_lens, page_indices, cu_q_lens))
    num_seqs = as_num_seqs(_NAME, num_seqs, kv_lens.size)
    check_tables(_NAME, kv_lens, page_indices, cu_q_lens, num_seqs)
    for label, x in (("key", key), ("value", value)):
        if x is not None and not (x.ndim >= 2 and jnp.issubdtype(x.dtype, jnp.floating)):
            raise ShapeError(f"{_NAME}: `{label}` is {array_spec(x)}; pass floats [tokens, kv_heads, head_dim].")
    kv_heads = kv_heads_of(k_pages, form)
    k_scale = check_scale(_NAME, "k_scale", k_scale, kv_heads)
    v_scale = check_scale(_NAME, "v_scale", v_scale, kv_heads)
    angles = None if rope_tables is None else tuple(jnp.asarray(x) for x in rope_tables)
    check_rope_tables(_NAME, key, angles, interleaved)
    positions = None if angles is None else angles[0].shape[0]
    check_values(
        functools.partial(check_table_values, _NAME, k_pages.shape[:2], key.shape[0], None, positions=positions),
        kv_lens, page_indices, cu_q_lens, num_seqs,
    )  # fmt: skip
    check_rows(key, value, k_pages, v_pages, form)
    page, row, position = places(k_pages.shape[:2], key.shape[0], kv_lens, page_indices, cu_q_lens, num_seqs[0])
    if angles is not None:
        key = rotated(key, position, angles, interleaved, form == "latent")
    rows = stored_rows(k_pages, v_pages, key, value, k_scale, v_scale)
    pools = [put(pool, new, page, row) for pool, new in zip((k_pages, v_pages), rows)]
    return tuple(pools) if form == "separate" else pools[0]


def places(
    shape: Sequence[int],
    tokens: int,
    kv_lens: AnyArray,
    page_indices: AnyArray,
    cu_q_lens: AnyArray,
    num_seqs: AnyArray,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """(page, row, position in its sequence) of each of so many new tokens, arrays of JAX or torch.

    Args:
      shape: pages, and rows of a page. A token that has no place gets the page after the last one.
      num_seqs: how many of the sequences count.
    """
    xp = namespace(kv_lens)
    pages, page_size = shape
    entries = page_indices.shape[1]
    start, length, _ = runs(kv_lens, cu_q_lens, num_seqs)
    end = start + length
    token = xp.arange(tokens, dtype=xp.int32)
    # A token is in the sequence whose run holds it; in none if it is past the last.
    inside = (start <= token[:, None]) & (token[:, None] < end)  # [tokens, sequences]
    sequence = xp.argmax(cast(inside, jnp.int32), 1)
    position = (kv_lens - end)[sequence] + token
    entry = position // page_size
    clipped = xp.clip(entry, 0, entries - 1)
    page = xp.where(inside.any(1) & (entry == clipped), page_indices[sequence, clipped], pages)
    return page, position % page_size, position


def stored_rows(
    k_pages: AnyArray, v_pages: object, key: AnyArray, value: AnyArray, k_scale: object, v_scale: object
) -> list[AnyArray]:
    """What each pool takes of new tokens, in its own form and dtype; arrays of JAX or torch."""
    dtype = array_spec(k_pages).dtype
    if value is None:
        return [_stored(padded(key, 1, k_pages.shape[2] - key.shape[1]), k_scale, dtype)]
    rows = [_stored(key, k_scale, dtype), _stored(value, v_scale, dtype)]
    if v_pages is not None:
        return rows
    return [namespace(key).stack(rows, 2).reshape(key.shape[0], 2 * key.shape[1], key.shape[2])]


def _stored(x: AnyArray, scale: Any, dtype: Any) -> AnyArray:
    """`x / scale` in the pages' dtype."""
    xp = namespace(x)
    if scale is not None:
        x = widened(x) / (scale[:, None] if x.ndim == 3 else scale)
    if jnp.issubdtype(dtype, jnp.integer):
        most = int(jnp.iinfo(dtype).max)
        return cast(xp.clip(xp.round(widened(x)), -most, most), dtype)
    if dtype.itemsize == 1:
        most = float(jnp.finfo(dtype).max)
        return cast(xp.clip(widened(x), -most, most), dtype)
    return cast(x, dtype)


def check_rows(key: AnyArray, value: AnyArray, k_pages: AnyArray, v_pages: Any, form: Form) -> None:
    """Checks new rows against the pools that they are for; those of latent pages may have fewer columns.

    Raises:
      ShapeError: they do not fit.
    """
    if form == "latent":
        if value is not None:
            raise ShapeError(
                f"{_NAME}: `value` is {array_spec(value)} with latent pages, which hold keys only; pass None."
            )
    elif value is None:
        raise ShapeError(f"{_NAME}: `value` is None; pass the values of the new tokens, next to their keys.")
    # Each head has a row of its own here, and the columns of latent pages have a name.
    of_keys, of_values = (text.replace("heads/", "heads").replace(" _", " head_dim") for text in POOLS[form])
    short = form == "latent" and len(key.shape) == 2 and 0 < key.shape[1] < k_pages.shape[2]
    rows = {
        "latent": ("tokens _" if short else "tokens head_dim", ""),
        "combined": (_KEY, _KEY),
        "separate": (_KEY, _VALUE),
    }[form]
    named = (
        ("kv_pages" if v_pages is None else "k_pages", of_keys, k_pages, PAIRS if form == "combined" else None),
        ("v_pages", of_values, v_pages, None),
        ("key", rows[0], key, None),
        ("value", rows[1], value, None),
    )
    arguments = (Argument(label, text, tuple(x.shape), hint) for label, text, x, hint in named if x is not None)
    check_shapes(_NAME, arguments)


_KEY, _VALUE = "tokens heads head_dim", "tokens heads value_dim"
