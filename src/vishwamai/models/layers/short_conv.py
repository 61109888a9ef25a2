"""A short causal convolution between two gates, as LFM2 has it. Liquid AI, "LFM2 Technical Report" (2025).

`output = C * conv(B * x)` with B, C and x products of the layer's input. Its state is the last few tokens of B * x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vishwamai.models.blocks import linear
from vishwamai.models.layers.mixer import Arrays
from vishwamai.models.layers.recurrent import Recurrent, Tokens
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ShortConv(Recurrent):
    """A gated convolution.

    Attributes:
      width: tokens that the convolution sees.
    """

    width: int = 3

    tensors: ClassVar[Mapping[str, Tensor]] = {
        "conv_inputs": Tensor(PREFIX + "conv.in_proj.weight", True),
        "conv_filter": Tensor(PREFIX + "conv.conv.weight"),
        "conv_output": Tensor(PREFIX + "conv.out_proj.weight", True),
    }

    @property
    def layer_type(self) -> str:
        return "conv"

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden = config.hidden_size
        return {
            "conv_inputs": matrix(hidden, 3 * hidden, ("embed", None)),
            "conv_filter": Parameter((hidden, 1, self.width), (None, None, None)),
            "conv_output": matrix(hidden, hidden, (None, "embed")),
        }

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {"filter": (self.width - 1, config.hidden_size)}

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        enter, leave, value = jnp.split(linear(x, arrays["conv_inputs"]), 3, axis=-1)
        kernel = arrays["conv_filter"][:, 0].astype(x.dtype)
        mixed = leave * tokens.convolve("filter", enter * value, kernel)
        # Every device of the mesh axis "tensor" has all channels: the sum over them counts one.
        return tokens.axes.once(linear(checkpoint_name(mixed, "mixed"), arrays["conv_output"]))

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 2.0 * (self.width + 1) * config.hidden_size  # the filter and two gates
