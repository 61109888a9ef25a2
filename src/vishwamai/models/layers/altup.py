"""Layers over several streams, of which one passes the mixer and the feed-forward network: the layer predicts all
streams of one another, and corrects them by what it computed. Baykal et al., "Alternating Updates for Efficient
Transformers" (2023). A product of low rank stands next to attention (Laurel). Gemma Team, "Gemma 3n" (2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.models.axes import MeshAxes
from vishwamai.models.blocks import linear, norm
from vishwamai.models.layers import layer_embedding
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter

if TYPE_CHECKING:
    import jax
    from jax import Array
    from jaxtyping import Float

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays

_LEAST_POWER = 1e-5  # of a stream before its magnitude is set


@dataclasses.dataclass(frozen=True)
class AltUp:
    """Sizes of layers over several streams.

    Attributes:
      count: number of streams.
      active: index of the stream that layers compute on.
      scaled: the layer's own vectors are gated by the corrected stream times a learned scale.
      rank: features of Laurel's product.
    """

    count: int
    active: int
    scaled: bool
    rank: int


TENSORS: Mapping[str, Tensor] = {
    "altup_router": Tensor(PREFIX + "altup.modality_router.weight", True),
    "altup_router_norm": Tensor(PREFIX + "altup.router_norm.weight"),
    "altup_prediction": Tensor(PREFIX + "altup.prediction_coefs.weight", True),
    "altup_correction": Tensor(PREFIX + "altup.correction_coefs.weight", True),
    "altup_scale": Tensor(PREFIX + "altup.correct_output_scale"),
    "laurel_enter": Tensor(PREFIX + "laurel.linear_left.weight", True),
    "laurel_leave": Tensor(PREFIX + "laurel.linear_right.weight", True),
    "laurel_norm": Tensor(PREFIX + "laurel.post_laurel_norm.weight"),
}


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """The parameters of one layer by name; none where the model has one stream."""
    if config.altup is None:
        return {}
    hidden, count, rank = config.hidden_size, config.altup.count, config.altup.rank
    return {
        "altup_router": Parameter((hidden, count), ("embed", None)),
        "altup_router_norm": norm_parameter(config, hidden),
        "altup_prediction": Parameter((count, count * count), (None, None)),
        "altup_correction": Parameter((count, count), (None, None)),
        "altup_scale": Parameter((hidden,), (None,), "zeros"),
        "laurel_enter": matrix(hidden, rank, ("embed", None)),
        "laurel_leave": matrix(rank, hidden, (None, "embed")),
        "laurel_norm": norm_parameter(config, hidden),
    }


def first_streams(
    config: ModelConfig, arrays: Arrays, x: Float[Array, "batch seq hidden"]
) -> Float[Array, "streams batch seq hidden"]:
    """The streams that enter the first layer: the embeddings, and products of them of the same magnitude."""
    others = jnp.einsum("bsh,nhk->nbsk", x, arrays["altup_enter"].astype(x.dtype))
    return jnp.concatenate([x[None], _as_large_as(others, x)])


def last_stream(
    config: ModelConfig, arrays: Arrays, streams: Float[Array, "streams batch seq hidden"]
) -> Float[Array, "batch seq hidden"]:
    """What enters the last norm: the mean of the first stream and of products of the others."""
    others = jnp.einsum("nbsh,nhk->nbsk", streams[1:], arrays["altup_leave"].astype(streams.dtype))
    return jnp.mean(jnp.concatenate([streams[:1], _as_large_as(others, streams[0])]), axis=0)


def _as_large_as(x: jax.Array, reference: jax.Array) -> jax.Array:
    """`x` scaled to the root mean square of the features of `reference`."""
    size = jnp.sqrt(jnp.mean(jnp.square(reference), axis=-1, keepdims=True))
    return x * size / jnp.sqrt(jnp.maximum(jnp.mean(jnp.square(x), axis=-1, keepdims=True), _LEAST_POWER))


def layer(
    config: ModelConfig,
    sizes: AltUp,
    arrays: Arrays,
    streams: Float[Array, "streams batch seq hidden"],
    mix: Callable[[jax.Array], jax.Array],
    compute: Callable[[jax.Array], jax.Array],
    features: jax.Array,
    axes: MeshAxes,
) -> Float[Array, "streams batch seq hidden"]:
    """The streams after one layer.

    Args:
      config: the model.
      sizes: its `altup`.
      arrays: the layer's parameters by name.
      streams: the layer's input.
      mix, compute: the mixer and the feed-forward network, of normalized inputs.
      features: `[batch, seq, features]`, the layer's own vectors of the tokens.
      axes: mesh axes over which the model is split; `mix` and `compute` give this device's part of a sum.
    """
    weights = linear(_router(config, arrays, streams[sizes.active]), arrays["altup_prediction"])
    weights = weights.reshape(*weights.shape[:-1], sizes.count, sizes.count)
    predicted = streams + jnp.einsum("bsqp,pbsh->qbsh", weights, streams)
    active = predicted[sizes.active]

    x = norm(config, active, arrays["attention_norm"])
    bypass = linear(linear(x, arrays["laurel_enter"]), arrays["laurel_leave"])
    bypass = x + norm(config, bypass, arrays["laurel_norm"])
    mixed = active + norm(config, axes.total(mix(x)), arrays["attention_post_norm"])
    y = (mixed + bypass) * jnp.asarray(2.0**-0.5, x.dtype)
    y = y + norm(config, axes.total(compute(norm(config, y, arrays["mlp_norm"]))), arrays["mlp_post_norm"])

    shares = linear(_router(config, arrays, y), arrays["altup_correction"]) + 1
    corrected = predicted + jnp.moveaxis(shares, -1, 0)[..., None] * (y - active)
    gate = corrected[sizes.active]
    gate = gate * arrays["altup_scale"].astype(gate.dtype) if sizes.scaled else gate
    return corrected.at[1:].add(layer_embedding.output(config, arrays, gate, features))


def _router(config: ModelConfig, arrays: Arrays, x: jax.Array) -> jax.Array:
    """Numbers in (-1, 1) of each token, one for each stream."""
    x = norm(config, x, arrays["altup_router_norm"]) * jnp.asarray(1 / config.hidden_size, x.dtype)
    return jnp.tanh(linear(x, arrays["altup_router"], out_dtype=jnp.promote_types(x.dtype, jnp.float32))).astype(
        x.dtype
    )
