"""What a caller may pass to paged attention, checked once for all platforms."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.arrays import cast
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.shape_checks import Argument, check_shapes
from vishwamai.core.spec import ArraySpec, array_spec, as_array, as_dtype
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.paged_attention.spec import (
    HINTS,
    TABLES,
    TOKEN_SCALES,
    Form,
    Operands,
    PagedSpec,
    has_token_scales,
    signature_of,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_NAME = "ragged_paged_attention"
_QUERY_DTYPES = ("bfloat16", "float16", "float32", "float64")
QUANTIZED = ("int8", "float8_e4m3fn", "float8_e5m2")
"""What queries may be quantized to."""
_NARROW = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")


def _array(name: str, x: AnyArray) -> AnyArray:
    """A torch tensor as it is, anything else as a JAX array."""
    return x if gpu.framework(x) == "torch" else as_array(name, "kv_pages", x)


def form_of(k_pages: Any, v_pages: object | None) -> Form:
    """How pools hold keys and values."""
    return "separate" if v_pages is not None else "latent" if len(k_pages.shape) == 3 else "combined"


def kv_heads_of(k_pages: AnyArray, form: Form) -> int:
    """The kv heads of a pool in the caller's layout."""
    return {"combined": k_pages.shape[-2] // 2, "separate": k_pages.shape[-2], "latent": 1}[form]


def page_pools(name: str, kv_pages: PyTree) -> tuple[PyTree, PyTree | None, Form]:
    """(k_pages, v_pages or None, form) of what the caller passed as `kv_pages`.

    Raises:
      ShapeError: it is none of the three forms.
    """
    if isinstance(kv_pages, (tuple, list)):
        if len(kv_pages) != 2:
            raise ShapeError(f"{name}: `kv_pages` is a tuple of {len(kv_pages)}; pass one array or (k_pages, v_pages).")
        k, v = (_array(name, p) for p in kv_pages)
        if k.ndim != 4 or k.dtype != v.dtype:
            raise ShapeError(
                f"{name}: `k_pages` is {array_spec(k)} and `v_pages` {array_spec(v)}; pass [pages, page_size, "
                "kv_heads, dim] of one dtype."
            )
        return k, v, "separate"
    pages = _array(name, kv_pages)
    if pages.ndim == 3:
        return pages, None, "latent"
    if pages.ndim != 4:
        raise ShapeError(
            f"{name}: `kv_pages` has shape {tuple(pages.shape)}; pass [pages, page_size, 2 * kv_heads, head_dim] with "
            "keys and values in turn, (k_pages, v_pages), or latent pages [pages, page_size, latent_dim + rope_dim]."
        )
    return pages, None, "combined"


def check_scale(name: str, label: str, scale: AnyArray, kv_heads: int, pool: tuple[int, ...] | None = None) -> AnyArray:
    """`[kv_heads]` float32 of a number or an array, None for None.

    Args:
      pool: shape of the keys' pages, where `scale` may be a pool of the scales of their tokens, too: that becomes
        `[pages, page_size, kv_heads, 1]`.

    Raises:
      ShapeError: it has another shape.
    """
    if scale is None:
        return None
    scale = jnp.asarray(scale)
    if pool is not None and scale.ndim == len(pool):
        check_token_scale(name, label, scale, kv_heads, pool)
        return scale if scale.ndim == 4 else scale[:, :, None]
    argument = Argument(label, "heads?", scale.shape, "one for each kv head, or pass a number")
    check_shapes(name, [argument], {"heads": ("kv_pages", kv_heads)})
    if not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ShapeError(f"{name}: `{label}` has dtype {scale.dtype.name}; pass floats.")
    return jnp.broadcast_to(scale.astype(jnp.float32).reshape(-1), (kv_heads,))


def check_token_scale(name: str, label: str, scale: AnyArray, kv_heads: int, pool: tuple[int, ...]) -> None:
    """Checks scales of every token and kv head of pages of shape `pool`.

    Raises:
      ShapeError: they have another shape or dtype.
    """
    dims = TOKEN_SCALES.replace("heads/", "heads") if len(pool) > 3 else "pages page_size 1"
    sizes = zip(("pages", "page_size", "heads"), (*pool[:2], kv_heads))
    hint = "a scale of each token and kv head of the pages, or pass a number"
    argument = Argument(label, dims, tuple(scale.shape), hint)
    check_shapes(name, [argument], {axis: ("kv_pages", size) for axis, size in sizes})
    if array_spec(scale).dtype != jnp.float32:
        raise ShapeError(f"{name}: `{label}` is {array_spec(scale)}; pass scales of tokens in float32.")


def check_num_seqs(name: str, num_seqs: int, sequences: int) -> None:
    """Raises ShapeError where fewer than none or more than all sequences would count."""
    if not 0 <= num_seqs <= sequences:
        raise ShapeError(f"{name}: `num_seqs` is {num_seqs}; pass a number from 0 to {sequences}, the sequences given.")


def as_num_seqs(name: str, num_seqs: object, sequences: int) -> jax.Array:
    """How many of the sequences count, as an array of one element; None for all of them.

    Raises:
      ShapeError: it is known, and there are not so many sequences.
    """
    if num_seqs is None:
        num_seqs = sequences
    if isinstance(num_seqs, int):
        check_num_seqs(name, num_seqs, sequences)
    return jnp.asarray(num_seqs, jnp.int32 if isinstance(num_seqs, int) else None).reshape(-1)


def logit_scale(q_scale: Any, k_scale: AnyArray) -> AnyArray:
    """The factor of the products: of the keys' scales and the queries', None for 1."""
    if q_scale is None or k_scale is None:
        return q_scale if k_scale is None else k_scale
    return (q_scale if k_scale.ndim == 1 else q_scale[:, None]) * k_scale


def wide_query(query: AnyArray, out_dtype: DTypeLike | None) -> AnyArray:
    """Quantized queries in `out_dtype`, which holds every 8-bit number; others as they are.

    Raises:
      ShapeError: `out_dtype` has no meaning.
    """
    dtype = array_spec(query).dtype
    if dtype.name in QUANTIZED:
        name = "bfloat16" if out_dtype is None else as_dtype(_NAME, "out_dtype", out_dtype).name
        if name not in _QUERY_DTYPES:
            raise ShapeError(
                f"{_NAME}: `out_dtype` is {out_dtype!r}; pass one of {', '.join(_QUERY_DTYPES)}, or None for bfloat16."
            )
        return cast(query, jnp.dtype(name))
    if out_dtype is not None and as_dtype(_NAME, "out_dtype", out_dtype) != dtype:
        raise ShapeError(
            f"{_NAME}: `out_dtype` is {out_dtype!r} with queries of {dtype.name}, whose result is {dtype.name}; pass "
            f"None, or quantized queries ({', '.join(QUANTIZED)})."
        )
    return query


def check_tables(name: str, kv_lens: PyTree, page_indices: PyTree, cu_q_lens: object, num_seqs: object) -> None:
    """Checks the integer arrays that say which queries meet which pages.

    Raises:
      ShapeError: one of them has another shape or dtype than the others ask for.
    """
    labels = ("kv_lens", "page_indices", "cu_q_lens", "num_seqs")
    tables = [None if x is None else array_spec(x) for x in (kv_lens, page_indices, cu_q_lens, num_seqs)]
    present = [(label, text, x) for label, text, x in zip(labels, TABLES, tables) if x is not None]
    for label, _, x in present:
        if x.dtype != jnp.int32:
            raise ShapeError(f"{name}: `{label}` is {x}; pass int32.")
    check_shapes(name, (Argument(label, text, x.shape, HINTS.get(label)) for label, text, x in present))


def _check_query(query: ArraySpec, k: ArraySpec, form: Form, latent_dim: int | None) -> None:
    """Checks the dtypes of the query and the pages, and what latent pages hold.

    Raises:
      ShapeError: they do not fit.
    """
    if query.dtype.name not in _QUERY_DTYPES:
        raise ShapeError(
            f"{_NAME}: `query` has dtype {query.dtype.name}; pass one of {', '.join(_QUERY_DTYPES)}, or of "
            f"{', '.join(QUANTIZED)} with `q_scale`."
        )
    if k.dtype != query.dtype and k.dtype.name not in (*_QUERY_DTYPES, *_NARROW):
        raise ShapeError(
            f"{_NAME}: `kv_pages` has dtype {k.dtype.name}; pass the query's {query.dtype.name}, or one of "
            f"{', '.join(_NARROW)}."
        )
    if form == "latent" and k.shape[-1] < query.shape[2]:
        raise ShapeError(
            f"{_NAME}: `query` has head_dim {query.shape[2]}, but latent pages have {k.shape[-1]} columns; pass pages "
            "with as many, or more."
        )
    if (form == "latent") != (latent_dim is not None):
        raise ShapeError(
            f"{_NAME}: `latent_dim` is {latent_dim} with {'latent' if form == 'latent' else 'key and value'} pages of "
            f"shape {k.shape}; pass it for pages of rank 3, and only there: how many leading columns are the value."
        )
    if latent_dim is not None and not 0 < latent_dim <= k.shape[-1]:
        raise ShapeError(
            f"{_NAME}: `latent_dim` is {latent_dim}, but a page has {k.shape[-1]} columns; pass 1 ... {k.shape[-1]}."
        )


def check_window(window: object) -> int | None:
    """How many keys before its own position a query sees, None for all.

    Raises:
      ShapeError: the window has no meaning.
    """
    if isinstance(window, tuple):
        if len(window) != 2 or window[1] not in (0, None):
            raise ShapeError(
                f"{_NAME}: `window` is {window}; queries see no later key, so pass (left, 0), (left, None) or left."
            )
        window = window[0]
    if window is not None and (not isinstance(window, int) or window < 0):
        raise ShapeError(
            f"{_NAME}: `window` is {window!r}; pass how many keys before its own position a query sees (0 or more), or "
            "None."
        )
    return None if window is None else min(window, 2**31 - 1)  # positions are int32


def _check_options(scale: object, softcap: float | None, max_q_len: Any, form: Form, head_dim: int) -> float:
    """The scale.

    Raises:
      ShapeError: an option has no meaning.
    """
    if scale is None:
        if form == "latent":
            raise ShapeError(
                f"{_NAME}: `scale` is None with latent pages, whose width is not that of the heads; pass 1 / "
                "sqrt(head_dim) of the heads before absorption."
            )
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if not isinstance(scale, Real):
        raise ShapeError(
            f"{_NAME}: `scale` is {scale!r}; pass a number (a Python one: it is part of the compiled program), or None."
        )
    if softcap is not None and not (isinstance(softcap, Real) and float(softcap) > 0):
        raise ShapeError(f"{_NAME}: `softcap` is {softcap!r}; pass a number above 0, or None.")
    if max_q_len is not None and (not isinstance(max_q_len, int) or max_q_len < 1):
        raise ShapeError(
            f"{_NAME}: `max_q_len` is {max_q_len!r}; pass a positive int (1 for a step of decoding), or None."
        )
    return float(scale)


def describe(
    arrays: Operands,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    latent_dim: int | None,
    max_q_len: int | None,
    return_lse: bool,
) -> PagedSpec:
    """The spec of a call, which checks it; `arrays` are the `ArraySpec`s of the caller's.

    Raises:
      ShapeError: an argument does not fit the others.
    """
    query, k_pages, v_pages, *tables, _, k_scale, v_scale, slopes, tree_mask = arrays
    form = form_of(k_pages, v_pages)
    check_tables(_NAME, *tables)
    ranks = {len(scale.shape) for scale in (k_scale, v_scale) if scale is not None}
    if len(ranks) > 1:
        raise ShapeError(
            f"{_NAME}: `k_scale` has shape {k_scale.shape} and `v_scale` {v_scale.shape}; pass scales of tokens, or of "
            "heads, for both."
        )
    signature = signature_of(form, return_lse, has_token_scales(arrays))
    signature.check(_NAME, arrays)
    _check_query(query, k_pages, form, latent_dim)
    if slopes is not None and not jnp.issubdtype(slopes.dtype, jnp.floating):
        raise ShapeError(f"{_NAME}: `alibi_slopes` has dtype {slopes.dtype.name}; pass floats.")
    if tree_mask is not None and (tree_mask.dtype != jnp.bool_ or not tree_mask.shape[1]):
        raise ShapeError(
            f"{_NAME}: `tree_mask` is {tree_mask}; pass bool [tokens, columns] of one column at least, True where a "
            "query sees the new token of its own sequence that the column counts."
        )
    tokens, heads, head_dim = query.shape
    window = check_window(window)
    scale = _check_options(scale, softcap, max_q_len, form, head_dim)
    # Latent pages may have more columns than the query, which is padded to them.
    padded = arrays._replace(query=ArraySpec((tokens, heads, k_pages.shape[-1]), query.dtype))
    operands = signature.specs(padded)
    softcap = None if softcap is None else float(softcap)
    most = min(max_q_len or tokens, max(tokens, 1))
    return PagedSpec(operands, form, scale, window, softcap, latent_dim, most, return_lse)


def no_gradient(*_: object) -> NoReturn:
    """The backward pass of the kernels: an error that says what to do instead."""
    raise UnsupportedError(
        "ragged_paged_attention: there is no gradient, for pages are what a served model remembers; train with "
        "`flash_attention`, or pass "
        'implementation="xla", which JAX differentiates itself.'
    )
