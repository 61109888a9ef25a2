"""The operations, the decorator and the layouts for TPUs, under one roof; see `vishwamai.kernels`.

`tpu_custom_call` is a module of its own: `from vishwamai.kernels.tpu.tpu_custom_call import compile_tpu_kernel`.
"""

from vishwamai.core.precision import PrecisionConfig
from vishwamai.kernels.decorators import tpu_kernel
from vishwamai.kernels.functions import block_sparse, flash_attention, gemm, layer_norm
from vishwamai.kernels.tpu.classes import TPUAttentionKernel, TPUGEMMKernel, TPULayerNormKernel
from vishwamai.kernels.tpu.register import register_tpu_op
from vishwamai.kernels.tpu.tiled_layout import from_tiled_layout, to_tiled_layout
from vishwamai.parallel import validate_sharding

__all__ = [
    "PrecisionConfig",
    "TPUAttentionKernel",
    "TPUGEMMKernel",
    "TPULayerNormKernel",
    "block_sparse",
    "flash_attention",
    "from_tiled_layout",
    "gemm",
    "layer_norm",
    "register_tpu_op",
    "to_tiled_layout",
    "tpu_kernel",
    "validate_sharding",
]
