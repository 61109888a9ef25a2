"""Tensors of an encoder's checkpoint: read by name, checked against the shapes that the configuration says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.models.shards import Stored

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike


class Norm(NamedTuple):
    scale: jax.Array  # [hidden]
    offset: jax.Array | None  # [hidden], or None


class Linear(NamedTuple):
    weight: jax.Array  # [in, out]
    bias: jax.Array | None  # [out], or None

    def __call__(self, x: jax.Array) -> jax.Array:  # [rows, in] to [rows, out]
        return vishwamai.gemm(x, self.weight, bias=self.bias)


@dataclasses.dataclass(frozen=True)
class TensorReader:
    """Reads parameters by the names of a checkpoint.

    Attributes:
      tensors: tensors by name (`shards.read_index`); products are stored `[out, in]` there.
      prefix: text before every name.
      dtype: dtype of parameters.
    """

    tensors: Mapping[str, Stored]
    prefix: str = ""
    dtype: DTypeLike = jnp.float32

    def array(self, name: str, *shape: int) -> np.ndarray:
        """A tensor of that shape.

        Raises:
          ShapeError: it is missing, or has another shape; the text names it.
        """
        name = self.prefix + name
        if name not in self.tensors:
            raise ShapeError(f"tensor `{name}` is missing; config.json expects it, of shape {list(shape)}.")
        stored = self.tensors[name]
        if stored.shape != shape:
            raise ShapeError(
                f"{stored.path}: tensor `{name}` has shape {list(stored.shape)}; config.json expects {list(shape)}."
            )
        return np.asarray(stored.read())

    def table(self, name: str, rows: int, columns: int) -> jax.Array:
        """A table of embeddings."""
        return jnp.asarray(self.array(f"{name}.weight", rows, columns), self.dtype)

    def norm(self, name: str, size: int, bias: bool = True) -> Norm:
        """Scale and offset of a layer norm."""
        scale = jnp.asarray(self.array(f"{name}.weight", size), self.dtype)
        return Norm(scale, jnp.asarray(self.array(f"{name}.bias", size), self.dtype) if bias else None)

    def linear(self, rows: int, columns: int, *names: str, bias: bool = True) -> Linear:
        """A product, or several of one input next to each other."""
        weight = np.concatenate([self.array(f"{name}.weight", columns, rows) for name in names]).T
        offset = np.concatenate([self.array(f"{name}.bias", columns) for name in names]) if bias else None
        return Linear(jnp.asarray(weight, self.dtype), None if offset is None else jnp.asarray(offset, self.dtype))


def check_known(values: Mapping[str, object], keys: Iterable[str], path: Path) -> None:
    """Declines a key of an encoder's `config.json` that is not among `keys`.

    Raises:
      UnsupportedError: the text names the file and the key.
    """
    unknown = sorted(values.keys() - set(keys))
    if unknown:
        raise UnsupportedError(f"{path}: `{unknown[0]}` is not a key that the encoder knows.")


def stored_bytes(tensors: Mapping[str, Stored], itemsize: int) -> int:
    """Bytes of all tensors of a checkpoint in elements of another size."""
    return itemsize * sum(stored.bytes // stored.dtype.itemsize for stored in tensors.values())
