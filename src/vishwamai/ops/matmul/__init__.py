"""Matrix products with a fused epilogue."""

from vishwamai.ops.matmul.api import MATMUL, gemm

__all__ = ["MATMUL", "gemm"]
