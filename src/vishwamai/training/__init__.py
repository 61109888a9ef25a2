"""Trains decoders: one loop (`run`) over a program that a configuration describes (`program`); see docs/training.md.

In reading order: `config` (every key), `program` (shapes, shardings, the step), `losses` (of a batch), `step` (one
update), `job` (the program filled with arrays), `run` (the loop). `checks`, `compute_dtype` and `slices` resolve and
check a configuration. `data`, `tokens`, `packing` and `chat` make batches of documents. `optimizers` has the update
rules, `sharding` the placement of arrays, `gather` the gathers of parameters, `pipeline` the stages, `checkpoints` and
`records` the files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vishwamai.training.config import TrainConfig
    from vishwamai.training.config_file import read_config
    from vishwamai.training.data import prepare, training_batches
    from vishwamai.training.fp8 import FP8Optimizer
    from vishwamai.training.optimizers import optimizer, schedule
    from vishwamai.training.program import TrainingProgram, training_program
    from vishwamai.training.records import Record
    from vishwamai.training.remat import apply_gradient_checkpointing
    from vishwamai.training.run import train
    from vishwamai.training.step import TrainState, initial_state, train_step

__all__ = [
    "FP8Optimizer",
    "Record",
    "TrainConfig",
    "TrainState",
    "TrainingProgram",
    "apply_gradient_checkpointing",
    "initial_state",
    "optimizer",
    "prepare",
    "read_config",
    "schedule",
    "train",
    "train_step",
    "training_batches",
    "training_program",
]

_HOMES = {
    "FP8Optimizer": "fp8",
    "Record": "records",
    "TrainConfig": "config",
    "TrainState": "step",
    "TrainingProgram": "program",
    "apply_gradient_checkpointing": "remat",
    "initial_state": "step",
    "optimizer": "optimizers",
    "prepare": "data",
    "read_config": "config_file",
    "schedule": "optimizers",
    "train": "run",
    "train_step": "step",
    "training_batches": "data",
    "training_program": "program",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
