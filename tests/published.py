"""Quantized checkpoints in the formats in which they are published, with the plain weights that the formats define."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from vishwamai.models import Decoder, ModelConfig, save_pretrained

LLAMA = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "intermediate_size": 32,
    "head_dim": 16,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
}
MOE = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "head_dim": 16,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
RNG = np.random.default_rng(0)
Tensors = dict[str, np.ndarray]


def packed(numbers: np.ndarray, places: list[int]) -> np.ndarray:
    """int32 words of eight 4-bit numbers each along the last axis; number i lies at place `places[i]`."""
    words = np.zeros((*numbers.shape[:-1], numbers.shape[-1] // 8), np.uint32)
    for i, place in enumerate(places):
        words |= numbers[..., i::8].astype(np.uint32) << np.uint32(4 * place)
    return words.view(np.int32)


def fp8(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    weight = RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    scales = RNG.uniform(0.1, 0.2, (-(-shape[0] // 10), -(-shape[1] // 32))).astype(np.float32)
    plain = weight.astype(np.float32)
    for i in range(shape[0]):
        for j in range(shape[1]):
            plain[i, j] *= scales[i // 10, j // 32]
    return {name: weight, f"{name}_scale_inv": scales}, plain


def compressed(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    weight = RNG.integers(-128, 128, shape).astype(np.int8)
    scales = RNG.uniform(0.001, 0.003, (shape[0], 1)).astype(ml_dtypes.bfloat16)
    return {name: weight, f"{name}_scale": scales}, weight * scales.astype(np.float32)


def compressed_packed(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """4 bits, plus 8, in groups of 32."""
    stem = name.removesuffix(".weight")
    values, scales = RNG.integers(-8, 8, shape), _scales((shape[0], shape[1] // 32)).astype(ml_dtypes.bfloat16)
    return {
        f"{stem}.weight_packed": packed(values + 8, list(range(8))),
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": np.array(shape, np.int64),
    }, (values * scales.astype(np.float32).repeat(32, 1)).astype(np.float32)


def _scales(shape: tuple[int, ...]) -> np.ndarray:
    """Of 4-bit numbers, so that weights are about 0.1."""
    return RNG.uniform(0.01, 0.04, shape)


def gptq(
    name: str, shape: tuple[int, ...], zero: int | None = None, ordered: bool = True
) -> tuple[Tensors, np.ndarray]:
    """Groups of 32 rows, neighbours or in any order (`desc_act`).

    Args:
      zero: of all groups, or None for zero points of their own.
    """
    columns, rows = shape
    stem, groups = name.removesuffix(".weight"), rows // 32
    values = RNG.integers(0, 16, (rows, columns))
    zeros = RNG.integers(1, 17, (groups, columns)) if zero is None else np.full((groups, columns), zero)
    scales = _scales((groups, columns)).astype(np.float16)
    group = (np.arange(rows) // 32).astype(np.int32)
    group = group if ordered else RNG.permutation(group)
    plain = (values - zeros[group]) * scales[group].astype(np.float32)
    return {
        f"{stem}.qweight": np.ascontiguousarray(packed(values.T, list(range(8))).T),
        f"{stem}.qzeros": packed(zeros - 1, list(range(8))),
        f"{stem}.scales": scales,
        f"{stem}.g_idx": group,
    }, np.ascontiguousarray(plain.T.astype(np.float32))


def awq(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    columns, rows = shape
    stem = name.removesuffix(".weight")
    values, zeros = RNG.integers(0, 16, (rows, columns)), RNG.integers(0, 16, (2, columns))
    scales = _scales((2, columns)).astype(np.float16)
    places = [0, 4, 1, 5, 2, 6, 3, 7]
    plain = np.stack(
        [(values[i] - zeros[2 * i // rows]) * scales[2 * i // rows].astype(np.float32) for i in range(rows)]
    )
    return {
        f"{stem}.qweight": packed(values, places),
        f"{stem}.qzeros": packed(zeros, places),
        f"{stem}.scales": scales,
    }, np.ascontiguousarray(plain.T)


def mxfp4(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """The plain weights are those that transformers makes of the same bits."""
    import torch
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = RNG.integers(0, 256, (shape[0], shape[2], shape[1] // 32, 16)).astype(np.uint8)
    scales = RNG.integers(120, 125, blocks.shape[:-1]).astype(np.uint8)
    plain = convert_moe_packed_tensors(torch.as_tensor(blocks), torch.as_tensor(scales), dtype=torch.float32)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, np.ascontiguousarray(plain.numpy())


def scaled(
    name: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None,
    suffix: str = "scale",
    scalar: tuple[int, ...] = (),
) -> tuple[Tensors, np.ndarray]:
    """float8 with a scale for blocks, or one of shape `scalar` for the weight, and one of the input."""
    weight = RNG.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
    sizes = scalar if block is None else tuple(-(-n // b) for n, b in zip(shape, block))
    scales = RNG.uniform(0.1, 0.2, sizes).astype(np.float32)
    each = scales.reshape(1, 1) if block is None else scales.repeat(block[0], 0)[: shape[0]].repeat(block[1], 1)
    plain = weight.astype(np.float32) * (each if block is None else each[:, : shape[1]])
    stem = name.removesuffix(".weight")
    others = {} if block is not None else {f"{stem}.input_scale": np.array([0.3], np.float32)}
    return {name: weight, f"{name}_{suffix}": scales, **others}, plain


def packed_groups(name: str, shape: tuple[int, ...], size: int | None, bits: int = 4) -> tuple[Tensors, np.ndarray]:
    """4 or 8 bits, plus 8 or 128, in groups of `size`, of which the last may be smaller; rows filled up to whole
    words.
    """
    stem, (out, columns) = name.removesuffix(".weight"), shape
    size = size or columns
    offset, each = 2 ** (bits - 1), 32 // bits
    values = RNG.integers(-offset, offset, shape)
    scales = _scales((out, -(-columns // size))).astype(ml_dtypes.bfloat16)
    filled = np.pad(values + offset, ((0, 0), (0, -columns % each)))
    words = packed(filled, list(range(8))) if bits == 4 else filled.astype(np.uint8).view("<i4")
    return {
        f"{stem}.weight_packed": words,
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_shape": np.array(shape, np.int64),
    }, (values * scales.astype(np.float32).repeat(size, 1)[:, :columns]).astype(np.float32)


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def nvfp4(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    """As modelopt writes it: pairs in bytes, e4m3 scales of 16 numbers, and a float32 that multiplies them."""
    out, columns = shape
    packed = RNG.integers(0, 256, (out, columns // 2)).astype(np.uint8)
    scales = RNG.uniform(8, 400, (out, columns // 16)).astype(ml_dtypes.float8_e4m3fn)
    factor = np.float32(0.0001234)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(shape)
    plain = E2M1[codes] * (scales.astype(np.float32) * factor).repeat(16, 1)
    stem = name.removesuffix(".weight")
    return {
        name: packed,
        f"{stem}.weight_scale": scales,
        f"{stem}.weight_scale_2": np.array(factor),
        f"{stem}.input_scale": np.array(0.5, np.float32),
    }, plain


def by_library(
    name: str, shape: tuple[int, ...], scale_dtype: str = "float32", **weights: Any
) -> tuple[Tensors, np.ndarray]:
    """What the library compressed-tensors makes of a weight, and what it reads of it."""
    import torch
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    form = weights.pop("form")
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    out, columns = shape
    size = weights.get("group_size") or columns
    weight = RNG.normal(size=shape).astype(np.float32) * 0.1
    asymmetric = weights.get("symmetric") is False
    floats = weights.get("type") == "float"
    largest = 6.0 if floats else 2.0 ** (weights["num_bits"] - 1) - 1
    blocks = np.abs(weight).reshape(out, -1, size).max(-1)
    scales = blocks / (largest * (0.5 if asymmetric else 1))
    state = {"weight": torch.tensor(weight)}
    if form == "nvfp4-pack-quantized":
        state["weight_global_scale"] = torch.tensor([448 / scales.max()], dtype=torch.float32)
        scales = scales * float(state["weight_global_scale"])
    if form == "mxfp4-pack-quantized":
        scales = 2.0 ** np.ceil(np.log2(scales))
    dtype = {"nvfp4-pack-quantized": torch.float8_e4m3fn}.get(form, torch.float32)
    state["weight_scale"] = torch.tensor(scales, dtype=torch.float32).to(dtype).float()
    if asymmetric:
        bound = 2 ** (weights["num_bits"] - 1)
        state["weight_zero_point"] = torch.tensor(RNG.integers(-bound // 2, bound // 2, scales.shape).astype(np.int8))
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(dict(state), scheme)
    plain = compressor.decompress(dict(tensors), scheme)["weight"].float().numpy()
    stem, stored = name.removesuffix(".weight"), {}
    for part, tensor in tensors.items():
        array = tensor.detach()
        kind = getattr(ml_dtypes, str(array.dtype).removeprefix("torch."), None)
        numpy = array.view(torch.uint8).numpy().view(kind) if array.dtype.itemsize == 1 and kind else array.numpy()
        stored[f"{stem}.{part}"] = np.ascontiguousarray(numpy)
    if floats:  # the library computes these in bfloat16
        exact = _four_bit_floats(stored, stem)
        np.testing.assert_allclose(plain, exact, rtol=2**-7)
        plain = exact
    return stored, plain


def _four_bit_floats(tensors: Tensors, stem: str) -> np.ndarray:
    packed, scales = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), -1)]
    if scales.dtype == np.uint8:
        factors = np.exp2(scales.astype(np.float32) - 127)
    else:
        factors = scales.astype(np.float32) / tensors[f"{stem}.weight_global_scale"]
    return values * factors.repeat(values.shape[1] // factors.shape[1], 1)


def bitsandbytes(name: str, shape: tuple[int, ...], nested: bool = False) -> tuple[Tensors, np.ndarray]:
    """Codes of a table, of which a byte has two, the first in its high bits."""
    count = shape[0] * shape[1]
    table = np.sort(RNG.uniform(-1, 1, 16)).astype(np.float32)
    codes = RNG.integers(0, 16, count)
    largest = RNG.uniform(0.05, 0.2, -(-count // 64)).astype(np.float32)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(shape)}
    tensors: Tensors = {"absmax": largest, "quant_map": table}
    if nested:
        outer = RNG.uniform(0.5, 1, -(-len(largest) // 256)).astype(np.float32)
        levels, index = np.linspace(-0.1, 0.1, 256, dtype=np.float32), RNG.integers(0, 256, len(largest))
        largest = levels[index] * outer[np.arange(len(index)) // 256] + np.float32(0.15)
        tensors |= {"absmax": index.astype(np.uint8), "nested_absmax": outer, "nested_quant_map": levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.15}
    tensors["quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    plain = table[codes] * largest.repeat(64)[:count]
    packed = (codes[0::2] << 4 | codes[1::2]).astype(np.uint8)[:, None]
    return {name: packed, **{f"{name}.{key}": value for key, value in tensors.items()}}, plain.reshape(shape)


def bitsandbytes_rows(name: str, shape: tuple[int, ...]) -> tuple[Tensors, np.ndarray]:
    weight = RNG.integers(-127, 128, shape).astype(np.int8)
    largest = RNG.uniform(0.1, 0.3, shape[0]).astype(np.float32)
    stem = name.removesuffix(".weight")
    tensors = {name: weight, f"{stem}.SCB": largest, f"{stem}.weight_format": np.array(0, np.uint8)}
    return tensors, (weight * (largest / 127)[:, None]).astype(np.float32)


def gptq_of(name: str, shape: tuple[int, ...], bits: int) -> tuple[Tensors, np.ndarray]:
    """GPTQ with numbers of `bits`, which lie next to one another in words along the input."""
    columns, rows = shape
    values, zeros = (RNG.integers(0, 2**bits, (n, columns)) for n in (rows, rows // 32))
    scales = (_scales(zeros.shape) * 16 / 2**bits).astype(np.float16)

    def words(numbers: np.ndarray) -> np.ndarray:  # of rows of numbers
        each = (numbers[..., None] >> np.arange(bits)) & 1
        return np.packbits(each.reshape(len(numbers), -1), axis=-1, bitorder="little").view(np.int32)

    stem = name.removesuffix(".weight")
    plain = (values - (zeros + 1).repeat(32, 0)) * scales.astype(np.float32).repeat(32, 0)
    return {
        f"{stem}.qweight": np.ascontiguousarray(words(values.T).T),
        f"{stem}.qzeros": words(zeros),
        f"{stem}.scales": scales,
    }, np.ascontiguousarray(plain.T.astype(np.float32))


def _weights(**values: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"input_activations": {"num_bits": 8}, "weights": values}}}


_GPTQ = {"quant_method": "gptq", "bits": 4}
_COMPRESSED = {"quant_method": "compressed-tensors"}
FORMATS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "fp8": (fp8, LLAMA, {"quant_method": "fp8", "weight_block_size": [10, 32]}, "fp8_e4m3 in blocks of 32"),
    "compressed-tensors": (compressed, LLAMA, {**_COMPRESSED, "format": "int-quantized"}, "int8"),
    "pack-quantized": (
        compressed_packed,
        LLAMA,
        {**_COMPRESSED, "format": "pack-quantized"},
        "int4 in blocks of 32",
    ),
    "gptq": (gptq, LLAMA, {**_GPTQ, "sym": False}, "int8 in blocks of 32"),
    "gptq-symmetric": (functools.partial(gptq, zero=8), LLAMA, {**_GPTQ, "sym": True}, "int4 in blocks of 32"),
    "gptq-desc-act": (functools.partial(gptq, ordered=False), LLAMA, {**_GPTQ, "desc_act": True}, ""),
    "awq": (awq, LLAMA, {"quant_method": "awq", "bits": 4, "version": "gemm"}, "int8 in blocks of ROWS / 2"),
    "mxfp4": (mxfp4, GPT_OSS, {"quant_method": "mxfp4"}, "mxfp4 in blocks of 32"),
}
"""By name: what makes the tensors of a weight, the model, `quantization_config`, and the `QTensor` that holds a weight
exactly ("" where none does).
"""

_FLOAT4 = {"num_bits": 4, "type": "float"}
_ASYMMETRIC = {"symmetric": False, "group_size": 32}
_PACKED = {**_COMPRESSED, "format": "pack-quantized"}
FURTHER: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "fp8-static": (
        functools.partial(scaled, block=None, suffix="scale_inv"),
        LLAMA,
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "",
    ),
    "fp8-tensor": (functools.partial(scaled, block=None, scalar=(1,)), LLAMA, {"quant_method": "fp8"}, ""),
    "modelopt": (functools.partial(scaled, block=None), LLAMA, {"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, ""),
    "compressed-tensor": (
        functools.partial(scaled, block=None, scalar=(1,)),
        LLAMA,
        {**_COMPRESSED, "format": "float-quantized", **_weights(strategy="tensor")},
        "",
    ),
    "compressed-block": (
        functools.partial(scaled, block=(10, 32)),
        LLAMA,
        {**_COMPRESSED, "format": "float-quantized", **_weights(strategy="block", block_structure="10x32")},
        "",
    ),
    "compressed-group": (
        functools.partial(scaled, block=(1, 40)),
        LLAMA,
        {**_COMPRESSED, "format": "float-quantized", **_weights(strategy="group", group_size=40)},
        "",
    ),
    "packed-groups": (
        functools.partial(packed_groups, size=64),
        LLAMA,
        {**_PACKED, **_weights(strategy="group", group_size=64)},
        "",
    ),
    "packed-columns": (
        functools.partial(packed_groups, size=None),
        {**LLAMA, "intermediate_size": 36},
        {**_PACKED, **_weights(strategy="channel", group_size=None)},
        "",
    ),
    "packed-8-bits": (
        functools.partial(packed_groups, size=32, bits=8),
        LLAMA,
        {**_PACKED, **_weights(strategy="group", group_size=32, num_bits=8)},
        "",
    ),
    "modelopt-nvfp4": (nvfp4, LLAMA, {"quant_algo": "NVFP4", "quant_method": "modelopt"}, ""),
    "nvfp4-experts": (nvfp4, MOE, {"quant_algo": "NVFP4", "quant_method": "modelopt"}, ""),
    **{
        name: (
            functools.partial(by_library, form=form, **weights),
            LLAMA,
            {**_COMPRESSED, "format": form, **_weights(**weights)},
            "",
        )
        for name, form, weights in (
            ("compressed-nvfp4", "nvfp4-pack-quantized", {**_FLOAT4, "strategy": "tensor_group", "group_size": 16}),
            ("compressed-mxfp4", "mxfp4-pack-quantized", {**_FLOAT4, "strategy": "group", "group_size": 32}),
            ("compressed-asymmetric", "pack-quantized", {"num_bits": 4, "strategy": "group", **_ASYMMETRIC}),
            ("compressed-3-bits", "pack-quantized", {"num_bits": 3, "strategy": "channel"}),
            ("compressed-bytes-asymmetric", "int-quantized", {"num_bits": 4, "strategy": "group", **_ASYMMETRIC}),
        )
    },
    "bitsandbytes-8-bits": (bitsandbytes_rows, LLAMA, {"quant_method": "bitsandbytes", "load_in_8bit": True}, ""),
    "gptq-2-bits": (functools.partial(gptq_of, bits=2), LLAMA, {**_GPTQ, "bits": 2, "group_size": 32}, ""),
    "gptq-3-bits": (functools.partial(gptq_of, bits=3), LLAMA, {**_GPTQ, "bits": 3, "group_size": 32}, ""),
    "gptq-experts": (functools.partial(gptq, zero=8), MOE, {**_GPTQ, "sym": True, "group_size": 32}, ""),
    "awq-experts": (awq, MOE, {"quant_method": "awq", "bits": 4, "version": "gemm"}, ""),
    "fp8-experts": (fp8, MOE, {"quant_method": "fp8", "weight_block_size": [10, 32]}, ""),
    "packed-experts": (compressed_packed, MOE, {**_PACKED, **_weights(strategy="group", group_size=32)}, ""),
}
"""As `FORMATS`: options of its formats that publishers use."""

_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
PLAIN_ONLY: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "bitsandbytes": (bitsandbytes, {**LLAMA, "intermediate_size": 100}, _BNB, ""),
    "bitsandbytes-nested": (functools.partial(bitsandbytes, nested=True), LLAMA, _BNB, ""),
    "gptq-8-bits": (functools.partial(gptq_of, bits=8), LLAMA, {**_GPTQ, "bits": 8, "group_size": 32}, ""),
}
"""As `FORMATS`: those whose numbers no `QTensor` has."""


def write(name: str, directory: Path, **changed: Any) -> tuple[Path, Path]:
    """A published directory, and the plain one that it must equal; `changed`: of the model."""
    encode, values, settings, _ = {**FORMATS, **FURTHER, **PLAIN_ONLY}[name]
    save_pretrained(Decoder(ModelConfig.from_dict({**values, **changed}), rngs=nnx.Rngs(0)), directory / "plain")
    plain = load_file(directory / "plain" / "model.safetensors")
    published: Tensors = {}
    for key, value in list(plain.items()):
        chosen = key.endswith(("gate_up_proj", "experts.down_proj")) if name == "mxfp4" else "_proj.weight" in key
        if not chosen:
            published[key] = value
            continue
        tensors, plain[key] = encode(key, value.shape)
        published |= tensors
    (directory / "published").mkdir()
    save_file(published, directory / "published" / "model.safetensors")
    save_file(plain, directory / "plain" / "model.safetensors")
    config = json.loads((directory / "plain" / "config.json").read_text())
    (directory / "published" / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return directory / "published", directory / "plain"
