"""Which layers are stacked: runs of layers that repeat, so that one traced period serves all of them.

A scan over stacked layers keeps compile time independent of depth on TPU and GPU. On the CPU it would copy each layer's
weights out of the stack before a native call, so layers are unrolled there.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax

if TYPE_CHECKING:
    from vishwamai.models.config import ModelConfig
    from vishwamai.models.layers.layer import LayerKind


@dataclasses.dataclass(frozen=True)
class Segment:
    """`repeats` times the layers of `kinds`, from layer `first` on; stacked where it repeats."""

    kinds: tuple[LayerKind, ...]
    repeats: int
    first: int

    def layers(self, place: int) -> tuple[int, ...]:
        """Numbers of the layers at one place of the period."""
        return tuple(self.first + place + len(self.kinds) * i for i in range(self.repeats))


def stacks_layers(stacked: bool | None) -> bool:
    """The flag itself, or the default of the platform that JAX computes on."""
    return jax.default_backend() != "cpu" if stacked is None else stacked


def segments(config: ModelConfig, stacked: bool | None = None) -> tuple[Segment, ...]:
    """The layers as segments: each alone, or as the longest repeating runs, the shortest period first.

    >>> from vishwamai.models.layers.attention import Attention
    >>> from vishwamai.models.layers.layer import LayerKind
    >>> local, whole = LayerKind(Attention(window=4)), LayerKind()
    >>> [(s.repeats, len(s.kinds)) for s in _runs((local, whole) * 3 + (local,))]
    [(3, 2), (1, 1)]
    """
    if not stacks_layers(stacked):
        return tuple(Segment((kind,), 1, i) for i, kind in enumerate(config.layers))
    return _runs(config.layers)


def _runs(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    runs: list[Segment] = []
    first = 0
    while first < len(kinds):
        rest = kinds[first:]
        best = Segment(rest[:1], 1, first)
        for period in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * period : (repeats + 1) * period] == rest[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.kinds):
                best = Segment(rest[:period], repeats, first)
        runs.append(best)
        first += best.repeats * len(best.kinds)
    return tuple(runs)
