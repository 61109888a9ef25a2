"""The halves of layers that have one half only, as those of Mamba2 and Nemotron-H: the mixer, or the feed-forward
network, that a layer does not have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.layers.feed_forward import ExpertLoad, FeedForward
from vishwamai.models.layers.mixer import Arrays, Mixer, Rows, Step
from vishwamai.models.parameters import Parameter
from vishwamai.models.rotation import NO_ROTATION, Rope

if TYPE_CHECKING:
    import jax

    from vishwamai.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class NoMixer(Mixer):
    """The mixer of a layer that is a feed-forward network alone.

    Attributes:
      name: word of `layer_types` for such a layer.
    """

    name: str = "mlp"

    @classmethod
    def read(cls, sizes: Mapping[str, object], window: int | None, rope: Rope) -> Self:
        return cls(None, NO_ROTATION)

    @property
    def layer_type(self) -> str:
        return self.name

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        return {}

    def __call__(self, config: ModelConfig, arrays: Arrays, x: jax.Array, rows: Rows) -> jax.Array:
        raise AssertionError("`layer` does not call it")

    def step(
        self, config: ModelConfig, arrays: Arrays, x: jax.Array, step: Step, pool: PyTree, first: PyTree
    ) -> tuple[jax.Array, PyTree]:
        raise AssertionError("`layer` does not call it")

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        return 2 * config.num_kv_heads, 0

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        return {}

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        return 0.0

    def ring_features(self, config: ModelConfig) -> int:
        return 0


@dataclasses.dataclass(frozen=True)
class NoMixerOfExperts(NoMixer):
    """The same of a layer that is a mixture of experts alone."""

    name: str = "moe"


@dataclasses.dataclass(frozen=True)
class NoFeedForward(FeedForward):
    """The feed-forward network of a layer that is a mixer alone."""

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        return {}

    def __call__(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: jax.Array,
        axes: MeshAxes = ONE_DEVICE,
        token_mask: jax.Array | None = None,
    ) -> tuple[jax.Array, ExpertLoad | None]:
        raise AssertionError("`layer` does not call it")
