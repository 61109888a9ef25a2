"""Checkpoints of a run: the training state, the place in the data, and the version of their form, by Orbax.

Orbax writes in the background and completes a step's directory last, so a process that is killed leaves no torn step.
Orbax does not notice a changed byte in an array, so a checkpoint gets the checksums of its files once it is complete.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import jax
import orbax.checkpoint as ocp

from vishwamai.core import caches
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.models import remote
from vishwamai.training.step import TrainState

if TYPE_CHECKING:
    from etils import epath

_FAILURES = (OSError, RuntimeError, ValueError)
"""What Orbax and TensorStore raise where a file cannot be written."""

SCHEMA = 1
"""Version of what a checkpoint holds; it counts up when an older one cannot be read."""

CHECKSUMS = "checksums.json"
"""In the directory of a checkpoint: size and CRC-32 of each file, by its path there."""

_METADATA = "_CHECKPOINT_METADATA"
"""In the directory of a checkpoint: Orbax reads it of each, also of those that are not restored."""

CHECKPOINTS = "checkpoints"
"""Directory of the copies below `checkpoint.remote`."""

DAMAGED = "damaged-checkpoints"
"""Next to the directory of checkpoints: those that could not be read."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds: the state, and the state of the data iterator."""

    state: TrainState
    data: dict[str, object]


def described(state: TrainState) -> TrainState:
    """A state's shapes, dtypes and shardings, which `Checkpoints.restore` takes in its place."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a directory has a checkpoint that is not damaged."""
    return any(damage(path) is None for path in _steps(folder))


def damage(step: Path, only: str | None = None) -> str | None:
    """What is wrong with the directory of a checkpoint, or None. Without checksums, such as after a kill, that it has
    its parts is all that is checked.

    Args:
      step: the directory.
      only: the one file to check; None: all of them.
    """
    for part in ("about/metadata", "state"):
        if not (step / part).exists():
            return f"{part} is missing"
    try:
        checksums = json.loads((step / CHECKSUMS).read_text(encoding="utf-8"))
        for name, (size, crc) in checksums.items():
            if only not in (None, name):
                continue
            if (step / name).stat().st_size != size or caches.crc32(step / name) != crc:
                return f"{name} is not as it was written"
    except FileNotFoundError as error:
        missing = Path(error.filename)
        return None if missing.name == CHECKSUMS else f"{missing.relative_to(step)} is missing"
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS} is not as it was written"
    return None


def _seal(step: Path) -> None:
    """Writes the checksums of a complete checkpoint."""
    with contextlib.suppress(OSError):  # a checkpoint without checksums is one all the same
        paths = sorted(path for path in step.rglob("*") if path.is_file())
        sums = {str(path.relative_to(step)): (path.stat().st_size, caches.crc32(path)) for path in paths}
        caches.write(step / CHECKSUMS, json.dumps(sums))


def _steps(folder: Path) -> Iterator[Path]:
    """The directories of checkpoints, the newest first."""
    names = [path for path in folder.iterdir() if path.name.isdigit()] if folder.is_dir() else []
    yield from sorted(names, key=lambda path: -int(path.name))


def set_damaged_aside(folder: Path) -> None:
    """Moves the checkpoints of a directory that are damaged, and newer than the newest whole one, out of the way, each
    with a warning; of the older ones, those whose metadata are damaged. One process calls it.
    """
    restorable = False
    for path in _steps(folder):
        reason = damage(path, only=_METADATA if restorable else None)
        if reason is not None:
            _set_aside(path, reason)
        restorable |= reason is None


def _set_aside(path: Path, reason: str) -> None:
    place = path.parent.parent / DAMAGED / path.name
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(exist_ok=True)
    path.rename(place)
    older = next(_steps(path.parent), None)
    start = "begins anew" if older is None else f"goes on from that of step {older.name}"
    warnings.warn(
        f"resume: the checkpoint of step {path.name} is damaged: {reason}. It was moved to {place}; remove it. The run "
        f"{start}.",
        stacklevel=3,
    )


def fetch_newest(address: str, folder: Path) -> None:
    """Copies the newest whole checkpoint of an address into a directory of checkpoints, unless that has one as new.

    Raises:
      DeviceError: the address cannot be reached or read.
    """
    source = remote.remote_path(address) / CHECKPOINTS
    newest = max((int(path.name) for path in _steps(folder) if damage(path) is None), default=-1)
    for step in sorted(_remote_steps(source), reverse=True):
        if step <= newest:
            return
        folder.mkdir(parents=True, exist_ok=True)
        with caches.temporary_directory(folder.parent) as draft:
            remote.receive(source / str(step), draft / str(step))
            reason = damage(draft / str(step))
            if reason is None:
                shutil.rmtree(folder / str(step), ignore_errors=True)
                (draft / str(step)).rename(folder / str(step))
                return
        warnings.warn(f"resume: the copy of step {step} in {address} is damaged: {reason}.", stacklevel=2)


def _remote_steps(source: epath.Path) -> list[int]:
    """The steps whose copy is complete."""
    paths = source.iterdir() if source.exists() else ()
    return [int(path.name) for path in paths if path.name.isdigit() and (path / CHECKSUMS).exists()]


class Checkpoints:
    """The checkpoints in a directory, of which the newest `keep` are kept; a context manager that waits for the last.

    >>> import tempfile, jax.numpy as jnp, optax
    >>> from vishwamai.training.step import initial_state
    >>> state = initial_state({"w": jnp.ones(3)}, optax.sgd(0.1))
    >>> folder = tempfile.mkdtemp()
    >>> with Checkpoints(folder, keep=2) as checkpoints:
    ...     checkpoints.save(5, state, {"next_index": 5})
    >>> with Checkpoints(folder, keep=2) as checkpoints:
    ...     checkpoints.restore(state).data
    {'next_index': 5}
    """

    def __init__(self, folder: str | Path, keep: int, address: str | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self.folder, self._keep, self._remote = Path(folder).absolute(), keep, address
        self._sent: concurrent.futures.Future[None] | None = None
        self._manager = ocp.CheckpointManager(self.folder, options=options)
        self._sealing = concurrent.futures.ThreadPoolExecutor(1) if jax.process_index() == 0 else None
        self._started: int | None = None  # the step of the newest checkpoint, which may not be complete

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._manager.wait_until_finished()
            self._manager.close()
            self._seal_begun()
        except _FAILURES as failure:
            if error is None:
                raise self._unwritten(failure) from failure
        finally:
            if self._sealing is not None:
                self._sealing.shutdown()
        if error is None and self._sent is not None:
            self._sent.result()

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, object]) -> None:
        """Begins to write a checkpoint; an error of the one before, such as a full disk, is raised here or at the end.

        Raises:
          DeviceError: one could not be written.
        """
        if step == self.latest():
            return
        about = {"schema": SCHEMA, "data": data}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        try:
            self._manager.wait_until_finished()  # as `save` does itself
            self._seal_begun()
            self._manager.save(step, args=parts)
        except _FAILURES as failure:
            raise self._unwritten(failure) from failure
        self._started = step

    def _seal_begun(self) -> None:
        """Begins to write the checksums of the newest checkpoint, which is complete; reading it takes a while."""
        if self._started is not None and self._sealing is not None:
            if self._sent is not None and self._sent.done():
                self._sent.result()  # an error of the copy before
            self._sent = self._sealing.submit(self._seal_and_send, self.folder / str(self._started))
            if self._keep == 1 or self._remote:  # Orbax removes old directories while the next one is written
                self._sent.result()
        self._started = None

    def _seal_and_send(self, step: Path) -> None:
        _seal(step)
        if self._remote is not None:
            target = remote.remote_path(self._remote) / CHECKPOINTS
            remote.send(step, target / step.name, CHECKSUMS)
            for old in sorted(_remote_steps(target), reverse=True)[self._keep :]:
                (target / str(old) / CHECKSUMS).unlink()  # what is removed in part does not count
                (target / str(old)).rmtree()

    def _unwritten(self, failure: BaseException) -> DeviceError:
        # The manager counts a step that it has begun to write; a directory has its name when it is whole.
        last_step = max((int(p.name) for p in self.folder.iterdir() if p.name.isdigit()), default=None)
        left = (
            "There is no whole checkpoint"
            if last_step is None
            else f"The newest whole checkpoint is that of step {last_step}"
        )
        reason = next((line for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
        return DeviceError(
            f"train: a checkpoint could not be written to {self.folder}: {reason[:300]} {left}; make room there, and "
            "go on with --resume."
        )

    def restore(self, like: TrainState) -> Restored:
        """The newest checkpoint with the shapes, dtypes and shardings of `like`, which may lie on another mesh than it
        was saved from. One that a kill left without checksums, and that cannot be read, is set aside with a warning;
        where there are several processes it is an error.

        Args:
          like: a state, or its `jax.ShapeDtypeStruct`s.

        Raises:
          ConfigError: there is none, or its form or its shapes are others.
        """
        while (step := self.latest()) is not None:
            place = self.folder / str(step)
            try:
                return self._read(step, described(like))
            except ConfigError:
                raise
            except Exception as error:  # Orbax and TensorStore raise of every kind, `Exception` itself among them
                reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:300]
                if (place / CHECKSUMS).exists():
                    raise ConfigError(
                        f"resume: the checkpoint of step {step} is of another model or optimizer: {reason}"
                    ) from error
                if jax.process_count() > 1:
                    raise ConfigError(
                        f"resume: the checkpoint of step {step} cannot be read: {reason} Remove {place}; --resume then "
                        "goes on from the one before."
                    ) from error
            _set_aside(place, reason)
            self._manager.reload()
        raise ConfigError(f"resume: {self.folder} holds no complete checkpoint; start without --resume.")

    def _read(self, step: int, like: TrainState) -> Restored:
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        if about["schema"] != SCHEMA:
            raise ConfigError(
                f"resume: the checkpoint of step {step} has schema {about['schema']}; this version reads {SCHEMA}. "
                "Resume with the version that wrote it."
            )
        parts = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(like)))
        return Restored(parts["state"], about["data"])
