"""How rotary frequencies are stretched for contexts longer than a model was trained on: one small class for each
method.

Every class gives the angular frequencies (radians a position) of a head's feature pairs and the factor on cos and sin,
as the model's authors do. Numbers are float64 on the host; only what depends on the length of a traced sequence is left
to the program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError


def plain_frequencies(rotary_dim: int, theta: float) -> np.ndarray:
    """`theta^(-2 i / rotary_dim)`, float64 `[rotary_dim / 2]`: radians a position. Su et al., "RoFormer" (2021)."""
    return theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Base of the scalings: frequencies as they are, cos and sin as they are."""

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        """Radians a position, float64 `[rotary_dim / 2]`, for a sequence of `length` positions."""
        del length
        return plain_frequencies(rotary_dim, theta)

    @property
    def magnitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    @property
    def threshold(self) -> int | None:
        """The length up to which the frequencies are the same; None where they never depend on it."""
        return None

    def check(self, rotary_dim: int) -> None:
        """Raises ShapeError where the scaling does not fit a head of `rotary_dim` rotated features."""
        del rotary_dim
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("factor", "original_max_positions") and value is not None and not value > 0:
                raise ShapeError(f"apply_rope: `scaling` has {field.name} = {value!r}; pass a number above 0.")


@checked
@dataclasses.dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by `factor`. Chen et al., "Extending Context Window ... via Positional Interpolation"
    (2023).

    >>> LinearScaling(2.0).frequencies(4, 10000.0, 8).tolist()
    [0.5, 0.005]
    """

    factor: float

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        return plain_frequencies(rotary_dim, theta) / self.factor


@checked
@dataclasses.dataclass(frozen=True)
class NtkScaling(RopeScaling):
    """A larger base, so that the fastest pair keeps its frequency and the slowest is divided by `factor` (bloc97,
    2023).

    Attributes:
      factor: ratio of the stretched context to the original.
      original_max_positions: None for the fixed form, `theta * factor^(d / (d - 2))`. With it the dynamic form
        (emozilla, 2023): the plain frequencies up to that length, and beyond it
        `factor * length / original_max_positions - (factor - 1)` in place of `factor`.

    >>> float(NtkScaling(4.0).frequencies(4, 10000.0, 8)[0])
    1.0
    """

    factor: float
    original_max_positions: int | None = None

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        stretch = self.factor
        if self.original_max_positions is not None:
            stretch = self.factor * max(length, self.original_max_positions) / self.original_max_positions - (
                self.factor - 1
            )
        return plain_frequencies(rotary_dim, theta * stretch ** (rotary_dim / (rotary_dim - 2)))

    @property
    def threshold(self) -> int | None:
        return self.original_max_positions

    def check(self, rotary_dim: int) -> None:
        super().check(rotary_dim)
        if rotary_dim < 4:
            raise ShapeError(
                f"apply_rope: `scaling` is {self}, but {rotary_dim} rotated features have one frequency only; make it "
                "4 or more."
            )


@checked
@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RopeScaling):
    """Long waves are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1).

    A wave is long above `original_max_positions / low_freq_factor` positions and short below
    `original_max_positions / high_freq_factor`.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        plain = plain_frequencies(rotary_dim, theta)
        waves = self.original_max_positions * plain / (2 * math.pi)  # in the original context
        smooth = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        return (1 - smooth) * plain / self.factor + smooth * plain

    def check(self, rotary_dim: int) -> None:
        super().check(rotary_dim)
        if not self.high_freq_factor > self.low_freq_factor:
            raise ShapeError(
                f"apply_rope: `scaling` has high_freq_factor = {self.high_freq_factor}, which must be above "
                f"low_freq_factor = {self.low_freq_factor}; set it higher, such as 4."
            )


@checked
@dataclasses.dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN: a ramp over the pairs from plain to stretched frequencies, and a temperature. Peng et al., "YaRN" (2023).

    Attributes:
      factor: ratio of the stretched context to the original.
      original_max_positions: length of the original context.
      beta_fast, beta_slow: turns in the original context where the ramp starts and ends.
      mscale, mscale_all_dim: DeepSeek's pair of coefficients of the temperature; 0 for none.
      attention_factor: factor on cos and sin; None for `0.1 ln(factor) + 1`, or the ratio that DeepSeek's coefficients
        give.
      truncate: the ramp starts and ends at whole pairs.

    >>> round(YarnScaling(4.0, original_max_positions=4096).magnitude, 4)
    1.1386
    """

    factor: float
    original_max_positions: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        def pair_of(turns: float) -> float:
            turn = 2 * math.pi * turns
            return rotary_dim * math.log(self.original_max_positions / turn) / (2 * math.log(theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotary_dim - 1)
        if low == high:
            high += 0.001  # as the authors do
        ramp = np.clip((np.arange(rotary_dim // 2) - low) / (high - low), 0.0, 1.0)
        plain = plain_frequencies(rotary_dim, theta)
        return plain / self.factor * ramp + plain * (1 - ramp)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor

        def temperature(mscale: float) -> float:
            return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

        if self.mscale and self.mscale_all_dim:
            return temperature(self.mscale) / temperature(self.mscale_all_dim)
        return temperature(1.0)


@checked
@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RopeScaling):
    """A divisor for every pair, one set up to the original context and one beyond. Ding et al., "LongRoPE" (2024);
    Phi-3.

    Attributes:
      short_factor, long_factor: `rotary_dim / 2` divisors each.
      original_max_positions: length of the original context.
      factor: ratio of the stretched context to the original; enters the factor on cos and sin only,
        `sqrt(1 + ln(factor) / ln(original_max_positions))`.
      attention_factor: float in place of that factor, or None.

    >>> LongRopeScaling((1.0, 1.0), (2.0, 4.0), 4096).frequencies(4, 10000.0, 5000).tolist()
    [0.5, 0.0025]
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_positions: int
    factor: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        for name in ("short_factor", "long_factor"):  # a configuration file brings lists
            object.__setattr__(self, name, tuple(float(x) for x in getattr(self, name)))

    def frequencies(self, rotary_dim: int, theta: float, length: int) -> np.ndarray:
        divisors = self.long_factor if length > self.original_max_positions else self.short_factor
        return plain_frequencies(rotary_dim, theta) / np.asarray(divisors)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_positions))

    @property
    def threshold(self) -> int | None:
        return self.original_max_positions

    def check(self, rotary_dim: int) -> None:
        super().check(rotary_dim)
        for name in ("short_factor", "long_factor"):
            count = len(getattr(self, name))
            if count != rotary_dim // 2:
                raise ShapeError(
                    f"apply_rope: `scaling` has {count} numbers in {name}, but {rotary_dim} rotated features are "
                    f"{rotary_dim // 2} pairs; pass {rotary_dim // 2} numbers."
                )


@checked
@dataclasses.dataclass(frozen=True)
class MRopeScaling(RopeScaling):
    """Multimodal: positions have three coordinates (time, height, width), and each pair turns by one of them. Wang et
    al., "Qwen2-VL" (2024).

    Attributes:
      sections: how many pairs follow each coordinate; they add up to `rotary_dim / 2`.
      interleaved: the coordinates take turns (Qwen3-VL): pairs 1, 4, 7 ... follow the height and 2, 5, 8 ... the width,
        as many as their sections say, and all others the time. Else one section comes after the other (Qwen2-VL).

    >>> MRopeScaling((4, 2, 2), interleaved=True).coordinates.tolist()
    [0, 1, 2, 0, 1, 2, 0, 0]
    """

    sections: tuple[int, ...] = (16, 24, 24)
    interleaved: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "sections", tuple(int(x) for x in self.sections))

    def check(self, rotary_dim: int) -> None:
        if sum(self.sections) != rotary_dim // 2 or len(self.sections) != 3:
            raise ShapeError(
                f"apply_rope: `scaling` has sections {self.sections}, but {rotary_dim} rotated features are "
                f"{rotary_dim // 2} pairs; pass three sections that add up to {rotary_dim // 2}."
            )
        if not isinstance(self.interleaved, bool):
            raise ShapeError(f"apply_rope: `scaling` has interleaved = {self.interleaved!r}; pass True or False.")
        if self.interleaved and np.bincount(self.coordinates, minlength=3).tolist() != list(self.sections):
            raise ShapeError(
                f"apply_rope: `scaling` has sections {self.sections}, which cannot take turns among {rotary_dim // 2} "
                "pairs; pass height and width of a third of them at most, or interleaved=False."
            )

    @property
    def coordinates(self) -> np.ndarray:
        """The coordinate that each pair follows, `[rotary_dim / 2]`."""
        if not self.interleaved:
            return np.repeat(np.arange(3), self.sections)
        axes = np.zeros(sum(self.sections), np.int64)
        for coordinate in (1, 2):
            axes[coordinate : 3 * self.sections[coordinate] : 3] = coordinate
        return axes


_NAMES = {
    "original_max_position_embeddings": "original_max_positions",
    "mrope_section": "sections",
    "mrope_interleaved": "interleaved",
}
_IGNORED = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def parse_scaling(scaling: RopeScaling | Mapping[str, Any] | None) -> RopeScaling:
    """The scaling that the caller means: an object of this module, or the `rope_scaling` or `rope_parameters`
    dictionary of a Hugging Face configuration, of which `tables.check_frequencies` reads theta and the rotated share.

    Raises:
      ShapeError: it is neither, or the dictionary names a method or a parameter that is not known.
    """
    if scaling is None:
        return RopeScaling()
    if isinstance(scaling, RopeScaling):
        return scaling
    methods: dict[str, type[RopeScaling]] = {
        "default": RopeScaling,
        "linear": LinearScaling,
        "ntk": NtkScaling,
        "dynamic": NtkScaling,
        "llama3": Llama3Scaling,
        "yarn": YarnScaling,
        "longrope": LongRopeScaling,
        "mrope": MRopeScaling,
    }
    if not isinstance(scaling, Mapping):
        raise ShapeError(
            f"apply_rope: `scaling` is {scaling!r}; pass one of "
            f"{', '.join(c.__name__ for c in dict.fromkeys(methods.values()))}, a dictionary with a 'rope_type', or "
            "None."
        )
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default" and "mrope_section" in scaling:
        kind = "mrope"
    if kind not in methods:
        raise ShapeError(f"apply_rope: `scaling` has rope_type {kind!r}; pass one of {', '.join(methods)}.")
    values = {_NAMES.get(name, name): value for name, value in scaling.items() if name not in _IGNORED}
    if kind == "dynamic" and "original_max_positions" not in values:
        raise ShapeError(
            "apply_rope: `scaling` has rope_type 'dynamic' but no 'original_max_position_embeddings'; set it to the "
            "model's max_position_embeddings."
        )
    allowed = {field.name for field in dataclasses.fields(methods[kind])}
    unknown = sorted(set(values) - allowed)
    if unknown:
        raise ShapeError(
            f"apply_rope: `scaling` of rope_type {kind!r} has {unknown[0]!r} = {values[unknown[0]]!r}; use "
            f"{', '.join(sorted(allowed))} only."
        )
    try:
        return methods[kind](**{name: value for name, value in values.items() if value is not None})
    except TypeError as error:
        raise ShapeError(
            f"apply_rope: `scaling` of rope_type {kind!r} is incomplete ({error}); pass what is missing."
        ) from error
