"""Integers of few bits, packed into words of 32 bits: GPTQ, AWQ, and "pack-quantized" of compressed-tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import zero_words
from vishwamai.core.quantized.packed_qtensor import has_kernel
from vishwamai.models.published.decoded import Computed, Decoded, check_scales, dense_bits, grouped, wide_scales
from vishwamai.models.published.settings import Settings
from vishwamai.models.storage import Storage

if TYPE_CHECKING:
    from vishwamai.models.shards import Stored

_GPTQ_BITS = (2, 3, 4, 8)
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's kernels put each of eight columns within a word."""


def _integers(width: int, symmetric: bool) -> tuple[str, Any]:
    """Format of numbers of `width` bits minus a zero point, and a dtype for their differences."""
    return ("int4" if symmetric and width <= 4 or width < 4 else "int8"), (np.int16 if width > 7 else np.int8)


def _packed(
    codes: Computed,
    zeros: Callable[[], np.ndarray],
    scales: Stored,
    storage: Storage,
    order: Stored | None = None,
    transpose: bool = False,
) -> Decoded | None:
    """A weight of 4 bits in uint4, whose words have scales of 16 bits and whole zero points below 16 exactly.

    Args:
      codes: numbers from 0 to 15, `[out, in]`.
      zeros: function to the zero points, `[out, groups]`.
      scales: scales `[out, groups]`, or with `transpose` `[groups, out]`.
      storage: format and size of the groups.
      order: the group of each number, where a checkpoint lists them.
    """
    if scales.dtype.itemsize > 2 or not has_kernel("uint4", storage.block_size):
        return None
    wide = wide_scales(scales, transpose)

    def words() -> np.ndarray:
        return np.asarray(zero_words(jnp.asarray(wide.read()), jnp.asarray(zeros(), jnp.float32)))

    return Decoded(codes, Computed(scales.path, wide.shape, words), Storage("uint4", storage.block_size), groups=order)


def compressed(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """compressed-tensors, "pack-quantized": numbers of 1 to 8 bits, stored plus half their range, with a scale, and
    where they are not symmetric a zero point, for each row or for groups of a row. Rows are filled up to whole words.
    """
    weight, scales, sizes = parts[".weight_packed"], parts[".weight_scale"], parts.get(".weight_shape")
    order, zeros = parts.get(".weight_g_idx"), parts.get(".weight_zero_point")
    rounding = settings.weights(module)
    size, width = rounding.get("group_size"), rounding.get("num_bits") or 4
    if not isinstance(width, int) or not 1 <= width <= 8:
        raise settings.unsupported("config_groups.*.weights.num_bits", width, "1 to 8")
    settings.check_zero_points(rounding, zeros, module)
    out, columns = weight.shape[0], 32 * weight.shape[1] // width
    if sizes is not None:
        widths = [int(n) for n in np.asarray(sizes.read()).reshape(-1)]
        if len(widths) != 2 or widths[0] != out or -(-widths[1] * width // 32) != weight.shape[1]:
            raise ShapeError(
                f"{sizes.path}: a tensor `weight_shape` holds {widths}; expected {out} rows and at most {columns} "
                f"columns for words of shape {list(weight.shape)}."
            )
        columns = widths[1]
    groups = scales.shape[-1]
    check_scales(weight.shape, scales, (out, groups))
    format, dtype = _integers(width, zeros is None)
    storage = grouped(format, columns, groups, size, weight.path)
    half = 1 << (width - 1)
    if zeros is not None and zeros.dtype == np.int32:
        check_scales(weight.shape, zeros, (-(-out * width // 32), groups))

    def codes() -> np.ndarray:
        return dense_bits(np.asarray(weight.read()), width)[:, :columns]

    def zero_points(zeros: Stored) -> np.ndarray:
        zero = np.asarray(zeros.read())
        if zero.dtype != np.int32:
            return zero.astype(dtype) + dtype(half)
        return dense_bits(zero.T, width)[:, :out].T.astype(dtype)  # packed along the rows

    def decode() -> np.ndarray:
        values = codes().astype(dtype)
        if zeros is None:
            return values - dtype(half)
        group = np.arange(columns) // (storage.block_size or columns) if order is None else np.asarray(order.read())
        return values - zero_points(zeros)[:, group]

    shape, packed = (out, columns), None
    if zeros is not None and zeros.dtype == np.int32 and width == 4:  # so zero points are from 0 to 15
        packed = _packed(Computed(weight.path, shape, codes), lambda: zero_points(zeros), scales, storage, order)
    return Decoded(Computed(weight.path, shape, decode), wide_scales(scales), storage, groups=order, packed=packed)


def gptq(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """GPTQ: `(q - zero) * scale` by groups of rows; zeros are stored minus one but in the "gptq_v2" form, and are half
    the range in a symmetric one. Frantar et al., "GPTQ" (2023).
    """
    weight, zeros, scales, order = parts[".qweight"], parts[".qzeros"], parts[".scales"], parts.get(".g_idx")
    width = settings.values.get("bits")
    if width not in _GPTQ_BITS:
        raise settings.unsupported("bits", width, ", ".join(map(str, _GPTQ_BITS)))
    rows, columns = 32 * weight.shape[0] // width, weight.shape[1]
    groups = scales.shape[0]
    check_scales(weight.shape, scales, (groups, columns))
    check_scales(weight.shape, zeros, (groups, -(-columns * width // 32)))
    shift = 0 if settings.values.get("checkpoint_format") == "gptq_v2" else 1
    format, dtype = _integers(width, bool(settings.values.get("sym")))
    storage = grouped(format, rows, groups, settings.values.get("group_size"), weight.path)

    def decode() -> np.ndarray:
        values = dense_bits(np.asarray(weight.read()).T, width).astype(dtype)  # [columns, rows]
        zero = dense_bits(np.asarray(zeros.read()), width)[:, :columns].astype(dtype) + dtype(shift)
        group = np.arange(rows) // (storage.block_size or rows) if order is None else np.asarray(order.read())
        return values - zero[group].T

    return Decoded(Computed(weight.path, (columns, rows), decode), wide_scales(scales, True), storage, groups=order)


def awq(parts: Mapping[str, Stored], module: str, settings: Settings) -> Decoded:
    """AWQ: `(q - zero) * scale` by groups of rows, columns packed out of order. Lin et al., "AWQ" (2023)."""
    weight, zeros, scales = parts[".qweight"], parts[".qzeros"], parts[".scales"]
    form = (settings.values.get("bits"), settings.values.get("version", "gemm"))
    if form[0] != 4 or not isinstance(form[1], str) or form[1].lower() != "gemm":
        raise settings.unsupported("(bits, version)", form, "(4, 'gemm')")
    rows, columns = weight.shape[0], 8 * weight.shape[1]
    groups = scales.shape[0]
    check_scales(weight.shape, scales, (groups, columns))
    check_scales(weight.shape, zeros, (groups, columns // 8))
    storage = grouped("int8", rows, groups, settings.values.get("group_size"), weight.path)

    def columns_of(tensor: Stored) -> np.ndarray:
        numbers = dense_bits(np.asarray(tensor.read()), 4).reshape(*tensor.shape, 8)
        return numbers[..., _AWQ_ORDER].reshape(tensor.shape[0], columns).astype(np.int8)

    def decode() -> np.ndarray:
        return (columns_of(weight) - columns_of(zeros)[np.arange(rows) // (storage.block_size or rows)]).T

    shape = (columns, rows)
    codes = Computed(weight.path, shape, lambda: columns_of(weight).view(np.uint8).T)
    packed = _packed(codes, lambda: columns_of(zeros).T, scales, storage, transpose=True)
    return Decoded(Computed(weight.path, shape, decode), wide_scales(scales, True), storage, packed=packed)
