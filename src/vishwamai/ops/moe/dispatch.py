"""Tokens to experts and back: rows sorted by expert, with or without a capacity.

Both directions, and the gradients of both, are gathers: the gradient of "copy token t to its k rows" is "sum those k
rows", which the table of places gives, where JAX's own transpose of a gather would add up row after row in memory.
"""

from __future__ import annotations

import functools
import math
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checked, checks_its_own
from vishwamai.core.arrays import bincount, cast, fetched, inverse, namespace, numbers
from vishwamai.core.errors import ShapeError
from vishwamai.core.promotion import by_default
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import as_array, at_least_1
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.core.value_checks import check_values
from vishwamai.ops.moe.routing import Routing

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float


class Dispatch(NamedTuple):
    """Tokens laid out by expert.

    Attributes:
      rows: `[R, d]`, the tokens of expert 0, then of expert 1 ...; with a capacity C each expert has C rows, zeros
        where it has fewer tokens.
      group_sizes: `[E]` int32, rows of each expert.
      choice: `[R]` int32, which choice stands in each row: token * k + rank; T * k where none does.
      place: `[T, k]` int32, the row of each choice; R where it was dropped.
      dropped: scalar int32, choices that found no row.
    """

    rows: AnyArray
    group_sizes: AnyArray
    choice: AnyArray
    place: AnyArray
    dropped: AnyArray


@jax.custom_vjp
def permute(tokens: jax.Array, choice: jax.Array, place: jax.Array) -> jax.Array:
    """`[R, d]`: each row the token `[T, d]` that its choice belongs to, zeros for none."""
    return fetched(tokens, choice // place.shape[1])


@jax.custom_vjp
def unpermute(rows: jax.Array, choice: jax.Array, place: jax.Array) -> jax.Array:
    """`[T, k, d]`: the row of each choice, zeros for a dropped one."""
    return fetched(rows, place)


def _permute_fwd(tokens: jax.Array, choice: jax.Array, place: jax.Array) -> PyTree:
    return permute(tokens, choice, place), (choice, place)


def _permute_bwd(saved: PyTree, g: jax.Array) -> PyTree:
    choice, place = saved
    # A gather and a sum over k, not a scatter: each choice knows its row.
    total = fetched(g, place).astype(jnp.promote_types(g.dtype, jnp.float32)).sum(axis=1).astype(g.dtype)
    return total, None, None


def _unpermute_fwd(rows: jax.Array, choice: jax.Array, place: jax.Array) -> PyTree:
    return unpermute(rows, choice, place), (choice, place)


def _unpermute_bwd(saved: PyTree, g: jax.Array) -> PyTree:
    choice, place = saved
    return fetched(g.reshape(-1, g.shape[-1]), choice), None, None


permute.defvjp(by_default(_permute_fwd), by_default(_permute_bwd))
unpermute.defvjp(by_default(_unpermute_fwd), by_default(_unpermute_bwd))


def capacity_of(tokens: int, top_k: int, experts: int, capacity_factor: float) -> int:
    """Rows of each expert: `capacity_factor` times its even share of the choices, rounded up, but no more
    than there are choices.
    """
    if not isinstance(tokens, int):
        raise ShapeError(
            f"moe_dispatch: `capacity_factor` is {capacity_factor}, and the number of tokens is a symbol of "
            f"jax.export, {tokens}; pass capacity_factor=None, or export with a known number of tokens."
        )
    return max(1, min(tokens * top_k, math.ceil(capacity_factor * tokens * top_k / experts)))


@checks_its_own("routing")
def moe_dispatch(
    tokens: Float[Array, "*tokens d"], routing: Routing, *, capacity_factor: float | None = None
) -> Dispatch:
    """Sorts the tokens by the experts that they chose.

    Without a capacity no token is dropped: T * k rows, ready for `grouped_gemm`. With one, each expert takes the first
    `ceil(capacity_factor * T * k / E)` that chose it (first choices before second ones, then in the tokens' order) and
    the others are dropped: Lepikhin et al., "GShard" (2020), Fedus et al., "Switch Transformers" (2021).

    Args:
      tokens: `[..., d]`, the T tokens that `routing` was made of.
      routing: result of `moe_routing`.
      capacity_factor: None to drop nothing.

    Returns:
      A `Dispatch`.

    Raises:
      ShapeError: `tokens` are not those of `routing`, or the factor is not positive. An expert that there is not is one
        where its value is known; inside a program `KernelConfig(checks=True)` checks it.

    >>> import jax.numpy as jnp
    >>> from vishwamai import moe_routing
    >>> tokens = jnp.eye(3)[jnp.array([2, 0, 2])]
    >>> dispatch = moe_dispatch(tokens, moe_routing(tokens, 9 * jnp.eye(3), top_k=1))
    >>> dispatch.group_sizes.tolist(), dispatch.place[:, 0].tolist()
    ([1, 0, 2], [1, 0, 2])
    >>> int(moe_dispatch(tokens, moe_routing(tokens, 9 * jnp.eye(3), top_k=1), capacity_factor=1.0).dropped)
    1
    """
    tokens = as_array("moe_dispatch", "tokens", tokens)
    check_dispatch(tokens, routing, capacity_factor)
    count, top_k = routing.experts.shape
    experts = routing.expert_counts.shape[0]
    check_values(functools.partial(check_experts, experts=experts), routing.experts)
    capacity = None if capacity_factor is None else capacity_of(count, top_k, experts, capacity_factor)

    def dispatch(tokens: AnyArray, chosen: AnyArray) -> Dispatch:
        group_sizes, choice, place, dropped = sort_choices(chosen, experts, capacity)
        rows = permute(tokens.reshape(-1, tokens.shape[-1]), choice, place)
        return Dispatch(rows, group_sizes, choice, place, dropped)

    results = Dispatch((None, None), (None,), (None,), (None, None), ())
    arrays = tokens, routing.experts
    return follow_explicit_axes(dispatch, lambda: _gathered(arrays, results), *arrays)


def _gathered(arrays: tuple[Any, ...], results: PyTree) -> Axes:
    """On explicit mesh axes: what is split is gathered, for any token may go to any row."""
    return Axes(tuple((None,) * x.ndim for x in arrays), results, frozenset())


def check_experts(chosen: np.ndarray, *, experts: int) -> None:
    """Raises ShapeError where a token has chosen an expert that there is not."""
    wrong = (chosen < 0) | (chosen >= experts)
    if wrong.any():
        first = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ShapeError(
            f"moe_dispatch: `routing.experts` holds {chosen[first]} at {list(first)}, but there are {experts} experts; "
            f"pass numbers from 0 to {experts - 1}."
        )


def check_dispatch(tokens: AnyArray, routing: object, capacity_factor: object) -> None:
    """Raises ShapeError where the arguments of `moe_dispatch`, arrays of any framework, contradict one another."""
    if not isinstance(routing, Routing):
        raise ShapeError(
            f"moe_dispatch: `routing` is of type {type(routing).__name__}; pass what `moe_routing` returned."
        )
    if not tokens.ndim or not tokens.shape[-1]:
        raise ShapeError(
            f"moe_dispatch: `tokens` has shape {tuple(tokens.shape)}, without features; pass [..., d], the tokens "
            "that `routing` was made of."
        )
    token_count, count = math.prod(tokens.shape[:-1]), routing.experts.shape[0]
    if token_count != count:
        raise ShapeError(
            f"moe_dispatch: `tokens` of shape {tuple(tokens.shape)} are {token_count} tokens, but `routing` is of "
            f"{count}; pass the tokens it was made of."
        )
    if capacity_factor is not None and not (
        isinstance(capacity_factor, Real) and 0 < float(capacity_factor) < math.inf
    ):
        raise ShapeError(f"moe_dispatch: `capacity_factor` is {capacity_factor!r}; pass a positive number, or None.")


def sort_choices(
    chosen: AnyArray, bins: int, capacity: int | None, sizes: AnyArray = None
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray]:
    """(group_sizes, choice, place, dropped) of a `Dispatch`, for choices `[T, k]` of one of `bins` each; arrays of JAX
    or torch. `sizes` is how many chose each, where the caller knows it.
    """
    xp = namespace(chosen)
    count, top_k = chosen.shape
    total = count * top_k
    flat = chosen.T.reshape(-1)  # all first choices, then all second ones
    order = xp.argsort(flat, stable=True)
    sizes = bincount(flat, bins) if sizes is None else sizes
    ranks = inverse(order)
    divisor = at_least_1(count)
    choice = cast(order % divisor * top_k + order // divisor, "int32")  # from rank * T + token to token * k + rank
    if capacity is None:
        return sizes, choice, cast(ranks.reshape(top_k, count).T, "int32"), cast(xp.zeros_like(sizes[0]), "int32")
    starts = xp.cumsum(sizes, 0, dtype=sizes.dtype) - sizes
    rank = ranks - starts[flat]  # place of each choice within its bin
    place = cast(xp.where(rank < capacity, flat * capacity + rank, bins * capacity), "int32")
    slot = numbers(capacity, flat)
    source = starts[:, None] + slot  # [bins, capacity]: where in the order each slot's choice stands
    padded = fetched(choice, xp.where(slot < sizes[:, None], source, total), total).reshape(-1)
    dropped = cast(xp.clip(sizes - capacity, 0, None).sum(), "int32")
    return xp.full_like(sizes, capacity), padded, place.reshape(top_k, count).T, dropped


@checked
def moe_combine(rows: Float[Array, "R d"], dispatch: Dispatch, routing: Routing) -> Float[Array, "T d"]:
    """Each token's weighted sum of what its experts returned; a dropped choice counts as zero.

    Args:
      rows: `[R, d]`, the experts' results in the order of `dispatch.rows`.
      dispatch: result of `moe_dispatch`.
      routing: result of `moe_routing`.

    Returns:
      `[T, d]` in the dtype of `rows`; sums are float32 (float64 for float64).

    >>> import jax.numpy as jnp
    >>> from vishwamai import moe_routing
    >>> tokens = jnp.array([[1.0, 2.0], [3.0, 1.0]])
    >>> routing = moe_routing(tokens, jnp.eye(2), top_k=2)
    >>> moe_combine(moe_dispatch(tokens, routing).rows, moe_dispatch(tokens, routing), routing).tolist()
    [[1.0, 2.0], [3.0, 1.0]]
    """
    rows = as_array("moe_combine", "rows", rows)
    check_combine(rows, dispatch, routing)
    wide = jnp.promote_types(rows.dtype, jnp.float32)

    def combine(rows: AnyArray, choice: AnyArray, place: AnyArray, weights: AnyArray) -> AnyArray:
        choice_rows = unpermute(rows, choice, place).astype(wide)
        return jnp.einsum("tkd,tk->td", choice_rows, weights.astype(wide), precision="highest").astype(rows.dtype)

    arrays = rows, dispatch.choice, dispatch.place, routing.weights
    return follow_explicit_axes(combine, lambda: _gathered(arrays, (None, None)), *arrays)


def check_combine(rows: AnyArray, dispatch: Any, routing: object) -> None:
    """Raises ShapeError where the arguments of `moe_combine`, arrays of any framework, contradict one another."""
    for name, value, kind, maker in (
        ("dispatch", dispatch, Dispatch, "moe_dispatch"),
        ("routing", routing, Routing, "moe_routing"),
    ):
        if not isinstance(value, kind):
            raise ShapeError(f"moe_combine: `{name}` is of type {type(value).__name__}; pass what `{maker}` returned.")
    if len(rows.shape) != 2 or tuple(rows.shape[:1]) != tuple(dispatch.choice.shape[:1]):
        raise ShapeError(
            f"moe_combine: `rows` has shape {tuple(rows.shape)}, but `dispatch` has {dispatch.choice.shape[0]} rows; "
            "pass the results in the order of `dispatch.rows`."
        )
