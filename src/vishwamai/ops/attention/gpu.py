"""Attention on GPUs: Triton kernels for torch tensors and JAX arrays, forward and backward, in memory linear in the
sequences.

Two kernels hold the backward pass by default, one for the keys and one for the queries, so that the same inputs give
the same bits; `AttentionGpuConfig(deterministic=False)` makes it one, which adds the queries' gradients by the copy
engine in whatever order blocks finish.

Torch tensors are read wherever they lie: rows of `[batch, heads, seq, dim]` need only be whole, so
`[batch, seq, heads, dim]`, a part of a tensor that holds queries, keys and values, and packed sequences cost no copy.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention.gpu_arguments import Cut, Own
from vishwamai.ops.attention.gpu_blocks import by_key, by_query, by_tile, walks
from vishwamai.ops.attention.gpu_memory import (
    PLAIN,
    Placement,
    band_of,
    cut,
    logits_of,
    rows_of,
    sizes_of,
    strides,
    terms_of,
)
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig, clamp, heuristic, tile_of
from vishwamai.ops.attention.spec import SIGNATURE, AttentionSpec, Operands, Outputs

_KERNELS = "vishwamai.ops.attention.gpu_kernels"
FORWARD = gpu.TritonKernel(_KERNELS, "forward")
DELTA, KEY_GRADIENTS, QUERY_GRADIENTS, CAST = (
    gpu.TritonKernel(f"{_KERNELS}_backward", name) for name in ("delta", "key_gradients", "query_gradients", "cast")
)
BIAS_GRADIENT, SINK_GRADIENT = (
    gpu.TritonKernel(f"{_KERNELS}_dbias", name) for name in ("bias_gradient", "sink_gradient")
)

_DTYPES = ("bfloat16", "float16", "float32")
_WIDEST = 256
"""Elements of the widest head that the kernels hold."""
_MOST_PATTERNS = 1 << 26
"""Bytes of a block mask's tile masks."""


def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    for name in ("query", "bias", "sinks", "slopes"):
        operand = getattr(spec.operands, name)
        if operand is not None and operand.dtype.name not in _DTYPES:
            name = SIGNATURE.labels.get(name, name)
            return f"`{name}` is {operand.dtype.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if spec.operands.q_positions is not None and spec.blocks is not None:
        return (
            "rows have positions of their own (`q_offset` is an array) next to a block mask, whose tiles the Triton "
            "kernels choose before they know them."
        )
    if spec.batch * spec.q_len * spec.kv_len == 0:
        return "an axis is empty."
    if max(spec.qk_dim, spec.v_dim) > _WIDEST:
        return (
            f"heads of {max(spec.qk_dim, spec.v_dim)} elements do not fit a program's registers; it takes up to "
            f"{_WIDEST}."
        )
    if spec.blocks is not None:
        if spec.blocks.heads not in (1, spec.q_heads):
            return f"the block mask has {spec.blocks.heads} heads, and there are {spec.q_heads} here."
        config = heuristic(spec, target)
        for cut in ((config.block_q, config.block_kv), (config.backward_q, config.backward_kv)):
            tile_walks = walks(spec, *cut)
            size = 0 if tile_walks is None or tile_walks.patterns is None else tile_walks.patterns.nbytes
            if size > _MOST_PATTERNS:
                return (
                    f"the tile masks of the block mask's tiles of {cut[0]} x {cut[1]} that are there in part take "
                    f"{size:,} bytes, more than the {_MOST_PATTERNS:,} that a program should hold as constants; pass "
                    "it as `mask`."
                )
    return gpu.why_not(target)


def _seed(spec: AttentionSpec, operands: Operands) -> AnyArray:
    return operands.dropout_seed if spec.dropout_rate else None


def forward(
    spec: AttentionSpec, config: AttentionGpuConfig, operands: Operands, residuals: bool, memory: Placement = PLAIN
) -> tuple[Outputs, PyTree]:
    """(outputs, logsumexp or None), in the shapes that `memory` says."""
    query, key, value = (rows_of(x) for x in operands[:3])
    block_q, block_kv = clamp(config.block_q, spec.q_len), clamp(config.block_kv, spec.kv_len)
    statistics = query.ptr.shape[1:3] if memory.packed else query.ptr.shape[:3]
    out, logsumexp = gpu.launch(
        FORWARD,
        (gpu.cdiv(spec.q_len, block_q) * memory.elements(spec) * spec.q_heads,),
        dict(
            query=query,
            key=key,
            value=value,
            terms=terms_of(spec, operands),
            sinks_ptr=operands.sinks,
            seed_ptr=_seed(spec, operands),
            starts=memory.starts,
            walk=by_query(walks(spec, block_q, block_kv)),
        ),
        dict(
            out_ptr=memory.result(query.ptr, spec.v_dim, spec.operands.query.dtype),
            lse_ptr=gpu.result(statistics, "float32") if residuals or spec.return_lse else None,
        ),
        warps=config.warps,
        stages=config.stages,
        sizes=sizes_of(spec, operands, memory),
        sinks_b=strides(spec.operands.sinks, 1)[0],
        LOGITS=logits_of(spec),
        QUERIES=cut(query, block_q),
        KEYS=cut(key, block_kv),
        VALUES=cut(value, block_kv),
        OUTS=Cut(spec.v_dim, block_q, tile_of(spec.v_dim)),
        SEQ_FIRST=memory.heads_inside,
        BOTTOM_RIGHT=memory.bottom_right,
    )
    return Outputs(out, logsumexp if spec.return_lse else None), logsumexp if residuals else None


def backward(
    spec: AttentionSpec,
    config: AttentionGpuConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: AnyArray,
    cotangents: Outputs,
    memory: Placement = PLAIN,
    of_bias: bool = True,
) -> Operands:
    """Gradients of the operands, those of query, key and value in the shapes that `memory` says; none of the bias where
    it is not wanted.
    """
    query, key, value, out, dout = (rows_of(x) for x in (*operands[:3], outputs.out, cotangents.out))
    dtype = spec.operands.query.dtype
    block_q, block_kv = clamp(config.backward_q, spec.q_len), clamp(config.backward_kv, spec.kv_len)
    elements = memory.elements(spec)
    q_tiles, kv_tiles = gpu.cdiv(spec.q_len, block_q), gpu.cdiv(spec.kv_len, block_kv)
    planes, positions = query.ptr.shape[0] * spec.q_heads, query.ptr.shape[2]
    delta_rows = clamp(64, positions)
    (delta,) = gpu.launch(
        DELTA,
        (gpu.cdiv(positions, delta_rows) * planes,),
        dict(out_rows=out, dout_rows=dout, dlse_ptr=cotangents.logsumexp),
        dict(delta_ptr=gpu.result(residuals.shape, "float32")),
        heads=spec.q_heads,
        length=positions,
        OUTS=Cut(spec.v_dim, delta_rows, tile_of(spec.v_dim)),
    )
    low, high = band_of(spec)
    how: dict[str, Any] = dict(
        warps=config.backward_warps,
        stages=config.backward_stages,
        sizes=sizes_of(spec, operands, memory),
        LOGITS=logits_of(spec),
        QUERIES=cut(query, block_q),
        KEYS=cut(key, block_kv),
        VALUES=cut(value, block_kv),
        DOUTS=cut(dout, block_q),
        EDGE=memory.packed is not None or low is not None or high is not None or spec.kv_len % block_kv != 0,
    )
    flags = dict(SEQ_FIRST=memory.heads_inside, BOTTOM_RIGHT=memory.bottom_right)
    inputs = dict(
        query=query,
        key=key,
        value=value,
        dout_rows=dout,
        lse_ptr=residuals,
        delta_ptr=delta,
        terms=terms_of(spec, operands),
        seed_ptr=_seed(spec, operands),
    )
    deterministic = config.deterministic
    walk = walks(spec, block_q, block_kv)
    plain = query.ptr.shape[1:] if memory.packed else query.ptr.shape
    dk, dv, dq = gpu.launch(
        KEY_GRADIENTS,
        (kv_tiles * elements * spec.kv_heads,),
        dict(**inputs, starts=memory.starts, walk=by_key(walk)),
        dict(
            dk_ptr=memory.result(key.ptr, spec.qk_dim, dtype),
            dv_ptr=memory.result(value.ptr, spec.v_dim, dtype),
            dq_ptr=None if deterministic else gpu.result(plain, "float32", zeroed=True),
        ),
        TMA_DQ=spec.qk_dim % 4 == 0,
        **how,
        **flags,
    )
    if deterministic:
        (dq,) = gpu.launch(
            QUERY_GRADIENTS,
            (q_tiles * elements * spec.q_heads,),
            dict(**inputs, starts=memory.starts, walk=by_query(walk)),
            dict(dq_ptr=memory.result(query.ptr, spec.qk_dim, dtype)),
            **how,
            **flags,
        )
    else:
        if dtype.itemsize < 4:
            size = planes * positions * spec.qk_dim
            (dq,) = gpu.launch(
                CAST,
                (gpu.cdiv(size, 4096),),
                dict(x_ptr=dq),
                dict(y_ptr=gpu.result(plain, dtype)),
                size=size,
                COLUMNS=4096,
            )
        if memory.heads_inside:
            dq = dq.swapaxes(-3, -2)
    dbias = dsinks = dslopes = None
    if operands.bias is not None and of_bias:
        b, h, q, k = operands.bias.shape
        tiles = b * h * (q_tiles if q > 1 else 1) * (kv_tiles if k > 1 else 1)
        (dbias,) = gpu.launch(
            BIAS_GRADIENT,
            (tiles,),
            dict(**inputs, walk=by_tile(walk)),
            dict(dbias_ptr=gpu.result(operands.bias.shape, spec.operands.bias.dtype)),
            OWN=Own(*(extent > 1 for extent in operands.bias.shape)),
            **how,
        )
    if operands.sinks is not None:
        shared = operands.sinks.shape[0] == 1
        (dsinks,) = gpu.launch(
            SINK_GRADIENT,
            (operands.sinks.shape[0] * spec.q_heads,),
            dict(sinks_ptr=operands.sinks, lse_ptr=residuals, delta_ptr=delta),
            dict(dsinks_ptr=gpu.result(operands.sinks.shape, spec.operands.sinks.dtype)),
            members=query.ptr.shape[0] if shared else 1,
            q_heads=spec.q_heads,
            q_len=positions,
            batch_stride=1,
            COLUMNS=min(1024, tile_of(positions)),
        )
    if operands.slopes is not None and gpu.framework(operands.slopes) == "jax":
        dslopes = jnp.zeros_like(operands.slopes)  # which JAX wants of every float; see `alibi.constant_slopes`
    return Operands(dq, dk, dv, dbias, sinks=dsinks, slopes=dslopes)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, AttentionGpuConfig)
