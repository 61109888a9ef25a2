"""The cross entropy of a linear layer on TPU: tiles of logits that live and die in VMEM (Pallas).

Forward, a panel of tokens stays in VMEM while all words pass by: logits `[words, tokens]` come off the matrix unit and go into a running maximum and
sum (Milakov & Gimelshein 2018), so that maxima and sums run over rows and never over lanes. Two tiles of logits take turns: while one is multiplied,
the other is summed, across the steps of the grid too.

Backward, the words pass by in parts (`chunked.backward_by`): a kernel computes a part's logits once more and turns them into their gradient, of
which only the rounded result is stored, and XLA's own products take it from there. That is one product more than if the logits had been kept.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, planning_chip, round_up, vmem_budget
from vishwamai.core.sharding import out_struct
from vishwamai.ops.loss.chunked import LOWEST, backward_by, forward_by, part_of_vocabulary
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

LANES = 128
_UNROLLED = 1 << 14
"""Cycles of products that one step's program holds at most; more is more program, less is more steps."""


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Tiles of the TPU kernels.

    Attributes:
      block_tokens: tokens that stay in VMEM while the words pass by; a multiple of 128.
      tile_vocab: words of one step; an even number of `sub_vocab`.
      sub_vocab: words that are multiplied at once; a multiple of 128.
      block_vocab: words whose logits' gradient the backward pass holds in HBM at a time; it is brought to a multiple of `tile_vocab`.
      vmem_bytes: what a step plans to use of VMEM, buffers and temporaries together.
    """

    block_tokens: int
    tile_vocab: int
    sub_vocab: int
    block_vocab: int
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        if self.tile_vocab % (2 * self.sub_vocab) or self.sub_vocab % LANES or self.block_tokens % LANES:
            raise KernelError(
                f"LossConfig: {self.block_tokens} tokens and {self.tile_vocab} words a step, {self.sub_vocab} at once; tile_vocab must be an even "
                f"number of sub_vocab, for two tiles of logits take turns, and sub_vocab and block_tokens multiples of {LANES}."
            )

    def with_block_size(self, block_size: int) -> LossConfig:
        """The same with `block_size` words a step, and no more at a time in the backward pass."""
        tile = min(self.tile_vocab, round_up(block_size, 2 * self.sub_vocab))
        return dataclasses.replace(self, tile_vocab=tile, block_vocab=round_up(block_size, tile))

    @property
    def compiler_params(self) -> pltpu.CompilerParams:
        """Both grids walk panels of tokens, then the words that pass by them."""
        wanted = round_up(self.vmem_bytes * 5 // 4, 1 << 20)
        return pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=wanted if wanted > 16 << 20 else None,
        )


def why_not(spec: LossSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.x.dtype not in TPU_DTYPES:
        return f"`x` is {spec.operands.x.dtype.name}, and the TPU computes in float32 and bfloat16."
    if spec.precision == "high":
        return 'three bfloat16 products for one of float32 (precision="high") are left to XLA.'
    if spec.groups * spec.tokens == 0:
        return "there are no tokens."
    least = _vmem(spec, LANES, 2 * LANES, LANES)
    if least > vmem_budget(chip):
        return f"{LANES} tokens and {2 * LANES} words of {spec.features} features take {least:,} bytes of VMEM, more than the {vmem_budget(chip):,} there are to plan with."
    return None


def _vmem(spec: LossSpec, tokens: int, tile: int, sub: int) -> int:
    """Bytes of VMEM: blocks twice, for a transfer runs beside the computation; two tiles of logits and what the compiler keeps of another two."""
    size = spec.operands.x.dtype.itemsize
    panels = 2 * (tokens + tile) * round_up(spec.features, LANES) * size
    return panels + 4 * sub * tokens * 4 + 4 * tile * tokens * size + 64 * tokens * 4


def heuristic(spec: LossSpec, chip: Chip | None) -> LossConfig:
    """Enough tokens that the words, which every panel of tokens reads again, pass by faster than they are multiplied; then as many words as fit."""
    planned = planning_chip(chip)
    budget = vmem_budget(chip)
    passes = 6 if spec.precision == "highest" else 1
    multiplied = planned.peak_bf16 / planned.cores / 2 / planned.clock / passes  # multiply-adds a cycle of one core
    # A word's features are read once for `tokens` of them: 2 * tokens operations for each element.
    needed = planned.peak_bf16 / passes / planned.hbm_bandwidth * spec.operands.x.dtype.itemsize / 2
    wanted = next((n for n in (256, 512) if n >= 1.25 * needed), 1024)
    every = spec.groups * spec.tokens if spec.shared else spec.tokens
    wanted = min(wanted, round_up(-(-every // planned.cores_per_device), LANES))
    words = round_up(spec.vocab, 2 * LANES)

    def fits(tokens: int, tile: int, sub: int) -> bool:
        cycles = tokens * tile * spec.features / multiplied
        return _vmem(spec, tokens, tile, sub) <= budget and (cycles <= _UNROLLED or tile == 2 * LANES)

    choices = [
        (tokens, count * sub, sub)
        for tokens in (wanted, *(n for n in (512, 256, 128) if n < wanted))
        for sub in (256, 128)
        for count in (8, 4, 2)
        if count * sub <= words
    ]
    tokens, tile, sub = next((c for c in choices if fits(*c)), (LANES, 2 * LANES, LANES))
    return LossConfig(tokens, tile, sub, part_of_vocabulary(spec.vocab, tile), _vmem(spec, tokens, tile, sub))


# --- Kernel bodies ---------------------------------------------------------------------------------------------------------------------------------


def _raw_logits(spec: LossSpec, config: LossConfig, s: int, x_ref: Any, weight_ref: Any, bias_ref: Any) -> Any:
    """Logits before the cap, `[sub_vocab, block_tokens]`, of the words of sub-tile `s`."""
    words = pl.ds(s * config.sub_vocab, config.sub_vocab)
    z = lax.dot_general(
        weight_ref[words, :],
        x_ref[...],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if spec.precision == "highest" else None,
        preferred_element_type=jnp.float32,
    )
    if bias_ref is not None:
        row = jnp.broadcast_to(bias_ref[:, words], (8, config.sub_vocab))
        z = z + row.T[:, :1]
    return z


def _forward_body(refs: Any, *, spec: LossSpec, config: LossConfig, steps: int) -> None:
    x_ref, weight_ref, bias_ref, labels_ref, *outs, m_ref, l_ref, label_ref, total_ref, even_ref, odd_ref = refs
    step, sub = pl.program_id(1), config.sub_vocab
    slots = (even_ref, odd_ref)
    labels = labels_ref[...]  # [1, tokens]

    def consume(slot: int, first_word: Any) -> None:
        """Takes a tile of logits into the running maximum, sum, label's logit and sum of logits, eight rows of each."""
        z = slots[slot][...].reshape(sub // 8, 8, config.block_tokens)
        if spec.softcap is not None:
            z = spec.softcap * jnp.tanh(z * (1.0 / spec.softcap))
        word = 8 * lax.broadcasted_iota(jnp.int32, z.shape, 0) + lax.broadcasted_iota(jnp.int32, z.shape, 1)
        at_label = jnp.sum(jnp.where(word == (labels - first_word)[None], z, 0.0), axis=0)
        if spec.vocab % config.tile_vocab:  # what the memory holds past the last word may be NaN
            known = word < spec.vocab - first_word
            if total_ref is not None:
                total_ref[...] += jnp.sum(jnp.where(known, z, 0.0), axis=0)
            z = jnp.where(known, z, -jnp.inf)
        elif total_ref is not None:
            total_ref[...] += jnp.sum(z, axis=0)
        m_old = m_ref[...]
        m = jnp.maximum(m_old, jnp.max(z, axis=0))
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m) + jnp.sum(jnp.exp(z - m[None]), axis=0)
        m_ref[...] = m
        label_ref[...] += at_label

    count = config.tile_vocab // sub
    for s in range(count):
        slots[s % 2][...] = _raw_logits(spec, config, s, x_ref, weight_ref, bias_ref)
        consume((s + 1) % 2, step * config.tile_vocab + (s - 1) * sub)
        if s == 0:
            # What came before the first tile was nothing. A branch would part the product from the sums that hide behind it, a choice does not.
            begins = jnp.full(m_ref.shape, step) == 0
            for ref, start in ((m_ref, LOWEST), (l_ref, 0.0), (label_ref, 0.0), (total_ref, 0.0)):
                if ref is not None:
                    ref[...] = jnp.where(begins, start, ref[...])

    @pl.when(step == steps - 1)
    def _() -> None:
        consume((count - 1) % 2, step * config.tile_vocab + (count - 1) * sub)
        top = jnp.max(m_ref[...], axis=0, keepdims=True)
        l = jnp.sum(l_ref[...] * jnp.exp(m_ref[...] - top), axis=0, keepdims=True)
        logsumexp_ref, at_label_ref, sum_ref = outs
        logsumexp_ref[...] = top + jnp.log(l)
        at_label_ref[...] = jnp.sum(label_ref[...], axis=0, keepdims=True)
        if sum_ref is not None:
            sum_ref[...] = jnp.sum(total_ref[...], axis=0, keepdims=True)


def _slope_body(refs: Any, *, spec: LossSpec, config: LossConfig, tokens: int) -> None:
    """The gradient of a tile of logits: softmax times the logsumexp's cotangent, plus the label's and the sum's."""
    start_ref, x_ref, weight_ref, bias_ref, labels_ref, lse_ref, dlse_ref, dlabel_ref, dtotal_ref, *rest = refs
    dz_ref, turned_ref, dbias_ref, even_ref, odd_ref = rest
    sub, slots = config.sub_vocab, (even_ref, odd_ref)
    first = (start_ref[0] + pl.program_id(1)) * config.tile_vocab

    def consume(s: int) -> None:
        z = slots[s % 2][...]  # [sub, tokens]
        slope = None
        if spec.softcap is not None:
            t = jnp.tanh(z * (1.0 / spec.softcap))
            z, slope = spec.softcap * t, 1.0 - t * t
        here = labels_ref[...] - (first + s * sub)
        dz = jnp.exp(z - lse_ref[...]) * dlse_ref[...]
        dz = dz + jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 0) == here, dlabel_ref[...], 0.0)
        if dtotal_ref is not None:
            dz = dz + dtotal_ref[...]
        if slope is not None:
            dz = dz * slope
        dz_ref[s * sub : (s + 1) * sub, :] = dz.astype(dz_ref.dtype)
        turned_ref[:, s * sub : (s + 1) * sub] = dz.T.astype(dz_ref.dtype)
        if dbias_ref is not None:
            if tokens % config.block_tokens:
                column = pl.program_id(0) * config.block_tokens + lax.broadcasted_iota(jnp.int32, z.shape, 1)
                dz = jnp.where(column < tokens, dz, 0.0)
            lanes = [dz[:, i : i + LANES] for i in range(0, config.block_tokens, LANES)]
            dbias_ref[s * sub : (s + 1) * sub, :] = sum(lanes[1:], lanes[0])

    count = config.tile_vocab // sub
    for s in range(count + 1):
        if s < count:
            slots[s % 2][...] = _raw_logits(spec, config, s, x_ref, weight_ref, bias_ref)
        if s > 0:
            consume(s - 1)


# --- Calls -----------------------------------------------------------------------------------------------------------------------------------------


def _call(
    body: Any, scalars: tuple[Any, ...], inputs: list[Any], outputs: list[Any], scratch: list[Any], **kwargs: Any
) -> list[Any]:
    """`pallas_call` of (array or struct, BlockSpec) pairs, of which some are None; absent ones arrive as None refs, and return as None."""
    present = [True] * len(scalars) + [entry is not None for entry in (*inputs, *outputs, *scratch)]
    arrays, in_specs = zip(*(entry for entry in inputs if entry is not None))
    structs, out_specs = zip(*(entry for entry in outputs if entry is not None))

    def kernel(*refs: Any) -> None:
        remaining = iter(refs)
        body([next(remaining) if here else None for here in present])

    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(scalars),
        grid=kwargs.pop("grid"),
        in_specs=list(in_specs),
        out_specs=list(out_specs),
        scratch_shapes=[entry for entry in scratch if entry is not None],
    )
    results = iter(pl.pallas_call(kernel, grid_spec=grid_spec, out_shape=list(structs), **kwargs)(*scalars, *arrays))
    return [None if entry is None else next(results) for entry in outputs]


def _logit_tiles(config: LossConfig) -> list[Any]:
    return [pltpu.VMEM((config.sub_vocab, config.block_tokens), jnp.float32)] * 2


def _forward_one(spec: LossSpec, config: LossConfig, x: Any, weight: Any, bias: Any, labels: Any) -> Outputs:
    (tokens, features), block, tile = x.shape, config.block_tokens, config.tile_vocab
    steps = pl.cdiv(spec.vocab, tile)
    row = pl.BlockSpec((1, block), lambda i, j: (0, i))
    struct = out_struct((1, tokens), jnp.float32, x, weight, bias, labels)
    eight = pltpu.VMEM((8, block), jnp.float32)
    results = _call(
        lambda refs: _forward_body(refs, spec=spec, config=config, steps=steps),
        (),
        [
            (x, pl.BlockSpec((block, features), lambda i, j: (i, 0))),
            (weight, pl.BlockSpec((tile, features), lambda i, j: (j, 0))),
            None if bias is None else (bias[None], pl.BlockSpec((1, tile), lambda i, j: (0, j))),
            (labels[None], row),
        ],
        [(struct, row), (struct, row), (struct, row) if spec.logit_sum else None],
        [eight, eight, eight, eight if spec.logit_sum else None, *_logit_tiles(config)],
        grid=(pl.cdiv(tokens, block), steps),
        compiler_params=config.compiler_params,
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * spec.vocab * features,
            bytes_accessed=x.nbytes + pl.cdiv(tokens, block) * weight.nbytes,
            transcendentals=tokens * spec.vocab,
        ),
        name="linear_cross_entropy_forward",
    )
    return Outputs(*(None if y is None else y[0] for y in results))


def forward(spec: LossSpec, config: LossConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals  # the outputs are all that the backward pass needs
    return forward_by(spec, lambda *arrays: _forward_one(spec, config, *arrays), operands), None


def _slope(
    spec: LossSpec,
    config: LossConfig,
    x: Any,
    weight: Any,
    bias: Any,
    labels: Any,
    rows: Any,
    start: Any,
    size: int,
) -> tuple[Any, Any, Any]:
    """See `chunked.backward_by`."""
    (tokens, features), block, tile = x.shape, config.block_tokens, config.tile_vocab
    panels = pl.cdiv(tokens, block)
    row = pl.BlockSpec((1, block), lambda i, j, first: (0, i))
    everything = (x, weight, bias, labels, rows)
    logsumexp, dlogsumexp, dlabel, *dtotal = (r[None] for r in rows)
    logsumexp = jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)
    dz, turned, dbias = _call(
        lambda refs: _slope_body(refs, spec=spec, config=config, tokens=tokens),
        (jnp.asarray(start // tile, jnp.int32).reshape(1),),
        [
            (x, pl.BlockSpec((block, features), lambda i, j, first: (i, 0))),
            (weight, pl.BlockSpec((tile, features), lambda i, j, first: (first[0] + j, 0))),
            None if bias is None else (bias[None], pl.BlockSpec((1, tile), lambda i, j, first: (0, first[0] + j))),
            (labels[None], row),
            (logsumexp, row),
            (dlogsumexp, row),
            (dlabel, row),
            (dtotal[0], row) if dtotal else None,
        ],
        [
            (
                out_struct((size, tokens), x.dtype, everything),
                pl.BlockSpec((tile, block), lambda i, j, first: (j, i)),
            ),
            (
                out_struct((tokens, size), x.dtype, everything),
                pl.BlockSpec((block, tile), lambda i, j, first: (i, j)),
            ),
            None
            if bias is None
            else (
                out_struct((panels, size, LANES), jnp.float32, everything),
                pl.BlockSpec((None, tile, LANES), lambda i, j, first: (i, j, 0)),
            ),
        ],
        _logit_tiles(config),
        grid=(panels, pl.cdiv(size, tile)),
        compiler_params=config.compiler_params,
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * size * features,
            bytes_accessed=x.nbytes + (panels * features + 2 * tokens) * size * x.dtype.itemsize,
            transcendentals=tokens * size,
        ),
        name="linear_cross_entropy_slope",
    )
    return dz, turned, None if dbias is None else jnp.sum(dbias, axis=(0, 2))


def backward(
    spec: LossSpec, config: LossConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    del residuals
    config = dataclasses.replace(config, block_vocab=round_up(config.block_vocab, config.tile_vocab))

    def slope(*arguments: Any) -> Any:
        return _slope(spec, config, *arguments)

    return backward_by(spec, config, slope, operands, outputs, cotangents, apart=True)


def notes(spec: LossSpec, chip: Chip | None) -> tuple[str, ...]:
    """What `explain` adds: what the backward pass holds, and how float32 is multiplied."""
    block = min(heuristic(spec, chip).block_vocab, spec.vocab)
    every = spec.groups * spec.tokens if spec.shared else spec.tokens
    size = 2 * every * block * spec.operands.x.dtype.itemsize
    said = [
        f"backward holds {block} of {spec.vocab} words at a time, {size:,} bytes, and computes the logits once more"
    ]
    if spec.precision != "default":
        said.append("float32 is multiplied by six bfloat16 products")
    return tuple(said)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, LossConfig, notes)
