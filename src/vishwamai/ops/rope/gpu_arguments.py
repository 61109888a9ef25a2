"""The arguments of the rotary embedding's Triton kernel that the query and the key have each, bundled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Heads of the query or of the key.

    Attributes:
      total: heads. share: those that one group of programs takes.
      batch, head, position: strides in elements; `out_...`: those of the result.
    """

    total: Any
    share: Any
    batch: Any
    head: Any
    position: Any
    out_batch: Any
    out_head: Any
    out_position: Any
