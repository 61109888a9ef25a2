"""Random cases of every operation: shapes at the edges of tiles, mixed dtypes, options in any combination.

A case is drawn through `choose(options) -> option`, which `random.Random(seed).choice` is, and hypothesis' `draw(sampled_from(options))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import vishwamai
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.ops.gated.cases import gated
from vishwamai.ops.loss.cases import Labels
from vishwamai.ops.matmul.cases import quantized_gemm
from vishwamai.ops.paged_attention.cases import ForwardCase, separate_pages, tables
from vishwamai.ops.rope.cases import rope

Choose = Callable[[Sequence[Any]], Any]

EDGES = (
    1,
    2,
    3,
    5,
    7,
    8,
    9,
    16,
    17,
    31,
    33,
    63,
    64,
    65,
    80,
    100,
    127,
    128,
    129,
    192,
    200,
    255,
    256,
    257,
    300,
    384,
    511,
    512,
    520,
    640,
    1000,
    1024,
)
"""Sizes at and beside the edges of registers and tiles; `Sizes` cuts them off."""
FLOATS = ("float32", "bfloat16", "float16")
ACTIVATIONS = (None, "relu", "relu2", "silu", "sigmoid", "tanh", "gelu", "gelu_tanh")


class Sizes:
    """What a draw may be: `choose`, and sizes of at most `largest`."""

    def __init__(self, choose: Choose, largest: int = 520):
        self.choose, self.largest = choose, largest

    def size(self, largest: int | None = None) -> int:
        return self.choose([n for n in EDGES if n <= min(largest or self.largest, self.largest)])

    def flag(self, one_in: int = 2) -> bool:
        return self.choose([False] * (one_in - 1) + [True])

    def dtype(self, *, float64: bool = False) -> str:
        return self.choose(("float32", "float32", "bfloat16", "bfloat16", "float16") + ("float64",) * float64)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.choose(range(1000)))


def norm(d: Sizes) -> Case:
    call = d.choose((vishwamai.layer_norm, vishwamai.rms_norm))
    dtype = d.dtype()
    shape = (*(d.size(65) for _ in range(d.choose((0, 0, 1, 2)))), d.size(1024), d.size(1024))[d.choose((0, 0, 0, 1)) :]
    while np.prod(shape) > 2**20:
        shape = (1, *shape[1:])
    arrays = {"x": ArrayInit(shape, dtype)}
    if d.flag():
        arrays["scale"] = ArrayInit(shape[-1:], d.choose((dtype, dtype, "float32")), "positive")
    if d.flag():
        arrays["offset"] = ArrayInit(shape[-1:], d.choose((dtype, dtype, "float32")), scale=0.1)
    if d.flag():
        arrays["residual"] = ArrayInit(shape, dtype)
    return Case("", "norm", call, arrays, {"eps": 1e-2})


def activation(d: Sizes) -> Case:
    call = d.choose((vishwamai.gelu, vishwamai.silu, vishwamai.relu2, vishwamai.fused_gelu_dropout))
    shape = tuple(d.size(300) for _ in range(d.choose((1, 2, 2))))
    arrays, options = {"x": ArrayInit(shape, d.dtype(), scale=2.0)}, {}
    if call is vishwamai.fused_gelu_dropout:
        arrays["key"] = ArrayInit((2,), "uint32", "key")
        options["rate"] = 0.25
    return Case("", "activation", call, arrays, options)


def softmax(d: Sizes) -> Case:
    shape = tuple(d.size(1024) for _ in range(d.choose((1, 2, 2)))) if d.flag() else tuple(d.size(33) for _ in range(3))
    call = d.choose((vishwamai.softmax, vishwamai.log_softmax))
    axis = d.choose(range(-len(shape), len(shape)))
    return Case("", "softmax", call, {"x": ArrayInit(shape, d.dtype(), scale=3.0)}, {"axis": axis})


def gated_case(d: Sizes) -> Case:
    dtype, features, hidden = d.dtype(), d.size(), d.size()
    arrays = {"x": ArrayInit((*(d.size(17) for _ in range(d.choose((0, 0, 1)))), d.size(), features), dtype)}
    scale = features**-0.5
    if d.flag():
        arrays["both"] = ArrayInit((2, features, hidden), dtype, scale=scale)
    else:
        arrays |= {name: ArrayInit((features, hidden), dtype, scale=scale) for name in ("gate", "up")}
    return Case("", "gated", gated, arrays, {"activation": d.choose(ACTIVATIONS)} | _precision(d, dtype))


def _precision(d: Sizes, dtype: str) -> dict[str, Any]:
    return {"precision": "high"} if dtype == "float32" and d.flag(4) else {}


def matmul(d: Sizes) -> Case:
    return quantized(d) if d.flag(4) else dense(d)


def dense(d: Sizes) -> Case:
    m, n, k = d.size(), d.size(), d.size()
    dtype = d.choose((*FLOATS, "float32", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2"))
    other = d.choose(
        (dtype,) * 5 + {"bfloat16": ("float32", "int8", "float8_e4m3fn"), "float32": ("bfloat16",)}.get(dtype, (dtype,))
    )
    ta, tb = d.flag(3), d.flag(3)
    batch = tuple(d.choose((1, 2, 3)) for _ in range(d.choose((0, 0, 1, 2))))

    def own() -> tuple[int, ...]:
        return d.choose((batch, batch, (), batch[1:], tuple(1 if d.flag() else e for e in batch)))

    def matrix(shape: tuple[int, ...], dtype: str, scale: float) -> ArrayInit:
        narrow = dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        return ArrayInit(shape, dtype, "integers") if narrow else ArrayInit(shape, dtype, scale=scale)

    arrays = {
        "a": matrix((*own(), *((k, m) if ta else (m, k))), dtype, 1.0),
        "b": matrix((*own(), *((n, k) if tb else (k, n))), other, k**-0.5),
    }
    full = np.broadcast_shapes(arrays["a"].shape[:-2], arrays["b"].shape[:-2])
    vector = dtype if dtype in FLOATS else "float32"
    if d.flag(3):
        arrays["bias"] = ArrayInit((*(full if d.flag() else ()), n), vector)
    for name, extent in (("scale_a", m), ("scale_b", n)):
        if d.flag(4):
            shape = d.choose(((), (extent,), (extent,), (*full, extent)))
            arrays[name] = ArrayInit(shape, "float32", "positive")
    options: dict[str, Any] = {"transpose_a": ta, "transpose_b": tb} | _precision(d, dtype)
    if d.flag(3):
        options["activation"] = d.choose(ACTIVATIONS)
    if dtype != "int8" and other != "int8" and d.flag(4):
        options["out_dtype"] = d.choose(("float32", "bfloat16"))
    if dtype == "int8" and options.get("activation") and not {"scale_a", "scale_b"} & set(arrays):
        arrays["scale_b"] = ArrayInit((n,), "float32", "positive")
    return Case("", "matmul", vishwamai.gemm, arrays, options)


def quantized(d: Sizes) -> Case:
    m, n, k = d.size(), d.size(), d.size()
    format = d.choose(("int8", "int4", "fp8_e4m3", "fp8_e5m2", "mxfp8_e4m3", "mxfp8_e5m2", "mxfp4"))
    mx = format.startswith("mx")
    block = 32 if mx else d.choose((None, 16, 32, 64, 128))
    groups = 1 if block is None else -(-k // block)
    tb = d.flag(3)
    kind: Any = ("int8", "integers") if mx else ("float32", "positive")
    arrays = {
        "weight": ArrayInit((n, k) if tb else (k, n), "int8", "integers"),
        "scales": ArrayInit((n, groups) if tb else (groups, n), *kind),
    }
    if d.flag(4):
        arrays = {"a": ArrayInit((m, k), "int8", "integers"), **arrays, "scales_of_a": ArrayInit((m, groups), *kind)}
    else:
        arrays = {"a": ArrayInit((m, k), d.choose(("float32", "bfloat16", "bfloat16"))), **arrays}
    options = {"format": format, "block_size": block, "transpose_b": tb}
    if d.flag(4):
        options["activation"] = d.choose(ACTIVATIONS)
    return Case("", "matmul", quantized_gemm, arrays, options)


def attention(d: Sizes) -> Case:
    dtype = d.dtype()
    batch, kv_heads, group = d.choose((1, 1, 2, 3)), d.choose((1, 1, 2, 3)), d.choose((1, 1, 2, 4, 5))
    heads = kv_heads * group
    tq, tk = d.size(), d.size()
    tk = d.choose((tk, tq))
    dim = d.size(300)
    dv = d.choose((dim, dim, d.size(300)))
    arrays = {
        "query": ArrayInit((batch, heads, tq, dim), dtype),
        "key": ArrayInit((batch, kv_heads, tk, dim), dtype),
        "value": ArrayInit((batch, kv_heads, tk, dv), dtype),
    }

    def broadcast() -> tuple[int, ...]:
        return tuple(e if d.flag() else 1 for e in (batch, heads, tq, tk))[d.choose((0, 0, 0, 1, 2)) :]

    if d.flag(3):
        arrays["bias"] = ArrayInit(broadcast(), dtype)
    if d.flag(3):
        arrays["mask"] = ArrayInit(broadcast(), "bool", "mask")
    if d.flag(4):
        arrays["sinks"] = ArrayInit((heads,), dtype)
    options: dict[str, Any] = {"return_lse": d.flag(), "causal": d.flag(), "layout": "bhsd"}
    options["causal_align"] = d.choose(("top_left", "bottom_right"))
    if d.flag(3):
        options["window"] = (d.choose((None, 0, 3, 40, 150)), d.choose((None, 0, 1, 7, 130)))
    if d.flag(3):
        rng = d.rng()
        options["segment_ids"] = tuple(np.sort(rng.integers(0, 3, (batch, t)), -1).astype(np.int32) for t in (tq, tk))
    if d.flag(4):
        options["softcap"] = 3.0
    if d.flag(4):
        options["scale"] = 0.2
    if d.flag(4):
        options["dropout_rate"] = 0.2
        arrays["dropout_key"] = ArrayInit((2,), "uint32", "key")
    call: Any = vishwamai.flash_attention
    if d.flag(5):
        call = vishwamai.block_sparse_attention
        block = d.choose((16, 32, 100, 128, (64, 40)))
        bq, bk = block if isinstance(block, tuple) else (block, block)
        shape = -(-tq // bq), -(-tk // bk)
        options |= {"block_mask": d.rng().random(d.choose((shape, (heads, *shape)))) < 0.6, "block_size": block}
    return Case("", "attention", call, arrays, options)


def sparse(d: Sizes) -> Case:
    block = tuple(d.choose((128, 8, 128, 3, 16, 128, 32, 100, 128, 256)) for _ in range(2))
    mask = d.rng().random((d.choose((1, 2, 3, 5)), d.choose((1, 2, 3, 5)))) < d.choose((0.2, 0.5, 1.0))
    at = np.argwhere(mask).astype(np.int32)
    if len(at) and d.flag(3):
        at = d.rng().permutation(np.concatenate([at, at[:1]]))  # in any order, and one place twice
    transpose = d.flag()
    shape = mask.shape[0] * block[0], mask.shape[1] * block[1]
    batch = d.choose(((), (d.size(),), (2, d.size(65))))
    dtype = d.dtype()
    arrays = {
        "dense": ArrayInit((*batch, shape[1 if transpose else 0]), dtype),
        "values": ArrayInit((len(at), *block), dtype, scale=0.1),
    }
    options = {"indices": at, "shape": shape, "transpose": transpose} | _precision(d, dtype)
    return Case("", "sparse", vishwamai.block_sparse_matmul, arrays, options)


def moe(d: Sizes) -> Case:
    rows, depth, columns, groups = d.size(), d.size(), d.size(), d.choose((1, 2, 3, 5, 9))
    batch = d.choose(((), (), (1,), (2,)))
    rng = d.rng()
    share = rng.dirichlet(np.full(groups, 0.5), batch) * rows * d.choose((1.0, 0.7, 1.0, 0.0))
    sizes = np.floor(share).astype(np.int32)
    dtype = d.dtype()
    arrays = {
        "lhs": ArrayInit((*batch, rows, depth), dtype),
        "rhs": ArrayInit((*batch, groups, depth, columns), dtype, scale=depth**-0.5),
    }
    options: dict[str, Any] = {"group_sizes": sizes}
    if d.flag(4):
        options["out_dtype"] = "float32"
    return Case("", "moe", vishwamai.grouped_gemm, arrays, options)


def loss(d: Sizes) -> Case:
    tokens = (*((d.choose((1, 2, 3)),) if d.flag(3) else ()), d.size(300))
    words, features, dtype = d.size(1024), d.size(300), d.dtype()
    arrays: dict[str, ArrayInit] = {
        "x": ArrayInit((*tokens, features), dtype),
        "weight": ArrayInit((words, features), dtype, scale=2 * features**-0.5),
        "labels": Labels(tokens, "int32", "integers", words=words),
    }
    if d.flag(3):
        arrays["bias"] = ArrayInit((words,), dtype)
    options: dict[str, Any] = {"reduction": d.choose(("none", "sum", "mean")), "return_logsumexp": d.flag(3)}
    for name, value in (("softcap", 3.0), ("label_smoothing", 0.1), ("z_loss", 0.01)):
        if d.flag(3):
            options[name] = value
    return Case("", "loss", vishwamai.linear_cross_entropy, arrays, options | _precision(d, dtype))


def rope_case(d: Sizes) -> Case:
    batch, heads, kv, length = d.choose((1, 2, 3)), d.choose((1, 2, 3, 5)), d.choose((1, 2, 4)), d.size(300)
    dim = 2 * d.choose((1, 2, 3, 4, 8, 16, 20, 32, 40, 50, 64, 65, 96, 128))
    layout = d.choose(("bhsd", "bhsd", "bshd"))

    def shape(heads: int) -> tuple[int, ...]:
        return (batch, heads, length, dim) if layout == "bhsd" else (batch, length, heads, dim)

    dtype = d.dtype()
    arrays = {"query": ArrayInit(shape(heads), dtype)}
    if d.flag():
        arrays["key"] = ArrayInit(shape(kv), dtype)
    if d.flag(3):
        arrays["positions"] = ArrayInit(d.choose(((length,), (batch, length), (1, length))), "int32", "segments")
    options: dict[str, Any] = {"layout": layout, "interleaved": d.flag()}
    if d.flag(3):
        options["rotary_dim"] = 2 * d.choose([n for n in (1, 2, 4, 5, 16, 32, 50, 64) if 2 * n <= dim])
    return Case("", "rope", rope, arrays, options)


def paged_attention(d: Sizes) -> Case:
    group, kv_heads = d.choose((1, 2, 3, 4, 8)), d.choose((1, 2, 3, 4))
    page, form = d.choose((1, 2, 4, 8, 16, 17, 64, 128)), d.choose(("combined", "combined", "separate", "latent"))
    dim = d.choose((1, 8, 32, 63, 64, 80, 128, 128, 192, 256))
    if form == "latent":
        kv_heads = 1
    heads = group * kv_heads
    runs = []
    decode = d.flag()
    for _ in range(d.choose((1, 2, 3, 5))):
        new = d.choose((0, 1, 1)) if decode else d.choose((0, 1, 2, 7, 33, 100))
        runs.append((new, new + d.choose((0, 1, 5, 30, 129, 300))))
    arrays, number = tables(tuple(runs), page)
    dtype = d.dtype()
    stored = d.choose((dtype, dtype, "int8", "float8_e4m3fn", "float8_e5m2"))
    kind: Any = "integers" if stored != dtype else "normal"
    options: dict[str, Any] = {"max_q_len": 1} if decode and d.flag() else {}

    def pool(*shape: int) -> ArrayInit:
        return ArrayInit((number, page, *shape), stored, kind)

    found: dict[str, ArrayInit] = {
        "query": ArrayInit((max(1, sum(q for q, _ in runs)) + d.choose((0, 0, 3)), heads, dim), dtype)
    }
    if form == "combined":
        found["kv_pages"] = pool(2 * kv_heads, dim)
    elif form == "separate":
        found |= {"k_pages": pool(kv_heads, dim), "v_pages": pool(kv_heads, d.choose((dim, dim, 64)))}
    else:
        found["kv_pages"] = pool(dim)
        options |= {"latent_dim": max(1, dim - d.choose((0, 16, 64))), "scale": 0.2}
    found |= arrays
    if d.flag(4):
        found["sinks"] = ArrayInit((heads,), "float32")
    if d.flag(4):
        options["softcap"] = 3.0
    if d.flag(4):
        options["window"] = d.choose((0, 3, 40))
    if stored != dtype:
        options["k_scale"] = 0.02 if stored == "int8" else 0.2
        options["v_scale"] = tuple(0.01 * (1 + h) for h in range(kv_heads))
    call: Any = separate_pages if form == "separate" else vishwamai.ragged_paged_attention
    return ForwardCase("", "paged_attention", call, found, options)


DRAWS: dict[str, Callable[[Sizes], Case]] = {
    "norm": norm,
    "activation": activation,
    "softmax": softmax,
    "gated": gated_case,
    "matmul": matmul,
    "attention": attention,
    "sparse": sparse,
    "moe": moe,
    "loss": loss,
    "rope": rope_case,
    "paged_attention": paged_attention,
}
"""How a case of each operation is drawn."""


def describe(case: Case) -> str:
    """The call in one line, for a failure's text."""
    arrays = ", ".join(f"{name} {init.dtype}{list(init.shape)}" for name, init in case.arrays.items())
    options = ", ".join(f"{k}={getattr(v, 'shape', v)!r}" for k, v in case.options.items() if k != "segment_ids")
    return (
        f"{case.op} {case.call.__name__}({arrays}; {options}{', segment_ids' if 'segment_ids' in case.options else ''})"
    )


def draw_case(op: str, choose: Choose, largest: int = 520) -> Case:
    """A case of the op, with sizes of at most `largest`."""
    case = DRAWS[op](Sizes(choose, largest))
    object.__setattr__(case, "name", describe(case))  # the name decides the arrays' values
    return case
