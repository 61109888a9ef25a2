"""Measuring one program: its time, its memory, its work, and what the device could do at most."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import jax

from vishwamai.core import hardware

if TYPE_CHECKING:
    from vishwamai.core.op import Plan


class Peaks(Protocol):
    """What a device can do at most."""

    @property
    def published(self) -> bool:
        """The figures are the maker's: nothing real is above them. Measured ones are the best that was seen."""
        ...

    @property
    def how(self) -> str:
        """Where the figures are from, in words."""
        ...

    def flops(self, dtype: str) -> float | None:
        """FLOP/s of products of `dtype`; None where nobody knows."""
        ...

    def bandwidth(self, nbytes: int) -> float | None:
        """Bytes/s of memory for a job that moves `nbytes`; None where nobody knows."""
        ...


@dataclasses.dataclass(frozen=True)
class ChipPeaks:
    """The published figures of a TPU generation, for one jax device."""

    chip: hardware.Chip
    published: bool = True

    @property
    def how(self) -> str:
        return f"published peaks of one {self.chip.name} device"

    def flops(self, dtype: str) -> float:
        return self.chip.peak_per_device(dtype)

    def bandwidth(self, nbytes: int) -> float:
        del nbytes
        return self.chip.hbm_bandwidth_per_device


@dataclasses.dataclass(frozen=True)
class UnknownPeaks:
    """For a device whose peaks nobody named."""

    published: bool = False
    how: str = "the peaks of this device are not known"

    def flops(self, dtype: str) -> None:
        del dtype

    def bandwidth(self, nbytes: int) -> None:
        del nbytes


def local_peaks() -> Peaks:
    """The published peaks of the default device, if it is a TPU; else unknown."""
    chip = hardware.chip_for(jax.devices()[0].device_kind)
    return UnknownPeaks() if chip is None else ChipPeaks(chip)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One program as it ran.

    Attributes:
      result: what it returned.
      seconds: median time of a run that is waited for, without compilation.
      memory: bytes of its operands, results and temporaries, as the compiler laid them out (scratch that a native CPU kernel takes by itself is not
        in it).
      useful: bytes of operands and results alone.
    """

    result: Any
    seconds: float
    memory: int
    useful: int


def measure(program: Callable[..., Any], *arguments: Any, repeats: int = 5) -> Measured:
    """Compiles `program(*arguments)` and times it: one run to warm up, then the median of `repeats`, each waited for.

    >>> import jax.numpy as jnp
    >>> found = measure(lambda x: x + 1, jnp.zeros(1024), repeats=3)
    >>> found.seconds > 0, found.memory, found.useful
    (True, 8192, 8192)
    """
    compiled = (program if hasattr(program, "lower") else jax.jit(program)).lower(*arguments).compile()
    return measure_compiled(compiled, *arguments, repeats=repeats)


def measure_compiled(compiled: jax.stages.Compiled, *arguments: Any, repeats: int = 5) -> Measured:
    """`measure` of a program that is compiled already."""
    result = jax.block_until_ready(compiled(*arguments))
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = jax.block_until_ready(compiled(*arguments))
        samples.append(time.perf_counter() - start)
    stats = compiled.memory_analysis()
    assert stats is not None  # every backend of jax that compiles gives it
    useful = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return Measured(result, statistics.median(samples), useful + stats.temp_size_in_bytes, useful)


def work(plan: Plan) -> tuple[int | None, int]:
    """(FLOP, bytes) of one forward pass of a planned call; FLOP None where the operation does not count them."""
    spec = plan.spec
    operands = sum(x.nbytes for x in spec.operands if x is not None)
    return getattr(spec, "flops", None), getattr(spec, "bytes_moved", operands)
