"""What an attention call computes: operands, options, the static mask's geometry and the factor rule. The checks stand
in `checks.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, NamedTuple

import numpy as np

from vishwamai.core import dims
from vishwamai.core.signature import Signature
from vishwamai.core.spec import QueryKeySpec
from vishwamai.core.types import AnyArray
from vishwamai.ops.attention.block_mask import BlockMask, TileMasks, tile_masks, visible_pairs


class Operands(NamedTuple):
    """Operands in the op's own layout; `batch` counts folded vmap axes. Query head h reads kv head h // (Hq // Hkv)."""

    query: Annotated[AnyArray, "batch heads q_len qk_dim"]
    key: Annotated[AnyArray, "batch heads/ kv_len qk_dim"]
    value: Annotated[AnyArray, "batch heads/ kv_len v_dim"]
    bias: Annotated[AnyArray, "batch? heads? q_len? kv_len?", "optional"] = None  # floating
    mask: Annotated[AnyArray, "batch? heads? q_len? kv_len?", "optional"] = None  # bool, True = attend
    q_segment_ids: Annotated[AnyArray, "batch? q_len", "optional"] = None  # int32
    kv_segment_ids: Annotated[AnyArray, "batch? kv_len", "optional"] = None  # int32
    sinks: Annotated[AnyArray, "batch? heads", "optional"] = None  # floating
    dropout_seed: Annotated[AnyArray, "batch heads _", "optional"] = None  # uint32, two numbers
    q_positions: Annotated[AnyArray, "batch? q_len", "optional"] = None  # int32: the key that each query row stands at
    slopes: Annotated[AnyArray, "batch? heads", "optional"] = None  # floating: ALiBi's


class Outputs(NamedTuple):
    """`out` in the query's dtype; `logsumexp` in the accumulation dtype, natural logarithm, None unless the call asks
    for it.
    """

    out: Annotated[AnyArray, "batch heads q_len v_dim"]
    logsumexp: Annotated[AnyArray, "batch heads q_len", "optional"] = None


@dataclasses.dataclass(frozen=True)
class AttentionSpec(QueryKeySpec):
    """Attention of `Operands` under static options.

    Attributes:
      causal: query i sees key j only if j <= i + causal_offset.
      causal_offset: start of the diagonal of the causal mask and of the window: 0 ("top_left"), Tk - Tq
        ("bottom_right") or the caller's `q_offset`. Where the operand `q_positions` is given, row i stands at key
        q_positions[i] instead of i + causal_offset.
      window: (left, right), None = unbounded: i + causal_offset - left <= j <= i + causal_offset + right; None for no
        window at all.
      softcap: logits become softcap * tanh(logits / softcap); None for no cap.
      bias_after_softcap: the bias is added to the capped logits; False where there is no bias or no cap.
      scale: multiplies q.k.
      dropout_rate: share of the probabilities that are dropped, in [0, 1).
      return_lse: the caller wants `Outputs.logsumexp`. The residual of the backward pass is the logsumexp either way.
      precision: mode of float32 products, "default", "high" or "highest"; see `core.precision`.
      blocks: which blocks of the score matrix exist, beside the causal mask and the window; None for all.
    """

    causal: bool = False
    causal_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    bias_after_softcap: bool = False
    scale: float = 1.0
    dropout_rate: float = 0.0
    return_lse: bool = False
    precision: str = "default"
    blocks: BlockMask | None = None

    @property
    def v_dim(self) -> int:
        return self.operands.value.shape[3]

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """(low, high): causal mask and window show a query that stands at key p the keys p + low ... p + high; None =
        unbounded on that side.
        """
        left, right = self.window or (None, None)
        return None if left is None else -left, 0 if self.causal else right

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(low, high): the static mask shows key j to query i iff i + low <= j <= i + high; None = unbounded on that
        side. Where rows have positions of their own, nothing of it is static.
        """
        if self.operands.q_positions is not None:
            return None, None
        low, high = (None if end is None else self.causal_offset + end for end in self.reach)
        return low, high

    @property
    def by_value(self) -> bool:
        """Whether the values of operands (segment ids, positions) say which blocks of keys a block of queries sees."""
        return self.operands.q_segment_ids is not None or self.operands.q_positions is not None

    def key_range(self, first_row: int, last_row: int) -> tuple[int, int]:
        """Keys [start, stop) that the static mask shows to any of the query rows first_row ... last_row, inclusive;
        empty if stop <= start.
        """
        low, high = self.band
        start = 0 if low is None else max(0, first_row + low)
        stop = self.kv_len if high is None else min(self.kv_len, last_row + high + 1)
        return start, max(start, stop)

    def tile_masks(self, block_q: int, block_kv: int, q_tiles: int, kv_tiles: int) -> TileMasks | None:
        """`blocks` as tiles of that size see it; None without one."""
        return None if self.blocks is None else tile_masks(self.blocks, block_q, block_kv, q_tiles, kv_tiles)

    @property
    def live_pairs(self) -> int:
        """(query, key) pairs that the static mask (causal, window, blocks) leaves, for one head; their mean, rounded
        up, where heads differ.
        """
        low, high = self.band
        if self.blocks is not None:
            return -(-visible_pairs(self.blocks, self.q_len, self.kv_len, low, high) // self.blocks.heads)
        rows = np.arange(self.q_len, dtype=np.int64)
        start = np.zeros_like(rows) if low is None else np.maximum(0, rows + low)
        stop = np.full_like(rows, self.kv_len) if high is None else np.minimum(self.kv_len, rows + high + 1)
        return int(np.maximum(0, stop - start).sum())

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward pass's two products over the pairs that the static mask leaves."""
        return 2 * self.batch * self.q_heads * self.live_pairs * (self.qk_dim + self.v_dim)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward pass's five products: scores again, dV, dP, dQ and dK."""
        return 2 * self.batch * self.q_heads * self.live_pairs * (3 * self.qk_dim + 2 * self.v_dim)

    @property
    def bytes_moved(self) -> int:
        """Bytes that the forward pass must move at the least: every operand once, and the output."""
        out = self.batch * self.q_heads * self.q_len * self.v_dim * self.operands.query.dtype.itemsize
        lse = self.batch * self.q_heads * self.q_len * self.accumulator.itemsize if self.return_lse else 0
        return sum(operand.nbytes for operand in self.operands if operand is not None) + out + lse

    def tuning_key(self) -> str:
        """What a tuned config may depend on, in words."""
        o = self.operands
        parts = [
            o.query.dtype.name,
            f"b{self.batch}",
            f"h{self.q_heads}/{self.kv_heads}",
            f"t{self.q_len}x{self.kv_len}",
            f"d{self.qk_dim}/{self.v_dim}",
        ]
        low, high = self.band
        if (low, high) != (None, None):
            parts.append(f"band{low}:{high}")
        if o.q_positions is not None:
            parts.append("positions{}:{}".format(*self.reach))
        if self.blocks is not None:
            parts.append("blocks{}x{}-{}".format(*self.blocks.block_size, self.blocks.digest[:12]))
        if self.softcap is not None:
            parts.append("softcap" + " bias after it" * self.bias_after_softcap)
        if self.dropout_rate:
            parts.append("dropout")
        for name in ("bias", "mask"):
            operand = getattr(o, name)
            if operand is not None:
                letters = zip("bhqk", operand.shape, strict=True)
                parts.append(f"{name}-" + "".join(letter if extent > 1 else "1" for letter, extent in letters))
        named = (("segments", o.q_segment_ids), ("sinks", o.sinks), ("slopes", o.slopes))
        parts += [name for name, x in named if x is not None]
        return " ".join(parts)

    def gpu_tuning_key(self) -> str:
        """As `tuning_key`, but alike for what one config of the Triton kernels serves: any batch and heads, lengths up
        to a power of two, all from 2048 on.
        """
        o = self.operands
        low, high = self.band
        seen = "full" if (low, high) == (None, None) else "causal" if low is None else "window"
        lengths = (min(2048, 1 << max(0, n - 1).bit_length()) for n in (self.q_len, self.kv_len))
        extras = [name for name in ("bias", "mask") if getattr(o, name) is not None]
        extras += [
            name
            for name, x in (
                ("segments", o.q_segment_ids),
                ("sinks", o.sinks),
                ("slopes", o.slopes),
                ("softcap", self.softcap),
            )
            if x is not None
        ]
        extras += ["bias after softcap"] if self.bias_after_softcap else []
        extras += ["dropout"] if self.dropout_rate else []
        extras += ["blocks"] if self.blocks is not None else []
        return " ".join([o.query.dtype.name, f"d{self.qk_dim}/{self.v_dim}", seen, "t{}x{}".format(*lengths), *extras])


def split(spec: AttentionSpec, backward: bool) -> str:
    """Batch and heads may be split, query and kv heads together; but not heads that have a block mask each, which is a
    constant of the program.
    """
    del backward
    return "batch" if spec.blocks is not None and spec.blocks.heads > 1 else "batch heads"


SIGNATURE = Signature(
    dims.declared(Operands)._replace(sinks="heads"),
    lambda spec: Outputs("batch heads q_len v_dim", "batch heads q_len" if spec.return_lse else None),
    labels={"q_segment_ids": "q_ids", "kv_segment_ids": "kv_ids", "q_positions": "q_offset", "slopes": "alibi_slopes"},
    hints={"q_segment_ids": "in the pair `segment_ids`", "kv_segment_ids": "in the pair `segment_ids`"},
)
BSHD = Signature(
    SIGNATURE.operands._replace(
        query="batch q_len heads qk_dim", key="batch kv_len heads/ qk_dim", value="batch kv_len heads/ v_dim"
    ),
    lambda spec: SIGNATURE.outputs(spec)._replace(out="batch q_len heads v_dim"),
    labels=SIGNATURE.labels,
    hints=SIGNATURE.hints,
)
"""Of `layout="bshd"`."""
