"""The operations for torch tensors: on GPUs the Triton kernels, on the CPU the native ones."""

from vishwamai.torch import launch as launch
