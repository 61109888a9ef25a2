"""Cases of paged attention: small batches of ragged runs for the contract suite, and steps of decoding and prefill of
real models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison
from vishwamai.core.types import AnyArray
from vishwamai.ops.paged_attention.api import ragged_paged_attention
from vishwamai.ops.paged_attention.spec import TOKENS_DECLINED

Runs = tuple[tuple[int, int], ...]
"""(new tokens, all tokens) of each sequence."""


@dataclasses.dataclass(frozen=True)
class Table(ArrayInit):
    """An integer array whose values are given; for page tables None, and they are drawn: every page once."""

    values: tuple[int, ...] | None = None
    pages: int = 0

    def make(self, rng: np.random.Generator) -> np.ndarray:
        if self.values is not None:
            return np.array(self.values, np.int32).reshape(self.shape)
        return rng.permutation(self.pages)[: self.shape[0] * self.shape[1]].reshape(self.shape).astype(np.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardCase(Case):
    """A case whose operation has no gradient."""

    @property
    def differentiable(self) -> tuple[str, ...]:
        return ()


def tables(runs: Runs, page_size: int, entries: int | None = None, spare: int = 2) -> tuple[dict[str, ArrayInit], int]:
    """(kv_lens, page_indices, cu_q_lens, number of pages): page tables of `entries` a sequence, or as many as the
    longest needs.
    """
    entries = entries or max(1, max(-(-kv // page_size) for _, kv in runs))
    pages = len(runs) * entries + spare
    starts = [sum(q for q, _ in runs[:i]) for i in range(len(runs) + 1)]
    arrays: dict[str, ArrayInit] = {
        "kv_lens": Table((len(runs),), "int32", values=tuple(kv for _, kv in runs)),
        "page_indices": Table((len(runs), entries), "int32", pages=pages),
        "cu_q_lens": Table((len(runs) + 1,), "int32", values=tuple(starts)),
    }
    return arrays, pages


def separate_pages(query: AnyArray, k_pages: AnyArray, v_pages: AnyArray, **rest: AnyArray) -> AnyArray:
    """`ragged_paged_attention` with keys and values in pools of their own."""
    return ragged_paged_attention(query, (k_pages, v_pages), **rest)


@dataclasses.dataclass(frozen=True)
class Scales(ArrayInit):
    """Positive scales that differ by up to 30 times, as the largest numbers of tokens do."""

    def make(self, rng: np.random.Generator) -> np.ndarray:
        return np.exp(rng.uniform(np.log(0.001), np.log(0.03), self.shape)).astype(np.float32)


def token_scales(inits: dict[str, ArrayInit], kv_heads: int) -> dict[str, ArrayInit]:
    """Scales of every token of the pages; of latent pages one array, as the key is the value."""
    pool = inits["kv_pages"] if "kv_pages" in inits else inits["k_pages"]
    heads = (kv_heads,) if len(pool.shape) > 3 else ()
    return dict.fromkeys(("k_scale", "v_scale"), Scales((*pool.shape[:2], *heads, 1)))


def _case(
    name: str,
    runs: Runs,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    page_size: int = 8,
    dtype: str = "float32",
    pages: str | None = None,
    *,
    quantized: str | None = None,
    form: str = "combined",
    value_dim: int | None = None,
    sinks: bool = False,
    slopes: bool = False,
    tree: int = 0,
    scaled: bool = False,
    token_scaled: bool = False,
    spare_tokens: int = 0,
    tags: tuple[str, ...] = ("contract",),
    **options: Any,
) -> Case:
    arrays, number = tables(runs, page_size)
    stored = pages or dtype
    kind: Any = "integers" if stored != dtype else "normal"

    def pool(*shape: int) -> ArrayInit:
        return ArrayInit((number, page_size, *shape), stored, kind)

    query: Any = (quantized, "integers") if quantized else (dtype,)
    inits = {"query": ArrayInit((sum(q for q, _ in runs) + spare_tokens, heads[0], dim), *query)}
    if form == "combined":
        inits["kv_pages"] = pool(2 * heads[1], dim)
    elif form == "separate":
        inits |= {"k_pages": pool(heads[1], dim), "v_pages": pool(heads[1], value_dim or dim)}
    else:
        inits["kv_pages"] = pool(dim)
    inits |= arrays
    if token_scaled:
        inits |= token_scales(inits, heads[1])
    if sinks:
        inits["sinks"] = ArrayInit(heads[:1], "float32")
    if tree:
        inits["tree_mask"] = ArrayInit((inits["query"].shape[0], tree), "bool", "mask")
    if slopes:
        options["alibi_slopes"] = np.linspace(0.5, 0.01, heads[0], dtype=np.float32)
    if scaled:
        # What makes stored numbers of the dtype's range about 1.
        options |= {
            "k_scale": 0.02 if stored == "int8" else 0.2,
            "v_scale": tuple(0.01 * (1 + h) for h in range(heads[1])),
        }
    if quantized:
        options |= {"q_scale": tuple((0.01 if quantized == "int8" else 0.2) * (1 + h) for h in range(heads[1]))}
        options |= {"out_dtype": dtype}
    call: Any = separate_pages if form == "separate" else ragged_paged_attention
    return ForwardCase(name, "paged_attention", call, inits, options, frozenset(tags))


_MIXED: Runs = ((1, 21), (5, 5), (1, 8), (0, 9), (11, 30))
_DECODE: Runs = ((1, 17), (1, 3), (1, 32))
_TREES: Runs = ((7, 40), (1, 3), (5, 5))

_DECODING: tuple[tuple[str, tuple[int, int], int, dict[str, Any]], ...] = (
    ("decode Llama 3 8B", (32, 8), 128, {}),
    ("decode Llama 3 8B int8", (32, 8), 128, {"pages": "int8", "scaled": True}),
    ("decode Mistral 7B window", (32, 8), 128, {"window": 1024}),
    # 512 + 64 columns, filled up to whole tiles.
    ("decode DeepSeek V3 latent", (128, 1), 640, {"form": "latent", "latent_dim": 512, "scale": 192**-0.5}),
)

CASES = (
    _case("mixed f32", _MIXED, spare_tokens=3),
    _case("mixed bf16", _MIXED, (8, 2), 128, 8, "bfloat16"),
    _case("decode bf16", _DECODE, (8, 2), 128, 16, "bfloat16", max_q_len=1),
    _case("decode one head a group f32", _DECODE, (2, 2), 64, 4, max_q_len=1),
    _case("page of 1", ((1, 5), (3, 7)), (4, 2), 128, 1, "bfloat16", max_q_len=3),
    _case("page of 256", ((1, 300), (2, 40)), (4, 2), 128, 256, "bfloat16", max_q_len=2),
    _case("window", _MIXED, (8, 2), 128, 4, "bfloat16", window=6),
    _case("softcap and sinks", _MIXED, (8, 2), 128, 8, "bfloat16", softcap=3.0, sinks=True),
    _case("int8 pages", _MIXED, (8, 2), 128, 8, "bfloat16", "int8", scaled=True),
    _case("int8 pages, scales of tokens", _MIXED, (8, 2), 128, 8, "bfloat16", "int8", token_scaled=True),
    _case(
        "fp8 pages, scales of tokens",
        _DECODE,
        (4, 2),
        64,
        4,
        pages="float8_e4m3fn",
        form="separate",
        value_dim=32,
        token_scaled=True,
        max_q_len=1,
        return_lse=True,
    ),
    _case(
        "latent int8 pages, scales of tokens",
        _MIXED,
        (8, 1),
        80,
        16,
        pages="int8",
        form="latent",
        latent_dim=64,
        scale=0.2,
        token_scaled=True,
        window=20,
        softcap=3.0,
    ),
    _case("int4 pages", _MIXED, (8, 4), 128, 8, "bfloat16", "int4", scaled=True),
    _case("int4 pages of decoding", _DECODE, (16, 8), 64, 16, "bfloat16", "int4", scaled=True, max_q_len=1),
    _case(
        "int4 pages separate",
        _MIXED,
        (8, 8),
        64,
        8,
        pages="int4",
        form="separate",
        value_dim=32,
        scaled=True,
        window=9,
    ),
    _case("int4 pages of two kv heads", _MIXED, (8, 2), 128, 8, "bfloat16", "int4", scaled=True),
    _case("int4 pages latent", _MIXED, (8, 1), 80, 16, "bfloat16", "int4", form="latent", latent_dim=62, scale=0.02),
    _case("int4 pages of odd rows", _DECODE, (4, 2), 33, 8, pages="int4", scaled=True),
    _case("fp8 pages", _DECODE, (8, 4), 128, 8, "bfloat16", "float8_e4m3fn", scaled=True, max_q_len=1),
    _case("fp8 e5m2 pages", _DECODE, (4, 2), 64, 8, "bfloat16", "float8_e5m2", scaled=True, max_q_len=1),
    _case("int8 queries", _MIXED, (8, 2), 128, 8, "bfloat16", "int8", quantized="int8", scaled=True),
    _case(
        "fp8 queries float32", _DECODE, (4, 2), 64, 8, "float32", quantized="float8_e4m3fn", max_q_len=1, softcap=3.0
    ),
    _case("separate", _MIXED, (4, 2), 64, 8, "bfloat16", form="separate", value_dim=32),
    _case("latent", _MIXED, (8, 1), 80, 16, "bfloat16", form="latent", latent_dim=64, scale=0.2),
    _case("no tokens", ((0, 4),), (4, 2), 32, 8),
    _case("float16", _DECODE, (4, 2), 32, 8, "float16"),
    _case("float64", _DECODE, (4, 2), 32, 8, "float64"),
    _case("three kv heads", _DECODE, (6, 3), 64, 8, "bfloat16"),
    _case("pages of 150 keys together", ((1, 147), (3, 20)), (4, 2), 32, 15, "bfloat16", window=40),
    _case("logsumexp", _MIXED, (8, 2), 128, 8, "bfloat16", softcap=3.0, sinks=True, spare_tokens=3, return_lse=True),
    _case("logsumexp of decoding", _DECODE, (4, 2), 64, 8, max_q_len=1, window=9, return_lse=True),
    _case("alibi", _MIXED, (8, 2), 64, 8, softcap=3.0, sinks=True, window=20, slopes=True),
    _case("alibi of decoding bf16", _DECODE, (8, 2), 128, 16, "bfloat16", max_q_len=1, slopes=True),
    # One run is longer than the mask has columns.
    _case("tree mask", _MIXED, (8, 2), 64, 8, softcap=3.0, sinks=True, window=20, tree=6),
    _case("tree mask of int8 pages bf16", _TREES, (8, 2), 64, 16, "bfloat16", "int8", scaled=True, max_q_len=7, tree=7),
    _case("wide heads", _DECODE, (4, 2), 256, 8, "bfloat16"),
    # A step of decoding: 64 sequences of 4096 tokens, pages of 64.
    *(
        _case(name, ((1, 4096),) * 64, heads, dim, 64, "bfloat16", max_q_len=1, tags=("model", "long"), **options)
        for name, heads, dim, options in _DECODING
    ),
    _case(
        "prefill and decode Llama 3 8B",
        (((1, 2048),) * 32 + ((1024, 1024),)),
        (32, 8),
        128,
        64,
        "bfloat16",
        tags=("model", "long"),
    ),
)


def _eight_batches(
    query: AnyArray, kv_pages: AnyArray, kv_lens: AnyArray, page_indices: AnyArray, sinks: AnyArray, **options: Any
) -> Any:
    """Eight batches of two sequences, of one and two new tokens, by vmap: the op has no batch axis but the
    sequences.
    """
    starts: Any = np.array([0, 1, 3], np.int32)

    def batch_result(query: AnyArray, kv_pages: AnyArray, kv_lens: AnyArray, page_indices: AnyArray) -> Any:
        return ragged_paged_attention(
            query, kv_pages, kv_lens, page_indices, starts, sinks=sinks, max_q_len=2, **options
        )

    return jax.vmap(batch_result)(query, kv_pages, kv_lens, page_indices)


_SMALL = ForwardCase(
    "small",
    "paged_attention",
    _eight_batches,
    {
        "query": ArrayInit((8, 3, 2, 16)),
        "kv_pages": ArrayInit((8, 4, 4, 2, 16)),
        "kv_lens": Table((8, 2), "int32", values=(5, 3, 8, 8, 2, 4, 1, 2) * 2),
        "page_indices": Table((8, 2, 2), "int32", values=(0, 1, 3, 2) * 8),
        "sinks": ArrayInit((2,)),
    },
    {"softcap": 4.0},
)

_TOKEN_SCALED = [case.name for case in CASES if case.name.endswith("scales of tokens")]

FACTS = Facts(
    small=_SMALL,
    batched=("query", "kv_pages", "kv_lens", "page_indices"),
    poison=Poison("mixed bf16", "query"),
    declines={
        "native_cpu": {"int4 pages of odd rows": "rows of 33 numbers of 4 bits"},
        "pallas_tpu": {
            **dict.fromkeys(_TOKEN_SCALED, TOKENS_DECLINED),
            "no tokens": "the batch is empty",
            "float16": "`query` is float16",
            "float64": "`query` is float64",
            "three kv heads": "6 rows of bfloat16",
            "int4 pages of two kv heads": "4 rows of int4",
            "int4 pages latent": "latent pages are int4",
            "int4 pages of odd rows": "4 rows of int4",
            "wide heads": "256 columns",
        },
        "triton": {
            **dict.fromkeys(_TOKEN_SCALED, TOKENS_DECLINED),
            "no tokens": "the batch is empty",
            "float64": "`query` is float64",
            "int4 pages of odd rows": "rows of 33 numbers of 4 bits",
        },
    },
)
