"""`quantize`, `dequantize` and `fake_quantize` of torch tensors, in the formats of 8 bits: int8 and the floats, with
float32 scales or those of the MX formats.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import torch
from torch import Tensor

from vishwamai.core import qtensor
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.qtensor import FORMATS, format_name
from vishwamai.core.types import AnyArray
from vishwamai.ops.quantization.api import check_quantize
from vishwamai.ops.quantization.rounding import grouped, rounded
from vishwamai.torch import bridge
from vishwamai.torch.arguments import checked, checks_its_own
from vishwamai.torch.launch import torch_dtype
from vishwamai.torch.torch_private import constant_result


class QTensor(qtensor.QTensor):
    """A `vishwamai.QTensor` whose values and scales are torch tensors; `gemm` takes it in place of either matrix."""

    values: Any
    scales: Any

    @property
    def dtype(self) -> Any:
        return self.values.dtype

    def dequantize(self, dtype: object = None) -> AnyArray:
        """`values * scales`, rounded once to `dtype`."""
        scales = self.scales
        if scales.dtype == torch.uint8:  # the bits of e8m0
            power = (scales.int() << 23).view(torch.float32)
            scales = torch.where(scales == 255, torch.nan, power)
        if self.block_size is not None:
            assert self.axis is not None
            size = self.shape[self.axis]
            scales = scales.repeat_interleave(min(self.block_size, max(1, size)), self.axis).narrow(self.axis, 0, size)
        out = self.values.to(scales.dtype) * scales
        return out if dtype is None else out.to(dtype)


@checked
def quantize(
    x: Tensor,
    format: str = "int8",
    *,
    axis: int | None = -1,
    block_size: int | None = None,
    scale: str = "absmax",
    percentile: float = 99.9,
    rounding: str = "nearest",
    generator: torch.Generator | None = None,
) -> QTensor:
    """Rounds a tensor to few bits, with one scale for all numbers along `axis` or for each block of them; see
    `vishwamai.quantize`.

    Stochastic rounding draws from `generator`, or torch's own. torch has no numbers of 4 bits.

    Raises:
      ShapeError: an argument is not legal.
      UnsupportedError: the format has 4 bits.

    >>> q = quantize(torch.tensor([[1.0, -2.0, 4.0]]))
    >>> q.values, round(float(q.scales[0, 0]), 4)
    (tensor([[ 32, -64, 127]], dtype=torch.int8), 0.0315)
    """
    name = format_name(format)
    form, shape = FORMATS[name], tuple(map(bridge.constant, x.shape))
    options = axis, block_size, scale, percentile, rounding
    axis, block_size = _checked_options(shape, str(x.dtype).removeprefix("torch."), name, *options)
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))

    def noise(blocks: Tensor) -> Tensor:
        return torch.rand(blocks.shape, generator=generator, dtype=wide.dtype, device=x.device)

    def magnitude(blocks: Tensor, along: int | None) -> Tensor:
        return _magnitude(blocks.abs(), along, scale, percentile)

    if torch.compiler.is_compiling():
        random = noise(grouped(wide, axis, block_size)[0]) if rounding == "stochastic" else None
        values, scales = _rounded_op(wide, random, name, axis, block_size, scale, percentile)
    else:
        values, scales = rounded(wide, form, axis, block_size, magnitude, noise if rounding == "stochastic" else None)
    return QTensor(values, scales, name, axis, block_size)


def _rounded(
    x: Tensor, noise: Tensor | None, name: str, axis: int | None, block_size: int | None, scale: str, percentile: float
) -> tuple[Tensor, Tensor]:
    def magnitude(blocks: Tensor, along: int | None) -> Tensor:
        return _magnitude(blocks.abs(), along, scale, percentile)

    values, scales = rounded(x, FORMATS[name], axis, block_size, magnitude, None if noise is None else lambda _: noise)
    return values.clone(), scales.clone()


def _rounded_fake(
    x: Tensor, noise: object, name: str, axis: int | None, block_size: int | None, scale: str, percentile: float
) -> tuple[Tensor, Tensor]:
    shape = [] if axis is None else list(x.shape)
    if axis is not None:
        shape[axis] = 1 if block_size is None else -(-shape[axis] // min(block_size, max(1, shape[axis])))
    scales = x.new_empty(shape, dtype=torch.uint8 if FORMATS[name].power_of_two else x.dtype)
    return x.new_empty(x.shape, dtype=torch_dtype(FORMATS[name].dtype)), scales


# torch.compile takes the rounding as an operator: it cannot trace the dtypes of NumPy that describe the formats.
_rounded_op: Any = torch.library.custom_op(
    "vishwamai::rounded",
    _rounded,
    mutates_args=(),
    schema="(Tensor x, Tensor? noise, str name, SymInt? axis, SymInt? block_size, str scale, float percentile) "
    "-> (Tensor, Tensor)",
)
_rounded_op.register_fake(_rounded_fake)


@constant_result
def _checked_options(
    shape: tuple[int, ...],
    dtype: str,
    name: str,
    axis: object,
    block_size: object,
    scale: str,
    percentile: float,
    rounding: str,
) -> tuple[int | None, int | None]:
    """(axis counted from the end, block size) of `quantize`."""
    key = "torch's" if rounding == "stochastic" else None
    array = jax.ShapeDtypeStruct(shape, dtype)
    options = check_quantize(array, name, axis, block_size, scale, percentile, rounding, key)
    if qtensor.bits(FORMATS[name].dtype) < 8:
        raise UnsupportedError(f"quantize: torch has no numbers of {name}; pass 'int8' or 'fp8', or quantize in JAX.")
    return options


def _magnitude(size: Tensor, axis: int | None, method: str, percentile: float) -> Tensor:
    """What the largest number of the format is to stand for; the axis is kept as 1."""
    if axis is None:
        return _magnitude(size.flatten(), 0, method, percentile)[0]
    if not size.shape[axis]:
        return size.sum(axis, keepdim=True)
    if method == "absmax":
        return size.amax(axis, keepdim=True)
    return torch.quantile(size, percentile / 100, axis, keepdim=True)


@checks_its_own("q")
def dequantize(q: QTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor that a `QTensor` stands for; see `vishwamai.dequantize`.

    >>> dequantize(quantize(torch.tensor([0.5, -2.0, 7.0]), "fp8"), torch.bfloat16)
    tensor([ 0.5000, -2.0000,  7.0000], dtype=torch.bfloat16)
    """
    if not isinstance(q, QTensor):
        raise ShapeError(f"dequantize: `q` is a {type(q).__name__}; pass what `vishwamai.torch.quantize` gives.")
    return q.dequantize(dtype)


@checked
def fake_quantize(x: Tensor, format: str = "int8", **options: Any) -> Tensor:
    """`dequantize(quantize(x))` in x's dtype, with a straight-through gradient; see `vishwamai.fake_quantize`.

    >>> x = torch.tensor([0.5, 7.0], requires_grad=True)
    >>> torch.autograd.grad(fake_quantize(x, "fp8").square().sum(), x)[0]
    tensor([ 1., 14.])
    """
    q = quantize(x, format, **options)
    rounded = q.dequantize(x.dtype)
    passes = x
    if options.get("scale") == "percentile":  # where numbers saturate, no gradient passes
        largest = dataclasses.replace(q, values=torch.full_like(q.values, FORMATS[q.format].largest))
        passes = torch.where(x.detach().abs() <= largest.dequantize(), x, x.detach())
    return passes + (rounded - passes).detach()
