"""Cases of the grouped product: small ones for the contract suite, and the experts of real models."""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison, qtensor_of_bytes
from vishwamai.core.qtensor import FORMATS
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.moe.api import grouped_gemm


def _case(
    name: str,
    lhs: tuple[int, ...],
    columns: int,
    sizes: PyTree,
    dtype: str = "float32",
    *,
    local: int | None = None,
    transpose_rhs: bool = False,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    """`sizes` are a value of the call, not an array of the case: what they are decides which rows are computed; `local`
    groups have a matrix, or all.
    """
    sizes = np.asarray(sizes, np.int32)
    depth = lhs[-1]
    matrix = (columns, depth) if transpose_rhs else (depth, columns)
    rhs = (*sizes.shape[:-1], local or sizes.shape[-1], *matrix)
    options |= {"transpose_rhs": True} if transpose_rhs else {}
    # Weights of variance 1/K keep the sums near 1.
    arrays = {"lhs": ArrayInit(lhs, dtype), "rhs": ArrayInit(rhs, dtype, scale=max(depth, 1) ** -0.5)}
    return Case(name, "grouped_gemm", grouped_gemm, arrays, {"group_sizes": sizes, **options}, frozenset(tags))


def quantized_grouped_gemm(
    lhs: AnyArray, weight: AnyArray, scales: AnyArray, *, format: str, block_size: Any, **options: PyTree
) -> AnyArray:
    """`grouped_gemm` of a QTensor that is made of bytes, see `qtensor_of_bytes`."""
    return grouped_gemm(lhs, qtensor_of_bytes(weight, scales, format, -2, block_size), **options)


def _quantized(
    name: str,
    format: str,
    block_size: int | None,
    dtype: str = "bfloat16",
    *,
    batch: tuple[int, ...] = (),
    matrix: tuple[int, int] = (256, 128),
    tiles: int | None = None,
    sizes: Any = (20, 0, 41),
    **options: Any,
) -> Case:
    """Three groups have a matrix. `tiles`: the call's block size, where that of the scales is `block_size`."""
    (depth, columns), sizes = matrix, np.broadcast_to(np.array(sizes, np.int32), (*batch, len(sizes)))
    blocks = 1 if block_size is None else -(-depth // block_size)
    kind = ("int8", "integers") if FORMATS[format].power_of_two else ("float32", "positive")
    arrays = {
        "lhs": ArrayInit((*batch, 70, depth), dtype),
        "weight": ArrayInit((*batch, 3, depth, columns), "int8", "integers"),
        "scales": ArrayInit((*batch, 3, blocks, columns), *kind),
    }
    options = {"group_sizes": sizes, "format": format, "block_size": block_size, **options}
    options |= {} if tiles is None else {"config": tiles}
    return Case(name, "grouped_gemm", quantized_grouped_gemm, arrays, options, frozenset({"contract"}))


_QUANTIZED = (
    _quantized("int8 weights", "int8", None),
    _quantized("fp8 weights, float32 rows", "fp8_e4m3", None, "float32"),
    _quantized("int4 weights", "int4", None, matrix=(100, 66)),
    _quantized("int4 weights in blocks", "int4", 48),
    _quantized("int8 weights in blocks that no tile divides", "int8", 20, "float32", out_dtype="bfloat16"),
    _quantized("fp8 weights in blocks and tiles", "fp8_e5m2", 16, matrix=(300, 256), tiles=128),
    _quantized("mxfp4 weights", "mxfp4", 32, batch=(2,), matrix=(100, 128)),
    _quantized("e2m1 weights", "fp4_e2m1", 16, matrix=(100, 128)),
    _quantized("mxfp8 weights, float32 result", "mxfp8_e4m3", 32, out_dtype="float32"),
)

_CONTRACT = (
    *_QUANTIZED,
    _case("some of the groups", (100, 40), 24, [17, 0, 30, 0, 50, 3], group_offset=2, local=3),
    _case("no row of the groups there are", (40, 16), 20, [10, 0, 0, 30], group_offset=1, local=2),
    _quantized("int8 weights of some of the groups", "int8", None, sizes=[9, 0, 20, 0, 21, 13], group_offset=2),
    _quantized("mxfp4 weights of some of the groups", "mxfp4", 32, sizes=[30, 7, 0, 33], group_offset=1),
    _case("groups of any size float32", (100, 40), 24, [30, 0, 50, 7]),
    _case("groups of any size bfloat16", (100, 40), 24, [30, 0, 50, 7], "bfloat16"),
    _case("matrices copied ahead", (150, 128), 256, [40, 0, 1, 70, 20], "bfloat16"),
    _case("tiles shared by groups", (300, 256), 128, [100, 77, 0, 123], block_size=128),
    _case("bfloat16 to float32", (40, 63), 100, [25, 15], "bfloat16", out_dtype="float32"),
    _case("one feature bfloat16", (40, 1), 24, [25, 15], "bfloat16"),
    _case("batch", (2, 40, 16), 20, [[10, 30, 0], [0, 5, 20]]),
    _case("no rows in any group", (20, 16), 8, [0, 0]),
    _case("matrices [N, K]", (100, 40), 24, [30, 0, 50, 7], transpose_rhs=True),
    _case("matrices [N, K] copied ahead", (150, 128), 256, [40, 0, 1, 70, 20], "bfloat16", transpose_rhs=True),
    _case("matrices [N, K] of a batch", (2, 40, 16), 20, [[10, 30, 0], [0, 5, 20]], "bfloat16", transpose_rhs=True),
    _case("some matrices [N, K]", (40, 16), 20, [10, 4, 0, 26], group_offset=1, local=3, transpose_rhs=True),
    _case("float16", (40, 16), 20, [25, 15], "float16"),
    _case("float64", (40, 16), 20, [25, 10], "float64"),
    _case("no rows", (0, 16), 20, [0, 0]),
)


def _model(name: str, rows: int, depth: int, columns: int, sizes: PyTree, **options: Any) -> Case:
    return _case(name, (rows, depth), columns, sizes, "bfloat16", tags=("model", *options.pop("tags", ())), **options)


def _uneven(rows: int, groups: int) -> np.ndarray:
    """Sizes as a router gives them: some experts have several times the load of others."""
    share = np.random.default_rng(0).gamma(2.0, size=groups)
    return np.diff(np.round(np.cumsum(share / share.sum()) * rows), prepend=0).astype(np.int32)


_MODELS = (
    # Mixtral 8x7B: 4096 tokens to 2 of 8 experts of 4096 -> 14336.
    _model("Mixtral 8x7B up, even", 8192, 4096, 14336, [1024] * 8, tags=("long",)),
    _model("Mixtral 8x7B up, uneven", 8192, 4096, 14336, [700, 1500, 1024, 300, 2000, 900, 1268, 500], tags=("long",)),
    _model(
        "Mixtral 8x7B down, uneven", 8192, 14336, 4096, [700, 1500, 1024, 300, 2000, 900, 1268, 500], tags=("long",)
    ),
    # Qwen3 30B-A3B: 1024 tokens to 8 of 128 experts of 2048 -> 768.
    _model("Qwen3 30B-A3B up", 8192, 2048, 768, _uneven(8192, 128)),
)

CASES = (*_CONTRACT, *_MODELS)

_SMALL = Case(
    "small",
    "grouped_gemm",
    grouped_gemm,
    {"lhs": ArrayInit((8, 6, 20)), "rhs": ArrayInit((3, 20, 24), scale=0.2)},
    {"group_sizes": np.array([2, 0, 3], np.int32)},
)

FACTS = Facts(
    small=_SMALL,
    batched=("lhs",),
    poison=Poison("tiles shared by groups", "lhs"),
    declines={
        "pallas_tpu": {
            "float16": "`lhs` is float16",
            "float64": "`lhs` is float64",
            "no rows": "an array is empty",
        },
        "native_cpu": {case.name: "`rhs` is a QTensor" for case in _CONTRACT if "weight" in case.arrays},
        "triton": {
            "float64": "`lhs` is float64",
            "no rows": "an array is empty",
        },
    },
)
