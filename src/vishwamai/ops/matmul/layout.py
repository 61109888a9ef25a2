"""From the caller's batch axes to the op's groups, and back, without copying an operand that is shared.

Trailing batch axes over which `b` is shared become rows: `[B, T, K] @ [K, N]` is one product of B * T rows. What is left of the batch axes becomes the
group axis; an operand that has none of them keeps a group axis of 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.matmul.spec import MatmulSpec, Operands, check, compute_dtype, resolve_out_dtype


class Blocks(NamedTuple):
    """Which operands have a scale for every block of K, and how long a block is."""

    size: int = 0
    a: bool = False
    b: bool = False


NO_BLOCKS = Blocks()


def _broadcast_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Of a torch tensor too."""
    return x.broadcast_to(shape) if hasattr(x, "broadcast_to") else jnp.broadcast_to(x, shape)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a call's batch axes are laid out.

    Attributes:
      batch: the batch axes of the result.
      folded: how many of them, the last ones, are folded into M.
      m: rows of one product, before folding.
      n: columns.
    """

    batch: tuple[int, ...]
    folded: int
    m: int
    n: int

    @property
    def outer(self) -> tuple[int, ...]:
        """The batch axes that become groups."""
        return self.batch[: len(self.batch) - self.folded]

    @property
    def inner(self) -> tuple[int, ...]:
        """The batch axes that become rows."""
        return self.batch[len(self.batch) - self.folded :]

    def _lead(self, x: Any, core: int) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
        """x with every batch axis (1 where it has none) and its last `core` axes; its outer and its inner sizes."""
        sizes = x.shape[: x.ndim - core]
        sizes = (1,) * (len(self.batch) - len(sizes)) + sizes
        cut = len(self.batch) - self.folded
        return x.reshape(*sizes, *x.shape[x.ndim - core :]), sizes[:cut], sizes[cut:]

    def _groups(self, x: Any, outer: tuple[int, ...]) -> Any:
        """`[*outer, ...]` as `[G or 1, ...]`; only an operand with some but not all of the outer axes is copied."""
        rest = x.shape[len(self.outer) :]
        if all(size == 1 for size in outer):
            return x.reshape(1, *rest)
        return _broadcast_to(x, (*self.outer, *rest)).reshape(math.prod(self.outer), *rest)

    def matrix(self, x: Any) -> Any:
        """`a` or `b`: `[G or 1, rows, columns]`."""
        x, outer, inner = self._lead(x, 2)
        if any(size != 1 for size in inner):  # only `a` has these, and it has them whole
            x = x.reshape(*outer, math.prod(inner) * x.shape[-2], x.shape[-1])
        else:
            x = x.reshape(*outer, *x.shape[-2:])
        return self._groups(x, outer)

    def per_row(self, x: Any) -> Any:
        """`scale_a`: `[G or 1, M or 1]`."""
        x, outer, inner = self._lead(x[None] if x.ndim == 0 else x, 1)
        if all(size == 1 for size in (*inner, x.shape[-1])):
            x = x.reshape(*outer, 1)
        else:
            x = _broadcast_to(x, (*outer, *self.inner, self.m)).reshape(*outer, math.prod(self.inner) * self.m)
        return self._groups(x, outer)

    def per_column(self, x: Any) -> Any:
        """`bias` or `scale_b`: `[G or 1, N or 1]`."""
        x, outer, _ = self._lead(x[None] if x.ndim == 0 else x, 1)
        return self._groups(x.reshape(*outer, x.shape[-1]), outer)

    def operands(
        self, a: Any, b: Any, bias: Any, scale_a: Any, scale_b: Any, *, scale_dtype: Any, blocks: Blocks = NO_BLOCKS
    ) -> Operands:
        """The caller's arrays in the op's own layout, the scales in `scale_dtype` (those of e8m0 as they are)."""

        def scale(x: Any, blocked: bool, vector: Any) -> Any:
            if x is None:
                return None
            x = x if x.dtype == jnp.uint8 else x.astype(scale_dtype)
            return self.matrix(x) if blocked else vector(x)

        return Operands(
            self.matrix(a),
            self.matrix(b),
            None if bias is None else self.per_column(bias),
            scale(scale_a, blocks.a, self.per_row),
            scale(scale_b, blocks.b, self.per_column),
        )

    def result(self, out: Any) -> Any:
        """The op's `[G, M, N]` in the caller's shape."""
        return out.reshape(*self.batch, self.m, self.n)


def plan_layout(
    batch: tuple[int, ...],
    a: ArraySpec,
    b: ArraySpec,
    bias: ArraySpec | None,
    scale_b: ArraySpec | None,
    transpose_a: bool,
    transpose_b: bool,
    blocks: Blocks = NO_BLOCKS,
) -> Layout:
    """Decides how many batch axes are folded into M: those, from the last, that `b` and everything along N share.

    A transposed `a` holds its rows last, so nothing can be folded into them without a copy.
    """

    def size(x: ArraySpec | None, axis_from_end: int, core: int) -> int:
        lead = () if x is None else x.shape[: len(x.shape) - core]
        return lead[-axis_from_end] if axis_from_end <= len(lead) else 1

    folded = 0
    while folded < len(batch) and not transpose_a:
        at = folded + 1
        if any(size(x, at, core) != 1 for x, core in ((b, 2), (bias, 1), (scale_b, 2 if blocks.b else 1))):
            break
        if size(a, at, 2) != batch[-at]:
            break
        folded += 1
    m = a.shape[-1 if transpose_a else -2]
    n = b.shape[-2 if transpose_b else -1]
    return Layout(batch, folded, m, n)


def make_spec(
    arrays: tuple[Any, ...],
    activation: str | None,
    transpose_a: bool,
    transpose_b: bool,
    precision: str | PrecisionConfig | jax.lax.Precision,
    out_dtype: Any,
    blocks: Blocks = NO_BLOCKS,
) -> tuple[MatmulSpec, Layout]:
    """Checks the caller's arguments and describes them in the op's own layout.

    Args:
      arrays: a, b, bias, scale_a, scale_b of any rank; None for what is absent.

    Raises:
      ShapeError: the arguments contradict one another or the operation.
    """
    a, b, bias, scale_a, scale_b = arrays
    x, y = array_spec(a), array_spec(b)
    vectors = [None if v is None else array_spec(v) for v in (bias, scale_a, scale_b)]
    batch = check(x, y, vectors[0], activation, transpose_a, transpose_b, vectors[1], vectors[2], (blocks.a, blocks.b))
    blocked = blocks.a or blocks.b
    product = compute_dtype(x.dtype, y.dtype, blocked=blocked)
    assert product is not None
    float_epilogue = activation is not None or any(v is not None for v in vectors)
    result = resolve_out_dtype(out_dtype, x.dtype, y.dtype, float_epilogue=float_epilogue, blocked=blocked)
    products = resolve_precision(precision, PrecisionConfig(), product)
    layout = plan_layout(batch, x, y, vectors[0], vectors[2], transpose_a, transpose_b, blocks)
    scale_dtype = jnp.float64 if product == jnp.float64 else jnp.float32
    lay_out = functools.partial(layout.operands, scale_dtype=scale_dtype, blocks=blocks)
    operands = jax.eval_shape(lay_out, *map(_struct, arrays))
    shapes = Operands(*(None if o is None else array_spec(o) for o in operands))
    return MatmulSpec(shapes, transpose_a, transpose_b, activation, products, result, blocks.size), layout


def _struct(x: Any) -> Any:
    return None if x is None else jax.ShapeDtypeStruct(array_spec(x).shape, array_spec(x).dtype)
