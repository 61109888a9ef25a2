"""Per-layer embeddings: each layer gates a vector that it has of each token, and adds its product to the stream. Gemma
Team, "Gemma 3n" (2025); `inputs.layer_inputs` makes the vectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vishwamai.models.blocks import linear, norm
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.mixer import Arrays

TENSORS: Mapping[str, Tensor] = {
    "layer_gate": Tensor(PREFIX + "per_layer_input_gate.weight", True),
    "layer_output": Tensor(PREFIX + "per_layer_projection.weight", True),
    "layer_output_norm": Tensor(PREFIX + "post_per_layer_input_norm.weight"),
}


def parameters(config: ModelConfig) -> dict[str, Parameter]:
    """The parameters of one layer by name; none where the model has no such embeddings."""
    if config.layer_embedding is None:
        return {}
    hidden, size = config.hidden_size, config.layer_embedding.size
    return {
        "layer_gate": matrix(hidden, size, ("embed", None)),
        "layer_output": matrix(size, hidden, (None, "embed")),
        "layer_output_norm": norm_parameter(config, hidden),
    }


def output(config: ModelConfig, arrays: Arrays, x: jax.Array, features: jax.Array) -> jax.Array:
    """What the layer adds: `norm(output(activation(gate(x)) * features))`.

    Args:
      config: the model.
      arrays: the layer's parameters by name.
      x: `[batch, seq, hidden]`, the stream.
      features: `[batch, seq, features]`, the layer's vectors of the tokens.
    """
    gated = linear(x, arrays["layer_gate"], activation=config.activation) * features
    return norm(config, linear(gated, arrays["layer_output"]), arrays["layer_output_norm"])
