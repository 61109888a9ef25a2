"""Checks of what tensors hold: of `core.value_checks`, where the host can read them without waiting."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.torch import bridge
from vishwamai.torch.torch_private import only_computes


def check_values(check: Callable[..., None], *tensors: Tensor) -> None:
    """Runs `check` on the values of tensors on the CPU, as arrays of NumPy.

    On a GPU the host would wait for them: there it runs under `KernelConfig(checks=True)` alone. It is left out while
    torch compiles, traces or maps, and of tensors that are parts of a DTensor.

    Raises:
      ShapeError: what `check` raises.
    """
    if only_computes(tensors) and (bridge.platform_of(tensors[0]) == "cpu" or current_config().checks):
        check(*(x.detach().cpu().numpy() for x in tensors))
