"""Checks of what arrays hold: at once where the values are known, in the program where they are asked for.

A check is a function of NumPy arrays that raises. Eager calls run it before the kernel. Traced values are not known
yet; `KernelConfig(checks=True)` puts the same function into the program as a callback to the host
(`jax.debug.callback`), which needs no rewriting of the caller's program, as `checkify` does, and works inside `jit`,
`grad`, `vmap`, `scan` and `shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.core import Tracer

from vishwamai.core.config import current_config
from vishwamai.core.types import AnyArray


def check_values(check: Callable[..., None], *arrays: AnyArray) -> None:
    """Runs `check(*arrays)` on the arrays' values.

    Args:
      check: takes NumPy arrays, and raises ShapeError where their values contradict the call.
      arrays: JAX's or NumPy's arrays. If one of them is traced, the check is left out, or becomes a part of the program
        under `KernelConfig(checks=True)`.

    Raises:
      ShapeError: what `check` raises. Inside a program it arrives as JAX's runtime error, whose text has it; a
        decorated kernel makes the `ShapeError` of it again.
    """
    if all(map(is_known, arrays)):
        check(*map(np.asarray, arrays))
    elif current_config().checks:
        jax.debug.callback(lambda *values: check(*map(np.asarray, values)), *arrays)


def is_known(x: AnyArray) -> bool:
    """Whether this process can read the values now."""
    return not isinstance(x, Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)
