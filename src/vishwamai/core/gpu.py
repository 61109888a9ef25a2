"""What every Triton implementation launches its kernels through, whatever the arrays are: JAX's, or torch's.

An operation's `gpu.py` calls `launch` for each kernel and nothing else touches an array there, so one forward and one
backward serve both frameworks. JAX arrays go through `core.triton_call`; `vishwamai.torch` registers the launcher of
torch tensors. The tests register one for both that runs Triton's interpreter on a machine without a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import sharding, triton_call, triton_launch
from vishwamai.core.errors import DeviceError
from vishwamai.core.target import Target
from vishwamai.core.triton_launch import Launch, TritonDtype, TritonKernel, fields_of
from vishwamai.core.types import AnyArray, PyTree

__all__ = [
    "SMS",
    "Result",
    "TritonKernel",
    "Launch",
    "Launcher",
    "TritonDtype",
    "cdiv",
    "launch",
    "next_power_of_2",
    "onto",
    "register_launcher",
    "repeat",
    "result",
    "why_not",
]

SMS = 132
"""Multiprocessors of an H100 SXM or H200. A kernel whose sums depend on how many programs share the work takes it from
its Config, never from the device, so that the bits do not change with the machine.
"""


@dataclasses.dataclass(frozen=True)
class Result:
    """Shape and dtype of a kernel's output; `zeroed` memory starts as zeros, with `start` it is that array's own
    memory, other memory holds anything.
    """

    shape: tuple[int, ...]
    dtype: Any
    zeroed: bool = False
    start: Any = dataclasses.field(default=None, compare=False)

    @property
    def initialized(self) -> bool:
        """Whether the memory holds something that the kernel builds on."""
        return self.zeroed or self.start is not None

    @property
    def empty(self) -> bool:
        return math.prod(self.shape) == 0


def result(shape: Any, dtype: Any, *, zeroed: bool = False) -> Result:
    """An output of `launch`."""
    return Result(tuple(int(n) for n in shape), jnp.dtype(dtype), zeroed)


def onto(array: Any) -> Result:
    """An output of `launch` that takes over the memory, and so the contents, of an array; nothing else may use the
    array afterwards.
    """
    return Result(tuple(array.shape), jnp.dtype(str(array.dtype).removeprefix("torch.")), start=array)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is `n` or more.

    >>> next_power_of_2(80), next_power_of_2(128)
    (128, 128)
    """
    return 1 << max(0, n - 1).bit_length()


def why_not(target: Target | None = None) -> str | None:
    """None where triton is installed, or need not be since the program is not made on this machine; else the reason and
    how to fix it.
    """
    return triton_launch.why_not() if target is None or target.local else None


def fused_by_xla(spec: object, target: Target) -> str | None:
    """`why_not_default` of an elementwise kernel: XLA fuses such an operation with its neighbours, torch does not."""
    return "XLA's own code is as fast, and it fuses with its neighbours." if target.framework == "jax" else None


Launcher = Callable[[Launch, dict[str, Any], dict[str, Result]], list[Any]]
"""`(launch, inputs, outputs) -> results`; absent buffers are already left out of both."""


def _launch_jax(how: Launch, inputs: dict[str, PyTree], outputs: dict[str, Result]) -> list[AnyArray]:
    arrays = tuple(x for x in inputs.values() if not isinstance(x, np.ndarray))
    aliases = {name: f"{name}_init" for name, out in outputs.items() if out.initialized}
    for name, source in aliases.items():
        out = outputs[name]
        start = jnp.zeros(out.shape, out.dtype) if out.zeroed else out.start
        inputs = {**inputs, source: sharding.match_varying((start, *arrays))[0]}
    structs: dict[str, jax.ShapeDtypeStruct] = {
        name: sharding.out_struct(out.shape, out.dtype, arrays) for name, out in outputs.items()
    }
    return triton_call.triton_call(how, inputs, structs, aliases)


_LAUNCHERS: dict[str, Launcher] = {"jax": _launch_jax}


def register_launcher(framework: str, launcher: Launcher) -> Launcher | None:
    """Makes `launcher` serve the arrays of `framework` ("jax", "torch"); returns the one that did before."""
    previous = _LAUNCHERS.get(framework)
    _LAUNCHERS[framework] = launcher
    return previous


def launcher(framework: str) -> Launcher | None:
    """What serves the arrays of `framework`, or None."""
    return _LAUNCHERS.get(framework)


def framework(array: AnyArray) -> str:
    """ "torch" for a torch tensor, else "jax" (its tracers are of many types)."""
    return "torch" if type(array).__module__.split(".")[0] == "torch" else "jax"


Launched = tuple[Launch, dict[str, Any], dict[str, Result], list[Any]]
"""A launch, its inputs, its outputs and the arrays that they became."""


class _Thread(threading.local):
    launching = False
    record: list[Launched] | None = None


_THIS_THREAD = _Thread()


def launching() -> bool:
    """Whether this thread is inside of a launcher."""
    return _THIS_THREAD.launching


@contextlib.contextmanager
def recorded() -> Iterator[list[Launched]]:
    """Yields the list of this thread's launches in the block."""
    before, _THIS_THREAD.record = _THIS_THREAD.record, []
    try:
        yield _THIS_THREAD.record
    finally:
        _THIS_THREAD.record = before


def launch(
    kernel: TritonKernel,
    grid: tuple[int, ...],
    inputs: Mapping[str, PyTree],
    outputs: Mapping[str, Result | None],
    *,
    warps: int = 4,
    stages: int = 3,
    **constants: object,
) -> list[AnyArray]:
    """Runs a Triton kernel on arrays of JAX or torch.

    Args:
      kernel: the kernel. Its parameters are the inputs, then the outputs, then the constants, by these names.
      grid: programs along each of up to three axes, at least one in all.
      inputs: contiguous arrays, all of one framework, and constants (NumPy's arrays) behind the first; None for an
        absent one, which the kernel sees as None. A parameter that is a named tuple takes one of arrays, numbers and
        None.
      outputs: arrays that it writes, see `result` and `onto`; None for an output that is not wanted. One that starts
        from something has beside it, last among the inputs, a parameter `<name>_init`: the same memory under another
        name, by which XLA knows what it starts from.
      warps: warps of a program.
      stages: buffers of the compiler's software pipeline.
      **constants: the kernel's other parameters: integers, floats, bools, and named tuples of them.

    Returns:
      the outputs in order, None for each that was not wanted.

    Raises:
      DeviceError: the arrays are torch's and `vishwamai.torch` was never imported, or triton is missing.
    """
    assert all(n > 0 for n in grid), grid
    arguments, bundles = {}, []
    for name, x in inputs.items():
        if isinstance(x, tuple):
            bundles.append((name, type(x)))
            for field, value in zip(fields_of(name, type(x)), x, strict=True):
                if isinstance(value, (int, float)):
                    constants[field] = value
                elif value is not None:
                    arguments[field] = value
        elif x is not None:
            arguments[name] = x
    requested = {name: out for name, out in outputs.items() if out is not None}
    how = Launch(kernel, tuple(grid), tuple(constants.items()), warps, stages, tuple(bundles))
    name = framework(next(iter(arguments.values())))
    launcher = _LAUNCHERS.get(name)
    if launcher is None:
        raise DeviceError(f"a kernel was given tensors of {name}: import vishwamai.{name} first.")
    _THIS_THREAD.launching = True
    try:
        arrays = launcher(how, arguments, requested)
    finally:
        _THIS_THREAD.launching = False
    if _THIS_THREAD.record is not None:
        _THIS_THREAD.record.append((how, arguments, requested, arrays))
    results = iter(arrays)
    return [None if out is None else next(results) for out in outputs.values()]


def repeat(first: int, count: int, body: Callable[[AnyArray, PyTree], PyTree], carry: PyTree) -> PyTree:
    """`carry` after `body(step, carry)` for each step from `first` to `count` - 1, a loop of launches.

    Args:
      body: called with the step as an int32 array `[1]` on the device, which kernels read: in a JAX program it is
        traced once, and compiled once.
      carry: a pytree of arrays, None for absent ones; at least one array. `body` returns the same shapes.
    """
    array = next(leaf for leaf in jax.tree.leaves(carry))
    if framework(array) == "jax":
        return jax.lax.fori_loop(
            first, count, lambda i, carry: body(jnp.asarray(i, jnp.int32).reshape(1), carry), carry
        )
    torch = importlib.import_module("torch")
    # Not recorded: a record, or who repeats it, would hold what each part leaves, which must be free for the next one.
    before, _THIS_THREAD.record = _THIS_THREAD.record, None
    try:
        for i in range(first, count):
            carry = body(torch.full((1,), i, dtype=torch.int32, device=array.device), carry)
    finally:
        _THIS_THREAD.record = before
    return carry
