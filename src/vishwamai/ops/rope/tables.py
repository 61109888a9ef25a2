"""Tables of cos and sin, and `RotaryCache`, which keeps them for the positions of a whole context.

An angle is `position * frequency`. In float32 that product is off by up to `position * 2^-24` radians, a hundredth at
position 131072. Here the frequency is a fixed-point number of turns, so that whole turns fall out of the integer
product: the angle is right to about 1e-6 up to position 2^24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import as_jax_dtype
from vishwamai.core.types import PyTree
from vishwamai.ops.rope.scaling import MRopeScaling, NtkScaling, RopeScaling, parse_scaling

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_EXACT = 2**24
_MOST_FEATURES = 2**20

DEFAULT_THETA = 10000.0
"""Base of the frequencies where nothing else is said; Su et al., "RoFormer" (2021)."""


def fixed_point(frequencies: np.ndarray) -> np.ndarray:
    """Turns a position, int64 with 48 bits after the point, of radians a position."""
    return np.round(frequencies / (2 * math.pi) * 2.0**48).astype(np.int64)


def _angles(positions: jax.Array, frequencies: np.ndarray, dtype: DTypeLike) -> jax.Array:
    """`position * frequency` up to whole turns, `[..., pairs]`.

    Args:
      positions: integers `[..., pairs or 1]`.
      frequencies: radians a position, float64 `[pairs]`.
    """
    if dtype == jnp.float64:
        return positions.astype(jnp.float64) * frequencies
    turns = fixed_point(frequencies)
    high, low = ((turns >> 16) & 0xFFFFFFFF).astype(np.uint32), (turns & 0xFFFF).astype(np.int32)
    positions = positions.astype(jnp.int32)
    upper, lower = positions >> 16, (positions & 0xFFFF).astype(jnp.uint32)
    fraction = positions.astype(jnp.uint32) * high + (upper * low).astype(jnp.uint32)
    fraction = fraction + ((lower * low.astype(np.uint32)) >> jnp.uint32(16))  # modulo 2^32: a whole turn
    return fraction.astype(jnp.int32).astype(jnp.float32) * np.float32(2 * math.pi / 2.0**32)


def tables(
    positions: jax.Array,
    rotary_dim: int,
    theta: float,
    scaling: RopeScaling,
    dtype: DTypeLike,
    length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, times the scaling's factor, `[..., rotary_dim / 2]` in `dtype`.

    Args:
      positions: integers `[...]`; with `MRopeScaling`, `[3, ...]`.
      length: sequence length, where the caller knows it; else the largest position and one more, found while the
        program runs.
    """
    wide = jnp.float64 if dtype == jnp.float64 else jnp.float32
    if isinstance(scaling, MRopeScaling):
        # Each pair's own coordinate, [..., pairs].
        chosen = jnp.stack([positions[i] for i in range(3)], axis=-1)[..., scaling.coordinates]
    else:
        chosen = positions[..., None]
    threshold = scaling.threshold
    if threshold is None or length is not None:
        angles = _angles(chosen, scaling.frequencies(rotary_dim, theta, length or 0), wide)
    else:
        longest = jnp.max(positions, initial=0) + 1
        short = _angles(chosen, scaling.frequencies(rotary_dim, theta, threshold), wide)
        if isinstance(scaling, NtkScaling):
            # The base itself depends on the length, so these frequencies are the program's own.
            stretch = scaling.factor * longest.astype(wide) / threshold - (scaling.factor - 1)
            power = -np.arange(0, rotary_dim, 2, dtype=np.float64) / (rotary_dim - 2)
            plain = scaling.frequencies(rotary_dim, theta, threshold)
            long = chosen.astype(wide) * (jnp.exp(jnp.log(stretch) * power.astype(wide)) * plain.astype(wide))
        else:
            long = _angles(chosen, scaling.frequencies(rotary_dim, theta, threshold + 1), wide)
        angles = jnp.where(longest > threshold, long, short)
    magnitude = scaling.magnitude
    return (jnp.cos(angles) * magnitude).astype(dtype), (jnp.sin(angles) * magnitude).astype(dtype)


@checked
@jax.tree_util.register_pytree_with_keys_class
class RotaryCache:
    """cos and sin of the positions 0 ... max_positions - 1, computed once: a pytree, so it passes through jit, scan and
    checkpoints.

    A cache for more positions than `LongRopeScaling` or dynamic `NtkScaling` calls original holds the frequencies of
    its whole length for every position, so that keys which were rotated earlier keep fitting those rotated later.

    Attributes:
      cos, sin: `[max_positions, rotary_dim / 2]`, times the scaling's factor.
      head_dim: features of a head.
      theta: base of the frequencies; a dictionary's `rope_theta` where it has one.
      scaling: a `RopeScaling`, or the dictionary of a Hugging Face configuration (`rope_scaling`, or transformers 5's
        `rope_parameters`, whose `rope_theta` and `partial_rotary_factor` count too).
      rotary_dim: how many of a head's first features turn.

    >>> import jax.numpy as jnp
    >>> cache = RotaryCache(64, 100, dtype=jnp.bfloat16)
    >>> cache.cos.shape, cache.grow(300).max_positions
    ((100, 32), 300)
    """

    def __init__(
        self,
        head_dim: int,
        max_positions: int,
        theta: float = DEFAULT_THETA,
        scaling: RopeScaling | Mapping[str, object] | None = None,
        rotary_dim: int | None = None,
        dtype: DTypeLike = jnp.float32,
    ):
        dtype = as_jax_dtype("RotaryCache", "dtype", dtype)
        scaling, rotary_dim, theta = check_frequencies("RotaryCache", head_dim, theta, scaling, rotary_dim)
        if not isinstance(max_positions, int) or not 1 <= max_positions <= _EXACT:
            raise ShapeError(
                f"RotaryCache: `max_positions` is {max_positions!r}; pass a whole number from 1 to {_EXACT}, the "
                "largest position that float32 holds exactly."
            )
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ShapeError(
                f"RotaryCache: `dtype` is {jnp.dtype(dtype).name}; pass a floating-point one, such as float32."
            )
        positions = jnp.arange(max_positions, dtype=jnp.int32)
        # A position has one coordinate here; which one a pair follows is chosen when the cache is read.
        plain = RopeScaling() if isinstance(scaling, MRopeScaling) else scaling
        self.cos, self.sin = tables(positions, rotary_dim, theta, plain, jnp.dtype(dtype), max_positions)
        self.head_dim, self.theta, self.scaling, self.rotary_dim = head_dim, theta, scaling, rotary_dim

    def tree_flatten_with_keys(self) -> tuple[PyTree, PyTree]:
        keys = (jax.tree_util.GetAttrKey("cos"), self.cos), (jax.tree_util.GetAttrKey("sin"), self.sin)
        return keys, (self.head_dim, self.theta, self.scaling, self.rotary_dim)

    @classmethod
    def tree_unflatten(cls, static: PyTree, arrays: PyTree) -> RotaryCache:
        cache = object.__new__(cls)
        cache.cos, cache.sin = arrays
        cache.head_dim, cache.theta, cache.scaling, cache.rotary_dim = static
        return cache

    def __repr__(self) -> str:
        return (
            f"RotaryCache({self.head_dim}, cos={self.cos}, theta={self.theta}, scaling={self.scaling}, "
            f"rotary_dim={self.rotary_dim})"
        )

    @property
    def max_positions(self) -> int:
        """How many positions it holds."""
        return self.cos.shape[-2]

    def grow(self, max_positions: int) -> RotaryCache:
        """A cache for at least `max_positions`: itself where it is long enough, else a new one, of exactly that
        length.
        """
        if max_positions <= self.max_positions:
            return self
        return RotaryCache(self.head_dim, max_positions, self.theta, self.scaling, self.rotary_dim, self.cos.dtype)


def read(scaling: RopeScaling, table: jax.Array, positions: jax.Array) -> jax.Array:
    """Rows of a cache's table at `positions` (`[3, ...]` with `MRopeScaling`), `[..., pairs]`; NaN at positions that it
    does not hold.
    """

    def rows(index: jax.Array) -> jax.Array:
        index = jnp.where(index < 0, table.shape[0], index)  # a negative index would count from the end
        return table.at[index].get(mode="fill", fill_value=jnp.nan)

    if not isinstance(scaling, MRopeScaling):
        return rows(positions)
    time, height, width = (rows(positions[i]) for i in range(3))
    return jnp.where(scaling.coordinates == 0, time, jnp.where(scaling.coordinates == 1, height, width))


def check_frequencies(
    name: str, head_dim: int, theta: Any, scaling: Any, rotary_dim: Any
) -> tuple[RopeScaling, int, float]:
    """The parsed scaling, the number of rotated features, and the base of the frequencies.

    A dictionary may bring the last two (`partial_rotary_factor`, `rope_theta`), as those of transformers 5 do.

    Raises:
      ShapeError: one of them is not legal; the text names it, its value and the fix.
    """
    if isinstance(scaling, Mapping):
        theta, rotary_dim = _of_dictionary(name, head_dim, theta, scaling, rotary_dim)
    if head_dim > _MOST_FEATURES:
        raise ShapeError(f"{name}: head_dim is {head_dim}; pass {_MOST_FEATURES} at most.")
    if rotary_dim is None:
        rotary_dim = head_dim
        if head_dim % 2 or head_dim < 2:
            raise ShapeError(
                f"{name}: head_dim is {head_dim}, which is not made of pairs; pass an even `rotary_dim` below it."
            )
    if not isinstance(rotary_dim, int) or rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ShapeError(
            f"{name}: `rotary_dim` is {rotary_dim!r}; pass an even number from 2 to head_dim = {head_dim}."
        )
    if not (isinstance(theta, (int, float)) and theta > 1):
        raise ShapeError(f"{name}: `theta` is {theta!r}; pass a number above 1, such as 10000.0.")
    parsed = parse_scaling(scaling)
    parsed.check(rotary_dim)
    return parsed, rotary_dim, float(theta)


def _of_dictionary(
    name: str, head_dim: int, theta: object, scaling: Mapping[str, object], rotary_dim: object
) -> tuple[Any, Any]:
    """theta and rotary_dim, where the dictionary states them and the caller does not say otherwise."""
    base, share = scaling.get("rope_theta"), scaling.get("partial_rotary_factor")
    if base is not None:
        if theta not in (DEFAULT_THETA, base):
            raise ShapeError(
                f"{name}: `theta` is {theta!r}, but `scaling` has rope_theta = {base!r}; pass one of them, or the same."
            )
        theta = base
    if share is not None:
        if not (isinstance(share, (int, float)) and 0 < share <= 1):
            raise ShapeError(
                f"{name}: `scaling` has partial_rotary_factor = {share!r}; pass a share above 0 and up to 1."
            )
        rotated = int(head_dim * share)
        if rotary_dim not in (None, rotated):
            raise ShapeError(
                f"{name}: `rotary_dim` is {rotary_dim!r}, but `scaling` has partial_rotary_factor = {share!r}, which "
                f"is {rotated} of {head_dim} features; pass one of them, or the same."
            )
        rotary_dim = rotated
    return theta, rotary_dim
