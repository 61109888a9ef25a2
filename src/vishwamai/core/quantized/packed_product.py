"""Products with a `PackedQTensor`, one op for all that read one: `gemm`, `gated_linear_unit`, `grouped_gemm`.

With `activations="int8"` each row of x is rounded to int8 in blocks along K, as the weight's scales have, or of 128
where a column of the weight has one scale. The products of bytes are summed exactly in int32 and scaled block by block
into a float32 sum (Dettmers et al., "LLM.int8()", 2022, with blocks in place of columns; llama.cpp's q8_0 and q4_0 do
the same in blocks of 32). With "exact" x is not rounded, and the weight is dequantized to float32. Twice a value of
mxfp4 is a whole number, so its products are of bytes too. The zero point of uint4 is subtracted after the sum of a
block: `scale * (sum(x * value) - zero * sum(x))`. 8-bit floats are always "exact": their values fit bfloat16,
sums are float32, and the scale of a block comes after its sum.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.activations import ACTIVATIONS, activate
from vishwamai.core.errors import ShapeError
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation, Op
from vishwamai.core.qtensor import undifferentiable
from vishwamai.core.quantized.packed_qtensor import KINDS, PackedQTensor, scaled, unpacked_values
from vishwamai.core.spec import OpSpec, array_spec
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from jax.typing import DTypeLike


ROUNDED_BLOCK = 128  # numbers of a row of x that share a scale, where the weight's columns have one each
_HANDLER = "vishwamai_quantized_multiply"
_FLOATS = ("float32", "bfloat16", "float16")


class Operands(NamedTuple):
    """Operands in the op's own layout; `groups` counts folded vmap axes, 1 where an operand is shared. Experts are the
    weights of consecutive rows, one where there are no `sizes`.
    """

    x: Annotated[AnyArray, "groups? m k"]
    values: Annotated[AnyArray, "groups? experts panels _"]
    scales: Annotated[AnyArray, "groups? experts panels _ _"]
    up_values: Annotated[AnyArray, "groups? experts panels _", "optional"]
    up_scales: Annotated[AnyArray, "groups? experts panels _ _", "optional"]
    bias: Annotated[AnyArray, "groups? n", "optional"]  # float32
    sizes: Annotated[AnyArray, "groups? experts", "optional"]  # int32: rows of each expert


class Outputs(NamedTuple):
    """`out` is the product after its epilogue."""

    out: Annotated[AnyArray, "groups m n"]


@dataclasses.dataclass(frozen=True)
class ProductSpec(OpSpec):
    """`activation(x @ weight + bias)`, or with `up` `activation(x @ weight) * (x @ up)`, rounded once to `out_dtype`.

    Attributes:
      shape: `(K, N)` of the weight.
      format: the weight's format, one of `packed_qtensor.BITS`.
      block_size: numbers along K that share a scale of the weight; None for all of them.
      activations: "int8" or "exact".
      activation: one of `core.activations.ACTIVATIONS`, or None.
      out_dtype: dtype of the result.
    """

    shape: tuple[int, int] = (0, 0)
    format: str = "int8"
    block_size: int | None = None
    activations: str = "int8"
    activation: str | None = None
    out_dtype: jnp.dtype = jnp.dtype(jnp.float32)

    @property
    def rounded_block(self) -> int:
        """Numbers of a row of x that share a scale."""
        return self.block_size or ROUNDED_BLOCK

    @property
    def flops(self) -> int:
        """Operations of the products (a multiply-add is two)."""
        x = self.operands.x.shape
        return 2 * x[0] * x[1] * self.shape[0] * self.shape[1] * (1 if self.operands.up_values is None else 2)

    @property
    def bytes_moved(self) -> int:
        """Bytes that must be read and written at least."""
        x = self.operands.x.shape
        return (
            sum(o.nbytes for o in self.operands if o is not None)
            + x[0] * x[1] * self.shape[1] * self.out_dtype.itemsize
        )

    def tuning_key(self) -> str:
        o = self.operands
        extras = f"{'gated ' if o.up_values is not None else ''}{'grouped ' if o.sizes is not None else ''}"
        return (
            f"{o.x.dtype.name} {o.x.shape[0]}x{o.x.shape[1]}x{self.shape[1]}x{self.shape[0]} {self.format} "
            f"{self.block_size} {self.activations} {extras}{self.out_dtype.name} {self.activation}"
        )


def rounded(x: jax.Array, block: int) -> jax.Array:
    """`x` `[..., K]` in float32 as a product takes it with `activations="int8"`; its gradient is straight-through.

    A block's scale is its largest magnitude / 127, and a number becomes the nearest multiple of it (ties to even).
    Blocks below 1e-30 become 0; one with a number that is not finite becomes NaN.

    >>> rounded(jnp.array([127.0, 0.6, -3.5, 1.0]), 2).tolist()
    [127.0, 1.0, -3.5, 0.9921259880065918]
    """
    wide = x.astype(jnp.float32)
    k = wide.shape[-1]
    blocks = jnp.pad(wide, ((0, 0),) * (wide.ndim - 1) + ((0, -k % block),)).reshape(*wide.shape[:-1], -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    zero = largest < 1e-30
    inverse, scale = jnp.where(zero, 0, 127 / largest), jnp.where(zero, 0, largest / 127)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    values = jnp.round(blocks * inverse)
    out = (values * scale).reshape(*wide.shape[:-1], -1)[..., :k]
    return wide + jax.lax.stop_gradient(out - wide)


def xla_forward(spec: ProductSpec, operands: Operands) -> tuple[Outputs, None]:
    o = operands
    x = rounded(o.x, spec.rounded_block) if spec.activations == "int8" else o.x.astype(jnp.float32)

    def product(values: jax.Array, scales: jax.Array) -> jax.Array:
        k, n = spec.shape
        scales = jnp.moveaxis(scales, -2, -3).reshape(*scales.shape[:2], scales.shape[3], -1)[..., :n]
        repeated = jnp.repeat(scales, k if spec.block_size is None else spec.block_size, axis=-2)[..., :k, :]
        weight = scaled(unpacked_values(values, spec.shape, spec.format), repeated, spec.format)
        if o.sizes is None:
            return jnp.matmul(x, weight[:, 0], precision="highest")
        groups = max(x.shape[0], weight.shape[0], o.sizes.shape[0])
        arrays = (jnp.broadcast_to(a, (groups, *a.shape[1:])) for a in (x, weight, o.sizes))
        return jax.vmap(lambda x, w, sizes: jax.lax.ragged_dot(x, w, sizes, precision="highest"))(*arrays)

    z = product(o.values, o.scales)
    z = z if o.bias is None else z + o.bias[:, None]
    out = activate(spec.activation, z)
    if o.up_values is not None:
        out = out * product(o.up_values, o.up_scales)
    return Outputs(out.astype(spec.out_dtype)), None


def why_not(spec: ProductSpec, target: Target) -> str | None:
    """The reason why the native kernel cannot serve `spec`, or None."""
    o = spec.operands
    if any(x is not None and x.shape[0] != 1 for x in o[1:]):
        return "several weights, biases or group sizes at once (vmap over them); the kernel takes one."
    if o.sizes is not None and o.x.shape[0] != 1:
        return "several batches of grouped rows at once (vmap over them); the kernel takes one."
    return ffi.why_not(target, _HANDLER)


def native_forward(spec: ProductSpec, operands: Operands) -> tuple[Outputs, None]:
    o = operands
    groups, m, k = o.x.shape
    x = o.x.astype(jnp.float32) if o.x.dtype == jnp.float16 else o.x
    result = jnp.bfloat16 if spec.out_dtype == jnp.bfloat16 else jnp.float32
    weights = (None if w is None else w[0] for w in (o.values, o.scales, o.up_values, o.up_scales))
    (out,) = ffi.call(
        _HANDLER,
        (ffi.result((groups * m, spec.shape[1]), result),),
        x.reshape(groups * m, k),
        *weights,
        None if o.bias is None else o.bias[0],
        None if o.sizes is None else o.sizes[0],
        packing=np.int64(KINDS[spec.format]),
        block=np.int64(spec.rounded_block),
        column_scales=spec.block_size is None,
        exact=spec.activations == "exact",
        activation=np.int64(0 if spec.activation is None else 1 + ACTIVATIONS.index(spec.activation)),
    )
    return Outputs(out.reshape(groups, m, spec.shape[1]).astype(spec.out_dtype)), None


def _split(spec: ProductSpec, backward: bool) -> str:
    return "groups m" if spec.operands.sizes is None else "groups"


NATIVE = Implementation("native_cpu", "cpu", native_forward, autodiff_backward(xla_forward), why_not)
XLA = Implementation("xla", None, xla_forward, autodiff_backward(xla_forward), autodiff=True)
PACKED_PRODUCT: Op[ProductSpec] = Op("packed_product", (NATIVE, XLA), split=_split)


def packed_product(
    function: str,
    x: jax.Array,
    weight: PackedQTensor,
    up: PackedQTensor | None = None,
    *,
    bias: AnyArray = None,
    sizes: Any = None,
    activation: str | None = None,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Any:
    """`[..., N]` of x `[..., K]`; `function` is the public function, for errors.

    Raises:
      ShapeError: the arguments contradict one another.
    """
    k, n = weight.shape
    x = jnp.asarray(x)
    if x.ndim < (1 if sizes is None else 2) or x.shape[-1] != k or x.dtype.name not in _FLOATS:
        raise ShapeError(
            f"{function}: an operand is {x.dtype.name} of shape {x.shape}, but the weight is {weight}; pass an array "
            f"of shape [..., {k}] of {', '.join(_FLOATS)}."
        )
    if up is not None and (up.shape, up.format, up.block_size) != (weight.shape, weight.format, weight.block_size):
        raise ShapeError(
            f"{function}: the weights are {weight} and {up}; pass two of one shape, format and block_size."
        )
    lead = 0 if sizes is None else 1
    for operand in (weight, *(() if up is None else (up,))):
        if operand.values.ndim != 2 + lead:
            raise ShapeError(
                f"{function}: a weight is {operand}; pass one with {lead} axes before K and N, packed from a QTensor "
                f"of {2 + lead} axes."
            )
    if activation is not None and activation not in ACTIVATIONS:
        raise ShapeError(f"{function}: `activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    if bias is not None and jnp.shape(bias) != (n,):
        raise ShapeError(f"{function}: `bias` has shape {jnp.shape(bias)}; with a {type(weight).__name__} pass ({n},).")
    if sizes is not None and jnp.shape(sizes) != weight.values.shape[:1]:
        raise ShapeError(
            f"{function}: `group_sizes` has shape {jnp.shape(sizes)}; pass {weight.values.shape[:1]}, rows of each "
            "group."
        )
    result_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if result_dtype.name not in _FLOATS:
        raise ShapeError(f"{function}: `out_dtype` is {result_dtype.name}; pass one of {', '.join(_FLOATS)}.")

    def arrays(name: str, w: PackedQTensor | None) -> tuple[jax.Array | None, jax.Array | None]:
        if w is None:
            return None, None
        guarded: Any = undifferentiable(f"{function}: `{name}` is a PackedQTensor", w.values, w.scales)
        return tuple(a[None] if lead else a[None, None] for a in guarded)

    operands = Operands(
        x.reshape(1, -1, k),
        *arrays("b", weight),
        *arrays("up", up),
        None if bias is None else jnp.asarray(bias, jnp.float32)[None],
        None if sizes is None else jnp.asarray(sizes, jnp.int32)[None],
    )
    shapes = Operands(*(None if a is None else array_spec(a) for a in operands))
    spec = ProductSpec(
        shapes, weight.shape, weight.format, weight.block_size, weight.activations, activation, result_dtype
    )
    return PACKED_PRODUCT(spec, operands, implementation=implementation).out.reshape(*x.shape[:-1], n)
