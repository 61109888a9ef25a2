"""Decorators for kernels of block-sparse operations and of experts: a platform's decorator with what these kernels need
besides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax

from vishwamai.core.arguments import checked
from vishwamai.core.config import KernelConfig
from vishwamai.core.errors import KernelError
from vishwamai.core.observe import record_plans
from vishwamai.core.types import PyTree
from vishwamai.kernels.decorators import decorator
from vishwamai.ops.moe.spec import GroupedSpec


@checked
def sparse_kernel(
    function: Callable[..., object] | None = None,
    *,
    platform: str = "tpu",
    block_size: int | None = None,
    config: KernelConfig | None = None,
    **options: Any,
) -> Any:
    """Makes a kernel of a JAX function of block-sparse operations.

    Arrays of integers or bools among its arguments (the places of blocks, block masks), NumPy's or JAX's, are part of
    the compiled program: what they leave empty costs nothing, and another pattern is another program. Other arrays are
    traced, and so is every array that a `jax.jit` around the call traces.

    Args:
      function: the function; left out, the call gives a decorator.
      platform: "tpu", "gpu" or "cpu": whose decorator this is.
      block_size: edge of the blocks, in elements; a function with a parameter of that name is given it, unless a call
        passes its own.
      config: argument of `tpu_kernel`.
      **options: argument of `tpu_kernel`.

    >>> import jax.numpy as jnp, numpy as np, vishwamai
    >>> @sparse_kernel(platform="tpu", block_size=128)
    ... def local_attention(query, key, value, mask, block_size):
    ...     return vishwamai.block_sparse_attention(query, key, value, mask, block_size=block_size)
    >>> x = jnp.ones((1, 2, 256, 64))
    >>> local_attention(x, x, x, np.eye(2, dtype=bool)).shape
    (1, 2, 256, 64)
    """
    extra: dict[str, Any] = {"constants": True}
    return _decorate(function, platform, config, options, extra, {"block_size": block_size})


@checked
def expert_kernel(
    function: Callable[..., object] | None = None,
    *,
    platform: str = "tpu",
    num_experts: int | None = None,
    config: KernelConfig | None = None,
    **options: Any,
) -> Any:
    """Makes a kernel of a JAX function of experts.

    Args:
      function: the function; left out, the call gives a decorator.
      platform: "tpu", "gpu" or "cpu": whose decorator this is.
      num_experts: how many experts there are. A function with a parameter of that name is given it, unless a call
        passes its own; and every grouped product in the function must have as many groups (over several devices, a
        share of them), or the call is an error.
      config: argument of `tpu_kernel`.
      **options: argument of `tpu_kernel`.

    >>> import jax.numpy as jnp, vishwamai
    >>> @expert_kernel(platform="tpu", num_experts=4)
    ... def project(rows, expert_weights, group_sizes):
    ...     return vishwamai.grouped_gemm(rows, expert_weights, group_sizes)
    >>> sizes = jnp.array([3, 0, 4, 1])
    >>> project(jnp.ones((8, 16)), jnp.ones((4, 16, 32)), sizes).shape
    (8, 32)
    >>> project(jnp.ones((8, 16)), jnp.ones((3, 16, 32)), sizes[:3])
    Traceback (most recent call last):
    vishwamai.core.errors.KernelError: expert_kernel: `num_experts` is 4, but a grouped product has 3 groups; pass ...
    """
    if num_experts is not None and (not isinstance(num_experts, int) or num_experts < 1):
        raise KernelError(f"expert_kernel: `num_experts` is {num_experts!r}; pass a positive number, or None.")

    extra: dict[str, Any] = {}
    if num_experts is not None:
        extra["verify"] = functools.partial(_verify_groups, num_experts)
    return _decorate(function, platform, config, options, extra, {"num_experts": num_experts})


def _verify_groups(num_experts: int, program: Callable[..., object], arrays: tuple[jax.Array, ...]) -> None:
    for plan in record_plans(program, *arrays):
        groups = plan.spec.groups if isinstance(plan.spec, GroupedSpec) else None
        share = groups is not None and jax.device_count() > 1 and num_experts % groups == 0
        if groups not in (None, num_experts) and not share:
            raise KernelError(
                f"expert_kernel: `num_experts` is {num_experts}, but a grouped product has {groups} groups; pass "
                f"weights of {num_experts} experts."
            )


def _decorate(
    function: Callable[..., object] | None,
    platform: str,
    config: KernelConfig | None,
    options: dict[str, Any],
    extra: dict[str, object],
    parameters: dict[str, object],
) -> Any:
    settings = {name: value for name, value in parameters.items() if value is not None}
    if "block_size" in settings:
        options = {**options, **settings}  # a field of the configuration besides
    if function is None:
        return lambda wrapped: decorator(platform, _with_defaults(wrapped, settings), config, options, **extra)
    return decorator(platform, _with_defaults(function, settings), config, options, **extra)


def _with_defaults(function: Callable[..., object], values: dict[str, object]) -> Callable[..., object]:
    """The function with a value for each of its parameters that a call does not pass; parameters that it has not are
    left out.
    """
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a builtin that does not tell them
        return function
    values = {name: value for name, value in values.items() if name in parameters}
    if not values:
        return function

    return _Filled(function, values)


class _Filled:
    """A function with values for parameters that a call does not pass; picklable where the function is."""

    def __init__(self, function: Callable[..., PyTree], values: dict[str, object]):
        functools.update_wrapper(self, function)
        self._function, self._values = function, values
        # A parameter without a default of its own has one now.
        parameters = inspect.signature(function).parameters.values()
        changed = [p.replace(default=values[p.name]) if p.name in values else p for p in parameters]
        self.__signature__ = inspect.Signature(_ordered(changed))

    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        bound = inspect.signature(self._function).bind_partial(*args, **kwargs)
        rest = {name: value for name, value in self._values.items() if name not in bound.arguments}
        return self._function(*args, **kwargs, **rest)

    def __reduce__(self) -> tuple[object, ...]:
        return _Filled, (self._function, self._values)


def _ordered(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Python wants no positional parameter without a default after one that has it: those that follow become
    keywords.
    """
    seen, ordered = False, []
    for p in parameters:
        if p.kind is p.POSITIONAL_OR_KEYWORD:
            if seen and p.default is p.empty:
                p = p.replace(kind=p.KEYWORD_ONLY)
            seen = seen or p.default is not p.empty
        ordered.append(p)
    return sorted(ordered, key=lambda p: p.kind)
