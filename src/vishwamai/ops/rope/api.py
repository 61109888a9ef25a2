"""The public rotary embedding: `apply_rope`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import array_spec, as_array
from vishwamai.core.types import AnyArray
from vishwamai.ops.rope.cpu import NATIVE
from vishwamai.ops.rope.gpu import TRITON
from vishwamai.ops.rope.reference import XLA
from vishwamai.ops.rope.scaling import MRopeScaling, RopeScaling
from vishwamai.ops.rope.spec import (
    CACHED,
    SIGNATURES,
    Cached,
    Operands,
    RopeSpec,
    check,
    check_positions,
    needs_separate_calls,
)
from vishwamai.ops.rope.tables import DEFAULT_THETA, RotaryCache, check_frequencies, read, tables
from vishwamai.ops.rope.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int

ROPE: Op[RopeSpec] = Op("rope", (PALLAS_TPU, TRITON, NATIVE, XLA), split="batch heads seq")


@overload
def apply_rope(
    x: Float[Array, "batch heads seq head_dim"],
    positions: Int[Array, "*coordinate_batch seq"] | None = None,
    *,
    cache: RotaryCache | None = None,
    theta: float = DEFAULT_THETA,
    scaling: RopeScaling | Mapping[str, object] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "batch heads seq head_dim"]: ...


@overload
def apply_rope(
    x: tuple[Float[Array, "batch heads seq head_dim"], Float[Array, "batch kv_heads seq head_dim"]],
    positions: Int[Array, "*coordinate_batch seq"] | None = None,
    *,
    cache: RotaryCache | None = None,
    theta: float = DEFAULT_THETA,
    scaling: RopeScaling | Mapping[str, object] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    config: object = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch heads seq head_dim"], Float[Array, "batch kv_heads seq head_dim"]]: ...


@checked
def apply_rope(
    x: Any,
    positions: Int[Array, "*coordinate_batch seq"] | None = None,
    *,
    cache: RotaryCache | None = None,
    theta: float = DEFAULT_THETA,
    scaling: RopeScaling | Mapping[str, object] | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
    config: object = None,
    implementation: str | None = None,
) -> Any:
    """Rotary position embedding of queries, or of queries and keys in one pass over memory.

    Pair i of a head's features, (a, b), at position p becomes `(a cos - b sin, b cos + a sin)` of the angle
    `p * theta^(-2 i / rotary_dim)`. Su et al., "RoFormer" (2021). Its gradient is the rotation by the opposite angle.

    Args:
      x: `[batch, heads, seq, head_dim]`, or a pair (query, key) of such arrays, which may differ in heads only.
        bfloat16, float16, float32 or float64; the rotation is float32 (float64 for float64) and rounded once.
      positions: integers `[seq]` or `[batch, seq]`; `[3, batch, seq]` (time, height, width) with `MRopeScaling`. None
        counts from 0.
      cache: tables made beforehand by `RotaryCache`, which then brings theta, scaling and rotary_dim. Where a position
        is not in it, the result is NaN.
      theta: base of the frequencies; a dictionary's `rope_theta` where it has one.
      scaling: `LinearScaling`, `NtkScaling`, `Llama3Scaling`, `YarnScaling`, `LongRopeScaling`, `MRopeScaling`
        (Qwen2-VL's, or Qwen3-VL's with `interleaved=True`), or the dictionary of a Hugging Face configuration:
        `rope_scaling`, or transformers 5's `rope_parameters`, whose `rope_theta` and `partial_rotary_factor` count too.
        Where frequencies depend on the length of the sequence, it is the largest position and one more.
      rotary_dim: how many of a head's first features turn (even); None for all.
      interleaved: pairs are neighbours (GPT-J, DeepSeek); else feature i turns with feature i + rotary_dim / 2
        (GPT-NeoX, Llama).
      layout: axes of the arrays: "bhsd", or "bshd" for `[batch, seq, heads, head_dim]`.
      config: tiles (a `RopeConfig`), a block size in positions, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      Like `x`: an array, or a pair.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    >>> print(apply_rope(x, jnp.array([1]), theta=100.0).ravel().tolist())
    [-1.984, 1.591, 2.462, 4.180]
    >>> query, key = apply_rope((jnp.ones((1, 4, 8, 64)), jnp.ones((1, 2, 8, 64))), cache=RotaryCache(64, 8))
    >>> key.shape
    (1, 2, 8, 64)
    """
    pair = isinstance(x, (tuple, list))
    if pair and len(x) != 2:
        raise ShapeError(f"apply_rope: `x` is a sequence of {len(x)}; pass an array, or a pair (query, key).")
    query, key = (as_array("apply_rope", "x", a) for a in x) if pair else (as_array("apply_rope", "x", x), None)
    specs = array_spec(query), None if key is None else array_spec(key)
    check(*specs, layout)
    if key is not None and needs_separate_calls(*specs, layout):
        options: dict[str, Any] = {"cache": cache, "theta": theta, "scaling": scaling, "rotary_dim": rotary_dim}
        options |= {"interleaved": interleaved, "layout": layout}
        options |= {"config": config, "implementation": implementation}
        return apply_rope(query, positions, **options), apply_rope(key, positions, **options)
    batch, head_dim = query.shape[0], query.shape[3]
    length = query.shape[2 if layout == "bhsd" else 1]
    parsed_scaling, rotary_dim, theta = _frequencies(cache, head_dim, theta, scaling, rotary_dim)
    coordinates = isinstance(parsed_scaling, MRopeScaling)
    check_positions(positions, batch, length, coordinates)
    if positions is not None:
        positions = jnp.asarray(positions)
        axes = 3 if coordinates and positions.ndim == 3 else 2
        positions = positions.reshape((1,) * (axes - positions.ndim) + positions.shape)  # [(3,) B or 1, T]
        if coordinates and positions.ndim == 2:
            positions = jnp.broadcast_to(positions, (3, *positions.shape))

    run = {"config": config, "implementation": implementation}
    if cache is None or positions is None:
        tables = _tables(cache, positions, length, query.dtype, parsed_scaling, rotary_dim, theta)
        arrays = Operands(query, key, *tables)
        spec = RopeSpec(array_specs(arrays), interleaved, layout)
        outputs = public_call(ROPE, SIGNATURES[layout], spec, arrays, **run)
    else:

        def rows(cached: Cached) -> Operands:
            *heads, cos, sin, positions = cached
            return Operands(*heads, *(read(parsed_scaling, values, positions) for values in (cos, sin)))

        cached = Cached(query, key, cache.cos, cache.sin, positions)
        spec = RopeSpec(Operands(*array_specs(cached)[:4]), interleaved, layout)
        outputs = public_call(ROPE, CACHED[layout, coordinates], spec, cached, pack=rows, **run)
    return tuple(outputs) if pair else outputs.query


def _frequencies(
    cache: object, head_dim: int, theta: float, scaling: object, rotary_dim: object
) -> tuple[RopeScaling, int, float]:
    """The scaling, the number of rotated features and the base: the cache's, or the caller's."""
    if cache is None:
        return check_frequencies("apply_rope", head_dim, theta, scaling, rotary_dim)
    if not isinstance(cache, RotaryCache):
        raise ShapeError(f"apply_rope: `cache` is a {type(cache).__name__}; pass a `RotaryCache`, or None.")
    for name, value, unset in (
        ("theta", theta, DEFAULT_THETA),
        ("scaling", scaling, None),
        ("rotary_dim", rotary_dim, None),
    ):
        if isinstance(value, np.ndarray) or value != unset:
            raise ShapeError(
                f"apply_rope: `{name}` is {value!r} beside a `cache`, which brings its own; pass `{name}` to "
                "`RotaryCache` instead."
            )
    if cache.head_dim != head_dim:
        raise ShapeError(
            f"apply_rope: `cache` was made for head_dim {cache.head_dim}, but `x` has {head_dim} features; make it "
            f"`RotaryCache({head_dim}, ...)`."
        )
    return cache.scaling, cache.rotary_dim, cache.theta


def _tables(
    cache: RotaryCache | None,
    positions: AnyArray,
    length: int,
    dtype: DTypeLike,
    scaling: RopeScaling,
    rotary_dim: int,
    theta: float,
) -> tuple[AnyArray, AnyArray]:
    """cos and sin, `[B or 1, T, P]`: the first rows of the cache, or computed."""
    if cache is not None:
        if length > cache.max_positions:
            raise ShapeError(
                f"apply_rope: `cache` holds {cache.max_positions} positions, but `x` has {length}; pass "
                f"`cache.grow({length})`."
            )
        return cache.cos[None, :length], cache.sin[None, :length]
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    if positions is not None:
        return tables(positions, rotary_dim, theta, scaling, wide)
    positions_row = jnp.arange(length, dtype=jnp.int32)[None]
    plain = RopeScaling() if isinstance(scaling, MRopeScaling) else scaling
    return tables(positions_row, rotary_dim, theta, plain, wide, length)
