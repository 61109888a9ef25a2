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
from vishwamai.ops.attention import BlockMask, block_sparse_attention, flash_attention
from vishwamai.ops.matmul import gemm
from vishwamai.ops.norm import layer_norm, rms_norm
from vishwamai.ops.quantization import dequantize, fake_quantize, quantize

__version__ = "0.1.0"

__all__ = [
    "BlockMask",
    "DeviceError",
    "FallbackWarning",
    "KernelConfig",
    "KernelError",
    "PrecisionConfig",
    "QTensor",
    "ShapeError",
    "UnsupportedError",
    "VishwamaiError",
    "block_sparse_attention",
    "current_config",
    "dequantize",
    "explain",
    "fake_quantize",
    "gemm",
    "flash_attention",
    "kernel_config",
    "layer_norm",
    "quantize",
    "rms_norm",
]
