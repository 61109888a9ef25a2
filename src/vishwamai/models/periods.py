"""Which layers are stacked: runs of layers that repeat, so that one traced period serves all of them.

A scan over stacked layers keeps compile time independent of depth on TPU and GPU. On the CPU it would copy each layer's
weights out of the stack before a native call, so layers are unrolled there.
"""

from __future__ import annotations

import dataclasses

import jax

from vishwamai.models.config import ModelConfig
from vishwamai.models.layer_kinds import LayerKind


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

    >>> from vishwamai.models.layer_kinds import LayerKind
    >>> [(s.repeats, len(s.kinds)) for s in _runs((LayerKind(4), LayerKind()) * 3 + (LayerKind(4),))]
    [(3, 2), (1, 1)]
    """
    if not stacks_layers(stacked):
        return tuple(Segment((kind,), 1, i) for i, kind in enumerate(config.layers))
    return _runs(config.layers)


def _runs(kinds: tuple[LayerKind, ...]) -> tuple[Segment, ...]:
    found: list[Segment] = []
    at = 0
    while at < len(kinds):
        rest = kinds[at:]
        best = Segment(rest[:1], 1, at)
        for period in range(1, len(rest) // 2 + 1):
            repeats = 1
            while rest[repeats * period : (repeats + 1) * period] == rest[:period]:
                repeats += 1
            if repeats > 1 and repeats * period > best.repeats * len(best.kinds):
                best = Segment(rest[:period], repeats, at)
        found.append(best)
        at += best.repeats * len(best.kinds)
    return tuple(found)
