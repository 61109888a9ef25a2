"""The bodies of the cross entropy on TPU: two tiles of logits take turns, so that one is multiplied while the other is
summed.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from vishwamai.core.pallas import LANES
from vishwamai.core.types import AnyArray, Ref
from vishwamai.ops.loss.chunked import LOWEST
from vishwamai.ops.loss.spec import LossSpec
from vishwamai.ops.loss.tpu_tiles import LossConfig


def _raw_logits(
    spec: LossSpec, config: LossConfig, s: int, x_ref: Ref, weight_ref: Ref, bias_ref: Ref | None
) -> AnyArray:
    """Logits before the cap, `[sub_vocab, block_tokens]`, of the entries of sub-tile `s`."""
    entries = pl.ds(s * config.sub_vocab, config.sub_vocab)
    z = lax.dot_general(
        weight_ref[entries, :],
        x_ref[...],
        (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if spec.precision == "highest" else None,
        preferred_element_type=jnp.float32,
    )
    if bias_ref is not None:
        # a whole tile, to be transposed
        row = jnp.broadcast_to(bias_ref[:, entries], (8, config.sub_vocab))
        z = z + row.T[:, :1]
    return z


def forward_body(
    x_ref: Ref,
    weight_ref: Ref,
    bias_ref: Ref,
    labels_ref: Ref,
    logsumexp_ref: Ref,
    at_label_ref: Ref,
    sum_ref: Ref,
    m_ref: Ref,
    l_ref: Ref,
    label_ref: Ref,
    total_ref: Ref,
    even_ref: Ref,
    odd_ref: Ref,
    *,
    spec: LossSpec,
    config: LossConfig,
    steps: int,
) -> None:
    """The running maximum m, the sum l of exp(z - m), the label's logit and the sum of logits, `[8, block_tokens]`
    each, over the entries' tiles.
    """
    step, sub = pl.program_id(1), config.sub_vocab
    slots = (even_ref, odd_ref)
    labels = labels_ref[...]  # [1, tokens]

    def consume(slot: int, first_entry: AnyArray) -> None:
        """Takes a tile of logits into the running maximum, sum, label's logit and sum of logits, eight rows of each."""
        z = slots[slot][...].reshape(sub // 8, 8, config.block_tokens)  # [sub_vocab / 8, 8, block_tokens]
        if spec.softcap is not None:
            z = spec.softcap * jnp.tanh(z * (1.0 / spec.softcap))
        entry = 8 * lax.broadcasted_iota(jnp.int32, z.shape, 0) + lax.broadcasted_iota(jnp.int32, z.shape, 1)
        at_label = jnp.sum(jnp.where(entry == (labels - first_entry)[None], z, 0.0), axis=0)  # [8, block_tokens]
        if spec.vocab % config.tile_vocab:  # what the memory holds past the last entry may be NaN
            in_vocab = entry < spec.vocab - first_entry
            if total_ref is not None:
                total_ref[...] += jnp.sum(jnp.where(in_vocab, z, 0.0), axis=0)
            z = jnp.where(in_vocab, z, -jnp.inf)  # not before: -inf must not reach the sum of logits
        elif total_ref is not None:
            total_ref[...] += jnp.sum(z, axis=0)
        m_old = m_ref[...]
        m = jnp.maximum(m_old, jnp.max(z, axis=0))  # [8, block_tokens]
        l_ref[...] = l_ref[...] * jnp.exp(m_old - m) + jnp.sum(jnp.exp(z - m[None]), axis=0)
        m_ref[...] = m
        label_ref[...] += at_label

    count = config.tile_vocab // sub
    for s in range(count):
        slots[s % 2][...] = _raw_logits(spec, config, s, x_ref, weight_ref, bias_ref)
        # The sub-tile before this one, of the step before where s is 0, while the matrix unit computes this one.
        consume((s + 1) % 2, step * config.tile_vocab + (s - 1) * sub)
        if s == 0:
            # What came before the first tile was nothing. A branch would part the product from the sums that hide
            # behind it, a choice does not.
            begins = jnp.full(m_ref.shape, step) == 0
            for ref, start in ((m_ref, LOWEST), (l_ref, 0.0), (label_ref, 0.0), (total_ref, 0.0)):
                if ref is not None:
                    ref[...] = jnp.where(begins, start, ref[...])

    @pl.when(step == steps - 1)
    def _() -> None:
        consume((count - 1) % 2, step * config.tile_vocab + (count - 1) * sub)
        # Sublanes have a maximum and a sum each, which are merged once.
        top = jnp.max(m_ref[...], axis=0, keepdims=True)  # [1, block_tokens]
        l = jnp.sum(l_ref[...] * jnp.exp(m_ref[...] - top), axis=0, keepdims=True)
        logsumexp_ref[...] = top + jnp.log(l)
        at_label_ref[...] = jnp.sum(label_ref[...], axis=0, keepdims=True)
        if sum_ref is not None:
            sum_ref[...] = jnp.sum(total_ref[...], axis=0, keepdims=True)


def slope_body(
    start_ref: Ref,
    x_ref: Ref,
    weight_ref: Ref,
    bias_ref: Ref | None,
    labels_ref: Ref,
    lse_ref: Ref,
    dlse_ref: Ref,
    dlabel_ref: Ref,
    dtotal_ref: Ref | None,
    dz_ref: Ref,
    turned_ref: Ref,
    dbias_ref: Ref | None,
    even_ref: Ref,
    odd_ref: Ref,
    *,
    spec: LossSpec,
    config: LossConfig,
    tokens: int,
) -> None:
    """The gradient of a tile of logits: softmax times the logsumexp's cotangent, plus the label's and the sum's."""
    sub, slots = config.sub_vocab, (even_ref, odd_ref)
    first = (start_ref[0] + pl.program_id(1)) * config.tile_vocab

    def consume(s: int) -> None:
        z = slots[s % 2][...]  # [sub_vocab, block_tokens]
        slope = None
        if spec.softcap is not None:
            t = jnp.tanh(z * (1.0 / spec.softcap))
            z, slope = spec.softcap * t, 1.0 - t * t  # d softcap tanh(z / softcap) / dz
        label = labels_ref[...] - (first + s * sub)
        dz = jnp.exp(z - lse_ref[...]) * dlse_ref[...]  # [sub_vocab, block_tokens]
        dz = dz + jnp.where(lax.broadcasted_iota(jnp.int32, z.shape, 0) == label, dlabel_ref[...], 0.0)
        if dtotal_ref is not None:
            dz = dz + dtotal_ref[...]
        if slope is not None:
            dz = dz * slope
        dz_ref[s * sub : (s + 1) * sub, :] = dz.astype(dz_ref.dtype)
        turned_ref[:, s * sub : (s + 1) * sub] = dz.T.astype(dz_ref.dtype)  # [block_tokens, sub_vocab]
        if dbias_ref is not None:
            # Columns past the last token hold anything, and the bias's gradient sums over columns.
            if tokens % config.block_tokens:
                column = pl.program_id(0) * config.block_tokens + lax.broadcasted_iota(jnp.int32, z.shape, 1)
                dz = jnp.where(column < tokens, dz, 0.0)  # past the last token memory holds anything
            # Sums of whole registers only: XLA adds up the last 128 lanes outside.
            lanes = [dz[:, i : i + LANES] for i in range(0, config.block_tokens, LANES)]
            dbias_ref[s * sub : (s + 1) * sub, :] = sum(lanes[1:], lanes[0])

    count = config.tile_vocab // sub
    for s in range(count + 1):
        if s < count:
            slots[s % 2][...] = _raw_logits(spec, config, s, x_ref, weight_ref, bias_ref)
        if s > 0:
            consume(s - 1)
