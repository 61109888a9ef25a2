"""What enters a decoder's layers: the embeddings of tokens, and the vectors that each layer gets of them besides."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.blocks import linear, norm

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays


def embedded(
    config: ModelConfig,
    arrays: Arrays,
    tokens: jax.Array,
    dtype: DTypeLike,
    axes: MeshAxes = ONE_DEVICE,
    positions: jax.Array | None = None,
) -> jax.Array:
    """The input of the first layer, `[batch, seq, hidden]`.

    Args:
      config: the model.
      arrays: the parameters outside of the layers by name.
      tokens: `[batch, seq]`, ids in the vocabulary.
      dtype: dtype of activations.
      axes: mesh axes over which the model is split, inside `shard_map`.
      positions: `[batch, seq]`, for a learned table of positions; None counts every row from 0.
    """
    x = _rows(arrays["embed"], tokens, dtype, axes)
    if config.embedding_multiplier != 1.0:
        x = x * jnp.asarray(config.embedding_multiplier, dtype)
    if config.learned_positions:
        if axes.features is not None:
            raise UnsupportedError(
                f"{config.family}: a learned table of positions is not split by features; set mesh.fsdp=1."
            )
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        places = jnp.broadcast_to(positions, tokens.shape) + config.position_offset
        x = x + _rows(arrays["positions"], places, dtype, ONE_DEVICE)
    if config.embedding_norm:
        x = norm(config, x, arrays["embed_norm"], bias=arrays.get("embed_norm_bias"))
    return x * jnp.asarray(config.hidden_size**0.5, dtype) if config.scale_embeddings else x


def layer_inputs(
    config: ModelConfig, arrays: Arrays, tokens: jax.Array, x: jax.Array, axes: MeshAxes
) -> jax.Array | None:
    """What each layer gets of each token besides the stream, `[layers, batch, seq, features]`: a row of a table of its
    own, and a product of the embedding; None where `config.layer_embedding` is. Gemma Team, "Gemma 3n" (2025).

    Args:
      config: the model.
      arrays: the parameters outside of the layers by name.
      tokens: `[batch, seq]`, ids in the vocabulary; those past the table's end have its first row, that of
        padding, and do not train it.
      x: `[batch, seq, hidden]`, result of `embedded`.
      axes: mesh axes over which the model is split, inside `shard_map`.
    """
    sizes = config.layer_embedding
    if sizes is None:
        return None
    if axes.features is not None:
        raise UnsupportedError(f"{config.family}: per-layer embeddings are not split by features; set mesh.fsdp=1.")
    inside = tokens < sizes.vocab_size
    rows = _rows(arrays["layer_embed"], jnp.where(inside, tokens, 0), x.dtype, axes)
    rows = jnp.where(inside[..., None], rows, jax.lax.stop_gradient(rows))
    rows = rows * jnp.asarray(sizes.size**0.5, x.dtype)
    projected = linear(x, arrays["layer_projection"]) * jnp.asarray(config.hidden_size**-0.5, x.dtype)
    shape = (*tokens.shape, config.num_layers, sizes.size)
    projected = norm(config, projected.reshape(shape), arrays["layer_projection_norm"])
    return jnp.moveaxis((projected + rows.reshape(shape)) * jnp.asarray(2.0**-0.5, x.dtype), 2, 0)


def _rows(table: jax.Array, tokens: jax.Array, dtype: DTypeLike, axes: MeshAxes) -> jax.Array:
    """Rows of the embedding table; on explicit mesh axes they are split as the tokens are."""
    if isinstance(table, PackedQTensor):
        return table.columns(tokens).astype(dtype)
    if axes.features is not None:
        return _exchanged_rows(table, tokens, dtype, axes)
    if axes.tensor is not None:  # each token's row is on one device
        tokens = tokens - jax.lax.axis_index(axes.tensor) * table.shape[0]
        local = (tokens >= 0) & (tokens < table.shape[0])
        return axes.total(jnp.where(local[..., None], table[jnp.where(local, tokens, 0)].astype(dtype), 0))
    if jax.typeof(table).sharding.mesh.are_all_axes_auto or jax.typeof(table).sharding.mesh.empty:
        return table[tokens].astype(dtype)
    spec = tuple(jax.typeof(tokens).sharding.spec)
    spec += (None,) * (tokens.ndim + 1 - len(spec))
    return table.at[tokens].get(out_sharding=jax.sharding.PartitionSpec(*spec)).astype(dtype)


def _exchanged_rows(table: jax.Array, tokens: jax.Array, dtype: DTypeLike, axes: MeshAxes) -> jax.Array:
    """Rows of a table whose features are split over devices with tokens of their own: each device reads its features of
    all their tokens, and sends every device those of its tokens. The gradient takes the same way back.
    """
    everyone = jax.lax.all_gather(tokens, axes.features)
    parts = _rows(table, everyone, dtype, dataclasses.replace(axes, features=None))
    return jax.lax.all_to_all(parts, axes.features, 0, parts.ndim - 1, tiled=True)[0]
