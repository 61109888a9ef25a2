"""The mixture-of-experts layer: routing, the experts' feed-forward networks by grouped products, and the weighted sum;
on one device or many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core import observe
from vishwamai.core.activations import activate
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.links import AxisLinks
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values
from vishwamai.core.weight import Weight
from vishwamai.ops.moe.checks import (
    CLAMPED,
    check_bias,
    check_biases,
    check_layer,
    check_limit,
    check_overlap,
    check_router_tokens,
)
from vishwamai.ops.moe.dispatch import capacity_of, moe_combine, moe_dispatch
from vishwamai.ops.moe.exchange import transport
from vishwamai.ops.moe.exchange.pieces import (
    Pieces,
    Weights,
    grouped_products,
    there_and_back,
    there_and_back_over_two,
)
from vishwamai.ops.moe.exchange.times import ExchangeEstimate, decide, estimate_exchange
from vishwamai.ops.moe.routing import Routing, moe_routing
from vishwamai.ops.moe.spec import experts_spec

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int


class MoEOutput(NamedTuple):
    """What `moe_layer` returns.

    Attributes:
      out: like `tokens`.
      routing: the `Routing`, with the losses to add to the model's own.
      dropped: scalar int32, choices that found no room (0 without a capacity); on several devices, of all of them.
    """

    out: AnyArray
    routing: Routing
    dropped: AnyArray


@checked
def moe_layer(
    tokens: Float[Array, "*tokens d"],
    router_weights: Float[Array, "d experts"],
    gate: Float[Array, "experts d f"] | QTensor | PackedQTensor | CodeTensor | Weight | None,
    up: Float[Array, "experts d f"] | QTensor | PackedQTensor | CodeTensor | Weight,
    down: Float[Array, "experts f d"] | QTensor | PackedQTensor | CodeTensor | Weight,
    *,
    top_k: int = 2,
    router_tokens: Float[Array, "*tokens e"] | None = None,
    biases: Sequence[Float[Array, "experts _"] | None] | None = None,
    activation: str = "silu",
    limit: float = 7.0,
    capacity_factor: float | None = None,
    expert_axis: str | Sequence[str] | None = None,
    exchange: str = "dense",
    exchange_factor: float | None = None,
    overlap: bool | None = None,
    expert_places: Int[Array, " experts"] | None = None,
    weight_inputs: bool = False,
    implementation: str | None = None,
    config: object = None,
    **routing_options: Any,
) -> MoEOutput:
    """Mixture of experts: each token is sent to its best k of E gated feed-forward networks,
    `down_e(act(x gate_e) * (x up_e))`.

    Without `capacity_factor` no token is dropped, whatever the load: tokens are sorted by expert and multiplied by
    `grouped_gemm` (Gale et al., "MegaBlocks", 2022).

    With `expert_axis`, inside `shard_map`: `tokens` are this device's share, `router_weights` are whole, and `gate`,
    `up` and `down` are this device's experts (device i of the axis holds the i-th share of them). Tokens travel to
    their experts' devices and back by all-to-all: Lepikhin et al., "GShard" (2020). Two axes, the outer first, make the
    exchange hierarchical: first within the inner axis, so that what crosses the outer one goes in few large pieces. The
    result is that of one device with all tokens and experts.

    Args:
      tokens: `[..., d]`.
      router_weights: `[d, E]`.
      gate: `[E, d, f]`, or None for experts without a gate, `down_e(act(x up_e))`; like `up` and `down` an array, or
        what `grouped_gemm` takes in its place: a `QTensor`, a `PackedQTensor` of E experts or a `CodeTensor`; or a
        `vishwamai.core.weight.Weight`, which multiplies by a rule of its own.
      up: `[E, d, f]`.
      down: `[E, f, d]`.
      top_k: experts of each token.
      router_tokens: `[..., e]`, what the router scores in place of `tokens`, with `router_weights` `[e, E]`: experts of
        short vectors, which a product makes of the model's (Nemotron 3). None for `tokens`.
      biases: the experts' biases: (gate `[E, f]`, up `[E, f]`, down `[E, d]`), each may be None; or None for none. Over
        several devices, this device's experts', like the weights.
      activation: "silu", "gelu", "gelu_tanh", "relu" or "relu2"; or "swigluoai", gpt-oss's clamped unit of gate g and
        up u, `g sigmoid(1.702 g) (u + 1)` of `g = min(g, limit)` and u within `limit` either way.
      limit: clamp of "swigluoai".
      capacity_factor: rows of each expert as a multiple of its even share, see `moe_dispatch`; over several devices
        each device's tokens have a capacity of their own. None drops nothing.
      expert_axis: the mesh axis over which experts and tokens are split, or (outer, inner).
      exchange: "dense" (every pair of devices exchanges buffers of one size) or "ragged" (rows alone travel, by
        `jax.lax.ragged_all_to_all`, which XLA has on TPU and GPU, not on CPU; one axis).
      exchange_factor: rows, without a capacity, that one device may send to another as a multiple of the even share
        `T * k / devices`; what is beyond is dropped and counted. None makes room for the worst case, T * k, and drops
        nothing.
      overlap: True sends the rows in pieces, whose transfers hide behind the products of others
        (`vishwamai.parallel.all_to_all_grouped_gemm`), over two axes those of the outer one; such a layer is
        differentiable once. False sends them all before the products, and so does "ragged". None lets the model of the
        links decide, which knows TPUs alone; `vishwamai.explain` gives both times.
      expert_places: `[E]`, where each expert's weights and biases lie among the E places of all devices
        (`vishwamai.parallel.ExpertPlacement.places`); None for the experts' own order. The result is the same, but that
        an `exchange_factor` drops what is beyond it of other devices.
      weight_inputs: a token's weights multiply what its experts read, not what they return (Llama 4).
      implementation: name for the grouped products.
      config: configuration of the grouped products.
      **routing_options: options of `moe_routing`: scoring, bias, logit_bias, normalize, scale, expert_scale,
        num_groups, top_groups, group_score, jitter, key.

    Returns:
      A `MoEOutput`; gradients exist for all floating arrays but the router's bias.

    Raises:
      ShapeError: the arguments contradict one another.

    >>> import jax.numpy as jnp
    >>> tokens, router = jnp.ones((4, 8)), jnp.zeros((8, 3))
    >>> weights = jnp.ones((3, 8, 16)), jnp.ones((3, 8, 16)), jnp.ones((3, 16, 8))
    >>> result = moe_layer(tokens, router, *weights, top_k=2)
    >>> result.out.shape, int(result.dropped), result.routing.expert_counts.tolist()
    ((4, 8), 0, [4, 4, 0])
    """
    axes = None if expert_axis is None else (expert_axis,) if isinstance(expert_axis, str) else tuple(expert_axis)
    if axes is not None and not axes:
        raise ShapeError("moe_layer: `expert_axis` is empty; pass the name of a mesh axis, or None.")
    named = (("tokens", tokens), ("router_weights", router_weights), ("up", up), ("down", down))
    tokens, router_weights, up, down = (_weight(name, x) for name, x in named)
    gate = None if gate is None else _weight("gate", gate)
    check_layer(tokens, router_weights, gate, up, down, activation, axes, exchange, exchange_factor, capacity_factor)
    check_overlap(axes, exchange, overlap)
    gate_bias, up_bias, down_bias = _biases(biases, gate, up, down)
    check_limit(activation, gate, limit)
    scored = tokens if router_tokens is None else _router_tokens(router_tokens, tokens)
    routing = moe_routing(scored, router_weights, top_k=top_k, axis_name=axes, **routing_options)
    places = None if expert_places is None else _places(expert_places, routing.expert_counts.shape[0])
    placed = routing if places is None else _placed(routing, places)
    x = tokens.reshape(-1, tokens.shape[-1])
    if weight_inputs:
        x, placed = weighted_inputs(jnp, x, placed)

    first = ((up, up_bias),) if gate is None else ((gate, gate_bias), (up, up_bias))
    last = ((down, down_bias),)

    def unit(*products: jax.Array) -> jax.Array:
        if gate is None:
            return activate(activation, products[0])
        gated, above = products
        return clamped(jnp, gated, above, limit) if activation == CLAMPED else activate(activation, gated) * above

    def experts(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
        hidden = unit(*grouped_products(rows, first, group_sizes, config, implementation))
        return grouped_products(hidden, last, group_sizes, config, implementation)[0]

    if axes is None:
        dispatch = moe_dispatch(x, placed, capacity_factor=capacity_factor)
        out = moe_combine(experts(dispatch.rows, dispatch.group_sizes), dispatch, placed)
        dropped = dispatch.dropped
    else:
        size, local = jax.lax.axis_size(axes), experts_spec(up).shape[0]
        count, top_k = placed.experts.shape
        if capacity_factor is None:
            room = transport.room_of(count, top_k, size, exchange_factor)
            used = min(room, count * top_k / size)  # by an even load
        else:
            room = used = local * capacity_of(count, top_k, size * local, capacity_factor)
        travel: transport.Travel | None = None
        if _in_pieces(axes, exchange, x.dtype, room, used, first, down, overlap):
            pieces = Pieces(axes[0], jax.lax.axis_size(axes[0]), config, implementation)
            way = there_and_back if len(axes) == 1 else functools.partial(there_and_back_over_two, axes)
            travel = functools.partial(way, pieces, first=first, unit=unit, last=last)
        if capacity_factor is not None:
            out, dropped = transport.with_capacity(x, placed, axes, capacity_factor, local, experts, travel)
        elif exchange == "dense":
            out, dropped = transport.dense(x, placed, axes, exchange_factor, local, experts, travel)
        else:
            out, dropped = transport.ragged(x, placed, axes, exchange_factor, local, experts)
    if weight_inputs:
        out = out.reshape(*routing.experts.shape, -1).sum(1)
    return MoEOutput(out.reshape(tokens.shape), routing, dropped)


def _router_tokens(router_tokens: AnyArray, tokens: AnyArray) -> AnyArray:
    scored = as_array("moe_layer", "router_tokens", router_tokens)
    check_router_tokens(scored, tokens)
    return scored


def weighted_inputs(xp: ModuleType, tokens: AnyArray, routing: Routing) -> tuple[AnyArray, Routing]:
    """Each choice as a token of its own, `[T * k, d]`, times its weight, and the routing of these, with weights of 1;
    `xp` is `jax.numpy` or `torch`, whose arrays these are.
    """
    weights = routing.weights.reshape(-1, 1)
    rows = (tokens[:, None] * routing.weights[..., None]).reshape(weights.shape[0], tokens.shape[1])
    rows = rows.astype(tokens.dtype) if xp is jnp else rows.to(tokens.dtype)
    return rows, routing._replace(weights=xp.ones_like(weights), experts=routing.experts.reshape(-1, 1))


def _places(expert_places: object, experts: int) -> jax.Array:
    """`expert_places`, checked where its values are known."""
    places = as_array("moe_layer", "expert_places", expert_places)
    if places.shape != (experts,) or not jnp.issubdtype(places.dtype, jnp.integer):
        raise ShapeError(
            f"moe_layer: `expert_places` is {places.dtype.name} of shape {places.shape}; pass integers of shape "
            f"({experts},), the place of each expert."
        )
    check_values(_check_permutation, places)
    return places.astype(jnp.int32)


def _check_permutation(places: Any) -> None:
    if sorted(places.tolist()) != list(range(len(places))):
        raise ShapeError(f"moe_layer: `expert_places` is {places.tolist()}; pass each place once.")


def _placed(routing: Routing, places: jax.Array) -> Routing:
    """The routing in terms of places."""
    counts = jnp.zeros_like(routing.expert_counts).at[places].set(routing.expert_counts, unique_indices=True)
    return routing._replace(experts=places[routing.experts], expert_counts=counts)


def _weight(name: str, x: AnyArray) -> AnyArray:
    """An argument as an array of JAX; experts may be quantized, or multiply by themselves."""
    quantized = isinstance(x, (QTensor, PackedQTensor, CodeTensor, Weight)) and name in ("gate", "up", "down")
    return x if quantized else as_array("moe_layer", name, x)


def _in_pieces(
    axes: tuple[str, ...],
    exchange: str,
    dtype: Any,
    room: int,
    used: float,
    first: Weights,
    down: Any,
    overlap: bool | None,
) -> bool:
    """Whether the rows travel in pieces, which `explain` says; used: rows of a buffer of `room` that are in use.

    Over two axes the pieces go over the outer one, and both ways exchange the same within the inner one.
    """
    experts, hidden, features = experts_spec(down).shape
    axis, *inner = axes
    size, inner_size = jax.lax.axis_size(axis), jax.lax.axis_size(tuple(inner))
    name = f"moe_layer over {axis} ({size})" + "".join(f", after the exchange over {i} ({inner_size})" for i in inner)
    if exchange != "dense":
        observe.note(f"{name}: plain: exchange={exchange!r} has no pieces.")
        return False
    if 0 in (room, hidden, features):
        return False

    def estimates(links: AxisLinks) -> list[ExchangeEstimate]:
        estimate = functools.partial(
            estimate_exchange, inner_size * room, experts=experts, dtype=dtype.name, links=links, rows=inner_size * used
        )
        return [estimate(k=features, n=len(first) * hidden), estimate(k=hidden, n=features, results=True)]

    chosen, why = decide("moe_layer", axis, size, overlap, None, estimates)
    observe.note(f"{name}: {why}")
    return chosen


def clamped(xp: ModuleType, gate: AnyArray, up: AnyArray, limit: float) -> AnyArray:
    """See `CLAMPED`; `xp` is `jax.numpy` or `torch`, whose arrays these are."""
    gate, up = xp.clip(gate, None, limit), xp.clip(up, -limit, limit)
    sigmoid = jax.nn.sigmoid if xp is jnp else xp.sigmoid
    return gate * sigmoid(1.702 * gate) * (up + 1)


def _biases(biases: object, gate: AnyArray, up: AnyArray, down: AnyArray) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The experts' biases as arrays, or None each."""
    checked_biases = check_biases(biases)
    named = zip(("gate", "up", "down"), checked_biases, (gate, up, down), strict=True)
    arrays = [(n, None if b is None else as_array("moe_layer", f"biases[{n}]", b), w) for n, b, w in named]
    for name, bias, weight in arrays:
        check_bias(name, bias, weight)
    gate_bias, up_bias, down_bias = (bias for _, bias, _ in arrays)
    return gate_bias, up_bias, down_bias
