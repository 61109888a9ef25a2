"""Weights that multiply by a rule of their own, in place of arrays."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax
    import jax.numpy as jnp
    from jax.typing import DTypeLike


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
    def dtype(self) -> jnp.dtype:
        """Of what it stands for."""

    @abc.abstractmethod
    def product(self, x: jax.Array, out_dtype: DTypeLike | None) -> jax.Array:
        """`x @ weight`, `[..., in]` to `[..., out]`."""

    def __rmatmul__(self, x: jax.Array) -> jax.Array:
        """`x @ weight` in the dtype of `x`."""
        return self.product(x, x.dtype)

    @abc.abstractmethod
    def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
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
    def dtype(self) -> jnp.dtype:
        return self.weight.dtype
