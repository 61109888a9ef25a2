"""Transformer kernels with one interface on TPU, GPU and CPU.

A name's module is loaded when the name is first used (PEP 562), so that `import vishwamai` is cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the table below, as tools read it
    from vishwamai.core.config import KernelConfig, current_config, kernel_config
    from vishwamai.core.errors import (
        DeviceError,
        FallbackWarning,
        KernelError,
        ShapeError,
        UnsupportedError,
        VishwamaiError,
    )
    from vishwamai.core.explain import explain
    from vishwamai.core.precision import PrecisionConfig
    from vishwamai.core.qtensor import QTensor
    from vishwamai.core.quantized.code_tensor import CodeFormat, CodeTensor
    from vishwamai.core.quantized.packed_qtensor import PackedQTensor
    from vishwamai.ops.activation import fused_gelu_dropout, gelu, relu2, silu
    from vishwamai.ops.attention import (
        BlockMask,
        block_sparse_attention,
        flash_attention,
        flash_attention_varlen,
        merge_attention,
    )
    from vishwamai.ops.conv import causal_conv1d
    from vishwamai.ops.delta import gated_delta_rule, linear_attention, state_space
    from vishwamai.ops.gated import gated_linear_unit
    from vishwamai.ops.indexed import indexed_attention, lightning_index
    from vishwamai.ops.loss import linear_cross_entropy
    from vishwamai.ops.matmul import gemm
    from vishwamai.ops.matmul.einsum import einsum
    from vishwamai.ops.matmul.packed_weight import PackedWeight, pack_weight
    from vishwamai.ops.moe import grouped_gemm, moe_combine, moe_dispatch, moe_layer, moe_routing
    from vishwamai.ops.norm import layer_norm, rms_norm
    from vishwamai.ops.paged_attention import ragged_paged_attention, update_pages
    from vishwamai.ops.quantization import dequantize, fake_quantize, load_codes, quantize, save_codes
    from vishwamai.ops.rope import (
        LinearScaling,
        Llama3Scaling,
        LongRopeScaling,
        MRopeScaling,
        NtkScaling,
        RotaryCache,
        YarnScaling,
        apply_rope,
    )
    from vishwamai.ops.softmax import log_softmax, softmax
    from vishwamai.ops.sparse import block_sparse_matmul

__version__ = "0.2.0.dev0"

__all__ = [
    "BlockMask",
    "CodeFormat",
    "CodeTensor",
    "DeviceError",
    "FallbackWarning",
    "KernelConfig",
    "KernelError",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MRopeScaling",
    "NtkScaling",
    "PackedQTensor",
    "PackedWeight",
    "PrecisionConfig",
    "QTensor",
    "RotaryCache",
    "ShapeError",
    "UnsupportedError",
    "VishwamaiError",
    "YarnScaling",
    "apply_rope",
    "block_sparse_attention",
    "block_sparse_matmul",
    "causal_conv1d",
    "current_config",
    "dequantize",
    "einsum",
    "explain",
    "fake_quantize",
    "flash_attention",
    "flash_attention_varlen",
    "fused_gelu_dropout",
    "gated_delta_rule",
    "gated_linear_unit",
    "gelu",
    "gemm",
    "grouped_gemm",
    "indexed_attention",
    "kernel_config",
    "layer_norm",
    "lightning_index",
    "linear_attention",
    "linear_cross_entropy",
    "load_codes",
    "log_softmax",
    "merge_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
    "moe_routing",
    "pack_weight",
    "quantize",
    "ragged_paged_attention",
    "relu2",
    "rms_norm",
    "save_codes",
    "silu",
    "softmax",
    "state_space",
    "update_pages",
]

_MODULES = {
    "core.quantized.code_tensor": "CodeFormat CodeTensor",
    "core.config": "KernelConfig current_config kernel_config",
    "core.errors": "DeviceError FallbackWarning KernelError ShapeError UnsupportedError VishwamaiError",
    "core.explain": "explain",
    "core.quantized.packed_qtensor": "PackedQTensor",
    "core.precision": "PrecisionConfig",
    "core.qtensor": "QTensor",
    "ops.activation": "fused_gelu_dropout gelu relu2 silu",
    "ops.attention": "BlockMask block_sparse_attention flash_attention flash_attention_varlen merge_attention",
    "ops.conv": "causal_conv1d",
    "ops.delta": "gated_delta_rule linear_attention state_space",
    "ops.gated": "gated_linear_unit",
    "ops.indexed": "indexed_attention lightning_index",
    "ops.loss": "linear_cross_entropy",
    "ops.matmul": "gemm",
    "ops.matmul.einsum": "einsum",
    "ops.matmul.packed_weight": "PackedWeight pack_weight",
    "ops.moe": "grouped_gemm moe_combine moe_dispatch moe_layer moe_routing",
    "ops.norm": "layer_norm rms_norm",
    "ops.paged_attention": "ragged_paged_attention update_pages",
    "ops.quantization": "dequantize fake_quantize load_codes quantize save_codes",
    "ops.rope": "LinearScaling Llama3Scaling LongRopeScaling MRopeScaling NtkScaling RotaryCache YarnScaling "
    "apply_rope",
    "ops.softmax": "log_softmax softmax",
    "ops.sparse": "block_sparse_matmul",
}

_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}
_PACKAGES = ("core", "ops")


def __getattr__(name: str) -> Any:
    if name in ("KernelConfig", "kernel_config"):  # a config names implementations, which the operations bring
        for home in _HOMES.values():
            importlib.import_module(home)
    if name in _HOMES:
        attribute = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _PACKAGES:
        attribute = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
