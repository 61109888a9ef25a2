"""The operations for torch tensors: on GPUs the Triton kernels, on the CPU the native ones.

>>> import torch, vishwamai.torch
>>> x = torch.ones(2, 4, requires_grad=True)
>>> vishwamai.torch.rms_norm(x).sum().backward()
>>> x.grad.shape
torch.Size([2, 4])
"""

from vishwamai.torch.matmul import gemm
from vishwamai.torch.norm import layer_norm, rms_norm

__all__ = ["gemm", "layer_norm", "rms_norm"]
