"""The linear cross entropy's forward pass on GPUs.

A program walks over one split of the vocabulary and keeps a running maximum and sum for its tokens (Milakov &
Gimelshein 2018); a second kernel combines the splits, in order. The logits live in registers, a tile at a time.
"""

from __future__ import annotations

from vishwamai.core import gpu
from vishwamai.core.types import AnyArray
from vishwamai.ops.loss.gpu_tiles import (
    LossGpuConfig,
    groups_and_tokens,
    rows_aligned,
)
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

FORWARD, COMBINE = (gpu.TritonKernel("vishwamai.ops.loss.gpu_kernels", name) for name in ("forward", "combine"))
PRECISION = {"highest": "tf32x3", "high": "bf16x3", "default": None}
"""Of float32 operands: three products of TF32 parts keep 21 bits of each factor, three of bfloat16 parts 16."""


def fold_groups(spec: LossSpec, x: AnyArray) -> AnyArray:
    """An operand, output or cotangent `[G, T, ...]` with the groups that `groups_and_tokens` gives; None stays None."""
    return None if x is None else x.reshape(*groups_and_tokens(spec), *x.shape[2:])


def shared_constants(spec: LossSpec, config: LossGpuConfig) -> dict[str, float | None]:
    """What every kernel that forms logits is told."""
    groups, tokens = groups_and_tokens(spec)
    bias = spec.operands.bias
    return dict(
        GROUPS=groups,
        T=tokens,
        V=spec.vocab,
        D=spec.features,
        row_blocks=gpu.cdiv(tokens, config.block_tokens),
        bias_stride=0 if bias is None or bias.shape[0] == 1 else spec.vocab,
        W_GROUPS=spec.operands.weight.shape[0],
        SOFTCAP=spec.softcap,
        RAGGED=spec.vocab % config.tile_vocab != 0,
        PRECISION=PRECISION[spec.precision],
        TMA=rows_aligned(spec),
        BLOCK_T=config.block_tokens,
        BLOCK_V=config.tile_vocab,
        BLOCK_D=config.block_features,
    )


def forward(spec: LossSpec, config: LossGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    groups, tokens = groups_and_tokens(spec)
    tiles = gpu.cdiv(spec.vocab, config.tile_vocab)
    split_vocab = gpu.cdiv(tiles, config.splits) * config.tile_vocab
    splits = gpu.cdiv(spec.vocab, split_vocab)
    out = gpu.result((splits, groups, tokens), "float32")
    parts = gpu.launch(
        FORWARD,
        (gpu.cdiv(tokens, config.block_tokens) * splits, groups),
        dict(
            x_ptr=fold_groups(spec, operands.x),
            weight_ptr=operands.weight,
            bias_ptr=operands.bias,
            labels_ptr=fold_groups(spec, operands.labels),
        ),
        dict(logsumexp_ptr=out, label_logit_ptr=out, logit_sum_ptr=out if spec.logit_sum else None),
        warps=config.warps,
        stages=config.stages,
        split_vocab=split_vocab,
        **shared_constants(spec, config),
    )
    if splits > 1:
        rows, block = groups * tokens, 128
        row = gpu.result((rows,), "float32")
        parts = gpu.launch(
            COMBINE,
            (gpu.cdiv(rows, block),),
            dict(zip(("logsumexps_ptr", "label_logits_ptr", "logit_sums_ptr"), parts, strict=True)),
            dict(logsumexp_ptr=row, label_logit_ptr=row, logit_sum_ptr=row if spec.logit_sum else None),
            rows=rows,
            SPLITS=splits,
            BLOCK=block,
        )
    return Outputs(*(None if y is None else y.reshape(spec.groups, spec.tokens) for y in parts)), None
