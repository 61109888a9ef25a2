"""Cases of attention: small ones for the contract suite, every feature alone and with others, and the layers of real
models.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.ops.attention.api import block_sparse_attention, flash_attention
from vishwamai.ops.attention.varlen import flash_attention_varlen


def _case(
    name: str,
    *,
    batch: int = 1,
    heads: int | tuple[int, int] = 2,
    length: int | tuple[int, int] = 100,
    dim: int | tuple[int, int] = 64,
    dtype: str = "float32",
    bias: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None,
    segments: tuple[Any, Any] | None = None,
    sinks: bool = False,
    dropout: float = 0.0,
    tags: tuple[str, ...] = ("contract",),
    **options: Any,
) -> Case:
    """One call; pairs are (query heads, kv heads), (q_len, kv_len), (d_qk, d_v); `bias` and `mask` are shapes,
    `segments` lengths of segments.
    """
    (hq, hkv), (tq, tk), (d, dv) = (x if isinstance(x, tuple) else (x, x) for x in (heads, length, dim))

    def array(*shape: int) -> ArrayInit:
        if options.get("layout") == "bshd":
            shape = (shape[0], shape[2], shape[1], shape[3])
        return ArrayInit(shape, dtype)

    arrays = {"query": array(batch, hq, tq, d), "key": array(batch, hkv, tk, d), "value": array(batch, hkv, tk, dv)}
    if bias is not None:
        arrays["bias"] = ArrayInit(bias, dtype)
    if mask is not None:
        arrays["mask"] = ArrayInit(mask, "bool", "mask")
    if sinks:
        arrays["sinks"] = ArrayInit((hq,), dtype)
    if dropout:
        arrays["dropout_key"] = ArrayInit((2,), "uint32", "key")
        options["dropout_rate"] = dropout
    if segments is not None:
        options["segment_ids"] = tuple(map(_ids, segments))
    call = block_sparse_attention if "block_mask" in options else flash_attention
    return Case(name, "attention", call, arrays, options, frozenset(tags))


def _varlen(
    name: str,
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    *,
    heads: tuple[int, int] = (2, 2),
    dim: int = 32,
    spare: int = 0,
    dtype: str = "float32",
    sinks: bool = False,
    **options: Any,
) -> Case:
    """One call of packed sequences of these lengths, with `spare` rows and keys after the last."""
    rows, keys = sum(q_lens) + spare, sum(kv_lens) + spare
    shapes = {"query": (rows, heads[0], dim), "key": (keys, heads[1], dim), "value": (keys, heads[1], dim)}
    arrays = {n: ArrayInit(shape, dtype) for n, shape in shapes.items()}
    if sinks:
        arrays["sinks"] = ArrayInit((heads[0],), dtype)
    starts = (np.cumsum([0, *lengths]).astype(np.int32) for lengths in (q_lens, kv_lens))
    options |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), starts, strict=True))
    options |= {"max_seqlen_q": max(q_lens), "max_seqlen_k": max(kv_lens)}
    return Case(name, "attention", flash_attention_varlen, arrays, options)


def _ids(lengths: Any) -> np.ndarray:
    """Segment ids of consecutive segments: `[(30, 70)] -> [[0] * 30 + [1] * 70]`, one row a batch element; negative
    lengths count down from 99.
    """
    rows = []
    for row in lengths:
        ids = [99 - i if n < 0 else i for i, n in enumerate(row)]
        rows.append(np.repeat(ids, np.abs(row)))
    return np.array(rows, np.int32)


def _blocks(*shape: int) -> np.ndarray:
    """A block mask of about half of the blocks; one query block of the last head sees none, and one key block of it is
    seen by none.
    """
    mask = np.random.default_rng(3).random(shape) < 0.5
    last = mask.reshape(-1, *shape[-2:])[-1]
    last[1], last[:, 1] = False, False
    return mask


def _within_reach(i: Any, j: Any) -> Any:
    """Near the diagonal, and every seventh key: some positions of most blocks."""
    return (abs(i - j) < 20) | (j % 7 == 0) & (i < 90)


_OFFSETS = np.array([-10, 70], np.int32)
_POSITIONS = np.random.default_rng(5).permutation(300)[None, :80].astype(np.int32)
_LENGTHS, _STARTS = np.array([79, 37], np.int32), np.array([0, 20], np.int32)
_PLACED = ("q_offset by batch", "positions of rows bf16", "places with everything", "varlen of other keys")
_PLACED = (*_PLACED, "varlen window top-left bf16", "alibi of rows with positions", "alibi varlen bf16")
_SLOPES = np.array([0.5, 0.25, 0.0625, 0.01], np.float32)
_SELF = ([(30, 45, 25)], [(30, 45, 25)])

CASES = (
    # dtypes, lengths, head dimensions
    _case("full f32", batch=2),
    _case("full bf16", batch=2, dtype="bfloat16"),
    _case("full f16", length=80, dtype="float16"),
    _case("full f64", length=63, dim=16, dtype="float64", return_lse=True),
    _case("one by one", length=1, dim=1),
    _case("length 63 head dim 1", length=63, dim=1),
    _case("length 300 head dim 63", heads=1, length=300, dim=63),
    _case("length 192 head dim 80 bf16", length=192, dim=80, dtype="bfloat16"),
    _case("head dim 192 bf16", heads=1, length=(80, 63), dim=192, dtype="bfloat16"),
    _case("head dim 256", heads=1, length=63, dim=256),
    _case("head dim 2000", heads=1, length=(16, 24), dim=2000),
    _case("value dim 128 of 192 bf16", length=80, dim=(192, 128), dtype="bfloat16"),
    _case("value dim 100 of 64", length=(63, 100), dim=(64, 100)),
    _case("bshd", batch=2, heads=(4, 2), length=(63, 80), dim=32, layout="bshd"),
    _case("no keys", length=(5, 0), dim=16, return_lse=True, sinks=True),
    # causal, window
    _case("causal f32", length=192, dim=128, causal=True),
    _case("causal bf16", batch=2, length=192, dim=128, dtype="bfloat16", causal=True),
    _case("causal top-left 63x100", length=(63, 100), causal=True),
    _case("causal bottom-right 80x192", length=(80, 192), causal=True, causal_align="bottom_right"),
    _case(
        "causal bottom-right, rows without keys",
        length=(100, 63),
        causal=True,
        causal_align="bottom_right",
        return_lse=True,
    ),
    _case("decode", batch=2, heads=(4, 1), length=(1, 300), causal=True, causal_align="bottom_right", dtype="bfloat16"),
    _case("window", length=192, window=(20, 5)),
    _case("window left of causal bf16", length=300, heads=1, window=(40, None), causal=True, dtype="bfloat16"),
    _case("window right bottom-right", length=(63, 192), dim=100, window=(None, 7), causal_align="bottom_right"),
    _case("window beyond the keys", length=(192, 63), window=(9, 0), return_lse=True),
    # ALiBi
    _case(
        "alibi causal",
        batch=2,
        heads=(4, 2),
        length=(63, 80),
        causal=True,
        causal_align="bottom_right",
        alibi_slopes=_SLOPES,
        return_lse=True,
    ),
    _case(
        "alibi two-sided",
        batch=2,
        heads=(4, 2),
        length=(80, 63),
        bias=(1, 4, 80, 63),
        softcap=2.0,
        alibi_slopes=np.stack([_SLOPES, _SLOPES[::-1]]),
    ),
    _case(
        "alibi of rows with positions",
        heads=4,
        length=(80, 300),
        causal=True,
        window=(60, 0),
        q_offset=_POSITIONS,
        alibi_slopes=_SLOPES,
    ),
    _case(
        "alibi window bf16",
        heads=(4, 2),
        length=(63, 150),
        dtype="bfloat16",
        window=(60, 3),
        q_offset=40,
        segments=([(40, 23)], [(70, 80)]),
        sinks=True,
        alibi_slopes=_SLOPES,
        return_lse=True,
    ),
    _case(
        "alibi blocks",
        heads=4,
        length=(150, 200),
        dim=32,
        mask=(1, 4, 1, 200),
        dropout=0.1,
        causal=True,
        block_mask=_blocks(3, 5),
        block_size=(64, 40),
        alibi_slopes=_SLOPES,
    ),
    _varlen("alibi varlen bf16", (30, 40), (50, 60), heads=(4, 2), dtype="bfloat16", causal=True, alibi_slopes=_SLOPES),
    # grouped heads
    _case("GQA causal", batch=2, heads=(4, 2), length=80, causal=True),
    _case("GQA 6/2 bf16", heads=(6, 2), length=(63, 100), dtype="bfloat16"),
    # segments
    _case("segments", segments=_SELF),
    _case("segments causal GQA bf16", heads=(2, 1), segments=_SELF, causal=True, dtype="bfloat16"),
    _case(
        "segments by batch, some alone",
        batch=2,
        length=(80, 100),
        segments=([(40, 40), (50, -30)], [(60, 40), (100,)]),
        return_lse=True,
    ),
    _case("segments window", length=192, heads=1, segments=([(100, 92)], [(100, 92)]), window=(30, 0)),
    # softcap, sinks, dropout
    _case("softcap", softcap=3.0, scale=0.5),
    _case("one bias softcap", softcap=3.0, scale=0.5, bias=(1,)),
    _case("bias after softcap", heads=(4, 2), length=80, bias=(1, 4, 80, 80), softcap=3.0, bias_after_softcap=True),
    _case(
        "bias by key after softcap bf16",
        batch=2,
        length=80,
        bias=(2, 1, 1, 80),
        softcap=2.0,
        causal=True,
        sinks=True,
        dtype="bfloat16",
        bias_after_softcap=True,
    ),
    _case("softcap causal bf16", softcap=5.0, causal=True, dtype="bfloat16"),
    _case("sinks", sinks=True, return_lse=True),
    _case("sinks window bf16", sinks=True, window=(15, 0), causal=True, dtype="bfloat16"),
    _case("sinks and rows without keys", length=(63, 30), sinks=True, window=(5, 0), return_lse=True),
    _case("dropout", batch=2, dropout=0.3),
    _case("dropout causal GQA bf16", heads=(4, 2), length=63, dropout=0.1, causal=True, dtype="bfloat16"),
    # bias
    _case("bias full", batch=2, length=(63, 80), bias=(2, 2, 63, 80)),
    _case("bias by head bf16", batch=2, length=80, bias=(1, 2, 80, 80), causal=True, dtype="bfloat16"),
    _case("bias by batch", batch=2, length=(63, 80), bias=(2, 1, 63, 80)),
    _case("bias by key", batch=2, length=80, bias=(2, 1, 1, 80), softcap=4.0),
    _case("bias by query and head", heads=(4, 2), length=63, bias=(4, 63, 1), sinks=True),
    _case("bias of two axes", batch=2, length=(63, 80), bias=(63, 80), dropout=0.2),
    # masks
    _case("mask full", batch=2, length=(63, 80), mask=(2, 2, 63, 80)),
    _case("mask by key bf16", batch=2, length=80, mask=(2, 1, 1, 80), dtype="bfloat16"),
    _case("mask by query", batch=2, length=63, mask=(2, 1, 63, 1), return_lse=True),
    _case("mask by head", heads=(4, 2), length=80, mask=(1, 4, 1, 80), causal=True),
    _case("mask of two axes", batch=2, length=(63, 80), mask=(63, 80), bias=(1, 2, 1, 80)),
    # blocks
    _case(
        "blocks causal GQA bf16",
        heads=(4, 2),
        length=(300, 260),
        dtype="bfloat16",
        causal=True,
        block_mask=_blocks(3, 3),
        block_size=128,
        return_lse=True,
    ),
    _case(
        "blocks by head",
        heads=(4, 2),
        length=(150, 200),
        block_mask=_blocks(4, 3, 5),
        block_size=(64, 40),
        bias=(1, 4, 1, 200),
        sinks=True,
        softcap=4.0,
    ),
    _case(
        "blocks of a function",
        batch=2,
        heads=(2, 1),
        length=(130, 150),
        block_mask=_within_reach,
        block_size=32,
        segments=([(80, 50), (130,)], [(60, 90), (150,)]),
        dropout=0.2,
    ),
    # places of queries, lengths of keys
    _case("q_offset", length=(40, 100), causal=True, q_offset=33),
    _case(
        "q_offset by batch", batch=2, heads=(4, 2), length=(63, 100), causal=True, q_offset=_OFFSETS, return_lse=True
    ),
    _case("positions of rows bf16", length=(80, 300), window=(50, 9), q_offset=_POSITIONS, dtype="bfloat16"),
    _case("lengths and left padding", batch=2, length=80, kv_lens=_LENGTHS, kv_starts=_STARTS, causal=True),
    _case(
        "places with everything",
        batch=2,
        heads=(4, 2),
        length=(63, 150),
        dim=(32, 64),
        bias=(2, 1, 63, 150),
        mask=(2, 1, 1, 150),
        segments=([(40, 23), (63,)], [(80, 70), (150,)]),
        sinks=True,
        dropout=0.1,
        causal=True,
        window=(60, None),
        softcap=8.0,
        q_offset=_OFFSETS,
        kv_lens=_LENGTHS,
        return_lse=True,
    ),
    # packed sequences
    _varlen("varlen", (30, 1, 0, 70), (30, 1, 0, 70), spare=3, causal=True, return_lse=True),
    _varlen("varlen of other keys", (20, 40, 3), (70, 30, 0), heads=(4, 2), causal=True, sinks=True, return_lse=True),
    _varlen(
        "varlen window top-left bf16", (50, 40), (90, 110), dtype="bfloat16", window=(9, 5), causal_align="top_left"
    ),
    # everything
    *(
        _case(
            f"everything {dtype}",
            batch=2,
            heads=(4, 2),
            length=(80, 100),
            dim=(64, 32),
            dtype=dtype,
            bias=(1, 4, 80, 100),
            mask=(2, 1, 1, 100),
            segments=([(50, 30), (80,)], [(60, 40), (100,)]),
            sinks=True,
            dropout=0.1,
            causal=True,
            causal_align="bottom_right",
            window=(60, 10),
            softcap=8.0,
            scale=0.2,
            return_lse=True,
        )
        for dtype in ("float32", "bfloat16")
    ),
    # Layers of real models, over the lengths that a laptop can time, and over whole contexts ("long").
    _case(
        "Llama 3 8B, 1024 tokens", heads=(32, 8), length=1024, dim=128, dtype="bfloat16", causal=True, tags=("model",)
    ),
    _case(
        "Llama 3 8B, 4096 tokens",
        heads=(32, 8),
        length=4096,
        dim=128,
        dtype="bfloat16",
        causal=True,
        tags=("model", "long"),
    ),
    _case(
        "Llama 3 8B, decoding at 4096",
        batch=4,
        heads=(32, 8),
        length=(1, 4096),
        dim=128,
        dtype="bfloat16",
        tags=("model",),
    ),
    _case(
        "Qwen 3 30B-A3B, 1024 tokens",
        heads=(32, 4),
        length=1024,
        dim=128,
        dtype="bfloat16",
        causal=True,
        tags=("model",),
    ),
    _case(
        "Gemma 2 9B, 1024 tokens, softcap",
        heads=(16, 8),
        length=1024,
        dim=256,
        dtype="bfloat16",
        causal=True,
        window=(4095, 0),
        softcap=50.0,
        scale=256**-0.5,
        tags=("model",),
    ),
    _case(
        "Gemma 3 12B, 2048 tokens, window 1024",
        heads=(16, 8),
        length=2048,
        dim=256,
        dtype="bfloat16",
        causal=True,
        window=(1023, 0),
        tags=("model",),
    ),
    _case(
        "Mixtral 8x7B, 2 x 512 tokens",
        batch=2,
        heads=(32, 8),
        length=512,
        dim=128,
        dtype="bfloat16",
        causal=True,
        tags=("model",),
    ),
    _case(
        "DeepSeek-V3 MLA, 512 tokens",
        heads=128,
        length=512,
        dim=(192, 128),
        dtype="bfloat16",
        causal=True,
        tags=("model",),
    ),
    _case(
        "BERT base, 8 x 512 tokens, padding",
        batch=8,
        heads=12,
        length=512,
        dim=64,
        dtype="bfloat16",
        mask=(8, 1, 1, 512),
        tags=("model",),
    ),
    _case(
        "BERT base, 8 x 512 tokens, padding, f32",
        batch=8,
        heads=12,
        length=512,
        dim=64,
        mask=(8, 1, 1, 512),
        tags=("model",),
    ),
)

_SMALL = Case(
    "small",
    "attention",
    flash_attention,
    {
        "query": ArrayInit((8, 4, 12, 8)),
        "key": ArrayInit((8, 2, 20, 8)),
        "value": ArrayInit((8, 2, 20, 16)),
        "bias": ArrayInit((1, 4, 12, 20)),
        "mask": ArrayInit((8, 1, 1, 20), "bool", "mask"),
        "sinks": ArrayInit((4,)),
    },
    {"causal": True, "causal_align": "bottom_right", "window": (9, 2), "softcap": 4.0, "return_lse": True},
)

FACTS = Facts(
    small=_SMALL,
    batched=("query", "key", "value", "mask"),
    poison=Poison("value dim 100 of 64", "query", axis=2),
    declines={
        "native_cpu": {
            "no keys": "an axis is empty",
            **dict.fromkeys(("alibi two-sided", "alibi window bf16"), "`alibi_slopes` without `causal`"),
            **dict.fromkeys(_PLACED, "positions of their own"),
            **dict.fromkeys(("bias after softcap", "bias by key after softcap bf16"), "`bias_after_softcap`"),
        },
        "pallas_tpu": {
            "full f16": "float16",
            "full f64": "float64",
            "no keys": "empty",
        },
        "triton": {
            "full f64": "`query` is float64",
            "head dim 2000": "heads of 2000",
            "no keys": "an axis is empty",
            **dict.fromkeys(_PLACED, "positions of their own"),
        },
    },
    # The gradient of the one bias is a sum of 20,000 terms that cancel: its rounding is that of the terms.
    coarser={"one bias softcap": dict.fromkeys(("xla_chunked", "native_cpu", "pallas_tpu", "triton"), 2.0**-18)},
)
