"""Measuring one program: its time, its memory and its work."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import jax

from vishwamai.core import observe
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.jax_errors import out_of_memory_named
from vishwamai.core.types import PyTree


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program as it ran.

    Attributes:
      result: its return value.
      seconds: median time of a run that is waited for, without compilation.
      memory: bytes of its operands, results and temporaries, as the compiler laid them out (scratch that a native CPU
        kernel takes by itself is not in it).
      useful: bytes of operands and results alone.
    """

    result: PyTree
    seconds: float
    memory: int
    useful: int


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs the block as if nothing were profiled: jitted, and not taken apart."""
    with observe.unobserved(), jax.disable_jit(False):
        yield


def measure(program: Callable[..., object], *arguments: object, repeats: int = 5) -> Measured:
    """Compiles `program(*arguments)` and times it: one run to warm up, then the median of `repeats`, each waited for.

    >>> import jax.numpy as jnp
    >>> found = measure(lambda x: x + 1, jnp.zeros(1024), repeats=3)
    >>> found.seconds > 0, found.memory, found.useful
    (True, 8192, 8192)
    """
    compiled = (program if hasattr(program, "lower") else jax.jit(program)).lower(*arguments).compile()
    return measure_compiled(compiled, *arguments, repeats=repeats)


def measure_compiled(
    compiled: jax.stages.Compiled, *arguments: object, repeats: int = 5, name: str = "measure"
) -> Measured:
    """`measure` of a program that is compiled already; `name` is what an error calls it.

    Raises:
      DeviceError: its results or temporaries do not fit the device's memory.
    """
    with out_of_memory_named(name):
        result = jax.block_until_ready(compiled(*arguments))
        samples = []
        for _ in range(repeats):
            start = time.perf_counter()
            result = jax.block_until_ready(compiled(*arguments))
            samples.append(time.perf_counter() - start)
    stats, total = compiled.memory_analysis(), program_bytes(compiled)
    assert stats is not None and total is not None  # every backend of jax that compiles gives it
    return Measured(result, statistics.median(samples), total, total - stats.temp_size_in_bytes)


def program_bytes(compiled: jax.stages.Compiled) -> int | None:
    """Bytes of a device that a compiled program takes: operands, results and temporaries; None where the compiler does
    not say.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    arrays = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return arrays + stats.temp_size_in_bytes


def measure_eager(run: Callable[[], object], arguments: object, *, repeats: int = 5) -> Measured:
    """`measure` of a function that runs at once, and has finished when it returns; memory is that of its arguments and
    results.
    """
    result = run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = run()
        samples.append(time.perf_counter() - start)
    nbytes = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves((arguments, result)))
    return Measured(result, statistics.median(samples), nbytes, nbytes)


def work(plan: CallPlan) -> tuple[int | None, int]:
    """(FLOP, bytes) of one forward pass of a planned call; FLOP None where the operation does not count them."""
    spec = plan.spec
    operands = sum(x.nbytes for x in spec.operands if x is not None)
    return getattr(spec, "flops", None), getattr(spec, "bytes_moved", operands)


def pass_flops(plan: CallPlan, direction: str) -> float | None:
    """FLOP of one pass of a planned call, "forward", "forward_with_residuals" or "backward"; a backward pass that the
    operation does not count is two forward ones. None where it counts none.
    """
    flops, _ = work(plan)
    if flops is None or direction != "backward":
        return flops
    return getattr(plan.spec, "backward_flops", 2 * flops)


def compute_dtype(plan: CallPlan) -> str:
    """The dtype whose peak counts for a planned call."""
    first = next(x for x in plan.spec.operands if x is not None)
    return jax.numpy.dtype(getattr(plan.spec, "compute_dtype", first.dtype)).name
