"""Transformer kernels with one interface on TPU, GPU and CPU."""

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
from vishwamai.ops.activation import fused_gelu_dropout, gelu, relu2, silu
from vishwamai.ops.attention import BlockMask, block_sparse_attention, flash_attention
from vishwamai.ops.gated import gated_linear_unit
from vishwamai.ops.loss import linear_cross_entropy
from vishwamai.ops.matmul import gemm
from vishwamai.ops.matmul.einsum import einsum
from vishwamai.ops.matmul.packed import PackedWeight, pack_weight
from vishwamai.ops.moe import grouped_gemm, moe_combine, moe_dispatch, moe_layer, moe_routing
from vishwamai.ops.norm import layer_norm, rms_norm
from vishwamai.ops.paged_attention import ragged_paged_attention, update_pages
from vishwamai.ops.quantization import dequantize, fake_quantize, quantize
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

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "DeviceError",
    "FallbackWarning",
    "KernelConfig",
    "KernelError",
    "LinearScaling",
    "Llama3Scaling",
    "LongRopeScaling",
    "MRopeScaling",
    "NtkScaling",
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
    "current_config",
    "dequantize",
    "einsum",
    "explain",
    "fake_quantize",
    "flash_attention",
    "fused_gelu_dropout",
    "gated_linear_unit",
    "gelu",
    "gemm",
    "grouped_gemm",
    "kernel_config",
    "layer_norm",
    "linear_cross_entropy",
    "log_softmax",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
    "moe_routing",
    "pack_weight",
    "quantize",
    "ragged_paged_attention",
    "relu2",
    "rms_norm",
    "silu",
    "softmax",
    "update_pages",
]
