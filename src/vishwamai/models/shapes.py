"""A decoder of shapes in place of arrays: what `from_pretrained` would load onto devices that need not be there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, Sharding

from vishwamai.core.types import PyTree
from vishwamai.models.checkpoint import storages
from vishwamai.models.config import ModelConfig
from vishwamai.models.decoder import Decoder
from vishwamai.models.next_token import decoder_class
from vishwamai.models.parameters import Parameter, parameter_path
from vishwamai.models.storage import KEEP, QUANTIZATIONS, parameter_sharding
from vishwamai.parallel import LogicalRules

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def decoder_shapes(
    directory: Path,
    config: ModelConfig,
    dtype: DTypeLike,
    quantize: str | None,
    place: Sharding | tuple[Mesh, LogicalRules],
) -> Decoder:
    """The decoder whose parameters are `jax.ShapeDtypeStruct`s with shardings; reads headers only.

    Args:
      directory: the checkpoint, whose headers say what `quantize="keep"` holds.
      config: its configuration.
      dtype, quantize: arguments of `from_pretrained`.
      place: sharding of every parameter, or the mesh and the rules by which it is split.

    Raises:
      VishwamaiError: as `from_pretrained`.

    >>> import pathlib, jax
    >>> from jax.sharding import SingleDeviceSharding
    >>> from vishwamai.models import ModelConfig
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> place = SingleDeviceSharding(jax.devices()[0])
    >>> decoder_shapes(pathlib.Path("."), config, "bfloat16", "int8", place).layers[0].up.get_value().scales.shape
    (1, 128)
    """
    published = storages(directory, config) if quantize == KEEP else None
    form = None if quantize is None or quantize == KEEP else QUANTIZATIONS[quantize]

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> PyTree:
        layer = None if layers is None else layers[0]
        where = parameter_path(name, layer)
        storage = form if parameter.matrix else None
        if published is not None:
            storage = published(name, parameter, layer)
        if storage is None:
            kind = jnp.float32 if parameter.float32 else dtype
            sharding = place if isinstance(place, Sharding) else parameter_sharding(*place, parameter, 1, where)
            return jax.ShapeDtypeStruct(parameter.shape, kind, sharding=sharding)
        weight = storage.shapes(parameter)
        if isinstance(place, Sharding):
            return jax.tree.map(lambda x: x.update(sharding=place), weight)
        split = storage.shardings(*place, parameter, 1, where)
        return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), weight, split)

    return decoder_class(config)(config, dtype=dtype, param_dtype=dtype, stacked=False, make=make)
