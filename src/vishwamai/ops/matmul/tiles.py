"""Tiles of the TPU kernel: what they take of VMEM, and how they are chosen."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from vishwamai.core.hardware import Chip
from vishwamai.core.pallas import round_up
from vishwamai.core.precision import FP8_DTYPES
from vishwamai.ops.matmul.spec import MatmulSpec

Tile = tuple[int, int, int]
"""(rows, columns, depth) of one step."""


@dataclasses.dataclass(frozen=True)
class MatmulConfig:
    """Tiles of the TPU kernel, in elements; each is clamped to the array.

    Attributes:
      block_m, block_n, block_k: rows, columns and depth of one step of the forward product.
      grad_a: the same of the product that gives a's gradient; None takes the forward product's.
      grad_b: the same of b's gradient.
      native_8bit: multiply 8-bit operands on the chip's own unit; False widens them to bfloat16, exactly.
      vmem_bytes: what a step plans to use of VMEM, buffers and temporaries together.
    """

    block_m: int
    block_n: int
    block_k: int
    grad_a: Tile | None = None
    grad_b: Tile | None = None
    native_8bit: bool = False
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("grad_a", "grad_b"):  # a tuning table brings lists
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))

    def tiles(self, which: str) -> Tile:
        """The tile of "forward", "grad_a" or "grad_b"."""
        own = None if which == "forward" else getattr(self, which)
        return own or (self.block_m, self.block_n, self.block_k)

    def with_block_size(self, block_size: int) -> MatmulConfig:
        """The same with tiles of about `block_size` in every direction."""
        return dataclasses.replace(
            self, block_m=block_size, block_n=block_size, block_k=block_size, grad_a=None, grad_b=None
        )

    @property
    def vmem_limit_bytes(self) -> int | None:
        """The limit to ask of the compiler: None where the default of every chip, 16 MiB, is enough."""
        wanted = round_up(self.vmem_bytes, 1 << 20)
        return wanted if wanted > 16 << 20 else None


def fit(tile: Tile, m: int, n: int, k: int, lhs_axis: int, rhs_axis: int) -> Tile:
    """The tile for one problem: an axis that fits is taken whole, any other in multiples of what the memory tiles.

    Args:
      lhs_axis: axis (1 or 2) of lhs `[., ., .]` that is contracted; its other axis is M. rhs_axis: the same of rhs.
    """
    rows, columns, depth = tile
    # M lies along lanes where lhs is transposed, else along sublanes, of which an 8-bit tile has 32. N is always along the lanes of the result.
    rows = m if rows >= m else min(m, round_up(rows, 128 if lhs_axis == 1 else 32))
    columns = n if columns >= n else min(n, round_up(columns, 128))
    depth = k if depth >= k else min(k, round_up(depth, 128))
    return rows, columns, depth


def native_8bit(spec: MatmulSpec, chip: Chip | None) -> bool:
    """Whether the chip multiplies the spec's 8-bit operands as they are."""
    a, b = spec.operands.a.dtype, spec.operands.b.dtype
    if chip is None:
        return False
    if a == b == jnp.int8:
        return chip.has_int8
    return all(d in FP8_DTYPES and d.name in chip.fp8_formats for d in (a, b))


def heuristic(spec: MatmulSpec, chip: Chip | None) -> MatmulConfig:
    return MatmulConfig(512, 512, 512, native_8bit=native_8bit(spec, chip), vmem_bytes=0)
