"""The operations and the decorator for CPUs, under one roof; see `vishwamai.kernels`."""

from vishwamai.core.precision import PrecisionConfig
from vishwamai.kernels.decorators import cpu_kernel
from vishwamai.kernels.functions import block_sparse, flash_attention, gemm, layer_norm

__all__ = ["PrecisionConfig", "cpu_kernel", "block_sparse", "flash_attention", "gemm", "layer_norm"]
