"""What a matrix product with its epilogue computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax.numpy as jnp

from vishwamai.core import dims
from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import FLOATS, FP8_DTYPES, accumulator_dtype
from vishwamai.core.qtensor import FP4, INT4, bits
from vishwamai.core.spec import OpSpec, as_dtype, static_size
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_INT8 = jnp.dtype(jnp.int8)
INTEGERS = (_INT8, INT4)
SMALL_FLOATS = (*FP8_DTYPES, FP4)


class Operands(NamedTuple):
    """Operands in the op's own layout, nothing transposed; `groups` counts batch axes and folded vmap axes, 1 where
    they are shared.
    """

    a: Annotated[AnyArray, "groups? m k"]  # k m if transpose_a
    b: Annotated[AnyArray, "groups? k n"]  # n k if transpose_b
    bias: Annotated[AnyArray, "groups? n", "optional"]  # floating
    # In the epilogue's dtype; in blocks of K: as `a` (`b`), with K / block_k in place of K.
    scale_a: Annotated[AnyArray, "groups? m?", "optional"]
    scale_b: Annotated[AnyArray, "groups? n?", "optional"]


class Blocked(NamedTuple):
    """A factor of a product that is dequantized where it is multiplied: `values * scales`, rounded to the dtype of the
    products.

    It has the shape and dtype of its values, so that whoever asks an array for them need not know.
    """

    values: AnyArray  # [G or 1, ., .]
    scales: AnyArray  # the same with ceil(K / size) in place of K; float, or uint8: the bits of e8m0
    size: int  # of a block
    axis: int  # 1 or 2: where K lies

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.values.dtype


class Outputs(NamedTuple):
    """`out` is the product after its epilogue."""

    out: Annotated[AnyArray, "groups m n"]  # in out_dtype


def compute_dtype(a: jnp.dtype, b: jnp.dtype, *, blocked: bool = False) -> jnp.dtype | None:
    """The dtype that both operands are brought to before they are multiplied; None where there is no such product.

    int8 and int4 among themselves multiply as int8. Two small floats multiply as bfloat16, which holds their formats
    exactly (a unit that takes them as they are gives the same products). A narrow operand beside a wider float takes
    the wider dtype. Floats promote as in JAX: bfloat16 with float32 gives float32. Where one of two narrow operands has
    a scale for every block of K, it is no longer an 8-bit number, and both multiply as bfloat16.
    """
    narrow_a, narrow_b = a in (*INTEGERS, *SMALL_FLOATS), b in (*INTEGERS, *SMALL_FLOATS)
    if narrow_a and narrow_b:
        if (a in INTEGERS) != (b in INTEGERS):
            return None
        return _INT8 if a in INTEGERS and not blocked else jnp.dtype(jnp.bfloat16)
    if narrow_a or narrow_b:
        return b if narrow_a else a
    return jnp.dtype(jnp.promote_types(a, b))


def joint_groups(*operands: PyTree) -> int:
    """The group axis of what is computed from operands with G groups or 1 each; absent ones are None."""
    sizes = {operand.shape[0] for operand in operands if operand is not None}
    return 0 if 0 in sizes else max(sizes)


def operand_dims(transpose_a: bool, transpose_b: bool, blocked_a: bool = False, blocked_b: bool = False) -> Operands:
    """The dims of operands of which some are transposed, and some have a scale for every block of K."""
    declared = dims.declared(Operands)
    a, b = "groups? k m" if transpose_a else declared.a, "groups? n k" if transpose_b else declared.b
    scales = {"scale_a": a if blocked_a else declared.scale_a, "scale_b": b if blocked_b else declared.scale_b}
    return declared._replace(a=a, b=b, **scales)


def operand_texts(
    transpose_a: bool, transpose_b: bool, blocked_a: bool = False, blocked_b: bool = False
) -> tuple[Operands, Outputs]:
    """The dims of the caller's arrays and of the result: any batch axes, which broadcast, in place of the groups."""
    a, b, *vectors = operand_dims(transpose_a, transpose_b, blocked_a, blocked_b)
    factors = (text.replace("groups?", "*#batch") for text in (a, b))
    return Operands(*factors, *(text.replace("groups?", "*batch?") for text in vectors)), Outputs("*batch m n")


@dataclasses.dataclass(frozen=True)
class MatmulSpec(OpSpec):
    """`out = activation(scale_a[:, None] * scale_b[None, :] * (a @ b) + bias)`, rounded once to `out_dtype`.

    Attributes:
      transpose_a: a is stored [K, M].
      transpose_b: b is stored [N, K].
      activation: one of `ACTIVATIONS`, or None.
      precision: mode of float32 products: "highest" or "high"; "default" for every other dtype, whose products are
        exact.
      out_dtype: dtype of the result and of the pre-activation that the backward pass keeps.
      block_k: numbers along K that share a scale, in an operand whose scale has three axes; 0 where none has.
    """

    transpose_a: bool = False
    transpose_b: bool = False
    activation: str | None = None
    precision: str = "default"
    out_dtype: jnp.dtype = jnp.dtype(jnp.float32)
    block_k: int = 0

    def dims(self, kind: object) -> Any:
        """Of transposed factors and of scales in blocks of K too."""
        declared = super().dims(kind)
        return operand_dims(self.transpose_a, self.transpose_b, *self.blocked) if kind is Operands else declared

    @property
    def blocked(self) -> tuple[bool, bool]:
        """Whether a, and whether b, has a scale for every block of K."""
        a, b = self.operands.scale_a, self.operands.scale_b
        return a is not None and len(a.shape) == 3, b is not None and len(b.shape) == 3

    @property
    def differentiable(self) -> tuple[bool, bool]:
        """Whether a, and whether b, has a gradient: not integers, and not what has a scale for every block of K."""
        a, b = (
            not blocked and jnp.issubdtype(x.dtype, jnp.floating)
            for x, blocked in zip(self.operands, self.blocked, strict=False)
        )
        return a, b

    def factors(self, operands: Operands) -> tuple[PyTree, PyTree, PyTree, PyTree]:
        """(a, b, scale_a, scale_b) as the products take them: a blocked operand with its scales, and no vector of
        scales after it.
        """
        a, b, _, scale_a, scale_b = operands
        blocked_a, blocked_b = self.blocked
        if blocked_a:
            a, scale_a = Blocked(a, scale_a, self.block_k, 1 if self.transpose_a else 2), None
        if blocked_b:
            b, scale_b = Blocked(b, scale_b, self.block_k, 2 if self.transpose_b else 1), None
        return a, b, scale_a, scale_b

    @property
    def groups(self) -> int:
        """G: the largest leading axis of any operand (0 where one is empty)."""
        return joint_groups(*self.operands)

    @property
    def m(self) -> int:
        return self.operands.a.shape[2 if self.transpose_a else 1]

    @property
    def k(self) -> int:
        return self.operands.a.shape[1 if self.transpose_a else 2]

    @property
    def n(self) -> int:
        return self.operands.b.shape[1 if self.transpose_b else 2]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """The dtype that both operands are brought to before they are multiplied: exactly, unless a scale of a block is
        not a power of two.
        """
        dtype = compute_dtype(self.operands.a.dtype, self.operands.b.dtype, blocked=any(self.blocked))
        assert dtype is not None
        return dtype

    @property
    def accumulator(self) -> jnp.dtype:
        """int32 for int8 with int8, float64 for float64, float32 for everything else."""
        return accumulator_dtype(self.compute_dtype)

    @property
    def epilogue_dtype(self) -> jnp.dtype:
        """The dtype that scales, bias and activation are computed in: float64 for float64, else float32."""
        return jnp.dtype(jnp.float64 if self.compute_dtype == jnp.float64 else jnp.float32)

    @property
    def integer(self) -> bool:
        """The result is the int32 sum itself: nothing is scaled, nothing has a gradient."""
        return jnp.issubdtype(self.out_dtype, jnp.integer)

    @property
    def wraps(self) -> bool:
        """Whether a sum of products of int8 can exceed int32."""
        return wraps(self.compute_dtype, self.k)

    @property
    def keeps_preactivation(self) -> bool:
        """Whether the residual is the pre-activation `[G, M, N]` rounded to `out_dtype`; else there is none.

        relu needs none: its derivative is 1 where the output is positive.
        """
        return self.activation not in (None, "relu")

    @property
    def flops(self) -> int:
        """Floating-point operations of the product in the forward pass (a multiply-add is two)."""
        return 2 * self.groups * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move between HBM and the chip at least."""
        result = self.groups * self.m * self.n * self.out_dtype.itemsize
        return result + sum(-(-o.size * bits(o.dtype) // 8) for o in self.operands if o is not None)

    def tuning_key(self) -> str:
        a, b = self.operands.a, self.operands.b
        dtypes = a.dtype.name if a.dtype == b.dtype else f"{a.dtype.name}*{b.dtype.name}"
        layout = f"{'t' if self.transpose_a else 'n'}{'t' if self.transpose_b else 'n'}"
        shared = "".join(name for name, x in (("a", a), ("b", b)) if x.shape[0] != self.groups)
        extras = [layout, self.out_dtype.name, *([self.activation] if self.activation else [])]
        extras += [self.precision] if self.precision != "default" else []
        extras += [f"shared-{shared}"] if shared else []
        for name, blocked, scale in zip("ab", self.blocked, self.operands[3:], strict=True):
            extras += [f"blocks-{name}-{self.block_k}-{scale.dtype.name}"] if blocked else []
        return f"{dtypes} {self.groups}x{self.m}x{self.n}x{self.k} {' '.join(extras)}"


def split(spec: MatmulSpec, backward: bool) -> str:
    """Groups, rows and columns may be split; the contracted axis only where nothing follows the sum that is not linear
    in it.

    A bias would be added once for each part, and an activation needs the whole sum; in the backward pass only the bias'
    own gradient, which does not contract over it, stands against the split. Parts are added in the dtype of the result.
    """
    whole_sum = spec.operands.bias is not None or (spec.activation is not None and not backward)
    whole_sum = whole_sum or bool(spec.block_k and spec.k % spec.block_k)  # parts of K would not be parts of its blocks
    return "groups batch m n" if whole_sum else "groups batch m n k"


def check(arrays: Operands, activation: str | None, blocked: tuple[bool, bool] = (False, False)) -> None:
    """Checks the dtypes of the caller's arrays (their `ArraySpec`s) and the activation; the signature checks shapes.

    Raises:
      ShapeError: two arguments contradict each other or the operation; the text names them, their values and the fix.
    """
    a, b, *vectors = arrays
    for name, x in (("a", a), ("b", b)):
        if x.dtype not in (*FLOATS, *INTEGERS, *SMALL_FLOATS):
            raise ShapeError(
                f"gemm: `{name}` has dtype {x.dtype.name}; pass bfloat16, float16, float32, float64, int8, int4, "
                "float8_e4m3fn, float8_e5m2 or float4_e2m1fn."
            )
    if compute_dtype(a.dtype, b.dtype) is None:
        raise ShapeError(
            f"gemm: `a` has dtype {a.dtype.name} and `b` has dtype {b.dtype.name}, which no unit multiplies; convert "
            f"one of them, for instance `b.astype({a.dtype.name})`."
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"gemm: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    for name, x, skipped in zip(Operands._fields[2:], vectors, (False, *blocked), strict=True):
        if x is not None and not skipped and x.dtype not in FLOATS:
            raise ShapeError(f"gemm: `{name}` has dtype {x.dtype.name}; pass a floating-point array, {VECTORS[name]}.")


VECTORS = {
    "bias": "one number for each column",
    "scale_a": "one number for each row, or a scalar",
    "scale_b": "one number for each column, or a scalar",
}
"""What the vectors of the epilogue hold, for errors."""


LONGEST_INT8 = (2**31 - 1) // 128**2
"""The largest k whose sum of products of int8 no int32 exceeds."""
WRAPS = f"a sum of more than {LONGEST_INT8} products of int8 can exceed int32; XLA sums it in parts."


def wraps(compute: object, k: int) -> bool:
    """Whether the int32 sum of `k` products can exceed int32."""
    return compute == _INT8 and static_size(k, 0) > LONGEST_INT8


def check_sum(wraps: bool, integer: bool, k: int) -> None:
    """Raises ShapeError where the result is an int32 sum that int32 may not hold."""
    if wraps and integer:
        raise ShapeError(
            f"gemm: `a` and `b` are int8 and k is {k}: a sum of more than {LONGEST_INT8} products can exceed the int32 "
            "of the result; pass out_dtype=float32."
        )


def resolve_out_dtype(
    out_dtype: DTypeLike | None, a: jnp.dtype, b: jnp.dtype, *, float_epilogue: bool, blocked: bool = False
) -> jnp.dtype:
    """The dtype of the result: the caller's, or the operands' own; int8 gives int32 (float32 after a float epilogue),
    fp8 gives bfloat16.

    Raises:
      ShapeError: the caller's is not one that the product has.
    """
    compute = compute_dtype(a, b, blocked=blocked)
    integer_sum = compute == _INT8 and not float_epilogue
    if out_dtype is None:
        if compute == _INT8:
            return jnp.dtype(jnp.int32 if integer_sum else jnp.float32)
        assert compute is not None
        return compute
    dtype = as_dtype("gemm", "out_dtype", out_dtype)
    if dtype == jnp.int32 and not integer_sum:
        raise ShapeError(
            f"gemm: `out_dtype` is int32, but `a` is {a.name}, `b` is {b.name} and the epilogue is "
            f"{'floating' if float_epilogue else 'empty'}; pass a floating dtype, or int8 operands without bias, "
            "scales and activation."
        )
    if dtype not in (*FLOATS, jnp.dtype(jnp.int32)):
        raise ShapeError(
            f"gemm: `out_dtype` is {dtype.name}; pass bfloat16, float16, float32, float64, or int32 for int8 operands."
        )
    return dtype
