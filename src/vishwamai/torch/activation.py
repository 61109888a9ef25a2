"""`gelu`, `silu`, `relu2` and `fused_gelu_dropout` of torch tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.spec import array_spec
from vishwamai.ops.activation.api import ACTIVATION
from vishwamai.ops.activation.spec import SIGNATURE, Outputs, check, check_dropout, describe
from vishwamai.torch import bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.sharding import is_dtensor, placed_like

_activation = TorchOperator(ACTIVATION, Outputs, SIGNATURE, describe, gradients=("x",))


@checked
def gelu(x: Tensor, *, approximate: bool = False) -> Tensor:
    """Gaussian error linear unit `x Phi(x)`, or its approximation by tanh; see `vishwamai.gelu`.

    >>> import torch
    >>> gelu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.1587,  0.0000,  0.8413])
    """
    return _plain("gelu", "gelu_tanh" if approximate else "gelu", x)


@checked
def silu(x: Tensor) -> Tensor:
    """Sigmoid linear unit `x sigmoid(x)`; see `vishwamai.silu`.

    >>> import torch
    >>> silu(torch.tensor([-1.0, 0.0, 1.0]))
    tensor([-0.2689,  0.0000,  0.7311])
    """
    return _plain("silu", "silu", x)


@checked
def relu2(x: Tensor) -> Tensor:
    """Squared rectifier `max(x, 0)^2`; see `vishwamai.relu2`.

    >>> import torch
    >>> relu2(torch.tensor([-1.0, 0.0, 3.0]))
    tensor([0., 0., 9.])
    """
    return _plain("relu2", "relu2", x)


def _plain(name: str, activation: str, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():  # a compiled call is checked when it runs
        check(name, array_spec(x))
    if not x.dim():
        return _plain(name, activation, x[None])[0]
    return _activation(x, None, None, None, activation, 0.0)[0]


@checked
def fused_gelu_dropout(
    x: Tensor,
    rate: float = 0.0,
    *,
    seed: Tensor | None = None,
    approximate: bool = False,
    deterministic: bool = False,
) -> Tensor:
    """Dropout of `gelu(x)` in one pass over memory, whose mask is never stored; see `vishwamai.fused_gelu_dropout`.

    Arguments, result and errors are those of JAX's, except for `seed` in place of a key: two integers, of which 32 bits
    count. The same drop the same elements, here and in JAX, where they are `vishwamai.core.dropout.seeds(key, 1, 1)`.
    None draws them from torch's generator of the tensor's device, which processes that share a `DTensor` do not share:
    they must pass them.

    >>> import torch
    >>> y = fused_gelu_dropout(torch.ones(64, 64), 0.25, seed=torch.tensor([1, 2]))
    >>> print(f"{(y == 0).float().mean():.2f} {y.max():.3f}")
    0.25 1.122
    """
    check_dropout("fused_gelu_dropout", rate, None, True)
    if deterministic or not rate:
        return _plain("fused_gelu_dropout", "gelu_tanh" if approximate else "gelu", x)
    if not x.dim():
        return fused_gelu_dropout(x[None], rate, seed=seed, approximate=approximate)[0]
    if seed is None and is_dtensor(x):
        raise ShapeError(
            "fused_gelu_dropout: `seed` is None and `x` is a DTensor, of which each process would draw another mask; "
            "pass two integers, the same everywhere."
        )
    bits = bridge.seeds("fused_gelu_dropout", "seed", seed, (2,), x.device)
    # The mask is made of the numbers of rows and columns; as operands, they tell a part of a tensor where in the whole
    # it is.
    rows = torch.arange(math.prod(x.shape[:-1]), dtype=torch.int32, device=x.device).reshape(x.shape[:-1])
    columns = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    numbers = (placed_like(x, n) for n in (rows, columns, bits[None]))
    return _activation(x, *numbers, "gelu_tanh" if approximate else "gelu", float(rate))[0]
