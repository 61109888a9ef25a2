"""What this machine can do at most, as measured here: products per second of every dtype, and bytes per second of memory.

Nobody's data sheet: a square product of each dtype by every library at hand (XLA, torch, our own), and copies and scalings of arrays far larger than
the caches (NumPy, XLA, torch); the best sample of the best of them is the peak. Bytes count one read and one write for every element.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.bench.timing import side_by_side

_QUICK_SIZE, _SIZE = 1024, 2048
_QUICK_BYTES, _BYTES = 64 << 20, 256 << 20


@dataclasses.dataclass(frozen=True)
class Peaks:
    """What was measured.

    Attributes:
      flops: FLOP/s (a multiply-add is two) by dtype, then by who computed it.
      bandwidth: bytes/s by who copied.
      how: how it was measured, in words.
    """

    flops: dict[str, dict[str, float]]
    bandwidth: dict[str, float]
    how: str

    def peak(self, dtype: str) -> float:
        """The best FLOP/s measured for `dtype`; a dtype that was not measured counts as float32."""
        return max(self.flops.get(_unit(dtype), self.flops["float32"]).values())

    def rate(self, dtype: str, who: str) -> float:
        """FLOP/s that `who` reached with `dtype`, or the peak where it was not measured."""
        return self.flops.get(_unit(dtype), {}).get(who, self.peak(dtype))

    @property
    def best_bandwidth(self) -> float:
        return max(self.bandwidth.values())

    def seconds(self, dtype: str, flops: float, nbytes: float) -> float:
        """The roofline's time: what the work takes at the least, be it bound by arithmetic or by memory."""
        return max(flops / self.peak(dtype), nbytes / self.best_bandwidth)


def _unit(dtype: str) -> str:
    """The dtype whose unit does the work: 8-bit floats are multiplied as bfloat16 where nothing else is known."""
    return "bfloat16" if dtype.startswith("float8") else dtype


def _products(size: int, dtype: str) -> dict[str, Callable[[], object]]:
    rng = np.random.default_rng(0)
    values = [rng.integers(-4, 5, (size, size)).astype(jnp.dtype(dtype)) for _ in range(2)]
    a, b = map(jax.device_put, values)
    total = jnp.int32 if dtype == "int8" else None
    calls: dict[str, Callable[[], object]] = {}

    def compiled(name: str, function: Callable[..., jax.Array]) -> None:
        program = jax.jit(function).lower(a, b).compile()
        calls[name] = lambda: program(a, b).block_until_ready()

    compiled("jax", lambda a, b: jnp.matmul(a, b, preferred_element_type=total))
    if vishwamai.explain(vishwamai.gemm, a, b).calls[0].runs != "xla":
        compiled("vishwamai", lambda a, b: vishwamai.gemm(a, b))
    if dtype != "int8" and importlib.util.find_spec("torch") is not None and jax.default_backend() == "cpu":
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


def _best(calls: dict[str, Callable[[], object]], work: float, budget: float) -> dict[str, float]:
    for call in calls.values():
        call()
    return {name: work / timing.best for name, timing in side_by_side(calls, budget, rounds=12).items()}


def measure(quick: bool = False, dtypes: tuple[str, ...] = ("float32", "bfloat16", "int8")) -> Peaks:
    """Measures this machine; about five seconds, two if `quick`."""
    size, nbytes, budget = (_QUICK_SIZE, _QUICK_BYTES, 0.5) if quick else (_SIZE, _BYTES, 1.5)
    flops = {dtype: _best(_products(size, dtype), 2.0 * size**3, budget) for dtype in dtypes}
    bandwidth = _best(_copies(nbytes), 2.0 * nbytes, budget)
    how = (
        f"best sample of a {size} x {size} x {size} product for each dtype, and of reading and writing {nbytes >> 20} MiB, "
        f"by {', '.join(sorted({name for found in flops.values() for name in found}))}"
    )
    return Peaks(flops, bandwidth, how)
