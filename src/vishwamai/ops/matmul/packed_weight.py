"""`PackedWeight`: a weight in the order in which a native CPU kernel reads it, so that a product packs nothing and
reads memory in one run.

The order is that of `core/cpp/engine.h`: panels of some columns, each for the whole of K, and in a panel what one step
of the product takes::

    [panel][step of K][half][row][column][neighbours along K]

It is a permutation (of int8 on `avx512_bf16`, with 128 added to each number), written here in jax.numpy both ways, so a
weight that was packed on one machine is readable on every other: there it is unpacked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, NamedTuple, overload

import jax
import jax.numpy as jnp

from vishwamai.core import ffi
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.hardware import CPUS
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor, pack_qtensor
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Int, Num

DTYPES = ("bfloat16", "float32", "int8")
_PACK = "vishwamai_matmul_pack"


class Order(NamedTuple):
    """The order of an engine: what is stored, how many halves, rows, columns and neighbours a step of a panel has, and
    whether 128 is added to each number, modulo 256.
    """

    stored: str
    halves: int
    rows: int
    columns: int
    neighbours: int
    unsigned: bool = False

    @property
    def width(self) -> int:
        """Columns of a panel."""
        return self.halves * self.columns

    @property
    def step(self) -> int:
        """Numbers along K that a step takes."""
        return self.rows * self.neighbours

    def offset(self, x: AnyArray) -> AnyArray:
        """From numbers as they are to numbers as they are stored, or back."""
        return x ^ -128 if self.unsigned else x


def order(dtype: str, isa: str) -> Order:
    """The order in which the kernels of an instruction set read weights of `dtype` (one of `DTYPES`)."""
    columns = CPUS[isa].vector_bytes // 2  # two vectors of float32
    neon = {("neon_dot", "int8"): 4, ("neon_bf16", "int8"): 8, ("neon_bf16", "bfloat16"): 4}.get((isa, dtype))
    if neon is not None:
        return Order(dtype, 1, 1, columns, neon)
    if isa in ("amx", "avx512_bf16") and dtype != "float32":
        neighbours = 2 if dtype == "bfloat16" else 4
        return Order(dtype, 2, 16, 16, neighbours, unsigned=isa == "avx512_bf16" and dtype == "int8")
    return Order("int16", 1, 1, columns, 2) if dtype == "int8" else Order(dtype, 1, 1, columns, 1)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("data",), meta_fields=("shape", "dtype", "isa"))
@dataclasses.dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight packed for the CPU: a pytree of one array, so it passes through jit, donation and checkpoints like any
    other.

    Attributes:
      data: `[panels, numbers of a panel]` in the dtype that the kernel stores.
      shape: `(K, N)` of the weight.
      dtype: name of its dtype: "bfloat16", "float32" or "int8".
      isa: the instruction set whose order it has.

    >>> import jax.numpy as jnp
    >>> from vishwamai import gemm, pack_weight
    >>> weight = pack_weight(jnp.array([[3.0], [-4.0]]), isa="generic")
    >>> weight
    PackedWeight(float32[2,1], isa='generic')
    >>> gemm(jnp.array([[1.0, 2.0]]), weight)
    Array([[-5.]], dtype=float32)
    """

    data: Num[Array, "panels numbers"]
    shape: tuple[int, int]
    dtype: str
    isa: str

    def unpack(self) -> Num[Array, "K N"]:
        """The weight as it was, bit for bit."""
        return unpermuted(self.data, self.shape, self.dtype, self.isa)

    def columns(self, index: Int[Array, "*rows"]) -> Num[Array, "*rows K"]:
        """Columns of the weight: the embedding of tokens where the weight is a tied head `[K, vocab]`.

        Only the columns asked for are read. An index out of range is clamped, as in JAX's gathers.

        >>> packed = pack_weight(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        >>> packed.columns(jnp.array([1])).tolist()
        [[2.0, 4.0]]
        """
        (k, n), o = self.shape, order(self.dtype, self.isa)
        index = jnp.clip(jnp.asarray(index), 0, max(n - 1, 0))
        panel, column = index // o.width, index % o.width
        parts = self.data.reshape(self.data.shape[0], -(-k // o.step), o.halves, o.rows, o.columns, o.neighbours)
        stored = parts[panel, :, column // o.columns, :, column % o.columns]  # [*rows, steps, rows, neighbours]
        return o.offset(stored.reshape(*index.shape, parts.shape[1] * o.step)[..., :k]).astype(self.dtype)

    def __repr__(self) -> str:
        return f"PackedWeight({self.dtype}[{self.shape[0]},{self.shape[1]}], isa={self.isa!r})"


@overload
def pack_weight(weight: QTensor, *, transpose: bool = False, activations: str | None = None) -> PackedQTensor: ...


@overload
def pack_weight(weight: Num[Array, "K N"], *, transpose: bool = False, isa: str | None = None) -> PackedWeight: ...


@checked
def pack_weight(
    weight: Num[Array, ...] | QTensor,
    *,
    transpose: bool = False,
    isa: str | None = None,
    activations: str | None = None,
) -> PackedWeight | PackedQTensor:
    """Packs a weight once, for `gemm(x, packed)`; with few rows of x the product then runs at the speed of reading it.

    Args:
      weight: `[K, N]`, or `[N, K]` with `transpose`: bfloat16, float32 or int8. On an instruction set without products
        of int8 it is stored widened, to int16. Or a `QTensor` of int8, int4, fp4_e2m1, mxfp4, fp8_e4m3 or
        mxfp8_e4m3 with one scale for a column or for blocks of K (a multiple of 8); its panels are the same on every
        instruction set. It may have a leading axis of groups, for `grouped_gemm`, and serves `gated_linear_unit` too.
      transpose: the weight is stored with its contracted axis last.
      isa: instruction set to pack for; by default the one that this process uses ("generic" where the native module is
        missing). Not for a QTensor.
      activations: treatment of the other operand of a QTensor; None: "int8", or "exact" for 8-bit floats, which have no
        other. "int8" rounds each row of the other operand to int8, in the blocks of the weight's scales, or in blocks
        of 128 where a column has
        one scale: the scale is the block's largest magnitude / 127. Products of bytes are then summed exactly. This is
        what llama.cpp does, and the fastest. "exact" rounds nothing: the weight is dequantized to float32, and products
        are float32's. Use it where rows have outliers that int8 loses.

    Raises:
      ShapeError: the weight is not a matrix, its dtype is not one of those, an option is unknown or does not fit.

    >>> import jax.numpy as jnp
    >>> weight = jnp.arange(6.0).reshape(2, 3)
    >>> bool((pack_weight(weight, isa="avx2").unpack() == weight).all())
    True
    """
    if isinstance(weight, QTensor):
        if isa is not None:
            raise ShapeError(f"pack_weight: `isa` is {isa!r} with a QTensor, whose panels serve all; leave it out.")
        return pack_qtensor(weight, transpose, activations)
    if activations not in (None, "int8"):
        raise ShapeError(f"pack_weight: `activations` is {activations!r}, but `weight` is not a QTensor; leave it out.")
    weight = as_array("pack_weight", "weight", weight)
    if weight.ndim != 2 or weight.dtype.name not in DTYPES:
        raise ShapeError(
            f"pack_weight: `weight` is {weight.dtype.name} of shape {weight.shape}; pass a matrix of "
            f"{', '.join(DTYPES)}."
        )
    isa = isa or (ffi.isa() if ffi.why_not() is None else "generic")
    if isa not in ffi.ISAS:
        raise ShapeError(
            f"pack_weight: `isa` is {isa!r}; pass one of {', '.join(ffi.ISAS)}, or None for this machine's."
        )
    k, n = weight.shape[::-1] if transpose else weight.shape
    return PackedWeight(_packed(weight, transpose, isa), (k, n), weight.dtype.name, isa)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed(weight: AnyArray, transpose: bool, isa: str) -> AnyArray:
    """`[panels, numbers]`; for this process's instruction set by the native kernel, on all threads."""
    portable = functools.partial(permuted, transpose=transpose, isa=isa)
    result = jax.eval_shape(portable, weight)

    def native(weight: AnyArray) -> AnyArray:
        results = (ffi.result(result.shape, result.dtype),)
        return ffi.call(_PACK, results, weight, vmap_method="sequential", transposed=transpose)[0]

    if ffi.why_not(None, _PACK) is not None or isa != ffi.isa() or result.size == 0:
        return portable(weight)
    return jax.lax.platform_dependent(weight, cpu=native, default=portable)


def permuted(weight: AnyArray, transpose: bool, isa: str) -> AnyArray:
    """`[panels, numbers]` of a weight, in jax.numpy."""
    x = weight.T if transpose else weight
    (k, n), o = x.shape, order(weight.dtype.name, isa)
    steps, panels = -(-k // o.step), -(-n // o.width)
    full = jnp.pad(x, ((0, steps * o.step - k), (0, panels * o.width - n))).astype(o.stored)
    parts = o.offset(full).reshape(steps, o.rows, o.neighbours, panels, o.halves, o.columns).transpose(3, 0, 4, 1, 5, 2)
    return parts.reshape(panels, steps * o.step * o.width)


def unpermuted(data: AnyArray, shape: tuple[int, int], dtype: str, isa: str) -> AnyArray:
    """`[..., K, N]` from `[..., panels, numbers]`."""
    (k, n), o = shape, order(dtype, isa)
    steps, panels, lead = -(-k // o.step), -(-n // o.width), data.shape[:-2]
    parts = data.reshape(math.prod(lead), panels, steps, o.halves, o.rows, o.columns, o.neighbours)
    full = parts.transpose(0, 2, 4, 6, 1, 3, 5).reshape(*lead, steps * o.step, panels * o.width)
    return o.offset(full[..., :k, :n]).astype(dtype)
