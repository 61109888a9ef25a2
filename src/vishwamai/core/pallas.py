"""What every Pallas TPU kernel of ours needs: rounding to tiles, memory planning, compiler parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core import hardware
from vishwamai.core.hardware import Chip

TPU_DTYPES = frozenset(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16))
"""Floating dtypes that every TPU generation loads, stores and converts in the vector unit."""


def planning_chip(chip: Chip | None) -> Chip:
    """The chip to plan memory for: the one named, or, where none is known, v4, whose 16 MiB of VMEM every generation has."""
    return chip or hardware.chip("v4")


def dot(lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int], total: Any = jnp.float32, **kwargs: Any) -> jax.Array:
    """The product of two matrices inside a kernel, `axes` the contracted axis of each, summed in `total`; `kwargs` go to `lax.dot_general`."""
    if axes == (1, 1) and rhs.shape[0] == 1:
        # Mosaic takes a product with one row for one of a matrix with a vector, and jax 0.10 does not lower those of narrow numbers.
        return dot(lhs, jnp.broadcast_to(rhs, (8, rhs.shape[1])), axes, total, **kwargs)[:, :1]
    return lax.dot_general(lhs, rhs, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=total, **kwargs)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is `n` or more."""
    return -(-n // multiple) * multiple


def sublanes(dtype: Any) -> int:
    """Rows of one tile: 8 for 32-bit, 16 for 16-bit, 32 for 8-bit elements."""
    return 8 * max(1, 4 // jnp.dtype(dtype).itemsize)


def tiled_bytes(shape: Sequence[int], dtype: Any, lanes: int = 128) -> int:
    """Bytes that an array takes in VMEM, where its last two axes are padded to whole tiles."""
    rows = round_up(shape[-2], sublanes(dtype)) if len(shape) > 1 else 1
    return math.prod(shape[:-2]) * rows * round_up(shape[-1], lanes) * jnp.dtype(dtype).itemsize


def vmem_budget(chip: Chip | None) -> int:
    """Bytes of VMEM that a kernel plans with: three quarters of the core's, the rest is the compiler's (spills, its own buffers)."""
    return planning_chip(chip).vmem_bytes * 3 // 4


def compiler_params(
    dimension_semantics: Sequence[str], chip: Chip | None, vmem_bytes: int = 0, **kwargs: Any
) -> pltpu.CompilerParams:
    """Compiler parameters with the VMEM limit raised where the plan needs more than the default.

    Args:
      dimension_semantics: "parallel" (may be split over the cores of a megacore chip) or "arbitrary", for each grid axis.
      vmem_bytes: what the kernel plans to use, buffers and temporaries together.
    """
    planned = planning_chip(chip)
    limit = min(max(planned.vmem_scoped_bytes, round_up(vmem_bytes * 5 // 4, 1 << 20)), planned.vmem_bytes * 15 // 16)
    return pltpu.CompilerParams(
        dimension_semantics=tuple(dimension_semantics),  # type: ignore[arg-type]
        vmem_limit_bytes=limit if limit > planned.vmem_scoped_bytes else None,
        **kwargs,
    )
