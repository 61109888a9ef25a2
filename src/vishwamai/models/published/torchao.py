"""Checkpoints of torchao in safetensors files: the tensors of each weight, and its class in the header's metadata."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.published import float4
from vishwamai.models.published.decoded import Decoded, check_scales
from vishwamai.models.published.eight_bits import SMALL, eight_bits, microscaled
from vishwamai.models.published.settings import Settings
from vishwamai.models.shards import Stored, read_metadata
from vishwamai.models.storage import Storage

_TYPES = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor", "MXTensor", "NVFP4Tensor")


def decode(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """A weight of one of torchao's classes.

    Raises:
      UnsupportedError: the class, or its order of scales, is not read.
    """
    values, scales = parts["._weight_qdata"], parts["._weight_scale"]
    kind, attributes = _class(values, module)
    if kind not in _TYPES:
        raise UnsupportedError(
            f"{values.path}: `{module}.weight` is a {kind} of torchao; the loader reads {', '.join(_TYPES)}."
        )
    if attributes.get("is_swizzled_scales"):
        raise UnsupportedError(
            f"{values.path}: the scales of `{module}.weight` are in the order of a GPU (is_swizzled_scales); save it "
            "with plain scales."
        )
    if kind == "NVFP4Tensor":
        return float4.nvfp4(values, scales, parts.get("._weight_per_tensor_scale"))
    if kind == "MXTensor":
        if attributes.get("block_size") != 32:
            raise ShapeError(
                f"{values.path}: `{module}.weight` has blocks of {attributes.get('block_size')}; expected 32."
            )
        if values.dtype == np.uint8:
            return float4.mxfp4(values, scales)
        if values.dtype not in (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)):
            raise UnsupportedError(f"{values.path}: `{module}.weight` is of {values.dtype}; e4m3, e5m2, e2m1 are read.")
        return microscaled(values, scales)
    block = attributes.get("block_size")
    if values.dtype not in SMALL or not (isinstance(block, list) and len(block) == 2):
        raise ShapeError(
            f"{values.path}: `{module}.weight`, a {kind}, is of {values.dtype.name} in blocks of {block!r}; expected "
            "numbers of 8 bits in blocks of rows and columns."
        )
    zeros = parts.get("._weight_zero_point")
    if len(scales.shape) == 1 and block[1] == values.shape[1]:
        check_scales(values.shape, scales, values.shape[:1])
        block = None
    decoded = eight_bits(values, scales, block, settings, "block_size", zeros)
    if block is not None and block[1] >= values.shape[1]:
        decoded = Decoded(decoded.values, decoded.scales, Storage(SMALL[values.dtype]))
    return decoded


def _class(values: Stored, module: str) -> tuple[str, Mapping[str, Any]]:
    """Name and attributes of the class of a weight."""
    try:
        entry = json.loads(read_metadata(values.path)[f"{module}.weight"])
        return str(entry["_type"]), dict(entry["_data"])
    except (KeyError, TypeError, ValueError) as error:
        raise ShapeError(
            f"{values.path}: the header has no class of `{module}.weight`; expected the metadata that torchao writes."
        ) from error
