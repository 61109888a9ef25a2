"""Cases of attention: small ones for the contract suite, every feature alone and with others, and those of
`model_cases`.
"""

from __future__ import annotations

import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.api import flash_attention
from vishwamai.ops.attention.case_makers import attention_case, varlen_case
from vishwamai.ops.attention.model_cases import MODELS


def _blocks(*shape: int) -> np.ndarray:
    """A block mask of about half of the blocks; one query block of the last head sees none, and one key block of it is
    seen by none.
    """
    mask = np.random.default_rng(3).random(shape) < 0.5
    last = mask.reshape(-1, *shape[-2:])[-1]
    last[1], last[:, 1] = False, False
    return mask


def _within_reach(i: AnyArray, j: np.ndarray) -> AnyArray:
    """Near the diagonal, and every seventh key: some positions of most blocks."""
    return (abs(i - j) < 20) | (j % 7 == 0) & (i < 90)


_OFFSETS = np.array([-10, 70], np.int32)
_POSITIONS = np.random.default_rng(5).permutation(300)[None, :80].astype(np.int32)
_SCATTERED = np.random.default_rng(6).permutation(300)[None, :] - 50
_LENGTHS, _STARTS = np.array([79, 37], np.int32), np.array([0, 20], np.int32)
_SLOPES = np.array([0.5, 0.25, 0.0625, 0.01], np.float32)
_SELF = ([(30, 45, 25)], [(30, 45, 25)])


CASES = (
    # dtypes, lengths, head dimensions
    attention_case("full f32", batch=2),
    attention_case("full bf16", batch=2, dtype="bfloat16"),
    attention_case("full f16", length=80, dtype="float16"),
    attention_case("full f64", length=63, dim=16, dtype="float64", return_lse=True),
    attention_case("one by one", length=1, dim=1),
    attention_case("length 63 head dim 1", length=63, dim=1),
    attention_case("length 300 head dim 63", heads=1, length=300, dim=63),
    attention_case("length 192 head dim 80 bf16", length=192, dim=80, dtype="bfloat16"),
    attention_case("head dim 192 bf16", heads=1, length=(80, 63), dim=192, dtype="bfloat16"),
    attention_case("head dim 256", heads=1, length=63, dim=256),
    attention_case("head dim 2000", heads=1, length=(16, 24), dim=2000),
    attention_case("value dim 128 of 192 bf16", length=80, dim=(192, 128), dtype="bfloat16"),
    attention_case("value dim 100 of 64", length=(63, 100), dim=(64, 100)),
    attention_case("bshd", batch=2, heads=(4, 2), length=(63, 80), dim=32, layout="bshd"),
    attention_case("no keys", length=(5, 0), dim=16, return_lse=True, sinks=True),
    # causal, window
    attention_case("causal f32", length=192, dim=128, causal=True),
    attention_case("causal bf16", batch=2, length=192, dim=128, dtype="bfloat16", causal=True),
    attention_case("causal top-left 63x100", length=(63, 100), causal=True),
    attention_case("causal bottom-right 80x192", length=(80, 192), causal=True, causal_align="bottom_right"),
    attention_case(
        "causal bottom-right, rows without keys",
        length=(100, 63),
        causal=True,
        causal_align="bottom_right",
        return_lse=True,
    ),
    attention_case(
        "decode", batch=2, heads=(4, 1), length=(1, 300), causal=True, causal_align="bottom_right", dtype="bfloat16"
    ),
    attention_case("window", length=192, window=(20, 5)),
    attention_case("window left of causal bf16", length=300, heads=1, window=(40, None), causal=True, dtype="bfloat16"),
    attention_case(
        "window right bottom-right", length=(63, 192), dim=100, window=(None, 7), causal_align="bottom_right"
    ),
    attention_case("window beyond the keys", length=(192, 63), window=(9, 0), return_lse=True),
    # ALiBi
    attention_case(
        "alibi causal",
        batch=2,
        heads=(4, 2),
        length=(63, 80),
        causal=True,
        causal_align="bottom_right",
        alibi_slopes=_SLOPES,
        return_lse=True,
    ),
    attention_case(
        "alibi two-sided",
        batch=2,
        heads=(4, 2),
        length=(80, 63),
        bias=(1, 4, 80, 63),
        softcap=2.0,
        alibi_slopes=np.stack([_SLOPES, _SLOPES[::-1]]),
    ),
    attention_case(
        "alibi of rows with positions",
        heads=4,
        length=(80, 300),
        causal=True,
        window=(60, 0),
        q_offset=_POSITIONS,
        alibi_slopes=_SLOPES,
    ),
    attention_case(
        "alibi decode by batch",
        batch=2,
        heads=(4, 2),
        length=(3, 150),
        causal=True,
        q_offset=_OFFSETS,
        bias=(2, 1, 1, 150),
        softcap=2.0,
        bias_after_softcap=True,
        alibi_slopes=_SLOPES,
        return_lse=True,
    ),
    attention_case(
        "alibi f64 of rows with positions",
        heads=(2, 1),
        length=(63, 100),
        dim=16,
        dtype="float64",
        window=(30, 10),
        q_offset=_SCATTERED[:, :63].astype(np.int32),
        alibi_slopes=_SLOPES[:2],
        segments=([(30, 33)], [(60, 40)]),
    ),
    attention_case(
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
    attention_case(
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
    varlen_case(
        "alibi varlen bf16", (30, 40), (50, 60), heads=(4, 2), dtype="bfloat16", causal=True, alibi_slopes=_SLOPES
    ),
    # grouped heads
    attention_case("GQA causal", batch=2, heads=(4, 2), length=80, causal=True),
    attention_case("GQA 6/2 bf16", heads=(6, 2), length=(63, 100), dtype="bfloat16"),
    # segments
    attention_case("segments", segments=_SELF),
    attention_case("segments causal GQA bf16", heads=(2, 1), segments=_SELF, causal=True, dtype="bfloat16"),
    attention_case(
        "segments by batch, some alone",
        batch=2,
        length=(80, 100),
        segments=([(40, 40), (50, -30)], [(60, 40), (100,)]),
        return_lse=True,
    ),
    attention_case("segments window", length=192, heads=1, segments=([(100, 92)], [(100, 92)]), window=(30, 0)),
    # softcap, sinks, dropout
    attention_case("softcap", softcap=3.0, scale=0.5),
    attention_case("one bias softcap", softcap=3.0, scale=0.5, bias=(1,)),
    attention_case(
        "bias after softcap", heads=(4, 2), length=80, bias=(1, 4, 80, 80), softcap=3.0, bias_after_softcap=True
    ),
    attention_case(
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
    attention_case("softcap causal bf16", softcap=5.0, causal=True, dtype="bfloat16"),
    attention_case("sinks", sinks=True, return_lse=True),
    attention_case("sinks window bf16", sinks=True, window=(15, 0), causal=True, dtype="bfloat16"),
    attention_case("sinks and rows without keys", length=(63, 30), sinks=True, window=(5, 0), return_lse=True),
    attention_case("dropout", batch=2, dropout=0.3),
    attention_case("dropout causal GQA bf16", heads=(4, 2), length=63, dropout=0.1, causal=True, dtype="bfloat16"),
    # bias
    attention_case("bias full", batch=2, length=(63, 80), bias=(2, 2, 63, 80)),
    attention_case("bias by head bf16", batch=2, length=80, bias=(1, 2, 80, 80), causal=True, dtype="bfloat16"),
    attention_case("bias by batch", batch=2, length=(63, 80), bias=(2, 1, 63, 80)),
    attention_case("bias by key", batch=2, length=80, bias=(2, 1, 1, 80), softcap=4.0),
    attention_case("bias by query and head", heads=(4, 2), length=63, bias=(4, 63, 1), sinks=True),
    attention_case("bias of two axes", batch=2, length=(63, 80), bias=(63, 80), dropout=0.2),
    # masks
    attention_case("mask full", batch=2, length=(63, 80), mask=(2, 2, 63, 80)),
    attention_case("mask by key bf16", batch=2, length=80, mask=(2, 1, 1, 80), dtype="bfloat16"),
    attention_case("mask by query", batch=2, length=63, mask=(2, 1, 63, 1), return_lse=True),
    attention_case("mask by head", heads=(4, 2), length=80, mask=(1, 4, 1, 80), causal=True),
    attention_case("mask of two axes", batch=2, length=(63, 80), mask=(63, 80), bias=(1, 2, 1, 80)),
    # blocks
    attention_case(
        "blocks causal GQA bf16",
        heads=(4, 2),
        length=(300, 260),
        dtype="bfloat16",
        causal=True,
        block_mask=_blocks(3, 3),
        block_size=128,
        return_lse=True,
    ),
    attention_case(
        "blocks by head",
        heads=(4, 2),
        length=(150, 200),
        block_mask=_blocks(4, 3, 5),
        block_size=(64, 40),
        bias=(1, 4, 1, 200),
        sinks=True,
        softcap=4.0,
    ),
    attention_case(
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
    attention_case("q_offset", length=(40, 100), causal=True, q_offset=33),
    attention_case(
        "q_offset by batch", batch=2, heads=(4, 2), length=(63, 100), causal=True, q_offset=_OFFSETS, return_lse=True
    ),
    attention_case(
        "decode by batch bf16",
        batch=2,
        heads=(4, 2),
        length=(3, 100),
        causal=True,
        q_offset=_OFFSETS,
        dtype="bfloat16",
        window=(60, None),
        mask=(2, 1, 1, 100),
        return_lse=True,
    ),
    attention_case("positions of rows bf16", length=(80, 300), window=(50, 9), q_offset=_POSITIONS, dtype="bfloat16"),
    attention_case(
        "positions of many rows",
        heads=(2, 1),
        length=(300, 200),
        dim=32,
        causal=True,
        window=(70, 0),
        mask=(1, 1, 1, 200),
        q_offset=_SCATTERED.astype(np.int32),
        return_lse=True,
    ),
    attention_case(
        "positions and blocks",
        heads=(2, 1),
        length=(100, 150),
        causal=True,
        q_offset=_SCATTERED[:, :100].astype(np.int32),
        block_mask=_blocks(3, 4),
        block_size=(40, 48),
    ),
    attention_case("lengths and left padding", batch=2, length=80, kv_lens=_LENGTHS, kv_starts=_STARTS, causal=True),
    attention_case(
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
    varlen_case("varlen", (30, 1, 0, 70), (30, 1, 0, 70), spare=3, causal=True, return_lse=True),
    varlen_case(
        "varlen of other keys", (20, 40, 3), (70, 30, 0), heads=(4, 2), causal=True, sinks=True, return_lse=True
    ),
    varlen_case(
        "varlen window top-left bf16", (50, 40), (90, 110), dtype="bfloat16", window=(9, 5), causal_align="top_left"
    ),
    # everything
    *(
        attention_case(
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
    *MODELS,
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
        },
        "pallas_tpu": {
            "full f16": "float16",
            **dict.fromkeys(("full f64", "alibi f64 of rows with positions"), "float64"),
            "no keys": "empty",
        },
        "triton": {
            **dict.fromkeys(("full f64", "alibi f64 of rows with positions"), "`query` is float64"),
            "positions and blocks": "next to a block mask",
            "head dim 2000": "heads of 2000",
            "no keys": "an axis is empty",
        },
    },
    # The gradient of the one bias is a sum of 20,000 terms that cancel: its rounding is that of the terms.
    coarser={"one bias softcap": dict.fromkeys(("xla_chunked", "native_cpu", "pallas_tpu", "triton"), 2.0**-18)},
)
