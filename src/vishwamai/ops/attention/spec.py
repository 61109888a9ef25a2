"""What an attention call computes: operands, options, the static mask's geometry and the factor rule. The checks stand in `checks.py`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import OpSpec
from vishwamai.ops.attention.block_mask import BlockMask, TileMasks, tile_masks, visible_pairs


class Operands(NamedTuple):
    """Operands in the op's own layout; B counts the batch with folded vmap axes. Query head h reads kv head h // (Hq // Hkv)."""

    query: Any  # [B, Hq, Tq, D]
    key: Any  # [B, Hkv, Tk, D]
    value: Any  # [B, Hkv, Tk, Dv]
    bias: Any = None  # [B|1, Hq|1, Tq|1, Tk|1] floating, or None
    mask: Any = None  # [B|1, Hq|1, Tq|1, Tk|1] bool, True = attend, or None
    q_segment_ids: Any = None  # [B|1, Tq] int32, or None
    kv_segment_ids: Any = None  # [B|1, Tk] int32, or None
    sinks: Any = None  # [B|1, Hq] floating, or None
    dropout_seed: Any = None  # [B, Hq, 2] uint32, or None


class Outputs(NamedTuple):
    """`out` in the query's dtype; `logsumexp` in the accumulation dtype, natural logarithm, None unless the call asks for it."""

    out: Any  # [B, Hq, Tq, Dv]
    logsumexp: Any = None  # [B, Hq, Tq] or None


SHAREABLE = ("bias", "mask", "q_segment_ids", "kv_segment_ids", "sinks")
"""Operands whose leading axis may be 1 while the batch is larger."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec(OpSpec):
    """Attention of `Operands` under static options.

    Attributes:
      causal: query i sees key j only if j <= i + causal_offset.
      causal_offset: 0 ("top_left") or Tk - Tq ("bottom_right"): where the diagonal of the causal mask and of the window starts.
      window: (left, right), None = unbounded: i + causal_offset - left <= j <= i + causal_offset + right; None for no window at all.
      softcap: logits become softcap * tanh(logits / softcap); None for no cap.
      scale: multiplies q.k.
      dropout_rate: share of the probabilities that are dropped, in [0, 1).
      return_lse: the caller wants `Outputs.logsumexp`. The residual of the backward pass is the logsumexp either way.
      precision: of float32 products, "default", "high" or "highest"; see `core.precision`.
      blocks: which blocks of the score matrix exist, beside the causal mask and the window; None for all.
    """

    causal: bool = False
    causal_offset: int = 0
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    scale: float = 1.0
    dropout_rate: float = 0.0
    return_lse: bool = False
    precision: str = "default"
    blocks: BlockMask | None = None

    @property
    def batch(self) -> int:
        return self.operands.query.shape[0]

    @property
    def q_heads(self) -> int:
        return self.operands.query.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.operands.key.shape[1]

    @property
    def group(self) -> int:
        """Query heads that share one kv head."""
        return self.q_heads // self.kv_heads

    @property
    def q_len(self) -> int:
        return self.operands.query.shape[2]

    @property
    def kv_len(self) -> int:
        return self.operands.key.shape[2]

    @property
    def qk_dim(self) -> int:
        return self.operands.query.shape[3]

    @property
    def v_dim(self) -> int:
        return self.operands.value.shape[3]

    @property
    def accumulator(self) -> jnp.dtype:
        """dtype of logits, statistics and sums: float32, or float64 for float64 operands."""
        return accumulator_dtype(self.operands.query.dtype)

    @property
    def band(self) -> tuple[int | None, int | None]:
        """(low, high): the static mask shows key j to query i iff i + low <= j <= i + high; None = unbounded on that side."""
        left, right = self.window or (None, None)
        if self.causal:
            right = 0
        low = None if left is None else self.causal_offset - left
        return low, None if right is None else self.causal_offset + right

    def key_range(self, first_row: int, last_row: int) -> tuple[int, int]:
        """Keys [start, stop) that the static mask shows to any of the query rows first_row ... last_row, inclusive; empty if stop <= start."""
        low, high = self.band
        start = 0 if low is None else max(0, first_row + low)
        stop = self.kv_len if high is None else min(self.kv_len, last_row + high + 1)
        return start, max(start, stop)

    def query_range(self, first_column: int, last_column: int) -> tuple[int, int]:
        """Query rows [start, stop) that the static mask lets see any of the keys first_column ... last_column, inclusive."""
        low, high = self.band
        start = 0 if high is None else max(0, first_column - high)
        stop = self.q_len if low is None else min(self.q_len, last_column - low + 1)
        return start, max(start, stop)

    def tile_masks(self, block_q: int, block_kv: int, q_tiles: int, kv_tiles: int) -> TileMasks | None:
        """`blocks` as tiles of that size see it; None without one."""
        return None if self.blocks is None else tile_masks(self.blocks, block_q, block_kv, q_tiles, kv_tiles)

    @property
    def live_pairs(self) -> int:
        """(query, key) pairs that the static mask (causal, window, blocks) leaves, for one head; their mean, rounded up, where heads differ."""
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
        if self.blocks is not None:
            parts.append("blocks{}x{}-{}".format(*self.blocks.block_size, self.blocks.digest[:12]))
        if self.softcap is not None:
            parts.append("softcap")
        if self.dropout_rate:
            parts.append("dropout")
        for name in ("bias", "mask"):
            operand = getattr(o, name)
            if operand is not None:
                letters = zip("bhqk", operand.shape, strict=True)
                parts.append(f"{name}-" + "".join(letter if extent > 1 else "1" for letter, extent in letters))
        parts += [name for name, x in (("segments", o.q_segment_ids), ("sinks", o.sinks)) if x is not None]
        return " ".join(parts)

    def gpu_tuning_key(self) -> str:
        """As `tuning_key`, but alike for what one config of the Triton kernels serves: any batch and heads, lengths up to a power of two, all from 2048 on."""
        o = self.operands
        low, high = self.band
        seen = "full" if (low, high) == (None, None) else "causal" if low is None else "window"
        lengths = (min(2048, 1 << max(0, n - 1).bit_length()) for n in (self.q_len, self.kv_len))
        extras = [name for name in ("bias", "mask") if getattr(o, name) is not None]
        extras += [
            name
            for name, x in (("segments", o.q_segment_ids), ("sinks", o.sinks), ("softcap", self.softcap))
            if x is not None
        ]
        extras += ["dropout"] if self.dropout_rate else []
        extras += ["blocks"] if self.blocks is not None else []
        return " ".join([o.query.dtype.name, f"d{self.qk_dim}/{self.v_dim}", seen, "t{}x{}".format(*lengths), *extras])


_DIMS = Operands(
    query=("b", "h", "q", "d"),
    key=("b", "h", "k", "d"),
    value=("b", "h", "k", "v"),
    bias=("b", "h", "q", "k"),
    mask=("b", "h", "q", "k"),
    q_segment_ids=("b", "q"),
    kv_segment_ids=("b", "k"),
    sinks=("b", "h"),
    dropout_seed=("b", "h", None),
)
_LSE = ("b", "h", "q")


def attention_axes(spec: AttentionSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Batch and heads may be split, query and kv heads together; sequences and head dimensions stay whole."""
    return name_axes(arguments, results, (_DIMS, Outputs(("b", "h", "q", "v"), _LSE)), splittable(spec), other=_LSE)


def splittable(spec: AttentionSpec) -> str:
    """The factors that may be split: not the heads where each has a block mask of its own, which is a constant of the program."""
    return "b" if spec.blocks is not None and spec.blocks.heads > 1 else "bh"


def caller_dims(layout: str) -> Operands:
    """Factors of the caller's own arrays in `layout`."""
    if layout == "bhsd":
        return _DIMS
    return _DIMS._replace(query=("b", "q", "h", "d"), key=("b", "k", "h", "d"), value=("b", "k", "h", "v"))
