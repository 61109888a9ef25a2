"""Gated delta nets whose queries, keys and values come of a product and a filter each: OLMo-Hybrid, and Kimi delta
attention, whose decays are those of channels. Kimi Team, "Kimi Linear" (2025).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import jax
import jax.numpy as jnp

from vishwamai.models.blocks import linear
from vishwamai.models.layers.gated_delta import GatedDelta
from vishwamai.models.layers.mixer import Arrays
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix
from vishwamai.models.rotation import Rope

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig

_NAMES = ("query", "key", "value")
_CHANNELS = {
    f"delta_{name}{suffix}": Tensor(PREFIX + f"{{module}}.{name[0]}_{kind}.weight", kind == "proj")
    for name in _NAMES
    for suffix, kind in (("", "proj"), ("_filter", "conv1d"))
}


def _tensors(module: str, **names: str) -> dict[str, Tensor]:
    """The tensors of a module: those of queries, keys and values, and `names` by the parameter's name."""
    table = {key: dataclasses.replace(t, name=t.name.replace("{module}", module)) for key, t in _CHANNELS.items()}
    for key, name in names.items():
        table[f"delta_{key}"] = Tensor(PREFIX + f"{module}.{name}", "proj" in name)
    return table


@dataclasses.dataclass(frozen=True)
class SeparateDelta(GatedDelta):
    """The gated delta net of OLMo-Hybrid."""

    tensors: ClassVar[Mapping[str, Tensor]] = _tensors(
        "linear_attn",
        gate="g_proj.weight",
        beta="b_proj.weight",
        decay="a_proj.weight",
        step="dt_bias",
        rate="A_log",
        norm="o_norm.weight",
        output="o_proj.weight",
    )

    @property
    def widths(self) -> dict[str, int]:
        """Features of queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return dict(zip(_NAMES, (keys, keys, self.value_heads * self.value_dim), strict=True))

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        table = super().parameters(config)
        del table["delta_filter"]
        filters = {name: Parameter((size, 1, self.width), (None, None, None)) for name, size in self.widths.items()}
        return table | {f"delta_{name}_filter": parameter for name, parameter in filters.items()}

    def _products(self, hidden: int) -> dict[str, Parameter]:
        table = super()._products(hidden)
        del table["delta_qkv"]
        return table | {f"delta_{name}": matrix(hidden, size, ("embed", None)) for name, size in self.widths.items()}

    def _filter(self, arrays: Arrays) -> jax.Array:
        return jnp.concatenate([arrays[f"delta_{name}_filter"][:, 0] for name in _NAMES])

    def _inputs(self, arrays: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        qkv = jnp.concatenate([linear(x, arrays[f"delta_{name}"]) for name in _NAMES], axis=-1)
        gate, beta, decay = (linear(x, arrays[f"delta_{name}"]) for name in ("gate", "beta", "decay"))
        return qkv, gate, beta, decay


@dataclasses.dataclass(frozen=True)
class KimiDelta(SeparateDelta):
    """Kimi delta attention: a decay for each channel of a key; the decays and the gate come of two products each, with
    as many features between as a head has. Keys have the heads and the features of values.
    """

    gate_activation: ClassVar[str] = "sigmoid"
    tensors: ClassVar[Mapping[str, Tensor]] = _tensors(
        "self_attn",
        gate_down="g_a_proj.weight",
        gate="g_b_proj.weight",
        beta="b_proj.weight",
        decay_down="f_a_proj.weight",
        decay="f_b_proj.weight",
        step="dt_bias",
        rate="A_log",
        norm="o_norm.weight",
        output="o_proj.weight",
    )

    @classmethod
    def read(cls, sizes: Mapping[str, object], window: int | None, rope: Rope) -> Self:
        sizes = {"value_heads": 32, "value_dim": 128, **sizes}
        keys = {"key_heads": sizes["value_heads"], "key_dim": sizes["value_dim"]}
        return super().read({**keys, **sizes}, window, rope)

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        rates = Parameter((1, 1, self.value_heads, 1), (None, None, None, None), "log_uniform")
        steps = Parameter((self.value_heads * self.key_dim,), (None,), "ones")
        return {**super().parameters(config), "delta_rate": rates, "delta_step": steps}

    def _products(self, hidden: int) -> dict[str, Parameter]:
        dim = self.value_dim
        return {
            **super()._products(hidden),
            "delta_gate_down": matrix(hidden, dim, ("embed", None)),
            "delta_gate": matrix(dim, self.value_heads * dim, (None, None)),
            "delta_decay_down": matrix(hidden, dim, ("embed", None)),
            "delta_decay": matrix(dim, self.value_heads * self.key_dim, (None, None)),
        }

    def _inputs(self, arrays: Arrays, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        qkv = jnp.concatenate([linear(x, arrays[f"delta_{name}"]) for name in _NAMES], axis=-1)
        gate, decay = (
            linear(linear(x, arrays[f"delta_{name}_down"]), arrays[f"delta_{name}"]) for name in ("gate", "decay")
        )
        return qkv, gate, linear(x, arrays["delta_beta"]), decay

    def _decay(self, arrays: Arrays, logits: jax.Array) -> jax.Array:
        step = jax.nn.softplus(logits.astype(jnp.float32) + arrays["delta_step"].astype(jnp.float32))
        step = step.reshape(*logits.shape[:-1], self.value_heads, self.key_dim)
        return -jnp.exp(arrays["delta_rate"].astype(jnp.float32)) * step
