"""What a grouped product means, written again from the definition in float64."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from oracle_matmul import decode


def grouped_gemm(
    lhs: Any, rhs: Any, group_sizes: Any, group_offset: int = 0, transpose_rhs: bool = False, **how: Any
) -> Any:
    """Every row with every group's matrix, and of those the one of its own group; 0 for a row without one."""
    del how  # out_dtype and tiles round, and the oracle does not
    ends = np.cumsum(group_sizes, axis=-1)
    row = np.arange(lhs.shape[-2])[:, None]
    owned = (row >= (ends - group_sizes)[..., None, :]) & (row < ends[..., None, :])  # [..., M, all groups]
    owned = owned[..., group_offset : group_offset + rhs.shape[-3]]
    matrices = "...gnk" if transpose_rhs else "...gkn"
    return jnp.einsum(f"...mk,{matrices},...mg->...mn", lhs, rhs, jnp.asarray(owned, jnp.float64))


def quantized_grouped_gemm(
    lhs: Any, weight: Any, scales: Any, *, format: str, block_size: int | None, **options: Any
) -> Any:
    """The product with each matrix decoded number by number."""
    matrices = decode(weight, scales, format, -2, block_size)
    return grouped_gemm(lhs, jnp.asarray(matrices, jnp.float64), **options)
