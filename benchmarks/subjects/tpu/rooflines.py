"""gemm, the normalizations, rotary embeddings, softmaxes and gated units on TPUs you do not have: the compiler's own
schedule, as a share of the chip's roofline, compared with XLA's.

The share is roofline / estimate (docs/aot.md says how far an estimate can be trusted). For a product the roofline is
max(FLOPs / peak, bytes / bandwidth); for all others it is bytes / bandwidth. "backward" is the program of forward and
backward, whose bytes are those of both, or what it moves where that is less: XLA may keep what one pass leaves in VMEM
for the other. `--ms` prints milliseconds in place of shares. ">" (ms) and "<" (shares) mark a
program of which the compiler left a part out.

    python benchmarks/tpu.py rooflines --targets v4,v5e,v5p,v6e,tpu7x --cases
    gemm,int8,norm,rope,softmax,gated_linear_unit,gated_int8,gated_gradient
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai import apply_rope, gated_linear_unit, gemm, layer_norm, quantize, rms_norm, softmax
from vishwamai.aot import Inspection, KernelSchedule, inspect_many
from vishwamai.bench import estimates
from vishwamai.core.config import ambient_target
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.signature import array_specs
from vishwamai.ops.gated import GATED
from vishwamai.ops.gated import spec as gated
from vishwamai.ops.gated.tpu_tiles import all_tiles

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
    for rows, features in ((8192, 8192), (32768, 1024)):
        x, parameter = _array(rows, features), _array(features, dtype=jnp.float32)
        size = rows * features * 2
        for name, call, parameters in (
            ("layer_norm", layer_norm, [parameter, parameter]),
            ("rms_norm", rms_norm, [parameter]),
        ):
            yield f"{name} {rows}x{features}", call, [x, *parameters], 8.0 * rows * features, 2.0 * size
            with_gradient = estimates.with_gradient(call, outputs=True)
            label = f"{name} {rows}x{features} backward"
            yield label, with_gradient, [x, *parameters, x], 24.0 * rows * features, 5.0 * size


def rotations() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """Queries and keys of Llama 3 8B as its projections leave them. (The simulator does not see the copies of the other
    layout, [batch, heads, ...].)
    """
    query, key = _array(4, 4096, 32, 128), _array(4, 4096, 8, 128)
    nbytes = 2.0 * 2 * (query.size + key.size)
    for interleaved in (False, True):

        def call(query: Any, key: Any, interleaved: bool = interleaved, **how: Any) -> Any:
            return apply_rope((query, key), layout="bshd", interleaved=interleaved, **how)

        yield f"apply_rope{' interleaved' * interleaved} 4x4096x(32+8)x128", call, [query, key], 1.0, nbytes


def softmaxes() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    for rows, features in ((8192, 8192), (32768, 1024)):
        x, size = _array(rows, features), 2.0 * rows * features
        yield f"softmax {rows}x{features}", softmax, [x], 1.0, 2 * size
        with_gradient = estimates.with_gradient(softmax, outputs=True)
        yield f"softmax {rows}x{features} backward", with_gradient, [x, x], 1.0, 5 * size


def gated_units() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """SwiGLU of Llama 3 8B: two products forward, four more with the gradient."""
    m, k, n = 4096, 4096, 14336
    x, weights, h = _array(m, k), _array(k, n), _array(m, n)

    def call(x: Any, gate: Any, up: Any, **how: Any) -> Any:
        return gated_linear_unit(x, (gate, up), **how)

    yield f"gated_linear_unit {m}x{k}x{n}", call, [x, weights, weights], 4.0 * m * n * k, None
    with_gradient = estimates.with_gradient(call, outputs=True)
    yield f"gated_linear_unit {m}x{k}x{n} backward", with_gradient, [x, weights, weights, h], 12.0 * m * n * k, None


def quantized_gated_units() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """The same of int8 weights, as one operation and as two products with a pass after them."""
    k, n = 4096, 14336
    weights = [jax.eval_shape(lambda w: quantize(w, axis=-2), _array(k, n))] * 2

    def unit(x: Any, *weights: Any, **how: Any) -> Any:
        return gated_linear_unit(x, weights, **how)

    def two(x: Any, *weights: Any, **how: Any) -> Any:
        gate, up = (gemm(x, w, out_dtype=jnp.float32, **how) for w in weights)
        return (jax.nn.silu(gate) * up).astype(x.dtype)

    for m in (64, 2048):
        for name, call in (("gated_linear_unit", unit), ("two products", two)):
            yield f"{name} int8 {m}x{k}x{n}", call, [_array(m, k), *weights], 4.0 * m * n * k, None


def gated_gradients() -> Iterator[tuple[str, Callable[..., Any], list[Any], float, float | None]]:
    """The same gradient alone, from both products as the forward pass keeps them; by our kernels on every chip, also
    where the library leaves it to XLA.
    """
    m, k, n = 4096, 4096, 14336
    x, weights, h = _array(1, m, k), _array(1, k, n), _array(1, m, n)

    def call(x: Any, gate: Any, up: Any, *kept_and_dh: Any, implementation: str) -> Any:
        arrays = gated.Operands(x, gate, up, None)
        *saved, dh = kept_and_dh
        spec = gated.GatedSpec(gated.Operands(*array_specs(arrays)))
        choice = GATED.plan(spec, implementation=implementation).choice("tpu")
        config = all_tiles(spec, ambient_target()) if implementation == "pallas_tpu" else choice.config
        run = choice.implementation.backward
        return run(spec, config, arrays, None, gated.Residuals(*saved), gated.Outputs(dh))

    name = f"gated_linear_unit {m}x{k}x{n} gradient"
    yield name, call, [x, weights, weights, h, h, h], 8.0 * m * n * k, None


SUITES: dict[str, Callable[[], Iterator[Any]]] = {
    "gemm": lambda: products(jnp.bfloat16),
    "int8": lambda: products(jnp.int8),
    "norm": normalizations,
    "rope": rotations,
    "softmax": softmaxes,
    "gated_linear_unit": gated_units,
    "gated_int8": quantized_gated_units,
    "gated_gradient": gated_gradients,
}


def _cell(result: KernelSchedule | VishwamaiError, ms: bool) -> str:
    if isinstance(result, VishwamaiError):
        return "error"
    complete = isinstance(estimates.seconds_of({"": result})[""], float)
    if ms:
        return f"{'' if complete else '>'}{1e3 * result.seconds:.2f}"
    bound = result.roofline
    if bound.by == "memory":
        bound = dataclasses.replace(bound, bytes=min(bound.bytes, result.simulation.hbm_bytes))
    return f"{'' if complete else '<'}{100 * bound.seconds / result.seconds:.0f}"


def main() -> None:
    parser = estimates.parser(__doc__, cases=SUITES)
    parser.add_argument("--ms", action="store_true", help="milliseconds in place of shares")
    options = parser.parse_args()
    targets = options.targets
    unit = "ms" if options.ms else "share of the roofline, %"
    print(f"{f'ours / XLA, {unit}':<44}" + "".join(f"{target:>12}" for target in targets))
    for suite in options.cases:
        for name, call, arrays, flops, nbytes in SUITES[suite]():
            programs = [
                Inspection(
                    functools.partial(call, implementation=impl), arrays, target=target, flops=flops, nbytes=nbytes
                )
                for target in targets
                for impl in IMPLEMENTATIONS
            ]
            cells = [_cell(result, options.ms) for result in inspect_many(programs)]
            pairs = zip(cells[::2], cells[1::2], strict=True)
            print(f"{name:<44}" + "".join(f"{f'{ours} / {xla}':>12}" for ours, xla in pairs), flush=True)
