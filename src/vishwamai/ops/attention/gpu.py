"""Attention on GPUs: Triton kernels for torch tensors and JAX arrays, forward and backward, in memory linear in the sequences.

Two kernels hold the backward pass by default, one for the keys and one for the queries, so that the same inputs give the same bits;
`AttentionGpuConfig(deterministic=False)` makes it one, which adds the queries' gradients by the copy engine in whatever order blocks finish.

Torch tensors are read wherever they lie: rows of `[batch, heads, seq, dim]` need only be whole, so `[batch, seq, heads, dim]`, a part of a tensor that
holds queries, keys and values, and packed sequences cost no copy.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from vishwamai.core import dropout, gpu
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.ops.attention.gpu_blocks import walked, walks
from vishwamai.ops.attention.gpu_tiles import AttentionGpuConfig, clamp, heuristic, tile_of
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs

_KERNELS = "vishwamai.ops.attention.gpu_kernels"
FORWARD = gpu.Kernel(_KERNELS, "forward")
DELTA, KEY_GRADIENTS, QUERY_GRADIENTS, CAST = (
    gpu.Kernel(f"{_KERNELS}_backward", name) for name in ("delta", "key_gradients", "query_gradients", "cast")
)
BIAS_GRADIENT, SINK_GRADIENT = (gpu.Kernel(f"{_KERNELS}_dbias", name) for name in ("bias_gradient", "sink_gradient"))

_DTYPES = ("bfloat16", "float16", "float32")
_WIDEST = 256
"""Elements of the widest head that the kernels hold."""
_MOST_PATTERNS = 1 << 26
"""Bytes of a block mask's pictures."""


def why_not(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    del chip
    for name in ("query", "bias", "sinks"):
        operand = getattr(spec.operands, name)
        if operand is not None and operand.dtype.name not in _DTYPES:
            return f"`{name}` is {operand.dtype.name}; the Triton kernels take {', '.join(_DTYPES)}."
    if spec.batch * spec.q_len * spec.kv_len == 0:
        return "an axis is empty."
    if max(spec.qk_dim, spec.v_dim) > _WIDEST:
        return f"heads of {max(spec.qk_dim, spec.v_dim)} elements do not fit a program's registers; it takes up to {_WIDEST}."
    if spec.blocks is not None:
        if spec.blocks.heads not in (1, spec.q_heads):
            return f"the block mask has {spec.blocks.heads} heads, and there are {spec.q_heads} here."
        config = heuristic(spec, None)
        for cut in ((config.block_q, config.block_kv), (config.backward_q, config.backward_kv)):
            found = walks(spec, *cut)
            size = 0 if found is None or found.patterns is None else found.patterns.nbytes
            if size > _MOST_PATTERNS:
                return (
                    f"the pictures of the block mask's tiles of {cut[0]} x {cut[1]} that are there in part take {size:,} bytes, more than the "
                    f"{_MOST_PATTERNS:,} that a program should hold as constants; pass it as `mask`."
                )
    return gpu.why_not()


def _strides(operand: Any, axes: int) -> tuple[int, ...]:
    """Elements between neighbours along the first `axes` axes of a contiguous array; 0 where it is shared (an axis of 1), or absent."""
    if operand is None:
        return (0,) * axes
    strides, step = [], 1
    for extent in reversed(operand.shape):
        strides.append(0 if extent == 1 else step)
        step *= extent
    return tuple(reversed(strides))[:axes]


class Packed(NamedTuple):
    """Sequences of their own lengths, one behind the other. The spec is of a batch of them, each padded to the longest.

    Attributes:
      q_starts, kv_starts: int32 `[batch + 1]`, where each begins among the queries and the keys, and the last one's end.
      bottom_right: the causal mask and the window end at the last key of each sequence, as in `causal_align`.
    """

    q_starts: Any
    kv_starts: Any
    bottom_right: bool


class Memory(NamedTuple):
    """How a call's arrays lie in memory; JAX's always as here.

    Attributes:
      seq_first: results have the heads behind the positions, `[batch, seq, heads, dim]`.
      packed: queries, keys, values, the output and its cotangent are views `[1, heads, total, dim]` of packed sequences, results
        `[total, heads, dim]`, and statistics `[heads, total]`. There is no bias, mask or segment then.
    """

    seq_first: bool = False
    packed: Packed | None = None

    def result(self, like: Any, dim: int, dtype: Any) -> gpu.Result:
        """A result with the positions and heads of `like`, `[batch, heads, seq, dim]`."""
        batch, heads, seq, _ = like.shape
        if self.packed is not None:
            return gpu.result((seq, heads, dim), dtype)
        return gpu.result((batch, seq, heads, dim) if self.seq_first else (batch, heads, seq, dim), dtype)

    def launched(self) -> dict[str, Any]:
        """What kernels take of it, beside the starts."""
        packed = self.packed
        return dict(
            SEQ_FIRST=self.seq_first or packed is not None, BOTTOM_RIGHT=packed is not None and packed.bottom_right
        )

    def starts(self) -> dict[str, Any]:
        packed = self.packed
        return dict(
            q_starts_ptr=None if packed is None else packed.q_starts,
            kv_starts_ptr=None if packed is None else packed.kv_starts,
        )

    def elements(self, spec: AttentionSpec) -> int:
        """Batch elements that programs are launched for; of packed sequences one more, for what lies behind the last."""
        return spec.batch + (self.packed is not None)


PLAIN = Memory()


def _rows(name: str, x: Any) -> dict[str, int]:
    """The strides of `[batch, heads, seq, dim]`: a tensor's own; JAX's arrays are contiguous."""
    strides = [math.prod(x.shape[axis + 1 :]) for axis in range(3)]
    if gpu.framework(x) == "torch":
        assert x.stride(3) == 1 or x.shape[3] == 1, x.stride()
        # An axis of one element may have any stride; this one suits the copy engine.
        strides = [16 if extent == 1 else int(step) for step, extent in zip(x.stride()[:3], x.shape[:3], strict=True)]
    return dict(zip((f"{name}_b", f"{name}_h", f"{name}_s"), strides, strict=True))


def _copied(strides: dict[str, int], itemsize: int) -> bool:
    """Whether the copy engine can read the rows: they begin at multiples of 16 bytes."""
    return all(step * itemsize % 16 == 0 for step in strides.values())


def _where(operands: Operands) -> dict[str, Any]:
    """Where the rows of query, key and value lie, and what reads them."""
    named: dict[str, Any] = {}
    for name, flag in (("query", "TMA_Q"), ("key", "TMA_K"), ("value", "TMA_V")):
        x = getattr(operands, name)
        strides = _rows(name, x)
        named |= {**strides, flag: _copied(strides, x.dtype.itemsize)}
    return named


_PARTS = ("b", "h", "q", "k")


def _constants(spec: AttentionSpec, block_q: int, block_kv: int) -> dict[str, Any]:
    """What every kernel that computes logits takes beside its buffers."""
    o = spec.operands
    low, high = spec.band
    itemsize = o.query.dtype.itemsize
    return dict(
        batch=spec.batch,
        q_heads=spec.q_heads,
        kv_heads=spec.kv_heads,
        q_len=spec.q_len,
        kv_len=spec.kv_len,
        low=low or 0,
        high=high or 0,
        **{f"bias_{part}": stride for part, stride in zip(_PARTS, _strides(o.bias, 4), strict=True)},
        **{f"mask_{part}": stride for part, stride in zip(_PARTS, _strides(o.mask, 4), strict=True)},
        q_segments_b=_strides(o.q_segment_ids, 1)[0],
        kv_segments_b=_strides(o.kv_segment_ids, 1)[0],
        SCALE=spec.scale,
        SOFTCAP=spec.softcap,
        LOW=low is not None,
        HIGH=high is not None,
        KEEP_FROM=dropout.threshold(spec.dropout_rate),
        RESCALE=1.0 / (1.0 - spec.dropout_rate),
        PRECISION="tf32x3" if itemsize == 4 else None,
        D=spec.qk_dim,
        DV=spec.v_dim,
        D_TILE=tile_of(spec.qk_dim),
        DV_TILE=tile_of(spec.v_dim),
        ROWS=block_q,
        COLUMNS=block_kv,
    )


def _masks(operands: Operands) -> dict[str, Any]:
    return dict(
        bias_ptr=operands.bias,
        mask_ptr=operands.mask,
        q_segments_ptr=operands.q_segment_ids,
        kv_segments_ptr=operands.kv_segment_ids,
    )


def _seed(spec: AttentionSpec, operands: Operands) -> Any:
    return operands.dropout_seed if spec.dropout_rate else None


def attend(
    spec: AttentionSpec, config: AttentionGpuConfig, operands: Operands, lse: bool, memory: Memory = PLAIN
) -> tuple[Any, Any]:
    """(out, logsumexp or None), in the shapes that `memory` says."""
    query = operands.query
    block_q, block_kv = clamp(config.block_q, spec.q_len), clamp(config.block_kv, spec.kv_len)
    statistics = query.shape[1:3] if memory.packed else query.shape[:3]
    walk = walks(spec, block_q, block_kv)
    out, logsumexp = gpu.launch(
        FORWARD,
        (gpu.cdiv(spec.q_len, block_q) * memory.elements(spec) * spec.q_heads,),
        dict(
            query_ptr=query,
            key_ptr=operands.key,
            value_ptr=operands.value,
            **_masks(operands),
            sinks_ptr=operands.sinks,
            seed_ptr=_seed(spec, operands),
            **memory.starts(),
            **walked(walk, "by_query"),
        ),
        dict(
            out_ptr=memory.result(query, spec.v_dim, spec.operands.query.dtype),
            lse_ptr=gpu.result(statistics, "float32") if lse else None,
        ),
        warps=config.warps,
        stages=config.stages,
        sinks_b=_strides(spec.operands.sinks, 1)[0],
        walk_h=0 if walk is None else walk.by_query_step,
        q_total=query.shape[2],
        **_constants(spec, block_q, block_kv),
        **_where(operands),
        **memory.launched(),
    )
    return out, logsumexp


def forward(
    spec: AttentionSpec, config: AttentionGpuConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, Any]:
    out, lse = attend(spec, config, operands, residuals or spec.return_lse)
    return Outputs(out, lse if spec.return_lse else None), lse if residuals else None


def gradients(
    spec: AttentionSpec,
    config: AttentionGpuConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: Any,
    cotangents: Outputs,
    memory: Memory = PLAIN,
    of_bias: bool = True,
) -> Operands:
    """Gradients of the operands, those of query, key and value in the shapes that `memory` says; none of the bias where it is not wanted."""
    query, key, value, dout = operands.query, operands.key, operands.value, cotangents.out
    dtype = spec.operands.query.dtype
    block_q, block_kv = clamp(config.backward_q, spec.q_len), clamp(config.backward_kv, spec.kv_len)
    elements = memory.elements(spec)
    q_tiles, kv_tiles = gpu.cdiv(spec.q_len, block_q), gpu.cdiv(spec.kv_len, block_kv)
    planes, positions = query.shape[0] * spec.q_heads, query.shape[2]
    delta_rows = clamp(64, positions)
    of_dout = _rows("dout", dout)
    (delta,) = gpu.launch(
        DELTA,
        (gpu.cdiv(positions, delta_rows) * planes,),
        dict(out_ptr=outputs.out, dout_ptr=dout, dlse_ptr=cotangents.logsumexp),
        dict(delta_ptr=gpu.result(residuals.shape, "float32")),
        heads=spec.q_heads,
        length=positions,
        DV=spec.v_dim,
        DV_TILE=tile_of(spec.v_dim),
        ROWS=delta_rows,
        **_rows("out", outputs.out),
        **of_dout,
    )
    low, high = spec.band
    how = dict(
        warps=config.backward_warps,
        stages=config.backward_stages,
        **_constants(spec, block_q, block_kv),
        **_where(operands),
        **of_dout,
        TMA_DO=_copied(of_dout, dout.dtype.itemsize),
        EDGE=memory.packed is not None or low is not None or high is not None or spec.kv_len % block_kv != 0,
    )
    inputs = dict(
        query_ptr=query,
        key_ptr=key,
        value_ptr=value,
        dout_ptr=dout,
        lse_ptr=residuals,
        delta_ptr=delta,
        **_masks(operands),
        seed_ptr=_seed(spec, operands),
    )
    deterministic = config.deterministic
    walk = walks(spec, block_q, block_kv)
    plain = query.shape[1:] if memory.packed else query.shape
    dk, dv, dq = gpu.launch(
        KEY_GRADIENTS,
        (kv_tiles * elements * spec.kv_heads,),
        {**inputs, **memory.starts(), **walked(walk, "by_key")},
        dict(
            dk_ptr=memory.result(key, spec.qk_dim, dtype),
            dv_ptr=memory.result(value, spec.v_dim, dtype),
            dq_ptr=None if deterministic else gpu.result(plain, "float32", zeroed=True),
        ),
        q_total=positions,
        kv_total=key.shape[2],
        walk_h=0 if walk is None else walk.by_key_step,
        TMA_DQ=spec.qk_dim % 4 == 0,
        **how,
        **memory.launched(),
    )
    if deterministic:
        (dq,) = gpu.launch(
            QUERY_GRADIENTS,
            (q_tiles * elements * spec.q_heads,),
            {**inputs, **memory.starts(), **walked(walk, "by_query")},
            dict(dq_ptr=memory.result(query, spec.qk_dim, dtype)),
            q_total=positions,
            walk_h=0 if walk is None else walk.by_query_step,
            **how,
            **memory.launched(),
        )
    else:
        if dtype.itemsize < 4:
            size = planes * positions * spec.qk_dim
            (dq,) = gpu.launch(
                CAST, (gpu.cdiv(size, 4096),), dict(x_ptr=dq), dict(y_ptr=gpu.result(plain, dtype)), size=size, COLUMNS=4096
            )  # fmt: skip
        if memory.seq_first or memory.packed is not None:
            dq = dq.swapaxes(-3, -2)
    dbias = dsinks = None
    if operands.bias is not None and of_bias:
        b, h, q, k = operands.bias.shape
        tiles = b * h * (q_tiles if q > 1 else 1) * (kv_tiles if k > 1 else 1)
        (dbias,) = gpu.launch(
            BIAS_GRADIENT,
            (tiles,),
            {**inputs, **walked(walk, "tiles", "tiles_ptr")},
            dict(dbias_ptr=gpu.result(operands.bias.shape, spec.operands.bias.dtype)),
            tiles_h=0 if walk is None or len(walk.tiles) == 1 else walk.tiles[0].size,
            **how,
        )
    if operands.sinks is not None:
        shared = operands.sinks.shape[0] == 1
        (dsinks,) = gpu.launch(
            SINK_GRADIENT,
            (operands.sinks.shape[0] * spec.q_heads,),
            dict(sinks_ptr=operands.sinks, lse_ptr=residuals, delta_ptr=delta),
            dict(dsinks_ptr=gpu.result(operands.sinks.shape, spec.operands.sinks.dtype)),
            members=query.shape[0] if shared else 1,
            q_heads=spec.q_heads,
            q_len=positions,
            batch_stride=1,
            COLUMNS=min(1024, tile_of(positions)),
        )
    return Operands(dq, dk, dv, dbias, None, None, None, dsinks, None)


def backward(
    spec: AttentionSpec,
    config: AttentionGpuConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: Any,
    cotangents: Outputs,
) -> Operands:
    return gradients(spec, config, operands, outputs, residuals, cotangents)


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, AttentionGpuConfig)
