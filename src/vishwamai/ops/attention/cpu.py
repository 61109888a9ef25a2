"""Attention on the CPU: the native kernels of `cpu_forward.isa.cc`, `cpu_backward.isa.cc` and, for a few queries over a
cache, `cpu_decode.isa.cc`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from vishwamai.core import dropout, ffi
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs

if TYPE_CHECKING:
    from jax.typing import DTypeLike


_NATIVE = ("float32", "bfloat16", "float64")
_UNBOUNDED = 1 << 40  # beyond every length, and far from overflowing an int64 sum
_DECODE_ROWS = 16  # query rows of one kv head up to which reading the cache, not arithmetic, takes the time


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    o = spec.operands
    for name in ("query", "key", "value"):
        if getattr(o, name).dtype.name not in (*_NATIVE, "float16"):
            return f"`{name}` is {getattr(o, name).dtype.name}; the CPU kernel takes {', '.join(_NATIVE)} and float16."
    if min(spec.qk_dim, spec.v_dim, spec.kv_len, spec.q_len, spec.batch, spec.q_heads) == 0:
        return "an axis is empty."
    if spec.blocks is not None and spec.blocks.heads not in (1, spec.q_heads):
        return f"the block mask has {spec.blocks.heads} heads, and there are {spec.q_heads} here."
    return ffi.why_not(target)


def _query_rows(spec: AttentionSpec) -> int:
    """Rows of queries that share a key."""
    return spec.group * spec.q_len


def notes(spec: AttentionSpec, target: Target) -> tuple[str, ...]:
    return ("float16 is computed through float32 copies",) if spec.operands.query.dtype == jnp.float16 else ()


def _storage(spec: AttentionSpec) -> np.dtype:
    """The dtype that the kernel works on: the widest of query, key and value, float16 as float32."""
    o = spec.operands
    dtype = jnp.result_type(o.query.dtype, o.key.dtype, o.value.dtype)
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else jnp.dtype(dtype)


def _cast(x: AnyArray, dtype: DTypeLike) -> AnyArray:
    return None if x is None else x.astype(dtype)


def _native_operands(spec: AttentionSpec, operands: Operands) -> Operands:
    """The arguments of the native functions: every operand."""
    storage = _storage(spec)
    accumulator = jnp.float64 if storage == jnp.float64 else jnp.float32
    cast = {name: _cast(getattr(operands, name), storage) for name in ("query", "key", "value")}
    cast |= {name: _cast(getattr(operands, name), accumulator) for name in ("bias", "sinks", "slopes")}
    return operands._replace(**cast)


def _attributes(spec: AttentionSpec) -> dict[str, PyTree]:
    placed = spec.operands.q_positions is not None
    low, high = spec.reach if placed else spec.band
    blocks, codes, patterns = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.int8)
    if spec.blocks is not None:  # attributes, not operands: a constant would be an operand too many for the partitioner
        blocks = np.array([*spec.blocks.codes.shape, *spec.blocks.block_size], np.int64)
        codes, patterns = spec.blocks.codes.reshape(-1), spec.blocks.patterns.reshape(-1).astype(np.int8)
    return {
        "blocks": blocks,
        "codes": codes,
        "patterns": patterns,
        "scale": np.float64(spec.scale),
        "softcap": np.float64(spec.softcap or 0.0),
        "low": np.int64(-_UNBOUNDED if low is None else low),
        "high": np.int64(_UNBOUNDED if high is None else high),
        "origin": np.int64(0 if placed else spec.causal_offset),
        "dropout_threshold": np.int64(dropout.threshold(spec.dropout_rate)),
        "keep_scale": np.float64(1.0 / (1.0 - spec.dropout_rate)),
        "parts": np.int64({"high": 2}.get(spec.precision, 3)),
        "bias_last": spec.bias_after_softcap,
    }


def forward(spec: AttentionSpec, operands: Operands, residuals: bool) -> tuple[Outputs, PyTree]:
    q = operands.query
    storage = _storage(spec)
    accumulator = jnp.float64 if storage == jnp.float64 else jnp.float32
    out, logsumexp = ffi.call(
        "vishwamai_attention_forward",
        (
            ffi.result((*q.shape[:3], spec.v_dim), storage),
            ffi.result(q.shape[:3] if residuals or spec.return_lse else None, accumulator),
        ),
        *_native_operands(spec, operands),
        **_attributes(spec),
        decode=_query_rows(spec) <= _DECODE_ROWS and spec.blocks is None,
    )
    logsumexp = _cast(logsumexp, spec.accumulator)
    return Outputs(out.astype(q.dtype), logsumexp if spec.return_lse else None), logsumexp if residuals else None


def backward(
    spec: AttentionSpec, operands: Operands, outputs: Outputs, residuals: AnyArray, cotangents: Outputs
) -> Operands:
    storage = _storage(spec)
    accumulator = jnp.float64 if storage == jnp.float64 else jnp.float32
    arguments = (
        *_native_operands(spec, operands),
        outputs.out.astype(storage),
        residuals.astype(accumulator),
        cotangents.out.astype(storage),
        _cast(cotangents.logsumexp, accumulator),
    )
    attributes = _attributes(spec)
    dquery, dkey, dvalue = ffi.call(
        "vishwamai_attention_backward",
        [ffi.result(x.shape, storage) for x in operands[:3]],
        *arguments,
        **attributes,
    )
    dbias = dsinks = None
    if operands.bias is not None:
        # A call of its own, so that XLA drops it where the bias is a constant mask and its gradient is not requested.
        (dbias,) = ffi.call(
            "vishwamai_attention_bias_gradient",
            [ffi.result(operands.bias.shape, accumulator)],
            *arguments,
            **attributes,
        )
        dbias = dbias.astype(operands.bias.dtype)
    if operands.sinks is not None:
        dsinks = _sink_gradient(operands, outputs, residuals, cotangents).astype(operands.sinks.dtype)
    return Operands(
        dquery.astype(operands.query.dtype),
        dkey.astype(operands.key.dtype),
        dvalue.astype(operands.value.dtype),
        bias=dbias,
        sinks=dsinks,
        slopes=None if operands.slopes is None else jnp.zeros_like(operands.slopes),
    )


def _sink_gradient(operands: Operands, outputs: Outputs, logsumexp: AnyArray, cotangents: Outputs) -> AnyArray:
    """A sink is a key whose value is zero: d sink = sum over queries of p_sink * (dlogsumexp - rowsum(dO * O))."""
    accumulator = logsumexp.dtype
    sinks = operands.sinks.astype(accumulator)[:, :, None]  # [B|1, Hq, 1]
    alive = logsumexp > -jnp.inf
    p = jnp.where(alive, jnp.exp(sinks - jnp.where(alive, logsumexp, 0.0)), 0.0)
    delta = -jnp.sum(outputs.out.astype(accumulator) * cotangents.out.astype(accumulator), axis=-1)
    if cotangents.logsumexp is not None:
        delta = delta + cotangents.logsumexp.astype(accumulator)
    gradient = jnp.sum(p * delta, axis=-1)  # [B, Hq]
    return gradient if operands.sinks.shape[0] > 1 else jnp.sum(gradient, axis=0, keepdims=True)


NATIVE = Implementation("native_cpu", "cpu", forward, backward, why_not, notes=notes)
