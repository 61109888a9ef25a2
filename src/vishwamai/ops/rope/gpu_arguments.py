"""The arguments of the rotary embedding's Triton kernel that the query and the key have each, bundled."""

from __future__ import annotations

from typing import NamedTuple


class Heads(NamedTuple):
    """Heads of the query or of the key.

    Attributes:
      total: heads. share: those that one group of programs takes.
      batch, head, position: strides in elements; `out_...`: those of the result.
    """

    total: int
    share: int
    batch: int
    head: int
    position: int
    out_batch: int
    out_head: int
    out_position: int
