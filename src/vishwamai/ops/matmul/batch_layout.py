"""From the caller's batch axes to the op's groups, and back, without copying an operand that is shared.

Trailing batch axes over which `b` is shared become rows: `[B, T, K] @ [K, N]` is one product of B * T rows. What is
left of the batch axes becomes the group axis; an operand that has none of them keeps a group axis of 1.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.arrays import cast
from vishwamai.core.dims import broadcast
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.signature import Signature, array_specs, described
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul.spec import (
    VECTORS,
    MatmulSpec,
    Operands,
    Outputs,
    check,
    check_sum,
    compute_dtype,
    operand_texts,
    resolve_out_dtype,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class BlockScales(NamedTuple):
    """Which operands have a scale for every block of K, and how long a block is."""

    size: int = 0
    a: bool = False
    b: bool = False


NO_BLOCKS = BlockScales()


def _broadcast_to(x: AnyArray, shape: tuple[int, ...]) -> AnyArray:
    """Of a torch tensor too."""
    return x.broadcast_to(shape) if hasattr(x, "broadcast_to") else jnp.broadcast_to(x, shape)


@dataclasses.dataclass(frozen=True)
class BatchLayout:
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

    def _lead(self, x: AnyArray, core: int) -> tuple[PyTree, tuple[int, ...], tuple[int, ...]]:
        """x with every batch axis (1 where it has none) and its last `core` axes; its outer and its inner sizes."""
        sizes = x.shape[: x.ndim - core]
        sizes = (1,) * (len(self.batch) - len(sizes)) + sizes
        cut = len(self.batch) - self.folded
        return x.reshape(*sizes, *x.shape[x.ndim - core :]), sizes[:cut], sizes[cut:]

    def _groups(self, x: AnyArray, outer: tuple[int, ...]) -> AnyArray:
        """`[*outer, ...]` as `[G or 1, ...]`; only an operand with some but not all of the outer axes is copied."""
        rest = x.shape[len(self.outer) :]
        if all(size == 1 for size in outer):
            return x.reshape(1, *rest)
        return _broadcast_to(x, (*self.outer, *rest)).reshape(math.prod(self.outer), *rest)

    def matrix(self, x: AnyArray) -> AnyArray:
        """`a` or `b`: `[G or 1, rows, columns]`."""
        x, outer, inner = self._lead(x, 2)
        if any(size != 1 for size in inner):  # only `a` has these, and it has them whole
            x = x.reshape(*outer, math.prod(inner) * x.shape[-2], x.shape[-1])
        else:
            x = x.reshape(*outer, *x.shape[-2:])
        return self._groups(x, outer)

    def per_row(self, x: AnyArray) -> AnyArray:
        """`scale_a`: `[G or 1, M or 1]`."""
        x, outer, inner = self._lead(x[None] if x.ndim == 0 else x, 1)
        if all(size == 1 for size in (*inner, x.shape[-1])):
            x = x.reshape(*outer, 1)
        else:
            x = _broadcast_to(x, (*outer, *self.inner, self.m)).reshape(*outer, math.prod(self.inner) * self.m)
        return self._groups(x, outer)

    def per_column(self, x: AnyArray) -> AnyArray:
        """`bias` or `scale_b`: `[G or 1, N or 1]`."""
        x, outer, _ = self._lead(x[None] if x.ndim == 0 else x, 1)
        return self._groups(x.reshape(*outer, x.shape[-1]), outer)

    def gradient_shapes(
        self, gradient: tuple[int, ...], like: tuple[int, ...], core: int, per_row: bool
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The way back from `matrix`, `per_row` and `per_column`, for the gradient of an operand.

        Args:
          gradient: its shape in the op's layout.
          like: the shape of the caller's operand.
          core: axes behind the batch axes: 2 of a matrix, 1 of a vector.
          per_row: the vector has a number for each row of a product (or one for all).

        Returns:
          The gradient's shape with every batch axis, and the shape of what is left where the operand was shared, with
          axes of 1 in front of the operand's own.
        """
        lead = (1,) * (len(self.batch) - (len(like) - core)) + like[: len(like) - core]
        target = (*lead, *like[len(like) - core :]) if like else (1,) * (len(self.batch) + core)
        outer = self.outer if gradient[0] != 1 else (1,) * len(self.outer)
        inner = target[len(self.outer) : len(self.batch)]
        rest = list(gradient[1:])
        if per_row and rest[0] != 1:  # laid out for every row, whatever the caller's vector shares
            inner, rest = self.inner, [self.m]
        elif math.prod(inner) != 1:
            rest[0] //= math.prod(inner)
        return (*outer, *inner, *rest), target


def plan_layout(
    batch: tuple[int, ...],
    a: tuple[int, ...],
    b: tuple[int, ...],
    bias: tuple[int, ...] | None,
    scale_b: tuple[int, ...] | None,
    transpose_a: bool,
    transpose_b: bool,
    blocks: BlockScales = NO_BLOCKS,
) -> BatchLayout:
    """Decides how many batch axes are folded into M: those, from the last, that `b` and everything along N share.

    A transposed `a` holds its rows last, so nothing can be folded into them without a copy. The operands are shapes.
    """

    def size(x: tuple[int, ...] | None, axis_from_end: int, core: int) -> int:
        lead = () if x is None else x[: len(x) - core]
        return lead[-axis_from_end] if axis_from_end <= len(lead) else 1

    folded = 0
    while folded < len(batch) and not transpose_a:
        axis = folded + 1
        if any(size(x, axis, core) != 1 for x, core in ((b, 2), (bias, 1), (scale_b, 2 if blocks.b else 1))):
            break
        if size(a, axis, 2) != batch[-axis]:
            break
        folded += 1
    m = a[-1 if transpose_a else -2]
    n = b[-2 if transpose_b else -1]
    return BatchLayout(batch, folded, m, n)


class ProductSignature(Signature):
    """The caller's layout of a product: the batch axes that `plan_layout` does not make rows are groups."""

    def __init__(self, transpose_a: bool, transpose_b: bool, blocks: BlockScales):
        transposed = {"a": transpose_a, "b": transpose_b}
        turned = {name: f"`transpose_{name}={not value}`" for name, value in transposed.items()}
        super().__init__(*operand_texts(transpose_a, transpose_b, blocks.a, blocks.b), hints=VECTORS, turned=turned)
        self._how = transpose_a, transpose_b, blocks
        self._layout = functools.lru_cache(maxsize=4096)(self._plan)

    def _plan(self, shapes: Operands) -> BatchLayout:
        a, b, bias, _, scale_b = shapes
        batch = broadcast(a[:-2], b[:-2])
        assert batch is not None
        return plan_layout(batch, a, b, bias, scale_b, *self._how)

    def check(self, function: str, arrays: Operands) -> None:
        """Of all but the scales of blocks, which `quantized.check_quantized` compares with their values."""
        *_, blocks = self._how
        absent = [name for name, blocked in (("scale_a", blocks.a), ("scale_b", blocks.b)) if blocked]
        super().check(function, arrays._replace(**dict.fromkeys(absent)))

    def layout(self, arrays: Operands) -> BatchLayout:
        """Of arrays that fit one another."""
        return self._layout(Operands(*[None if x is None else tuple(x.shape) for x in arrays]))

    def specs(self, arrays: Operands) -> Operands:
        """The `ArraySpec` of each operand in the op's layout."""
        with jax.enable_x64(True):  # torch's float64 stays what it is, whatever JAX is set to
            return array_specs(jax.eval_shape(self.pack, Operands(*map(_struct, arrays))))

    def pack(self, arrays: Operands, spec: object = None) -> Operands:
        """The arrays in the op's own layout; scales in the dtype of the epilogue, those of e8m0 as they are."""
        del spec
        layout, blocks = self.layout(arrays), self._how[2]

        def scale(x: AnyArray, blocked: bool, vector: Any) -> AnyArray:
            if x is None:
                return None
            if array_spec(x).dtype != jnp.uint8:
                double = jnp.float64 in (array_spec(arrays.a).dtype, array_spec(arrays.b).dtype)
                x = cast(x, jnp.float64 if double else jnp.float32)
            return layout.matrix(x) if blocked else vector(x)

        return Operands(
            layout.matrix(arrays.a),
            layout.matrix(arrays.b),
            None if arrays.bias is None else layout.per_column(arrays.bias),
            scale(arrays.scale_a, blocks.a, layout.per_row),
            scale(arrays.scale_b, blocks.b, layout.per_column),
        )

    def unpack(self, spec: object, outputs: Outputs, arrays: Operands) -> Outputs:
        """The op's `[G, M, N]` in the caller's shape."""
        layout = self.layout(arrays)
        return Outputs(outputs.out.reshape(*layout.batch, layout.m, layout.n))


@functools.cache
def signature(transpose_a: bool, transpose_b: bool, blocks: BlockScales = NO_BLOCKS) -> ProductSignature:
    """The signature of a product whose factors lie so."""
    return ProductSignature(transpose_a, transpose_b, blocks)


@described
def make_spec(
    arrays: Operands,
    activation: str | None,
    transpose_a: bool,
    transpose_b: bool,
    precision: str | PrecisionConfig | jax.lax.Precision,
    out_dtype: DTypeLike | None,
    blocks: BlockScales = NO_BLOCKS,
) -> MatmulSpec:
    """Checks the caller's arguments and describes them in the op's own layout.

    Args:
      arrays: the `ArraySpec`s of the caller's arrays, of any rank.

    Raises:
      ShapeError: the arguments contradict one another or the operation.
    """
    of_caller = signature(transpose_a, transpose_b, blocks)
    check(arrays, activation, (blocks.a, blocks.b))
    of_caller.check("gemm", arrays)
    a, b = arrays.a.dtype, arrays.b.dtype
    blocked = blocks.a or blocks.b
    product = compute_dtype(a, b, blocked=blocked)
    assert product is not None
    float_epilogue = activation is not None or any(x is not None for x in arrays[2:])
    result = resolve_out_dtype(out_dtype, a, b, float_epilogue=float_epilogue, blocked=blocked)
    products = resolve_precision(precision, PrecisionConfig(), product)
    operands = of_caller.specs(arrays)
    spec = MatmulSpec(operands, transpose_a, transpose_b, activation, products, result, blocks.size)
    check_sum(spec.wraps, spec.integer, spec.k)
    return spec


def _struct(x: ArraySpec | None) -> jax.ShapeDtypeStruct | None:
    return None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
