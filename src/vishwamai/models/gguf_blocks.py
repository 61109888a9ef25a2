"""The blocks in which a GGUF file stores numbers, as float32. Layouts: ggml's `ggml-quants.c`.

A function takes blocks `[blocks, bytes]` of uint8 and gives their numbers `[blocks, numbers]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

Bytes = np.ndarray
_CHUNK = 1 << 16  # blocks at a time, so that memory beyond the result stays small


class BlockType(NamedTuple):
    """A type of a tensor.

    Attributes:
      name: ggml's.
      numbers: count of the numbers in a block.
      bytes: size of a block in bytes.
      decode: the numbers of blocks.
    """

    name: str
    numbers: int
    bytes: int
    decode: Callable[[Bytes], np.ndarray]


def decoded(kind: BlockType, data: Bytes) -> np.ndarray:
    """The numbers of a tensor, float32 `[numbers]`.

    Args:
      data: uint8 `[bytes]`.
    """
    blocks = data.reshape(-1, kind.bytes)
    out = np.empty((len(blocks), kind.numbers), np.float32)
    for start in range(0, len(blocks), _CHUNK):
        out[start : start + _CHUNK] = kind.decode(np.ascontiguousarray(blocks[start : start + _CHUNK]))
    return out.reshape(-1)


def _plain(dtype: type) -> Callable[[Bytes], np.ndarray]:
    return lambda blocks: blocks.view(dtype).astype(np.float32)


def _half(blocks: Bytes, start: int) -> np.ndarray:
    """The float16 at a byte of each block, `[blocks, 1]`."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _nibbles(blocks: Bytes) -> np.ndarray:
    """The low halves of bytes, then the high ones."""
    return np.concatenate([blocks & 15, blocks >> 4], axis=-1)


def _fifth_bits(blocks: Bytes) -> np.ndarray:
    """16 where a bit of 32 is set, `[blocks, 32]`."""
    word = np.ascontiguousarray(blocks).view(np.uint32)
    return ((word >> np.arange(32, dtype=np.uint32)) & 1).astype(np.uint8) << 4


def _q4_0(blocks: Bytes) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> np.ndarray:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> np.ndarray:
    return _half(blocks, 0) * ((_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])).astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> np.ndarray:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> np.ndarray:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8)


def scales_and_minima(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Of the eight parts of a block of 256, 6 bits each in 12 bytes after two halves, `[blocks, 8, 1]`."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _parts(blocks: Bytes) -> np.ndarray:
    """128 bytes as eight parts of 32 numbers: each 32 bytes hold two."""
    return _nibbles(blocks.reshape(-1, 4, 32)).reshape(-1, 8, 32)


def _q4_k(blocks: Bytes) -> np.ndarray:
    scales, minima = scales_and_minima(blocks)
    return (scales * _parts(blocks[:, 16:]) - minima).reshape(-1, 256)


def _q5_k(blocks: Bytes) -> np.ndarray:
    scales, minima = scales_and_minima(blocks)
    bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (scales * (_parts(blocks[:, 48:]) | (bits << 4)) - minima).reshape(-1, 256)


def _q6_k(blocks: Bytes) -> np.ndarray:
    low = blocks[:, :128].reshape(-1, 2, 2, 32)  # [blocks, halves, parts, 32]
    low = np.concatenate([low & 15, low >> 4], axis=2)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    numbers = (low | (high << 4)).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    return (scales[..., None] * numbers).reshape(-1, 256)


_FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _mxfp4(blocks: Bytes) -> np.ndarray:
    return np.ldexp(_FLOAT4[_nibbles(blocks[:, 1:])], blocks[:, :1].astype(np.int32) - 128)


BLOCK_TYPES = {
    0: BlockType("F32", 1, 4, _plain(np.float32)),
    1: BlockType("F16", 1, 2, _plain(np.float16)),
    2: BlockType("Q4_0", 32, 18, _q4_0),
    3: BlockType("Q4_1", 32, 20, _q4_1),
    6: BlockType("Q5_0", 32, 22, _q5_0),
    7: BlockType("Q5_1", 32, 24, _q5_1),
    8: BlockType("Q8_0", 32, 34, _q8_0),
    12: BlockType("Q4_K", 256, 144, _q4_k),
    13: BlockType("Q5_K", 256, 176, _q5_k),
    14: BlockType("Q6_K", 256, 210, _q6_k),
    30: BlockType("BF16", 1, 2, _plain(ml_dtypes.bfloat16)),
    39: BlockType("MXFP4", 32, 17, _mxfp4),
}
"""By ggml's number."""
