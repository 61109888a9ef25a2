"""Weights of GGUF files in their own numbers: values and scales of blocks, as a `QTensor` has them.

Blocks with a scale alone are: Q4_0, Q5_0, Q8_0, Q6_K and MXFP4. Those of Q4_1, Q5_1, Q4_K and Q5_K add a least number
to each block, which a `QTensor` does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from vishwamai.models import gguf_blocks
from vishwamai.models.gguf_container import BlockTensor
from vishwamai.models.published.decoded import Computed, Decoded, Index
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored

Bytes = np.ndarray


def _unit(blocks: Bytes) -> Bytes:
    """Blocks whose float16 scale is 1."""
    blocks = blocks.copy()
    blocks[:, :2] = np.array([1], np.float16).view(np.uint8)
    return blocks


def _scaled_by_half(decode: Callable[[Bytes], np.ndarray]) -> Callable[[Bytes], tuple[np.ndarray, np.ndarray]]:
    """Of blocks that begin with a float16 scale."""

    def parts(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
        scales = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
        return decode(_unit(blocks)).astype(np.int8), scales

    return parts


def _q6_k(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    half = np.ascontiguousarray(blocks[:, 208:210]).view(np.float16).astype(np.float32)
    plain = blocks.copy()
    plain[:, 192:208] = 1
    plain[:, 208:210] = np.array([1], np.float16).view(np.uint8)
    return gguf_blocks.BLOCK_TYPES[14].decode(plain).astype(np.int8), half * scales  # exact: 11 and 8 bits


def _mxfp4(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], axis=-1)
    return codes.view(ml_dtypes.float4_e2m1fn), blocks[:, :1]


_FORMS: Mapping[str, tuple[Storage, Callable[[Bytes], tuple[np.ndarray, np.ndarray]]]] = {
    "Q4_0": (Storage("int4", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[2].decode)),
    "Q5_0": (Storage("int8", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[6].decode)),
    "Q8_0": (Storage("int8", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[8].decode)),
    "Q6_K": (Storage("int8", 16), _q6_k),
    "MXFP4": (Storage("mxfp4", 32), _mxfp4),
}
"""By ggml's name of a type: the `QTensor`, and the values and scales of blocks."""


def block_weights(index: Mapping[str, Stored | BlockTensor | Decoded]) -> Index:
    """The tensors of a GGUF file, those of blocks as values and scales."""
    return {name: _weight(tensor) if isinstance(tensor, BlockTensor) else tensor for name, tensor in index.items()}


def _weight(tensor: BlockTensor) -> Decoded:
    rows = (*tensor.shape[:-1], 1)
    if tensor.kind.name not in _FORMS:
        ones = Computed(tensor.path, rows, lambda: np.ones(rows, np.float32))
        return Decoded(tensor, ones, f"is in {tensor.kind.name}, whose numbers are not a value times a scale")
    storage, split = _FORMS[tensor.kind.name]
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // (storage.block_size or 1))

    def part(number: int, shape: tuple[int, ...]) -> Computed:
        def compute() -> np.ndarray:
            array = split(tensor.blocks())[number].reshape(shape)
            return array if tensor.change is None else tensor.change(array)

        return Computed(tensor.path, shape, compute)

    return Decoded(part(0, tensor.shape), part(1, blocks), storage)
