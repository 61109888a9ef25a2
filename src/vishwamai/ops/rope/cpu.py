"""The rotary embedding on the CPU: the native kernel of `cpu_rope.isa.cc`, query and key in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray
from vishwamai.ops.rope.reference import table_gradients
from vishwamai.ops.rope.spec import Operands, Outputs, RopeSpec

if TYPE_CHECKING:
    import jax
    import numpy as np

_NATIVE = tuple(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64))


def why_not(spec: RopeSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    query = spec.operands.query
    if query.dtype not in _NATIVE:
        return f"the arrays are {query.dtype.name}; the CPU kernel takes {', '.join(d.name for d in _NATIVE)}."
    return ffi.why_not(target)


def notes(spec: RopeSpec, target: Target) -> tuple[str, ...]:
    if _storage(spec) == spec.operands.query.dtype:
        return ()
    return (f"the tables are float64, so {spec.operands.query.dtype.name} arrays turn as float64 copies",)


def _storage(spec: RopeSpec) -> np.dtype:
    """The dtype that the kernel works on: the arrays' own, or float64 beside float64 tables."""
    return spec.compute_dtype if spec.compute_dtype == jnp.float64 else spec.operands.query.dtype


def _turn(spec: RopeSpec, query: AnyArray, key: AnyArray, cos: jax.Array, sin: jax.Array, back: bool) -> Outputs:
    storage, dtype = _storage(spec), query.dtype
    results = ffi.call(
        "vishwamai_rope",
        [ffi.result(None if x is None else x.shape, storage) for x in (query, key)],
        query.astype(storage),
        None if key is None else key.astype(storage),
        cos.astype(spec.compute_dtype),
        sin.astype(spec.compute_dtype),
        interleaved=spec.interleaved,
        heads_inside=spec.layout == "bshd",
        back=back,
    )
    return Outputs(*(None if x is None else x.astype(dtype) for x in results))


def forward(spec: RopeSpec, operands: Operands) -> tuple[Outputs, None]:
    return _turn(spec, *operands, back=False), None


def backward(spec: RopeSpec, operands: Operands, cotangents: Outputs) -> Operands:
    """The inverse rotation; the tables' gradients are XLA's, which drops them where they are not requested."""
    turned = _turn(spec, *cotangents, operands.cos, operands.sin, back=True)
    return Operands(*turned, *table_gradients(spec, operands, cotangents))


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
