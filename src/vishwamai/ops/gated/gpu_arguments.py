"""The strides of the gated unit's Triton kernel, bundled."""

from __future__ import annotations

from typing import NamedTuple


class Strides(NamedTuple):
    """Elements from one group to the next, of the weights and of the products that are kept, and from the first of two
    that share an array to the second.
    """

    weight: int
    weight_gap: int
    keep: int
    keep_gap: int
