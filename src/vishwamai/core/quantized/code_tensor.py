"""`CodeTensor`: a weight in a format that is data: codes of a few bits, which name levels, with scales for blocks.

`x[k, n] ~ scales[block of k, n] * (levels[codes[k, n]] - levels[zeros[block of k, n]])`. The levels are integers, or a
codebook, such as NF4's (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023).

Codes are stored as planes of bits: bit j of byte i of plane p is bit p of the code of row 8 i + j. So every number of
bits takes as many bits of memory, and a level is values by selections on bits instead of a gather.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.qtensor import expand, scale_values

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Num, UInt8

SCALES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "e8m0": "uint8"}
"""The dtype in which scales of each kind are stored; "e8m0" are powers of two, by the bits of their exponent."""
_MOST_BITS = 8
_SELECTED_BITS = 4  # up to which a level is selected by bits; beyond, a gather reads the table


@dataclasses.dataclass(frozen=True)
class CodeFormat:
    """A format of quantized weights, stated as data, for `quantize`.

    Attributes:
      name: text for displays and errors.
      bits: bits of a code, 1 to 8.
      block_size: neighbours along K that share a scale; None for a column.
      scale_dtype: how scales are stored: "float32", "bfloat16", "float16", or "e8m0" (powers of two in 8 bits).
      zero_point: each block has a level that stands for 0, so that blocks whose numbers are not symmetric use all
        levels.
      codebook: the value of each code, at most `2**bits` numbers in any order; None for integers: `0 ... 2**bits - 1`
        with a zero point, else `-2**(bits - 1) ... 2**(bits - 1) - 1`.

    Raises:
      ShapeError: a value is not one of those.

    >>> CodeFormat("int3", bits=3, block_size=64).levels
    (-4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)
    >>> CodeFormat("ternary", bits=2, codebook=(-1, 0, 1)).levels
    (-1.0, 0.0, 1.0)
    """

    name: str
    bits: int
    block_size: int | None = None
    scale_dtype: str = "float32"
    zero_point: bool = False
    codebook: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        def check(legal: bool, field: str, remedy: str) -> None:
            if not legal:
                raise ShapeError(f"CodeFormat: `{field}` is {getattr(self, field)!r}; pass {remedy}.")

        def integer(value: object) -> bool:
            return isinstance(value, int) and not isinstance(value, bool)

        check(isinstance(self.name, str), "name", "a string")
        check(integer(self.bits) and 1 <= self.bits <= _MOST_BITS, "bits", f"an integer from 1 to {_MOST_BITS}")
        size = self.block_size
        check(size is None or (integer(size) and size > 0), "block_size", "a positive integer, or None")
        check(
            isinstance(self.scale_dtype, str) and self.scale_dtype in SCALES,
            "scale_dtype",
            f"one of {', '.join(SCALES)}",
        )
        check(isinstance(self.zero_point, bool), "zero_point", "True or False")
        if self.codebook is None:
            check(self.bits > 1 or self.zero_point, "bits", "2 or more, a zero point, or a codebook such as (-1, 1)")
            return
        remedy = f"2 to {2**self.bits} finite numbers that differ"
        try:
            object.__setattr__(self, "codebook", tuple(float(value) for value in self.codebook))
        except (TypeError, ValueError):
            check(False, "codebook", remedy)
        values = set(self.codebook)
        legal = len(values) == len(self.codebook) and 2 <= len(values) <= 2**self.bits
        check(legal and all(map(math.isfinite, values)), "codebook", remedy)

    @property
    def levels(self) -> tuple[float, ...]:
        """The value of each code, before it is scaled."""
        if self.codebook is not None:
            return self.codebook
        first = 0 if self.zero_point else -(2 ** (self.bits - 1))
        return tuple(float(first + code) for code in range(2**self.bits))

    def to_json(self) -> str:
        """The format as a JSON object, which `from_json` reads."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CodeFormat:
        """The format of what `to_json` writes.

        >>> CodeFormat.from_json(CodeFormat("int3", bits=3).to_json()) == CodeFormat("int3", bits=3)
        True

        Raises:
          ShapeError: the text is not of such an object.
        """
        try:
            fields = json.loads(text)
            book = fields["codebook"]
            return cls(**{**fields, "codebook": None if book is None else tuple(book)})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ShapeError):
                raise
            raise ShapeError(
                f"CodeFormat.from_json: {text!r} is not an object with the fields of CodeFormat."
            ) from None


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("codes", "scales", "zeros"), meta_fields=("matrix", "format")
)
@dataclasses.dataclass(frozen=True, eq=False)
class CodeTensor:
    """A weight `[..., K, N]` in a `CodeFormat`: a pytree of arrays, which `gemm`, `grouped_gemm` and
    `gated_linear_unit` take.

    Attributes:
      codes: `[..., bits, ceil(K / 8), N]` uint8, planes of bits.
      scales: `[..., blocks, N]` in the format's `scale_dtype`.
      zeros: `[..., blocks, N]` uint8, the code that stands for 0; None in a format without zero points.
      matrix: `(K, N)`.
      format: the `CodeFormat`.

    >>> from vishwamai import quantize
    >>> weight = quantize(jnp.arange(64.0).reshape(64, 1), CodeFormat("ternary", 2, codebook=(-1, 0, 1)), axis=-2)
    >>> weight
    CodeTensor(ternary[64,1], bits=2, block_size=None)
    >>> weight.nbytes, sorted(set(weight.dequantize().ravel().tolist()))
    (20, [0.0, 63.0])
    """

    codes: UInt8[Array, "*lead bits bytes N"]
    scales: Num[Array, "*lead blocks N"]
    zeros: UInt8[Array, "*lead blocks N"] | None
    matrix: tuple[int, int]
    format: CodeFormat

    @property
    def shape(self) -> tuple[int, ...]:
        """`[..., K, N]` of the weight."""
        return (*self.codes.shape[:-3], *self.matrix)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the codes."""
        return jnp.dtype(self.codes.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return sum(x.size * x.dtype.itemsize for x in (self.codes, self.scales, self.zeros) if x is not None)

    def dequantize(self, dtype: DTypeLike | None = None) -> Float[Array, "*lead K N"]:
        """The weight, computed in float32 and rounded once to `dtype` (default: float32)."""
        k, form = self.matrix[0], self.format
        levels = _levels(self.codes, form)[..., :k, :]
        scales = scale_values(self.scales, jnp.float32)
        size = form.block_size or max(k, 1)
        if self.zeros is not None:
            zero = jnp.asarray(form.levels, jnp.float32)[self.zeros]
            levels = levels - expand(zero, -2, size, k)
        return (levels * expand(scales, -2, size, k)).astype(dtype or jnp.float32)

    def columns(self, start: int | jax.Array, count: int) -> CodeTensor:
        """`count` columns from `start` on, a number or a scalar array."""
        parts = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count, axis=-1), self)
        return dataclasses.replace(parts, matrix=(self.matrix[0], count))

    def __repr__(self) -> str:
        sizes = ",".join(map(str, (*getattr(self.codes, "shape", ())[:-3], *self.matrix)))
        return f"CodeTensor({self.format.name}[{sizes}], bits={self.format.bits}, block_size={self.format.block_size})"


def _levels(codes: jax.Array, form: CodeFormat) -> jax.Array:
    """float32 `[..., 8 bytes, N]` of planes `[..., bits, bytes, N]`."""
    *lead, bits, rows, columns = codes.shape
    place = jnp.arange(8, dtype=jnp.uint8)[:, None]

    def plane(p: int) -> jax.Array:  # [..., bytes, 8, N], of zeros and ones
        return (codes[..., p, :, None, :] >> place) & 1

    if form.codebook is None or bits > _SELECTED_BITS:
        total = functools.reduce(jnp.bitwise_or, (plane(p) << p for p in range(bits)))
        if form.codebook is None:
            values = total.astype(jnp.float32) + form.levels[0]
        else:
            values = jnp.asarray(form.levels, jnp.float32)[total]
    else:
        values = [jnp.float32(level) for level in form.levels]
        values += values[-1:] * (2**bits - len(values))  # codes that do not occur
        for p in range(bits):
            values = [jnp.where(plane(p) != 0, high, low) for low, high in zip(values[::2], values[1::2], strict=True)]
        (values,) = values
    return values.reshape(*lead, rows * 8, columns)


def planes(codes: jax.Array, bits: int) -> jax.Array:
    """Codes `[..., K, N]` uint8 as planes `[..., bits, ceil(K / 8), N]`."""
    *lead, k, n = codes.shape
    padded = jnp.pad(codes, ((0, 0),) * len(lead) + ((0, -k % 8), (0, 0)))
    rows = padded.reshape(*lead, 1, -1, 8, n) >> jnp.arange(bits, dtype=jnp.uint8)[:, None, None, None] & 1
    return jnp.sum(rows << jnp.arange(8, dtype=jnp.uint8)[:, None], axis=-2, dtype=jnp.uint8)
