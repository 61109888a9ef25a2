"""The public gated linear unit: `gated_linear_unit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.config import ambient_target, cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.qtensor import QTensor, check_symmetric, scale_values, undifferentiable
from vishwamai.core.quantized.code_product import by_columns
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_product import packed_product
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import ArraySpec, array_spec, as_array
from vishwamai.core.types import AnyArray
from vishwamai.ops.gated.cpu import NATIVE
from vishwamai.ops.gated.gpu import TRITON
from vishwamai.ops.gated.reference import XLA
from vishwamai.ops.gated.spec import SIGNATURE, GatedSpec, Operands, describe, split
from vishwamai.ops.gated.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

GATED: Op[GatedSpec] = Op("gated_linear_unit", (PALLAS_TPU, TRITON, NATIVE, XLA), split=split)


@checked
def gated_linear_unit(
    x: Float[Array, "*rows features"],
    weights: Any,
    activation: str | None = "silu",
    *,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*rows hidden"]:
    """Gated linear unit: `activation(x @ gate) * (x @ up)`, both products in one pass over x. Shazeer, "GLU Variants
    Improve Transformer" (2020).

    SwiGLU is "silu", GeGLU "gelu" or "gelu_tanh", ReGLU "relu", the original GLU "sigmoid", the bilinear unit None.
    Sums are float32 (float64 for float64), and the activation and the product of both are taken of them before the
    result is rounded.

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64.
      weights: (gate, up), `[features, hidden]` each, or one array `[2, features, hidden]`; of the dtype of `x`. Or a
        pair of `QTensor`s of one format with a scale for each column (`quantize(w, axis=-2)`), which multiply as in
        `gemm`; or a pair of `PackedQTensor`s (see `pack_weight`), or of `CodeTensor`s, which are dequantized to the
        dtype of `x` a tile of columns at a time.
      activation: "relu", "relu2", "silu", "gelu" (exact), "gelu_tanh", "sigmoid", "tanh", or None.
      precision: mode of float32 products: "highest" (the default: float32 accuracy) or "high" (about 16 bits); None
        takes the ambient one.
      config: tiles (a `GatedConfig`), a block size, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., hidden]` in the dtype of `x`. Quantized weights have no gradient.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call; or the gradient of a QTensor is asked for.

    >>> import jax.numpy as jnp
    >>> x, gate, up = jnp.ones((3, 8)), jnp.full((8, 16), 0.5), jnp.full((8, 16), 0.25)
    >>> print(gated_linear_unit(x, (gate, up), "relu")[0, :3].tolist())
    [8.000, 8.000, 8.000]
    """
    name = "gated_linear_unit"
    if isinstance(weights, (tuple, list)):
        if len(weights) != 2:
            raise ShapeError(
                f"{name}: `weights` is a sequence of {len(weights)}; pass (gate, up), or one array of shape (2, "
                "features, hidden)."
            )
        if any(isinstance(w, CodeTensor) for w in weights):
            rows = as_array(name, "x", x)

            def unit(*tiles: object) -> jax.Array:
                options = {"precision": precision, "config": config, "implementation": implementation}
                return gated_linear_unit(rows, tiles, activation, **options)

            return by_columns(name, unit, weights, rows.dtype)
        if any(isinstance(w, PackedQTensor) for w in weights):
            return _packed(x, weights, activation, config, implementation)
        x = as_array(name, "x", x)
        if any(isinstance(w, QTensor) for w in weights):
            operands = _quantized(x, weights)
        else:
            gate, up = (as_array(name, "weights", w) for w in weights)
            operands = Operands(x, gate, up, None)
    else:
        operands = Operands(as_array(name, "x", x), None, None, as_array(name, "weights", weights))

    def described(arrays: Operands) -> GatedSpec:
        products = resolve_precision(precision, current_config().precision, arrays.x.dtype)
        return describe(array_specs(arrays), activation, products)

    spec = described(operands)
    factors = operands._replace(gate_scale=None, up_scale=None)._asdict().items()
    arrays = operands._replace(**{name: cast_for_matmul(a)[0] for name, a in factors if a is not None})
    if arrays.x is not operands.x:  # its errors told the caller's own dtypes
        spec = described(arrays)
    outputs = public_call(GATED, SIGNATURE, spec, arrays, config=config, implementation=implementation)
    return outputs.h.astype(operands.x.dtype)


def has_kernel(x: jax.Array, weights: Any, activation: str | None) -> bool:
    """Whether a kernel of the ambient target takes this pair of weights, if they are QTensors; where none does, two
    products by `gemm` have kernels.
    """
    gate, up = weights
    if not all(isinstance(w, QTensor) and _by_column(w) for w in weights) or gate.dtype != up.dtype:
        return False
    scale = ArraySpec(gate.shape[-1:], accumulator_dtype(x.dtype))
    specs = Operands(array_spec(x), array_spec(gate.values), array_spec(up.values), None, scale, scale)
    spec = describe(specs, activation, resolve_precision(None, current_config().precision, x.dtype))
    return GATED.choose(spec, ambient_target()).implementation.platform is not None


def _by_column(w: QTensor) -> bool:
    return w.block_size is None and w.axis in (None, -2)


def check_quantized(weights: Any) -> None:
    """Checks a pair of weights of which one is a QTensor, whose values and scales may be of any framework.

    Raises:
      ShapeError: the other one is none, or a column has not one scale.
    """
    name = "gated_linear_unit"
    for i, w in enumerate(weights):
        if not isinstance(w, QTensor):
            raise ShapeError(f"{name}: one of `weights` is a QTensor, but not `weights[{i}]`; quantize both or none.")
        check_symmetric(f"{name}: `weights[{i}]`", w.format)
        if not _by_column(w):
            raise ShapeError(
                f"{name}: `weights[{i}]` is {w}; quantize it with axis=-2 and without `block_size`, so that each "
                "column has one scale, or multiply by `gemm`."
            )


def _quantized(x: jax.Array, weights: Any) -> Operands:
    check_quantized(weights)
    arrays = []
    for i, w in enumerate(weights):
        guarded: Any = undifferentiable(f"gated_linear_unit: `weights[{i}]` is a QTensor", w.values, w.scales)
        values, scales = guarded
        scales = scale_values(scales, accumulator_dtype(x.dtype))
        scales = jnp.broadcast_to(scales, values.shape[-1:]) if w.axis is None else jnp.squeeze(scales, -2)
        arrays.append((values, scales))
    (gate, gate_scale), (up, up_scale) = arrays
    return Operands(x, gate, up, None, gate_scale, up_scale)


def _packed(
    x: AnyArray, weights: AnyArray, activation: str | None, config: object, implementation: str | None
) -> jax.Array:
    if not all(isinstance(w, PackedQTensor) for w in weights) or config is not None:
        raise ShapeError(
            f"gated_linear_unit: `weights` is {weights}, `config` {config}; pass two PackedQTensors and no config, or "
            "no PackedQTensor."
        )
    return packed_product("gated_linear_unit", x, *weights, activation=activation, implementation=implementation)
