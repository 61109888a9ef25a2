"""gemm and the normalizations on TPUs that are not here: the compiler's own schedule, as a share of the chip's roofline, beside XLA's.

The share is roofline / estimate (docs/aot.md says how far an estimate can be trusted). For a product the roofline is max(FLOPs / peak, bytes /
bandwidth); for a normalization it is its bytes / bandwidth. "backward" is the program of forward and backward, whose bytes are those of both.

    python benchmarks/tpu_rooflines.py --targets v4,v5e,v5p,v6e,tpu7x --cases gemm,int8,norm
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai import gemm, layer_norm, rms_norm
from vishwamai.aot.schedule import Case, inspect_many
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.hardware import CHIPS

IMPLEMENTATIONS = ("pallas_tpu", "xla")


def _array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def products(dtype: Any) -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """(name, call, arrays, FLOPs, bytes or None for the program's own)."""
    out_dtype = jnp.int32 if dtype == jnp.int8 else None
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 14336), (4096, 14336, 4096), (512, 512, 512), (1000, 1000, 1000)):
        call = functools.partial(gemm, out_dtype=out_dtype)
        name = f"gemm {jnp.dtype(dtype).name} {m}x{n}x{k}"
        yield name, call, [_array(m, k, dtype=dtype), _array(k, n, dtype=dtype)], 2.0 * m * n * k, None


def normalizations() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """The forward pass, and the forward and backward pass together, of both norms."""

    def with_gradient(call: Callable[..., Any], x: Any, cotangent: Any, *parameters: Any, **how: Any) -> Any:
        y, pullback = jax.vjp(lambda *arrays: call(*arrays, **how), x, *parameters)
        return y, pullback(cotangent)

    for rows, features in ((8192, 8192), (32768, 1024)):
        x, parameter = _array(rows, features), _array(features, dtype=jnp.float32)
        size = rows * features * 2
        for name, call, parameters in (
            ("layer_norm", layer_norm, [parameter, parameter]),
            ("rms_norm", rms_norm, [parameter]),
        ):
            yield f"{name} {rows}x{features}", call, [x, *parameters], 8.0 * rows * features, 2.0 * size
            both = functools.partial(with_gradient, call)
            label = f"{name} {rows}x{features} backward"
            yield label, both, [x, x, *parameters], 24.0 * rows * features, 5.0 * size


SUITES: dict[str, Callable[[], Iterator[Any]]] = {
    "gemm": lambda: products(jnp.bfloat16),
    "int8": lambda: products(jnp.int8),
    "norm": normalizations,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(CHIPS))
    parser.add_argument("--cases", default=",".join(SUITES))
    options = parser.parse_args()
    targets = options.targets.split(",")
    print(f"{'share of the roofline, ours / XLA, %':<44}" + "".join(f"{target:>12}" for target in targets))
    for suite in options.cases.split(","):
        for name, call, arrays, flops, nbytes in SUITES[suite]():
            programs = [
                Case(functools.partial(call, implementation=impl), arrays, target=target, flops=flops, nbytes=nbytes)
                for target in targets
                for impl in IMPLEMENTATIONS
            ]
            shares = [
                "error" if isinstance(result, VishwamaiError) else f"{100 * result.efficiency:.0f}"
                for result in inspect_many(programs)
            ]
            pairs = zip(shares[::2], shares[1::2], strict=True)
            print(f"{name:<44}" + "".join(f"{f'{ours} / {xla}':>12}" for ours, xla in pairs), flush=True)


if __name__ == "__main__":
    main()
