"""`gated_linear_unit` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.spec import array_spec
from vishwamai.ops.gated.api import GATED
from vishwamai.ops.gated.spec import GatedSpec, Operands, Outputs, Residuals, check
from vishwamai.torch import bridge


def _described(x: Tensor, gate: Tensor, up: Tensor | None, activation: str, precision: str) -> tuple[GatedSpec, Any]:
    """(spec, operands in the op's own layout); without `up`, `gate` holds both weights."""
    check(array_spec(x), array_spec(gate), None if up is None else array_spec(up), activation or None)
    rows = x.contiguous().reshape(1, x.shape[:-1].numel(), x.shape[-1])
    first = gate.contiguous()[None]
    operands = Operands(rows, None, None, first) if up is None else Operands(rows, first, up.contiguous()[None], None)
    shapes = Operands(*(None if a is None else array_spec(a) for a in operands))
    assert shapes.x is not None
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, shapes.x.dtype)
    return GatedSpec(shapes, activation or None, products), operands


@torch.library.custom_op("vishwamai::gated", mutates_args=())
def gated(
    x: Tensor, gate: Tensor, up: Tensor | None, activation: str, precision: str, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(h, both products if `keep`, else empty); activation "" is none, and without `up` the weights lie in one array. See `gated_linear_unit`."""
    spec, operands = _described(x, gate, up, activation, precision)
    outputs, kept = bridge.forward(bridge.choose(GATED, spec, x), spec, operands, keep)
    shape = (*x.shape[:-1], spec.n)
    if kept is None:
        return outputs.h.reshape(shape), x.new_empty(0), x.new_empty(0)
    return outputs.h.reshape(shape), kept.gate.reshape(shape), kept.up.reshape(shape)


@gated.register_fake
def _(x: Tensor, gate: Tensor, up: Any, activation: str, precision: str, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    del up, activation, precision

    def one(wanted: bool) -> Tensor:
        return x.new_empty((*x.shape[:-1], gate.shape[-1])) if wanted else x.new_empty(0)

    return one(True), one(keep), one(keep)


@torch.library.custom_op("vishwamai::gated_backward", mutates_args=())
def gated_backward(
    dh: Tensor,
    kept_gate: Tensor,
    kept_up: Tensor,
    x: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    precision: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, gate and up; the last is empty where both weights lie in one array."""
    spec, operands = _described(x, gate, up, activation, precision)
    dh, kept_gate, kept_up = (t.contiguous().reshape(spec.groups, spec.m, spec.n) for t in (dh, kept_gate, kept_up))
    choice = bridge.choose(GATED, spec, x)
    # No backward pass of this op reads its output, which need not be kept for it.
    gradients = bridge.backward(choice, spec, operands, Outputs(dh), Residuals(kept_gate, kept_up), Outputs(dh))
    if up is None:
        return gradients.x.reshape(x.shape), gradients.both[0], x.new_empty(0)
    return gradients.x.reshape(x.shape), gradients.gate[0], gradients.up[0]


@gated_backward.register_fake
def _(dh: Tensor, kept_gate: Any, kept_up: Any, x: Tensor, gate: Tensor, up: Tensor | None, *rest: Any) -> Any:
    del dh, kept_gate, kept_up, rest
    return x.new_empty(x.shape), gate.new_empty(gate.shape), x.new_empty(0) if up is None else up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate, up, ctx.activation, ctx.precision, keep = inputs
    assert keep, "a gradient needs what the forward pass keeps"
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], output[2], x, gate, up)


def _gradient(ctx: Any, dh: Tensor | None, dgate: Any, dup: Any) -> tuple[Any, ...]:
    del dgate, dup  # only the gradient reads what is kept
    if dh is None:
        return (None,) * 6
    *tensors, up = ctx.saved_tensors
    dx, d_gate, d_up = gated_backward(dh, *tensors, up, ctx.activation, ctx.precision)
    return dx, d_gate, None if up is None else d_up, None, None, None


bridge.register_autograd(gated, _gradient, _setup)


def gated_linear_unit(
    x: Tensor, weights: Any, activation: str | None = "silu", *, precision: str | None = None
) -> Tensor:
    """Gated linear unit `activation(x @ gate) * (x @ up)`, both products in one pass over x; see `vishwamai.gated_linear_unit`.

    Args:
      x: `[..., features]`, bfloat16, float16 or float32 (float64 on the CPU).
      weights: (gate, up), `[features, hidden]` each, or one tensor `[2, features, hidden]`; of the dtype of `x`.
      activation: "relu", "relu2", "silu", "gelu" (exact), "gelu_tanh", "sigmoid", "tanh", or None.
      precision: of float32 products: "highest" or "high"; None takes the ambient one.

    Returns:
      `[..., hidden]` in the dtype of `x`.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> x, gate, up = torch.ones(3, 8), torch.full((8, 16), 0.5), torch.full((8, 16), 0.25)
    >>> gated_linear_unit(x, (gate, up), "relu")[0, :3]
    tensor([8., 8., 8.])
    """
    if isinstance(weights, (tuple, list)):
        if len(weights) != 2:
            raise ShapeError(
                f"gated_linear_unit: `weights` is a sequence of {len(weights)}; pass (gate, up), or one tensor of shape (2, features, hidden)."
            )
        gate, up = weights
    else:
        gate, up = weights, None
    out_dtype = x.dtype
    x, gate = bridge.narrowed(x, gate)
    up = None if up is None else bridge.narrowed(up)[0]
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, gate, up))
    products = precision or ("default" if torch.compiler.is_compiling() else current_config().precision.products)
    return gated(x, gate, up, activation or "", products, keep)[0].to(out_dtype)
