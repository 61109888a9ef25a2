"""One layer of a decoder, as functions of its parameters: attention and feed-forward network, with their norms.

A layer takes the residual stream as a pair (stream, delta): `delta` is the last block's output, which the next norm
adds in its own pass over memory. Activations that a training step may keep for its backward pass have names
(`checkpoint_name`). How tokens see one another is an argument (`Attend`): whole sequences, or pages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.weight import Weight
from vishwamai.models.activation import activate
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.config import ModelConfig
from vishwamai.models.experts import ExpertLoad, mixture
from vishwamai.models.latent import latent_attention
from vishwamai.models.layer_kinds import LayerKind, Rope
from vishwamai.ops.gated import has_kernel

Arrays = Mapping[str, Any]


class Attend(Protocol):
    """Attention's core: queries, keys and values of the new tokens to mixed values, and the pages with them written."""

    def __call__(self, kind: LayerKind, query: Any, key: Any, value: Any, sinks: Any, pages: Any) -> tuple[Any, Any]:
        """All arrays are `[batch, seq, heads, head_dim]`; over latent pages `value` is None."""
        ...


class Rotate(Protocol):
    """Rotation of a pair (query, key), each `[batch, seq, heads, head_dim]`, by the tokens' positions."""

    def __call__(self, pair: tuple[Any, Any], rope: Rope) -> tuple[Any, Any]: ...


def linear(x: Any, weight: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """`x @ weight + bias`; plain weights are brought to the dtype of `x`, quantized and packed ones stay."""
    if isinstance(weight, Weight):
        out = weight.product(x, out_dtype or x.dtype)
        return out if bias is None else out + bias.astype(out.dtype)
    return vishwamai.gemm(x, in_dtype(weight, x.dtype), bias=bias, out_dtype=out_dtype or x.dtype)


def in_dtype(weight: Any, dtype: Any) -> Any:
    """A plain weight in a dtype; another as it is."""
    return weight.astype(dtype) if isinstance(weight, jax.Array) else weight


def norm(config: ModelConfig, x: Any, scale: Any, residual: Any = None) -> Any:
    """`rms_norm` with the scale as the family stores it; with `residual`, of the sum, which is returned too."""
    offset = 1.0 if config.norm_offset else 0.0
    return vishwamai.rms_norm(x, scale, eps=config.norm_eps, scale_offset=offset, residual=residual)


def final_norm(config: ModelConfig, x: Any, scale: Any, residual: Any = None) -> Any:
    """The norm before the head, of `x` or of its sum with `residual`, over the divisor of the logits: the head is
    linear.
    """
    hidden = norm(config, x, scale) if residual is None else norm(config, x, scale, residual)[0]
    return hidden if config.logit_divisor == 1.0 else hidden / jnp.asarray(config.logit_divisor, hidden.dtype)


def layer(
    config: ModelConfig,
    kind: LayerKind,
    arrays: Arrays,
    carry: tuple[Any, Any],
    rotate: Rotate,
    attend: Attend,
    pages: Any = None,
    axes: MeshAxes = ONE_DEVICE,
    token_mask: Any = None,
) -> tuple[tuple[Any, Any], Any, ExpertLoad | None]:
    """One layer.

    Args:
      arrays: its parameters by name (`parameters.layer_parameters`).
      carry: (stream, delta), both `[batch, seq, hidden]`; their sum is what the layer sees. A delta of None is 0.
      pages: its pool of pages, or None.
      axes: inside `shard_map`, the mesh axes over which the model is split.
      token_mask: as of `experts.mixture`.

    Returns:
      The next carry, the pages, and the load of its experts (None without).
    """
    x, carry = _enter(config, carry, arrays.get("attention_norm"))
    if config.latent is None:
        mixed, pages = _attention(config, kind, arrays, x, rotate, attend, pages, axes)
    else:
        mixed, pages = latent_attention(config, config.latent, kind, arrays, x, linear, rotate, attend, pages, axes)
    mixed = axes.total(mixed)
    x, carry = _enter(config, (carry, _leave(config, mixed, arrays.get("attention_post_norm"))), arrays.get("mlp_norm"))
    x = checkpoint_name(x, "mlp_input")
    load = None
    if kind.experts and config.experts is not None:
        out, load = mixture(config, config.experts, arrays, x, axes, token_mask)
        if "shared_down" in arrays:
            shared = _feed_forward(config, arrays, x, axes, "shared_")
            if config.experts.shared_gate:
                shared = shared * jax.nn.sigmoid(linear(x, arrays["shared_expert_gate"]))
            out = out + shared
    else:
        out = _feed_forward(config, arrays, x, axes)
    return (carry, _leave(config, axes.total(out), arrays.get("mlp_post_norm"))), pages, load


def _enter(config: ModelConfig, carry: tuple[Any, Any], scale: Any) -> tuple[Any, Any]:
    """A block's input and the stream: the sum of the carry, normalized where the family does so."""
    stream, delta = carry
    if delta is None:
        return stream if scale is None else norm(config, stream, scale), stream
    if scale is None:
        total = checkpoint_name(stream + delta, "stream")
        return total, total
    x, total = norm(config, delta, scale, residual=stream)
    return x, checkpoint_name(total, "stream")


def _leave(config: ModelConfig, delta: Any, scale: Any) -> Any:
    delta = checkpoint_name(delta, "block_output")
    if config.residual_multiplier != 1.0:
        delta = delta * jnp.asarray(config.residual_multiplier, delta.dtype)
    return delta if scale is None else norm(config, delta, scale)


def _attention(
    config: ModelConfig,
    kind: LayerKind,
    arrays: Arrays,
    x: Any,
    rotate: Rotate,
    attend: Attend,
    pages: Any,
    axes: MeshAxes,
) -> tuple[Any, Any]:
    """Of the heads that the device has; over the axis `tensor`, the result is its part of a sum."""
    made = {}
    for name in ("query", "key", "value"):
        made[name] = checkpoint_name(linear(x, arrays[name], arrays.get(f"{name}_bias")), name)
        scale = arrays.get(f"{name}_norm")
        if config.qk_norm == "all" and scale is not None:
            made[name] = _norm_of_heads(config, made[name], scale, axes)
        made[name] = made[name].reshape(*x.shape[:-1], made[name].shape[-1] // config.head_dim, config.head_dim)
        if config.qk_norm == "head" and scale is not None:
            made[name] = norm(config, made[name], scale)
    query, key = rotate((made["query"], made["key"]), kind.rope)
    mixed, pages = attend(kind, query, key, made["value"], arrays.get("sinks"), pages)
    flat = checkpoint_name(mixed.reshape(*x.shape[:-1], mixed.shape[-2] * config.head_dim), "mixed")
    return linear(flat, arrays["output"], axes.once(arrays.get("output_bias"))), pages


def _norm_of_heads(config: ModelConfig, x: Any, scale: Any, axes: MeshAxes) -> Any:
    """`norm` over the features of all heads. Where mesh axes split them, devices add up one sum of squares for each
    token; the operation would gather the features.
    """
    found = jax.typeof(x).sharding
    explicit = found.mesh.explicit_axes and found.spec[-1] is not None
    if not explicit and axes.tensor is None:
        return norm(config, x, scale)
    wide, features = x.astype(jnp.promote_types(x.dtype, jnp.float32)), scale.shape[-1]
    if axes.tensor is not None:  # the scale is whole on every device
        scale = jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(axes.tensor) * x.shape[-1], x.shape[-1])
    squares = axes.total(jnp.sum(jnp.square(wide), axis=-1, keepdims=True))
    inverse = jax.lax.rsqrt(squares / features + config.norm_eps)
    return (wide * inverse * (scale.astype(wide.dtype) + (1.0 if config.norm_offset else 0.0))).astype(x.dtype)


def _feed_forward(config: ModelConfig, arrays: Arrays, x: Any, axes: MeshAxes, prefix: str = "") -> Any:
    """Over the axis `tensor`, the result is the device's part of a sum."""
    weights = tuple(in_dtype(arrays[prefix + name], x.dtype) for name in ("gate", "up"))
    biases = tuple(arrays.get(f"{prefix}{name}_bias") for name in ("gate", "up", "down"))
    plain = all(isinstance(w, jax.Array) for w in weights)
    if biases[0] is not None or not (plain or has_kernel(x, weights, config.activation)):
        gate, up = (linear(x, w, bias, jnp.float32) for w, bias in zip(weights, biases))
        inner = (activate(config.activation, gate) * up).astype(x.dtype)
    else:
        inner = vishwamai.gated_linear_unit(x, weights, config.activation)
    return linear(inner, arrays[prefix + "down"], axes.once(biases[2]))
