"""Runs one method's program and measures it: time, work, memory. Ejecuta el programa de un método y lo mide: tiempo,
trabajo y memoria.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.core
from jax.experimental.layout import Format, Layout

from vishwamai.core import hardware
from vishwamai.core.jax_errors import out_of_memory_named
from vishwamai.core.observe import record_plans
from vishwamai.kernels import KernelConfig, KernelError, kernel_config
from vishwamai.kernels.decorators import Kernel, translated
from vishwamai.measure.measurement import work


@dataclasses.dataclass(frozen=True)
class Run:
    """One measured call.

    Attributes:
      name: the method.
      seconds: time from the call to the finished result, without compilation.
      flops: floating-point operations: what the operations count, or, where there are none of ours, what the compiler
        counts.
      allocated: bytes of operands, results and temporaries; `useful`: without the temporaries.
      dtype: whose peak counts.
      device: the `device_kind` that it ran on.
    """

    name: str
    seconds: float
    flops: float
    allocated: int
    useful: int
    dtype: str
    device: str

    @property
    def tflops(self) -> float:
        """TFLOP/s.

        Raises:
          KernelError: the call counts no floating-point operations, or the figure is above the chip's peak, so it
            cannot be right.
        """
        if not self.flops:
            raise KernelError(f"{self.name}: it counts no floating-point operations, so there is no rate to tell.")
        rate = self.flops / self.seconds
        chip = hardware.tpu_for(self.device)
        if chip is not None and rate > chip.peak_per_device(self.dtype):
            raise KernelError(
                f"{self.name}: {rate / 1e12:.1f} TFLOP/s is above the {chip.peak_per_device(self.dtype) / 1e12:.1f} "
                f"that one {chip.name} device reaches with {self.dtype}; the clock or the count of its work is wrong, "
                "and the figure is not told."
            )
        return rate / 1e12


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    compiled: jax.stages.Compiled
    flops: float
    dtype: str
    useful: int
    allocated: int


class Runner:
    """Compiles programs once, runs and times them.

    Attributes:
      config: the configuration of every call.
      fuse: one jitted program a call; False runs JAX's operations one by one.
      automatic_layouts: the compiler chooses the memory layout of results.
      last: the last measured `Run`; None before the first.
    """

    def __init__(self, config: KernelConfig, fuse: bool, automatic_layouts: bool):
        self.config = config
        self.fuse = fuse
        self.automatic_layouts = automatic_layouts
        self.last: Run | None = None
        self._kernels: dict[Any, Kernel] = {}
        self._programs: dict[Any, _Program] = {}

    def __call__(
        self,
        name: str,
        function: Callable[..., Any],
        *args: Any,
        donate: bool = False,
        overrides: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """`function(*args, **options)` under the configuration; measured, unless it is being traced. `donate` gives the
        first array's memory away.
        """
        requested = overrides or {}
        kernel = self._kernel(name, function, donate, requested)
        call, arrays = kernel.split(args, options)
        if any(isinstance(x, jax.core.Tracer) for x in arrays):
            with kernel_config(self.config, **requested):
                return function(*args, **options)
        if not self.fuse:
            return self._one_by_one(name, function, args, options, requested)
        shapes = tuple((x.shape, str(x.dtype), getattr(x, "sharding", None)) for x in arrays)
        key = (function, call, donate, tuple(sorted(requested.items())), shapes)
        if key not in self._programs:
            self._programs[key] = self._compile(kernel, args, options)
        program = self._programs[key]
        jax.block_until_ready(arrays)
        start = time.perf_counter()
        try:
            result = jax.block_until_ready(program.compiled(*arrays))
        except jax.errors.JaxRuntimeError as error:
            raise translated(name, error) from error
        seconds = time.perf_counter() - start
        device = jax.devices()[0].device_kind
        self.last = Run(name, seconds, program.flops, program.allocated, program.useful, program.dtype, device)
        return result

    def _kernel(self, name: str, function: Callable[..., Any], donate: bool, requested: dict[str, Any]) -> Kernel:
        key = (function, donate, tuple(sorted(requested.items())))
        if key not in self._kernels:
            jit_options: dict[str, Any] = {"donate_argnums": 1} if donate else {}
            if self.automatic_layouts and not donate:  # a result in the input's memory lies as the input does
                jit_options["out_shardings"] = Format(Layout.AUTO)
            self._kernels[key] = Kernel(function, "tpu", requested, self.config, jit_options=jit_options)
        return self._kernels[key]

    def _compile(self, kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> _Program:
        compiled = kernel.lower(*args, **options).compile()
        with kernel.configured():
            flops, dtype = _work(kernel, args, options)
        if not flops:
            flops = float((compiled.cost_analysis() or {}).get("flops", 0.0))
        stats = compiled.memory_analysis()
        assert stats is not None
        useful = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        return _Program(compiled, flops, dtype, useful, useful + stats.temp_size_in_bytes)

    def _one_by_one(
        self, name: str, function: Callable[..., Any], args: Any, options: dict[str, Any], requested: dict[str, Any]
    ) -> Any:
        with kernel_config(self.config, **requested):
            start = time.perf_counter()
            with out_of_memory_named(name):
                result = jax.block_until_ready(function(*args, **options))
            seconds = time.perf_counter() - start
            flops, dtype = _work(Kernel(function, "tpu", requested, self.config), args, options)
        nbytes = sum(x.nbytes for x in jax.tree.leaves((args, options, result)) if hasattr(x, "nbytes"))
        self.last = Run(name, seconds, flops, nbytes, nbytes, dtype, jax.devices()[0].device_kind)
        return result


def _work(kernel: Kernel, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[float, str]:
    """Floating-point operations of all operations in the function, and the dtype of the largest one."""
    call, arrays = kernel.split(args, options)
    plans = record_plans(
        lambda *arrays: kernel.function(*call.arguments(arrays)[0], **call.arguments(arrays)[1]), *arrays
    )
    weighted = [(work(plan)[0] or 0, plan) for plan in plans]
    if not weighted:
        return 0.0, "float32"
    _, largest = max(weighted, key=lambda item: item[0])
    first = next(x for x in largest.spec.operands if x is not None)
    return float(sum(flops for flops, _ in weighted)), str(getattr(largest.spec, "compute_dtype", first.dtype))


def memory_in_use() -> float:
    """Bytes: of all local devices where they tell (TPU, GPU), else the resident memory of this process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(s is not None and "bytes_in_use" in s for s in stats):
        return float(sum(s["bytes_in_use"] for s in stats if s is not None))
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:  # not Linux: the largest it ever was, in bytes on macOS and KiB elsewhere
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return float(peak if sys.platform == "darwin" else peak * 1024)
