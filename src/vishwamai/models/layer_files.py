"""A checkpoint's layers in memory one after another, for work that goes through them once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.models.checkpoint import Read, Weight, loaded
from vishwamai.models.parameters import Parameter, top_parameters

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.decoder import Layer


class LayerFiles:
    """A decoder whose layers are in memory one at a time; the head is not.

    Args:
      directory, dtype: arguments of `from_pretrained`.

    Attributes:
      model: the decoder. Its layers have shapes in place of arrays.

    Raises:
      ShapeError, UnsupportedError: as `from_pretrained`.
    """

    def __init__(self, directory: str | Path, dtype: DTypeLike):
        self._reads: dict[int, dict[str, Read]] = {}

        def later(name: str, parameter: Parameter, layers: tuple[int, ...] | None, read: Read) -> Weight:
            if layers is not None:
                self._reads.setdefault(layers[0], {})[name] = read
            elif name not in ("head", "head_bias"):
                return read()
            return jax.ShapeDtypeStruct(parameter.shape, jnp.float32 if parameter.float32 else dtype)

        self.model = loaded(directory, dtype, None, None, None, False, None, later)

    def layers(self) -> Iterator[Layer]:
        """The layers in turn. Each is in memory until the next is asked for; the embeddings until the first is."""
        for name in top_parameters(self.model.config):
            _empty(self.model, name)
        for number, layer in enumerate(self.model.layers):
            for name, read in self._reads[number].items():
                getattr(layer, name).set_value(read())
            yield layer
            for name in self._reads[number]:
                _empty(layer, name)


def _empty(module: nnx.Module, name: str) -> None:
    """Leaves the shape of a plain parameter."""
    value = getattr(module, name).get_value()
    getattr(module, name).set_value(jax.ShapeDtypeStruct(value.shape, value.dtype))
