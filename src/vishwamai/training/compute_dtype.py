"""`model.compute_dtype: auto` as the dtype of a chip: bfloat16 where its units multiply it, else float32.

A run and a plan resolve it once, before anything is checked or traced. Parameters, moments and sums stay in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from vishwamai.core.config import ambient_target
from vishwamai.core.target import Target
from vishwamai.training.config import AUTO, ComputeDtype, TrainConfig
from vishwamai.training.config_file import from_dict, load_yaml
from vishwamai.training.together import as_first, first_alone

_DTYPES: tuple[ComputeDtype, ...] = ("float32", "bfloat16", "float16")


def resolved(config: TrainConfig, target: Target | None = None) -> TrainConfig:
    """The configuration with the dtype of a target in place of "auto"; any other dtype stays.

    Args:
      config: configuration of a run or a plan.
      target: chip that computes; None for this machine's.

    >>> [resolved(TrainConfig(), Target.parse(name)).model.compute_dtype for name in ("v5e", "cpu:avx2", "cpu:amx")]
    ['bfloat16', 'float32', 'bfloat16']
    """
    if config.model.compute_dtype != AUTO:
        return config
    return _with_dtype(config, "bfloat16" if (target or ambient_target()).multiplies_bfloat16 else "float32")


def resolved_for_run(config: TrainConfig, folder: Path) -> TrainConfig:
    """`resolved` for the run in a directory, which keeps the dtype of its `config.yaml` on any machine that resumes it.

    Every process of a run calls this, and gets the dtype of process 0.

    Args:
      config: configuration of the run.
      folder: directory of the run, which need not exist.

    Raises:
      ConfigError: `config.yaml` is damaged.
    """
    if config.model.compute_dtype != AUTO:
        return config
    number = first_alone(lambda: _DTYPES.index(as_recorded(config, folder).model.compute_dtype))
    return _with_dtype(config, _DTYPES[as_first(number or 0)])


def as_recorded(config: TrainConfig, folder: Path) -> TrainConfig:
    """`resolved_for_run` for this process alone. Args, Raises: as there."""
    if config.model.compute_dtype == AUTO and (record := folder / "config.yaml").exists():
        config = _with_dtype(config, from_dict(load_yaml(record.read_text(encoding="utf-8"))).model.compute_dtype)
    return resolved(config)


def _with_dtype(config: TrainConfig, dtype: ComputeDtype) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, compute_dtype=dtype))
