"""A mixer: the half of a layer in which tokens exchange information, such as attention.

A mixer is a frozen value. It states its parameters, computes whole sequences (training, scoring) and steps of serving
over its state, and gives the figures that planning and meshes need. `layers/attention.py` is the one to read first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.types import PyTree
from vishwamai.models.axes import ONE_DEVICE, MeshAxes
from vishwamai.models.parameters import Parameter, Tensor
from vishwamai.models.rotation import NO_ROTATION, Rope

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

    from vishwamai.models.config import ModelConfig
    from vishwamai.models.pages import PagedBatch

Arrays = Mapping[str, PyTree]
"""The parameters of one layer by their names: an array each, or a quantized weight, which is a tree of arrays."""
Memory = Mapping[str, PyTree]
"""What layers share: keys and values by layer type, an index of tokens, the embeddings of a shared block."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The tokens of a batch of whole sequences.

    Attributes:
      positions: `[batch, seq]`, positions of the tokens; None counts every row from 0.
      segment_ids: `[batch, seq]`, tokens see those of their own segment only; None for one segment a row.
      axes: mesh axes over which the model is split, inside `shard_map`.
    """

    positions: Int[Array, "batch seq"] | None = None
    segment_ids: Int[Array, "batch seq"] | None = None
    axes: MeshAxes = ONE_DEVICE


@dataclasses.dataclass(frozen=True)
class Step:
    """The new tokens of a serving step, as one row.

    Attributes:
      batch: the sequences, with their pages.
      positions: `[1, tokens]`, positions of the tokens.
      lengths: `[1, tokens]`, tokens of each token's sequence, for rotations that depend on it.
    """

    batch: PagedBatch
    positions: Int[Array, "1 tokens"]
    lengths: Int[Array, "1 tokens"]


@dataclasses.dataclass(frozen=True)
class Mixer:
    """How the tokens of a layer exchange information. A subclass adds its sizes as fields.

    Attributes:
      window: tokens that a token sees, its own included; None for all before it.
      rope: the rotation of queries and keys.
      stream_scale, block_scale: factors, with `ModelConfig.norms` "stream", of the stream and of the mixer's output.
      tensors: the tensors of checkpoints by the parameter's name, where a family has no other.
      sizes_of: the layer type whose sizes it has next to its own; None for its own alone.
    """

    window: int | None = None
    rope: Rope = NO_ROTATION
    stream_scale: float = 1.0
    block_scale: float = 1.0

    tensors: ClassVar[Mapping[str, Tensor]] = {}
    sizes_of: ClassVar[str | None] = None

    @classmethod
    def read(cls, sizes: Mapping[str, Any], window: int | None, rope: Rope) -> Self:
        """The mixer that a `config.json` describes.

        Args:
          sizes: its fields, from the keys that the family maps to "LAYER_TYPE.FIELD".
          window: tokens of the window of layers of its type; None for none.
          rope: the rotation of layers of its type.
        """
        return cls(window=window, rope=rope, **sizes)

    @property
    def layer_type(self) -> str:
        """What `layer_types` in a `config.json` calls it."""
        return "full_attention" if self.window is None else "sliding_attention"

    @property
    def layer_tensors(self) -> Mapping[str, Tensor]:
        """`tensors`, of mixers whose names depend on the layer too."""
        return self.tensors

    @property
    def unread(self) -> tuple[str, ...]:
        """Starts of the names of tensors that checkpoints have and the layer does not compute with."""
        return ()

    def parameters(self, config: ModelConfig) -> dict[str, Parameter]:
        """The parameters of one layer by name."""
        raise NotImplementedError

    def __call__(
        self, config: ModelConfig, arrays: Arrays, x: Float[Array, "batch seq hidden"], rows: Rows
    ) -> Float[Array, "batch seq hidden"]:
        """The output for whole sequences.

        Args:
          config: the model.
          arrays: the layer's parameters by name.
          x: the layer's input, normalized.
          rows: positions and segments of the tokens.

        Returns:
          The output; over the mesh axis `rows.axes.tensor`, this device's part of a sum.
        """
        raise NotImplementedError

    def step(
        self,
        config: ModelConfig,
        arrays: Arrays,
        x: Float[Array, "1 tokens hidden"],
        step: Step,
        pool: PyTree,
        first: PyTree,
    ) -> tuple[Float[Array, "1 tokens hidden"], PyTree]:
        """The output for new tokens of sequences whose earlier tokens are in the layer's state.

        Args:
          config, arrays, x: arguments of a layer's call.
          step: the sequences.
          pool: pages or states of the layers that are stacked with this one, as `page_shapes` gives them.
          first: int32 scalar, index of this layer's first entry in the pool.

        Returns:
          The output, and the pool with the new tokens written.
        """
        raise NotImplementedError

    def page_row(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of what a page holds of one token: `(2 * kv_heads, head_dim)`, or `(features,)` for all heads; of
        mixers with pages.
        """
        raise NotImplementedError

    def has_pages(self, config: ModelConfig) -> bool:
        """Whether pages hold what tokens need of earlier ones; mixers with a `state` have them where they say so."""
        return not self.state(config)

    def state(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 arrays of one sequence's state, by name; empty where the state is pages."""
        return {}

    def placed(self, layer: int, layers: int) -> Self:
        """The mixer of the layer of that number, of so many; a mixer whose numbers depend on it has them from here."""
        return self

    def part(self, devices: int) -> Self:
        """The mixer of one of so many devices of the mesh axis "tensor", in sizes that are its own."""
        return self

    def units(self, config: ModelConfig) -> dict[str, tuple[str, int]]:
        """What mesh axes may split, by logical axis: a noun in the plural, and the number."""
        raise NotImplementedError

    def mixing_flops(self, config: ModelConfig, length: int) -> float:
        """Operations of the forward pass for one token, without products with parameters.

        Args:
          config: the model.
          length: tokens of a row.
        """
        raise NotImplementedError

    def ring_features(self, config: ModelConfig) -> int:
        """Numbers of one token that travel around the ring where rows are split over devices.

        Raises:
          UnsupportedError: the mixer needs whole rows.
        """
        raise UnsupportedError(
            f"{config.family}: layers of type '{self.layer_type}' need whole rows; set mesh.sequence=1."
        )
