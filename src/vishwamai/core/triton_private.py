"""Triton's names that are not part of its documented interface. No other file of the package uses them (ruff checks
it).

triton is imported inside the functions: it is optional, and naming a kernel does not need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Path = tuple[int, ...]
"""Where a value stands among a kernel's arguments: the parameter's number, and inside a named tuple the field's."""


def is_interpreted(function: object) -> bool:
    """Whether a `@triton.jit` function was loaded under `TRITON_INTERPRET=1`, so that it cannot be compiled."""
    return not hasattr(function, "cache_key")


def constexpr_parameters(function: Any) -> frozenset[str]:
    """The parameters that are annotated `tl.constexpr`."""
    return frozenset(parameter.name for parameter in function.params if parameter.is_constexpr)


def starter(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """What launches a compiled kernel on the current device and stream; it takes the arguments in their order.

    Args:
      kernel: result of a launch of a `@triton.jit` function.
    """
    return kernel[(*grid, 1, 1)[:3]]


def compile_kernel(
    function: object,
    signature: Mapping[str, object],
    constants: Mapping[Path, object],
    aligned: Iterable[Path],
    target: int | str,
    options: Mapping[str, object],
) -> Any:
    """Triton's compiled kernel, for a GPU that need not be here.

    Args:
      function: a `@triton.jit` function.
      signature: the type of every parameter, "constexpr" for a constant; a named tuple of types for a named tuple.
      constants: values of the constants.
      aligned: the pointers that are divisible by 16 bytes.
      target: compute capability (90), or AMD's name of an architecture ("gfx942").
      options: Triton's compiler options.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if isinstance(target, int):
        gpu = GPUTarget("cuda", target, 32)
    else:
        gpu = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    source = ASTSource(function, dict(signature), dict(constants), attributes)
    return triton.compile(source, target=gpu, options=dict(options))
