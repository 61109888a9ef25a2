"""The adapters of an engine: which are loaded, in which place, and for how many answers.

All adapters have the same place in every matrix, so that loading one compiles nothing. An answer keeps the place of its
adapter until it ends.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.types import PyTree
from vishwamai.inference.sharding import adapter_shapes
from vishwamai.models.adapters import AdapterSizes, Place, Thin, read_adapter

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from vishwamai.models import Decoder

Matrices = dict[Place, tuple[PyTree, PyTree]]


@dataclasses.dataclass(eq=False)
class Adapter:
    """One that is loaded.

    Attributes:
      name: the name that requests send.
      place: its number among the places of the matrices.
      root: bytes before the digests of its pages of keys and values: a digest of its matrices.
      users: answers that compute with it, or wait.
    """

    name: str
    place: int
    root: bytes
    users: int = 0


class Adapters:
    """Adapters by name; any thread may call it.

    Args:
      model: whose weights they adapt.
      sizes: places.
      mesh: mesh of the model, None for one device.
      change: takes the matrices of all adapters for the next steps.
    """

    def __init__(self, model: Decoder, sizes: AdapterSizes, mesh: Mesh | None, change: Callable[[Matrices], None]):
        if model.stacked:
            raise ShapeError("Adapters: the model's layers are stacked; load it with `stacked=False`.")
        self._config, self.sizes, self._change = model.config, sizes, change
        self._lock = threading.Lock()
        self._places: list[Adapter | None] = [None] * sizes.count
        self._names: dict[str, Adapter] = {}
        self.matrices: Matrices = {
            where: (_zeros(down), _zeros(up))
            for where, (down, up) in adapter_shapes(model.config, sizes, model.dtype, mesh).items()
        }

    @property
    def names(self) -> tuple[str, ...]:
        """Of those that are loaded."""
        return tuple(self._names)

    @property
    def roots(self) -> dict[str, bytes]:
        """The root of each that is loaded, by name: the `root` of the streams that use it."""
        with self._lock:
            return {name: entry.root for name, entry in self._names.items()}

    def load(self, name: str, directory: str | Path) -> None:
        """Loads an adapter as peft writes it, in the place of one that was unloaded.

        Raises:
          ShapeError: the name is taken, no place is free, or the adapter does not fit the model.
          UnsupportedError: as `read_adapter`.
        """
        adapter = read_adapter(directory, self._config)
        rank = max(down.shape[1] for down, _ in adapter.values())
        if rank > self.sizes.rank:
            raise ShapeError(
                f"{directory}: the adapter has rank {rank}; the server has room for {self.sizes.rank} "
                "(--max-adapter-rank)."
            )
        with self._lock:
            if name in self._names:
                raise ShapeError(f"the adapter {name!r} is loaded already; unload it first.")
            free = [i for i, entry in enumerate(self._places) if entry is None or self._gone(entry)]
            if not free:
                raise ShapeError(
                    f"all {self.sizes.count} places of adapters are taken (--max-adapters); unload one, and wait for "
                    "its answers."
                )
            entry = Adapter(name, free[0], _root(adapter))
            self.matrices = self._placed(adapter, entry.place)
            self._change(self.matrices)
            self._places[entry.place] = self._names[name] = entry

    def unload(self, name: str) -> None:
        """Forgets an adapter; answers that it computes go on to their end.

        Raises:
          ShapeError: none has that name.
        """
        with self._lock:
            del self._names[self._loaded(name).name]

    def convert(self, function: Callable[[Matrices], Matrices]) -> None:
        """Replaces the matrices by what `function` makes of them, for the next steps."""
        with self._lock:
            self.matrices = function(self.matrices)
            self._change(self.matrices)

    def take(self, name: str, answers: int) -> Adapter:
        """The adapter of a request, whose answers hold its place until `release`.

        Raises:
          ShapeError: none has that name.
        """
        with self._lock:
            entry = self._loaded(name)
            entry.users += answers
            return entry

    def release(self, adapter: Adapter, answers: int) -> None:
        """Says that answers have ended."""
        with self._lock:
            adapter.users -= answers

    def _loaded(self, name: str) -> Adapter:
        if name not in self._names:
            raise ShapeError(f"no adapter {name!r} is loaded; loaded are {', '.join(self._names) or 'none'}.")
        return self._names[name]

    def _gone(self, entry: Adapter) -> bool:
        return not entry.users and self._names.get(entry.name) is not entry

    def _placed(self, adapter: Mapping[Place, Thin], place: int) -> Matrices:
        """The matrices of all adapters with one of them in its place; a lower rank is filled up with zeros."""
        first, rank = place * self.sizes.rank, self.sizes.rank
        matrices: Matrices = {}
        for where, (down, up) in self.matrices.items():
            thin = adapter.get(where)
            a, b = np.zeros((down.shape[0], rank), np.float32), np.zeros((rank, up.shape[1]), np.float32)
            if thin is not None:
                a[:, : thin[0].shape[1]], b[: thin[1].shape[0]] = thin
            matrices[where] = _replaced(down, a, 0, first), _replaced(up, b, first, 0)
        return matrices


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    return jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)


def _replaced(target: jax.Array, part: np.ndarray, row: int, column: int) -> jax.Array:
    """The matrices of all adapters, with those of one from a row and a column on; each device writes its share."""
    placed = jax.device_put(part.astype(target.dtype), target.sharding if target.committed else None)
    return jax.lax.dynamic_update_slice(target, placed, (row, column))


def _root(adapter: Mapping[Place, Thin]) -> bytes:
    """The digest of an adapter: another one has other keys and values, in this process and in later ones."""
    digest = hashlib.sha256()
    for where, halves in sorted(adapter.items()):
        digest.update(repr((where, [(half.shape, half.dtype.name) for half in halves])).encode())
        for half in halves:
            digest.update(np.ascontiguousarray(half).data)
    return b"adapter " + digest.digest()
