"""`explain` for functions of torch tensors: which kernel ran for every operation, with which tiles, and why not the
others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vishwamai.core import observe
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.explain import Explanation, explain_call
from vishwamai.core.target import Target
from vishwamai.torch.arguments import checked


@checked
def explain(function: Callable[..., object], *args: object, **kwargs: object) -> Explanation:
    """Lists every implementation of every operation in `function`, which one runs and why the others do not; see
    `vishwamai.explain`.

    The function is run once, on the tensors given, since torch has no trace that names what an operator chooses;
    without gradients, whatever it returns is dropped. Under `torch.compile` operations choose when they run, so a
    compiled function is explained too.

    Args:
      function: any function of torch tensors.
      *args, **kwargs: its arguments.

    >>> import torch, vishwamai.torch
    >>> explain(vishwamai.torch.rms_norm, torch.ones(8, 256, dtype=torch.float64)).calls[0].op
    'norm'
    """
    # A fallback is what the caller asks about here, so strict mode must not stop the answer.
    with kernel_config(current_config(), strict=False), observe.recording() as plans, torch.no_grad():
        function(*args, **kwargs)
        calls = tuple(explain_call(plan, plan.choices[0].target) for plan in plans)
    target = plans[0].choices[0].target if plans else Target("cpu", framework="torch")
    return Explanation.of(target, calls)
