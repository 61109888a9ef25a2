"""`softmax` and `log_softmax` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.ops.softmax.api import SOFTMAX
from vishwamai.ops.softmax.spec import Operands, Outputs, SoftmaxSpec, make_spec
from vishwamai.torch import bridge


def _flat(x: Tensor, log: bool) -> tuple[SoftmaxSpec, Tensor]:
    """The spec of a softmax over the last axis, and `x` in its layout."""
    spec = make_spec("log_softmax" if log else "softmax", x, -1, log)
    return spec, x.contiguous().reshape(spec.operands.x.shape)


@torch.library.custom_op("vishwamai::softmax", mutates_args=())
def any_softmax(x: Tensor, axis: int, log: bool) -> Tensor:
    """The softmax over an axis, or its logarithm. See `softmax`."""
    make_spec("log_softmax" if log else "softmax", x, axis, log)  # checks the caller's own axis
    last = x.movedim(axis, -1)
    spec, rows = _flat(last, log)
    outputs, _ = bridge.forward(bridge.choose(SOFTMAX, spec, x), spec, Operands(rows))
    return outputs.y.reshape(last.shape).movedim(-1, axis)


@any_softmax.register_fake
def _(x: Tensor, axis: int, log: bool) -> Tensor:
    del log
    return x.new_empty(x.movedim(axis, -1).shape).movedim(-1, axis)


@torch.library.custom_op("vishwamai::softmax_backward", mutates_args=())
def any_softmax_backward(dy: Tensor, source: Tensor, axis: int, log: bool) -> Tensor:
    """Gradient of x; `source` is the softmax, or, for the logarithm, x."""
    last = source.movedim(axis, -1)
    spec, rows = _flat(last, log)
    _, cotangent = _flat(dy.movedim(axis, -1), log)
    choice = bridge.choose(SOFTMAX, spec, source)
    gradients = bridge.backward(choice, spec, Operands(rows), Outputs(rows), None, Outputs(cotangent))
    return gradients.x.reshape(last.shape).movedim(-1, axis)


@any_softmax_backward.register_fake
def _(dy: Tensor, source: Tensor, axis: int, log: bool) -> Tensor:
    del dy, log
    return source.new_empty(source.movedim(axis, -1).shape).movedim(-1, axis)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.axis, ctx.log = inputs
    ctx.save_for_backward(x if ctx.log else output)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return any_softmax_backward(dy, *ctx.saved_tensors, ctx.axis, ctx.log), None, None


bridge.register_autograd(any_softmax, _gradient, _setup)


def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax along one axis, in one pass over memory where that is the last; see `vishwamai.softmax`.

    Args:
      x: bfloat16, float16 or float32 (float64 on the CPU). The arithmetic is float32, rounded once.
      axis: the axis that is summed over; another than the last is moved there by a copy.

    Returns:
      Of the shape and dtype of `x`.

    Raises:
      ShapeError: an argument is not legal.
      UnsupportedError: no kernel serves the call on the tensor's device.

    >>> import torch
    >>> softmax(torch.log(torch.tensor([1.0, 2.0, 5.0])))
    tensor([0.1250, 0.2500, 0.6250])
    """
    return any_softmax(x, axis, False)


def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Logarithm of the softmax along one axis. Args, returns and errors are those of `softmax`.

    >>> import torch
    >>> log_softmax(torch.zeros(4))
    tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """
    return any_softmax(x, axis, True)
