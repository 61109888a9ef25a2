"""Attention and a selective state space on the same input, added. Zuo et al., "Falcon-H1" (2025).

Pages hold the keys and values of attention, next to the state of the state space (`MixedPool`). Inputs and outputs of
both have factors (Yang et al., "Tensor Programs V", 2022), as have the parts of the product before the state space.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp

from vishwamai.core.types import PyTree
from vishwamai.models.blocks import times
from vishwamai.models.layers.attention import Attention
from vishwamai.models.layers.mamba2 import Mamba2, mamba_tensors
from vishwamai.models.layers.mixer import Arrays, Rows, Step
from vishwamai.models.pages import MixedPool
from vishwamai.models.parameters import PREFIX, Parameter, Tensor
from vishwamai.models.rotation import Rope

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig


class PagedMamba(Mamba2):
    """A selective state space in a layer that has attention, too: pages next to the states."""

    @classmethod
    def read(cls, sizes: Mapping[str, Any], window: int | None, rope: Rope) -> Self:
        return cls(window, rope, **sizes)

    @property
    def attention(self) -> Attention:
        """The part that has pages."""
        return Attention(self.window, self.rope)

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        return self.attention.page_row(config)

    def has_pages(self, config: ModelConfig) -> bool:
        return True

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return self.attention.units(config)


@dataclasses.dataclass(frozen=True)
class AttentionAndMamba(PagedMamba):
    """Attention plus a selective state space.

    Attributes:
      attention_input, attention_output: factors of attention's input and output.
      space_input, space_output: the same of the state space.
      part_scales: factors of the gate, the tokens, B, C and the steps.
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    space_input: float = 1.0
    space_output: float = 1.0
    part_scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)

    tensors: ClassVar[Mapping[str, Tensor]] = {**Attention.tensors, **mamba_tensors(PREFIX + "mamba.")}

    @property
    def layer_type(self) -> str:
        return self.attention.layer_type

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        return {**self.attention.parameters(config), **super().parameters(config)}

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        space = super().__call__(config, arrays, times(x, self.space_input), rows)
        attention = self.attention(config, arrays, times(x, self.attention_input), rows)
        return self._sum(space, attention)

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: PyTree
    ) -> tuple[jax.Array, PyTree]:
        inputs = times(x, self.space_input)
        space, states = super().step(config, arrays, inputs, step, pool.states, first.states)
        inputs = times(x, self.attention_input)
        attention, pages = self.attention.step(config, arrays, inputs, step, pool.pages, first.pages)
        return self._sum(space, attention), MixedPool(pages, states)

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return super().mixing_flops(config, length) + self.attention.mixing_flops(config, length)

    def _sum(self, space: jax.Array, attention: jax.Array) -> jax.Array:
        return times(space, self.space_output) + times(attention, self.attention_output)

    def _inputs(self, config: ModelConfig, arrays: Arrays, x: jax.Array) -> jax.Array:
        inner, width = self.inner(config), self.groups * self.state_dim
        sizes = (inner, inner, width, width, self.heads)
        factors = [jnp.full(size, scale, x.dtype) for size, scale in zip(sizes, self.part_scales, strict=True)]
        return super()._inputs(config, arrays, x) * jnp.concatenate(factors)
