"""`softmax` and `log_softmax` of torch tensors."""

from __future__ import annotations

from torch import Tensor

from vishwamai.ops.softmax.api import SOFTMAX
from vishwamai.ops.softmax.spec import SIGNATURE, Outputs, check_axis, describe
from vishwamai.torch import autocast
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator

# The operator sums over the last axis.
_softmax = TorchOperator(
    SOFTMAX,
    Outputs,
    SIGNATURE,
    describe,
    gradients=("x",),
    saves=lambda call: ("x",) if call.log else ("y",),
    stand_ins={"x": "y"},
)


@checked
def softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Softmax along one axis, in one pass over memory where that is the last; see `vishwamai.softmax`.

    Arguments, result and errors are those of JAX's; another axis than the last is moved there by a copy.

    >>> import torch
    >>> softmax(torch.log(torch.tensor([1.0, 2.0, 5.0])))
    tensor([0.1250, 0.2500, 0.6250])
    """
    return _along("softmax", x, axis, False)


@checked
def log_softmax(x: Tensor, *, axis: int = -1) -> Tensor:
    """Logarithm of the softmax along one axis. Arguments, result and errors are those of `softmax`.

    >>> import torch
    >>> log_softmax(torch.zeros(4))
    tensor([-1.3863, -1.3863, -1.3863, -1.3863])
    """
    return _along("log_softmax", x, axis, True)


def _along(name: str, x: Tensor, axis: int, log: bool) -> Tensor:
    axis, x = check_axis(name, x.shape, axis), autocast.in_float32(x)
    if axis == x.dim() - 1:
        return _softmax(x, log, False)[0]
    # It is moved here, so the kernel's rows are rows.
    return _softmax(x.movedim(axis, -1), log, False)[0].movedim(-1, axis)
