"""What a caller may pass to paged attention, checked once for all platforms."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, NoReturn

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.spec import ArraySpec, array_spec, as_array

_QUERY_DTYPES = ("bfloat16", "float16", "float32", "float64")
_NARROW = ("int8", "float8_e4m3fn", "float8_e5m2")


def _array(name: str, x: Any) -> Any:
    """A torch tensor as it is, anything else as a JAX array."""
    return x if gpu.framework(x) == "torch" else as_array(name, "kv_pages", x)


def page_pools(name: str, kv_pages: Any) -> tuple[Any, Any | None, str]:
    """(k_pages, v_pages or None, form) of what the caller passed as `kv_pages`.

    Raises:
      ShapeError: it is none of the three forms.
    """
    if isinstance(kv_pages, (tuple, list)):
        if len(kv_pages) != 2:
            raise ShapeError(f"{name}: `kv_pages` is a tuple of {len(kv_pages)}; pass one array or (k_pages, v_pages).")
        k, v = (_array(name, p) for p in kv_pages)
        if k.ndim != 4 or v.ndim != 4 or k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
            raise ShapeError(
                f"{name}: `k_pages` is {array_spec(k)} and `v_pages` {array_spec(v)}; pass [pages, page_size, kv_heads, dim] of one dtype, alike but in dim."
            )
        return k, v, "separate"
    pages = _array(name, kv_pages)
    if pages.ndim == 3:
        return pages, None, "latent"
    if pages.ndim != 4:
        raise ShapeError(
            f"{name}: `kv_pages` has shape {tuple(pages.shape)}; pass [pages, page_size, 2 * kv_heads, head_dim] with keys and values in turn, (k_pages, v_pages), "
            "or latent pages [pages, page_size, latent_dim + rope_dim]."
        )
    if pages.shape[2] % 2:
        raise ShapeError(
            f"{name}: `kv_pages` has {pages.shape[2]} rows a token; keys and values stand in turn (k0 v0 k1 v1 ...), so it must be even."
        )
    return pages, None, "combined"


def check_tables(name: str, kv_lens: Any, page_indices: Any, cu_q_lens: Any, num_seqs: Any) -> None:
    """Checks the integer arrays that say which queries meet which pages.

    Raises:
      ShapeError: one of them has another shape or dtype than the others ask for.
    """
    kv_lens, page_indices, cu_q_lens = (array_spec(x) for x in (kv_lens, page_indices, cu_q_lens))
    for label, x, rank in (("kv_lens", kv_lens, 1), ("page_indices", page_indices, 2), ("cu_q_lens", cu_q_lens, 1)):
        if len(x.shape) != rank or x.dtype != jnp.int32:
            raise ShapeError(f"{name}: `{label}` is {x}; pass int32 of rank {rank}.")
    sequences = page_indices.shape[0]
    if kv_lens.shape != (sequences,):
        raise ShapeError(
            f"{name}: `kv_lens` has shape {kv_lens.shape}, but `page_indices` has {sequences} rows; pass ({sequences},)."
        )
    if cu_q_lens.shape != (sequences + 1,):
        raise ShapeError(
            f"{name}: `cu_q_lens` has shape {cu_q_lens.shape}, but `page_indices` has {sequences} rows; pass ({sequences + 1},): where each sequence's queries "
            "start, and the end."
        )
    if num_seqs is not None and (num_seqs.shape != (1,) or array_spec(num_seqs).dtype != jnp.int32):
        raise ShapeError(f"{name}: `num_seqs` is {array_spec(num_seqs)}; pass an int, or int32 of shape () or (1,).")


def check_query(
    name: str, query: ArraySpec, k: ArraySpec, v: ArraySpec | None, form: str, latent_dim: int | None
) -> None:
    """Checks the query against the pages.

    Raises:
      ShapeError: their shapes or dtypes do not fit.
    """
    if len(query.shape) != 3:
        raise ShapeError(
            f"{name}: `query` has shape {query.shape}; pass [tokens, heads, head_dim], the sequences' tokens one after another."
        )
    if query.dtype.name not in _QUERY_DTYPES:
        raise ShapeError(f"{name}: `query` has dtype {query.dtype.name}; pass one of {', '.join(_QUERY_DTYPES)}.")
    if k.dtype != query.dtype and k.dtype.name not in (*_QUERY_DTYPES, *_NARROW):
        raise ShapeError(
            f"{name}: `kv_pages` has dtype {k.dtype.name}; pass the query's {query.dtype.name}, or one of {', '.join(_NARROW)}."
        )
    if k.shape[-1] != query.shape[2] and (form != "latent" or k.shape[-1] < query.shape[2]):
        raise ShapeError(
            f"{name}: `query` has head_dim {query.shape[2]}, but a page's keys have {k.shape[-1]}; they must agree."
        )
    heads = {"combined": k.shape[-2] // 2, "separate": k.shape[-2], "latent": 1}[form]
    if heads == 0 or query.shape[1] % heads:
        raise ShapeError(
            f"{name}: `query` has {query.shape[1]} heads and the pages {heads}; the former must be a multiple of the latter."
        )
    if (form == "latent") != (latent_dim is not None):
        raise ShapeError(
            f"{name}: `latent_dim` is {latent_dim} with {'latent' if form == 'latent' else 'key and value'} pages of shape {k.shape}; "
            "pass it for pages of rank 3, and only there: how many leading columns are the value."
        )
    if latent_dim is not None and not 0 < latent_dim <= k.shape[-1]:
        raise ShapeError(
            f"{name}: `latent_dim` is {latent_dim}, but a page has {k.shape[-1]} columns; pass 1 ... {k.shape[-1]}."
        )


def check_options(
    name: str, scale: Any, window: Any, softcap: Any, max_q_len: Any, form: str, head_dim: int
) -> tuple[float, int | None]:
    """(scale, keys seen before the query's own position or None).

    Raises:
      ShapeError: an option has no meaning.
    """
    if scale is None:
        if form == "latent":
            raise ShapeError(
                f"{name}: `scale` is None with latent pages, whose width is not that of the heads; pass 1 / sqrt(head_dim) of the heads before absorption."
            )
        scale = 1.0 / math.sqrt(head_dim) if head_dim else 1.0
    if not isinstance(scale, Real):
        raise ShapeError(
            f"{name}: `scale` is {scale!r}; pass a number (a Python one: it is part of the compiled program), or None."
        )
    if isinstance(window, tuple):
        if len(window) != 2 or window[1] not in (0, None):
            raise ShapeError(
                f"{name}: `window` is {window}; queries see no later key, so pass (left, 0), (left, None) or left."
            )
        window = window[0]
    if window is not None and (not isinstance(window, int) or window < 0):
        raise ShapeError(
            f"{name}: `window` is {window!r}; pass how many keys before its own position a query sees (0 or more), or None."
        )
    if softcap is not None and not (isinstance(softcap, Real) and float(softcap) > 0):
        raise ShapeError(f"{name}: `softcap` is {softcap!r}; pass a number above 0, or None.")
    if max_q_len is not None and (not isinstance(max_q_len, int) or max_q_len < 1):
        raise ShapeError(
            f"{name}: `max_q_len` is {max_q_len!r}; pass a positive int (1 for a step of decoding), or None."
        )
    return float(scale), window


def no_gradient(*_: Any) -> NoReturn:
    """The backward pass of the kernels: an error that says what to do instead."""
    raise UnsupportedError(
        "ragged_paged_attention: there is no gradient, for pages are what a served model remembers; train with `flash_attention`, or pass "
        'implementation="xla", which JAX differentiates itself.'
    )
