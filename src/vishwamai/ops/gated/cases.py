"""Cases of the gated linear unit: small ones for the contract suite, and the feed-forward layers of real models."""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison, qtensor_of_bytes
from vishwamai.core.types import AnyArray
from vishwamai.ops.gated.api import gated_linear_unit


def gated(
    x: AnyArray,
    gate: AnyArray = None,
    up: AnyArray = None,
    joint: object = None,
    activation: str | None = "silu",
    **how: Any,
) -> AnyArray:
    """`gated_linear_unit` with its weights as arrays of their own, as a case needs them."""
    return gated_linear_unit(x, (gate, up) if joint is None else joint, activation, **how)


def quantized_gated(
    x: AnyArray,
    gate: AnyArray,
    up: AnyArray,
    gate_scales: AnyArray,
    up_scales: AnyArray,
    *,
    format: str,
    activation: str | None = "silu",
    **how: Any,
) -> AnyArray:
    """`gated_linear_unit` of QTensors that are made of bytes, see `qtensor_of_bytes`.

    Args:
      gate, up: int8 `[features, hidden]`; their scales: float32 `[1, hidden]`.
    """
    weights = (qtensor_of_bytes(w, s, format, -2, None) for w, s in ((gate, gate_scales), (up, up_scales)))
    return gated_linear_unit(x, tuple(weights), activation, **how)


def quantized_case(
    name: str,
    rows: tuple[int, ...],
    features: int,
    hidden: int,
    dtype: str,
    format: str,
    *,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    # Of values spread evenly; x is so small that the sums stay near 1.
    deviation = 0.29 * (256 if format == "int8" else 16)
    arrays = {"x": ArrayInit((*rows, features), dtype, scale=max(features, 1) ** -0.5 / deviation)}
    arrays |= {name: ArrayInit((features, hidden), "int8", "integers") for name in ("gate", "up")}
    arrays |= {f"{name}_scales": ArrayInit((1, hidden), "float32", "positive") for name in ("gate", "up")}
    return Case(name, "gated_linear_unit", quantized_gated, arrays, options | {"format": format}, frozenset(tags))


def _case(
    name: str,
    rows: tuple[int, ...],
    features: int,
    hidden: int,
    dtype: str = "float32",
    *,
    joint: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    # Weights of variance 1/K keep the sums near 1, where the activations are neither linear nor saturated.
    scale = max(features, 1) ** -0.5
    arrays = {"x": ArrayInit((*rows, features), dtype)}
    if joint:
        arrays["joint"] = ArrayInit((2, features, hidden), dtype, scale=scale)
    else:
        arrays |= {name: ArrayInit((features, hidden), dtype, scale=scale) for name in ("gate", "up")}
    return Case(name, "gated_linear_unit", gated, arrays, options, frozenset(tags))


_QUANTIZED = (
    quantized_case("int8 weights", (3, 21), 300, 100, "bfloat16", "int8"),
    quantized_case("int8 weights, several tiles", (150,), 260, 150, "float32", "int8", config=128, activation="gelu"),
    quantized_case("int4 weights", (5,), 192, 63, "bfloat16", "int4", activation="relu2"),
    quantized_case("fp8 weights", (24,), 80, 100, "bfloat16", "fp8_e4m3", activation="gelu_tanh"),
)

CASES = (
    *(_case(f"63x100x300 {dtype}", (63,), 300, 100, dtype) for dtype in ("float32", "bfloat16")),
    _case("one array bfloat16", (2, 9), 80, 192, "bfloat16", joint=True, activation="gelu_tanh"),
    _case("several tiles", (150,), 260, 150, config=128, joint=True, activation="gelu"),
    _case("bilinear", (1,), 63, 63, activation=None),
    _case("relu2 bfloat16", (40,), 128, 63, "bfloat16", activation="relu2"),
    _case("high", (16,), 192, 40, precision="high"),
    _case("float16", (5,), 80, 63, "float16"),
    _case("float64", (5,), 80, 7, "float64", activation="sigmoid"),
    _case("no rows", (0,), 16, 7),
    *_QUANTIZED,
    # Feed-forward layers of 4096 tokens.
    _case("Llama 3 8B", (4096,), 4096, 14336, "bfloat16", tags=("model",)),
    _case("Gemma 3 12B", (4096,), 3840, 15360, "bfloat16", activation="gelu_tanh", tags=("model",)),
    _case("Qwen 3 30B-A3B expert", (1024,), 2048, 768, "bfloat16", tags=("model",)),
    quantized_case("Llama 3 8B int8", (2048,), 4096, 14336, "bfloat16", "int8", tags=("model",)),
    _case("Llama 3 8B, 1 token", (1,), 4096, 14336, "bfloat16", tags=("model",)),
)

_SMALL = Case(
    "small",
    "gated_linear_unit",
    gated,
    {
        "x": ArrayInit((8, 9, 20)),
        "gate": ArrayInit((20, 24), scale=0.2),
        "up": ArrayInit((20, 24), scale=0.2),
    },
)

FACTS = Facts(
    small=_SMALL,
    batched=("x",),
    poison=Poison("63x100x300 float32", "x"),
    declines={
        "pallas_tpu": {
            "float16": "`x` is float16",
            "float64": "`x` is float64",
            "no rows": "an array is empty",
        },
        "triton": {
            "float64": "`x` is float64",
            "no rows": "an array is empty",
            **dict.fromkeys((case.name for case in _QUANTIZED), "`weights` are QTensors"),
        },
        "native_cpu": dict.fromkeys((case.name for case in _QUANTIZED), "`weights` are QTensors"),
    },
    # Three bfloat16 products for one of float32 keep 16 bits; the reference on a CPU keeps 24.
    coarser={"high": dict.fromkeys(("native_cpu", "triton"), 2.0**-16)},
)
