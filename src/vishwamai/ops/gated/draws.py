"""Random calls of gated linear units: shapes at the edges of tiles, mixed dtypes, options in any combination."""

from __future__ import annotations

from vishwamai.core.activations import ACTIVATIONS
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.draws import Sizes
from vishwamai.ops.gated.cases import gated, quantized_case


def draw(d: Sizes) -> Case:
    """A case that calls the op in any legal way."""
    if d.flag(4):
        format = d.choose(("int8", "int4", "fp8_e4m3", "fp8_e5m2"))
        how = {"activation": d.choose((None, *ACTIVATIONS))}
        return quantized_case("", (d.size(),), d.size(), d.size(), d.choose(("float32", "bfloat16")), format, **how)
    dtype, features, hidden = d.dtype(), d.size(), d.size()
    arrays = {"x": ArrayInit((*(d.size(17) for _ in range(d.choose((0, 0, 1)))), d.size(), features), dtype)}
    scale = features**-0.5
    if d.flag():
        arrays["joint"] = ArrayInit((2, features, hidden), dtype, scale=scale)
    else:
        arrays |= {name: ArrayInit((features, hidden), dtype, scale=scale) for name in ("gate", "up")}
    return Case(
        "", "gated_linear_unit", gated, arrays, {"activation": d.choose((None, *ACTIVATIONS))} | d.precision(dtype)
    )
