"""The cross entropy of a linear layer in plain JAX, some entries of the vocabulary at a time: the logits are never
held, on any platform.

The forward pass keeps the running maximum and sum of Milakov and Gimelshein, "Online normalizer calculation for
softmax" (2018). The backward pass forms the logits' gradient of some entries, from the logsumexp, and multiplies it at
once: x's gradient grows by every part of the vocabulary, and weight's is complete for those entries, so no sum of
weight's size is kept in float32. The idea is that of Wijmans et al., "Cut Your Losses in Large-Vocabulary Language
Models" (2025), and of Liger-Kernel (Hsu et al., 2024), which walks the tokens instead.

Logits are kept `[vocab, tokens]`: sums over entries then run over rows.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.core.sharding import match_varying
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, option
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.loss.spec import LossSpec, Operands, Outputs

LOWEST = -1e30
"""Where a running maximum starts: finite, so that a logit of -inf gives exp(-inf) = 0 and never exp(-inf + inf)."""

_PARTS = 48
"""Parts of the vocabulary to aim at: the logits of one, its gradient and x's together take about a twentieth of all
logits and their gradient.
"""


@dataclasses.dataclass(frozen=True)
class ChunkedLossConfig(Tiles):
    """Attributes:
    block_vocab: entries whose logits are formed at a time.
    """

    block_vocab: int = option(block_size=lambda tiles, n: n)


def part_of_vocabulary(vocab: int, multiple: int = 128) -> int:
    """Entries to take at a time, a multiple of `multiple`: no more than a part of the vocabulary, but enough for a
    product.
    """
    return max(min(max(vocab // _PARTS, 512), 8192) // multiple, 1) * multiple


def heuristic(spec: LossSpec, target: Target) -> ChunkedLossConfig:
    """A part of the vocabulary; of 512 to 8192 entries."""
    return ChunkedLossConfig(min(part_of_vocabulary(spec.vocab), spec.vocab))


def each_group(spec: LossSpec, run: Callable[..., object], operands: Operands, *rows: AnyArray) -> tuple[PyTree, bool]:
    """`run(x [T, D], weight [V, D], bias [V] or None, labels [T], *rows [T])` for each group; groups that share all
    parameters are one.

    Returns:
      The results, stacked, and whether the groups were one (their tokens are then folded into one axis, and there is a
      leading axis of 1).
    """
    if spec.shared:
        flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (operands.x, operands.labels, rows))
        bias = None if operands.bias is None else operands.bias[0]
        results = run(flat[0], operands.weight[0], bias, flat[1], *flat[2])
        return jax.tree.map(lambda a: a[None], results), True
    broadcast = jax.tree.map(lambda a: jnp.broadcast_to(a, (spec.groups, *a.shape[1:])), (operands[:4], rows))
    return lax.map(lambda group: run(*group[0], *group[1]), broadcast), False


def forward_by(spec: LossSpec, run: Callable[..., object], operands: Operands) -> Outputs:
    """The forward pass by `run(x, weight, bias, labels) -> Outputs` of one group; it gets targets [T, V] too, where
    there are any.
    """
    results, _ = each_group(spec, run, operands, *_targets(operands))
    return Outputs(*(None if y is None else y.reshape(operands.labels.shape) for y in results))


def _targets(operands: Operands) -> tuple[PyTree, ...]:
    return () if operands.targets is None else (operands.targets,)


def backward_by(
    spec: LossSpec,
    config: Any,
    slope: Callable[..., Any],
    operands: Operands,
    outputs: Outputs,
    cotangents: Outputs,
    *,
    separate_weight: bool = False,
) -> Operands:
    """The backward pass by `slope`, which gives the gradient of some entries' logits.

    Args:
      config: its `block_vocab` is the number of entries at a time.
      slope: `(x, weight, bias, labels, rows, start, size) -> (dz [size, T], dz [T, size] or None, dbias [size] or
        None)` for the entries from `start` on, before the cap, dz in x's dtype for the products to come; rows are the
        logsumexp and the cotangents of the outputs, `[T]` each, and targets [T, V] where there are any: then dtargets
        [T, size] is the fourth result. Where dz comes in both orders, neither product has to
        turn it.
      separate_weight: `slope` is a kernel, whose weight the loop carries apart from the products'. On TPU7x XLA lays
        the latter out in tiles of 16 rows, and would copy all of it to tiles of 8 for the kernel in every turn.
    """

    def group_gradients(x: AnyArray, weight: AnyArray, bias: AnyArray, labels: AnyArray, *rows: AnyArray) -> PyTree:
        kernel_weight = lax.optimization_barrier(weight) if separate_weight else weight
        return _gradients(
            spec, config.block_vocab, functools.partial(slope, x, kernel_weight), x, weight, bias, labels, rows
        )

    return gradients_by(spec, group_gradients, operands, outputs, cotangents)


def gradients_by(
    spec: LossSpec, gradients: Callable[..., object], operands: Operands, outputs: Outputs, cotangents: Outputs
) -> Operands:
    """The backward pass by `gradients`: `(x, weight, bias, labels, *rows) -> (dx, dweight, dbias)` of a group, where
    rows are the logsumexp and the cotangents of the outputs, `[T]` each; with targets they are the last of the rows,
    and their gradient the last result.
    """
    zero = jnp.zeros(operands.labels.shape, spec.accumulator)
    d = Outputs(*(zero if c is None else c for c in cotangents))
    rows = (outputs.logsumexp, d.logsumexp, d.label_logit, *((d.logit_sum,) if spec.logit_sum else ()))
    (dx, dweight, dbias, *dtargets), _ = each_group(spec, gradients, operands, *rows, *_targets(operands))
    return Operands(
        dx.reshape(operands.x.shape),
        _parameter_gradient(spec, dweight, operands.weight),
        _parameter_gradient(spec, dbias, operands.bias),
        None,
        dtargets[0].reshape(operands.targets.shape) if dtargets else None,
    )


def _parameter_gradient(spec: LossSpec, gradient: AnyArray, operand: AnyArray) -> AnyArray:
    """The gradient of weight or bias from that of every group, summed where the groups share it; None where there is no
    operand.
    """
    if operand is None:
        return None
    wide = gradient.astype(spec.accumulator)
    return gradient if gradient.shape == operand.shape else jnp.sum(wide, 0, keepdims=True).astype(operand.dtype)


def _gradients(
    spec: LossSpec,
    block: int,
    slope: Callable[..., Any],
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray,
    labels: AnyArray,
    rows: PyTree,
) -> PyTree:
    """(dx, dweight, dbias), and dtargets where there are targets, of one group: the entries in parts of `block`, then
    those that are left.
    """
    targets = rows[-1] if rows[-1].ndim == 2 else None
    acc, vocab = spec.accumulator, weight.shape[0]
    precision = lax_precision(spec.precision)

    def dot(a: AnyArray, b: AnyArray, axis: int) -> AnyArray:
        return lax.dot_general(a, b, (((axis,), (0,)), ((), ())), precision=precision, preferred_element_type=acc)

    def part(carry: PyTree, start: Any, size: int) -> PyTree:
        dx, dweight, dbias, *dtargets = carry
        dz, turned, dbias_part, *dtargets_part = slope(bias, labels, rows, start, size)  # [size, T], [T, size]
        entries = lax.dynamic_slice_in_dim(weight, start, size)
        dx = dx + (dot(dz, entries, 0) if turned is None else dot(turned, entries, 1))
        dweight = lax.dynamic_update_slice_in_dim(dweight, dot(dz, x, 1).astype(weight.dtype), start, 0)
        if dbias is not None:
            dbias = lax.dynamic_update_slice_in_dim(dbias, dbias_part, start, 0)
        pieces = zip(dtargets, dtargets_part, strict=True)
        return dx, dweight, dbias, *(lax.dynamic_update_slice_in_dim(of, piece, start, 1) for of, piece in pieces)

    start = (
        jnp.zeros(x.shape, acc),
        lax.empty(weight.shape, weight.dtype),
        None if bias is None else jnp.zeros_like(bias),
        *(() if targets is None else (lax.empty(targets.shape, targets.dtype),)),
    )
    carry, _ = match_varying((start, (x, weight, bias, labels, rows)))
    block = min(block, vocab)
    full_blocks = vocab // block
    if full_blocks > 1:
        carry = lax.fori_loop(0, full_blocks, lambda i, carry: part(carry, i * block, block), carry)
    else:
        carry = part(carry, 0, block)
    if vocab % block:
        carry = part(carry, full_blocks * block, vocab % block)
    dx, *rest = carry
    return dx.astype(x.dtype), *rest


def _logits(
    spec: LossSpec, x: AnyArray, weight: AnyArray, bias: AnyArray, start: int | jax.Array, size: int
) -> AnyArray:
    """Logits `[size, T]` of the entries from `start` on."""
    entries = lax.dynamic_slice_in_dim(weight, start, size)
    z = lax.dot_general(
        entries,
        x,
        (((1,), (1,)), ((), ())),
        precision=lax_precision(spec.precision),
        preferred_element_type=spec.accumulator,
    )
    if bias is not None:
        z = z + lax.dynamic_slice_in_dim(bias, start, size)[:, None]
    return z if spec.softcap is None else spec.softcap * jnp.tanh(z / spec.softcap)


def _is_label(labels: AnyArray, start: Any, size: int) -> AnyArray:
    """Where the vocab entry of a row is the label of a column, bool `[size, T]`."""
    return lax.broadcasted_iota(jnp.int32, (size, labels.shape[0]), 0) == (labels - start)[None]


def _weights(spec: LossSpec, targets: AnyArray, start: int | jax.Array, size: int) -> AnyArray:
    """Targets `[size, T]` of the entries from `start` on."""
    return lax.dynamic_slice_in_dim(targets, start, size, axis=1).astype(spec.accumulator).T


def _forward_one(
    spec: LossSpec,
    block: int,
    x: AnyArray,
    weight: AnyArray,
    bias: AnyArray,
    labels: AnyArray,
    targets: AnyArray = None,
) -> Outputs:
    def part(carry: PyTree, start: int | jax.Array, size: int) -> PyTree:
        m, l, at_label, total = carry
        z = _logits(spec, x, weight, bias, start, size)
        m_new = jnp.maximum(m, jnp.max(z, axis=0))
        l = l * jnp.exp(m - m_new) + jnp.sum(jnp.exp(z - m_new), axis=0)
        at_label = at_label + jnp.sum(jnp.where(_is_label(labels, start, size), z, 0.0), axis=0)
        if targets is not None:
            at_label = at_label + jnp.sum(_weights(spec, targets, start, size) * z, axis=0)
        return m_new, l, at_label, None if total is None else total + jnp.sum(z, axis=0)

    zeros = jnp.zeros(x.shape[:1], spec.accumulator)
    start = jnp.full_like(zeros, LOWEST), zeros, zeros, zeros if spec.logit_sum else None
    carry, _ = match_varying((start, (x, weight, bias, labels, targets)))
    full_blocks, vocab = weight.shape[0] // block, weight.shape[0]
    if full_blocks > 1:
        carry = lax.fori_loop(0, full_blocks, lambda i, carry: part(carry, i * block, block), carry)
    else:
        carry = part(carry, 0, block)
    if vocab % block:
        carry = part(carry, full_blocks * block, vocab % block)
    m, l, at_label, total = carry
    return Outputs(m + jnp.log(l), at_label, total)


def forward(spec: LossSpec, config: ChunkedLossConfig, operands: Operands) -> tuple[Outputs, None]:
    """The forward pass; its outputs are all that the backward pass needs."""
    block = min(config.block_vocab, spec.vocab)
    return forward_by(spec, lambda *arrays: _forward_one(spec, block, *arrays), operands), None


def backward(
    spec: LossSpec,
    config: ChunkedLossConfig,
    operands: Operands,
    outputs: Outputs,
    cotangents: Outputs,
) -> Operands:
    """The backward pass: every logit is computed once more, and once only."""

    def slope(
        x: AnyArray, weight: AnyArray, bias: AnyArray, labels: AnyArray, rows: PyTree, start: int | jax.Array, size: int
    ) -> PyTree:
        """The logits' gradient `[size, T]`, before the cap, in x's dtype for the products to come; and its sum over
        tokens for the bias.
        """
        logsumexp, dlogsumexp, dlabel, *rest = rows
        targets = rest.pop() if operands.targets is not None else None
        dtotal, dtargets = rest, ()
        z = _logits(spec, x, weight, bias, start, size)
        dz = jnp.exp(z - _finite(logsumexp)) * dlogsumexp + jnp.where(_is_label(labels, start, size), dlabel, 0.0)
        dz = dz + dtotal[0] if dtotal else dz
        if targets is not None:
            dz = dz + _weights(spec, targets, start, size) * dlabel
            dtargets = ((z * dlabel).T.astype(targets.dtype),)
        if spec.softcap is not None:
            dz = dz * (1.0 - jnp.square(z / spec.softcap))
        return dz.astype(x.dtype), None, None if bias is None else jnp.sum(dz, axis=1), *dtargets

    return backward_by(spec, config, slope, operands, outputs, cotangents)


def _finite(logsumexp: AnyArray) -> AnyArray:
    """0 where every logit is -inf, so that exp(-inf - 0) is 0."""
    return jnp.where(logsumexp == -jnp.inf, 0.0, logsumexp)


XLA_CHUNKED = Implementation("xla_chunked", None, forward, backward, heuristic=heuristic, config_type=ChunkedLossConfig)
