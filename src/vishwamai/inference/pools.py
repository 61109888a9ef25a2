"""The pools of keys and values, in floats or, with scales, in 8 bits, and of states on the device.

On a CPU, a quantized pool has a scale for each token and each head of keys and of values, which is written with the
token. Elsewhere, whose kernels read one scale for each head, it has one for each layer and head. Those are measured
once, before the first request: a few tokens go through the model with pools of floats, and the largest magnitudes
found, times a margin, become the ends of the range. What is larger later is clipped to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.inference import kept_programs
from vishwamai.inference.sharding import gathered, on_mesh, place_of, place_pool, put
from vishwamai.models.minilm import sentences
from vishwamai.models.pages import (
    PagedBatch,
    QuantizedPages,
    page_shapes,
    pages_of,
    scale_heads,
    scale_shape,
    with_pages,
)

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.typing import DTypeLike

    from vishwamai.models import Decoder
    from vishwamai.models.tokenizer import Tokenizer

KV_DTYPES: dict[str, DTypeLike] = {
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": jnp.float16,
    "int8": jnp.int8,
    "fp8": jnp.float8_e4m3fn,
}
"""Names of the dtypes of keys and values."""

_MARGIN = {"int8": 1.25, "float8_e4m3fn": 2.0}
"""Over the largest magnitude measured. A float loses no precision by it; int8 loses a third of a bit."""


def kv_dtype_of(name: DTypeLike | None) -> jnp.dtype:
    """The dtype of keys and values, from a name or a dtype.

    Raises:
      UnsupportedError: keys and values of that dtype are not served.

    >>> kv_dtype_of("fp8"), kv_dtype_of("bfloat16")
    (dtype(float8_e4m3fn), dtype(bfloat16))
    """
    dtype_or_name = KV_DTYPES.get(name) if isinstance(name, str) else name
    try:
        dtype = None if dtype_or_name is None else jnp.dtype(dtype_or_name)
    except TypeError:
        dtype = None
    if dtype is None or dtype not in [jnp.dtype(supported) for supported in KV_DTYPES.values()]:
        raise UnsupportedError(f"`kv_dtype` is {name!r}; pass {', '.join(KV_DTYPES)}.")
    return dtype


def make_pools(
    model: Decoder,
    page_size: int,
    num_pages: int,
    dtype: jnp.dtype,
    tokens: Sequence[int],
    mesh: Mesh | None = None,
    window_pages: Mapping[int, int] | None = None,
    num_states: int = 0,
) -> tuple[PyTree, ...]:
    """Empty pools, as `Decoder.step` takes them.

    Args:
      page_size: tokens of a page.
      num_pages: pages of one layer.
      dtype: result of `kv_dtype_of`.
      tokens: sample that the scales of layers and heads are measured on.
      mesh: mesh of the model (`mesh.place_model`).
      window_pages: pages of one layer with that window, in place of `num_pages`.
      num_states: slots of one layer with a state.

    Raises:
      UnsupportedError: a key or a value of `tokens` is not finite, so that it has no scale.
    """
    by_token = scales_by_token(dtype, next(iter(jax.tree.leaves(model)[0].sharding.device_set)).platform == "cpu")
    sizes: dict[str, Any] = {"page_size": page_size, "stacked": model.stacked}
    counts: dict[str, Any] = {"num_pages": num_pages, "window_pages": window_pages, "num_states": num_states}
    shapes = page_shapes(model.config, dtype=dtype, **counts, **sizes)
    if by_token:
        shapes = tuple(map(with_token_scales, shapes))
    abstract = place_of(model)
    pools = _empty(model, shapes, mesh) if abstract is None else shapes  # described devices have no memory to fill
    if by_token or dtype.itemsize > 1:  # 16 bits and more need no scale
        return pools if abstract is None else _described(model, pools, mesh, abstract)
    if abstract is not None:
        single = page_shapes(model.config, dtype=dtype, num_pages=1, num_states=1, **sizes)
        return _described(model, map(with_scales, pools, single), mesh, abstract)
    most = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    # in floats, through pages as a request's: the rotation is then part of what is measured
    largest = _largest(model, page_size, tokens, mesh)
    if not all(np.isfinite(array).all() for array in jax.tree.leaves(largest)):
        raise UnsupportedError("keys or values of this model are not finite and have no scale; serve it in floats.")
    factor = _MARGIN[dtype.name] / most
    # Heads whose sample is all zeros get 1.0: a scale of 0 would divide by zero.
    scales = jax.tree.map(lambda array: jnp.where(array > 0, factor * array, 1.0), largest)
    return tuple(
        pool
        if pair is None
        else place_pool(model.config, with_pages(pool, QuantizedPages(pages_of(pool), *pair)), mesh)
        for pool, pair in zip(pools, scales)
    )


def scales_by_token(dtype: DTypeLike, on_cpu: bool) -> bool:
    """Whether pools of that dtype have a scale for each token and head."""
    return on_cpu and jnp.dtype(dtype).itemsize == 1


def calibration_tokens(vocab: int, most: int, tokenizer: Tokenizer | None) -> list[int]:
    """Tokens on which the largest keys and values are measured: of sentences, or random without a tokenizer.

    >>> len(calibration_tokens(vocab=100, most=8, tokenizer=None))
    8
    """
    if tokenizer is not None:
        return tokenizer.encode(" ".join(sentences()[:32]))[:most]
    return np.random.default_rng(0).integers(0, vocab, most).tolist()


def _empty(model: Decoder, shapes: Sequence[PyTree], mesh: Mesh | None) -> tuple[PyTree, ...]:
    if mesh is None:
        leaves, tree = jax.tree.flatten(tuple(shapes))
        return jax.tree.unflatten(tree, zeros(leaves))
    return tuple(
        place_pool(model.config, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape), mesh) for shape in shapes
    )


def zeros(shapes: Sequence[PyTree]) -> tuple[jax.Array, ...]:
    """Arrays of zeros, by one program, which is kept.

    The zeros of each dtype are arguments: of a constant, XLA makes a fill that one core of a CPU does alone.
    """
    dtypes = list(dict.fromkeys(shape.dtype for shape in shapes))
    zeros_of = [jax.device_put(np.zeros((), dtype), may_alias=False) for dtype in dtypes]
    sizes = tuple((shape.shape, dtypes.index(shape.dtype)) for shape in shapes)
    return kept_programs.compiled(jax.jit(partial(_filled, shapes=sizes)), (zeros_of,))(zeros_of)


def _described(model: Decoder, pools: Iterable[PyTree], mesh: Mesh | None, place: object) -> tuple[PyTree, ...]:
    """Shapes of pools, on devices that need not be there."""
    return tuple(put(pool, place) if mesh is None else place_pool(model.config, pool, mesh) for pool in pools)


def with_scales(pool: PyTree, layers: PyTree) -> PyTree:
    """The shape of a pool of 8 bits with its scales; `layers`: that of one page of each layer."""
    pages = pages_of(pool)
    if pages is None:
        return pool
    scale: PyTree = jax.ShapeDtypeStruct((pages_of(layers).shape[0], scale_heads(pages.shape[2:])), jnp.float32)
    return with_pages(pool, QuantizedPages(pages, scale, scale))


def with_token_scales(pool: PyTree) -> PyTree:
    """The shape of a pool of 8 bits with a scale for each token and head; latent pages have one for key and value."""
    pages = pages_of(pool)
    if pages is None:
        return pool
    scale: PyTree = jax.ShapeDtypeStruct(scale_shape(pages.shape), jnp.float32)
    return with_pages(pool, QuantizedPages(pages, scale, scale if len(pages.shape) > 3 else None))


def _filled(values: Sequence[jax.Array], *, shapes: Sequence[tuple[tuple[int, ...], int]]) -> tuple[PyTree, ...]:
    return tuple(jnp.full(shape, values[place]) for shape, place in shapes)


def _largest(
    model: Decoder, page_size: int, tokens: Sequence[int], mesh: Mesh | None
) -> list[tuple[jax.Array, jax.Array] | None]:
    """The largest magnitudes of keys and of values, each `[layers of the pool, heads]`, of each pool; None of one of
    states.
    """
    count = len(tokens)
    pages = -(-count // page_size)
    sizes: dict[str, Any] = {"num_pages": pages, "num_states": 1, "page_size": page_size}
    shapes = page_shapes(model.config, dtype=model.dtype, stacked=model.stacked, **sizes)
    table = jnp.arange(pages, dtype=jnp.int32)[None]  # one sequence, whose pages are all there are
    kv_lens, ends = jnp.array([count], jnp.int32), jnp.array([0, count], jnp.int32)
    batch = PagedBatch(kv_lens, table, ends, count, states=jnp.zeros((2, 1), jnp.int32))

    def of(pool: PyTree) -> tuple[jax.Array, jax.Array] | None:
        pool = pages_of(pool)
        if pool is None:
            return None
        rows = jnp.abs(pool.astype(jnp.float32))
        rows = rows.reshape(pool.shape[0] // pages, pages * pool.shape[1], *pool.shape[2:])
        if rows.ndim == 3:  # latent rows, which are key and value at once
            maxima = rows.max(axis=(1, 2))[:, None]  # [layers, 1]
            return maxima, maxima
        maxima = rows.max(axis=(1, 3), initial=0.0)  # key and value of each head in turn; layers may have no features
        return maxima[:, 0::2], maxima[:, 1::2]  # [layers, heads] each

    @jax.jit
    def measure(model: Decoder, pools: PyTree, tokens: jax.Array) -> list[tuple[jax.Array, jax.Array] | None]:
        _, pools = model.step(tokens, pools, batch)
        return [of(gathered(pool, mesh)) for pool in pools]

    with on_mesh(mesh):
        maxima = measure(model, _empty(model, shapes, mesh), jnp.asarray(tokens, jnp.int32))
    return jax.device_get(maxima)
