"""Checkpoints of a run: the training state, the place in the data, and the version of their form, by Orbax.

Orbax writes in the background and completes a step's directory last, so a process that is killed leaves no torn step.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import orbax.checkpoint as ocp

from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.training.step import TrainState

_FAILURES = (OSError, RuntimeError, ValueError)
"""What Orbax and TensorStore raise where a file cannot be written."""

SCHEMA = 1
"""Version of what a checkpoint holds; it counts up when an older one cannot be read."""


@dataclasses.dataclass(frozen=True)
class Restored:
    """What a checkpoint holds: the state, and the state of the data iterator."""

    state: TrainState
    data: dict[str, Any]


def described(state: TrainState) -> TrainState:
    """A state's shapes, dtypes and shardings, which `Checkpoints.restore` takes in its place."""
    return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a directory has a complete checkpoint, whose name is its step."""
    return folder.is_dir() and any(path.name.isdigit() for path in folder.iterdir())


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

    def __init__(self, folder: str | Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        self.folder = Path(folder).absolute()
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._manager.wait_until_finished()
            self._manager.close()
        except _FAILURES as failure:
            if error is None:
                raise self._unwritten(failure) from failure

    def latest(self) -> int | None:
        """The newest complete step, or None."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, data: dict[str, Any]) -> None:
        """Begins to write a checkpoint; an error of the one before, such as a full disk, is raised here or at the end.

        Raises:
          DeviceError: one could not be written.
        """
        if step == self.latest():
            return
        about = {"schema": SCHEMA, "data": data}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        try:
            self._manager.save(step, args=parts)
        except _FAILURES as failure:
            raise self._unwritten(failure) from failure

    def _unwritten(self, failure: BaseException) -> DeviceError:
        # The manager counts a step that it has begun to write; a directory has its name when it is whole.
        whole = max((int(p.name) for p in self.folder.iterdir() if p.name.isdigit()), default=None)
        left = (
            "There is no whole checkpoint" if whole is None else f"The newest whole checkpoint is that of step {whole}"
        )
        reason = next((line for line in str(failure).splitlines() if line.strip()), type(failure).__name__)
        return DeviceError(
            f"train: a checkpoint could not be written to {self.folder}: {reason[:300]} {left}; make room there, and "
            "go on with --resume."
        )

    def restore(self, like: TrainState, step: int | None = None) -> Restored:
        """A checkpoint with the shapes, dtypes and shardings of `like`, which may lie on another mesh than it was saved
        from.

        Args:
          like: a state, or its `jax.ShapeDtypeStruct`s.
          step: which; None is the newest.

        Raises:
          ConfigError: there is none, or its form or its shapes are others.
        """
        step = self.latest() if step is None else step
        if step is None:
            raise ConfigError(f"resume: {self.folder} holds no complete checkpoint; start without --resume.")
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        if about["schema"] != SCHEMA:
            raise ConfigError(
                f"resume: the checkpoint of step {step} has schema {about['schema']}; this version reads {SCHEMA}. "
                "Resume with the version that wrote it."
            )
        wanted = described(like)
        try:
            found = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(wanted)))
        except ValueError as error:
            raise ConfigError(
                f"resume: the checkpoint of step {step} is of another model or optimizer: {error}"
            ) from error
        return Restored(found["state"], about["data"])
