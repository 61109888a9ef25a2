"""A configuration on the devices of a TPU target, which need not be there: a plan accepts what a run accepts."""

from __future__ import annotations

import dataclasses
import math

from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.target import Target, devices_of
from vishwamai.training.checks import check_adapters, check_length, check_pipeline, check_step
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.model import model_config
from vishwamai.training.sharding import check_rows, mesh_text, over_all_devices

TPU = Target("tpu")
"""Any TPU, for `compute_dtype.resolved`."""


def checked_for(target: str, config: TrainConfig, *, search: bool = False) -> TrainConfig:
    """The configuration on a target, checked as `vishwamai train` checks it there, but for the files of the data.

    Args:
      target: chip or slice.
      config: configuration of a run.
      search: True where other meshes are tried, so that its own need not have all devices.

    Raises:
      VishwamaiError: as `checks.check_step` and `on_slice`.
    """
    devices = devices_of(target)
    config = resolved(over_all_devices(config, devices), TPU)
    check_step(config, devices, Target.parse_chip(target))
    return config if search else on_slice(config, target)


def on_slice(config: TrainConfig, target: str) -> TrainConfig:
    """The configuration resolved for a target, with its mesh, rows and stages checked: of `check_step`, what differs
    between the candidates of a search.

    Raises:
      ConfigError: the mesh has not the devices of the target, or does not divide the batch or a row; or the layers do
        not suit its stages.
      UnsupportedError: it trains adapters with 8-bit products, or stages do not compute it.
    """
    devices = devices_of(target)
    config = resolved(over_all_devices(config, devices), TPU)
    size = math.prod(dataclasses.astuple(config.mesh))
    if size != devices:
        raise ConfigError(
            f"config: {mesh_text(config.mesh)} is {size} device{'s' * (size > 1)}, but {target} has {devices}; set "
            f"mesh.fsdp={devices}, or search."
        )
    check_rows(config.mesh, config.batch_size, config.microbatches)
    check_length(config)
    check_adapters(config)
    check_stages(config)
    return config


def check_stages(config: TrainConfig) -> None:
    """Raises ConfigError or UnsupportedError where a configuration has stages that cannot compute it."""
    if config.mesh.pipeline > 1:
        check_pipeline(config, model_config(config), stacked=True)  # as layers are on a TPU


def why_no_stages(config: TrainConfig) -> ConfigError | UnsupportedError | None:
    """The error of `check_stages`; None where it raises none."""
    try:
        check_stages(config)
    except (ConfigError, UnsupportedError) as error:
        return error
    return None
