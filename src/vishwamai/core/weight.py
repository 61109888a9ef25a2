"""Weights that multiply by a rule of their own, in place of arrays."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

from vishwamai.core.types import AnyArray


class Weight(abc.ABC):
    """What stands for a matrix `[in, out]`, or for a stack of them by expert, and knows how to multiply with it.

    `vishwamai.training.fp8_products` has one: products of 8-bit floats. It is a pytree, and its gradient is one like
    it.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Of what it stands for."""

    @property
    @abc.abstractmethod
    def dtype(self) -> Any:
        """Of what it stands for."""

    @abc.abstractmethod
    def product(self, x: AnyArray, out_dtype: Any) -> Any:
        """`x @ weight`, `[..., in]` to `[..., out]`."""

    def __rmatmul__(self, x: AnyArray) -> Any:
        """`x @ weight` in the dtype of `x`."""
        return self.product(x, x.dtype)

    @abc.abstractmethod
    def grouped(self, x: AnyArray, group_sizes: AnyArray) -> Any:
        """Rows `[rows, in]`, sorted by expert, with their expert's matrix: `[rows, out]` in the dtype of `x`."""


@dataclasses.dataclass(frozen=True)
class WrappedWeight(Weight):
    """Base of a weight that multiplies another one, with a rule of its own around the product.

    Attributes:
      weight: `[in, out]`, or `[experts, in, out]`: an array, or what stands for it.
    """

    weight: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype
