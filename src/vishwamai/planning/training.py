"""The training step of a configuration as a program for a slice; apart from `program`, which needs no flax."""

from __future__ import annotations

import dataclasses

import jax

from vishwamai.aot.compile.traced import Program, trace
from vishwamai.training.config import TrainConfig
from vishwamai.training.program import program_on


def trace_training(config: TrainConfig, target: str) -> Program:
    """The training step as `vishwamai train` jits it on a target, traced.

    Raises:
      VishwamaiError: as `training.program.program_on` and `planning.trace`.
    """
    program = program_on(target, config)
    traced = trace(jax.jit(program.step(), donate_argnums=0), *program.arguments, target=target)
    stages = program.shapes.stages
    ticks = None if stages is None else stages.ticks.table
    return dataclasses.replace(traced, ticks=ticks).with_options(program.options)
