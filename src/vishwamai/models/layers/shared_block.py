"""A block of attention and a gated unit that several layers share, before the state space of each of them. Glorioso et
al., "The Zamba2 Suite" (2024).

The block reads the stream next to the embeddings of the tokens. Its parameters are those of the first layer that uses
it, which hands them on in the memory of `layer`; each use has thin products of its own, which it adds to those of the
block. Pages hold keys and values, next to the state of the state space (`MixedPool`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Self

import jax.numpy as jnp

from vishwamai.core.activations import activate
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE
from vishwamai.models.blocks import linear, norm
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.attention_and_mamba import PagedMamba
from vishwamai.models.layers.feed_forward import unit_parameters
from vishwamai.models.layers.mamba2 import mamba_tensors
from vishwamai.models.layers.mixer import Arrays, Memory, Rows, Step
from vishwamai.models.pages import MixedPool
from vishwamai.models.parameters import PREFIX, Parameter, Tensor, matrix, norm_parameter

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig

EMBEDDED = "embedded"
"""Entry of a layer's memory: the embeddings of the tokens."""
_BLOCK = PREFIX + "shared_transformer."
_THIN = {"query": "q", "key": "k", "value": "v"}


@dataclasses.dataclass(frozen=True)
class _Attention(Attention):
    """Attention whose input is the stream next to the embeddings, with thin products added to its own."""

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        table = super().parameters(config)
        wide = {name: (2 * config.hidden_size, table[name].shape[1]) for name in _THIN}
        return table | {name: dataclasses.replace(table[name], shape=shape) for name, shape in wide.items()}

    def product(self, arrays: Arrays, name: str, x: jax.Array) -> jax.Array:
        out = super().product(arrays, name, x)
        return out + _thin(arrays, name, name, x) if f"{name}_enter" in arrays else out


@dataclasses.dataclass(frozen=True)
class SharedBlockAndMamba(PagedMamba):
    """A shared block, and a selective state space on the sum of its output and the stream.

    Attributes:
      uses: numbers of the layers that use a block, those of the blocks in turn.
      blocks: number of blocks.
      rank: features between the two matrices of a thin product.
      adapted: attention has thin products; the gated unit has them in any case.
      layer: the layer's own number.
    """

    uses: tuple[int, ...] = ()
    blocks: int = 1
    rank: int = 128
    adapted: bool = False
    layer: int = 0

    sizes_of: ClassVar[str | None] = "linear_attention"

    def placed(self, layer: int, layers: int) -> Self:
        return dataclasses.replace(self, layer=layer)

    @property
    def layer_type(self) -> str:
        return "hybrid"

    @property
    def attention(self) -> Attention:
        """The part that has pages."""
        return _Attention(self.window, self.rope)

    @property
    def block(self) -> int:
        """Number of the block."""
        return self.uses.index(self.layer) % self.blocks

    @property
    def sharing(self) -> str:
        """ "writes" where the layer's parameters have the block, "reads" in its other uses."""
        return "writes" if self.uses[self.block] == self.layer else "reads"

    @property
    def unread(self) -> tuple[str, ...]:
        return (_BLOCK,) if self.sharing == "reads" else ()

    @property
    def layer_tensors(self) -> Mapping[str, Tensor]:
        """The thin products of every use lie next to the first layer's block, by the number of the use."""
        first = _BLOCK.replace("{layer}", str(self.uses[self.block]))
        number, unit = self.uses.index(self.layer), "feed_forward.gate_up_proj"
        enter, leave = (f"_adapter_list.{number}.{i}.weight" for i in range(2))
        return {
            **{name: Tensor(f"{_BLOCK}self_attn.{short}_proj.weight", True) for name, short in _THIN.items()},
            **{f"{name}_enter": Tensor(f"{first}self_attn.linear_{x}{enter}", True) for name, x in _THIN.items()},
            **{f"{name}_leave": Tensor(f"{first}self_attn.linear_{x}{leave}", True) for name, x in _THIN.items()},
            **{name: Tensor(f"{_BLOCK}{unit}.weight", True, name) for name in ("gate", "up")},
            **{f"{name}_leave": Tensor(f"{first}{unit}{leave}", True, name) for name in ("gate", "up")},
            "unit_enter": Tensor(f"{first}{unit}{enter}", True),
            "output": Tensor(_BLOCK + "self_attn.o_proj.weight", True),
            "down": Tensor(_BLOCK + "feed_forward.down_proj.weight", True),
            "block_norm": Tensor(_BLOCK + "input_layernorm.weight"),
            "block_mlp_norm": Tensor(_BLOCK + "pre_ff_layernorm.weight"),
            "block_output": Tensor(PREFIX + "linear.weight", True),
            "attention_norm": Tensor(PREFIX + "mamba_decoder.input_layernorm.weight"),
            **mamba_tensors(PREFIX + "mamba_decoder.mamba."),
        }

    def block_parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """The parameters of the block by name."""
        hidden = config.hidden_size
        norms = {"block_norm": norm_parameter(config, 2 * hidden), "block_mlp_norm": norm_parameter(config, hidden)}
        unit = unit_parameters(hidden, config.intermediate_size)
        return {**norms, **self.attention.parameters(config), **unit}

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        hidden, block = config.hidden_size, self.block_parameters(config)
        table = {
            "attention_norm": norm_parameter(config, hidden),
            "block_output": matrix(hidden, hidden, (None, "embed")),
            "unit_enter": Parameter((hidden, self.rank), ("embed", None)),
        }
        thin = ("gate", "up", *(_THIN if self.adapted else ()))
        for name in thin:
            width, axis = block[name].shape[1], block[name].axes[1]
            table[f"{name}_leave"] = Parameter((self.rank, width), (None, axis))
            if name in _THIN:
                table[f"{name}_enter"] = Parameter((2 * hidden, self.rank), ("embed", None))
        return {**(block if self.sharing == "writes" else {}), **table, **super().parameters(config)}

    def mixed(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        tokens: Rows | Step,
        pool: PyTree,
        first: PyTree,
        memory: Memory,
    ) -> tuple[jax.Array, PyTree, Memory]:
        """The output for the stream `x`, without a norm, as of `Mixer.step`, and the pool and the memory after it.

        Args:
          config, arrays, x: arguments of a layer's call.
          tokens: whole sequences, or the new tokens of a step.
          pool, first: arguments of a step; None for whole sequences.
          memory: memory of `layer`, with the embeddings, and the parameters of the blocks that earlier layers have.
        """
        name = f"{self.layer_type} {self.block}"
        if self.sharing == "writes":
            memory = {**memory, name: {key: arrays[key] for key in self.block_parameters(config)}}
        arrays = {**memory[name], **arrays}
        wide = norm(config, jnp.concatenate([x, memory[EMBEDDED]], axis=-1), arrays["block_norm"])
        if isinstance(tokens, Rows):
            axes = tokens.axes
            out = self.attention(config, arrays, wide, tokens)
        else:
            axes = ONE_DEVICE
            out, pages = self.attention.step(config, arrays, wide, tokens, pool.pages, first.pages)
        out = norm(config, axes.total(out), arrays["block_mlp_norm"])
        out = linear(axes.total(self._unit(config, arrays, out)), arrays["block_output"])
        x = norm(config, x + out, arrays["attention_norm"])
        if isinstance(tokens, Rows):
            return self(config, arrays, x, tokens), pool, memory
        out, states = self.step(config, arrays, x, tokens, pool.states, first.states)
        return out, MixedPool(pages, states), memory

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        block = self.block_parameters(config).values() if self.sharing == "reads" else ()
        products = sum(2.0 * math.prod(parameter.shape) for parameter in block if len(parameter.shape) > 1)
        return super().mixing_flops(config, length) + self.attention.mixing_flops(config, length) + products

    def _unit(self, config: ModelConfig, arrays: Arrays, x: jax.Array) -> jax.Array:
        """The gated unit, with its thin products; over the axis `tensor`, this device's part of a sum."""
        gate, up = (linear(x, arrays[name]) + _thin(arrays, "unit", name, x) for name in ("gate", "up"))
        return linear(activate(config.activation, gate) * up, arrays["down"])


def first_memory(config: ModelConfig, x: jax.Array) -> dict[str, jax.Array]:
    """What the layers of a model with shared blocks pass on before the first of them: the embeddings."""
    return {EMBEDDED: x} if any(isinstance(kind.mixer, SharedBlockAndMamba) for kind in config.layers) else {}


def _thin(arrays: Arrays, enter: str, leave: str, x: jax.Array) -> jax.Array:
    return linear(linear(x, arrays[f"{enter}_enter"]), arrays[f"{leave}_leave"])
