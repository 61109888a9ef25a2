"""`explain` for functions of torch tensors: which kernel ran for every operation, with which tiles, and why not the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from vishwamai.core.config import current_config, kernel_config, without_effect
from vishwamai.core.explain import Explanation, explain_call
from vishwamai.core.op import Plan
from vishwamai.torch import bridge


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Lists every implementation of every operation in `function`, which one runs and why the others do not; see `vishwamai.explain`.

    The function is run once, on the tensors given, since torch has no trace that names what an operator chooses; without gradients, whatever it returns is
    dropped. Under `torch.compile` operations choose when they run, so a compiled function is explained too.

    Args:
      function: any function of torch tensors.
      *args, **kwargs: what it is called with.

    >>> import torch, vishwamai.torch
    >>> explain(vishwamai.torch.rms_norm, torch.ones(8, 256, dtype=torch.float64)).calls[0].op
    'norm'
    """
    # A fallback is what the caller asks about here, so strict mode must not stop the answer.
    with kernel_config(current_config(), strict=False), bridge.recording() as found, torch.no_grad():
        function(*args, **kwargs)
        calls = tuple(explain_call(Plan(op, spec, (choice,)), str(choice.platform)) for op, spec, choice in found)
    platform = str(found[0][2].platform) if found else "cpu"
    return Explanation(platform, None, calls, without_effect(current_config(), platform))
