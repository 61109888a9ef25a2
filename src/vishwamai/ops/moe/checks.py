"""Checks of the arguments of `moe_layer`, arrays of any framework."""

from __future__ import annotations

from typing import Any

from vishwamai.core.errors import ShapeError
from vishwamai.core.sharding import mesh_axis_size
from vishwamai.core.types import AnyArray
from vishwamai.ops.moe.spec import experts_spec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")

CLAMPED = "swigluoai"
"""The gated unit of gpt-oss: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), by the code of its release."""


def check_layer(
    tokens: object,
    router_weights: object,
    gate: object,
    up: object,
    down: object,
    activation: str,
    axes: tuple[str, ...] | None,
    exchange: str,
    exchange_factor: float | None,
    capacity_factor: float | None,
) -> None:
    """Raises ShapeError where the arguments of `moe_layer`, arrays of any framework, contradict one another."""
    x, router, w_up, w_down = (experts_spec(a) for a in (tokens, router_weights, up, down))
    for label, array, layout in (("tokens", x, "[..., features]"), ("router_weights", router, "[features, experts]")):
        if len(array.shape) < layout.count(",") + (label == "router_weights"):
            raise ShapeError(f"moe_layer: `{label}` has shape {array.shape}; pass {layout}.")
    if len(w_up.shape) != 3 or w_up.shape[1] != x.shape[-1]:
        raise ShapeError(
            f"moe_layer: `up` has shape {w_up.shape}, but `tokens` of shape {x.shape} have {x.shape[-1]} features; "
            f"pass [experts, {x.shape[-1]}, hidden]."
        )
    if gate is not None and experts_spec(gate) != w_up:
        raise ShapeError(
            f"moe_layer: `gate` is {experts_spec(gate)}, but `up` is {w_up}; pass `gate` like `up`, or None."
        )
    if w_down.shape != (w_up.shape[0], w_up.shape[2], w_up.shape[1]):
        raise ShapeError(
            f"moe_layer: `down` has shape {w_down.shape}, but `up` has {w_up.shape}; pass `down` of shape "
            f"{(w_up.shape[0], w_up.shape[2], w_up.shape[1])}."
        )
    if activation not in (*ACTIVATIONS, CLAMPED):
        raise ShapeError(f"moe_layer: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, {CLAMPED}.")
    devices = 1 if axes is None else mesh_axis_size("moe_layer", "expert_axis", axes)
    if router.shape[-1] != w_up.shape[0] * devices:
        owner = "there are" if axes is None else f"each of the {devices} devices of {axes} holds"
        raise ShapeError(
            f"moe_layer: `router_weights` of shape {router.shape} score {router.shape[-1]} experts, but {owner} "
            f"{w_up.shape[0]} by the shape of `up`; make them agree."
        )
    if exchange not in ("dense", "ragged"):
        raise ShapeError(f"moe_layer: `exchange` is {exchange!r}; pass 'dense' or 'ragged'.")
    if axes is None:
        options = [
            name
            for name, odd in (("exchange", exchange != "dense"), ("exchange_factor", exchange_factor is not None))
            if odd
        ]
        if options:
            raise ShapeError(
                f"moe_layer: `{options[0]}` is given, but `expert_axis` is None: nothing is exchanged; pass the axis, "
                "or leave it out."
            )
        return
    if len(axes) > 2 or (exchange == "ragged" and len(axes) != 1):
        raise ShapeError(
            f"moe_layer: `expert_axis` is {axes} with exchange={exchange!r}; pass one axis, or for the dense exchange "
            "(outer, inner)."
        )
    if exchange_factor is not None and not exchange_factor > 0:
        raise ShapeError(f"moe_layer: `exchange_factor` is {exchange_factor}; pass a positive number, or None.")
    if capacity_factor is not None and (exchange != "dense" or exchange_factor is not None):
        raise ShapeError(
            "moe_layer: `capacity_factor` already sizes the dense exchange; leave out `exchange` and "
            "`exchange_factor`, or the capacity."
        )


def check_overlap(axes: tuple[str, ...] | None, exchange: str, overlap: bool | None) -> None:
    """Raises ShapeError where an exchange cannot be in pieces."""
    if overlap is not None and axes is None:
        raise ShapeError(
            "moe_layer: `overlap` is given, but `expert_axis` is None: nothing is exchanged; pass the axis, or leave "
            "it out."
        )
    if overlap and exchange == "ragged":
        raise ShapeError(
            "moe_layer: `overlap` is True, and exchange='ragged' has no pieces; pass exchange='dense', or leave "
            "`overlap` out."
        )


def check_router_tokens(router_tokens: Any, tokens: Any) -> None:
    """Raises ShapeError where what the router reads, an array of any framework, has another number of tokens."""
    if tuple(router_tokens.shape[:-1]) != tuple(tokens.shape[:-1]):
        raise ShapeError(
            f"moe_layer: `router_tokens` has shape {tuple(router_tokens.shape)}, but `tokens` has "
            f"{tuple(tokens.shape)}; pass as many."
        )


def check_limit(activation: str, gate: object, limit: Any) -> None:
    """Raises ShapeError where the clamped unit lacks a gate or its limit."""
    if activation == CLAMPED and not (gate is not None and isinstance(limit, (int, float)) and limit > 0):
        raise ShapeError(
            f"moe_layer: `activation` is {CLAMPED!r} with limit {limit!r}{' and no `gate`' if gate is None else ''}; "
            "pass a gate, and a limit above 0."
        )


def check_biases(biases: Any) -> tuple[AnyArray, AnyArray, AnyArray]:
    """(gate, up, down) of the experts' biases, each may be None.

    Raises:
      ShapeError: they are not three.
    """
    if biases is None:
        return None, None, None
    if not isinstance(biases, (tuple, list)) or len(biases) != 3:
        raise ShapeError(
            f"moe_layer: `biases` is {type(biases).__name__} of {len(biases) if hasattr(biases, '__len__') else 'no'} "
            "entries; pass (gate, up, down), each an array or None."
        )
    gate, up, down = biases
    return gate, up, down


def check_bias(name: str, bias: Any, weight: object) -> None:
    """Raises ShapeError where a bias of the experts, an array of any framework, does not fit their weight."""
    shape = None if weight is None else experts_spec(weight).shape
    if bias is not None and (shape is None or tuple(bias.shape) != (shape[0], shape[2])):
        expected = "None, as `gate` is" if shape is None else (shape[0], shape[2])
        raise ShapeError(f"moe_layer: the bias of `{name}` has shape {tuple(bias.shape)}; pass {expected}.")
