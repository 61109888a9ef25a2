"""Cases of attention from layers of real models, over the lengths that a laptop can time, and over long contexts, which
have the tag "long".
"""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import Case
from vishwamai.ops.attention.case_makers import attention_case


def _model(
    name: str,
    heads: object,
    length: object,
    dim: object = 128,
    *,
    dtype: str = "bfloat16",
    causal: bool = True,
    tags: tuple[str, ...] = (),
    **options: Any,
) -> Case:
    masked = {"causal": True} if causal else {}
    shape: dict[str, Any] = {"heads": heads, "length": length, "dim": dim, "dtype": dtype}
    return attention_case(name, **shape, **masked, **options, tags=("model", *tags))


MODELS = (
    _model("Llama 3 8B, 1024 tokens", (32, 8), 1024),
    _model("Llama 3 8B, 4096 tokens", (32, 8), 4096, tags=("long",)),
    _model("Llama 3 8B, decoding at 4096", (32, 8), (1, 4096), batch=4, causal=False),
    _model("Qwen 3 30B-A3B, 1024 tokens", (32, 4), 1024),
    _model("Gemma 2 9B, 1024 tokens, softcap", (16, 8), 1024, 256, window=(4095, 0), softcap=50.0, scale=256**-0.5),
    _model("Gemma 3 12B, 2048 tokens, window 1024", (16, 8), 2048, 256, window=(1023, 0)),
    _model("Mixtral 8x7B, 2 x 512 tokens", (32, 8), 512, batch=2),
    _model("DeepSeek-V3 MLA, 512 tokens", 128, 512, (192, 128)),
    *(
        _model(
            f"BERT base, 8 x 512 tokens, padding{note}",
            12,
            512,
            64,
            batch=8,
            mask=(8, 1, 1, 512),
            dtype=dtype,
            causal=False,
        )
        for note, dtype in (("", "bfloat16"), (", f32", "float32"))
    ),
)
