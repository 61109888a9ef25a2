"""A call of a kernel in two parts: the arrays, which are traced, and everything else, which is part of the program."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from vishwamai.core.types import PyTree


@dataclasses.dataclass(frozen=True)
class StaticCall:
    """The static side of one call: the arguments' structure with every value that is not an array."""

    treedef: object
    static: tuple[object, ...]  # one entry per leaf; `ARRAY` where an array stands

    def arguments(self, arrays: tuple[jax.Array, ...]) -> tuple[tuple[PyTree, ...], dict[str, PyTree]]:
        """The arguments with `arrays` in their places."""
        rest = iter(arrays)
        leaves = [
            next(rest) if value is ARRAY else value.array if isinstance(value, Constant) else value
            for value in self.static
        ]
        return jax.tree.unflatten(self.treedef, leaves)


class Constant:
    """An array that is part of the program; equal to others of the same content."""

    def __init__(self, array: np.ndarray):
        self.array = array
        self._content = (array.shape, array.dtype.str, array.tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self._content == other._content

    def __hash__(self) -> int:
        return hash(self._content)


ARRAY = object()
"""Stands in `StaticCall.static` where an array was."""


def is_array(leaf: PyTree) -> bool:
    """Whether an argument is traced: an array, a tracer, or what has the shape and dtype of one."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) or (
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, type)
    )


def is_torch_tensor(leaf: PyTree) -> bool:
    """Whether an argument is torch's, without importing torch."""
    return type(leaf).__module__.partition(".")[0] == "torch" and hasattr(leaf, "device")
