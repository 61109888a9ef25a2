"""Block-sparse products on the CPU: the native kernels of `cpu_sparse.isa.cc`, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from vishwamai.core import ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec


def why_not(spec: SparseSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    return ffi.why_not(target)  # every shape and dtype of the op


def notes(spec: SparseSpec, target: Target) -> tuple[str, ...]:
    return ("float16 is computed through float32 copies",) if spec.operands.dense.dtype == jnp.float16 else ()


def _storage(spec: SparseSpec) -> DTypeLike:
    dtype = spec.operands.dense.dtype
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _parts(spec: SparseSpec) -> np.int64:
    return np.int64(2 if spec.precision == "high" else 3)


def _product(spec: SparseSpec, dense: jax.Array, values: jax.Array, indices: jax.Array, transpose: bool) -> jax.Array:
    """`[G, M, columns]`, or `[G, M, rows]` if `transpose`, in dense's dtype."""
    storage, width = _storage(spec), spec.rows if transpose else spec.columns
    (out,) = ffi.call(
        "vishwamai_sparse_product",
        (ffi.result((spec.groups, spec.m, width), storage),),
        dense.astype(storage),
        values.astype(storage),
        indices,
        transpose=transpose,
        parts=_parts(spec),
    )
    return out.astype(dense.dtype)


def forward(spec: SparseSpec, operands: Operands) -> tuple[Outputs, None]:
    return Outputs(_product(spec, *operands, spec.transpose)), None


def backward(spec: SparseSpec, operands: Operands, cotangents: Outputs) -> Operands:
    """Two calls, so that XLA drops the one whose gradient is not requested."""
    dense, values, indices = operands
    cotangent, storage = cotangents.out, _storage(spec)
    left, right = (cotangent, dense) if spec.transpose else (dense, cotangent)
    groups = 1 if values.shape[0] == indices.shape[0] == 1 else spec.groups
    (dvalues,) = ffi.call(
        "vishwamai_sparse_values_gradient",
        (ffi.result((groups, *values.shape[1:]), spec.accumulator if values.shape[0] < groups else storage),),
        left.astype(storage),
        right.astype(storage),
        indices,
        parts=_parts(spec),
    )
    if values.shape[0] < groups:
        dvalues = jnp.sum(dvalues, axis=0, keepdims=True)
    ddense = _product(spec, cotangent, values, indices, not spec.transpose)
    return Operands(ddense, dvalues.astype(values.dtype), None)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
