"""Precision of products and accumulation: one vocabulary for every operation and platform.

A float32 product on a bfloat16 unit is built from splits: x = hi + mid + lo, each bfloat16. Keeping the products whose
magnitude is above the float32 rounding error takes six passes ("highest"); three passes ("high") keep about 16 bits;
one pass ("default" for bfloat16 operands) is the hardware's own product. See Henry, Tang, Heinecke, "Leveraging the
bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations" (ARITH 2019).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from vishwamai.core.errors import KernelError
from vishwamai.core.types import AnyArray

PRECISIONS = ("default", "high", "highest")
FLOATS = tuple(jnp.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64))
FP8_DTYPES = (jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2))


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Precision of float32 products.

    Attributes:
      products: "highest" (six bfloat16 products, or native float32: float32 accuracy; the default for float32
        operands), "high" (three bfloat16 products, about 16 bits) or "default" (the operands' own dtype for 16- and
        8-bit operands; "highest" for float32 operands). It has no effect on operands narrower than float32, whose
        products are exact in float32.

    >>> PrecisionConfig.HIGH
    PrecisionConfig(products='high')
    """

    products: str = "default"
    DEFAULT: ClassVar[PrecisionConfig]
    HIGH: ClassVar[PrecisionConfig]
    HIGHEST: ClassVar[PrecisionConfig]

    def __post_init__(self) -> None:
        if not isinstance(self.products, str) or self.products not in PRECISIONS:
            raise KernelError(f"PrecisionConfig: `products` is {self.products!r}; pass one of {', '.join(PRECISIONS)}.")


PrecisionConfig.DEFAULT, PrecisionConfig.HIGH, PrecisionConfig.HIGHEST = map(PrecisionConfig, PRECISIONS)


def precision_of(name: str, precision: Any) -> PrecisionConfig | None:
    """The precision that a `precision` of JAX and Flax asks for; None where it is None.

    Of a pair, one for each operand, the more accurate. An algorithm of products (`jax.lax.DotAlgorithmPreset`, by
    name too) is the precision that is at least as accurate.

    Raises:
      KernelError: it is none of JAX's, or it accumulates in another dtype than float32. `name` is who says so.

    >>> precision_of("Linear", ("bfloat16", "float32"))
    PrecisionConfig(products='highest')
    >>> precision_of("Linear", jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3)
    PrecisionConfig(products='high')
    """
    if precision is None or isinstance(precision, PrecisionConfig):
        return precision
    if isinstance(precision, (tuple, list)) and len(precision) == 2:
        pair = [part for part in (precision_of(name, operand) for operand in precision) if part is not None]
        return max(pair, key=lambda part: PRECISIONS.index(part.products), default=None)
    if isinstance(precision, jax.lax.DotAlgorithmPreset):
        precision = precision.name
    if isinstance(precision, str) and precision in _ALGORITHMS:
        return PrecisionConfig(_ALGORITHMS[precision])
    try:
        return PrecisionConfig(jax.lax.Precision(precision).name.lower())
    except (ValueError, TypeError):
        raise KernelError(
            f"{name}: `precision` is {precision!r}; pass None, a jax.lax.Precision or its name, a pair of them, or one "
            f"of the algorithms {', '.join(_ALGORITHMS)}."
        ) from None


_ALGORITHMS = {
    "DEFAULT": "default",
    "BF16_BF16_F32": "default",
    "BF16_BF16_F32_X3": "high",
    "BF16_BF16_F32_X6": "highest",
    "BF16_BF16_F32_X9": "highest",
    "TF32_TF32_F32": "high",
    "TF32_TF32_F32_X3": "highest",
    "F32_F32_F32": "highest",
}


def resolve_precision(
    precision: str | PrecisionConfig | jax.lax.Precision | None, ambient: PrecisionConfig, *dtypes: jnp.dtype
) -> str:
    """The precision that a product of operands of `dtypes` runs at: "default" unless one of them is float32, then
    "high" or "highest".
    """
    if isinstance(precision, jax.lax.Precision):
        precision = precision.name.lower()
    if precision is not None and not isinstance(precision, PrecisionConfig):
        precision = PrecisionConfig(precision)
    products = (precision or ambient).products
    if not any(jnp.dtype(dtype) == jnp.float32 for dtype in dtypes):
        return "default"
    return "highest" if products == "default" else products


def lax_precision(products: str) -> jax.lax.Precision:
    """The `jax.lax.Precision` of the same name."""
    return {"default": jax.lax.Precision.DEFAULT, "high": jax.lax.Precision.HIGH, "highest": jax.lax.Precision.HIGHEST}[
        products
    ]


def accumulator_dtype(*dtypes: jnp.dtype) -> jnp.dtype:
    """The dtype that products of `dtypes` are summed in: float64 for float64, int32 for integers, float32 for
    everything else.
    """
    kinds = [jnp.dtype(dtype) for dtype in dtypes]
    if any(kind == jnp.float64 for kind in kinds):
        return jnp.dtype(jnp.float64)
    if all(jnp.issubdtype(kind, jnp.integer) for kind in kinds):
        return jnp.dtype(jnp.int32)
    return jnp.dtype(jnp.float32)


def rounded(x: AnyArray) -> AnyArray:
    """`x`, which is a product, rounded by itself.

    XLA's compilers fuse a product with the sum or difference that follows. Of huge logits, what is left after the
    maximum is subtracted is then their rounding, by which an exponential overflows or a whole row vanishes.
    """
    return jnp.minimum(x, jnp.finfo(x.dtype).max)
