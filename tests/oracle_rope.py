"""The rotary embedding as multiplication by e^(i angle), one scaling after another from its paper's formula;
float64.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from vishwamai.ops.rope import Llama3Scaling, MRopeScaling, YarnScaling


def frequencies(pairs: int, theta: float, scaling: Any) -> tuple[np.ndarray, float]:
    """(radians a position, factor on the result)."""
    plain = np.array([theta ** (-i / pairs) for i in range(pairs)])
    if scaling is None or isinstance(scaling, MRopeScaling):  # which says whose positions count
        return plain, 1.0
    if isinstance(scaling, Llama3Scaling):
        result = []
        for f in plain:
            wavelength = 2 * np.pi / f
            if wavelength < scaling.original_max_positions / scaling.high_freq_factor:
                result.append(f)
            elif wavelength > scaling.original_max_positions / scaling.low_freq_factor:
                result.append(f / scaling.factor)
            else:
                share = scaling.original_max_positions / wavelength - scaling.low_freq_factor
                share /= scaling.high_freq_factor - scaling.low_freq_factor
                result.append((1 - share) * f / scaling.factor + share * f)
        return np.array(result), 1.0
    assert isinstance(scaling, YarnScaling)
    bounds = []
    for turns in (scaling.beta_fast, scaling.beta_slow):
        bounds.append(pairs * np.log(scaling.original_max_positions / (2 * np.pi * turns)) / np.log(theta))
    low, high = max(np.floor(bounds[0]), 0), min(np.ceil(bounds[1]), 2 * pairs - 1)
    stretched = np.clip((np.arange(pairs) - low) / (high - low), 0, 1)
    return plain * (1 - stretched) + plain / scaling.factor * stretched, 0.1 * np.log(scaling.factor) + 1


def coordinate(scaling: MRopeScaling, pair: int) -> int:
    """0, 1 or 2: whether a pair follows the time, the height or the width."""
    time, height, width = scaling.sections
    if scaling.interleaved:  # Qwen3-VL: in turns, as long as the height and the width last; the rest is the time's
        turn = pair % 3
        return turn if turn and pair < 3 * (height, width)[turn - 1] else 0
    return 0 if pair < time else 1 if pair < time + height else 2


def rope(
    query: Any,
    key: Any = None,
    positions: Any = None,
    cached: int | None = None,
    *,
    theta: float = 10000.0,
    scaling: Any = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    layout: str = "bhsd",
) -> Any:
    del cached  # where the tables come from does not change them
    length = query.shape[1 if layout == "bshd" else 2]
    size = rotary_dim or query.shape[-1]
    angular, factor = frequencies(size // 2, theta, scaling)
    p = np.arange(length) if positions is None else positions
    p = jnp.asarray(p, jnp.float64)
    if isinstance(scaling, MRopeScaling):  # [3, batch, length] -> [batch, length, pairs]
        p = jnp.stack([p[coordinate(scaling, i)] for i in range(size // 2)], axis=-1)
    else:
        p = p[..., None]
    angles = p * angular  # [(batch,) length, pairs]
    angles = angles[..., None, :] if layout == "bshd" else jnp.expand_dims(angles, -3)
    cos, sin = factor * jnp.cos(angles), factor * jnp.sin(angles)
    first = np.arange(0, size, 2) if interleaved else np.arange(size // 2)
    second = first + 1 if interleaved else first + size // 2

    def turn(x: Any) -> Any:
        a, b = x[..., first], x[..., second]
        return x.at[..., first].set(a * cos - b * sin).at[..., second].set(a * sin + b * cos)

    return turn(query) if key is None else (turn(query), turn(key))
