"""`fused_gelu_dropout` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.ops.activation.api import ACTIVATION
from vishwamai.ops.activation.spec import ActivationSpec, Operands, Outputs, check, check_dropout
from vishwamai.torch import bridge
from vishwamai.torch.sharding import beside, is_dtensor


def _operands(
    x: Tensor, rows: Tensor | None, columns: Tensor | None, seed: Tensor | None, activation: str, rate: float
) -> tuple[ActivationSpec, Operands]:
    check("fused_gelu_dropout", array_spec(x))
    x = x.contiguous().reshape(1, *(x.shape or (1,)))
    if seed is not None:
        assert rows is not None and columns is not None
        rows, columns = rows.contiguous().reshape(x.shape[:-1]), columns.contiguous().reshape(1, x.shape[-1])
        seed = seed.contiguous()[None]
    operands = Operands(x, rows, columns, seed)
    described = Operands(*(None if a is None else array_spec(a) for a in operands))
    return ActivationSpec(described, activation, 0.0 if seed is None else rate), operands


@torch.library.custom_op("vishwamai::activation", mutates_args=())
def activation_dropout(
    x: Tensor, rows: Tensor | None, columns: Tensor | None, seed: Tensor | None, activation: str, rate: float
) -> Tensor:
    """The activation ("gelu", "gelu_tanh", "silu", "relu2") of x, with dropout where there is a seed, int32 `[2]`. See `fused_gelu_dropout`.

    The mask is made of the numbers of rows, int32 `x.shape[:-1]`, and columns, `x.shape[-1:]`; they are arguments, so that a part of a tensor knows
    where in the whole it stands.
    """
    spec, operands = _operands(x, rows, columns, seed, activation, rate)
    outputs, _ = bridge.forward(bridge.choose(ACTIVATION, spec, x), spec, operands)
    return outputs.y.reshape(x.shape)


@activation_dropout.register_fake
def _(x: Tensor, rows: Any, columns: Any, seed: Any, activation: str, rate: float) -> Tensor:
    del rows, columns, seed, activation, rate
    return x.new_empty(x.shape)


@torch.library.custom_op("vishwamai::activation_backward", mutates_args=())
def activation_dropout_backward(
    dy: Tensor,
    x: Tensor,
    rows: Tensor | None,
    columns: Tensor | None,
    seed: Tensor | None,
    activation: str,
    rate: float,
) -> Tensor:
    """Gradient of x; the derivative and the mask are formed again."""
    spec, operands = _operands(x, rows, columns, seed, activation, rate)
    cotangent = Outputs(dy.contiguous().reshape(operands.x.shape))
    choice = bridge.choose(ACTIVATION, spec, x)
    gradients = bridge.backward(choice, spec, operands, cotangent, None, cotangent)
    return gradients.x.reshape(x.shape)


@activation_dropout_backward.register_fake
def _(dy: Tensor, x: Tensor, rows: Any, columns: Any, seed: Any, activation: str, rate: float) -> Tensor:
    del dy, rows, columns, seed, activation, rate
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.activation, ctx.rate = inputs
    ctx.save_for_backward(*tensors)


def _gradient(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    return activation_dropout_backward(dy, *ctx.saved_tensors, ctx.activation, ctx.rate), None, None, None, None, None


bridge.register_autograd(activation_dropout, _gradient, _setup)


def fused_gelu_dropout(
    x: Tensor,
    rate: float = 0.0,
    *,
    seed: Tensor | None = None,
    approximate: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Dropout of `gelu(x)` in one pass over memory, whose mask is never stored; see `vishwamai.fused_gelu_dropout`.

    Args:
      x: bfloat16, float16 or float32 (float64 on the CPU), of any shape. The arithmetic is float32, rounded once.
      rate: share of the elements to drop, in [0, 1).
      seed: two integers, of which 32 bits count: the same drop the same elements, here and in JAX, where they are `vishwamai.core.dropout.seeds(key, 1, 1)`.
        None draws them from torch's generator of the tensor's device, which processes that share a `DTensor` do not share: they must pass them.
      approximate: the form by tanh.
      deterministic: drop nothing (at inference).

    Returns:
      Of the shape and dtype of `x`.

    Raises:
      ShapeError: an argument is not legal.
      UnsupportedError: no kernel serves the call on the tensor's device.

    >>> import torch
    >>> y = fused_gelu_dropout(torch.ones(64, 64), 0.25, seed=torch.tensor([1, 2]))
    >>> print(f"{(y == 0).float().mean():.2f} {y.max():.3f}")
    0.25 1.122
    """
    check_dropout("fused_gelu_dropout", rate, None, True)
    activation = "gelu_tanh" if approximate else "gelu"
    if deterministic or not rate:
        return activation_dropout(x, None, None, None, activation, 0.0)
    if seed is None and is_dtensor(x):
        raise ShapeError(
            "fused_gelu_dropout: `seed` is None and `x` is a DTensor, of which each process would draw another mask; pass two integers, the same everywhere."
        )
    if seed is None:
        bits = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int64, device=x.device)
    elif seed.shape != (2,) or seed.is_floating_point() or seed.is_complex():
        raise ShapeError(
            f"fused_gelu_dropout: `seed` has shape {tuple(seed.shape)} and dtype {seed.dtype}; pass two integers, or None."
        )
    else:
        bits = (seed.to(x.device, torch.int64) + 2**31) % 2**32 - 2**31
    shape = x.shape or (1,)
    rows = torch.arange(math.prod(shape[:-1]), dtype=torch.int32, device=x.device).reshape(x.shape[:-1])
    columns = torch.arange(shape[-1], dtype=torch.int32, device=x.device)
    numbers = (beside(x, n) for n in (rows, columns, bits.to(torch.int32)))
    return activation_dropout(x, *numbers, activation, float(rate))
