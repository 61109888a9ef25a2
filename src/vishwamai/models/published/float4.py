"""4-bit floats e2m1: mxfp4, whose scales are powers of two for 32 numbers, and NVFP4, whose scales for 16 numbers are
e4m3 times one float32 of the weight.

A `QTensor` holds NVFP4 as e2m1 with the float32 products of both scales, as the libraries that read it compute them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.models.published import words
from vishwamai.models.published.decoded import Computed, Decoded, check_scales
from vishwamai.models.published.eight_bits import E8M0
from vishwamai.models.published.settings import Settings
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored

_NVFP4_BLOCK = 16


def _pairs(weight: Stored, high_first: bool = False) -> Computed:
    """e2m1 numbers `[..., 2 n]` of bytes `[..., n]`, the first in the low bits."""

    def decode() -> np.ndarray:
        octets = np.asarray(weight.read())
        low, high = octets & 15, octets >> 4
        pairs = np.stack([high, low] if high_first else [low, high], axis=-1)
        return pairs.reshape(*weight.shape[:-1], -1).view(ml_dtypes.float4_e2m1fn)

    return Computed(weight.path, (*weight.shape[:-1], 2 * weight.shape[-1]), decode)


def experts(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """mxfp4 experts of gpt-oss: `[experts, out, blocks, 16]` pairs of 4-bit floats, and a power of two a block (OCP
    Microscaling Formats, 2023).
    """
    blocks, scales = parts["_blocks"], parts["_scales"]
    check_scales(blocks.shape, scales, blocks.shape[:-1])
    count, out, along, width = blocks.shape
    pairs = _pairs(blocks)
    values = Computed(
        blocks.path, (count, 2 * width * along, out), lambda: pairs.read().reshape(count, out, -1).swapaxes(1, 2)
    )
    power = Computed(scales.path, (count, along, out), lambda: np.asarray(scales.read()).swapaxes(1, 2))
    return Decoded(values, power, Storage("mxfp4", 2 * width), axis=-2)


def nvfp4(weight: Stored, scales: Stored, scale: Stored | None, divides: bool = False) -> Decoded:
    """NVFP4 of pairs `[out, in / 2]`.

    Args:
      scales: e4m3 `[out, in / 16]`. scale: the float32 of the weight, or None.
      divides: True where the scales are divided by it, as compressed-tensors does; False where they are multiplied.
    """
    values = _check_pairs(weight)
    out, columns = values.shape
    check_scales(values.shape, scales, (out, -(-columns // _NVFP4_BLOCK)))
    if scale is not None and scale.shape not in ((), (1,)):
        check_scales(values.shape, scale, (1,))

    def products() -> np.ndarray:
        local = np.asarray(scales.read()).astype(np.float32)
        whole_weight = np.float32(1) if scale is None else np.asarray(scale.read()).astype(np.float32).reshape(())
        return local / whole_weight if divides else local * whole_weight

    return Decoded(values, Computed(scales.path, scales.shape, products), Storage("fp4_e2m1", _NVFP4_BLOCK))


def mxfp4(weight: Stored, scales: Stored) -> Decoded:
    """mxfp4 of pairs `[out, in / 2]`, and the bits of powers of two `[out, in / 32]`."""
    values = _check_pairs(weight)
    out, columns = values.shape
    check_scales(values.shape, scales, (out, -(-columns // 32)))
    codes = Computed(scales.path, scales.shape, lambda: np.asarray(scales.read()).view(np.uint8))
    return Decoded(values, codes, Storage("mxfp4", 32))


def _check_pairs(weight: Stored) -> Computed:
    if weight.dtype != np.uint8 or len(weight.shape) != 2:
        raise ShapeError(
            f"{weight.path}: a weight of 4-bit floats is {weight.dtype.name} of shape {list(weight.shape)}; expected "
            "bytes of shape [out, in / 2]."
        )
    return _pairs(weight)


def modelopt(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """NVFP4 in the form of modelopt."""
    return nvfp4(parts[".weight"], parts[".weight_scale"], parts[".weight_scale_2"])


def compressed_global(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """NVFP4 in the form of compressed-tensors, "nvfp4-pack-quantized"."""
    return nvfp4(parts[".weight_packed"], parts[".weight_scale"], parts[".weight_global_scale"], divides=True)


def compressed(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """Packed weights of compressed-tensors without a scale of the weight: mxfp4, or integers."""
    scales = parts[".weight_scale"]
    if scales.dtype in (np.uint8, E8M0):
        return mxfp4(parts[".weight_packed"], scales)
    return words.compressed(parts, module, settings)
