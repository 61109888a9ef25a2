"""What paged attention computes: operands, options, and the facts about them that every implementation shares."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp

from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.sharding import Axes, name_axes
from vishwamai.core.spec import OpSpec

Form = Literal["combined", "separate", "latent"]


class Operands(NamedTuple):
    """Operands in the op's own layout; the leading axis counts folded vmap axes (or is 1 where it is shared)."""

    query: Any  # [B, T, Hq, D]
    k_pages: Any  # [B or 1, P, page, rows, D]; rows are k0 v0 k1 v1 ... (combined) or k0 k1 ... (separate); latent: [B or 1, P, page, D]
    v_pages: Any  # [B or 1, P, page, Hkv, Dv], or None unless the form is "separate"
    kv_lens: Any  # [B or 1, S] int32
    page_indices: Any  # [B or 1, S, N] int32
    cu_q_lens: Any  # [B or 1, S + 1] int32
    num_seqs: Any  # [B or 1, 1] int32
    sinks: Any  # [B or 1, Hq] or None
    k_scale: Any  # [B or 1, Hkv] float32 or None
    v_scale: Any  # [B or 1, Hkv] float32 or None


SHARED = tuple(name for name in Operands._fields if name != "query")


class Outputs(NamedTuple):
    """`out` has the query's dtype; rows of tokens that belong to no sequence are 0."""

    out: Any  # [B, T, Hq, Dv]


@dataclasses.dataclass(frozen=True)
class PagedSpec(OpSpec):
    """Causal attention of ragged runs of queries over paged keys and values.

    Attributes:
      form: how a page holds keys and values; see `Operands`.
      scale: factor of the products.
      window: keys before the query's own position that it sees, or None for all.
      softcap: logits are softcap * tanh(logits / softcap), or None.
      latent_dim: leading columns of a latent page that are the value, or None.
      max_q_len: no sequence has more queries than this.
    """

    form: Form = "combined"
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    latent_dim: int | None = None
    max_q_len: int = 1

    @property
    def batch(self) -> int:
        return self.operands.query.shape[0]

    @property
    def tokens(self) -> int:
        return self.operands.query.shape[1]

    @property
    def heads(self) -> int:
        return self.operands.query.shape[2]

    @property
    def head_dim(self) -> int:
        return self.operands.query.shape[3]

    @property
    def kv_heads(self) -> int:
        if self.form == "latent":
            return 1
        rows = self.operands.k_pages.shape[3]
        return rows // 2 if self.form == "combined" else rows

    @property
    def value_dim(self) -> int:
        if self.form == "latent":
            return self.latent_dim or self.head_dim
        return self.operands.v_pages.shape[-1] if self.form == "separate" else self.head_dim

    @property
    def group(self) -> int:
        """Query heads that share a kv head."""
        return self.heads // self.kv_heads

    @property
    def page_size(self) -> int:
        return self.operands.k_pages.shape[2]

    @property
    def sequences(self) -> int:
        """Rows of the page table."""
        return self.operands.page_indices.shape[1]

    @property
    def pages_per_sequence(self) -> int:
        return self.operands.page_indices.shape[2]

    @property
    def compute_dtype(self) -> jnp.dtype:
        """What keys and values are widened to for the products: the query's dtype."""
        return self.operands.query.dtype

    @property
    def accumulator(self) -> jnp.dtype:
        """float32, or float64 for float64 queries."""
        return accumulator_dtype(self.operands.query.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values over all heads."""
        o = self.operands
        pages = [p for p in (o.k_pages, o.v_pages) if p is not None]
        return sum(p.nbytes // (p.shape[0] * p.shape[1] * p.shape[2]) for p in pages)

    @property
    def visible_tokens(self) -> int:
        """The most keys that a sequence can see: what its row of the page table can name, or the window leaves."""
        most = self.pages_per_sequence * self.page_size
        return most if self.window is None else min(most, self.window + self.max_q_len)

    def tuning_key(self) -> str:
        o = self.operands
        options = "".join(f" {n}" for n, v in (("window", self.window), ("softcap", self.softcap)) if v is not None)
        return (
            f"{self.form} {o.query.dtype.name} {o.k_pages.dtype.name} q{self.tokens}x{self.heads}x{self.head_dim} kv{self.kv_heads}x{self.value_dim} "
            f"pages {self.sequences}x{self.pages_per_sequence}x{self.page_size} run {self.max_q_len}{options}"
        )

    def gpu_tuning_key(self) -> str:
        """As `tuning_key`, but alike for batches of about the same size: lengths and counts are rounded up to a power of two."""
        o = self.operands
        options = "".join(f" {n}" for n, v in (("window", self.window), ("softcap", self.softcap)) if v is not None)
        tokens, sequences, keys, run = (
            1 << max(0, n - 1).bit_length() for n in (self.tokens, self.sequences, self.visible_tokens, self.max_q_len)
        )
        return (
            f"{self.form} {o.query.dtype.name} {o.k_pages.dtype.name} h{self.heads}/{self.kv_heads} d{self.head_dim}/{self.value_dim} "
            f"page {min(self.page_size, 64)} t{self.batch * tokens} s{sequences}x{keys} run {run}{options}"
        )

    @property
    def flops(self) -> int:
        """Of full sequences: every one as long as its row of the page table, and as many tokens of each as there are on average."""
        return 2 * self.batch * self.tokens * self.heads * self.visible_tokens * (self.head_dim + self.value_dim)

    @property
    def bytes_moved(self) -> int:
        """Of full sequences: each page that can be seen is read once, queries are read and outputs written."""
        o = self.operands
        results = o.query.nbytes // self.head_dim * self.value_dim
        return self.batch * self.sequences * self.visible_tokens * self.row_bytes + o.query.nbytes + results


def paged_axes(spec: PagedSpec, arguments: tuple[Any, ...], results: Any) -> Axes:
    """Only folded batches may be split: tokens and pages belong to sequences that run across any cut; heads are split by the public function's rule."""
    five = ("b", None, None, None, None)
    pages = five if spec.form != "latent" else five[:4]
    operands = Operands(
        ("b", None, None, None),
        pages,
        five,
        ("b", None),
        ("b", None, None),
        ("b", None),
        ("b", None),
        ("b", None),
        ("b", None),
        ("b", None),
    )
    return name_axes(arguments, results, (operands, Outputs(("b", None, None, None))), "b")
