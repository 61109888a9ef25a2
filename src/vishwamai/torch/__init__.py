"""The operations for torch tensors: on GPUs the Triton kernels, on the CPU the native ones.

>>> import torch, vishwamai.torch
>>> x = torch.ones(2, 4, requires_grad=True)
>>> vishwamai.torch.rms_norm(x).sum().backward()
>>> x.grad.shape
torch.Size([2, 4])
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vishwamai.torch.torch_private import load_operators_by

if TYPE_CHECKING:
    from vishwamai.torch.activation import fused_gelu_dropout, gelu, relu2, silu
    from vishwamai.torch.attention import block_sparse_attention, flash_attention
    from vishwamai.torch.conv import causal_conv1d
    from vishwamai.torch.delta import gated_delta_rule, linear_attention, state_space
    from vishwamai.torch.einsum import einsum
    from vishwamai.torch.explain import explain
    from vishwamai.torch.gated import gated_linear_unit
    from vishwamai.torch.indexed import indexed_attention, lightning_index
    from vishwamai.torch.loss import linear_cross_entropy
    from vishwamai.torch.matmul import gemm
    from vishwamai.torch.merge import merge_attention
    from vishwamai.torch.moe import grouped_gemm, moe_combine, moe_dispatch, moe_layer, moe_routing
    from vishwamai.torch.norm import layer_norm, rms_norm
    from vishwamai.torch.packed import pack_weight
    from vishwamai.torch.paged_attention import ragged_paged_attention
    from vishwamai.torch.paged_update import update_pages
    from vishwamai.torch.quantization import QTensor, dequantize, fake_quantize, quantize
    from vishwamai.torch.rope import apply_rope, rope_tables
    from vishwamai.torch.sharding import register_sharding
    from vishwamai.torch.softmax import log_softmax, softmax
    from vishwamai.torch.sparse import block_sparse_matmul
    from vishwamai.torch.tuner import tune
    from vishwamai.torch.varlen import flash_attention_varlen

__all__ = [
    "QTensor",
    "apply_rope",
    "block_sparse_attention",
    "block_sparse_matmul",
    "causal_conv1d",
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
    "layer_norm",
    "lightning_index",
    "linear_attention",
    "linear_cross_entropy",
    "log_softmax",
    "merge_attention",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
    "moe_routing",
    "pack_weight",
    "quantize",
    "ragged_paged_attention",
    "register_sharding",
    "relu2",
    "rms_norm",
    "rope_tables",
    "silu",
    "softmax",
    "state_space",
    "tune",
    "update_pages",
]

_MODULES = {
    "activation": "fused_gelu_dropout gelu relu2 silu",
    "attention": "block_sparse_attention flash_attention",
    "conv": "causal_conv1d",
    "delta": "gated_delta_rule linear_attention state_space",
    "einsum": "einsum",
    "explain": "explain",
    "gated": "gated_linear_unit",
    "indexed": "indexed_attention lightning_index",
    "loss": "linear_cross_entropy",
    "matmul": "gemm",
    "merge": "merge_attention",
    "moe": "grouped_gemm moe_combine moe_dispatch moe_layer moe_routing",
    "norm": "layer_norm rms_norm",
    "packed": "pack_weight",
    "paged_attention": "ragged_paged_attention",
    "paged_update": "update_pages",
    "quantization": "QTensor dequantize fake_quantize quantize",
    "rope": "apply_rope rope_tables",
    "sharding": "register_sharding",
    "softmax": "log_softmax softmax",
    "sparse": "block_sparse_matmul",
    "tuner": "tune",
    "varlen": "flash_attention_varlen",
}
_HOMES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names.split()}


class _Package(ModuleType):
    """Keeps the functions `softmax`, `einsum` and `explain` where a file of the same name is imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(importlib.import_module(_HOMES[name]), name))


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _load() -> None:
    """Registers every operator."""
    for home in dict.fromkeys(_HOMES.values()):
        importlib.import_module(home)


load_operators_by(_load)  # for torch.export.load, which looks operators up by their names
