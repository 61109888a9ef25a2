"""The public gated linear unit: `gated_linear_unit`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import jax

from vishwamai.core.config import current_config, narrowed
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import array_spec, as_array
from vishwamai.ops.gated.cpu import NATIVE
from vishwamai.ops.gated.gpu import TRITON
from vishwamai.ops.gated.reference import XLA
from vishwamai.ops.gated.spec import GatedSpec, Operands, check, gated_axes
from vishwamai.ops.gated.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float

GATED: Op[GatedSpec] = Op("gated", (PALLAS_TPU, TRITON, NATIVE, XLA), gated_axes, shareable=Operands._fields)


def gated_linear_unit(
    x: Float[Array, "*rows features"],
    weights: Any,
    activation: str | None = "silu",
    *,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*rows hidden"]:
    """Gated linear unit: `activation(x @ gate) * (x @ up)`, both products in one pass over x. Shazeer, "GLU Variants Improve Transformer" (2020).

    SwiGLU is "silu", GeGLU "gelu" or "gelu_tanh", ReGLU "relu", the original GLU "sigmoid", the bilinear unit None. Sums are float32 (float64 for float64),
    and the activation and the product of both are taken of them before the result is rounded.

    Args:
      x: `[..., features]`, bfloat16, float16, float32 or float64.
      weights: (gate, up), `[features, hidden]` each, or one array `[2, features, hidden]`; of the dtype of `x`.
      activation: "relu", "relu2", "silu", "gelu" (exact), "gelu_tanh", "sigmoid", "tanh", or None.
      precision: of float32 products: "highest" (the default: float32 accuracy) or "high" (about 16 bits); None takes the ambient one.
      config: tiles (a `GatedConfig`), a block size, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., hidden]` in the dtype of `x`.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> x, gate, up = jnp.ones((3, 8)), jnp.full((8, 16), 0.5), jnp.full((8, 16), 0.25)
    >>> print(gated_linear_unit(x, (gate, up), "relu")[0, :3].tolist())
    [8.000, 8.000, 8.000]
    """
    x = as_array("gated_linear_unit", "x", x)
    gate: Any
    up: Any
    both: Any
    if isinstance(weights, (tuple, list)):
        if len(weights) != 2:
            raise ShapeError(
                f"gated_linear_unit: `weights` is a sequence of {len(weights)}; pass (gate, up), or one array of shape (2, features, hidden)."
            )
        gate, up = (as_array("gated_linear_unit", "weights", w) for w in weights)
        both = None
        check(array_spec(x), array_spec(gate), array_spec(up), activation)
    else:
        gate, up, both = None, None, as_array("gated_linear_unit", "weights", weights)
        check(array_spec(x), array_spec(both), None, activation)
    out_dtype = x.dtype
    (x,) = narrowed(x)
    gate, up, both = (None if w is None else narrowed(w)[0] for w in (gate, up, both))
    products = resolve_precision(precision, current_config().precision, x.dtype)

    def run(x: Any, gate: Any, up: Any, both: Any) -> Any:
        rows = x.reshape(1, math.prod(x.shape[:-1]), x.shape[-1])
        operands = Operands(rows, *(None if w is None else w[None] for w in (gate, up, both)))
        spec = GatedSpec(Operands(*(None if a is None else array_spec(a) for a in operands)), activation, products)
        h = GATED(spec, operands, config=config, implementation=implementation).h
        return h.reshape(*x.shape[:-1], spec.n).astype(out_dtype)

    leading = tuple(f"r{i}" for i in range(x.ndim - 1))
    one = ("k", "n")
    dims = (
        (*leading, "k"),
        None if gate is None else one,
        None if up is None else one,
        None if both is None else (None, *one),
    )
    return follow_explicit_axes(run, Axes(dims, (*leading, "n"), frozenset((*leading, "n"))), x, gate, up, both)
