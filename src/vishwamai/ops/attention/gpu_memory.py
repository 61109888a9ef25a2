"""How the arrays of an attention call lie in memory, and the bundles of arguments by which its Triton kernels read
them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from vishwamai.core import dropout, gpu
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.gpu_arguments import Cut, Extents, Logits, Rows, Starts, Terms
from vishwamai.ops.attention.gpu_tiles import tile_of
from vishwamai.ops.attention.places import MOST
from vishwamai.ops.attention.spec import AttentionSpec, Operands

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class Packed(NamedTuple):
    """Sequences of their own lengths, one behind the other. The spec is of a batch of them, each padded to the longest.

    Attributes:
      q_starts, kv_starts: int32 `[batch + 1]`, where each begins among the queries and the keys, and the last one's
        end.
      bottom_right: the causal mask and the window end at the last key of each sequence, as in `causal_align`.
    """

    q_starts: AnyArray
    kv_starts: AnyArray
    bottom_right: bool


class Placement(NamedTuple):
    """How a call's arrays lie in memory; JAX's always as here.

    Attributes:
      seq_first: results have the heads behind the positions, `[batch, seq, heads, dim]`.
      packed: queries, keys, values, the output and its cotangent are views `[1, heads, total, dim]` of packed
        sequences, results `[total, heads, dim]`, and statistics `[heads, total]`. There is no bias, mask or segment
        then.
    """

    seq_first: bool = False
    packed: Packed | None = None

    def result(self, like: AnyArray, dim: int, dtype: DTypeLike) -> gpu.Result:
        """A result with the positions and heads of `like`, `[batch, heads, seq, dim]`."""
        batch, heads, seq, _ = like.shape
        if self.packed is not None:
            return gpu.result((seq, heads, dim), dtype)
        return gpu.result((batch, seq, heads, dim) if self.seq_first else (batch, heads, seq, dim), dtype)

    @property
    def bottom_right(self) -> bool:
        return self.packed is not None and self.packed.bottom_right

    @property
    def heads_inside(self) -> bool:
        """Whether results have the heads behind the positions."""
        return self.seq_first or self.packed is not None

    @property
    def starts(self) -> Starts:
        return Starts(None, None) if self.packed is None else Starts(self.packed.q_starts, self.packed.kv_starts)

    def elements(self, spec: AttentionSpec) -> int:
        """Batch elements that programs are launched for; of packed sequences one more, for what lies behind the
        last.
        """
        return spec.batch + (self.packed is not None)


PLAIN = Placement()


def rows_of(x: AnyArray) -> Rows:
    """Where the rows of `[batch, heads, seq, dim]` lie: a torch tensor's own strides; JAX's arrays are contiguous."""
    if gpu.framework(x) != "torch":
        return Rows(x, *(math.prod(x.shape[axis + 1 :]) for axis in range(3)))
    assert x.stride(3) == 1 or x.shape[3] == 1, x.stride()
    # An axis of one element may have any stride; this one suits the copy engine.
    return Rows(x, *(16 if n == 1 else int(step) for step, n in zip(x.stride()[:3], x.shape[:3], strict=True)))


def cut(rows: Rows, count: int) -> Cut:
    """Tiles of `count` rows; the copy engine reads rows that begin at multiples of 16 bytes."""
    itemsize, dim = rows.ptr.dtype.itemsize, rows.ptr.shape[3]
    return Cut(dim, count, tile_of(dim), all(step * itemsize % 16 == 0 for step in rows[1:]))


def strides(operand: AnyArray, axes: int) -> tuple[int, ...]:
    """Elements between neighbours along the first `axes` axes of a contiguous array; 0 where it is shared (an axis of
    1), or absent.
    """
    if operand is None:
        return (0,) * axes
    steps, step = [], 1
    for extent in reversed(operand.shape):
        steps.append(0 if extent == 1 else step)
        step *= extent
    return tuple(reversed(steps))[:axes]


def band_of(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """(low, high) of `Extents`: about a row's number, or its own position."""
    if spec.operands.q_positions is None:
        return spec.band
    low, high = spec.reach  # positions are below 2^30, and sums of 32 bits
    return None if low is None else max(low, -MOST), None if high is None else min(high, MOST - 1)


def terms_of(spec: AttentionSpec, operands: Operands) -> Terms:
    """What changes the logits beside the band."""
    o = spec.operands
    return Terms(
        operands.bias, operands.mask, operands.q_segment_ids, operands.kv_segment_ids, operands.slopes,
        operands.q_positions, *strides(o.bias, 4), *strides(o.mask, 4), *strides(o.q_segment_ids, 1),
        *strides(o.kv_segment_ids, 1), *strides(o.slopes, 1), *strides(o.q_positions, 1),
    )  # fmt: skip


def sizes_of(spec: AttentionSpec, operands: Operands, memory: Placement) -> Extents:
    """The sizes of the problem, and of its arrays."""
    low, high = band_of(spec)
    placed = spec.operands.slopes is not None or memory.packed is not None
    offset = spec.causal_offset if spec.operands.q_positions is None else 0
    return Extents(
        spec.batch, spec.q_heads, spec.kv_heads, spec.q_len, spec.kv_len,
        operands.query.shape[2], operands.key.shape[2], low or 0, high or 0,
        offset if placed else None,
    )  # fmt: skip


def logits_of(spec: AttentionSpec) -> Logits:
    """How logits and probabilities are computed."""
    low, high = band_of(spec)
    return Logits(
        SCALE=spec.scale,
        SOFTCAP=spec.softcap,
        LOW=low is not None,
        HIGH=high is not None,
        KEEP_FROM=dropout.threshold(spec.dropout_rate),
        RESCALE=1.0 / (1.0 - spec.dropout_rate),
        PRECISION="tf32x3" if spec.operands.query.dtype.itemsize == 4 else None,
        BIAS_AFTER=spec.bias_after_softcap,
    )
