"""`layer_norm` and `rms_norm` of torch tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.norm.api import NORM
from vishwamai.ops.norm.spec import SIGNATURE, Outputs, check_offset, describe
from vishwamai.torch import autocast
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator

_norm = TorchOperator(
    NORM,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x", "scale", "offset"),
    saves=lambda call: ("x" if call.operands.residual is None else "total", "scale", "offset"),
    stand_ins={"x": "total", "residual": "d_total"},
    same={"residual": "x"},
    # A kernel reads `total`; the definition adds the two again, to the same sum.
    definition=lambda o: o if o.residual is None else o._replace(residual=torch.zeros_like(o.x)),
    optional=("total",),
)


@checked
def layer_norm(
    x: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    eps: float = 1e-6,
    residual: Tensor | None = None,
) -> Any:
    """Layer normalization over the last axis, of `x + residual` if that is given; see `vishwamai.layer_norm`.

    Arguments, results and errors are those of JAX's.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 2.0, 3.0, 6.0]]))
    tensor([[-1.0690, -0.5345,  0.0000,  1.6036]])
    """
    x, residual = autocast.in_float32(x), None if residual is None else autocast.in_float32(residual)
    y, total = _norm(x, residual, scale, offset, "layer", eps)
    return y if residual is None else (y, total)


@checked
def rms_norm(
    x: Tensor,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    *,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    residual: Tensor | None = None,
) -> Any:
    """Root-mean-square normalization over the last axis; see `vishwamai.rms_norm`. Arguments and errors are those of
    `layer_norm`, and `scale_offset`, which is added to the scale in float32 (1.0 for Gemma).

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    if scale_offset:
        check_offset(scale, scale_offset)
        scale = scale.to(torch.promote_types(scale.dtype, torch.float32)) + scale_offset  # type: ignore[union-attr]
    x, residual = autocast.in_float32(x), None if residual is None else autocast.in_float32(residual)
    y, total = _norm(x, residual, scale, offset, "rms", eps)
    return y if residual is None else (y, total)
