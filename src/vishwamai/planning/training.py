"""The training step of a configuration as a program for a slice: shapes and shardings, no arrays."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.aot.compile import libtpu
from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.target import Target, devices_of
from vishwamai.models import Decoder, ModelConfig, read_config
from vishwamai.models.checkpoint import quantized
from vishwamai.planning.program import Program, trace
from vishwamai.training import program
from vishwamai.training.checks import check_length, check_pipeline, check_step
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.mesh import check_rows, check_units, over_all_devices, written
from vishwamai.training.model import ModelParts, split
from vishwamai.training.program import TrainingStep

Tree = Any

TPU = Target("tpu")
"""What plans are for: any TPU computes in bfloat16 by default."""


def on_slice(config: TrainConfig, target: str) -> TrainConfig:
    """The configuration with its mesh checked against a target.

    Raises:
      ConfigError: the mesh has more devices than the target, or does not divide the batch or a row; or the layers do
        not suit its stages.
      UnsupportedError: it trains adapters with 8-bit products; or stages do not compute it.
    """
    devices = devices_of(target)
    config = resolved(over_all_devices(config, devices), TPU)
    asked = math.prod(dataclasses.astuple(config.mesh))
    if asked != devices:
        raise ConfigError(
            f"config: {written(config.mesh)} is {asked} device{'s' * (asked > 1)}, but {target} has {devices}; set "
            f"mesh.fsdp={devices}, or search."
        )
    check_rows(config.mesh, config.batch_size, config.microbatches)
    check_length(config)
    if config.precision == "fp8" and config.lora.rank:
        raise UnsupportedError(
            "plan: precision=fp8 trains all parameters; with lora.rank, quantize the frozen ones by lora.quantize=fp8."
        )
    check_stages(config)
    return config


def as_planned(config: TrainConfig, target: str, *, search: bool = False) -> TrainConfig:
    """The configuration that a plan compiles, checked as `vishwamai train` checks it, but for the files of the data.

    Args:
      config: of a run. target: a chip or slice. search: other meshes are tried.

    Raises: as `training.checks.check_step` and `on_slice`.
    """
    devices = devices_of(target)
    config = resolved(over_all_devices(config, devices), TPU)
    check_step(config, devices, Target.parse_chip(target))
    return config if search else on_slice(config, target)


def check_stages(config: TrainConfig) -> None:
    """Raises ConfigError or UnsupportedError where a configuration has stages that cannot compute it."""
    if config.mesh.pipeline > 1:
        check_pipeline(config, model_config(config), stacked=True)  # as layers are on a TPU


def why_no_stages(config: TrainConfig) -> ConfigError | UnsupportedError | None:
    """What `check_stages` raises; None where it raises nothing."""
    try:
        check_stages(config)
    except (ConfigError, UnsupportedError) as error:
        return error
    return None


def narrower_moments(config: TrainConfig) -> Iterator[TrainConfig]:
    """The configuration with the optimizer's moments in fewer bits, which changes numbers.

    >>> [one.optimizer.moment_dtype for one in narrower_moments(TrainConfig())]
    ['bfloat16', 'int8']
    """
    for dtype in {"float32": ("bfloat16", "int8"), "bfloat16": ("int8",)}.get(config.optimizer.moment_dtype, ()):
        if dtype == "bfloat16" or config.optimizer.name == "adamw":
            yield dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, moment_dtype=dtype))


def training_step(config: TrainConfig, model: ModelConfig | None = None) -> TrainingStep:
    """The step's shapes; no array is made.

    Args: as `planned_parts`.

    Raises:
      ConfigError, UnsupportedError, ShapeError: the configuration describes no model that trains.
    """
    return program.training_step(config, planned_parts(config, model))


def planned_parts(config: TrainConfig, model: ModelConfig | None = None) -> ModelParts:
    """The model of a configuration as shapes, with its layers stacked, as they are on a TPU.

    Args:
      config: the configuration.
      model: in place of the one that it describes.
    """
    config, described = resolved(config, TPU), model_config(config) if model is None else model
    dtype, param_dtype = jnp.dtype(config.model.compute_dtype), jnp.dtype(config.model.param_dtype)
    make = functools.partial(Decoder, described, dtype=dtype, param_dtype=param_dtype, stacked=True)

    def made() -> Decoder:
        model = make(rngs=nnx.Rngs(0))
        start = config.model.start_from
        return model if config.lora.quantize is None else quantized(model, config.lora.quantize, start)

    return split(nnx.eval_shape(made))


def model_config(config: TrainConfig) -> ModelConfig:
    """The model that a configuration trains, without its tokenizer: the largest vocab that it may have.

    Raises:
      ConfigError: it names neither a model nor a directory, or both.
    """
    section = config.model
    if (section.start_from is None) == (section.config is None):
        raise ConfigError("config: set either model.config (a new model) or model.start_from (a directory), not both.")
    if section.start_from is not None:
        return read_config(section.start_from)
    usual = {"vocab_size": _vocab(config), "max_position_embeddings": config.data.sequence_length}
    return ModelConfig.from_dict({**usual, **(section.config or {})}, "config: model.config")


def share_of(model: ModelConfig, devices: int) -> ModelConfig:
    """A model with a device's share of what `mesh.tensor` splits.

    >>> from vishwamai.training.config import ModelSection
    >>> model = model_config(TrainConfig(model=ModelSection(config={"model_type": "llama", "hidden_size": 64,
    ...     "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4})))
    >>> part = share_of(model, 2)
    >>> part.num_heads, part.intermediate_size, part.hidden_size
    (2, 64, 64)
    """
    if devices == 1:
        return model
    check_units("tensor", devices, model)
    experts = model.experts
    if experts is not None and experts.inner_size is not None:
        experts = dataclasses.replace(experts, inner_size=experts.inner_size // devices)
    return dataclasses.replace(
        model,
        num_heads=model.num_heads // devices,
        num_kv_heads=max(model.num_kv_heads // devices, 1),
        intermediate_size=model.intermediate_size // devices,
        vocab_size=model.vocab_size // devices,
        experts=experts,
        layers=tuple(dataclasses.replace(kind, mixer=kind.mixer.part(devices)) for kind in model.layers),
    )


def _vocab(config: TrainConfig) -> int:
    if config.tokenizer.path is None:
        return config.tokenizer.vocab_size
    from tokenizers import Tokenizer

    path = Path(config.tokenizer.path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"config: tokenizer.path={config.tokenizer.path!r} has no tokenizer.json; set model.config.vocab_size and "
            "tokenizer.path to null to plan without it."
        )
    return Tokenizer.from_file(str(file)).get_vocab_size()


def trace_training(config: TrainConfig, target: str) -> Program:
    """The training step as `vishwamai train` would jit it on a target, traced.

    Raises: as `training_step`, `on_slice` and `program.trace`.
    """
    config = on_slice(config, target)
    chip, devices = Target.parse_chip(target), libtpu.devices_for(target)
    made = program.training_program(config, planned_parts(config), chip, devices)
    traced = trace(jax.jit(made.step(), donate_argnums=0), *made.arguments, target=target)
    stages = made.shapes.stages
    ticks = None if stages is None else stages.ticks.table
    return dataclasses.replace(traced, ticks=ticks).with_options(made.options)
