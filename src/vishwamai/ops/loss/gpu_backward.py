"""The linear cross entropy's backward pass on GPUs.

The entries of the vocabulary pass by in parts, as on TPU: a kernel forms a part's logits once more and stores their
gradient, which two products take to x (a float32 sum that grows in place) and to the weights (complete for those
entries). No sum depends on the order of programs.
"""

from __future__ import annotations

import math

from vishwamai.core import gpu
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.loss.gpu_arguments import Tokens
from vishwamai.ops.loss.gpu_forward import PRECISION, fold_groups, shared_constants
from vishwamai.ops.loss.gpu_tiles import (
    LossGpuConfig,
    groups_and_tokens,
    product_tiles,
    rows_aligned,
    warps_and_stages,
)
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

SLOPES = gpu.TritonKernel("vishwamai.ops.loss.gpu_kernels_slopes", "slopes")
GRADIENT_OF_X, GRADIENT_OF_WEIGHT, GRADIENT_OF_BIAS, ROUNDED = (
    gpu.TritonKernel("vishwamai.ops.loss.gpu_kernels_backward", name)
    for name in ("gradient_of_x", "gradient_of_weight", "gradient_of_bias", "rounded")
)


def _product(
    spec: LossSpec,
    config: LossGpuConfig,
    kernel: gpu.TritonKernel,
    inputs: dict[str, PyTree],
    outputs: dict[str, gpu.Result],
    entries: int,
    count: int,
    sizes: tuple[int, int, int],
    **constants: int,
) -> AnyArray:
    """One launch of `count` products of (rows, columns, depth) `sizes` with a part's dz `[G, T, entries]`."""
    block_m, block_n, block_k = product_tiles(spec, count, *sizes)
    warps, stages = warps_and_stages(spec, block_m, block_n)
    groups, tokens = groups_and_tokens(spec)
    (result,) = gpu.launch(
        kernel,
        (gpu.cdiv(sizes[0], block_m) * gpu.cdiv(sizes[1], block_n), count),
        inputs,
        outputs,
        warps=warps,
        stages=stages,
        GROUPS=groups,
        T=tokens,
        V=spec.vocab,
        D=spec.features,
        entries=entries,
        W_GROUPS=spec.operands.weight.shape[0],
        PRECISION=PRECISION[spec.precision],
        TMA=rows_aligned(spec),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GROUP_M=config.group_m,
        **constants,
    )
    return result


def backward(
    spec: LossSpec, config: LossGpuConfig, operands: Operands, outputs: Outputs, cotangents: Outputs
) -> Operands:
    groups, tokens = groups_and_tokens(spec)
    x, weight, bias = spec.operands.x, spec.operands.weight, spec.operands.bias
    entries = gpu.cdiv(min(config.block_vocab, spec.vocab), config.tile_vocab) * config.tile_vocab
    count, row_blocks = gpu.cdiv(spec.vocab, entries), gpu.cdiv(tokens, config.block_tokens)
    folded = {
        "x_ptr": fold_groups(spec, operands.x),
        "weight_ptr": operands.weight,
        "bias_ptr": operands.bias,
        "of_tokens": Tokens(
            fold_groups(spec, operands.labels),
            fold_groups(spec, outputs.logsumexp),
            fold_groups(spec, cotangents.logsumexp),
            fold_groups(spec, cotangents.label_logit),
            fold_groups(spec, cotangents.logit_sum),
        ),
    }

    def part(step: object, carry: tuple[object, object, object]) -> tuple[AnyArray, AnyArray, AnyArray]:
        """The gradients with those of one part of the entries; `carry` holds None before the first."""
        dz, partial = gpu.launch(
            SLOPES,
            (row_blocks * (entries // config.tile_vocab), groups),
            dict(folded, step_ptr=step),
            dict(
                dz_ptr=gpu.result((groups, tokens, entries), x.dtype),
                partial_ptr=None if bias is None else gpu.result((groups, row_blocks, entries), "float32"),
            ),
            warps=config.warps,
            stages=config.stages,
            entries=entries,
            GROUP_M=config.group_m,
            **shared_constants(spec, config),
        )

        def output(before: object, shape: tuple[int, ...], dtype: object) -> gpu.Result:
            return gpu.result(shape, dtype) if before is None else gpu.onto(before)

        dx = _product(
            spec,
            config,
            GRADIENT_OF_X,
            dict(dz_ptr=dz, weight_ptr=operands.weight, step_ptr=step),
            dict(dx_ptr=output(carry[0], (groups, tokens, spec.features), "float32" if count > 1 else x.dtype)),
            entries,
            groups,
            (tokens, spec.features, entries),
        )
        dweight = _product(
            spec,
            config,
            GRADIENT_OF_WEIGHT,
            dict(dz_ptr=dz, x_ptr=folded["x_ptr"], step_ptr=step),
            dict(dweight_ptr=output(carry[1], weight.shape, weight.dtype)),
            entries,
            weight.shape[0],
            (entries, spec.features, tokens),
            SUMMED=groups // weight.shape[0],
        )
        if bias is None:
            return dx, dweight, None
        columns = 64
        (dbias,) = gpu.launch(
            GRADIENT_OF_BIAS,
            (gpu.cdiv(entries, columns), bias.shape[0]),
            dict(partial_ptr=partial, step_ptr=step),
            dict(dbias_ptr=output(carry[2], bias.shape, "float32")),
            V=spec.vocab,
            entries=entries,
            count=groups // bias.shape[0] * row_blocks,  # a shared bias sums over the groups too
            ROWS=32,
            COLUMNS=columns,
        )
        return dx, dweight, dbias

    dx, dweight, dbias = part(None, (None, None, None))
    if count > 1:
        dx, dweight, dbias = gpu.repeat(1, count, part, (dx, dweight, dbias))
        if x.dtype.name != "float32":
            size, block = math.prod(dx.shape), 2048
            result = gpu.result(dx.shape, x.dtype)
            constants = dict(count=size, BLOCK=block)
            (dx,) = gpu.launch(ROUNDED, (gpu.cdiv(size, block),), dict(wide_ptr=dx), dict(out_ptr=result), **constants)
    return Operands(dx.reshape(*x.shape), dweight, dbias, None, None)
