"""The mixer of Mamba. Gu, Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces" (2023); Falcon-Mamba
and Jamba have it, too.

One product makes the tokens and the gate. The tokens pass a short causal convolution; a second product makes their B
and C and, with a third one, a step for each channel. The state space has a decay for each channel and number of its
state.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.activations import activate
from vishwamai.models.blocks import linear
from vishwamai.models.layers.mamba2 import mamba_tensors
from vishwamai.models.layers.mixer import Arrays
from vishwamai.models.layers.recurrent import Recurrent, Tokens
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig


def scan_tensors(module: str) -> dict[str, Tensor]:
    """The tensors of a mixer whose module has that name, by the parameter's name."""
    return {
        **mamba_tensors(module),
        "mamba_select": Tensor(module + "x_proj.weight", True),
        "mamba_step_up": Tensor(module + "dt_proj.weight", True),
        "mamba_step": Tensor(module + "dt_proj.bias"),
        **{f"mamba_{name}_norm": Tensor(module + f"{short}_layernorm.weight") for name, short in _NORMS.items()},
    }


_NORMS = {"step": "dt", "enter": "b", "leave": "c"}
"""What norms of the second product are called in checkpoints."""


@dataclasses.dataclass(frozen=True)
class Mamba1(Recurrent):
    """A selective state space of channels.

    Attributes:
      inner_size: number of channels; None for `expand` times `hidden_size`.
      expand: factor of `hidden_size`.
      state_dim: numbers of the state for each channel.
      width: tokens that the convolution sees.
      step_rank: features that the steps are made of; None for a sixteenth of `hidden_size`.
      filter_bias, biases: the convolution has a bias; the first and the last product have biases.
      norms: norms of the steps' features, B and C: "scaled", "plain" (without a scale), or None.
      norms_eps: constant of these norms; None for that of the model.
    """

    inner_size: int | None = None
    expand: int = 2
    state_dim: int = 16
    width: int = 4
    step_rank: int | None = None
    filter_bias: bool = True
    biases: bool = False
    norms: str | None = None
    norms_eps: float | None = None

    tensors: ClassVar[Mapping[str, Tensor]] = scan_tensors(PREFIX + "mamba.")

    @property
    def layer_type(self) -> str:
        return "linear_attention"

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, channels, rank = config.hidden_size, self.channels(config), self.rank(config)
        table = {
            "mamba_input": matrix(hidden, 2 * channels, ("embed", None)),
            "mamba_filter": Parameter((channels, 1, self.width), (None, None, None)),
            "mamba_select": matrix(channels, rank + 2 * self.state_dim, (None, None)),
            "mamba_step_up": matrix(rank, channels, (None, None)),
            "mamba_step": Parameter((channels,), (None,), "zeros"),
            "mamba_rate": Parameter((channels, self.state_dim), (None, None), "log_uniform"),
            "mamba_skip": Parameter((channels,), (None,), "ones"),
            "mamba_output": matrix(channels, hidden, (None, "embed")),
        }
        if self.norms == "scaled":
            sizes = {"step": rank, "enter": self.state_dim, "leave": self.state_dim}
            table |= {f"mamba_{name}_norm": Parameter((size,), (None,), "ones") for name, size in sizes.items()}
        if self.filter_bias:
            table["mamba_filter_bias"] = Parameter((channels,), (None,), "zeros")
        if self.biases:
            table["mamba_input_bias"] = Parameter((2 * channels,), (None,), "zeros")
            table["mamba_output_bias"] = Parameter((hidden,), ("embed",), "zeros")
        return table

    def channels(self, config: ModelConfig) -> int:
        """Number of channels."""
        return self.inner_size or self.expand * config.hidden_size

    def rank(self, config: ModelConfig) -> int:
        """Features that the steps are made of."""
        return self.step_rank or -(-config.hidden_size // 16)

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        channels = self.channels(config)
        return {"filter": (self.width - 1, channels), "memory": (channels, self.state_dim, 1)}

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        wide, rank = jnp.promote_types(x.dtype, jnp.float32), self.rank(config)
        mixed, gate = jnp.split(linear(x, arrays["mamba_input"], arrays.get("mamba_input_bias")), 2, axis=-1)
        kernel, bias = arrays["mamba_filter"][:, 0].astype(x.dtype), arrays.get("mamba_filter_bias")
        bias = None if bias is None else bias.astype(x.dtype)
        mixed = tokens.convolve("filter", mixed, kernel, bias, config.activation)
        parts = jnp.split(linear(mixed, arrays["mamba_select"]), (rank, rank + self.state_dim), axis=-1)
        step, enter, leave = (self._normalized(config, arrays, name, part) for name, part in zip(_NORMS, parts))
        step = linear(step, arrays["mamba_step_up"]).astype(wide)
        step = jax.nn.softplus(step + arrays["mamba_step"].astype(wide))
        rate, skip = -jnp.exp(arrays["mamba_rate"].astype(wide)), arrays["mamba_skip"].astype(wide)

        def scan(x: jax.Array, dt: jax.Array, B: jax.Array, C: jax.Array, **options: Any) -> jax.Array:
            return vishwamai.state_space(x, dt, rate, B, C, skip, **options)

        heads, step = jnp.swapaxes(mixed, 1, 2)[..., None], jnp.swapaxes(step, 1, 2)
        out = tokens.recur("memory", scan, heads, step, enter[:, None], leave[:, None])  # [batch, channels, seq, 1]
        out = jnp.swapaxes(out[..., 0], 1, 2).astype(wide) * activate("silu", gate.astype(wide))
        out = checkpoint_name(out.astype(x.dtype), "mixed")
        # Every device of the mesh axis "tensor" has all channels: the sum over them counts one.
        return tokens.axes.once(linear(out, arrays["mamba_output"], arrays.get("mamba_output_bias")))

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 4.0 * self.channels(config) * self.state_dim  # write, read

    def _normalized(self, config: ModelConfig, arrays: Arrays, name: str, x: jax.Array) -> jax.Array:
        if self.norms is None:
            return x
        return vishwamai.rms_norm(x, arrays.get(f"mamba_{name}_norm"), eps=self.norms_eps or config.norm_eps)
