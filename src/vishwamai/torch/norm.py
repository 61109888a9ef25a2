"""`layer_norm` and `rms_norm` of torch tensors, as custom operators with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.norm.api import NORM
from vishwamai.ops.norm.spec import NormSpec, Operands, Outputs, make_spec
from vishwamai.torch import bridge

_NAMES: Any = {"layer": "layer_norm", "rms": "rms_norm"}


def _rows(x: Tensor | None, spec: NormSpec) -> Tensor | None:
    return None if x is None else x.contiguous().reshape(spec.operands.x.shape)


def _parameter(p: Tensor | None) -> Tensor | None:
    return None if p is None else p.contiguous()[None]


@torch.library.custom_op("vishwamai::norm", mutates_args=())
def norm(
    x: Tensor, scale: Tensor | None, offset: Tensor | None, residual: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor]:
    """(y, x + residual); the second is empty where there is no residual. See `layer_norm`."""
    spec = make_spec(_NAMES[kind], kind, x, residual, scale, offset, eps)  # type: ignore[arg-type]
    operands = Operands(_rows(x, spec), _rows(residual, spec), _parameter(scale), _parameter(offset))
    outputs, _ = bridge.forward(bridge.choose(NORM, spec, x), spec, operands)
    total = x.new_empty(0) if outputs.total is None else outputs.total.reshape(x.shape)
    return outputs.y.reshape(x.shape), total


@norm.register_fake
def _(x: Tensor, scale: Any, offset: Any, residual: Tensor | None, kind: str, eps: float) -> tuple[Tensor, Tensor]:
    del scale, offset, kind, eps
    y = x.new_empty(x.shape)
    return y, x.new_empty(0) if residual is None else torch.empty_like(y)


@torch.library.custom_op("vishwamai::norm_backward", mutates_args=())
def norm_backward(
    dy: Tensor, dtotal: Tensor | None, s: Tensor, scale: Tensor | None, offset: Tensor | None, kind: str, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of s = x + residual, of scale and of offset; empty for an absent one. The statistics are computed again from `s`."""
    spec = make_spec(_NAMES[kind], kind, s, None if dtotal is None else s, scale, offset, eps)  # type: ignore[arg-type]
    choice = bridge.choose(NORM, spec, s)
    rows = _rows(s, spec)
    # A kernel reads `total`; the reference adds the two again, to the same sum.
    other = rows if choice.implementation.platform is not None else torch.zeros_like(s).reshape(spec.operands.x.shape)
    operands = Operands(rows, None if dtotal is None else other, _parameter(scale), _parameter(offset))
    outputs = Outputs(rows, None if dtotal is None else rows)
    cotangents = Outputs(_rows(dy, spec), _rows(dtotal, spec))
    gradients = bridge.backward(choice, spec, operands, outputs, None, cotangents)

    def vector(gradient: Tensor | None) -> Tensor:
        return s.new_empty(0) if gradient is None else gradient[0]

    return gradients.x.reshape(s.shape), vector(gradients.scale), vector(gradients.offset)


@norm_backward.register_fake
def _(dy: Tensor, dtotal: Any, s: Tensor, scale: Any, offset: Any, kind: str, eps: float) -> tuple[Tensor, ...]:
    del dy, dtotal, kind, eps

    def vector(p: Tensor | None) -> Tensor:
        return s.new_empty(0) if p is None else p.new_empty(p.shape)

    return s.new_empty(s.shape), vector(scale), vector(offset)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, scale, offset, residual, ctx.kind, ctx.eps = inputs
    ctx.has_residual = residual is not None
    ctx.set_materialize_grads(False)  # a `total` that nobody uses costs no array of zeros
    ctx.save_for_backward(output[1] if ctx.has_residual else x, scale, offset)


def _gradient(ctx: Any, dy: Tensor | None, dtotal: Tensor | None) -> tuple[Any, ...]:
    s, scale, offset = ctx.saved_tensors
    if not ctx.has_residual:
        dtotal = None
    if dy is None:
        dy = torch.zeros_like(s)
    ds, dscale, doffset = norm_backward(dy, dtotal, s, scale, offset, ctx.kind, ctx.eps)
    return (
        ds,
        None if scale is None else dscale,
        None if offset is None else doffset,
        ds if ctx.has_residual else None,
        None,
        None,
    )


bridge.register_autograd(norm, _gradient, _setup)


def layer_norm(
    x: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
) -> Any:
    """Layer normalization over the last axis, of `x + residual` if that is given; see `vishwamai.layer_norm`.

    Args:
      x: `[..., features]`, bfloat16, float16 or float32 (float64 on the CPU).
      scale: `[features]`, or None for 1.
      offset: `[features]`, or None for 0.
      eps: added to the variance.
      residual: like `x`; added before normalizing, and the sum is returned too.

    Returns:
      `y`, of the shape and dtype of `x`; with `residual`, the pair `(y, x + residual)`.

    Raises:
      ShapeError: an argument does not fit `x`.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]]))
    tensor([[-1.0690, -0.5345,  0.0000,  1.6036]])
    """
    y, total = norm(x, scale, offset, residual, "layer", eps)
    return y if residual is None else (y, total)


def rms_norm(
    x: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
) -> Any:
    """Root-mean-square normalization over the last axis; see `vishwamai.rms_norm`. Arguments and errors are those of `layer_norm`.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    y, total = norm(x, scale, offset, residual, "rms", eps)
    return y if residual is None else (y, total)
