"""Cases of the causal convolution: small ones for the contract suite, and the layers of real models."""

from __future__ import annotations

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.ops.conv.api import causal_conv1d


def _case(
    name: str,
    shape: tuple[int, int, int],
    width: int = 4,
    dtype: str = "float32",
    *,
    bias: bool = False,
    state: bool = False,
    segments: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    batch, _, channels = shape
    arrays = {"x": ArrayInit(shape, dtype), "weight": ArrayInit((channels, width), dtype, scale=0.5)}
    if bias:
        arrays["bias"] = ArrayInit((channels,), dtype)
    if state:
        arrays["initial_state"] = ArrayInit((batch, width - 1, channels), dtype)
    if segments:
        arrays["segment_ids"] = ArrayInit(shape[:2], "int32", "segments")
    return Case(name, "causal_conv1d", causal_conv1d, arrays, options, frozenset(tags))


CASES = (
    *(_case(f"silu {dtype}", (3, 63, 100), 4, dtype, activation="silu") for dtype in ("float32", "bfloat16")),
    _case("plain", (2, 37, 24), 3),
    _case("bias and state", (2, 17, 40), 4, bias=True, state=True, return_state=True),
    _case("state bfloat16", (2, 9, 64), 4, "bfloat16", state=True, return_state=True, activation="silu"),
    _case("segments", (3, 50, 33), 4, bias=True, segments=True, activation="silu"),
    _case("segments and state", (3, 50, 33), 4, state=True, segments=True, return_state=True),
    _case("one token", (5, 1, 48), 4, bias=True, state=True, return_state=True, activation="silu"),
    _case("fewer tokens than the filter", (2, 2, 16), 7, state=True, segments=True, return_state=True),
    _case("filter of one", (2, 5, 8), 1, return_state=True),
    _case("float16", (2, 20, 24), 4, "float16", activation="gelu"),
    _case("float64", (2, 20, 24), 4, "float64", bias=True, state=True, activation="sigmoid"),
    _case("no tokens", (2, 0, 24), 4, state=True, return_state=True),
    # Queries, keys and values of one layer, and the inner channels of Mamba2 and of LFM2.
    _case("Qwen3-Next 80B", (1, 4096, 8192), 4, "bfloat16", tags=("model",), activation="silu"),
    _case("Mamba2 2.7B", (1, 4096, 5376), 4, "bfloat16", tags=("model",), bias=True, activation="silu"),
    _case("LFM2 1.2B", (1, 4096, 2048), 3, "bfloat16", tags=("model",)),
    _case(
        "Qwen3-Next 80B, 8 sequences",
        (8, 1, 8192),
        4,
        "bfloat16",
        tags=("model",),
        state=True,
        return_state=True,
        activation="silu",
    ),
)

FACTS = Facts(
    small=Case(
        "small",
        "causal_conv1d",
        causal_conv1d,
        {
            "x": ArrayInit((8, 6, 40)),
            "weight": ArrayInit((40, 4)),
            "bias": ArrayInit((40,)),
            "initial_state": ArrayInit((8, 3, 40)),
            "segment_ids": ArrayInit((8, 6), "int32", "segments"),
        },
        {"activation": "silu", "return_state": True},
    ),
    batched=("x", "initial_state", "segment_ids"),
    poison=Poison("silu float32", "x"),
)
