"""Grouped products of rows that travel between the devices of experts, in pieces whose transfers hide behind products.

Every device has rows for every other one. A piece goes straight from one device to another, all devices to the one
`distance` places on at once. A device multiplies its own piece while the first ones are under way, and then each piece
as it arrives; results go back alike. He et al., "FasterMoE" (2022) and Hwang et al., "Tutel" (2023) cut the exchange of
experts into pieces.

The gradient of each way is the other one: gradients of results arrive in pieces, and gradients of rows leave in pieces.
The weights' gradient is one product of the rows of all pieces, sorted by expert, so no piece is rounded by itself.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.promotion import by_default
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.sharding import match_varying
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.core.weight import Weight
from vishwamai.ops.moe.api import grouped_gemm
from vishwamai.ops.moe.dispatch import permute, unpermute
from vishwamai.ops.moe.exchange.transport import by_expert

if TYPE_CHECKING:
    from jax.typing import DTypeLike


Weights = tuple[tuple[object, object], ...]
"""Pairs (matrices `[experts, in, out]`, bias `[experts, out]` or None) that multiply the same rows."""


@dataclasses.dataclass(frozen=True)
class Pieces:
    """What is static about an exchange in pieces; for use inside `shard_map`.

    Attributes:
      axis: the mesh axis. size: how many devices it has.
      config, implementation, out_dtype: options of the grouped products.
    """

    axis: str
    size: int
    config: object = None
    implementation: str | None = None
    out_dtype: Any = None

    @property
    def distances(self) -> tuple[int, ...]:
        """How many places on a device's pieces go: its own first, then the nearest, both ways in turn.

        >>> Pieces("x", 5).distances, Pieces("x", 2).distances
        ((0, 1, -1, 2, -2), (0, 1))
        """
        steps = [way * step for step in range(1, self.size // 2 + 1) for way in (1, -1)]
        return (0, *steps[: self.size - 1])  # an even number of devices: the opposite one is met once

    def products(self, rows: Any, weights: Weights, sizes: jax.Array) -> tuple[Any, ...]:
        """The grouped product with each pair of `weights`."""
        return grouped_products(rows, weights, sizes, self.config, self.implementation, self.out_dtype)

    def sent(self, x: AnyArray, distance: int) -> jax.Array:
        """Of `[size, ...]`, the part for the device `distance` places on travels there; its like comes from the device
        as far before.
        """
        return self.shift(jax.lax.dynamic_index_in_dim(x, self.owner(distance), 0, keepdims=False), distance)

    def shift(self, piece: object, distance: int) -> Any:
        """What the device `distance` places before this one has."""
        if not distance:
            return piece
        return jax.lax.ppermute(piece, self.axis, [(i, (i + distance) % self.size) for i in range(self.size)])

    def owner(self, distance: int) -> jax.Array:
        """The place of the device `distance` places on."""
        return (jax.lax.axis_index(self.axis) + distance) % self.size

    def cut(self, x: AnyArray) -> tuple[jax.Array, jax.Array]:
        """The parts of `[size, ...]` that belong to the devices before this one, in the order of `distances`."""
        return tuple(jax.lax.dynamic_index_in_dim(x, self.owner(-d), 0, keepdims=False) for d in self.distances)

    def joined(self, pieces: Iterable[Any], way: int) -> jax.Array:
        """`[size, ...]` of pieces in the order of `distances`: each at the place of the device so far on (`way=1`) or
        before (`way=-1`).
        """
        result: Any = None
        for distance, piece in zip(self.distances, pieces, strict=True):
            if result is None:
                result = match_varying((jnp.zeros((self.size, *piece.shape), piece.dtype), piece))[0]
            result = jax.lax.dynamic_update_index_in_dim(result, piece, self.owner(way * distance), 0)
        return result


def grouped_products(
    rows: AnyArray,
    weights: Weights,
    sizes: AnyArray,
    config: object,
    implementation: str | None,
    out_dtype: DTypeLike | None = None,
) -> tuple[AnyArray, ...]:
    """The grouped product of the same rows with each pair of `weights`, and the bias of each row's group. A `Weight`
    multiplies by its own rule, whatever the options say.
    """

    def product(rhs: AnyArray, bias: AnyArray) -> AnyArray:
        if isinstance(rhs, Weight):
            out = rhs.grouped(rows, sizes)
        else:
            out = grouped_gemm(rows, rhs, sizes, out_dtype=out_dtype, config=config, implementation=implementation)
        return out if bias is None else out + _of_rows(bias, sizes, out.shape[0]).astype(out.dtype)

    return tuple(product(rhs, bias) for rhs, bias in weights)


def _of_rows(bias: jax.Array, group_sizes: jax.Array, rows: int) -> jax.Array:
    """The bias of each row's group, `[rows, _]`; 0 in rows after the last group, as the product has there."""
    group = jnp.searchsorted(jnp.cumsum(group_sizes), jnp.arange(rows), side="right")
    return jnp.take(bias, group, axis=0, mode="fill", fill_value=0)


def arrive(pieces: Pieces, rows: jax.Array, weights: Weights, arriving: Any) -> list[tuple[Any, ...]]:
    """The products of the rows that all devices have for this one.

    Args:
      rows: `[size, room, in]`, for each device; those for one device are sorted by its experts.
      arriving: `[size, experts]`, rows for each of this device's experts that come from each device.

    Returns:
      For each of `pieces.distances`, the products `[room, out]` of the piece from the device so far before.
    """
    rows, weights, sizes = match_varying((rows, weights, pieces.cut(arriving)))
    return list((_arrived if _quantized(weights) else _arrive)(pieces, rows, weights, sizes))


def depart(pieces: Pieces, rows: Sequence[jax.Array], weights: Weights, arriving: Any) -> jax.Array:
    """The products of this device's rows go back to where the rows came from.

    Args:
      rows: `[room, in]` for each of `pieces.distances`: rows of the piece from the device so far before.
      weights: one pair.
      arriving: argument of `arrive`.

    Returns:
      `[size, room, out]`, what comes from each device.
    """
    pieces_of_rows, weights, sizes = match_varying((tuple(rows), weights, pieces.cut(arriving)))
    return (_departed if _quantized(weights) else _depart)(pieces, pieces_of_rows, weights, sizes)


def there_and_back(
    pieces: Pieces, rows: Any, arriving: object, first: Weights, unit: Callable[..., Any], last: Weights
) -> Any:
    """`[size, room, out]`: what the experts of each device make of the rows `[size, room, in]` for it.

    Args:
      arriving: argument of `arrive`.
      first: the weights of the first products. unit: of these products, row by row. last: of the product after it.
    """
    hidden = [unit(*products) for products in arrive(pieces, rows, first, arriving)]
    return depart(pieces, hidden, last, arriving)


def there_and_back_over_two(
    axes: tuple[str, ...], pieces: Pieces, rows: jax.Array, arriving: jax.Array, **experts: Any
) -> jax.Array:
    """`there_and_back` over the axes (outer, inner), of which `pieces` has the outer one: rows are exchanged within the
    inner one, sorted by expert, and then travel in pieces.
    """
    outer, inner = axes
    sizes, room = (pieces.size, jax.lax.axis_size(inner)), rows.shape[1]
    arriving = arriving.reshape(*sizes, -1)
    counts = jax.lax.all_to_all(
        arriving, outer, 0, 0
    )  # rows that this device passes on, by the one within that has them

    def exchanged(x: AnyArray) -> jax.Array:
        return jax.lax.all_to_all(x.reshape(*sizes, room, -1), inner, 1, 1)

    choice, place, _ = jax.vmap(functools.partial(by_expert, room=room))(counts)
    # [outer, inner * room, in]: the rows of one inner group for each outer device, sorted by expert.
    by_group = jax.vmap(permute)(exchanged(rows).reshape(pieces.size, sizes[1] * room, -1), choice, place)
    back = there_and_back(pieces, by_group, arriving.sum(axis=1), **experts)
    return exchanged(jax.vmap(unpermute)(back, choice, place)).reshape(*rows.shape[:2], -1)


def _quantized(weights: Weights) -> bool:
    """Whether weights have no gradient; then JAX's own gradient of the rows' way is the pieces' too."""
    return any(isinstance(rhs, (QTensor, PackedQTensor)) for rhs, _ in weights)


def _arrived(pieces: Pieces, rows: object, weights: Weights, sizes: PyTree) -> PyTree:
    return tuple(pieces.products(pieces.sent(rows, d), weights, n) for d, n in zip(pieces.distances, sizes))


def _departed(pieces: Pieces, rows: PyTree, weights: Weights, sizes: PyTree) -> jax.Array:
    results = [pieces.products(x, weights, n)[0] for x, n in zip(rows, sizes, strict=True)]
    return pieces.joined((pieces.shift(y, -d) for d, y in zip(pieces.distances, results)), 1)


_arrive = jax.custom_vjp(_arrived, nondiff_argnums=(0,))
_depart = jax.custom_vjp(_departed, nondiff_argnums=(0,))


def _arrive_forward(pieces: Pieces, rows: jax.Array, weights: Weights, sizes: PyTree) -> tuple[PyTree, PyTree]:
    came = tuple(pieces.sent(rows, d) for d in pieces.distances)  # kept: the weights' gradient reads them
    return tuple(pieces.products(x, weights, n) for x, n in zip(came, sizes)), (came, weights, sizes)


def _depart_forward(pieces: Pieces, rows: PyTree, weights: Weights, sizes: PyTree) -> tuple[PyTree, PyTree]:
    return _departed(pieces, rows, weights, sizes), (rows, weights, sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _arrive_gradients(pieces: Pieces, saved: PyTree, dz: PyTree) -> tuple[PyTree, PyTree]:
    came, weights, sizes = saved
    back = (_rows_gradient(pieces, x, weights, n, gradient) for x, n, gradient in zip(came, sizes, dz, strict=True))
    d_rows = pieces.joined((pieces.shift(dx, -d) for d, dx in zip(pieces.distances, back)), 1)
    return d_rows, _weights_gradient(pieces, came, weights, sizes, dz)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _depart_gradients(pieces: Pieces, saved: PyTree, d_out: jax.Array) -> tuple[PyTree, PyTree]:
    rows, weights, sizes = saved
    dz = tuple((pieces.sent(d_out, d),) for d in pieces.distances)
    d_rows = tuple(_rows_gradient(pieces, x, weights, n, gradient) for x, n, gradient in zip(rows, sizes, dz))
    return d_rows, _weights_gradient(pieces, rows, weights, sizes, dz)


def _rows_gradient(pieces: Pieces, rows: jax.Array, weights: Weights, sizes: jax.Array, dz: object) -> jax.Array:
    """Of one piece; the products themselves are not used, and no program computes them."""
    return jax.vjp(lambda x: pieces.products(x, weights, sizes), rows)[1](dz)[0]


def _weights_gradient(pieces: Pieces, rows: PyTree, weights: Weights, sizes: PyTree, dz: PyTree) -> PyTree:
    """Of all pieces in one product."""
    choice, place, total = by_expert(jnp.stack(sizes), rows[0].shape[0])

    def by_group(parts: Iterable[Any]) -> jax.Array:
        joined = jnp.concatenate(list(parts))  # [size * room, ...], in the order of `distances`
        return permute(joined, choice, place)

    joined = by_group(rows)
    pull = jax.vjp(lambda w: pieces.products(joined, w, total), weights)[1]
    return pull(tuple(by_group(parts) for parts in zip(*dz, strict=True)))[0]


def _backward(gradients: Callable[..., Any], pieces: Pieces, saved: Any, cotangent: object) -> tuple[Any, Any, Any]:
    nothing = jax.tree.map(lambda n: np.zeros(n.shape, jax.dtypes.float0), saved[2])  # sizes are integers
    return *gradients(pieces, saved, cotangent), nothing


def _once(gradients: PyTree, pieces: Pieces, saved: PyTree, cotangent: AnyArray) -> PyTree:
    return gradients(pieces, saved, cotangent), None


def _twice(pieces: Pieces, saved: PyTree, cotangents: PyTree) -> PyTree:
    raise UnsupportedError(
        "grouped products with their all-to-all in pieces are differentiable once; for a second derivative pass "
        "overlap=False."
    )


_arrive_gradients.defvjp(by_default(functools.partial(_once, _arrive_gradients)), _twice)
_depart_gradients.defvjp(by_default(functools.partial(_once, _depart_gradients)), _twice)
_arrive.defvjp(by_default(_arrive_forward), by_default(functools.partial(_backward, _arrive_gradients)))
_depart.defvjp(by_default(_depart_forward), by_default(functools.partial(_backward, _depart_gradients)))
