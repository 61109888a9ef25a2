"""Warnings that point at the line that the caller wrote."""

from __future__ import annotations

import sys
import warnings

_OURS = ("vishwamai", "capibara", "jax", "jaxlib", "flax", "torch", "functools", "contextlib")


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Gives a warning at the nearest line that is neither ours nor the framework's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)
