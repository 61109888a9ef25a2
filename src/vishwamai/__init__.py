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
from vishwamai.ops.attention import flash_attention
from vishwamai.ops.matmul import gemm
from vishwamai.ops.norm import layer_norm, rms_norm

__version__ = "0.1.0"

__all__ = [
    "DeviceError",
    "FallbackWarning",
    "KernelConfig",
    "KernelError",
    "PrecisionConfig",
    "ShapeError",
    "UnsupportedError",
    "VishwamaiError",
    "current_config",
    "explain",
    "gemm",
    "flash_attention",
    "kernel_config",
    "layer_norm",
    "rms_norm",
]
