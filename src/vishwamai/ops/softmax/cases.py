"""Cases of the softmaxes: small ones for the contract suite, and the rows of real models."""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.ops.softmax.api import log_softmax, softmax


def _case(
    name: str,
    call: Any,
    shape: tuple[int, ...],
    dtype: str,
    tags: tuple[str, ...] = ("contract",),
    **options: Any,
) -> Case:
    # Logits of standard deviation 3: neither uniform nor one-hot.
    return Case(name, "softmax", call, {"x": ArrayInit(shape, dtype, scale=3.0)}, options, frozenset(tags))


CASES = (
    *(
        _case(f"{call.__name__} (63, 100) {dtype}", call, (63, 100), dtype)
        for call in (softmax, log_softmax)
        for dtype in ("float32", "bfloat16")
    ),
    # Longer than the registers of a GPU's program hold.
    _case("softmax rows of 20000", softmax, (3, 20000), "bfloat16"),
    _case("log_softmax rows of 20000", log_softmax, (3, 20000), "float32"),
    _case("softmax middle axis", softmax, (3, 40, 5), "float32", axis=1),
    _case("log_softmax one row 2000", log_softmax, (2000,), "bfloat16"),
    _case("softmax float16", softmax, (5, 192), "float16"),
    _case("log_softmax float64", log_softmax, (5, 80), "float64"),
    _case("softmax empty", softmax, (0, 64), "float32"),
    # 128 experts of Qwen 3 30B-A3B for 4096 tokens, logits of BERT's vocabulary, rows of 8192.
    _case("Qwen 3 30B-A3B router", softmax, (4096, 128), "float32", tags=("model",)),
    _case("BERT base logits", log_softmax, (4096, 30522), "bfloat16", tags=("model",)),
    _case("8192 x 8192", softmax, (8192, 8192), "bfloat16", tags=("model", "long")),
)

_SMALL = Case("small", "softmax", softmax, {"x": ArrayInit((8, 6, 40))})

FACTS = Facts(
    small=_SMALL,
    batched=("x",),
    poison=Poison("softmax (63, 100) float32", "x"),
    declines={
        "triton": {
            "softmax middle axis": "`axis` is not the last",
            "log_softmax float64": "`x` is float64",
            "softmax empty": "the array is empty",
        },
        "pallas_tpu": {
            "softmax middle axis": "`axis` is not the last",
            "softmax float16": "`x` is float16",
            "log_softmax float64": "`x` is float64",
            "softmax empty": "the array is empty",
        },
    },
)
