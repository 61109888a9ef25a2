"""Inputs of `TPUv4Kernels.benchmark_kernels`, and the measurement. Entradas de `benchmark_kernels`, y la medición."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from capibara.core.kernels.measured import Runner
from vishwamai.kernels import KernelError


@dataclasses.dataclass(frozen=True)
class _Shape:
    """One kernel's inputs: bfloat16 arrays by shape, on a TPU and elsewhere; and the other arguments."""

    tpu: tuple[tuple[int, ...], ...]
    elsewhere: tuple[tuple[int, ...], ...]
    call: Callable[..., Any]


SHAPES: dict[str, _Shape] = {
    "flash_attention": _Shape(
        ((4, 32, 4096, 128),) * 3, ((1, 8, 512, 64),) * 3, lambda k, *x: k.flash_attention(*x, causal=True)
    ),
    "optimized_matmul": _Shape(((8192, 8192),) * 2, ((1024, 1024),) * 2, lambda k, *x: k.optimized_matmul(*x)),
    "einsum_optimize": _Shape(
        ((4, 16, 2048, 128),) * 2,
        ((1, 8, 256, 64),) * 2,
        lambda k, *x: k.einsum_optimize("bhnd,bhkd->bhnk", x),
    ),
    "batch_operations": _Shape(
        ((4096, 4096),) * 8, ((512, 1024),) * 4, lambda k, *x: k.batch_operations("layer_norm", x)
    ),
    "moe_routing_kernel": _Shape(
        ((16384, 4096), (4096, 32)),
        ((2048, 256), (256, 32)),
        lambda k, x, w: k.moe_routing_kernel(x, 32, 4, router_weights=w),
    ),
    "fast_layer_norm": _Shape(((16384, 8192),), ((2048, 1024),), lambda k, x: k.fast_layer_norm(x)),
    "fused_gelu_dropout": _Shape(((16384, 8192),), ((2048, 1024),), lambda k, x: k.fused_gelu_dropout(x)),
}
"""Every kernel that can be measured, with its inputs."""


def run(kernels: Any, runner: Runner, names: Sequence[str] | None, repeats: int) -> dict[str, dict[str, Any]]:
    """The figures of each kernel; see `TPUv4Kernels.benchmark_kernels`."""
    chosen = list(SHAPES) if names is None else list(names)
    for name in chosen:
        if name not in SHAPES:
            raise KernelError(f"benchmark_kernels: there is no kernel {name!r}; choose from {', '.join(SHAPES)}.")
    if repeats < 1:
        raise KernelError(f"benchmark_kernels: `repeats` is {repeats}; pass 1 or more.")
    on_tpu = jax.devices()[0].platform == "tpu"
    return {name: _measure(kernels, runner, SHAPES[name], on_tpu, repeats) for name in chosen}


def _measure(kernels: Any, runner: Runner, shape: _Shape, on_tpu: bool, repeats: int) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 8)
    arrays = [
        jax.random.normal(key, dims, jnp.bfloat16) for key, dims in zip(keys, shape.tpu if on_tpu else shape.elsewhere)
    ]
    runs = []
    for _ in range(repeats + 1):
        shape.call(kernels, *arrays)
        assert runner.last is not None
        runs.append(runner.last)
    median = dataclasses.replace(runs[-1], seconds=statistics.median(r.seconds for r in runs[1:]))
    return {
        "throughput": median.tflops,
        "latency_ms": median.seconds * 1e3,
        "memory_efficiency": median.useful / median.allocated,
        "device": median.device,
    }
