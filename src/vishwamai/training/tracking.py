"""Trackers of experiments: each gets the numbers of every record of a run.

A tracker is a function of (step, numbers) and a function that ends it. TensorBoard's events are files of the run. wandb
and trackio write next to them without network where their own variables say so (`WANDB_MODE=offline`).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from vishwamai.core.errors import ConfigError
from vishwamai.core.installing import install_line
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import to_dict

_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}
_IDS = "trackers.json"
"""In the directory of a run: the ids of its runs in services, by tracker."""


@dataclasses.dataclass(frozen=True)
class Tracker:
    """Where the numbers of a run go.

    Attributes:
      log: called with a step and its numbers.
      close: called once, at the end.
    """

    log: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def trackers_of(config: TrainConfig) -> tuple[str, ...]:
    """The trackers that a configuration names, `log.tensorboard` among them.

    >>> from vishwamai.training import read_config
    >>> trackers_of(read_config(None, ["log.trackers=[trackio]", "log.tensorboard=true"]))
    ('tensorboard', 'trackio')
    """
    first = ("tensorboard",) if config.log.tensorboard else ()
    return tuple(dict.fromkeys((*first, *config.log.trackers)))


def check_trackers(config: TrainConfig) -> None:
    """
    Raises:
      ConfigError: the package of a tracker is not installed.
    """
    for name in trackers_of(config):
        if importlib.util.find_spec(_PACKAGES[name]) is None:
            raise ConfigError(
                f"config: log.trackers has {name}, which needs the package {_PACKAGES[name]}: {install_line('track')}."
            )


def open_trackers(config: TrainConfig, folder: Path, last: int) -> list[Tracker]:
    """Begins the trackers of a run, or goes on with them.

    Args:
      config: configuration of the run.
      folder: directory of the run.
      last: the step from which the run goes on.
    """
    makers = {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}
    return [makers[name](config, folder, last) for name in trackers_of(config)]


def _tensorboard(config: TrainConfig, folder: Path, last: int) -> Tracker:
    from tensorboardX import SummaryWriter

    # The suffix tells files of one second from one another.
    events = SummaryWriter(str(folder / "tensorboard"), purge_step=last + 1, filename_suffix=f".{last}")

    def log(step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            events.add_scalar(name, value, step)

    return Tracker(log, events.close)


def _wandb(config: TrainConfig, folder: Path, last: int) -> Tracker:
    import wandb

    run = wandb.init(
        project=config.log.project,
        name=folder.resolve().name,
        dir=str(folder),
        id=_run_id(folder, "wandb"),
        resume="allow",
        config=to_dict(config),
    )
    run.define_metric("*", step_metric="step")  # a step that is trained again is a second point, not an error
    return Tracker(lambda step, numbers: run.log({"step": step, **numbers}), run.finish)


def _trackio(config: TrainConfig, folder: Path, last: int) -> Tracker:
    import trackio

    trackio.init(project=config.log.project, name=folder.resolve().name, resume="allow", config=to_dict(config))
    return Tracker(lambda step, numbers: trackio.log(dict(numbers), step=step), trackio.finish)


def _run_id(folder: Path, tracker: str) -> str:
    """The id of this run in a service, the same after a resumption."""
    path = folder / _IDS
    ids = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if tracker not in ids:
        ids[tracker] = uuid.uuid4().hex[:16]
        path.write_text(json.dumps(ids), encoding="utf-8")
    return ids[tracker]
