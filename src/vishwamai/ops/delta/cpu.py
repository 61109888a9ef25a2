"""The recurrences on the CPU: the native kernel of `cpu_delta.isa.cc`, token by token with the state in the first
cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.segments import segment_numbers
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.delta import chunked
from vishwamai.ops.delta.spec import DeltaSpec, Operands, Outputs

_HANDLER = "vishwamai_delta"
STEP = "vishwamai_delta_step"
"""The handler of `step`."""
_NATIVE = ("float32", "bfloat16", "float16", "float64")


def why_not(spec: DeltaSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    dtype = spec.operands.value.dtype.name
    if dtype not in _NATIVE:
        return f"`value` is {dtype}; the CPU kernel takes {', '.join(_NATIVE)}."
    if 0 in (spec.batch, spec.heads, spec.seq, spec.key_dim, spec.value_dim):
        return "an axis is empty."
    return ffi.why_not(target, _HANDLER)


def why_not_default(spec: DeltaSpec, target: Target) -> str | None:
    if spec.value_dim == 1 and spec.seq <= chunked.FEW:
        return "a head of one feature leaves the lanes of a vector empty, and few tokens are faster all heads at once."
    return None


def arguments(spec: DeltaSpec, operands: Operands) -> tuple[tuple[AnyArray, ...], dict[str, Any]]:
    """The operands up to the state as the kernel takes them, and its options."""
    sums = (None if x is None else x.astype(spec.accumulator) for x in (operands.decay, operands.beta, operands.skip))
    options = {"scale": np.float64(spec.scale), "correction": spec.correction}
    return (operands.value, operands.query, operands.key, *sums), options


def forward(spec: DeltaSpec, operands: Operands) -> tuple[Outputs, None]:
    arrays, options = arguments(spec, operands)
    before, ids = operands.initial_state, operands.segment_ids
    y, state = ffi.call(
        _HANDLER,
        (
            ffi.result(operands.value.shape, operands.value.dtype),
            ffi.result(
                (spec.batch, spec.heads, spec.key_dim, spec.value_dim) if spec.return_state else None, spec.accumulator
            ),
        ),
        *arrays,
        None if before is None else before.astype(spec.accumulator),
        None if ids is None else segment_numbers(ids),
        **options,
    )
    return Outputs(y, state), None


def step(
    spec: DeltaSpec, operands: Operands, pool: AnyArray, slots: AnyArray, starts: AnyArray
) -> tuple[AnyArray, AnyArray]:
    """y and the pool of `pooled.PooledStates`, whose memory is changed in place."""
    arrays, options = arguments(spec, operands)
    results = ffi.result(operands.value.shape, operands.value.dtype), ffi.result(pool.shape, pool.dtype)
    y, pool = ffi.call(STEP, results, *arrays, pool, slots, starts, aliases={6: 1}, vmap_method="sequential", **options)
    return y, pool


def backward(spec: DeltaSpec, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs) -> Operands:
    """By XLA, with the products of `chunked.py`."""
    products = chunked.heuristic(spec, Target("cpu"))
    return chunked.XLA_CHUNKED.backward(spec, products, operands, outputs, residuals, cotangents)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, why_not_default=why_not_default)
