"""Random cases: what an operation's `draws.py` draws from.

A case is drawn through `choose(options) -> option`, which `random.Random(seed).choice` is, and hypothesis'
`draw(sampled_from(options))`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Choose = Callable[[Sequence[Any]], Any]

# fmt: off
EDGES = (
    1, 2, 3, 5, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 80, 100, 127, 128, 129, 192, 200, 255, 256, 257, 300,
    384, 511, 512, 520, 640, 1000, 1024,
)
# fmt: on
"""Sizes at and beside the edges of registers and tiles; `Sizes` cuts them off."""
FLOATS = ("float32", "bfloat16", "float16")


class Sizes:
    """What a draw may be: `choose`, and sizes of at most `largest`."""

    def __init__(self, choose: Choose, largest: int = 520):
        self.choose, self.largest = choose, largest

    def size(self, largest: int | None = None) -> int:
        return self.choose([n for n in EDGES if n <= min(largest or self.largest, self.largest)])

    def flag(self, one_in: int = 2) -> bool:
        return self.choose([False] * (one_in - 1) + [True])

    def dtype(self, *, float64: bool = False) -> str:
        return self.choose(("float32", "float32", "bfloat16", "bfloat16", "float16") + ("float64",) * float64)

    def rng(self) -> np.random.Generator:
        return np.random.default_rng(self.choose(range(1000)))

    def precision(self, dtype: str) -> dict[str, str]:
        """The option of a product's precision, now and then, where the dtype has one."""
        return {"precision": "high"} if dtype == "float32" and self.flag(4) else {}
