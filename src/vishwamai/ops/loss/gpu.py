"""The cross entropy of a linear layer on GPUs: Triton kernels for torch tensors and JAX arrays; the logits live in registers, a tile at a time.

Forward, a program walks over the words of one split of the vocabulary and keeps a running maximum and sum for its tokens (Milakov & Gimelshein 2018); a
second kernel combines the splits, in order. Backward, the words pass by in parts, as on TPU: a kernel forms a part's logits once more and stores their gradient,
which two products take to x (a float32 sum that grows in place) and to the weights (complete for those words). No sum depends on the order of programs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from vishwamai.core import gpu
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

_KERNELS = "vishwamai.ops.loss.gpu_kernels"
FORWARD, COMBINE = (gpu.Kernel(_KERNELS, name) for name in ("forward", "combine"))
SLOPES, GRADIENT_OF_X, GRADIENT_OF_WEIGHT, GRADIENT_OF_BIAS, ROUNDED = (
    gpu.Kernel(f"{_KERNELS}_backward", name)
    for name in ("slopes", "gradient_of_x", "gradient_of_weight", "gradient_of_bias", "rounded")
)

_DTYPES = ("bfloat16", "float16", "float32")
_PRECISION = {"highest": "tf32x3", "high": "bf16x3", "default": None}
"""Of float32 operands: three products of TF32 parts keep 21 bits of each factor, three of bfloat16 parts 16."""
_SHALLOW = 1024
"""Features below which a tile's product is short beside what follows it: then two programs share a multiprocessor, so that one multiplies meanwhile."""
_PARTS, _LEAST, _MOST = 16, 512, 8192
"""Parts of the vocabulary to aim at in the backward pass, and bounds of a part's words."""


@dataclasses.dataclass(frozen=True)
class LossGpuConfig:
    """Tiles of the Triton kernels.

    Attributes:
      block_tokens, block_words, block_features: edges of a tile of logits and the depth of one step of its product, powers of two.
      splits: parts of the vocabulary that the forward pass sums apart.
      block_vocab: words whose logits' gradient the backward pass holds at a time; it is brought to a multiple of `block_words`.
      warps, stages: of a program that forms logits.
      super_m: tiles of tokens that are walked together.
    """

    block_tokens: int
    block_words: int
    block_features: int
    splits: int
    block_vocab: int
    warps: int = 8
    stages: int = 3
    super_m: int = 8

    def with_block_size(self, block_size: int) -> LossGpuConfig:
        """The same with about `block_size` words a tile, and no more at a time in the backward pass."""
        words = min(self.block_words, max(16, gpu.next_power_of_2(block_size)))
        return dataclasses.replace(self, block_words=words, block_vocab=max(words, block_size), warps=4)


def why_not(spec: LossSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    del chip
    dtype = spec.operands.x.dtype.name
    if dtype not in _DTYPES:
        return f"`x` is {dtype}; the Triton kernel takes {', '.join(_DTYPES)}."
    if spec.groups * spec.tokens == 0:
        return "there are no tokens."
    return gpu.why_not()


def _sizes(spec: LossSpec) -> tuple[int, int]:
    """(groups, tokens of each): groups that share all parameters are one."""
    return (1, spec.groups * spec.tokens) if spec.shared else (spec.groups, spec.tokens)


def _aligned(spec: LossSpec) -> bool:
    """Whether the copy engine takes rows of features."""
    return spec.features * spec.operands.x.dtype.itemsize % 16 == 0


def _widest(spec: LossSpec) -> int:
    """Columns of the widest tile of 128 rows whose program keeps within its registers: the parts of float32 need some, and so do the addresses of a
    tile that the copy engine cannot fetch."""
    return 256 // spec.operands.x.dtype.itemsize * (2 if _aligned(spec) else 1)


def _warps_and_stages(spec: LossSpec, rows: int, columns: int) -> tuple[int, int]:
    """Of a program that multiplies tiles of `rows x columns`."""
    return (8, 3) if rows * columns >= 128 * min(128, _widest(spec)) else (4, 4)


def _edge(size: int, largest: int) -> int:
    """Edge of a tile over an axis of `size`."""
    return min(largest, max(16, gpu.next_power_of_2(size)))


def heuristic(spec: LossSpec, chip: Chip | None) -> LossGpuConfig:
    """Tiles of 128 tokens and 256 words; so many splits, and such parts of the backward pass, that the last round of programs is nearly full."""
    del chip
    groups, tokens = _sizes(spec)
    widest, block_t = _widest(spec), _edge(tokens, 128)
    # All that may follow a tile's product at once, bias, cap and sums, needs registers too.
    narrow = block_t < 128 or spec.features <= _SHALLOW or None not in (spec.softcap, spec.operands.bias)
    block_v = _edge(spec.vocab, min(widest, 128) if narrow else widest)
    block_d = _edge(spec.features, 64 if widest == 256 else 32)
    slots = gpu.SMS * (2 if widest == 256 and block_t * block_v <= 128 * 128 else 1)
    rows, tiles = groups * gpu.cdiv(tokens, block_t), gpu.cdiv(spec.vocab, block_v)

    def rounds(programs: int) -> int:
        return gpu.cdiv(programs, slots)

    def cost(splits: int) -> int:
        """Tiles that pass by, one after the other."""
        words = gpu.cdiv(tiles, splits)
        return rounds(rows * gpu.cdiv(tiles, words)) * words

    splits = min(range(1, min(tiles, gpu.cdiv(4 * slots, rows)) + 1), key=cost)
    # Few tokens take more words at a time, so that there is work for every multiprocessor, but never a quarter of all.
    more = min(2 * slots // rows, spec.vocab // 4 // block_v)
    most = max(min(max(spec.vocab // _PARTS, _LEAST), _MOST) // block_v, more, 1)
    part = max(range((most + 1) // 2, most + 1), key=lambda n: rows * n / rounds(rows * n))
    block_vocab = min(part, tiles) * block_v
    return LossGpuConfig(block_t, block_v, block_d, splits, block_vocab, *_warps_and_stages(spec, block_t, block_v))


def _folded(spec: LossSpec, x: Any) -> Any:
    """An operand, output or cotangent `[G, T, ...]` with the groups that `_sizes` gives; None stays None."""
    return None if x is None else x.reshape(*_sizes(spec), *x.shape[2:])


def _shared_constants(spec: LossSpec, config: LossGpuConfig) -> dict[str, Any]:
    """What every kernel that forms logits is told."""
    groups, tokens = _sizes(spec)
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
        RAGGED=spec.vocab % config.block_words != 0,
        PRECISION=_PRECISION[spec.precision],
        TMA=_aligned(spec),
        BLOCK_T=config.block_tokens,
        BLOCK_V=config.block_words,
        BLOCK_D=config.block_features,
    )


def forward(spec: LossSpec, config: LossGpuConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the outputs are all that the backward pass needs
    groups, tokens = _sizes(spec)
    tiles = gpu.cdiv(spec.vocab, config.block_words)
    split_words = gpu.cdiv(tiles, config.splits) * config.block_words
    splits = gpu.cdiv(spec.vocab, split_words)
    out = gpu.result((splits, groups, tokens), "float32")
    parts = gpu.launch(
        FORWARD,
        (gpu.cdiv(tokens, config.block_tokens) * splits, groups),
        dict(
            x_ptr=_folded(spec, operands.x),
            weight_ptr=operands.weight,
            bias_ptr=operands.bias,
            labels_ptr=_folded(spec, operands.labels),
        ),
        dict(logsumexp_ptr=out, label_logit_ptr=out, logit_sum_ptr=out if spec.logit_sum else None),
        warps=config.warps,
        stages=config.stages,
        split_words=split_words,
        **_shared_constants(spec, config),
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


# --- Backward --------------------------------------------------------------------------------------------------------------------------------------


def _product_tiles(spec: LossSpec, groups: int, m: int, n: int, k: int) -> tuple[int, int, int]:
    """(rows, columns, depth) of a tile of `groups` products `m x n x k`: the largest of which there are enough for every multiprocessor."""
    widest = _widest(spec)
    options = ((128, widest), *((128, n) for n in (128, 64) if n < widest), (64, 64))
    for block_m, block_n in options:
        if groups * gpu.cdiv(m, block_m) * gpu.cdiv(n, block_n) >= gpu.SMS and m >= block_m and n >= block_n:
            break
    return _edge(m, block_m), _edge(n, block_n), _edge(k, 64 if widest == 256 else 32)


def _product(
    spec: LossSpec,
    config: LossGpuConfig,
    kernel: gpu.Kernel,
    inputs: dict[str, Any],
    outputs: dict[str, gpu.Result],
    words: int,
    count: int,
    sizes: tuple[int, int, int],
    **constants: Any,
) -> Any:
    """One launch of `count` products of (rows, columns, depth) `sizes` with a part's dz `[G, T, words]`."""
    block_m, block_n, block_k = _product_tiles(spec, count, *sizes)
    warps, stages = _warps_and_stages(spec, block_m, block_n)
    groups, tokens = _sizes(spec)
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
        words=words,
        W_GROUPS=spec.operands.weight.shape[0],
        PRECISION=_PRECISION[spec.precision],
        TMA=_aligned(spec),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SUPER_M=config.super_m,
        **constants,
    )
    return result


def backward(
    spec: LossSpec, config: LossGpuConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    del residuals
    groups, tokens = _sizes(spec)
    x, weight, bias = spec.operands.x, spec.operands.weight, spec.operands.bias
    words = gpu.cdiv(min(config.block_vocab, spec.vocab), config.block_words) * config.block_words
    count, row_blocks = gpu.cdiv(spec.vocab, words), gpu.cdiv(tokens, config.block_tokens)
    folded = {
        "x_ptr": _folded(spec, operands.x),
        "weight_ptr": operands.weight,
        "bias_ptr": operands.bias,
        "labels_ptr": _folded(spec, operands.labels),
        "logsumexp_ptr": _folded(spec, outputs.logsumexp),
        "dlogsumexp_ptr": _folded(spec, cotangents.logsumexp),
        "dlabel_ptr": _folded(spec, cotangents.label_logit),
        "dsum_ptr": _folded(spec, cotangents.logit_sum),
    }

    def part(step: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """The gradients with those of one part of the words; `carry` holds None before the first."""
        dz, partial = gpu.launch(
            SLOPES,
            (row_blocks * (words // config.block_words), groups),
            dict(folded, step_ptr=step),
            dict(
                dz_ptr=gpu.result((groups, tokens, words), x.dtype),
                partial_ptr=None if bias is None else gpu.result((groups, row_blocks, words), "float32"),
            ),
            warps=config.warps,
            stages=config.stages,
            words=words,
            SUPER_M=config.super_m,
            **_shared_constants(spec, config),
        )

        def output(before: Any, shape: tuple[int, ...], dtype: Any) -> gpu.Result:
            return gpu.result(shape, dtype) if before is None else gpu.onto(before)

        dx = _product(
            spec,
            config,
            GRADIENT_OF_X,
            dict(dz_ptr=dz, weight_ptr=operands.weight, step_ptr=step),
            dict(dx_ptr=output(carry[0], (groups, tokens, spec.features), "float32" if count > 1 else x.dtype)),
            words,
            groups,
            (tokens, spec.features, words),
        )
        dweight = _product(
            spec,
            config,
            GRADIENT_OF_WEIGHT,
            dict(dz_ptr=dz, x_ptr=folded["x_ptr"], step_ptr=step),
            dict(dweight_ptr=output(carry[1], weight.shape, weight.dtype)),
            words,
            weight.shape[0],
            (words, spec.features, tokens),
            SUMMED=groups // weight.shape[0],
        )
        if bias is None:
            return dx, dweight, None
        columns = 64
        (dbias,) = gpu.launch(
            GRADIENT_OF_BIAS,
            (gpu.cdiv(words, columns), bias.shape[0]),
            dict(partial_ptr=partial, step_ptr=step),
            dict(dbias_ptr=output(carry[2], bias.shape, "float32")),
            V=spec.vocab,
            words=words,
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
    return Operands(dx.reshape(*x.shape), dweight, dbias, None)


def notes(spec: LossSpec, chip: Chip | None) -> tuple[str, ...]:
    """What `explain` adds: what the backward pass holds."""
    words = min(heuristic(spec, chip).block_vocab, spec.vocab)
    size = spec.groups * spec.tokens * (words * spec.operands.x.dtype.itemsize + 4 * spec.features)
    return (
        f"backward holds {words} of {spec.vocab} words at a time, {size:,} bytes, and computes the logits once more",
    )


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, LossGpuConfig, notes)
