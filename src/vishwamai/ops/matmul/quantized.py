"""How a `QTensor` enters the product: its values, and its scales as a vector beside the sum or as blocks along K."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import QTensor, check_symmetric, undifferentiable
from vishwamai.core.types import AnyArray
from vishwamai.ops.matmul.batch_layout import BlockScales


def unpack(
    a: object, b: object, transpose_a: bool, transpose_b: bool, scale_a: object, scale_b: object
) -> tuple[AnyArray, AnyArray, AnyArray, AnyArray, BlockScales]:
    """(a, b, scale_a, scale_b, blocks): arrays, or None, in place of QTensors.

    Raises:
      ShapeError: a QTensor does not share its scales along the axis that the product contracts, or its scales or blocks
        contradict the other arguments.
    """
    a, scale_a, size_a = _unpack("a", a, -2 if transpose_a else -1, scale_a)
    b, scale_b, size_b = _unpack("b", b, -1 if transpose_b else -2, scale_b)
    if size_a and size_b and size_a != size_b:
        raise ShapeError(
            f"gemm: `a` is quantized in blocks of {size_a} and `b` in blocks of {size_b}; quantize both with the same "
            "`block_size`."
        )
    return a, b, scale_a, scale_b, BlockScales(size_a or size_b, size_a > 0, size_b > 0)


def _unpack(name: str, x: Any, contracted: int, scale: object) -> tuple[AnyArray, AnyArray, int]:
    """(values, scale, block size or 0)."""
    if not isinstance(x, QTensor):
        return x, scale, 0
    check_quantized(name, x, contracted, scale)
    guarded: Any = undifferentiable(f"gemm: `{name}` is a QTensor", x.values, x.scales)
    values, scales = guarded
    if x.axis is None:
        return values, scales, 0
    if x.block_size is None:
        return values, jnp.squeeze(scales, x.axis), 0
    return values, scales, x.block_size


def check_quantized(name: str, x: QTensor, contracted: int, scale: object) -> None:
    """Checks a factor, whose values and scales may be of any framework.

    Raises:
      ShapeError: its scales are not shared along the axis that the product contracts, or there are others, or it has
        zero points.
    """
    check_symmetric(f"gemm: `{name}`", x.format)
    if scale is not None:
        raise ShapeError(f"gemm: `{name}` is a QTensor, which has scales of its own; leave `scale_{name}` out.")
    if x.axis is not None and x.axis != contracted:
        raise ShapeError(
            f"gemm: `{name}` of shape {x.shape} shares its scales along axis {x.axis}, but the product contracts axis "
            f"{contracted}; quantize it with axis={contracted}."
        )
    if x.axis is None or x.block_size is None:
        return
    blocks = -(-x.shape[x.axis] // x.block_size)
    if len(x.scales.shape) != x.ndim or x.scales.shape[x.axis] != blocks:
        raise ShapeError(
            f"gemm: `{name}` has values of shape {x.shape} and scales of shape {tuple(x.scales.shape)}; blocks of "
            f"{x.block_size} along axis {x.axis} have {blocks} scales."
        )
