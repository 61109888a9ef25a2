"""Paged attention in plain jax.numpy: the definition, and the fallback on every platform.

Blocks of queries (see `schedule`) walk their sequence's pages a few hundred keys at a time with an online softmax
(Milakov, Gimelshein 2018), a group of blocks together. What is held at once is one such step: it grows with neither the
number of pages nor the length of the sequences.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from vishwamai.core import dims
from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.core.sharding import Axes, follow_explicit_axes, match_varying
from vishwamai.core.spec import static_size
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.paged_attention.schedule import at_tokens, items, query_of, runs
from vishwamai.ops.paged_attention.spec import Operands, Outputs, PagedSpec

_KEYS = 256
"""Keys of one step, or a page where that is more."""
_STEP_BYTES = 32 << 20
"""Bytes of widened keys and values that one step may gather."""
_LOWEST = -1e30


def _queries_per_block(spec: PagedSpec) -> int:
    return min(static_size(spec.max_q_len, 16), max(1, 64 // spec.group), 16)


def keys_and_values(spec: PagedSpec, operands: Operands, pages: AnyArray) -> tuple[PyTree, PyTree]:
    """Keys and values of the pages named, `[..., keys, Hkv, D]`, in the accumulator's dtype; pages: int `[..., n]`."""

    def rows(pool: AnyArray) -> AnyArray:
        stored = pool[pages]  # [..., n, page, rows, D]
        return stored.reshape(*pages.shape[:-1], -1, *stored.shape[pages.ndim + 1 :]).astype(spec.accumulator)

    stored = rows(operands.k_pages)
    if spec.form == "latent":
        key = stored[..., None, :]
        value = key[..., : spec.value_dim]
    elif spec.form == "combined":
        key, value = stored[..., 0::2, :], stored[..., 1::2, :]
    else:
        key, value = stored, rows(operands.v_pages)

    def scaled(x: AnyArray, scale: AnyArray | None) -> AnyArray:
        if scale is None:
            return x
        return x * (rows(scale) if spec.token_scales else scale.astype(spec.accumulator)[:, None])

    return scaled(key, operands.k_scale), scaled(value, operands.v_scale)


def _one_batch(spec: PagedSpec, operands: Operands) -> Outputs:
    """The output `[T, Hq, Dv]` and the logsumexp `[T, Hq]` of operands without their batch axis."""
    wide = spec.accumulator
    precision = lax_precision("highest") if spec.compute_dtype != jnp.bfloat16 else None
    block = _queries_per_block(spec)
    of = runs(operands.kv_lens, operands.cu_q_lens, operands.num_seqs[0])
    blocks = items(spec, of, block, 1, spec.max_q_len)
    page, kv_heads, group = spec.page_size, spec.kv_heads, spec.group
    ahead = max(1, min(_KEYS // page, spec.pages_per_sequence))
    steps = -(-spec.pages_per_sequence // ahead)
    if spec.window is not None:  # a block sees at most so many pages from its first one on
        steps = min(steps, -(-(-(-(spec.window + block) // page) + 1) // ahead))

    def attend(item: PyTree) -> PyTree:
        """One block of queries: its output `[block, Hq, Dv]` and logsumexp `[block, Hq]`."""
        sequence, token, position, first_page, end = item
        rows = position + jnp.arange(block)
        query = operands.query[jnp.clip(token + jnp.arange(block), 0, spec.tokens - 1)]
        # Scaled before the product: after it, XLA may fuse the scale with the difference to the maximum, in which the
        # rounding of huge logits is then all that is left.
        query = query.reshape(block, kv_heads, group, spec.head_dim).astype(wide) * spec.scale
        table = operands.page_indices[sequence]
        if operands.tree_mask is not None:
            first_new = of.kv_len[sequence] - of.length[sequence]
            tree = operands.tree_mask[jnp.clip(token + jnp.arange(block), 0, spec.tokens - 1)]  # [block, columns]

        def step(carry: tuple[jax.Array, jax.Array, jax.Array], j: jax.Array) -> PyTree:
            m, l, acc = carry
            entries = first_page + j * ahead + jnp.arange(ahead)
            live = entries * page < end
            pages = jnp.where(live, table[jnp.clip(entries, 0, spec.pages_per_sequence - 1)], 0)
            key, value = keys_and_values(spec, operands, pages)
            columns = (entries[:, None] * page + jnp.arange(page)).reshape(-1)
            # What is not live may hold anything, NaN included: it is replaced, not multiplied by 0.
            inside = (columns < end)[:, None, None]
            key, value = jnp.where(inside, key, 0), jnp.where(inside, value, 0)
            s = jnp.einsum("qhgd,khd->hgqk", query, key, precision=precision)
            if spec.softcap is not None:
                s = spec.softcap * jnp.tanh(s / spec.softcap)
            if operands.slopes is not None:
                slopes = operands.slopes.astype(wide).reshape(kv_heads, group, 1, 1)
                s = s - slopes * (rows[:, None] - columns).astype(wide)
            see = (columns <= rows[:, None]) & (columns < end)
            if spec.window is not None:
                see &= columns >= rows[:, None] - spec.window
            if operands.tree_mask is not None:
                new = columns - first_new
                among = (new >= 0) & (new < tree.shape[1])
                see &= tree[:, jnp.clip(new, 0, tree.shape[1] - 1)] | ~among
            new = jnp.maximum(m, jnp.max(jnp.where(see, s, _LOWEST), axis=-1))
            new = lax.stop_gradient(new)
            p = jnp.where(see, jnp.exp(jnp.where(see, s - new[..., None], 0)), 0)
            shrink = jnp.exp(m - new)
            weighted = jnp.einsum("hgqk,khd->hgqd", p, value, precision=precision)
            return (new, l * shrink + p.sum(-1), acc * shrink[..., None] + weighted), None

        m = jnp.full((kv_heads, group, block), _LOWEST, wide)
        l = jnp.zeros_like(m)
        if operands.sinks is not None:
            sinks = operands.sinks.astype(wide).reshape(kv_heads, group, 1)
            m = lax.stop_gradient(jnp.maximum(m, sinks))
            l = jnp.exp(sinks - m)
        acc = jnp.zeros((*m.shape, spec.value_dim), wide)
        m, l, acc, _ = match_varying((m, l, acc, query))
        (m, l, acc), _ = lax.scan(jax.checkpoint(step), (m, l, acc), jnp.arange(steps))
        out = acc / jnp.where(l > 0, l, 1)[..., None]
        logsumexp = jnp.where(l > 0, m + jnp.log(jnp.where(l > 0, l, 1)), -jnp.inf)
        out = jnp.transpose(out, (2, 0, 1, 3)).reshape(block, spec.heads, spec.value_dim)
        return out, jnp.transpose(logsumexp, (2, 0, 1)).reshape(block, spec.heads)

    number = blocks.sequence.shape[0]
    bytes_each = ahead * page * kv_heads * (spec.head_dim + spec.value_dim) * jnp.dtype(wide).itemsize
    most = max(1, _STEP_BYTES // max(1, bytes_each))
    batch_size = max(1, min(number, most)) if isinstance(number, int) else None
    # [items, block, Hq, Dv] and [items, block, Hq]
    out, logsumexp = lax.map(attend, tuple(blocks[:5]), batch_size=batch_size)
    outputs, where = nothing(spec, ()), query_of(spec, of, block, 1, spec.max_q_len)
    if spec.return_lse:
        outputs = outputs._replace(logsumexp=at_tokens(logsumexp, outputs.logsumexp, *where))
    return outputs._replace(out=at_tokens(out, outputs.out, *where))


def nothing(spec: PagedSpec, lead: tuple[int, ...]) -> Outputs:
    """The results of tokens that belong to no sequence."""
    rows = (*lead, spec.tokens, spec.heads)
    logsumexp = jnp.full(rows, -jnp.inf, spec.accumulator) if spec.return_lse else None
    return Outputs(jnp.zeros((*rows, spec.value_dim), spec.compute_dtype), logsumexp)


def over_batches(function: Any, spec: PagedSpec, operands: Operands) -> Outputs:
    """Runs `function(operands without batch axis) -> Outputs` for every folded batch entry, one after the other; shared
    operands are not copied.
    """

    def run(*operands: AnyArray) -> Outputs:
        def entry(b: int) -> Operands:
            return Operands(*(None if x is None else x[b if x.shape[0] > 1 else 0] for x in operands))

        batch = operands[0].shape[0]
        if batch == 1:
            return jax.tree.map(lambda x: x[None], function(entry(0)))
        return lax.map(lambda b: function(entry(b)), jnp.arange(batch))

    # A mapped axis may lie on explicit mesh axes, along which no entry can be picked: every device then takes its own.
    texts = spec.dims(Operands)
    factors = tuple(None if x is None else dims.factors(text, x.ndim) for x, text in zip(operands, texts, strict=True))
    texts = spec.dims(Outputs)
    results = Outputs(dims.factors(texts.out, 4), dims.factors(texts.logsumexp, 3) if spec.return_lse else None)
    axes = Axes(factors, results, frozenset({"batch"}))
    return follow_explicit_axes(run, axes, *operands)


def forward(spec: PagedSpec, operands: Operands) -> tuple[Outputs, None]:
    """Online softmax over pages; `residuals` are the operands themselves."""
    if spec.batch * spec.tokens * spec.sequences * spec.pages_per_sequence == 0:
        return nothing(spec, (spec.batch,)), None
    return over_batches(functools.partial(_one_batch, spec), spec, operands), None


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
