"""The decoder's parameters, stated once: their shapes, the logical names of their axes, and how they start.

Random initialization, loading, saving, sharding and quantization all follow these tables.
"""

from __future__ import annotations

import dataclasses
import math

from vishwamai.models.config import Experts, Latent, ModelConfig
from vishwamai.models.layer_kinds import LayerKind

LOGICAL_NAMES = ("vocab", "embed", "heads", "kv_heads", "mlp", "experts")
"""All names of axes that the tables use; rules (`vishwamai.parallel.LogicalRules`) map them to mesh axes."""


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a decoder, without the axis of stacked layers.

    Attributes:
      shape: its shape.
      axes: for each axis one of `LOGICAL_NAMES`, or None where it is never split.
      start: "normal" (deviation `initializer_range`), "ones" or "zeros".
      matrix: a product contracts its axis -2, so that it may be quantized.
      float32: it stays float32 whatever the model's dtype.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    start: str = "normal"
    matrix: bool = False
    float32: bool = False


def top_parameters(config: ModelConfig) -> dict[str, Parameter]:
    """Parameters outside the layers, by name."""
    table = Parameter((config.vocab_size, config.hidden_size), ("vocab", "embed"))
    found = {"embed": table, "norm": _norm(config, config.hidden_size)}
    if not config.tie_embeddings:
        found["head"] = table
    return found


def layer_parameters(config: ModelConfig, kind: LayerKind) -> dict[str, Parameter]:
    """Parameters of one layer, by name."""
    attention = _attention(config) if config.latent is None else _latent_attention(config, config.latent)
    if kind.experts and config.experts is not None:
        return {**_norms(config), **attention, **_mixture(config, config.experts)}
    return {**_norms(config), **attention, **_feed_forward(config)}


def parameter_path(name: str, layer: int | None) -> str:
    """What a parameter is called among all of a model's: by its layer, the first one of stacked layers; None outside.

    >>> parameter_path("query", 3), parameter_path("embed", None)
    ('layers/3/query', 'embed')
    """
    return name if layer is None else f"layers/{layer}/{name}"


def parameter_axes(config: ModelConfig) -> dict[str, tuple[str | None, ...]]:
    """The logical names of the axes of every parameter by the parameter's name, without the axis of stacked layers."""
    layers = (layer_parameters(config, kind) for kind in dict.fromkeys(config.layers))
    tables = (top_parameters(config), *layers)
    return {name: parameter.axes for table in tables for name, parameter in table.items()}


def split_units(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """What mesh axes may split, by logical axis: in words, and how many of them. A mesh axis divides the number.

    Latent attention has no kv heads, a dense model no experts.
    """
    found = {"heads": ("query heads", config.num_heads)}
    if config.latent is None:
        found["kv_heads"] = ("kv heads", config.num_kv_heads)
    sizes = (
        size
        for kind in config.layers
        for parameter in layer_parameters(config, kind).values()
        for axis, size in zip(parameter.axes, parameter.shape)
        if axis == "mlp"
    )
    found["mlp"] = ("features in its feed-forward networks", math.gcd(*sizes))
    found["vocab"] = ("entries in its vocab", config.vocab_size)
    if config.experts is not None:
        found["experts"] = ("experts", config.experts.count)
    return found


def _norm(config: ModelConfig, size: int) -> Parameter:
    return Parameter((size,), (None,), "zeros" if config.norm_offset else "ones")


def _matrix(rows: int, columns: int, axes: tuple[str | None, str | None]) -> Parameter:
    return Parameter((rows, columns), axes, matrix=True)


def _norms(config: ModelConfig) -> dict[str, Parameter]:
    places = {"pre": ("norm",), "post": ("post_norm",), "both": ("norm", "post_norm")}[config.norms]
    names = (f"{block}_{place}" for block in ("attention", "mlp") for place in places)
    return {name: _norm(config, config.hidden_size) for name in names}


def _attention(config: ModelConfig) -> dict[str, Parameter]:
    hidden, dim = config.hidden_size, config.head_dim
    widths = {"query": (config.num_heads, "heads"), "key": (config.num_kv_heads, "kv_heads")}
    widths["value"] = widths["key"]
    found = {name: _matrix(hidden, heads * dim, ("embed", axis)) for name, (heads, axis) in widths.items()}
    found["output"] = _matrix(config.num_heads * dim, hidden, ("heads", "embed"))
    if config.attention_bias:
        found |= {f"{name}_bias": Parameter((h * dim,), (axis,), "zeros") for name, (h, axis) in widths.items()}
    if config.attention_bias if config.output_bias is None else config.output_bias:
        found["output_bias"] = Parameter((hidden,), ("embed",), "zeros")
    if config.qk_norm:
        for name in ("query", "key"):
            found[f"{name}_norm"] = _norm(config, dim if config.qk_norm == "head" else widths[name][0] * dim)
    if config.sinks:
        found["sinks"] = Parameter((config.num_heads,), ("heads",))
    return found


def _latent_attention(config: ModelConfig, latent: Latent) -> dict[str, Parameter]:
    hidden, heads = config.hidden_size, config.num_heads
    queries = heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        found = {"query": _matrix(hidden, queries, ("embed", "heads"))}
    else:
        found = {
            "query_down": _matrix(hidden, latent.query_rank, ("embed", None)),
            "query_down_norm": _norm(config, latent.query_rank),
            "query_up": _matrix(latent.query_rank, queries, (None, "heads")),
        }
    found["latent_down"] = _matrix(hidden, latent.kv_rank + latent.rope_dim, ("embed", None))
    found["latent_norm"] = _norm(config, latent.kv_rank)
    # Serving contracts other axes of it than training (the absorbed form), so it is not quantized.
    found["latent_up"] = Parameter((latent.kv_rank, heads * (latent.nope_dim + latent.value_dim)), (None, "heads"))
    found["output"] = _matrix(heads * latent.value_dim, hidden, ("heads", "embed"))
    if config.attention_bias:
        biased = {"latent_down": None, "output": "embed"} | ({"query_down": None} if latent.query_rank else {})
        for name, axis in biased.items():
            found[f"{name}_bias"] = Parameter((found[name].shape[1],), (axis,), "zeros")
    return found


def _mixture(config: ModelConfig, experts: Experts) -> dict[str, Parameter]:
    hidden, count, inner = config.hidden_size, experts.count, experts.inner_size or config.intermediate_size
    found = {"router": Parameter((hidden, count), ("embed", None))}
    if experts.method == "noaux_tc":
        found["router_correction"] = Parameter((count,), (None,), "zeros", float32=True)
    for name in ("gate", "up"):
        found[f"expert_{name}"] = Parameter((count, hidden, inner), ("experts", "embed", "mlp"), matrix=True)
    found["expert_down"] = Parameter((count, inner, hidden), ("experts", "mlp", "embed"), matrix=True)
    if experts.biases:
        found["router_bias"] = Parameter((count,), (None,), "zeros")
        for name, size in (("gate", inner), ("up", inner), ("down", hidden)):
            axis = "embed" if name == "down" else "mlp"
            found[f"expert_{name}_bias"] = Parameter((count, size), ("experts", axis), "zeros")
    wide = experts.shared_size or inner * experts.shared
    if wide:
        found |= {f"shared_{name}": _matrix(hidden, wide, ("embed", "mlp")) for name in ("gate", "up")}
        found["shared_down"] = _matrix(wide, hidden, ("mlp", "embed"))
    if wide and experts.shared_gate:
        found["shared_expert_gate"] = Parameter((hidden, 1), ("embed", None))
    return found


def _feed_forward(config: ModelConfig) -> dict[str, Parameter]:
    hidden, inner = config.hidden_size, config.intermediate_size
    found = {name: _matrix(hidden, inner, ("embed", "mlp")) for name in ("gate", "up")}
    found["down"] = _matrix(inner, hidden, ("mlp", "embed"))
    if config.mlp_bias:
        found |= {f"{name}_bias": Parameter((inner,), ("mlp",), "zeros") for name in ("gate", "up")}
        found["down_bias"] = Parameter((hidden,), ("embed",), "zeros")
    return found
