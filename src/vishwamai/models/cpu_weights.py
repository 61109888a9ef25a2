"""Weights of a decoder in the order in which the native CPU kernels read them, for serving."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from vishwamai.core.arguments import checked
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.packed_qtensor import has_kernel
from vishwamai.core.types import PyTree
from vishwamai.models.decoder import Decoder
from vishwamai.models.periods import segments
from vishwamai.models.shifted_weight import ShiftedWeight
from vishwamai.models.storage import HEAD
from vishwamai.ops.matmul.packed_weight import DTYPES, pack_weight
from vishwamai.ops.quantization import quantize


@checked
def pack_weights(model: Decoder, *, quantize_head: bool = False) -> Decoder:
    """Packs the weights of the layers' products in place, one after another; returns the model.

    Decoding then reads them at the speed of memory. They have no gradient and are not saved. The head is read in place,
    and a tied one is the embedding too, so it is held once. Stacked layers stay as they are, and so do weights of e5m2
    and of another dtype than the model's.

    Args:
      model: a decoder whose arrays are on one CPU.
      quantize_head: bool, True rounds the head to int8 in blocks (`storage.HEAD`), and packs it. A tied embedding is
        then read out of it.

    >>> from flax import nnx
    >>> from vishwamai.models import Decoder, ModelConfig, pack_weights
    >>> config = ModelConfig.from_dict({
    ...     "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128,
    ...     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    ...     "max_position_embeddings": 512})
    >>> pack_weights(Decoder(config, rngs=nnx.Rngs(0), stacked=False)).layers[0].down.get_value().shape
    (128, 64)
    """
    kinds = (kind for segment in segments(model.config, model.stacked) for kind in segment.kinds)
    for kind, layer in zip(kinds, model.layers, strict=True):
        for name, parameter in kind.parameters(model.config).items():
            variable = getattr(layer, name)
            if parameter.matrix and _packable(variable.get_value(), model.dtype, len(parameter.shape)):
                variable.set_value(jax.block_until_ready(_packed(variable.get_value())))
    if quantize_head:
        variable = model.embed if model.config.tie_embeddings else model.head
        table = jax.jit(lambda x: quantize(x, HEAD.format, axis=-1, block_size=HEAD.block_size))(model.head_weight())
        variable.set_value(jax.block_until_ready(pack_weight(table, transpose=True)))
    return model


def _packed(value: PyTree) -> PyTree:
    if isinstance(value, ShiftedWeight):
        return dataclasses.replace(value, weight=_packed(value.weight))
    return pack_weight(value)


def _packable(value: object, dtype: np.dtype, ndim: int) -> bool:
    """Whether there is a kernel for the packed weight; `ndim` is what it has where layers are not stacked."""
    if isinstance(value, ShiftedWeight):
        return _packable(value.weight, dtype, ndim)
    if isinstance(value, QTensor):
        return has_kernel(value.format, value.block_size) and value.ndim == ndim
    return isinstance(value, jax.Array) and value.ndim == 2 and value.dtype == dtype and dtype.name in DTYPES
