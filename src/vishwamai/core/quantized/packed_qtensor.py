"""`PackedQTensor`: a weight of 8 or 4 bits in the order in which the native CPU kernels read it.

The order is that of `core/cpp/quantized.h`, the same on every instruction set: panels of 32 columns, each for the
whole of K, with 4 neighbours along K of a column side by side::

    int8: [panel][K / 4][column][4]      a byte is the value + 128
    int4: [panel][K / 8][column][4]      a byte is the value + 8 of neighbour i, and above it of neighbour i + 4
    mxfp4, fp4_e2m1: as int4, with the bits of the value in place of the value + 8
    uint4: as int4, with the value in place of the value + 8
    fp8_e4m3, mxfp8_e4m3: [panel][K][column], the bits of the value
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi
from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import FORMATS, ZERO_FORMATS, QTensor, bits, of_zero_words, scale_values

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int, UInt8

COLUMNS = 32  # of a panel
KINDS = {"int8": 0, "int4": 1, "mxfp4": 2, "fp4_e2m1": 2, "fp8_e4m3": 3, "mxfp8_e4m3": 3, "uint4": 4}
"""How the kernels number the formats that they read (`Packing` of quantized.h)."""
_FORMATS = FORMATS | ZERO_FORMATS
BITS = {name: bits(_FORMATS[name].dtype) for name in KINDS}
ACTIVATIONS = ("int8", "exact")
LARGEST_BLOCK = 32768  # sums of as many products of bytes fit int32
_PACK = "vishwamai_quantized_panels"


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("shape", "format", "block_size", "activations"),
)
@dataclasses.dataclass(frozen=True, eq=False)
class PackedQTensor:
    """A quantized weight packed for the CPU: a pytree of two arrays, readable on every machine.

    Attributes:
      values: `[*groups, panels, bytes of a panel]` uint8.
      scales: `[*groups, panels, blocks of K, 32]` float32, or the uint32 words of uint4; one block where a column has
        one scale.
      shape: `(K, N)` of the weight.
      format: one of `BITS`.
      block_size: numbers along K that share a scale; None for all of them.
      activations: treatment of a product's other operand: "int8" rounds it, "exact" does not, as always with 8-bit
        floats; see `pack_weight`.

    >>> from vishwamai import gemm, pack_weight, quantize
    >>> weight = pack_weight(quantize(jnp.ones((256, 64)), "int4", axis=-2, block_size=32))
    >>> weight
    PackedQTensor(int4[256,64], block_size=32, activations='int8')
    >>> float(gemm(jnp.ones((1, 256)), weight)[0, 0])
    256.0
    """

    values: UInt8[Array, "*groups panels bytes"]
    scales: Float[Array, "*groups panels blocks 32"]
    shape: tuple[int, int]
    format: str
    block_size: int | None
    activations: str

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

    def unpack(self) -> QTensor:
        """The weight as it was, `[*groups, K, N]` with axis -2; its values bit for bit."""
        k, n = self.shape
        lead = self.values.shape[:-2]
        scales = jnp.moveaxis(self.scales, -2, -3).reshape(*lead, self.scales.shape[-2], -1)[..., :n]
        if _FORMATS[self.format].power_of_two:
            exponents = jax.lax.bitcast_convert_type(scales, jnp.uint32) >> 23
            scales = jnp.where(jnp.isnan(scales), 255, exponents).astype(jnp.uint8)
        values = unpacked_values(self.values, self.shape, self.format)
        return QTensor(values.astype(_FORMATS[self.format].dtype), scales, self.format, -2, self.block_size)

    def columns(self, index: Int[Array, "*rows"], dtype: DTypeLike = jnp.float32) -> Float[Array, "*rows K"]:
        """Columns of the weight, dequantized: the embedding of tokens where the weight is a tied head `[K, vocab]`.

        Only the columns asked for are read. An index out of range is clamped, as in JAX's gathers.

        >>> from vishwamai import pack_weight, quantize
        >>> table = jnp.array([[127.0, -127.0], [1.0, 2.0], [127.0, 50.0]])  # [tokens, K]
        >>> packed = pack_weight(quantize(table, "int8", axis=-1), transpose=True)
        >>> packed.columns(jnp.array([2, 0])).tolist()
        [[127.0, 50.0], [127.0, -127.0]]
        """
        if self.values.ndim != 2:
            raise ShapeError(
                f"PackedQTensor.columns: the weight has groups (values of shape {self.values.shape}); take one group "
                "first."
            )
        k, n = self.shape
        index = jnp.clip(jnp.asarray(index), 0, max(n - 1, 0))
        panel, column = index // COLUMNS, index % COLUMNS
        side_by_side = _side_by_side(self.format)
        stored = self.values.reshape(self.values.shape[0], -1, COLUMNS, side_by_side)[panel, :, column]
        values = _from_bytes(stored, self.format).reshape(*index.shape, -1)[..., :k]  # of [*rows, steps, side by side]
        scales = self.scales[panel, :, column]  # [*rows, blocks]
        size = k if self.block_size is None else self.block_size
        scales = jnp.repeat(scales, size, axis=-1)[..., :k]
        return scaled(values, scales, self.format).astype(dtype)

    def __repr__(self) -> str:
        groups = "".join(f"{size}," for size in self.values.shape[:-2])
        return (
            f"PackedQTensor({self.format}[{groups}{self.shape[0]},{self.shape[1]}], block_size={self.block_size}, "
            f"activations={self.activations!r})"
        )


def scaled(values: jax.Array, scales: jax.Array, format: str) -> jax.Array:
    """float32 numbers that values stand for; `scales` as a `PackedQTensor` has them, repeated to one for each value."""
    if format in ZERO_FORMATS:
        scales, zeros = of_zero_words(scales)
        return (values.astype(jnp.float32) - zeros) * scales
    return values.astype(jnp.float32) * scales


def has_kernel(format: str, block_size: int | None) -> bool:
    """Whether a kernel reads packed weights of a format whose scales are shared by so many numbers along K."""
    return format in BITS and (block_size is None or (block_size % 8 == 0 and 0 < block_size <= LARGEST_BLOCK))


def _is_fp8(format: str) -> bool:
    return KINDS[format] == KINDS["fp8_e4m3"]


def _side_by_side(format: str) -> int:
    """Bytes of a column that are neighbours."""
    return 1 if _is_fp8(format) else 4


def _from_bytes(stored: jax.Array, format: str) -> jax.Array:
    """Values `[..., steps, neighbours along K]` from the bytes `[..., steps, side by side]` of a column; int8 or the
    format's dtype.
    """
    if format == "int8":
        return (stored ^ 128).astype(jnp.int8)
    if BITS[format] == 8:
        return jax.lax.bitcast_convert_type(stored, FORMATS[format].dtype)
    codes = jnp.concatenate([stored & 15, stored >> 4], axis=-1)
    if format == "int4":
        return codes.astype(jnp.int8) - 8
    if format in ZERO_FORMATS:
        return codes.astype(_FORMATS[format].dtype)
    return jax.lax.bitcast_convert_type(codes.astype(jnp.uint4), FORMATS[format].dtype)


def unpacked_values(values: jax.Array, shape: tuple[int, int], format: str) -> jax.Array:
    """`[..., K, N]` from `[..., panels, bytes]`, in int8 or the format's dtype."""
    lead, panels = values.shape[:-2], values.shape[-2]
    parts = values.reshape(*lead, panels, -1, COLUMNS, _side_by_side(format))
    parts = _from_bytes(parts, format)  # [..., panels, steps, columns, neighbours]
    parts = jnp.moveaxis(parts, (-4, -2), (-2, -1))  # [..., steps, neighbours, panels, columns]
    return parts.reshape(*lead, parts.shape[-4] * parts.shape[-3], panels * COLUMNS)[..., : shape[0], : shape[1]]


def pack_qtensor(weight: QTensor, transpose: bool = False, activations: str | None = None) -> PackedQTensor:
    """Packs `weight` `[*groups, K, N]`, or `[*groups, N, K]` with `transpose`; see `pack_weight`.

    Raises:
      ShapeError: no kernel reads its format; its scales are not shared along K; a block is not a multiple of 8, or too
        large; `activations` is unknown, or "int8" with 8-bit floats.
    """
    contracted = -1 if transpose else -2
    if activations not in (None, *ACTIVATIONS):
        raise ShapeError(
            f"pack_weight: `activations` is {activations!r}; pass one of {', '.join(map(repr, ACTIVATIONS))}, or None."
        )
    if weight.format not in BITS or weight.ndim < 2:
        raise ShapeError(
            f"pack_weight: `weight` is {weight}; pass a QTensor of {', '.join(BITS)}, of two axes or more."
        )
    floats = _is_fp8(weight.format)
    if floats and activations == "int8":
        raise ShapeError(
            f"pack_weight: `activations` is 'int8', but products of {weight.format} are not products of bytes; pass "
            "'exact', or None."
        )
    activations = activations or ("exact" if floats else "int8")
    if weight.axis not in (None, contracted):
        raise ShapeError(
            f"pack_weight: `weight` shares its scales along axis {weight.axis}, but a product contracts axis "
            f"{contracted} of it; quantize it with axis={contracted}, or pass transpose={not transpose}."
        )
    block = weight.block_size
    if not has_kernel(weight.format, block):
        raise ShapeError(
            f"pack_weight: `weight` has blocks of {block}; pass a multiple of 8 of at most {LARGEST_BLOCK}."
        )
    lead = weight.shape[:-2]
    k, n = weight.shape[-2:] if not transpose else weight.shape[:-3:-1]
    panels = -(-n // COLUMNS)
    scales = weight.scales if weight.format in ZERO_FORMATS else scale_values(weight.scales, jnp.float32)
    scales = jnp.broadcast_to(scales, (*lead, 1, n)) if weight.axis is None else scales
    scales = jnp.swapaxes(scales, -1, -2) if transpose and weight.axis is not None else scales
    scales = jnp.pad(scales, ((0, 0),) * (scales.ndim - 1) + ((0, panels * COLUMNS - n),))
    scales = jnp.moveaxis(scales.reshape(*lead, -1, panels, COLUMNS), -2, -3)
    flat = _as_bytes(weight.values, weight.format).reshape(-1, *weight.shape[-2:])
    values = _packed(flat, weight.format, transpose).reshape(*lead, panels, -1)
    return PackedQTensor(values, scales, (int(k), int(n)), weight.format, block, activations)


@functools.partial(jax.jit, static_argnums=1)
def _as_bytes(values: jax.Array, format: str) -> jax.Array:
    """int8 of values: themselves, the bits of 8-bit floats, or uint4 and the bits of 4-bit floats - 8, so that 8 is
    added to each 4-bit number.
    """
    if format in ("int8", "int4"):
        return values.astype(jnp.int8)
    if format in ZERO_FORMATS:
        return values.astype(jnp.int8) - 8
    if BITS[format] == 8:
        return jax.lax.bitcast_convert_type(values, jnp.int8)
    return jax.lax.bitcast_convert_type(values, jnp.uint4).astype(jnp.int8) - 8


@functools.partial(jax.jit, static_argnums=(1, 2))
def _packed(values: jax.Array, format: str, transpose: bool) -> jax.Array:
    """`[groups, panels, bytes]`; by the native kernel, on all threads, where there is one."""
    portable = functools.partial(permuted, format=format, transpose=transpose)
    result = jax.eval_shape(portable, values)

    def native(values: jax.Array) -> jax.Array:
        results = (ffi.result(result.shape, result.dtype),)
        return ffi.call(_PACK, results, values, packing=np.int64(KINDS[format]), transposed=transpose)[0]

    if ffi.why_not(None, _PACK) is not None or result.size == 0:
        return portable(values)
    return jax.lax.platform_dependent(values, cpu=native, default=portable)


def permuted(values: jax.Array, format: str, transpose: bool) -> jax.Array:
    """`[groups, panels, bytes]` of `_as_bytes` `[groups, K, N]`, in jax.numpy."""
    x = jnp.swapaxes(values, 1, 2) if transpose else values
    groups, k, n = x.shape
    width, neighbours = BITS[format], _side_by_side(format)
    padded, panels = -(-k // 8) * 8, -(-n // COLUMNS)
    x = jnp.pad(x, ((0, 0), (0, padded - k), (0, panels * COLUMNS - n)))
    x = x.reshape(groups, -1, neighbours * 8 // width, panels, COLUMNS).transpose(0, 3, 1, 4, 2)
    if width == 4:
        x = (x + 8).astype(jnp.uint8)
        packed = x[..., :4] | (x[..., 4:] << 4)
    else:
        packed = x.astype(jnp.uint8) ^ (128 if format == "int8" else 0)
    return packed.reshape(groups, panels, padded * COLUMNS * width // 8)
