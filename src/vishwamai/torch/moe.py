"""`grouped_gemm` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.spec import array_spec
from vishwamai.ops.moe.api import MOE
from vishwamai.ops.moe.spec import GroupedSpec, Operands, Outputs, flat_shape, make_spec
from vishwamai.torch import bridge

_spec = functools.lru_cache(maxsize=1024)(make_spec)


def _described(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, out_dtype: str) -> tuple[GroupedSpec, Operands]:
    """The spec, and the caller's tensors in its layout. The sizes stay where they are."""
    spec = _spec(array_spec(lhs), array_spec(rhs), array_spec(group_sizes), out_dtype or None)
    operands = Operands(
        lhs.contiguous().reshape(flat_shape(tuple(lhs.shape), 2)),
        rhs.contiguous().reshape(flat_shape(tuple(rhs.shape), 3)),
        group_sizes.to(torch.int32).contiguous().reshape(flat_shape(tuple(group_sizes.shape), 1)),
    )
    return spec, operands


@torch.library.custom_op("vishwamai::grouped_gemm", mutates_args=())
def _grouped_gemm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, out_dtype: str) -> Tensor:
    """See `grouped_gemm`; `out_dtype` is "" for that of lhs."""
    spec, operands = _described(lhs, rhs, group_sizes, out_dtype)
    outputs, _ = bridge.forward(bridge.choose(MOE, spec, lhs), spec, operands)
    return outputs.out.reshape(*lhs.shape[:-1], rhs.shape[-1])


@_grouped_gemm.register_fake
def _(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, out_dtype: str) -> Tensor:
    del group_sizes
    return lhs.new_empty((*lhs.shape[:-1], rhs.shape[-1]), dtype=getattr(torch, out_dtype) if out_dtype else lhs.dtype)


@torch.library.custom_op("vishwamai::grouped_gemm_backward", mutates_args=())
def _grouped_gemm_backward(dout: Tensor, lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of lhs and rhs."""
    spec, operands = _described(lhs, rhs, group_sizes, str(dout.dtype).removeprefix("torch."))
    cotangent = dout.contiguous().reshape(spec.batch, spec.m, spec.n)
    choice = bridge.choose(MOE, spec, lhs)
    # Neither pass reads the result, but JAX wants one of its shape.
    gradients = bridge.backward(choice, spec, operands, Outputs(cotangent), None, Outputs(cotangent))
    return gradients.lhs.reshape(lhs.shape), gradients.rhs.reshape(rhs.shape)


@_grouped_gemm_backward.register_fake
def _(dout: Tensor, lhs: Tensor, rhs: Tensor, group_sizes: Tensor) -> tuple[Tensor, Tensor]:
    del dout, group_sizes
    return lhs.new_empty(lhs.shape), rhs.new_empty(rhs.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    lhs, rhs, group_sizes, _ = inputs
    ctx.save_for_backward(lhs, rhs, group_sizes)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return *_grouped_gemm_backward(dout, *ctx.saved_tensors), None, None


bridge.register_autograd(_grouped_gemm, _gradient, _setup)


def grouped_gemm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Matrix product whose rows are in consecutive groups, each with its own right-hand matrix; see `vishwamai.grouped_gemm`.

    On a GPU the host never waits for the sizes, so the call can be captured with whatever computes them.

    Args:
      lhs: `[..., M, K]`, bfloat16, float16 or float32 (float64 on the CPU).
      rhs: `[G, K, N]`, or `[..., G, K, N]` with the batch axes of `lhs`; of the dtype of `lhs`.
      group_sizes: `[G]` or `[..., G]`, integers: rows of each group, on the device of `lhs`.
      out_dtype: of the result; None for that of `lhs`.

    Returns:
      `[..., M, N]`: row i times the matrix of its group; 0 in rows after the last group. Gradients: 0 in such rows of `lhs`, and for a group of no rows.

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> rows = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    >>> grouped_gemm(rows, torch.tensor([[[10.0]], [[7.0]], [[100.0]]]), torch.tensor([1, 0, 2]))[:, 0]
    tensor([ 10., 200., 300.,   0.])
    """
    if out_dtype is None and lhs.dtype == torch.float32:
        out_dtype = torch.float32  # whatever the ambient `use_bfloat16` makes of the operands
    lhs, rhs = bridge.narrowed(lhs, rhs)
    return _grouped_gemm(lhs, rhs, group_sizes, "" if out_dtype is None else str(out_dtype).removeprefix("torch."))
