"""A short causal convolution between two gates, as LFM2 has it. Liquid AI, "LFM2 Technical Report" (2025).

`output = C * conv(B * x)` with B, C and x products of the layer's input. Its state is the last few tokens of B * x.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.errors import UnsupportedError
from vishwamai.models.blocks import linear
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix
from vishwamai.models.rotation import NO_ROTATION, Rope

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ShortConv(Mixer):
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

    @classmethod
    def read(cls, sizes: Mapping[str, Any], window: int | None, rope: Rope) -> Self:
        return cls(None, NO_ROTATION, **sizes)

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

    def __call__(self, config: ModelConfig, arrays: Arrays, x: Any, rows: Rows) -> Any:
        if rows.axes.sequence is not None:
            raise UnsupportedError(
                f"{config.family}: rows are split over the mesh axis {rows.axes.sequence!r}, and layers of type "
                f"'{self.layer_type}' need whole rows; set mesh.sequence=1."
            )
        enter, leave, tokens = jnp.split(linear(x, arrays["conv_inputs"]), 3, axis=-1)
        kernel = arrays["conv_filter"][:, 0].astype(x.dtype)
        mixed = leave * vishwamai.causal_conv1d(enter * tokens, kernel, segment_ids=rows.segment_ids)
        # Every device of the mesh axis "tensor" has all channels: the sum over them counts one.
        return rows.axes.once(linear(checkpoint_name(mixed, "mixed"), arrays["conv_output"]))

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 2.0 * (self.width + 1) * config.hidden_size  # the filter and two gates
