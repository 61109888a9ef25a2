"""What the processes of a run do together: process 0 writes the files, and all of them take the same steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vishwamai.core import jax_private
from vishwamai.core.errors import DeviceError
from vishwamai.core.types import PyTree

T = TypeVar("T")

_turns = itertools.count()
_DONE = "done"

_PIECE = 1 << 28
"""Bytes that processes fetch at once."""


def is_first() -> bool:
    """Whether this process writes the files of a run: process 0 does, which may be the only one."""
    return jax.process_index() == 0


def first_alone(work: Callable[[], T]) -> T | None:
    """What `work` returns on process 0, and None on the others, which wait until it is done. Every process calls it.

    Raises:
      DeviceError: on the others, `work` failed on process 0; the text has its error.

    >>> first_alone(lambda: 3)
    3
    """
    if jax.process_count() == 1:
        return work()
    key = f"vishwamai/first_alone/{next(_turns)}"
    if not is_first():
        text = jax_private.heard(key)
        if text != _DONE:
            raise DeviceError(f"train: process 0 stopped: {text}")
        return None
    try:
        result = work()
    except BaseException as error:
        jax_private.tell(key, f"{type(error).__name__}: {error}")
        raise
    jax_private.tell(key, _DONE)
    return result


def as_first(number: int) -> int:
    """The number that process 0 passes; every process calls it.

    >>> as_first(2)
    2
    """
    return number if jax.process_count() == 1 else int(multihost_utils.broadcast_one_to_all(np.asarray(number)))


def check_shared(folder: Path, file: str) -> None:
    """Raises DeviceError where this process does not see a file that process 0 has written into the run's directory."""
    if not (folder / file).exists():
        raise DeviceError(
            f"train: process {jax.process_index()} does not see {folder / file}, which process 0 has written; pass an "
            "output directory on a file system that all processes share."
        )


def on_host(tree: object) -> PyTree:
    """A tree that lies on the devices of all processes: NumPy arrays on process 0 and None on the others, in which
    every process takes part; on one process the tree itself.
    """
    if jax.process_count() == 1:
        return tree
    keep = is_first()
    return jax.tree.map(lambda x: fetched(x, keep), tree)


def fetched(x: jax.Array, keep: bool = True, piece: int = _PIECE) -> np.ndarray | None:
    """An array of all processes, where `keep`; every process calls it. The devices have a whole piece for a moment, of
    so many bytes or one row, not the whole array.

    >>> fetched(jax.numpy.arange(3.0), piece=4)
    array([0., 1., 2.], dtype=float32)
    """
    length = len(x) if x.ndim else 1
    rows = max(1, piece * length // max(x.nbytes, 1))
    if rows >= length:
        gathered = multihost_utils.process_allgather(x, tiled=True)
        return np.asarray(gathered) if keep else None
    values = np.empty(x.shape, x.dtype) if keep else None
    for begin in range(0, length, rows):
        begin = min(begin, length - rows)
        gathered = multihost_utils.process_allgather(jax.lax.dynamic_slice_in_dim(x, begin, rows), tiled=True)
        if values is not None:
            values[begin : begin + rows] = gathered
    return values


class AnyAsked:
    """Whether any process was asked to stop: an answer that all of them get at the same step.

    With several processes the answer is that of the call before, so that no device waits for it: a request is heard one
    step later.

    Args:
      request: event of this process.
    """

    def __init__(self, request: threading.Event):
        self.request = request
        self._before: object = None
        if jax.process_count() > 1:
            mesh = Mesh(np.array(jax.devices()), ("all",))
            self._split = NamedSharding(mesh, PartitionSpec("all"))
            self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def __call__(self) -> bool:
        """Every process calls it before each step."""
        if jax.process_count() == 1:
            return self.request.is_set()
        mine = np.array([self.request.is_set()])
        flags = jax.make_array_from_callback((jax.device_count(),), self._split, lambda index: mine)
        before, self._before = self._before, self._any(flags)
        return before is not None and bool(before)
