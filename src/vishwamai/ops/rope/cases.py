"""Cases of the rotary embedding: small ones for the contract suite, and the heads of real models."""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.rope.api import apply_rope
from vishwamai.ops.rope.scaling import Llama3Scaling, MRopeScaling, YarnScaling
from vishwamai.ops.rope.tables import RotaryCache


def rope(
    query: AnyArray, key: AnyArray = None, positions: AnyArray = None, cached: int | None = None, **options: Any
) -> PyTree:
    """`apply_rope` with its arrays by name, as a case needs them; `cached` is the length of a cache to read the tables
    from.
    """
    if cached is not None:
        names = {name: options.pop(name) for name in ("theta", "scaling", "rotary_dim") if name in options}
        options["cache"] = RotaryCache(query.shape[-1], cached, **names)
    return apply_rope(query if key is None else (query, key), positions, **options)


def _case(
    name: str,
    query: tuple[int, ...],
    dtype: str = "float32",
    *,
    key: tuple[int, ...] | None = None,
    positions: tuple[int, ...] | None = None,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    arrays = {"query": ArrayInit(query, dtype)}
    if key is not None:
        arrays["key"] = ArrayInit(key, dtype)
    if positions is not None:  # sorted small integers, some repeated
        arrays["positions"] = ArrayInit(positions, "int32", "segments")
    return Case(name, "rope", rope, arrays, options, frozenset(tags))


def _model(name: str, heads: int, kv_heads: int, head_dim: int, length: int = 4096, **options: Any) -> Case:
    shapes = ((1, heads, length, head_dim), (1, kv_heads, length, head_dim))
    return _case(name, shapes[0], "bfloat16", key=shapes[1], tags=("model",), **options)


CASES = (
    *(_case(f"query and key {dtype}", (2, 3, 37, 64), dtype, key=(2, 1, 37, 64)) for dtype in ("float32", "bfloat16")),
    _case("interleaved bfloat16", (1, 2, 21, 128), "bfloat16", interleaved=True),
    _case("partial, positions", (2, 2, 40, 80), key=(2, 2, 40, 80), positions=(2, 40), rotary_dim=32),
    _case(
        "bshd partial interleaved", (2, 19, 5, 128), key=(2, 19, 2, 128), layout="bshd", rotary_dim=64, interleaved=True
    ),
    _case("bshd bfloat16", (1, 33, 4, 128), "bfloat16", layout="bshd", scaling=YarnScaling(4.0, 16)),
    _case("cache", (2, 2, 9, 16), positions=(9,), cached=64, scaling=Llama3Scaling(original_max_positions=32)),
    _case("one position", (3, 4, 1, 64), "bfloat16", key=(3, 2, 1, 64), positions=(3, 1)),
    _case("float16", (1, 2, 5, 32), "float16"),
    _case("float64", (1, 2, 5, 32), "float64"),
    _case("no positions", (1, 2, 0, 32)),
    _case("bshd wide, interleaved", (2, 5, 3, 192), layout="bshd", interleaved=True),
    _case(
        "interleaved mrope",
        (2, 3, 11, 32),
        key=(2, 1, 11, 32),
        positions=(3, 2, 11),
        scaling=MRopeScaling((6, 5, 5), interleaved=True),
    ),
    _model("Llama 3 8B", 32, 8, 128, theta=500000.0, scaling=Llama3Scaling()),
    _model("GPT-J 6B", 16, 16, 256, 2048, rotary_dim=64, interleaved=True),
    _model("Gemma 3 12B", 16, 8, 256, theta=1e6),
    _case(
        "Qwen 3 8B bshd",
        (1, 4096, 32, 128),
        "bfloat16",
        key=(1, 4096, 8, 128),
        layout="bshd",
        theta=1e6,
        tags=("model",),
    ),
)

_SMALL = Case(
    "small",
    "rope",
    rope,
    {
        "query": ArrayInit((8, 4, 12, 8)),
        "key": ArrayInit((8, 2, 12, 8)),
        "positions": ArrayInit((8, 12), "int32", "segments"),
    },
)

FACTS = Facts(
    small=_SMALL,
    batched=("query", "key", "positions"),
    poison=Poison("interleaved bfloat16", "query", axis=2),
    declines={
        "triton": {
            "float64": "`x` is float64",
            "no positions": "an array is empty",
        },
        "pallas_tpu": {
            "float16": "`x` is float16",
            "float64": "`x` is float64",
            "no positions": "an array is empty",
        },
    },
)
