"""What paged attention computes: operands, options, and the facts about them that every implementation shares."""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp

from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.qtensor import bits
from vishwamai.core.signature import Signature
from vishwamai.core.spec import OpSpec
from vishwamai.core.types import AnyArray

Form = Literal["combined", "separate", "latent"]


class Operands(NamedTuple):
    """Operands in the op's own layout; the leading axis counts folded vmap axes (or is 1 where it is shared)."""

    # Only folded batches are split here: tokens and pages belong to sequences that run across any cut. Heads are split
    # by the caller's `SIGNATURE`.
    query: Annotated[AnyArray, "batch tokens _ _"]  # [..., heads, head_dim]
    # Rows are k0 v0 k1 v1 ... (combined) or k0 k1 ... (separate); latent pages have no such axis.
    k_pages: Annotated[AnyArray, "batch? pages page_size _ _"]
    v_pages: Annotated[AnyArray, "batch? pages page_size _ _", "optional"]  # None unless the form is "separate"
    kv_lens: Annotated[AnyArray, "batch? sequences"]  # int32
    page_indices: Annotated[AnyArray, "batch? sequences _"]  # int32
    cu_q_lens: Annotated[AnyArray, "batch? _"]  # int32, sequences + 1
    num_seqs: Annotated[AnyArray, "batch? _", "optional"]  # int32, one
    sinks: Annotated[AnyArray, "batch? _", "optional"]
    # float32, of heads; or of every token of the pages, with the dims that `PagedSpec.dims` states.
    k_scale: Annotated[AnyArray, "batch? _", "optional"]
    v_scale: Annotated[AnyArray, "batch? _", "optional"]
    slopes: Annotated[AnyArray, "batch? _", "optional"] = None  # floating: ALiBi's
    tree_mask: Annotated[AnyArray, "batch? tokens _", "optional"] = None  # bool


class Outputs(NamedTuple):
    """`out` has the query's dtype; rows of tokens that belong to no sequence are 0. `logsumexp`, natural, has the
    accumulator's; it is -inf there, and None unless the call asks for it.
    """

    out: Annotated[AnyArray, "batch tokens _ _"]
    logsumexp: Annotated[AnyArray, "batch tokens _", "optional"] = None


POOLS: dict[Form, tuple[str, str]] = {
    "combined": ("pages page_size 2*heads/ head_dim", ""),
    "separate": ("pages page_size heads/ head_dim", "pages page_size heads/ value_dim"),
    "latent": ("pages page_size _", ""),
}
"""The dims of the caller's pages by form. Query and kv heads share a word: whole groups go to a device. Rows k0 v0 k1
v1 divide as the heads do where every device gets pairs; latent pages have no heads.
"""
TOKEN_SCALES = "pages page_size heads/ 1"
"""The dims of scales of every token and kv head of the pages: pools of one column."""
TABLES = ("sequences", "sequences entries", "sequences+1", "1")
"""Of kv_lens, page_indices, cu_q_lens and num_seqs."""
_TREE = "tokens columns"
HINTS = {
    "query": "the sequences' tokens one after another",
    "cu_q_lens": "where each sequence's queries start, and the end",
    "num_seqs": "or an int",
    "tree_mask": "a row for each query, a column for each new token of its sequence",
}
PAIRS = "keys and values in turn (k0 v0 k1 v1 ...)"


@functools.cache
def signature_of(form: Form, return_lse: bool = False, token_scales: bool = False) -> Signature:
    """The caller's layout."""
    scale = "_" if form == "latent" else "heads/"
    if token_scales:
        scale = TOKEN_SCALES.replace("heads/", scale)
    operands = Operands("tokens heads head_dim", *POOLS[form], *TABLES, "heads", scale, scale, "heads", _TREE)
    labels = {"slopes": "alibi_slopes"} | ({} if form == "separate" else {"k_pages": "kv_pages"})
    hints = HINTS | {"k_pages": PAIRS} if form == "combined" else HINTS
    outputs = Outputs("tokens heads value_dim", "tokens heads" if return_lse else None)
    return Signature(operands, outputs, labels=labels, hints=hints)


def signature(latent: bool, return_lse: bool = False, token_scales: bool = False) -> Signature:
    """Of latent pages, or of pages with heads, for whom it does not matter how their rows lie."""
    return signature_of("latent" if latent else "separate", return_lse, token_scales)


def has_token_scales(operands: Operands) -> bool:
    """Whether a scale, in the caller's layout or the op's, is that of every token of the pages."""
    return any(x is not None and len(x.shape) > 2 for x in (operands.k_scale, operands.v_scale))


TOKENS_DECLINED = "every token of the pages has a scale, and the kernel reads one for each kv head."


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
      return_lse: the caller wants `Outputs.logsumexp`.
    """

    form: Form = "combined"
    scale: float = 1.0
    window: int | None = None
    softcap: float | None = None
    latent_dim: int | None = None
    max_q_len: int = 1
    return_lse: bool = False

    def dims(self, kind: object) -> Any:
        """Of latent pages too, which have one row for each token, and of the scales of tokens."""
        declared = super().dims(kind)
        if kind is Operands and self.form == "latent":
            declared = declared._replace(k_pages="batch? pages page_size _")
        if kind is Operands and self.token_scales:
            declared = declared._replace(**dict.fromkeys(("k_scale", "v_scale"), "batch? pages page_size _ _"))
        return declared

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
    def token_scales(self) -> bool:
        """Whether every token of the pages has scales of its own."""
        return has_token_scales(self.operands)

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
        return sum(p.size // (p.shape[0] * p.shape[1] * p.shape[2]) * bits(p.dtype) for p in pages) // 8

    @property
    def visible_tokens(self) -> int:
        """The most keys that a sequence can see: what its row of the page table can name, or the window leaves."""
        most = self.pages_per_sequence * self.page_size
        return most if self.window is None else min(most, self.window + self.max_q_len)

    def tuning_key(self) -> str:
        o = self.operands
        options = "".join(f" {n}" for n, v in (("window", self.window), ("softcap", self.softcap)) if v is not None)
        options += " lse" if self.return_lse else ""
        options += " token_scales" if self.token_scales else ""
        options += " slopes" if o.slopes is not None else ""
        options += " tree" if o.tree_mask is not None else ""
        return (
            f"{self.form} {o.query.dtype.name} {o.k_pages.dtype.name} q{self.tokens}x{self.heads}x{self.head_dim} "
            f"kv{self.kv_heads}x{self.value_dim} pages {self.sequences}x{self.pages_per_sequence}x{self.page_size} run "
            f"{self.max_q_len}{options}"
        )

    def gpu_tuning_key(self) -> str:
        """As `tuning_key`, but alike for batches of about the same size: lengths and counts are rounded up to a power
        of two.
        """
        o = self.operands
        options = "".join(f" {n}" for n, v in (("window", self.window), ("softcap", self.softcap)) if v is not None)
        options += " slopes" if o.slopes is not None else ""
        options += " tree" if o.tree_mask is not None else ""
        tokens, sequences, keys, run = (
            1 << max(0, n - 1).bit_length() for n in (self.tokens, self.sequences, self.visible_tokens, self.max_q_len)
        )
        return (
            f"{self.form} {o.query.dtype.name} {o.k_pages.dtype.name} h{self.heads}/{self.kv_heads} "
            f"d{self.head_dim}/{self.value_dim} page {min(self.page_size, 64)} t{self.batch * tokens} "
            f"s{sequences}x{keys} run {run}{options}"
        )

    @property
    def flops(self) -> int:
        """Of full sequences: every one as long as its row of the page table, and as many tokens of each as there are on
        average.
        """
        return 2 * self.batch * self.tokens * self.heads * self.visible_tokens * (self.head_dim + self.value_dim)

    @property
    def bytes_moved(self) -> int:
        """Of full sequences: each page that can be seen is read once, queries are read and outputs written."""
        o = self.operands
        results = o.query.nbytes // self.head_dim * self.value_dim
        return self.batch * self.sequences * self.visible_tokens * self.row_bytes + o.query.nbytes + results
