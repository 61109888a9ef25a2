"""The blocks of a blocked attention in plain JAX: which there are, how operands are cut to them, and what is computed
in each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vishwamai.core import dropout
from vishwamai.core.precision import lax_precision, rounded
from vishwamai.core.tiles import Tiles, size
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.attention import alibi
from vishwamai.ops.attention.masks import grouped, static_mask, within_reach
from vishwamai.ops.attention.spec import AttentionSpec, Operands


@dataclasses.dataclass(frozen=True)
class ChunkedConfig(Tiles):
    """Tiles of the blocked walk.

    Attributes:
      block_q: query rows of a block.
      block_kv: keys of a block.
      problems: (batch, kv head) pairs that one step computes together, about; the others wait their turn. None = all of
        them.
    """

    block_q: int = size("queries", block_size=lambda tiles, n: n)
    block_kv: int = size("keys", block_size=lambda tiles, n: n)
    problems: int | None = None


class At(NamedTuple):
    """Where a step stands: the first batch element and kv head of its problems, and its query and key block."""

    batch: jax.Array | int
    head: AnyArray
    i: jax.Array | int
    j: jax.Array | int
    patterns: jax.Array | None = (
        None  # of the static block mask, one for each query head of the group or one for all: int32 [G or 1]
    )


class ScoreBlocks:
    """One call cut into blocks.

    Heads are kept as [Hkv, G], G query heads to a kv head, so that keys and values are never repeated. Lengths are
    padded to whole blocks. Arrays are cut by the names of their axes: b and h (kv heads) to the problems of a step, q
    and k to a block; other axes, and those of extent 1, stay whole.
    """

    def __init__(self, spec: AttentionSpec, config: ChunkedConfig, operands: Operands):
        self.spec = spec
        block_q, block_kv = max(1, min(config.block_q, spec.q_len)), max(1, min(config.block_kv, spec.kv_len))
        self.q_blocks, self.kv_blocks = -(-spec.q_len // block_q), -(-spec.kv_len // block_kv)
        self.tiles = spec.tile_masks(block_q, block_kv, self.q_blocks, self.kv_blocks)
        self.by_head = self.tiles is not None and len(self.tiles.ids) > 1  # every kv head has a list of its own
        batch_step, head_step = (spec.batch, 1) if self.by_head else _problem_steps(spec, config.problems)
        self.sizes = {"b": batch_step, "h": head_step, "q": block_q, "k": block_kv}

        def heads(x: AnyArray) -> AnyArray:
            return None if x is None else grouped(x, spec.kv_heads)

        q_ids, kv_ids = operands.q_segment_ids, operands.kv_segment_ids
        self.query = self.pad("bhgqd", heads(operands.query))
        self.key = self.pad("bhkd", operands.key)
        self.value = self.pad("bhkd", operands.value)
        self.bias = self.pad("bhgqk", heads(operands.bias))
        self.mask = self.pad("bhgqk", heads(operands.mask))
        # Padding repeats the last id, so that it does not widen a block's range of ids.
        self.q_ids: AnyArray = None if q_ids is None else self.pad("bhgqk", q_ids[:, None, None, :, None], "edge")
        self.kv_ids: AnyArray = None if kv_ids is None else self.pad("bhgqk", kv_ids[:, None, None, None, :], "edge")
        rows = operands.q_positions
        self.positions: AnyArray = None if rows is None else self.pad("bhgqk", rows[:, None, None, :, None], "edge")
        self.seed: AnyArray = heads(operands.dropout_seed)  # [B, Hkv, G, 2]
        self.slopes: AnyArray = heads(operands.slopes)  # [B or 1, Hkv, G]

    def pad(self, axes: str, x: AnyArray, mode: str = "constant") -> AnyArray:
        """Pads the query and key axes to whole blocks, with zeros or with the `edge`; broadcast axes stay 1."""
        if x is None:
            return None
        widths = [
            (0, -extent % self.sizes[name] if name in "qk" and extent > 1 else 0)
            for name, extent in zip(axes, x.shape, strict=True)
        ]
        return jnp.pad(x, widths, mode=mode) if any(after for _, after in widths) else x

    def pairs(self, by_key: bool) -> np.ndarray:
        """The (query block, key block) pairs that causal mask and window leave, int32 `[pairs, 2]`; keys run fastest,
        or queries if `by_key`.
        """
        block_q, block_kv = self.sizes["q"], self.sizes["k"]
        parts = [np.zeros((0, 2), np.int32)]
        for i in range(self.q_blocks):
            start, stop = self.spec.key_range(i * block_q, min((i + 1) * block_q, self.spec.q_len) - 1)
            js = np.arange(start // block_kv, -(-stop // block_kv) if stop > start else 0, dtype=np.int32)
            parts.append(np.stack([np.full_like(js, i), js], axis=1))
        pairs = np.concatenate(parts)
        return pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))] if by_key else pairs

    def lists(self, by_key: bool) -> tuple[np.ndarray, np.ndarray]:
        """For every kv head, or one for all: its pairs, followed by the patterns of the block mask in each, and how
        many there are.

        Returns:
          int32 `[kv heads or 1, pairs, 2 + G or 1 or 0]`, padded to the longest, and int32 `[kv heads or 1]`. A pattern
          is an index to `patterns`.
        """
        pairs = self.pairs(by_key)
        if self.tiles is None:
            return pairs[None], np.array([len(pairs)], np.int32)
        ids = self.tiles.ids.reshape(-1, self.spec.group if self.by_head else 1, *self.tiles.ids.shape[1:])
        visits = []
        for group in ids:  # [G or 1, q_blocks, kv_blocks]
            patterns = group[:, pairs[:, 0], pairs[:, 1]].T
            visits.append(np.concatenate([pairs, patterns + 1], axis=1)[(patterns >= 0).any(1)])
        most = max(map(len, visits))
        counts = np.array([len(rows) for rows in visits], np.int32)
        return np.stack([np.pad(rows, ((0, most - len(rows)), (0, 0))) for rows in visits]).astype(np.int32), counts

    @functools.cached_property
    def patterns(self) -> np.ndarray | None:
        """What blocks of the static mask look like, bool `[count, block_q, block_kv]`, the empty one first; None where
        all of them are whole.
        """
        if self.tiles is None or not (self.tiles.partial or (self.by_head and self.spec.group > 1)):
            return None
        return np.concatenate([np.zeros_like(self.tiles.patterns[:1]), self.tiles.patterns])

    def each_problem(
        self, function: Callable[[PyTree, AnyArray, AnyArray], tuple[AnyArray, AnyArray]], carry: AnyArray
    ) -> tuple[AnyArray, AnyArray]:
        """`carry, results = scan` of `function(carry, batch, head)`; results `[b, h, ...]` come back joined as
        `[B, Hkv, ...]`.
        """
        spec = self.spec
        batch_steps, head_steps = spec.batch // self.sizes["b"], spec.kv_heads // self.sizes["h"]

        def body(carry: AnyArray, n: AnyArray) -> PyTree:
            return function(carry, n // head_steps * self.sizes["b"], n % head_steps * self.sizes["h"])

        if batch_steps * head_steps == 1:
            return body(carry, 0)
        carry, results = lax.scan(body, carry, jnp.arange(batch_steps * head_steps, dtype=jnp.int32))
        if self.by_head:  # [Hkv, B, 1, ...]
            return carry, jax.tree.map(lambda x: x[:, :, 0].swapaxes(0, 1), results)
        # Either a step holds all heads of its batch elements or one batch element, so joining is a reshape.
        return carry, jax.tree.map(lambda x: x.reshape(spec.batch, spec.kv_heads, *x.shape[3:]), results)

    def walk(
        self,
        compute: Callable[[PyTree, At], PyTree],
        carry: PyTree,
        axes: object,
        batch: AnyArray,
        head: AnyArray,
        by_key: bool = False,
    ) -> PyTree:
        """Folds `block = compute(block, at)` over the pairs, where `block` is `carry` cut by `axes` (upper-case axes
        are already cut).

        Where segment ids or positions hide all of the key block from the query block, `compute` is passed over.
        """

        lists, counts = self.lists(by_key)

        def body(carry: PyTree, pair: jax.Array) -> tuple[AnyArray, None]:
            position = At(batch, head, pair[0], pair[1], pair[2:])
            block = jax.tree.map(lambda x, names: self.cut(names, x, position), carry, axes)
            if self.spec.by_value:
                block = lax.cond(self._meet(position), lambda b: compute(b, position), lambda b: b, block)
            else:
                block = compute(block, position)
            return jax.tree.map(
                lambda x, b, names: lax.dynamic_update_slice(x, b, self._starts(names, x, position)), carry, block, axes
            ), None

        if not self.by_head:
            return lax.scan(body, carry, jnp.asarray(lists[0]))[0]
        visits, count = jnp.asarray(lists)[head], jnp.asarray(counts)[head]
        return lax.fori_loop(0, count, lambda n, carry: body(carry, visits[n])[0], carry)

    def _starts(self, axes: str, x: jax.Array, position: At) -> tuple[PyTree, ...]:
        start = {
            "b": position.batch,
            "h": position.head,
            "q": position.i * self.sizes["q"],
            "k": position.j * self.sizes["k"],
        }
        named = (start.get(name, 0) if extent > 1 else 0 for name, extent in zip(axes, x.shape, strict=True))
        return tuple(jnp.asarray(n, jnp.int32) for n in named)  # of one dtype, also under 64-bit integers

    def cut(self, axes: str, x: jax.Array, position: At) -> jax.Array:
        """The part of `x` that belongs to a step."""
        sizes = [self.sizes.get(name, n) if n > 1 else 1 for name, n in zip(axes, x.shape, strict=True)]
        return lax.dynamic_slice(x, self._starts(axes, x, position), sizes)

    def _meet(self, position: At) -> jax.Array:
        """Whether a query of the block may see a key of the block, by the ranges of segment ids and of positions."""
        axes = (1, 2, 3, 4)
        overlap = jnp.ones((1,), bool)
        if self.q_ids is not None:
            q, k = self.cut("bhgqk", self.q_ids, position), self.cut("bhgqk", self.kv_ids, position)
            overlap = (q.min(axes) <= k.max(axes)) & (k.min(axes) <= q.max(axes))
        if self.positions is not None:
            (low, high), rows = self.spec.reach, self.cut("bhgqk", self.positions, position)
            first = position.j * self.sizes["k"]
            if high is not None:
                overlap &= first - rows.max(axes) <= high
            if low is not None:
                overlap &= first + self.sizes["k"] - 1 - rows.min(axes) >= low
        return jnp.any(overlap)

    def product(self, formula: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """A product of operands in their own dtype, summed and returned in the accumulation dtype."""
        precision = lax_precision(self.spec.precision)
        return jnp.einsum(formula, x, y, precision=precision, preferred_element_type=self.spec.accumulator)

    def logits(self, q: jax.Array, k: jax.Array, position: At) -> jax.Array:
        """Capped logits, not yet masked, without what `after_cap` adds."""
        s = rounded(self.spec.scale * self.product("bhgqd,bhkd->bhgqk", q, k))
        if self.bias is not None and not self.spec.bias_after_softcap:
            s = s + self.cut("bhgqk", self.bias, position).astype(s.dtype)
        return s if self.spec.softcap is None else self.spec.softcap * jnp.tanh(s / self.spec.softcap)

    def after_cap(self, s: jax.Array, position: At) -> jax.Array:
        """Logits with what is added to capped ones: ALiBi, and the bias where the call says so."""
        if self.spec.bias_after_softcap:
            assert self.bias is not None
            s = s + self.cut("bhgqk", self.bias, position).astype(s.dtype)
        if self.slopes is None:
            return s
        rows, columns = self._positions(position)
        where = (rows + self.spec.causal_offset)[:, None]
        if self.positions is not None:
            where = self.cut("bhgqk", self.positions, position)
        return s + alibi.bias(self.spec, self.cut("bhg", self.slopes, position)[..., None, None], where, columns)

    def _positions(self, position: At) -> tuple[jax.Array, jax.Array]:
        block_q, block_kv = self.sizes["q"], self.sizes["k"]
        return position.i * block_q + jnp.arange(block_q), position.j * block_kv + jnp.arange(block_kv)

    def visible(self, position: At) -> jax.Array | None:
        """Every mask together, padding included; True = attend, None where nothing is masked."""
        rows, columns = self._positions(position)
        terms = [static_mask(self.spec, rows, columns)]
        if self.spec.q_len % self.sizes["q"]:
            terms.append((rows < self.spec.q_len)[:, None])
        if self.spec.kv_len % self.sizes["k"]:
            terms.append((columns < self.spec.kv_len)[None, :])
        if self.patterns is not None:
            terms.append(jnp.asarray(self.patterns)[position.patterns])  # [G or 1, block_q, block_kv]
        if self.mask is not None:
            terms.append(self.cut("bhgqk", self.mask, position))
        if self.q_ids is not None:
            terms.append(self.cut("bhgqk", self.q_ids, position) == self.cut("bhgqk", self.kv_ids, position))
        if self.positions is not None:
            terms.append(within_reach(self.spec, self.cut("bhgqk", self.positions, position), columns))
        terms = [term for term in terms if term is not None]
        return functools.reduce(jnp.logical_and, terms) if terms else None

    def dropped(self, p: jax.Array, position: At) -> jax.Array:
        """`p` with the dropped positions 0 and the kept ones scaled up."""
        if self.seed is None:
            return p
        rows, columns = self._positions(position)
        seed = self.cut("bhgs", self.seed, position)[..., None, None]  # [b, h, G, 2, 1, 1]
        keep = dropout.keep_mask(
            seed[..., 0, :, :], seed[..., 1, :, :], rows[:, None], columns[None, :], self.spec.dropout_rate
        )
        return jnp.where(keep, p / (1.0 - self.spec.dropout_rate), 0.0)


def _problem_steps(spec: AttentionSpec, problems: int | None) -> tuple[int, int]:
    """(batch elements, kv heads) of one step: the largest divisors whose product is `problems` at most; all heads, or
    one batch element.
    """

    def divisor(n: int, most: int) -> int:
        return max(d for d in range(1, max(1, min(n, most)) + 1) if n % d == 0)

    if problems is None:
        return spec.batch, spec.kv_heads
    heads = divisor(spec.kv_heads, problems)
    return (divisor(spec.batch, problems // heads) if heads == spec.kv_heads else 1), heads
