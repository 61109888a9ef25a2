"""`packed_gemm`: the product whose weight is a `PackedWeight`, and the checks of its arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.arrays import cast, namespace
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.op import Implementation, Op
from vishwamai.core.signature import array_specs, described
from vishwamai.core.spec import OpSpec, array_spec
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul import cpu, reference
from vishwamai.ops.matmul.packed_weight import PackedWeight, unpermuted
from vishwamai.ops.matmul.spec import ACTIVATIONS, WRAPS, MatmulSpec, Outputs, check_sum, resolve_out_dtype, wraps
from vishwamai.ops.matmul.spec import Operands as Dense

if TYPE_CHECKING:
    import torch


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes, 1 where an operand is shared."""

    a: Annotated[AnyArray, "groups? m k"]
    packed: Annotated[AnyArray, "groups? panels numbers"]
    bias: Annotated[AnyArray, "groups? n", "optional"]
    scale_a: Annotated[AnyArray, "groups? m?", "optional"]
    scale_b: Annotated[AnyArray, "groups? n?", "optional"]


@dataclasses.dataclass(frozen=True)
class PackedSpec(OpSpec):
    """`out = activation(scale_a[:, None] * scale_b[None, :] * (a @ unpacked) + bias)`, rounded once to `out_dtype`.

    Attributes:
      shape: `(K, N)` of the weight.
      isa: the instruction set for which it was packed.
      activation: one of `ACTIVATIONS`, or None.
      out_dtype: dtype of the result.
    """

    shape: tuple[int, int] = (0, 0)
    isa: str = "generic"
    activation: str | None = None
    out_dtype: jnp.dtype = jnp.dtype(jnp.float32)

    def dense(self, operands: Operands) -> tuple[MatmulSpec, Dense]:
        """The same product with the weight unpacked."""
        b = unpermuted(operands.packed, self.shape, self.operands.a.dtype.name, self.isa)
        arrays = Dense(operands.a, b, operands.bias, operands.scale_a, operands.scale_b)
        shapes = Dense(*(None if x is None else array_spec(x) for x in arrays))
        precision = "highest" if operands.a.dtype == jnp.float32 else "default"
        return MatmulSpec(shapes, activation=self.activation, precision=precision, out_dtype=self.out_dtype), arrays

    @property
    def flops(self) -> int:
        """Floating-point operations of the product (a multiply-add is two)."""
        a = self.operands.a.shape
        return 2 * a[0] * a[1] * self.shape[0] * self.shape[1]

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written at least."""
        a = self.operands.a.shape
        return (
            sum(o.nbytes for o in self.operands if o is not None)
            + a[0] * a[1] * self.shape[1] * self.out_dtype.itemsize
        )

    def tuning_key(self) -> str:
        a = self.operands.a
        return (
            f"{a.dtype.name} {a.shape[0]}x{a.shape[1]}x{self.shape[1]}x{self.shape[0]} {self.isa} "
            f"{self.out_dtype.name} {self.activation}"
        )


def why_not(spec: PackedSpec, target: Target) -> str | None:
    """The reason why the native kernel cannot serve `spec`, or None."""
    if wraps(spec.operands.a.dtype, spec.shape[0]):
        return WRAPS
    reason = ffi.why_not(target)
    if reason is not None:
        return reason
    isa = ffi.isa() if target.local else target.cpu.name if target.cpu else spec.isa
    if spec.isa != isa:
        return (
            f"the weight is in the order of {spec.isa}, and the kernels here use {isa}; it is unpacked (pack it again "
            "with `pack_weight`)."
        )
    shared = (spec.operands.packed, spec.operands.bias, spec.operands.scale_b)
    if any(x is not None and x.shape[0] != 1 for x in shared):
        return "several weights, biases or scale_b at once (vmap over them); the kernel takes one."
    return None


def _native(spec: PackedSpec, operands: Operands) -> jax.Array:
    a, packed, bias, scale_a, scale_b = operands
    groups, m, k = a.shape
    if scale_a is not None:
        scale_a = jnp.broadcast_to(scale_a, (groups, m)).reshape(-1)
    result = cpu.result_dtype(a.dtype, spec.out_dtype)
    vectors = (None if v is None else v.reshape(-1).astype(jnp.float32) for v in (bias, scale_a, scale_b))
    (out,) = ffi.call(
        "vishwamai_matmul_packed",
        (ffi.result((groups * m, spec.shape[1]), result),),
        a.reshape(groups * m, k),
        packed[0],
        *vectors,
        activation=np.int64(0 if spec.activation is None else 1 + ACTIVATIONS.index(spec.activation)),
        packed_for=spec.isa,
    )
    return out.reshape(groups, m, spec.shape[1]).astype(spec.out_dtype)


def native_forward(spec: PackedSpec, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(_native(spec, operands)), None


def xla_forward(spec: PackedSpec, operands: Operands) -> tuple[Outputs, None]:
    dense, arrays = spec.dense(operands)
    return reference.forward(dense, arrays, False)[0], None


def _backward(native: bool) -> Callable[..., Operands]:
    def backward(spec: PackedSpec, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
        dense, arrays = spec.dense(operands)
        preactivation = None
        if dense.keeps_preactivation:
            bare = dataclasses.replace(spec, activation=None)
            preactivation = (native_forward if native else xla_forward)(bare, operands)[0].out
        module = cpu if native else reference
        da, _, bias, scale_a, scale_b = module.backward(dense, arrays, outputs, preactivation, cotangents)
        floating = jnp.issubdtype(operands.packed.dtype, jnp.floating)
        return Operands(da, jnp.zeros_like(operands.packed) if floating else None, bias, scale_a, scale_b)

    return backward


NATIVE = Implementation("native_cpu", "cpu", native_forward, _backward(True), why_not)
XLA = Implementation("xla", None, xla_forward, _backward(False), autodiff=True)
PACKED: Op[PackedSpec] = Op("packed_gemm", (NATIVE, XLA), split="groups m")


@jax.custom_vjp
def _undifferentiable(data: AnyArray) -> AnyArray:
    return data


def _no_gradient(saved: PyTree, cotangent: AnyArray) -> NoReturn:
    raise UnsupportedError(
        "gemm: `b` is a PackedWeight, which has no gradient; differentiate with respect to the other arguments only, "
        "or train the weight itself."
    )


_undifferentiable.defvjp(lambda data: (data, None), _no_gradient)


def packed_gemm(
    a: AnyArray,
    b: PackedWeight,
    bias: Any,
    activation: str | None,
    out_dtype: Any,
    scale_a: Any,
    scale_b: Any,
    implementation: str | None,
) -> AnyArray:
    """`gemm` where `b` is packed; see there."""
    a, *vectors = (None if x is None else jnp.asarray(x) for x in (a, bias, scale_a, scale_b))
    operands = packed_operands(a, b, activation, *vectors)
    operands = operands._replace(packed=_undifferentiable(operands.packed))
    spec = describe_packed(array_specs(operands), b.shape, b.isa, activation, out_dtype)
    return PACKED(spec, operands, implementation=implementation).out.reshape(*a.shape[:-1], b.shape[1])


def packed_operands(
    a: AnyArray, b: PackedWeight, activation: str | None, bias: AnyArray, scale_a: AnyArray, scale_b: AnyArray
) -> Operands:
    """The arguments of `gemm` with a PackedWeight, arrays of JAX or torch, in the op's own layout.

    Raises:
      ShapeError: one of them does not fit the weight.
    """
    _check(a, b, activation, bias=bias, scale_a=scale_a, scale_b=scale_b)
    if scale_a is not None and tuple(scale_a.shape) == a.shape[-2:-1]:
        scale_a = namespace(a).broadcast_to(scale_a, a.shape[:-1])
    scales = (None if x is None else cast(x, jnp.float32).reshape(1, -1) for x in (scale_a, scale_b))
    of_bias = None if bias is None else bias.reshape(1, -1)
    return Operands(a.reshape(1, math.prod(a.shape[:-1]), b.shape[0]), b.data[None], of_bias, *scales)


def _check(a: AnyArray, b: PackedWeight, activation: str | None, **vectors: torch.Tensor | None) -> None:
    """Checks the arguments of `gemm` with a PackedWeight.

    Raises:
      ShapeError: one of them does not fit the weight.
    """
    x = array_spec(a)
    if len(x.shape) < 2 or x.shape[-1] != b.shape[0] or x.dtype.name != b.dtype:
        raise ShapeError(
            f"gemm: `a` is {x.dtype.name} of shape {x.shape}, but the PackedWeight `b` is {b.dtype} of shape "
            f"{b.shape}; pass `a` of shape [..., M, {b.shape[0]}] and {b.dtype}."
        )
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"gemm: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    sizes = {"bias": b.shape[1], "scale_a": x.shape[-2], "scale_b": b.shape[1]}
    for name, vector in vectors.items():
        shape = () if vector is None else tuple(vector.shape)
        scalar = name != "bias" and shape in ((), (1,))
        if vector is not None and shape != (sizes[name],) and not scalar:
            raise ShapeError(
                f"gemm: `{name}` has shape {shape}; with a PackedWeight pass "
                f"{(sizes[name],)}{'' if name == 'bias' else ', or a scalar'}."
            )


@described
def describe_packed(
    operands: Operands, shape: tuple[int, int], isa: str, activation: str | None, out_dtype: str | None
) -> PackedSpec:
    """The spec of operands in the op's own layout, which are checked."""
    a, packed, *vectors = operands
    floating = activation is not None or any(v is not None for v in vectors)
    stored = jnp.dtype(a.dtype)
    result = resolve_out_dtype(out_dtype, a.dtype, stored, float_epilogue=floating)
    check_sum(wraps(a.dtype, shape[0]), jnp.issubdtype(result, jnp.integer), shape[0])
    return PackedSpec(operands, (shape[0], shape[1]), isa, activation, result)
