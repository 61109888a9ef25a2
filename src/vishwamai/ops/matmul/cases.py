"""Cases of the matrix product: small ones for the contract suite, and the products of real models."""

from __future__ import annotations

from typing import Any

from vishwamai.core.cases import ArrayInit, Case, Facts, Poison, qtensor_of_bytes
from vishwamai.core.qtensor import FORMATS
from vishwamai.core.types import AnyArray
from vishwamai.ops.matmul.api import gemm
from vishwamai.ops.matmul.spec import ACTIVATIONS

_INTEGERS = ("int8", "float8_e4m3fn", "float8_e5m2")


def _case(
    name: str,
    a: tuple[int, ...],
    b: tuple[int, ...],
    dtype: str = "float32",
    dtype_b: str | None = None,
    *,
    bias: tuple[int, ...] | None = None,
    scale_a: tuple[int, ...] | None = None,
    scale_b: tuple[int, ...] | None = None,
    tags: tuple[str, ...] = ("contract",),
    **options: object,
) -> Case:
    def matrix(shape: tuple[int, ...], dtype: str, contracted: int) -> ArrayInit:
        if dtype in _INTEGERS:
            return ArrayInit(shape, dtype, "integers")
        # Weights of variance 1/K keep the sums near 1, where the activations are neither linear nor saturated.
        return ArrayInit(shape, dtype, scale=max(contracted, 1) ** -0.5)

    depth = b[-1 if options.get("transpose_b") else -2]
    arrays = {"a": matrix(a, dtype, 1), "b": matrix(b, dtype_b or dtype, depth)}
    vector_dtype = dtype if dtype in ("float64", "bfloat16", "float16") else "float32"
    if bias is not None:
        arrays["bias"] = ArrayInit(bias, vector_dtype)
    for label, shape in (("scale_a", scale_a), ("scale_b", scale_b)):
        if shape is not None:
            arrays[label] = ArrayInit(shape, "float32", "positive")
    return Case(name, "gemm", gemm, arrays, options, frozenset(tags))


def quantized_gemm(
    a: AnyArray,
    weight: AnyArray,
    scales: AnyArray,
    *,
    format: str,
    block_size: int | None = None,
    transpose_b: bool = False,
    scales_of_a: AnyArray = None,
    **options: Any,
) -> AnyArray:
    """`gemm` of `a` and a QTensor that is made of bytes, see `qtensor_of_bytes`.

    Args:
      weight: int8 `[K, N]` or, with `transpose_b`, `[N, K]`.
      scales_of_a: makes `a`, int8 too, a QTensor of the same format.
    """
    b = qtensor_of_bytes(weight, scales, format, -1 if transpose_b else -2, block_size)
    if scales_of_a is not None:
        a = qtensor_of_bytes(a, scales_of_a, format, -1, block_size)
    return gemm(a, b, transpose_b=transpose_b, **options)


def _quantized(
    name: str, a: ArrayInit, weight: tuple[int, int], scales: tuple[int, int], format: str, **options: object
) -> Case:
    kind = ("int8", "integers") if FORMATS[format].power_of_two else ("float32", "positive")
    arrays = {"a": a, "weight": ArrayInit(weight, "int8", "integers"), "scales": ArrayInit(scales, *kind)}
    if a.dtype == "int8":
        arrays["scales_of_a"] = ArrayInit((a.shape[0], scales[0]), *kind)
    return Case(name, "gemm", quantized_gemm, arrays, options | {"format": format}, frozenset({"contract"}))


_QUANTIZED = (
    _quantized("int4 weight", ArrayInit((5, 192), "bfloat16"), (192, 100), (1, 100), "int4", activation="silu"),
    _quantized(
        "int8 weight in blocks", ArrayInit((24, 80)), (100, 80), (100, 3), "int8", block_size=32, transpose_b=True
    ),
    _quantized(
        "fp8 weight in blocks", ArrayInit((8, 600), "bfloat16"), (600, 100), (5, 100), "fp8_e4m3", block_size=128
    ),
    _quantized(
        "mxfp4 weight", ArrayInit((5, 80), "bfloat16"), (80, 100), (3, 100), "mxfp4", block_size=32, out_dtype="float32"
    ),
    _quantized("e2m1 weight", ArrayInit((5, 80), "bfloat16"), (80, 100), (5, 100), "fp4_e2m1", block_size=16),
    _quantized("mxfp8 both", ArrayInit((24, 80), "int8", "integers"), (80, 100), (3, 100), "mxfp8_e5m2", block_size=32),
    _quantized("int4 weight in blocks", ArrayInit((3, 512), "bfloat16"), (512, 512), (16, 512), "int4", block_size=32),
)


_T: dict[str, Any] = {"transpose_b": True}

_CONTRACT = (
    # Sizes that no tile divides.
    *(
        _case(f"{m}x{n}x{k} {dtype}", (m, k), (k, n), dtype)
        for m, n, k in ((1, 63, 80), (100, 192, 300), (8, 128, 128))
        for dtype in ("float32", "bfloat16")
    ),
    _case("several tiles bfloat16", (300, 520), (520, 300), "bfloat16", bias=(300,), block_size=128),
    _case("one element", (1, 1), (1, 1)),
    _case("outer product", (3, 1), (1, 300), bias=(300,)),
    _case("one column bfloat16", (63, 80), (1, 80), "bfloat16", transpose_b=True),
    # Every dtype.
    _case("float16", (63, 80), (80, 100), "float16", bias=(100,)),
    _case("float64", (5, 80), (80, 7), "float64", bias=(7,), activation="silu"),
    _case("int8", (63, 192), (192, 100), "int8"),
    _case(
        "int8 scaled", (63, 192), (192, 100), "int8", scale_a=(63,), scale_b=(100,), bias=(100,), out_dtype="bfloat16"
    ),
    _case("int8 per tensor", (2, 5, 80), (80, 63), "int8", scale_a=(), scale_b=(), activation="relu"),
    _case("float8_e4m3fn", (63, 192), (192, 100), "float8_e4m3fn", scale_a=(), scale_b=(100,)),
    _case("float8_e5m2", (16, 80), (80, 100), "float8_e5m2"),
    _case("float8 mixed", (16, 192), (100, 192), "float8_e5m2", "float8_e4m3fn", scale_a=(16,), **_T),
    _case("bfloat16 with float32", (16, 63), (63, 100), "bfloat16", "float32"),
    _case("bfloat16 with int8", (16, 192), (100, 192), "bfloat16", "int8", scale_b=(100,), **_T),
    _case("bfloat16 to float32", (63, 80), (80, 100), "bfloat16", out_dtype="float32"),
    # Every epilogue.
    *(_case(f"{act} float32", (24, 63), (63, 100), bias=(100,), activation=act) for act in ACTIVATIONS),
    *(_case(f"{act} bfloat16", (63, 80), (80, 100), "bfloat16", activation=act) for act in ("relu", "gelu", "silu")),
    _case(
        "whole epilogue",
        (3, 24, 63),
        (3, 63, 100),
        bias=(3, 100),
        scale_a=(3, 24),
        scale_b=(100,),
        activation="gelu_tanh",
    ),
    # float32 scales next to operands of 16 bits; a scalar's gradient is a sum that cancels.
    _case("scaled bfloat16", (128, 40), (33, 40), "bfloat16", scale_a=(), scale_b=(33,), activation="gelu", **_T),
    _case("scaled float16", (3, 17, 63), (63, 100), "float16", scale_a=(3, 17), scale_b=(100,), out_dtype="float32"),
    _case("scaled bfloat16 with float8", (16, 192), (192, 100), "bfloat16", "float8_e4m3fn", scale_a=(), scale_b=()),
    # Batch axes, shared and not.
    _case("batch", (2, 3, 17, 63), (2, 3, 63, 20)),
    _case("batch of rows", (2, 3, 17, 63), (63, 100), "bfloat16", bias=(100,), activation="silu"),
    _case("shared a", (17, 63), (3, 63, 100), "bfloat16"),
    _case("shared b, batched bias", (3, 17, 63), (63, 100), bias=(3, 100)),
    _case("batch broadcast", (2, 3, 17, 40), (2, 1, 40, 20), scale_a=(3, 17)),
    # Transposes.
    *(
        _case(
            f"transposed {'a' * ta}{'b' * tb} {dtype}",
            (63, 100) if ta else (100, 63),
            (80, 63) if tb else (63, 80),
            dtype,
            transpose_a=ta,
            transpose_b=tb,
        )
        for ta, tb in ((True, False), (False, True), (True, True))
        for dtype in ("float32", "bfloat16")
    ),
    _case("transposed a, shared b", (3, 63, 20), (63, 100), transpose_a=True, bias=(100,)),
    # Precision of float32 products.
    _case("high", (63, 300), (300, 100), precision="high"),
    _case("highest", (63, 300), (300, 100), precision="highest"),
    # Nothing to sum, nothing to return.
    _case("no depth", (5, 0), (0, 7), bias=(7,), activation="gelu"),
    _case("no rows", (0, 16), (16, 7), "bfloat16"),
    _case("no batch", (0, 5, 16), (0, 16, 7)),
)


def _model(name: str, tokens: int, features: int, columns: int, dtype: str = "bfloat16", **options: Any) -> Case:
    return _case(
        name, (tokens, features), (features, columns), dtype, tags=("model", *options.pop("tags", ())), **options
    )


_MODELS = (
    # Llama 3 8B, 4096 tokens: hidden 4096, 8 kv heads of 128, feed-forward 14336, 128256 tokens in the vocabulary.
    _model("Llama 3 8B qkv", 4096, 4096, 6144),
    _model("Llama 3 8B gate", 4096, 4096, 14336, activation="silu"),
    _model("Llama 3 8B down", 4096, 14336, 4096),
    _model("Llama 3 8B logits", 1024, 4096, 128256, out_dtype="float32", tags=("long",)),
    _model("Llama 3 8B gate, 1 token", 1, 4096, 14336, activation="silu"),
    _model("Llama 3 8B gate int8", 4096, 4096, 14336, "int8", scale_a=(4096,), scale_b=(14336,), out_dtype="bfloat16"),
    _model("Llama 3 8B gate fp8", 4096, 4096, 14336, "float8_e4m3fn", scale_a=(4096,), scale_b=(14336,)),
    # Mixtral 8x7B: 8 experts of 4096 -> 14336, here 512 tokens each.
    _case("Mixtral 8x7B experts", (8, 512, 4096), (8, 4096, 14336), "bfloat16", activation="silu", tags=("model",)),
    # BERT base: 32 sequences of 128 tokens.
    _case("BERT base up", (32, 128, 768), (768, 3072), "bfloat16", bias=(3072,), activation="gelu", tags=("model",)),
    _case("BERT base up float32", (32, 128, 768), (768, 3072), bias=(3072,), activation="gelu", tags=("model",)),
    _model("8192 x 8192 x 8192", 8192, 8192, 8192, tags=("long",)),
)

CASES = (*_CONTRACT, *_QUANTIZED, *_MODELS)

_SMALL = Case(
    "small",
    "gemm",
    gemm,
    {
        "a": ArrayInit((8, 9, 20)),
        "b": ArrayInit((20, 24), scale=0.2),
        "bias": ArrayInit((24,)),
        "scale_a": ArrayInit((8, 9), "float32", "positive"),
    },
    {"activation": "gelu"},
)

FACTS = Facts(
    small=_SMALL,
    batched=("a", "scale_a"),
    poison=Poison("100x192x300 float32", "a", axis=-2),
    declines={
        "pallas_tpu": {
            **dict.fromkeys(("float16", "scaled float16"), "`a` is float16"),
            "float64": "`a` is float64",
            "no depth": "an array is empty",
            "no rows": "an array is empty",
            "no batch": "an array is empty",
        },
        "native_cpu": {
            "int8 weight in blocks": "blocks of K",
            "fp8 weight in blocks": "blocks of K",
            "mxfp4 weight": "blocks of K",
            "e2m1 weight": "blocks of K",
            "mxfp8 both": "blocks of K",
            "int4 weight in blocks": "blocks of K",
        },
        "triton": {
            "int4 weight": "`b` is int4",
            "int8 weight in blocks": "blocks of K",
            "fp8 weight in blocks": "blocks of K",
            "mxfp4 weight": "blocks of K",
            "e2m1 weight": "blocks of K",
            "mxfp8 both": "blocks of K",
            "int4 weight in blocks": "blocks of K",
            "float64": "`a` is float64",
            "no depth": "an array is empty",
            "no rows": "an array is empty",
            "no batch": "an array is empty",
        },
    },
    coarser={
        # Three bfloat16 products for one of float32 keep 16 bits; the reference on a CPU keeps 24.
        "high": dict.fromkeys(("pallas_tpu", "native_cpu", "triton"), 2.0**-16),
        # The tensor cores of an H100 cut the float32 sum after every 16 products: 1.9e-5 where entries reach 3.8.
        "Llama 3 8B logits": {"triton": 2.0**-20},
    },
)
