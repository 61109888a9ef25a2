"""The cross entropy of a linear layer on TPU: tiles of logits that live and die in VMEM (Pallas).

Forward, a panel of tokens stays in VMEM while all entries pass by: logits `[vocab, tokens]` come off the matrix unit
and go into a running maximum and sum (Milakov & Gimelshein 2018), so that maxima and sums run over rows and never over
lanes. Two tiles of logits take turns: while one is multiplied, the other is summed, across the steps of the grid too.

Backward, the entries pass by in parts (`chunked.backward_by`): a kernel computes a part's logits once more and turns
them into their gradient, of which only the rounded result is stored, and XLA's own products take it from there. That is
one product more than if the logits had been kept.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import LANES, call, round_up
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.loss.chunked import backward_by, forward_by
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs
from vishwamai.ops.loss.tpu_kernels import forward_body, slope_body
from vishwamai.ops.loss.tpu_tiles import LossConfig, heuristic, why_not

_SEMANTICS = ("parallel", "arbitrary")
"""Both grids walk panels of tokens, then the entries that pass by them."""


def _logit_tiles(config: LossConfig) -> dict[str, Any]:
    tile = pltpu.VMEM((config.sub_vocab, config.block_tokens), jnp.float32)
    return dict(even_ref=tile, odd_ref=tile)


def _forward_one(
    spec: LossSpec, config: LossConfig, x: AnyArray, weight: AnyArray, bias: AnyArray, labels: AnyArray
) -> Outputs:
    (tokens, features), block, tile = x.shape, config.block_tokens, config.tile_vocab
    steps = pl.cdiv(spec.vocab, tile)
    row = pl.BlockSpec((1, block), lambda i, j: (0, i))
    out = ((1, tokens), jnp.float32, row)
    eight = pltpu.VMEM((8, block), jnp.float32)
    results = call(
        functools.partial(forward_body, spec=spec, config=config, steps=steps),
        name="linear_cross_entropy_forward",
        grid=(pl.cdiv(tokens, block), steps),
        inputs=dict(
            x_ref=(x, pl.BlockSpec((block, features), lambda i, j: (i, 0))),
            weight_ref=(weight, pl.BlockSpec((tile, features), lambda i, j: (j, 0))),
            bias_ref=None if bias is None else (bias[None], pl.BlockSpec((1, tile), lambda i, j: (0, j))),
            labels_ref=(labels[None], row),
        ),
        outputs=dict(logsumexp_ref=out, at_label_ref=out, sum_ref=out if spec.logit_sum else None),
        scratch=dict(
            m_ref=eight,
            l_ref=eight,
            label_ref=eight,
            total_ref=eight if spec.logit_sum else None,
            **_logit_tiles(config),
        ),
        semantics=_SEMANTICS,
        vmem_bytes=config.vmem_bytes,
        flops=2 * tokens * spec.vocab * features,
        bytes_accessed=x.nbytes + pl.cdiv(tokens, block) * weight.nbytes,
        transcendentals=tokens * spec.vocab,
    )
    return Outputs(*(None if y is None else y[0] for y in results))


def forward(spec: LossSpec, config: LossConfig, operands: Operands) -> tuple[Outputs, None]:
    return forward_by(spec, lambda *arrays: _forward_one(spec, config, *arrays), operands), None


def _slope(
    spec: LossSpec,
    config: LossConfig,
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray,
    labels: AnyArray,
    rows: PyTree,
    start: Any,
    size: int,
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """See `chunked.backward_by`."""
    (tokens, features), block, tile = x.shape, config.block_tokens, config.tile_vocab
    panels = pl.cdiv(tokens, block)
    row = pl.BlockSpec((1, block), lambda i, j, first: (0, i))
    logsumexp, dlogsumexp, dlabel, *dtotal = (r[None] for r in rows)
    # Rows whose logits are all -inf: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN.
    logsumexp = jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)
    bias_block = pl.BlockSpec((1, tile), lambda i, j, first: (0, first[0] + j))
    dbias_block = pl.BlockSpec((None, tile, LANES), lambda i, j, first: (i, j, 0))  # partial sums by panel and lane
    dz, turned, dbias = call(
        functools.partial(slope_body, spec=spec, config=config, tokens=tokens),
        name="linear_cross_entropy_slope",
        grid=(panels, pl.cdiv(size, tile)),
        scalars=dict(start_ref=jnp.asarray(start // tile, jnp.int32).reshape(1)),
        inputs=dict(
            x_ref=(x, pl.BlockSpec((block, features), lambda i, j, first: (i, 0))),
            weight_ref=(weight, pl.BlockSpec((tile, features), lambda i, j, first: (first[0] + j, 0))),
            bias_ref=None if bias is None else (bias[None], bias_block),
            labels_ref=(labels[None], row),
            lse_ref=(logsumexp, row),
            dlse_ref=(dlogsumexp, row),
            dlabel_ref=(dlabel, row),
            dtotal_ref=(dtotal[0], row) if dtotal else None,
        ),
        outputs=dict(
            dz_ref=((size, tokens), x.dtype, pl.BlockSpec((tile, block), lambda i, j, first: (j, i))),
            turned_ref=((tokens, size), x.dtype, pl.BlockSpec((block, tile), lambda i, j, first: (i, j))),
            dbias_ref=None if bias is None else ((panels, size, LANES), jnp.float32, dbias_block),
        ),
        scratch=_logit_tiles(config),
        semantics=_SEMANTICS,
        vmem_bytes=config.vmem_bytes,
        flops=2 * tokens * size * features,
        bytes_accessed=x.nbytes + (panels * features + 2 * tokens) * size * x.dtype.itemsize,
        transcendentals=tokens * size,
    )
    return dz, turned, None if dbias is None else jnp.sum(dbias, axis=(0, 2))


def backward(spec: LossSpec, config: LossConfig, operands: Operands, outputs: Outputs, cotangents: Outputs) -> Operands:
    # Parts of the vocab begin at whole tiles, which `start_ref` counts.
    config = dataclasses.replace(config, block_vocab=round_up(config.block_vocab, config.tile_vocab))

    def slope(*arguments: PyTree) -> PyTree:
        return _slope(spec, config, *arguments)

    return backward_by(spec, config, slope, operands, outputs, cotangents, separate_weight=True)


def notes(spec: LossSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: what the backward pass holds, and how float32 is multiplied."""
    block = min(heuristic(spec, target).block_vocab, spec.vocab)
    every = spec.groups * spec.tokens if spec.shared else spec.tokens
    size = 2 * every * block * spec.operands.x.dtype.itemsize
    lines = [
        (
            f"backward holds {block} of the vocab of {spec.vocab} at a time, {size:,} bytes, and computes the logits "
            "once more"
        )
    ]
    if spec.precision != "default":
        lines.append("float32 is multiplied by six bfloat16 products")
    return tuple(lines)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, LossConfig, notes)
