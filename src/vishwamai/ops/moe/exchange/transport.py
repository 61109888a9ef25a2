"""Expert parallelism: tokens travel to the devices of their experts and back, inside the caller's `shard_map`.

Shapes must be known when compiling, loads are not. `with_capacity` sends every expert's slots, used or not. `dense`
sends each device one buffer with room for what it may get; `ragged` sends the rows there are into a buffer of that
room, so only memory pays for the worst case.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.ops.moe.dispatch import moe_combine, moe_dispatch, permute, sort_choices, unpermute
from vishwamai.ops.moe.routing import Routing

Experts = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows sorted by local expert, rows of each) -> their results."""

Travel = Callable[[jax.Array, jax.Array], jax.Array]
"""(rows `[devices, room, d]` for each device, rows `[devices, local]` that come from each device for each expert) ->
the results of the rows, in the same places."""


def all_to_all(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """`[devices, ...]`: part i goes to device i, and part i of the result comes from device i; over two axes in two
    stages, the inner one first.
    """
    if len(axes) == 1:
        return lax.all_to_all(x, axes[0], 0, 0)
    outer, inner = axes
    parts = x.reshape(lax.axis_size(outer), lax.axis_size(inner), *x.shape[1:])  # [outer, inner, ...]
    parts = lax.all_to_all(parts, inner, 1, 1)
    parts = lax.all_to_all(parts, outer, 0, 0)
    return parts.reshape(x.shape)


def by_expert(sizes: jax.Array, room: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How received rows are sorted by local expert.

    Args:
      sizes: `[devices, experts]`, rows from each device for each expert; a device's rows come in the order of the
        experts.
      room: rows in each device's part of the buffer.

    Returns:
      choice `[devices * room]`: the received row that stands in each sorted row (`devices * room` where none does);
      place `[devices * room, 1]`: the sorted row of each received row (`devices * room` for an unused one); rows of
      each expert `[experts]`.
    """
    devices, experts = sizes.shape
    ends = jnp.cumsum(sizes, axis=1)  # [devices, experts]
    row = jnp.arange(room)
    expert = jnp.sum(ends[:, None, :] <= row[None, :, None], axis=2).reshape(-1)  # `experts` for an unused row
    total = devices * room
    order = jnp.argsort(expert, stable=True).astype(jnp.int32)  # unused rows come last
    places = jnp.zeros(total, jnp.int32).at[order].set(jnp.arange(total, dtype=jnp.int32), unique_indices=True)
    used = expert < experts
    choice = jnp.where(used[order], order, total)
    return choice, jnp.where(used, places, total)[:, None], sizes.sum(axis=0)


def run_experts(received: jax.Array, sizes: jax.Array, experts: Experts) -> jax.Array:
    """The experts' results for received rows `[devices, room, d]`, in the same places; zeros where a place is
    unused.
    """
    devices, room, features = received.shape
    choice, place, group_sizes = by_expert(sizes, room)
    rows = permute(received.reshape(devices * room, features), choice, place)  # [devices * room, d], by expert
    results = experts(rows, group_sizes)
    return unpermute(results, choice, place)[:, 0].reshape(devices, room, -1)


def room_of(tokens: int, top_k: int, devices: int, factor: float | None) -> int:
    worst = tokens * top_k
    return worst if factor is None else min(worst, max(1, math.ceil(factor * worst / devices)))


def _weighted_sum(rows: jax.Array, choice: jax.Array, place: jax.Array, routing: Routing) -> jax.Array:
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    choice_rows = unpermute(rows, choice, place).astype(wide)
    return jnp.einsum("tkd,tk->td", choice_rows, routing.weights.astype(wide), precision="highest").astype(rows.dtype)


def dense(
    x: jax.Array,
    routing: Routing,
    axes: tuple[str, ...],
    factor: float | None,
    local: int,
    experts: Experts,
    travel: Travel | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out `[T, d]`, choices dropped on all devices): buffers of one size between every pair of devices.

    Args:
      x: `[T, d]`, this device's tokens.
      factor: see `moe_layer`'s exchange_factor.
      local: experts of each device.
      experts: runs them.
      travel: takes rows to their experts and results back in another way; None for an all-to-all before and after.
    """
    devices = lax.axis_size(axes)
    count, top_k = routing.experts.shape
    room = room_of(count, top_k, devices, factor)
    # Sorted by expert, so that what one device gets is sorted too; the first `room` rows for each device find a place.
    sizes, choice, place, _ = sort_choices(routing.experts, devices * local, None)
    starts = (jnp.cumsum(sizes) - sizes)[::local]  # [devices]
    device = routing.experts // local  # [T, k]: the device of each choice's expert
    rank = place - starts[device]  # [T, k]: place among the rows for that device
    place = jnp.where(rank < room, device * room + rank, devices * room)
    slot = jnp.arange(room, dtype=jnp.int32)
    per_device = sizes.reshape(devices, local)
    filled = slot < per_device.sum(axis=1)[:, None]  # [devices, room]
    nothing = count * top_k
    choice = choice.at[jnp.where(filled, starts[:, None] + slot, nothing)].get(mode="fill", fill_value=nothing)
    choice = choice.reshape(-1)
    ends = jnp.minimum(jnp.cumsum(per_device, axis=1), room)  # experts whose rows are past the room lose them
    accepted = jnp.diff(ends, axis=1, prepend=0)  # [devices, local]: rows of each expert that found a place
    dropped = lax.psum(jnp.sum(sizes) - jnp.sum(accepted), axes)

    rows = permute(x, choice, place).reshape(devices, room, -1)
    arriving = all_to_all(accepted, axes)  # [devices, local]: sizes travel before the rows
    if travel is None:
        back = all_to_all(run_experts(all_to_all(rows, axes), arriving, experts), axes)
    else:
        back = travel(rows, arriving)
    return _weighted_sum(back.reshape(devices * room, -1), choice, place, routing), dropped


def with_capacity(
    x: jax.Array,
    routing: Routing,
    axes: tuple[str, ...],
    factor: float,
    local: int,
    experts: Experts,
    travel: Travel | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(out `[T, d]`, choices dropped on all devices): each expert has the same number of slots for every device's
    tokens.

    Arguments as of `dense`.
    """
    devices = lax.axis_size(axes)
    dispatch = moe_dispatch(x, routing, capacity_factor=factor)
    capacity = dispatch.rows.shape[0] // (devices * local)  # slots of an expert for this device's tokens
    rows = dispatch.rows.reshape(devices, local * capacity, -1)
    if travel is not None:
        back = travel(rows, jnp.full((devices, local), capacity, jnp.int32)).reshape(dispatch.rows.shape)
        return moe_combine(back, dispatch, routing), lax.psum(dispatch.dropped, axes)
    received = all_to_all(rows, axes)
    by_expert = received.reshape(devices, local, capacity, -1).swapaxes(0, 1).reshape(local * devices * capacity, -1)
    results = experts(by_expert, jnp.full(local, devices * capacity, jnp.int32))
    results = results.reshape(local, devices, capacity, -1).swapaxes(0, 1).reshape(devices, local * capacity, -1)
    back = all_to_all(results, axes).reshape(dispatch.rows.shape)
    return moe_combine(back, dispatch, routing), lax.psum(dispatch.dropped, axes)


def ragged(
    x: jax.Array, routing: Routing, axes: tuple[str, ...], factor: float | None, local: int, experts: Experts
) -> tuple[jax.Array, jax.Array]:
    """(out `[T, d]`, choices dropped on all devices): only rows that there are travel. Arguments as of `dense`, but one
    axis.
    """
    (axis,) = axes
    devices, me = lax.axis_size(axis), lax.axis_index(axis)
    count, top_k = routing.experts.shape
    room = room_of(count, top_k, devices, factor)
    total = count * top_k
    sizes, choice, place, _ = sort_choices(routing.experts, devices * local, None)
    starts = (jnp.cumsum(sizes) - sizes)[::local]  # [devices]
    rank = place - starts[routing.experts // local]  # [T, k]
    place = jnp.where(rank < room, place, total)
    index = jnp.arange(total, dtype=jnp.int32)
    whose = jnp.sum(starts[None, 1:] <= index[:, None], axis=1)  # the device that each sorted row goes to
    choice = jnp.where(index - starts[whose] < room, choice, total)
    ends = jnp.minimum(jnp.cumsum(sizes.reshape(devices, local), axis=1), room)
    accepted = jnp.diff(ends, axis=1, prepend=0)
    dropped = lax.psum(total - jnp.sum(accepted), axis)
    arriving = lax.all_to_all(accepted, axis, 0, 0)  # [devices, local]
    sends, receives = accepted.sum(axis=1), arriving.sum(axis=1)  # [devices] each
    parts = jnp.arange(devices, dtype=jnp.int32) * room  # where each sender's part of the buffer begins

    def travel(rows: jax.Array, size: int, *table: jax.Array) -> jax.Array:
        empty = jnp.zeros((size, rows.shape[1]), rows.dtype) + rows[:0].sum().astype(rows.dtype)
        return lax.ragged_all_to_all(rows, empty, *(t.astype(jnp.int32) for t in table), axis_name=axis)

    # My rows stand in every receiver's buffer where its part for me begins; its results return to where my rows for it
    # began.
    received = travel(permute(x, choice, place), devices * room, starts, sends, jnp.full(devices, me * room), receives)
    results = run_experts(received.reshape(devices, room, -1), arriving, experts).reshape(devices * room, -1)
    origin = lax.all_to_all(starts, axis, 0, 0)  # [devices]: where my part began in each sender's rows
    back = travel(results, total, parts, receives, origin, sends)
    return _weighted_sum(back, choice, place, routing), dropped
