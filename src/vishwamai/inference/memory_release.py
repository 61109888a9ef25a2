"""The memory of an engine that sleeps: pages, states and weights leave the device, and come back.

At level 1 the weights wait in host memory. At level 2 they are dropped, and read from their files again. Compiled
programs stay. On a CPU the device's memory is the host's, so level 1 frees pages and states there, and no weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ShapeError
from vishwamai.core.host_memory import give_back
from vishwamai.inference.adapters import Adapters
from vishwamai.inference.pools import zeros
from vishwamai.inference.programs import Programs
from vishwamai.inference.sharding import place_model
from vishwamai.models.next_token import NextTokenHead
from vishwamai.models.pages import QuantizedPages

if TYPE_CHECKING:
    from flax import nnx
    from jax.sharding import Mesh, Sharding
    from jax.typing import DTypeLike

    from vishwamai.core.types import PyTree
    from vishwamai.models import Decoder

LEVELS = (1, 2)
Reload = Callable[[], "tuple[Decoder, Decoder | None]"]
"""Reads the model and its draft from their files again."""


@dataclasses.dataclass(frozen=True, eq=False)
class Released:
    """An array that is not on its devices.

    Attributes:
      data: its values in host memory; None: zeros, or values that are read from files.
      sharding: devices on which it was placed; None: the default device.
    """

    shape: tuple[int, ...]
    dtype: DTypeLike
    sharding: Sharding | None
    data: np.ndarray | None = None

    @classmethod
    def of(cls, array: jax.Array, with_data: bool) -> Released:
        """Of an array, whose memory is free once nothing else refers to it."""
        data = np.array(array) if with_data else None
        return cls(array.shape, array.dtype, array.sharding if array.committed else None, data)

    @property
    def empty(self) -> bool:
        """Whether it is zeros on the default device."""
        return self.data is None and self.sharding is None

    def array(self) -> jax.Array:
        """The array, on its devices; of one that is not `empty`."""
        if self.data is not None:
            return jax.device_put(self.data, self.sharding)
        return jnp.zeros(self.shape, self.dtype, device=self.sharding)


class EngineMemory:
    """What an engine has on its devices; one thread calls it, while nothing is computed.

    Args:
      programs: whose models, pools and history they are.
      adapters: places of adapters, or None.
      mesh: mesh of the models, or None.
      reload: callable that reads the models again; None: they have no files, and level 2 is declined.
    """

    def __init__(self, programs: Programs, adapters: Adapters | None, mesh: Mesh | None, reload: Reload | None):
        self._programs, self._adapters, self._mesh, self._reload = programs, adapters, mesh, reload

    def check(self, level: int) -> None:
        """Raises `ShapeError` for a level that does not exist or that this engine has not."""
        if level not in LEVELS:
            raise ShapeError(f"Engine: `level` of sleep is {level!r}; pass 1 (weights in host memory) or 2 (dropped).")
        if level == 2 and self._reload is None:
            raise ShapeError(
                "Engine: the model has no files to read it from again; pass level 1, or make the engine by "
                "`plan_load(directory).engine()`."
            )

    def release(self, level: int) -> None:
        """Takes everything off the devices; a failure brings it back."""
        programs = self._programs
        moves = not _shares_host_memory()
        try:
            for name in ("pages", "draft_pages", "history"):
                setattr(programs, name, _emptied(getattr(programs, name)))
            for variable in _variables(programs.model, programs.draft).values():
                if level == 2 or moves:
                    variable.set_value(_released(variable.get_value(), with_data=level == 1))
            if self._adapters is not None and moves:
                self._adapters.convert(lambda matrices: _released(matrices, with_data=True))
        except BaseException:
            self.restore()
            raise
        give_back()

    def restore(self) -> None:
        """Brings everything back, the pools and the history filled with zeros. After a failure it may be called again.

        Raises:
          ShapeError: the files of the model are missing, or of another model.
        """
        programs = self._programs
        variables = _variables(programs.model, programs.draft)
        if any(_is_dropped(variable.get_value()) for variable in variables.values()):
            self._read_again(variables)
        for variable in variables.values():
            variable.set_value(_restored(variable.get_value()))
        if self._adapters is not None:
            self._adapters.convert(_restored)
        for name in ("pages", "draft_pages", "history"):
            setattr(programs, name, _restored(getattr(programs, name)))

    def _read_again(self, variables: dict[str, nnx.Variable]) -> None:
        assert self._reload is not None
        model, draft = self._reload()
        if isinstance(draft, NextTokenHead):
            draft.share(model)
        if self._mesh is not None:
            model, draft = place_model(model, self._mesh), None if draft is None else place_model(draft, self._mesh)
        values = {name: variable.get_value() for name, variable in _variables(model, draft).items()}
        for name, variable in variables.items():
            if name not in values or _layout(values[name]) != _layout(variable.get_value()):
                raise ShapeError(
                    f"the files of the model have another `{name}` than at the start; start the server anew."
                )
        for name, variable in variables.items():
            variable.set_value(values[name])


def _shares_host_memory() -> bool:
    return jax.default_backend() == "cpu"


def _variables(model: Decoder, draft: Decoder | None) -> dict[str, nnx.Variable]:
    """The arrays of both models by name; a draft's own alone, where it shares some with the model."""
    from flax import nnx

    variables: dict[int, tuple[str, nnx.Variable]] = {}
    for name, decoder in (("model", model), ("draft", draft)):
        for path, node in () if decoder is None else nnx.iter_graph(decoder):
            if isinstance(node, nnx.Variable):
                variables.setdefault(id(node), (".".join(map(str, (name, *path))), node))
    return dict(variables.values())


def _is_array(leaf: object) -> bool:
    return isinstance(leaf, jax.Array)


def _released(tree: PyTree, with_data: bool) -> PyTree:
    return jax.tree.map(lambda leaf: Released.of(leaf, with_data) if _is_array(leaf) else leaf, tree)


def _restored(tree: PyTree) -> PyTree:
    leaves, structure = jax.tree.flatten(tree)
    empty = [leaf for leaf in leaves if isinstance(leaf, Released) and leaf.empty]
    filled = iter(zeros(empty) if empty else ())  # one program, which is kept, as at the start
    return jax.tree.unflatten(
        structure,
        [leaf if not isinstance(leaf, Released) else next(filled) if leaf.empty else leaf.array() for leaf in leaves],
    )


def _emptied(pools: PyTree) -> PyTree:
    """The pools without their memory; the scales of layers and heads, which are few, stay."""

    def emptied(node: PyTree) -> PyTree:
        if isinstance(node, QuantizedPages) and not node.by_token:
            return dataclasses.replace(node, pool=_released(node.pool, with_data=False))
        return _released(node, with_data=False)

    return jax.tree.map(emptied, pools, is_leaf=lambda node: isinstance(node, QuantizedPages))


def _is_dropped(tree: PyTree) -> bool:
    return any(isinstance(leaf, Released) and leaf.data is None for leaf in jax.tree.leaves(tree))


def _layout(tree: PyTree) -> tuple[object, ...]:
    leaves, structure = jax.tree.flatten(tree)
    return structure, *((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
