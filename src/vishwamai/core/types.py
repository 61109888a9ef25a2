"""Types that annotations share, where JAX, NumPy and torch have none or one that is too narrow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

if TYPE_CHECKING:  # torch's package takes its types here, too, and imports no JAX
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

AnyArray = Any
"""An array of JAX or NumPy, or a tensor of torch: formulas and GPU kernels that serve both frameworks use what these
have in common (`core.arrays`). No type states that: jax.numpy accepts no protocol.
"""
PyTree = Any
"""Nested dicts, lists and tuples whose leaves are arrays, as `jax.tree.map` takes them. Registered classes are nodes,
too, so no type of Python states it.
"""
IndexMap: TypeAlias = Callable[..., tuple[object, ...]]
"""From the indices of a grid, and the prefetched scalars, to the block of an array."""
Slice: TypeAlias = "slice | pl.Slice"
"""What `pl.ds` returns: entries of one axis in a kernel."""


class Ref(Protocol):
    """A reference to memory inside a Pallas kernel. `jax.Ref` is its class but types neither its items nor `at`.

    `core.pallas.call` passes None for what a call lacks; a kernel asks its spec, or `is None`, before it reads.
    """

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> jnp.dtype: ...
    @property
    def at(self) -> RefViews: ...
    def __getitem__(self, index: object, /) -> jax.Array: ...
    def __setitem__(self, index: object, value: object, /) -> None: ...


class RefViews(Protocol):
    """`ref.at`: references to parts of the memory."""

    def __getitem__(self, index: object, /) -> Ref: ...


class Device(Protocol):
    """A device of JAX, present or described: `jax.Device` is a value to a type checker."""

    @property
    def id(self) -> int: ...
    @property
    def platform(self) -> str: ...
    @property
    def device_kind(self) -> str: ...
    @property
    def process_index(self) -> int: ...


class Transfer(Protocol):
    """A copy that runs while the kernel computes (`pltpu.make_async_copy`)."""

    def start(self) -> None: ...
    def wait(self) -> None: ...


ABSENT = cast("Ref", None)
"""The default of a reference that a call of a kernel lacks."""
