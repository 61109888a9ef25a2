"""Attention on TPU (Pallas): the tiles, what the kernels decline, and the implementation. The kernels stand in
`tpu_forward.py` and `tpu_backward.py`.
"""

from __future__ import annotations

import functools

import jax

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, vmem_budget
from vishwamai.core.target import Target
from vishwamai.ops.attention import tpu_backward, tpu_forward
from vishwamai.ops.attention.spec import AttentionSpec, Operands, Outputs
from vishwamai.ops.attention.tpu_backward_walk import Form
from vishwamai.ops.attention.tpu_memory import backward_bytes, forward_bytes
from vishwamai.ops.attention.tpu_schedule import MOST_PATTERNS
from vishwamai.ops.attention.tpu_tiles import SCHEDULE_WORDS, AttentionConfig, heuristic, schedule_words, smallest


@functools.lru_cache(maxsize=4096)  # it searches tiles, which takes longer than a small call
def why_not(spec: AttentionSpec, target: Target) -> str | None:
    """The reason why these kernels cannot serve `spec`, or None."""
    o = spec.operands
    for name in ("query", "key", "value"):
        dtype = getattr(o, name).dtype
        if dtype not in TPU_DTYPES:
            return f"`{name}` is {dtype.name}, and the kernel computes in float32 and bfloat16."
        if dtype != o.query.dtype:
            return (
                f"`{name}` is {dtype.name} and `query` {o.query.dtype.name}; the kernel wants one dtype for query, key "
                "and value."
            )
    if 0 in (*o.query.shape, *o.key.shape, *o.value.shape):
        return "an operand is empty."
    for direction, tiling, need in (
        ("forward", smallest(spec), forward_bytes(spec, smallest(spec))),
        ("backward", smallest(spec), backward_bytes(spec, smallest(spec), Form(split=True))),
    ):
        if need > vmem_budget(target):
            return (
                f"the smallest {direction} tile, {tiling.block_q} x {tiling.block_kv} at head dimensions {spec.qk_dim} "
                f"and {spec.v_dim}, takes {need:,} bytes of VMEM, more than the {vmem_budget(target):,} there are to "
                "plan with."
            )
    config = heuristic(spec, target)
    if spec.blocks is not None:
        if spec.blocks.heads not in (1, spec.q_heads):
            return f"the block mask has {spec.blocks.heads} heads, and there are {spec.q_heads} here."
        for tiling in (config.forward, config.backward):
            tiles = spec.tile_masks(tiling.block_q, tiling.block_kv, *tiling.blocks(spec))
            if tiles is not None and len(tiles.patterns) > MOST_PATTERNS:
                return (
                    f"the block mask has {len(tiles.patterns):,} different tiles that are visible in part, and the "
                    f"schedule can name {MOST_PATTERNS:,}; use blocks of 128 or a multiple."
                )
    words = schedule_words(spec, config)
    if words > SCHEDULE_WORDS:
        return (
            f"{spec.q_len} queries and {spec.kv_len} keys take up to {words:,} words of schedule, and scalar memory "
            f"has {SCHEDULE_WORDS:,} for it; narrow the `window`, or split the sequence."
        )
    return None


def forward(
    spec: AttentionSpec, config: AttentionConfig, operands: Operands, residuals: bool
) -> tuple[Outputs, jax.Array | None]:
    out, logsumexp = tpu_forward.forward(spec, config.forward, config.vmem_bytes, operands)
    return Outputs(out, logsumexp if spec.return_lse else None), logsumexp if residuals else None


def backward(
    spec: AttentionSpec,
    config: AttentionConfig,
    operands: Operands,
    outputs: Outputs,
    residuals: jax.Array,
    cotangents: Outputs,
) -> Operands:
    return tpu_backward.backward(
        spec,
        config.backward,
        config.form,
        config.backward_vmem_bytes,
        operands,
        outputs,
        residuals,
        cotangents,
    )


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, AttentionConfig)
