"""Lightning attention: linear attention whose heads decay at fixed rates, the slower the deeper the layer. Qin et al.,
"Lightning Attention-2" (2024), as MiniMax-01 has it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

import vishwamai
from vishwamai.core.activations import activate
from vishwamai.models.blocks import linear
from vishwamai.models.layers.mixer import Arrays
from vishwamai.models.layers.recurrent import Recurrent, Tokens
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_NORM_EPS = 1e-6  # of the norm of the mixed values, whatever `rms_norm_eps` says: as the authors' code has it
_MODULE = PREFIX + "self_attn."


@dataclasses.dataclass(frozen=True)
class Lightning(Recurrent):
    """Linear attention with as many heads as the model's attention.

    Attributes:
      layer, layers: number of the layer, and of all layers, by which the rates of decay fall.
    """

    layer: int = 0
    layers: int = 1

    tensors: ClassVar[Mapping[str, Tensor]] = {
        "lightning_qkv": Tensor(_MODULE + "qkv_proj.weight", True),
        "lightning_gate": Tensor(_MODULE + "output_gate.weight", True),
        "lightning_norm": Tensor(_MODULE + "norm.weight"),
        "lightning_output": Tensor(_MODULE + "out_proj.weight", True),
    }

    @property
    def layer_type(self) -> str:
        return "linear_attention"

    def placed(self, layer: int, layers: int) -> Self:
        return dataclasses.replace(self, layer=layer, layers=layers)

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, width = config.hidden_size, config.num_heads * config.head_dim
        return {
            "lightning_qkv": matrix(hidden, 3 * width, ("embed", None)),
            "lightning_gate": matrix(hidden, width, ("embed", None)),
            "lightning_norm": Parameter((width,), (None,), "ones"),
            "lightning_output": matrix(width, hidden, (None, "embed")),
        }

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        return {"memory": (config.num_heads, config.head_dim, config.head_dim)}

    def mix(self, config: ModelConfig, arrays: Arrays, x: jax.Array, tokens: Tokens) -> jax.Array:
        heads, dim, shape = config.num_heads, config.head_dim, x.shape[:-1]
        qkv = activate(config.activation, linear(x, arrays["lightning_qkv"]))
        qkv = jnp.swapaxes(qkv.reshape(*shape, heads, 3 * dim), 1, 2)  # [batch, heads, seq, 3 * dim]
        query, key, value = jnp.split(qkv, 3, axis=-1)
        decay = jnp.broadcast_to(-self.rates(heads)[:, None], qkv.shape[:-1])

        def attend(query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, **options: Any) -> jax.Array:
            return vishwamai.linear_attention(query, key, value, decay, scale=1.0, **options)

        out = tokens.recur("memory", attend, query, key, value, decay)
        out = vishwamai.rms_norm(jnp.swapaxes(out, 1, 2).reshape(*shape, -1), arrays["lightning_norm"], eps=_NORM_EPS)
        gate = jax.nn.sigmoid(linear(x, arrays["lightning_gate"]))
        out = checkpoint_name((gate * out).astype(x.dtype), "mixed")
        # Every device of the mesh axis "tensor" has all heads: the sum over them counts one.
        return tokens.axes.once(linear(out, arrays["lightning_output"]))

    def rates(self, heads: int) -> jax.Array:
        """float32 `[heads]`: what a token takes from the logarithm of the state's factor."""
        slopes = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
        return jnp.asarray(slopes * (1 - self.layer / (self.layers - 1 + 1e-5) + 1e-5), jnp.float32)

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 4.0 * config.num_heads * config.head_dim**2  # write, read
