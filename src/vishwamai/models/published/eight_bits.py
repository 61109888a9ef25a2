"""Weights of int8 and of 8-bit floats, each with scales next to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.models.published.decoded import Computed, Decoded, check_scales
from vishwamai.models.published.settings import Settings
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from vishwamai.models.shards import Stored

SMALL = {
    np.dtype(np.int8): "int8",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8_e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "fp8_e5m2",
}
"""Formats by the dtype of a tensor."""

E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)


def float8(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """float8 with a scale for each block of rows and columns (DeepSeek V3, Qwen3), for each row or for the weight."""
    weight = parts[".weight"]
    if weight.dtype not in SMALL:
        raise settings.unsupported("fmt", settings.values.get("fmt", weight.dtype.name), "e4m3 and e5m2")
    scales = parts.get(".weight_scale_inv") or parts[".weight_scale"]
    return eight_bits(weight, scales, settings.values.get("weight_block_size"), settings, "weight_block_size")


def modelopt(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """float8 with one scale, or a power of two for each 32 numbers of a row (MXFP8)."""
    weight, scales = parts[".weight"], parts[".weight_scale"]
    if weight.dtype not in SMALL:
        raise settings.unsupported("quant_algo", settings.values.get("quant_algo"), "weights of int8 and float8")
    if scales.dtype in (np.uint8, E8M0):
        return microscaled(weight, scales)
    return eight_bits(weight, scales, None, settings, "quant_algo")


def compressed(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """compressed-tensors: int8 or float8, with a scale for the weight, for each row, or for groups or blocks of it."""
    weight, scales = parts[".weight"], parts[".weight_scale"]
    if weight.dtype not in SMALL:
        expected = "tensors of 8 bits, and packed ones"
        raise settings.unsupported("format", settings.values.get("format"), expected)
    if scales.dtype in (np.uint8, E8M0):
        return microscaled(weight, scales)
    rounding = settings.weights(module)
    settings.check_zero_points(rounding, parts.get(".weight_zero_point"), module)
    block = rounding.get("block_structure")
    if isinstance(block, str):
        block = [int(n) if n.isdecimal() else n for n in block.split("x")]
    if rounding.get("strategy") == "group":
        block = [1, rounding.get("group_size")]
    key = "config_groups.*.weights.block_structure"
    return eight_bits(weight, scales, block, settings, key, parts.get(".weight_zero_point"), parts.get(".weight_g_idx"))


def eight_bits(
    weight: Stored,
    scales: Stored,
    block: Any,
    settings: Settings,
    key: str,
    zeros: Stored | None = None,
    order: Stored | None = None,
) -> Decoded:
    """Numbers of 8 bits and their scales.

    Args:
      block: list of rows and columns that share a scale; None for a scale a row or one for the weight.
      key: entry of `quantization_config` that states it, for errors.
      zeros: zero points in the shape of the scales.
      order: the group of each column.
    """
    if len(weight.shape) != 2:
        raise ShapeError(
            f"{weight.path}: a quantized weight has shape {list(weight.shape)}; expected rows and columns."
        )
    out, columns = weight.shape
    if block is None:
        if math.prod(scales.shape) != 1:
            check_scales(weight.shape, scales, (out, 1) if len(scales.shape) == 2 else (out,))
        width, rows = columns, 1
        shape = (out if math.prod(scales.shape) != 1 else 1, 1)
    else:
        if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and n > 0 for n in block):
            raise settings.unsupported(key, block, "a pair, such as [128, 128], or null")
        rows, width = block
        shape = (-(-out // rows), -(-columns // width))
        check_scales(weight.shape, scales, shape)
    if zeros is not None:
        check_scales(weight.shape, zeros, scales.shape)

    def each_row(tensor: Stored, dtype: DTypeLike) -> np.ndarray:  # a QTensor has scales for each row
        array = np.asarray(tensor.read()).astype(dtype).reshape(shape)
        return np.broadcast_to(array, (out, 1)) if shape == (1, 1) and rows == 1 else array.repeat(rows, 0)[:out]

    def shifted() -> np.ndarray:
        assert zeros is not None
        group = np.arange(columns) // width if order is None else np.asarray(order.read())
        return weight.read().astype(np.int16) - each_row(zeros, np.int16)[:, group]

    wide = Computed(scales.path, (out, shape[1]), lambda: each_row(scales, np.float32))
    values = weight if zeros is None else Computed(weight.path, weight.shape, shifted)
    storage = Storage(SMALL[weight.dtype], None if block is None else width)
    return Decoded(values, wide, storage, groups=order)


def microscaled(weight: Stored, scales: Stored) -> Decoded:
    """8-bit floats with a power of two for each 32 numbers of a row (OCP Microscaling Formats, 2023)."""
    out, columns = weight.shape
    check_scales(weight.shape, scales, (out, -(-columns // 32)))
    codes = Computed(scales.path, scales.shape, lambda: np.asarray(scales.read()).view(np.uint8))
    return Decoded(weight, codes, Storage(f"mx{SMALL[weight.dtype]}", 32))


def bytes_of_rows(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """bitsandbytes, 8 bits: the largest magnitude of each row stands for 127. Dettmers et al., "LLM.int8()" (2022)."""
    weight, largest = parts[".weight"], parts[".SCB"]
    check_scales(weight.shape, largest, weight.shape[:1])
    layout = parts.get(".weight_format")
    if layout is not None and np.asarray(layout.read()).any():
        expected = "weights in the order of rows (weight_format 0)"
        raise settings.unsupported("quant_method", f"bitsandbytes of {module} in another order", expected)
    scales = Computed(
        largest.path,
        (*largest.shape, 1),
        lambda: np.asarray(largest.read()).astype(np.float32)[:, None] / np.float32(127),
    )
    return Decoded(weight, scales, Storage("int8"))
