"""What follows the sum, and what its gradient needs: scales, bias and, from `core.activations`, the activations and
their derivatives.

Written with `jax.numpy` on whole arrays, so the reference, the TPU kernel's last step and every backward pass share one
formula.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vishwamai.core.activations import activate, derivative
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from jax.typing import DTypeLike


__all__ = ["activate", "columns", "derivative", "rows"]


def rows(scale: AnyArray, dtype: DTypeLike) -> AnyArray:
    """`scale_a`, `[G, M or 1]`, so that it multiplies `[G, M, N]`."""
    return scale[:, :, None].astype(dtype)


def columns(vector: AnyArray, dtype: DTypeLike) -> AnyArray:
    """`bias` or `scale_b`, `[G, N or 1]`, so that it meets `[G, M, N]`."""
    return vector[:, None, :].astype(dtype)
