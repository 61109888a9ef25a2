"""Copies of pages and states off the device and back: the same bytes, by one program a group and direction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.inference.head_memory import HeadMemory
from vishwamai.inference.prefixes import PAGES, STATES, window_group
from vishwamai.models.pages import MixedPool, QuantizedPages
from vishwamai.models.periods import segments

if TYPE_CHECKING:
    from vishwamai.core.types import PyTree
    from vishwamai.inference.drafting import DraftPages
    from vishwamai.inference.programs import Programs
    from vishwamai.models import Decoder

Arrays = tuple[jax.Array, ...]

_BATCH, _BATCH_BYTES = 16, 32 << 20
"""Most pages that a program copies at once, and about the most bytes; fewer pages are filled up."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """How an array holds pages: those of so many layers, one layer after another; None: it holds none, but scales of
    pages or what sequences have that run.
    """

    group: str | None
    layers: int = 0
    scales: bool = False


@dataclasses.dataclass(frozen=True)
class _Group:
    """The arrays of a group, by their places among those of all pools."""

    places: tuple[int, ...]
    layers: tuple[int, ...]
    count: int  # pages of one layer
    rows: tuple[jax.ShapeDtypeStruct, ...]  # of one page, in each array
    splits: tuple[PartitionSpec, ...]  # of each array over the mesh; () on one device

    @property
    def bytes(self) -> int:
        """Size of one page in all arrays."""
        return sum(math.prod(row.shape) * row.dtype.itemsize for row in self.rows)

    @property
    def batch(self) -> int:
        """Pages that a program copies at once."""
        return max(1, min(_BATCH, _BATCH_BYTES // max(self.bytes, 1)))


class PageCopies:
    """Copies between the pools of an engine and the host. One thread calls `take` and `put`.

    On a mesh each device copies its part of a page, and the bytes on the host are those of all heads, however many
    devices hold them.

    Args:
      programs: whose pools they are; a draft's pages belong to those of the model.

    Attributes:
      scales: arrays of the pools that the bytes of every page are multiplied by.
    """

    def __init__(self, programs: Programs):
        self._programs = programs
        rows = [*_rows_of(programs.model, programs.pages, programs.windows)]
        if programs.draft is not None:
            rows += _rows_of_draft(programs.draft, programs.draft_pages, programs.windows)
        arrays = jax.tree.leaves((programs.pages, programs.draft_pages))
        self.scales = tuple(array for array, row in zip(arrays, rows, strict=True) if row.scales)
        self._groups: dict[str, _Group] = {}
        self._programs_of: dict[str, tuple[Callable[..., Arrays], Callable[..., Arrays]]] = {}
        # Models of states alone have no arrays of pages: a page is then known, and has no bytes.
        for name in dict.fromkeys([PAGES, *(row.group for row in rows if row.group is not None)]):
            places = tuple(i for i, row in enumerate(rows) if row.group == name)
            layers = tuple(rows[i].layers for i in places)
            shapes = tuple(
                jax.ShapeDtypeStruct((rows[i].layers, *arrays[i].shape[1:]), arrays[i].dtype) for i in places
            )
            counts = [arrays[i].shape[0] // rows[i].layers for i in places]
            splits = () if programs.mesh is None else tuple(_split(arrays[i]) for i in places)
            self._groups[name] = _Group(places, layers, max(counts, default=0), shapes, splits)
            self._programs_of[name] = _copies(layers, splits, programs.mesh)
            self.take(name, [])  # compiled now, not when the first page gives way
            self._put(name, [])

    @property
    def layout(self) -> str:
        """The arrays of a page, in their order."""
        return repr({name: [(row.shape, row.dtype.name) for row in group.rows] for name, group in self._groups.items()})

    def size(self, group: str) -> int:
        """Bytes of one page of a group."""
        return self._groups[group].bytes

    def batch(self, group: str) -> int:
        """Most pages of a group that `take` copies; fewer take the same memory."""
        return self._groups[group].batch

    def take(self, group: str, pages: Sequence[int]) -> Arrays:
        """Copies of at most `batch` pages as they are after all steps that were sent off; nothing waits for them."""
        index = np.full(self.batch(group), self._groups[group].count, np.int32)
        index[: len(pages)] = pages
        return self._programs_of[group][0](self._arrays(group), index)

    def data(self, copies: Sequence[jax.Array], number: int) -> np.ndarray:
        """The bytes of one page among those that `take` copied; waits until they are computed."""
        rows = [np.asarray(part)[number].reshape(-1).view(np.uint8) for part in copies]
        return np.concatenate(rows) if rows else np.zeros(0, np.uint8)

    def put(self, group: str, entries: Sequence[tuple[int, np.ndarray]]) -> None:
        """Writes bytes to pages, before the next step that is sent off."""
        for first in range(0, len(entries), self.batch(group)):
            self._put(group, entries[first : first + self.batch(group)])

    def _put(self, name: str, entries: Sequence[tuple[int, np.ndarray]]) -> None:
        group = self._groups[name]
        # JAX may read these arrays after the call: they are new for each, and nobody writes to them afterwards.
        index = np.full(group.batch, group.count, np.int32)
        parts = [np.zeros((group.batch, *row.shape), row.dtype) for row in group.rows]
        for i, (page, data) in enumerate(entries):
            index[i], start = page, 0
            for part in parts:
                end = start + part[i].nbytes
                part[i] = data[start:end].view(part.dtype).reshape(part[i].shape)
                start = end
        copies: tuple[np.ndarray | jax.Array, ...] = tuple(parts)
        if (mesh := self._programs.mesh) is not None:
            splits = [NamedSharding(mesh, _of_copies(split)) for split in group.splits]
            copies = tuple(jax.device_put(part, split) for part, split in zip(parts, splits, strict=True))
        updates = self._programs_of[name][1](self._arrays(name), index, copies)
        arrays, tree = jax.tree.flatten((self._programs.pages, self._programs.draft_pages))
        for place, array in zip(group.places, updates):
            arrays[place] = array
        self._programs.pages, self._programs.draft_pages = jax.tree.unflatten(tree, arrays)

    def _arrays(self, group: str) -> Arrays:
        arrays = jax.tree.leaves((self._programs.pages, self._programs.draft_pages))
        return tuple(arrays[place] for place in self._groups[group].places)


def _rows_of(model: Decoder, pools: Sequence[PyTree], windows: Sequence[int]) -> Iterator[_Rows]:
    """How each array of the pools holds pages, in the order of `jax.tree.leaves`."""
    kinds = [(kind, run.repeats) for run in segments(model.config, model.stacked) for kind in run.kinds]
    for (kind, layers), pool in zip(kinds, pools, strict=True):
        window = kind.mixer.window
        pages = _Rows(PAGES if window is None or window not in windows else window_group(window), layers)
        yield from jax.tree.leaves(_marked(pool, pages, _Rows(STATES, layers)))


def _rows_of_draft(draft: Decoder, pages: DraftPages, windows: Sequence[int]) -> Iterator[_Rows]:
    if not isinstance(pages, HeadMemory):
        yield from _rows_of(draft, pages, windows)
        return
    running, ends = (cast("jax.Array", rows) for rows in (_Rows(None), _Rows(PAGES, 1)))
    pools = tuple(_rows_of(draft, pages.pools, windows))
    yield from jax.tree.leaves(HeadMemory(pools, running, ends, running, pages.page_size))


def _marked(pool: PyTree, pages: _Rows, states: _Rows) -> PyTree:
    if isinstance(pool, MixedPool):
        return MixedPool(_marked(pool.pages, pages, states), _marked(pool.states, pages, states))
    if isinstance(pool, dict):
        return dict.fromkeys(pool, states)
    if not isinstance(pool, QuantizedPages):
        return pages
    scale = cast("jax.Array", pages if pool.by_token else _Rows(None, scales=True))
    return QuantizedPages(pages, scale, None if pool.v_scale is None else scale)


def _split(array: jax.Array) -> PartitionSpec:
    """How the mesh splits an array of pages, with an entry for each of its axes; the axis of pages is never split."""
    assert isinstance(array.sharding, NamedSharding)
    spec = array.sharding.spec
    return PartitionSpec(*spec, *(None,) * (array.ndim - len(spec)))


def _of_copies(split: PartitionSpec) -> PartitionSpec:
    """How copies `[pages, layers, ...]` are split of an array `[layers * pages, ...]`."""
    return PartitionSpec(None, None, *split[1:])


def _copies(
    layers: tuple[int, ...], splits: tuple[PartitionSpec, ...], mesh: Mesh | None
) -> tuple[Callable[..., Arrays], Callable[..., Arrays]]:
    """The programs that read and write pages of a group's arrays, on a mesh each device its part."""
    read, write = partial(_read, layers=layers), partial(_write, layers=layers)
    if mesh is not None:
        copies, pages = tuple(_of_copies(split) for split in splits), PartitionSpec()
        read = jax.shard_map(read, mesh=mesh, in_specs=(splits, pages), out_specs=copies)
        write = jax.shard_map(write, mesh=mesh, in_specs=(splits, pages, copies), out_specs=splits)
    return jax.jit(read), jax.jit(write, donate_argnums=0)


def _by_layer(array: jax.Array, layers: int) -> jax.Array:
    return array.reshape(layers, array.shape[0] // layers, *array.shape[1:])


def _read(arrays: Arrays, pages: jax.Array, *, layers: tuple[int, ...]) -> Arrays:
    """`[pages, layers, ...]` of each array; `pages` past the end stand for none."""
    rows = (_by_layer(array, count).at[:, pages].get(mode="clip") for array, count in zip(arrays, layers))
    return tuple(jnp.moveaxis(row, 1, 0) for row in rows)


def _write(arrays: Arrays, pages: jax.Array, parts: Arrays, *, layers: tuple[int, ...]) -> Arrays:
    return tuple(
        _by_layer(array, count).at[:, pages].set(jnp.moveaxis(part, 0, 1), mode="drop").reshape(array.shape)
        for array, count, part in zip(arrays, layers, parts)
    )
