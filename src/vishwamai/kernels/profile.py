"""`profile_kernel` for any machine: published peaks of a TPU, elsewhere the peaks that this machine is measured to have."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core import hardware, measuring, profiling
from vishwamai.core.measuring import ChipPeaks, Peaks
from vishwamai.core.profiling import Profile


class MeasuredPeaks:
    """The best that this machine was seen to do: products by every library at hand, and copies of as many bytes as the job moves.

    A job that fits the caches is held against a copy that fits them too, so its share does not flatter it.
    """

    published = False

    @property
    def how(self) -> str:
        return f"{_measured('float32').how}; or of a copy of as many bytes"

    def flops(self, dtype: str) -> float:
        """FLOP/s; 8-bit floats are multiplied as bfloat16, and what is no dtype of products counts as float32."""
        unit = "bfloat16" if dtype.startswith("float8") else dtype
        unit = unit if unit in ("bfloat16", "float16", "int8") else "float32"
        return max(_measured(unit).flops[unit].values())

    def bandwidth(self, nbytes: int) -> float:
        """Bytes/s."""
        return max(_measured("float32").best_bandwidth, _copy_rate(max(4096, 1 << (nbytes - 1).bit_length())))


@functools.cache
def _measured(dtype: str) -> Any:
    """`vishwamai.bench`'s measurement of one dtype's products and of copies larger than the caches; about a second."""
    from vishwamai.bench.peaks import measure

    with profiling.undisturbed():
        return measure(quick=True, dtypes=(dtype,))


@functools.cache
def _copy_rate(nbytes: int) -> float:
    """Bytes/s of doubling an array, which reads and writes `nbytes` together."""
    with profiling.undisturbed():
        found = measuring.measure(lambda x: x * 2, jnp.ones(nbytes // 8, jnp.float32), repeats=11)
    return nbytes / found.seconds


def peaks() -> Peaks:
    """The peaks of the default device: published for a TPU, measured (about a second for each dtype, once a process) for any other."""
    chip = hardware.chip_for(jax.devices()[0].device_kind)
    return MeasuredPeaks() if chip is None else ChipPeaks(chip)


@contextlib.contextmanager
def profile_kernel(*, repeats: int = 5) -> Iterator[Profile]:
    """Measures every vishwamai operation that runs in the block, and every decorated kernel as a whole; on any machine.

    Each operation is compiled as a program of its own and run on its own operands: once to warm up, then `repeats` times, each waited for; the
    median counts. A decorated kernel is timed whole besides. `vishwamai.core.profiling` says why, and what the figures leave out.

    Args:
      repeats: how often an operation is run for its median.

    Yields:
      a `Profile`: `print(prof.summary())` gives the table (per operation: calls, time, GFLOP/s, GB/s, share of the peak, memory); `prof.operations`
      and `prof.kernels` hold its rows.

    >>> import vishwamai
    >>> with profile_kernel(repeats=3) as prof:
    ...     y = vishwamai.rms_norm(jnp.ones((64, 256)))
    >>> prof.operations[0].name, prof.operations[0].calls, prof.operations[0].seconds > 0
    ('norm forward', 1, True)
    """
    with profiling.profile_kernel(repeats=repeats, peaks=peaks) as profile:
        yield profile
