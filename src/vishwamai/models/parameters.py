"""The decoder's parameters: shapes, logical names of their axes, initial values, and tensors of checkpoints.

The halves of a layer state theirs (`models/layers`). Random initialization, loading, saving, sharding and quantization
all follow these tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

LOGICAL_NAMES = ("vocab", "embed", "heads", "kv_heads", "mlp", "experts")
"""All names of axes that the tables use; rules (`vishwamai.parallel.LogicalRules`) map them to mesh axes."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a decoder, without the axis of stacked layers.

    Attributes:
      shape: its shape.
      axes: name of each axis in `LOGICAL_NAMES`, or None where it is never split.
      start: "normal" (deviation `initializer_range`), "ones", "zeros" or "log_uniform" (the
        logarithm of a number from 0.01 to 16, rates of a decay).
      matrix: a product contracts its axis -2, so that it may be quantized.
      float32: it stays float32 whatever the model's dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    start: str = "normal"
    matrix: bool = False
    float32: bool = False


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a parameter lies in a checkpoint.

    Attributes:
      name: the tensor's name; `{layer}` is the layer's number. With `{expert}` the parameter stacks the tensors of all
        experts.
      transpose: the tensor is stored `[out, in]`, the parameter `[in, out]`.
      part: the part of a tensor that several parameters share ("query", "gate", "even", ...; see `tensors.py`); None
        for the whole tensor.
      row: the tensor has an axis of 1 before those of the parameter.
    """

    name: str
    transpose: bool = False
    part: str | None = None
    row: bool = False


PREFIX = "model.layers.{layer}."
"""Start of the names of a layer's tensors."""

TOP_TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight"),
    "norm": Tensor("model.norm.weight"),
    "norm_bias": Tensor("model.norm.bias"),
    "head": Tensor("lm_head.weight"),
    "head_bias": Tensor("lm_head.bias"),
    "layer_embed": Tensor("model.embed_tokens_per_layer.weight"),
    "layer_projection": Tensor("model.per_layer_model_projection.weight", True),
    "layer_projection_norm": Tensor("model.per_layer_projection_norm.weight"),
    "altup_enter": Tensor("model.altup_projections.{expert}.weight", True),
    "altup_leave": Tensor("model.altup_unembed_projections.{expert}.weight", True),
}
"""Tensors of the parameters outside of the layers, where a family has no other."""


@dataclasses.dataclass(frozen=True)
class LayerEmbedding:
    """What each layer gets of each token by a table of its own; see `inputs.layer_inputs`.

    Attributes:
      size: features of a token's vector for one layer.
      vocab_size: rows of the table.
    """

    size: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class NextToken:
    """The head that predicts the token after the next one (MTP), as `next_token.NextTokenHead` computes it.

    Attributes:
      start: the start of the names of its tensors; `{layers}` is the number of the model's layers.
      layer: text that follows it in the names of the tensors of its layer.
      token_norm, hidden_norm, join, norm: the names of its other tensors, without `start` and `.weight`: the norms of
        the token's embedding and of the hidden state, the product of the two, and the norm before the model's head.
      normalized: the hidden state that it hands on is the one after the last norm; False: the one before it.
      copies: names of tensors that repeat the model's embedding and head.
    """

    start: str
    layer: str
    token_norm: str
    hidden_norm: str
    join: str
    norm: str
    normalized: bool = False
    copies: tuple[str, ...] = ()

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors outside of its layer, by parameter."""
        names = {name: getattr(self, name) for name in ("token_norm", "hidden_norm", "join", "norm")}
        return {name: Tensor(f"{self.start}{stem}.weight", name == "join") for name, stem in names.items()}


def norm_parameter(config: ModelConfig, size: int) -> Parameter:
    """The scale of a norm over `size` features."""
    return Parameter((size,), (None,), "zeros" if config.norm_offset else "ones")


def norm_parameters(config: ModelConfig, name: str) -> dict[str, Parameter]:
    """The scale and the bias, where the family has them, of a norm over the features of the stream."""
    table = {name: norm_parameter(config, config.hidden_size)} if config.norm_scale else {}
    return table | ({f"{name}_bias": Parameter((config.hidden_size,), (None,), "zeros")} if config.norm_bias else {})


def matrix(rows: int, columns: int, axes: tuple[str | None, str | None]) -> Parameter:
    """The weight `[in, out]` of a product."""
    return Parameter((rows, columns), axes, matrix=True)


def top_parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Parameters outside the layers, by name."""
    if config.next_token is not None:  # its embedding and its head are the model's
        norms = ("token_norm", "hidden_norm", "norm")
        table = {key: p for name in norms for key, p in norm_parameters(config, name).items()}
        return table | {"join": Parameter((2 * config.hidden_size, config.hidden_size), (None, "embed"))}
    embedding = Parameter((config.vocab_size, config.hidden_size), ("vocab", "embed"))
    table = {"embed": embedding, **norm_parameters(config, "norm")}
    if not config.tie_embeddings:
        table["head"] = embedding
    if config.learned_positions:
        rows = config.max_positions + config.position_offset
        table["positions"] = Parameter((rows, config.hidden_size), (None, "embed"))
    if config.embedding_norm:
        table |= norm_parameters(config, "embed_norm")
    if config.head_bias:
        table["head_bias"] = Parameter((config.vocab_size,), ("vocab",), "zeros")
    if config.layer_embedding is not None:
        width = config.num_layers * config.layer_embedding.size
        table["layer_embed"] = Parameter((config.layer_embedding.vocab_size, width), ("vocab", None))
        table["layer_projection"] = Parameter((config.hidden_size, width), ("embed", None))
        table["layer_projection_norm"] = norm_parameter(config, config.layer_embedding.size)
    if config.altup is not None:
        shape = (config.altup.count - 1, config.hidden_size, config.hidden_size)
        table |= dict.fromkeys(("altup_enter", "altup_leave"), Parameter(shape, (None, "embed", None)))
    return table


def parameter_path(name: str, layer: int | None) -> str:
    """What a parameter is called among all of a model's: by its layer, the first one of stacked layers; None outside.

    >>> parameter_path("query", 3), parameter_path("embed", None)
    ('layers/3/query', 'embed')
    """
    return name if layer is None else f"layers/{layer}/{name}"


def parameter_axes(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """The logical names of the axes of every parameter by the parameter's name, without the axis of stacked layers."""
    layers = (kind.parameters(config) for kind in dict.fromkeys(config.layers))
    tables = (top_parameters(config), *layers)
    return {name: parameter.axes for table in tables for name, parameter in table.items()}


def split_units(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """What mesh axes may split, by logical axis: a noun in the plural, and the number, which a mesh axis divides.

    Latent attention has no kv heads, a dense model no experts.
    """
    units: dict[str, tuple[str, int]] = {}
    for kind in dict.fromkeys(config.layers):
        for axis, (noun, count) in kind.mixer.units(config).items():
            units[axis] = noun, math.gcd(count, units[axis][1] if axis in units else 0)
    sizes = (
        size
        for kind in config.layers
        for parameter in kind.parameters(config).values()
        for axis, size in zip(parameter.axes, parameter.shape)
        if axis == "mlp"
    )
    if common := math.gcd(*sizes):
        units["mlp"] = ("features in its feed-forward networks", common)
    extra = 0 if config.layer_embedding is None else config.layer_embedding.vocab_size
    units["vocab"] = ("entries in its vocab", math.gcd(config.vocab_size, extra))
    if config.experts is not None:
        units["experts"] = ("experts", config.experts.count)
    return units
