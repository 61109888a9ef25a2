"""Weights of GGUF files in their own numbers: values and scales of blocks, as a `QTensor` has them.

Blocks of Q4_1, Q5_1, Q4_K and Q5_K add a least number to unsigned values. They are held as a `ShiftedWeight`, with
values around 0, which the kernels read and which a product rounds less: `d * q + m = d * (q - z) + (m + d * z)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from vishwamai.models import gguf_blocks
from vishwamai.models.gguf_container import BlockTensor
from vishwamai.models.published.decoded import Computed, Decoded, Index
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored

Bytes = np.ndarray
Parts = tuple[np.ndarray, ...]
"""Values, scales, and shifts where there are any."""


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


def _around(zero: int, decode: Callable[[Bytes], np.ndarray], blocks: Bytes, d: np.ndarray, m: np.ndarray) -> Parts:
    """Of blocks whose unsigned values are what `decode` gives, less `zero`."""
    return (decode(blocks) - zero).astype(np.int8), d, m + zero * d


def _with_least(zero: int, number: int) -> Callable[[Bytes], Parts]:
    """Of blocks that begin with a float16 scale and a float16 number to add."""

    def parts(blocks: Bytes) -> Parts:
        halves = np.ascontiguousarray(blocks[:, :4]).view(np.float16).astype(np.float32)
        plain = _unit(blocks)
        plain[:, 2:4] = 0
        return _around(zero, gguf_blocks.BLOCK_TYPES[number].decode, plain, halves[:, :1], halves[:, 1:])

    return parts


def _of_256(zero: int, number: int) -> Callable[[Bytes], Parts]:
    """Of blocks of eight parts, with scales and numbers to subtract in 6 bits."""

    def parts(blocks: Bytes) -> Parts:
        scales, minima = (x[..., 0] for x in gguf_blocks.scales_and_minima(blocks))
        plain = _unit(blocks)
        plain[:, 2:4] = 0
        plain[:, 4:16] = [1] * 4 + [0] * 4 + [1] * 4  # scales of 1, and minima of 0
        return _around(zero, gguf_blocks.BLOCK_TYPES[number].decode, plain, scales, -minima)

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


_FORMS: Mapping[str, tuple[Storage, Callable[[Bytes], Parts]]] = {
    "Q4_0": (Storage("int4", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[2].decode)),
    "Q4_1": (Storage("int4", 32, True), _with_least(8, 3)),
    "Q4_K": (Storage("int4", 32, True), _of_256(8, 12)),
    "Q5_1": (Storage("int8", 32, True), _with_least(16, 7)),
    "Q5_K": (Storage("int8", 32, True), _of_256(16, 13)),
    "Q5_0": (Storage("int8", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[6].decode)),
    "Q8_0": (Storage("int8", 32), _scaled_by_half(gguf_blocks.BLOCK_TYPES[8].decode)),
    "Q6_K": (Storage("int8", 16), _q6_k),
    "MXFP4": (Storage("mxfp4", 32), _mxfp4),
}
"""By ggml's name of a type: how it is held, and the parts of blocks."""


def block_weights(index: Mapping[str, Stored | BlockTensor | Decoded]) -> Index:
    """The tensors of a GGUF file, those of blocks as values and scales; those of plain numbers stay."""

    def parts(tensor: Stored | BlockTensor | Decoded) -> Any:
        return _weight(tensor) if isinstance(tensor, BlockTensor) and tensor.kind.name in _FORMS else tensor

    return {name: parts(tensor) for name, tensor in index.items()}


def _weight(tensor: BlockTensor) -> Decoded:
    storage, split = _FORMS[tensor.kind.name]
    blocks = (*tensor.shape[:-1], tensor.shape[-1] // (storage.block_size or 1))

    def part(number: int, shape: tuple[int, ...]) -> Computed:
        def compute() -> np.ndarray:
            array = split(tensor.blocks())[number].reshape(shape)
            return array if tensor.change is None else tensor.change(array)

        return Computed(tensor.path, shape, compute)

    shifts = part(2, blocks) if storage.shifted else None
    return Decoded(part(0, tensor.shape), part(1, blocks), storage, shifts=shifts)
