"""What this machine can do at most, as measured here: products per second of every dtype, and bytes per second of
memory.

These are not a data sheet's figures. A square product of each dtype by every library at hand (XLA, torch, our own), and
copies and scalings of arrays far larger than the caches (NumPy, XLA, torch); the best sample of the best of them is the
peak. Bytes count one read and one write for every element. A machine that others use is slower for a moment, so
`measure_again` keeps the best of several measurements; and what fits the caches is held against copies that fit too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Hashable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.measure.measurement import measure, undisturbed
from vishwamai.measure.peaks import Peaks, published_peaks
from vishwamai.measure.timing import side_by_side

K = TypeVar("K", bound=Hashable)

_QUICK_SIZE, _SIZE = 1024, 2048
_QUICK_BYTES, _BYTES = 64 << 20, 256 << 20


@dataclasses.dataclass(frozen=True)
class MachinePeaks:
    """What was measured.

    Attributes:
      flops: FLOP/s (a multiply-add is two) by dtype, then by who computed it.
      bandwidth: bytes/s by who copied, of arrays far larger than the caches.
      how: how it was measured, in words.
      cached: the best bytes/s of copies that move few bytes, by how many: powers of two.
    """

    flops: dict[str, dict[str, float]]
    bandwidth: dict[str, float]
    how: str
    cached: dict[int, float] = dataclasses.field(default_factory=dict)

    def peak(self, dtype: str) -> float:
        """The best FLOP/s measured for `dtype`; a dtype that was not measured counts as float32."""
        return max(self.flops.get(_unit(dtype), self.flops["float32"]).values())

    def rate(self, dtype: str, library: str) -> float:
        """FLOP/s that `library` reached with `dtype`, or the peak where it was not measured."""
        return self.flops.get(_unit(dtype), {}).get(library, self.peak(dtype))

    @property
    def best_bandwidth(self) -> float:
        return max(self.bandwidth.values())

    def bandwidth_for(self, nbytes: float) -> float:
        """The best bytes/s measured for a job of so many bytes: of memory, or of copies no larger than the job."""
        return max(self.best_bandwidth, self.cached.get(_size_class(nbytes), 0.0))

    def seconds(self, dtype: str, flops: float, nbytes: float) -> float:
        """The roofline's time: what the work takes at the least, be it bound by arithmetic or by memory."""
        return max(flops / self.peak(dtype), nbytes / self.bandwidth_for(nbytes))


def _size_class(nbytes: float) -> int:
    """The power of two that is no larger, of 4 KiB or more: the smaller a copy, the faster it is."""
    return max(4096, 1 << max(0, int(nbytes).bit_length() - 1))


def best_of(first: MachinePeaks, second: MachinePeaks) -> MachinePeaks:
    """The better of two measurements of one machine, figure by figure.

    >>> slow, fast = ({"float32": {"jax": rate}} for rate in (1e9, 2e9))
    >>> best_of(MachinePeaks(slow, {"jax": 8.0}, "a"), MachinePeaks(fast, {"jax": 4.0}, "b")).peak("float32")
    2000000000.0
    """
    dtypes = dict.fromkeys((*first.flops, *second.flops))
    flops = {dtype: _larger(first.flops.get(dtype, {}), second.flops.get(dtype, {})) for dtype in dtypes}
    return MachinePeaks(
        flops, _larger(first.bandwidth, second.bandwidth), first.how, _larger(first.cached, second.cached)
    )


def _larger(first: dict[K, float], second: dict[K, float]) -> dict[K, float]:
    return {
        key: max(first.get(key, 0.0), second.get(key, 0.0)) for key in (*first, *(k for k in second if k not in first))
    }


def _unit(dtype: str) -> str:
    """The dtype whose unit does the work: 8-bit floats are multiplied as bfloat16 where nothing else is known."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def _products(size: int, dtype: str, only: str | None = None) -> dict[str, Callable[[], object]]:
    """Calls by who computes; `only`: by this one alone."""
    rng = np.random.default_rng(0)
    values = [rng.integers(-4, 5, (size, size)).astype(jnp.dtype(dtype)) for _ in range(2)]
    a, b = map(jax.device_put, values)
    total = jnp.int32 if dtype == "int8" else None
    calls: dict[str, Callable[[], object]] = {}

    def compiled(name: str, function: Callable[..., jax.Array]) -> None:
        if only not in (None, name):
            return
        program = jax.jit(function).lower(a, b).compile()
        calls[name] = lambda: program(a, b).block_until_ready()

    compiled("jax", lambda a, b: jnp.matmul(a, b, preferred_element_type=total))
    if vishwamai.explain(vishwamai.gemm, a, b).calls[0].runs != "xla":
        compiled("vishwamai", lambda a, b: vishwamai.gemm(a, b))
    with_torch = dtype != "int8" and only in (None, "torch") and importlib.util.find_spec("torch") is not None
    if with_torch and jax.default_backend() == "cpu":
        import torch

        s, t = (torch.from_numpy(v.astype(np.float32)).to(getattr(torch, dtype)) for v in values)
        calls["torch"] = lambda: torch.matmul(s, t)
    return calls


def _copies(nbytes: int) -> dict[str, Callable[[], object]]:
    source = np.ones(nbytes // 4, np.float32)
    target = np.empty_like(source)
    x = jax.device_put(source)
    # Doubling: XLA hands a plain copy to one thread's memcpy, but shares an elementwise loop.
    double = jax.jit(lambda x: x * 2).lower(x).compile()
    calls: dict[str, Callable[[], object]] = {
        "numpy copy": lambda: np.copyto(target, source),
        "jax": lambda: double(x).block_until_ready(),
    }
    if importlib.util.find_spec("torch") is not None and jax.default_backend() == "cpu":
        import torch

        s, t = torch.from_numpy(source), torch.from_numpy(target)
        calls["torch copy"] = lambda: t.copy_(s)
        calls["torch"] = lambda: torch.mul(s, 2, out=t)
    return calls


def _best(calls: dict[str, Callable[[], object]], work: float, budget: float, rounds: int = 12) -> dict[str, float]:
    for call in calls.values():
        call()
    return {name: work / timing.best for name, timing in side_by_side(calls, budget, rounds=rounds).items()}


def measure_again(before: MachinePeaks, quick: bool = False) -> MachinePeaks:
    """The best of `before` and of a shorter measurement now, of who was the fastest before."""
    size, nbytes = (_QUICK_SIZE, _QUICK_BYTES) if quick else (_SIZE, _BYTES)
    flops = {
        dtype: _best(
            _products(size, dtype, max(rates, key=lambda library: rates[library])), 2.0 * size**3, 0.2, rounds=3
        )
        for dtype, rates in before.flops.items()
    }
    return best_of(before, MachinePeaks(flops, _best(_copies(nbytes), 2.0 * nbytes, 0.2, rounds=3), before.how))


def measure_cached(before: MachinePeaks, nbytes: float) -> MachinePeaks:
    """`before` with the copies that a job of so many bytes is held against, where they are not known yet; a tenth of a
    second. A job larger than the copies of `measure_machine` needs none.
    """
    size = _size_class(nbytes)
    if size in before.cached or size >= 2 * _QUICK_BYTES:
        return before
    rate = max(_best(_copies(size // 2), float(size), 0.1).values())
    return dataclasses.replace(before, cached={**before.cached, size: rate})


def measure_machine(quick: bool = False, dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")) -> MachinePeaks:
    """Measures this machine; about five seconds, two if `quick`."""
    size, nbytes, budget = (_QUICK_SIZE, _QUICK_BYTES, 0.5) if quick else (_SIZE, _BYTES, 1.5)
    flops = {dtype: _best(_products(size, dtype), 2.0 * size**3, budget) for dtype in dtypes}
    bandwidth = _best(_copies(nbytes), 2.0 * nbytes, budget)
    how = (
        f"best sample of a {size} x {size} x {size} product for each dtype, and of reading and writing {nbytes >> 20} "
        f"MiB, by {', '.join(sorted({name for rates in flops.values() for name in rates}))}"
    )
    return MachinePeaks(flops, bandwidth, how)


class MeasuredPeaks:
    """The best that this machine was seen to do: products by every library at hand, and copies of as many bytes as the
    job moves.

    A job that fits the caches is held against a copy that fits them too, so its share does not flatter it.
    """

    published = False

    @property
    def how(self) -> str:
        return f"{_measured('float32').how}; or of a copy of as many bytes"

    def flops(self, dtype: str) -> float:
        """FLOP/s; 8-bit floats are multiplied as bfloat16, and a dtype without products counts as float32."""
        unit = "bfloat16" if dtype.startswith("float8") else dtype
        unit = unit if unit in ("bfloat16", "float16", "int8") else "float32"
        return max(_measured(unit).flops[unit].values())

    def bandwidth(self, nbytes: int) -> float:
        """Bytes/s."""
        return max(_measured("float32").best_bandwidth, _copy_rate(max(4096, 1 << (nbytes - 1).bit_length())))


@functools.cache
def _measured(dtype: str) -> MachinePeaks:
    """One dtype's products and copies larger than the caches; about a second."""
    with undisturbed():
        return measure_machine(quick=True, dtypes=(dtype,))


@functools.cache
def _copy_rate(nbytes: int) -> float:
    """Bytes/s of doubling an array, which reads and writes `nbytes` together."""
    with undisturbed():
        measured = measure(lambda x: x * 2, jnp.ones(nbytes // 8, jnp.float32), repeats=11)
    return nbytes / measured.seconds


def local_peaks() -> Peaks:
    """The peaks of the default device: published for a TPU, measured (about a second for each dtype, once a process)
    for any other.
    """
    return published_peaks() or MeasuredPeaks()
