"""The public matrix product: `gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.code_product import by_columns, check_options
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_product import packed_product
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.types import AnyArray
from vishwamai.ops.matmul.batch_layout import make_spec, signature
from vishwamai.ops.matmul.cpu import NATIVE
from vishwamai.ops.matmul.gpu import TRITON
from vishwamai.ops.matmul.packed import packed_gemm
from vishwamai.ops.matmul.packed_weight import PackedWeight
from vishwamai.ops.matmul.quantized import unpack
from vishwamai.ops.matmul.reference import XLA
from vishwamai.ops.matmul.spec import MatmulSpec, Operands, compute_dtype, split
from vishwamai.ops.matmul.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Num

MATMUL: Op[MatmulSpec] = Op("gemm", (PALLAS_TPU, TRITON, NATIVE, XLA), split=split, residual="groups m n")


@checked
def gemm(
    a: Num[Array, "*batch M K"] | QTensor,
    b: Num[Array, "*batch K N"] | QTensor | PackedWeight | PackedQTensor | CodeTensor,
    *,
    bias: Any = None,
    activation: str | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    out_dtype: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Num[Array, "*batch M N"]:
    """Matrix product with its epilogue: `activation(scale_a[:, None] * scale_b[None, :] * (a @ b) + bias)`, rounded
    once.

    Batch axes broadcast as in `jnp.matmul`; an operand that is shared between them is not copied. Sums are float32
    (int32 for int8 with int8, float64 for float64), and scales, bias and activation are applied to them before the
    result is rounded.

    Args:
      a: `[..., M, K]`, or `[..., K, M]` with `transpose_a`: bfloat16, float16, float32, float64, int8, int4,
        float8_e4m3fn, float8_e5m2 or float4_e2m1fn; or a `QTensor` of that shape whose scales are shared along K, all
        of it or blocks of it. One scale for a row is applied to the sum; with one for each block the operand is
        dequantized tile by tile, to the dtype of the products, and never stored so.
      b: `[..., K, N]`, or `[..., N, K]` with `transpose_b`, or a `QTensor`, or a `PackedWeight` of the dtype of `a`
        (see `pack_weight`), or a `PackedQTensor`, which comes with its scales, or a `CodeTensor`, which is dequantized
        to the dtype of `a` a tile of columns at a time. Floats of different width promote as in JAX; a narrow operand
        beside a wider float is brought to the wider dtype, exactly; an integer with a narrow float is an error.
      bias: `[N]`, or `[..., N]` with batch axes; added to the scaled sum.
      activation: "relu", "relu2" (its square), "silu", "gelu" (exact), "gelu_tanh", "sigmoid", "tanh", or None.
      transpose_a: a is stored with its contracted axis first. No copy is made.
      transpose_b: b is stored with its contracted axis last. No copy is made.
      precision: mode of float32 products: "highest" (the default: float32 accuracy) or "high" (three bfloat16 products,
        about 16 bits); None takes the ambient one. It has no effect on other dtypes, whose products are exact.
      out_dtype: dtype of the result; by default the dtype of the products, bfloat16 for narrow floats and for two
        narrow operands with block scales, int32 for int8 (float32 with an epilogue).
      scale_a: factor of a quantized `a`: a scalar, `[M]`, or `[..., M]` with batch axes.
      scale_b: the same for `b`: a scalar, `[N]`, or `[..., N]`.
      block_size: about how many rows and columns a tile has; None lets the library choose.
      config: tiles (a `MatmulConfig`), a block size, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., M, N]` in `out_dtype`. Gradients exist for `a`, `b` (the 8-bit floats' are rounded to the same 8 bits and
      saturate), `bias` and the scales; integers have none, and asking for a QTensor's is an error (`fake_quantize`
      trains through one). Kernels keep an activation's argument in `out_dtype` for them.

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: the implementation asked for cannot serve the call; or the gradient of a QTensor is asked for.

    >>> import jax.numpy as jnp
    >>> from vishwamai import quantize
    >>> gemm(jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [-4.0]]), bias=jnp.array([1.0]), activation="relu")
    Array([[0.]], dtype=float32)
    >>> gemm(jnp.ones((5, 2, 8), jnp.int8), jnp.ones((8, 3), jnp.int8), scale_b=0.5).shape
    (5, 2, 3)
    >>> weight = quantize(jnp.ones((256, 3)), "int4", axis=-2, block_size=128)
    >>> gemm(jnp.ones((1, 256), jnp.bfloat16), weight)
    Array([[256, 256, 256]], dtype=bfloat16)
    """
    if block_size is not None:
        if config is not None:
            raise ShapeError(f"gemm: both `block_size` ({block_size}) and `config` ({config}) are given; pass one.")
        config = block_size
    if out_dtype is not None:
        out_dtype = as_jax_dtype("gemm", "out_dtype", out_dtype)
    if isinstance(b, CodeTensor):
        others = {"transpose_a": transpose_a, "transpose_b": transpose_b, "scale_b": scale_b}
        check_options("gemm", "b", **others, a=a if isinstance(a, QTensor) else None)
        options = {"activation": activation, "precision": precision, "out_dtype": out_dtype, "scale_a": scale_a}
        options |= {"config": config, "implementation": implementation}
        x = as_array("gemm", "a", a)

        def product(tile: Any, bias: AnyArray) -> Any:
            return gemm(x, tile, bias=bias, **options)

        return by_columns("gemm", product, (b,), x.dtype, (None if bias is None else as_array("gemm", "bias", bias),))
    if isinstance(b, PackedQTensor):
        others = {"transpose_a": transpose_a, "transpose_b": transpose_b, "config": config}
        others |= {"scale_a": scale_a, "scale_b": scale_b}
        unsupported = [name for name, value in others.items() if value is not None and value is not False]
        if isinstance(a, QTensor) or unsupported:
            raise ShapeError(
                f"gemm: `b` is a PackedQTensor; pass `a` as an array [..., M, K], and leave out "
                f"{', '.join(unsupported)}."
            )
        return packed_product(
            "gemm", a, b, bias=bias, activation=activation, out_dtype=out_dtype, implementation=implementation
        )
    if isinstance(b, PackedWeight):
        if isinstance(a, QTensor) or transpose_a or transpose_b or config is not None:
            raise ShapeError(
                "gemm: `b` is a PackedWeight; pass `a` as an array [..., M, K], and neither transpose_a, transpose_b, "
                "block_size nor config."
            )
        return packed_gemm(a, b, bias, activation, out_dtype, scale_a, scale_b, implementation)
    a, b, scale_a, scale_b, blocks = unpack(a, b, transpose_a, transpose_b, scale_a, scale_b)
    a, b = as_array("gemm", "a", a), as_array("gemm", "b", b)
    if out_dtype is None and compute_dtype(a.dtype, b.dtype) == jnp.float32:
        out_dtype = jnp.float32  # whatever the ambient `use_bfloat16` makes of the operands
    others = (("bias", bias), ("scale_a", scale_a), ("scale_b", scale_b))
    rest = (None if x is None else as_array("gemm", name, x) for name, x in others)
    arrays = Operands(*cast_for_matmul(a, b), *rest)
    products = current_config().precision if precision is None else precision
    spec = make_spec(array_specs(arrays), activation, transpose_a, transpose_b, products, out_dtype, blocks)
    of_caller = signature(transpose_a, transpose_b, blocks)
    return public_call(MATMUL, of_caller, spec, arrays, config=config, implementation=implementation).out
