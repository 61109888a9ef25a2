"""What the sections of a configuration ask of one another, before anything is read or compiled."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.core.errors import ConfigError, UnsupportedError
from vishwamai.core.hardware import TpuChip, tpu_for
from vishwamai.core.numbers import divisors
from vishwamai.models import Decoder, ModelConfig
from vishwamai.models.checkpoint import storages
from vishwamai.models.parameters import Parameter, parameter_path
from vishwamai.models.periods import Segment, segments, stacks_layers
from vishwamai.models.published.files import is_quantized
from vishwamai.models.storage import KEEP, QUANTIZATIONS, Storage
from vishwamai.training.compiling import compiler_options
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.lora import ADAPTER_RANKS, initial_adapters, takes_adapter, target_pattern
from vishwamai.training.model import model_config, split, stacked_layers
from vishwamai.training.optimizers import optimizer
from vishwamai.training.pipeline.stages import cut, make_stages
from vishwamai.training.remat import POLICIES, memory_limit
from vishwamai.training.sharding import UNGATHERED, check_sizes, mesh_text


def check(config: TrainConfig) -> None:
    """What the sections ask of one another, and of the devices of this process.

    Raises:
      VishwamaiError: as `check_step`; and ConfigError where there are no sources, or processes without a part.
    """
    config = resolved(config)
    if not config.data.sources:
        raise ConfigError("config: data.sources is empty; name at least one source with its paths.")
    devices, processes = math.prod(dataclasses.astuple(config.mesh)), jax.process_count()
    if processes > 1 and devices != jax.device_count():
        raise ConfigError(
            f"config: {mesh_text(config.mesh)} is {devices} devices, but JAX has {jax.device_count()} in {processes} "
            "processes, and each of them takes part; set sizes of mesh whose product is that."
        )
    if config.model.param_dtype == "bfloat16" and config.model.param_rounding == "nearest":
        warnings.warn(
            "config: model.param_dtype=bfloat16 rounds each parameter after a step, and loses steps below 1/512 of it, "
            f"which most steps are at small rates (optimizer.learning_rate={config.optimizer.learning_rate:g}). "
            "Set model.param_rounding=stochastic, or model.param_dtype=float32.",
            stacklevel=2,
        )
    check_step(config, jax.device_count(), tpu_for(jax.devices()[0].device_kind))


def check_step(config: TrainConfig, available: int, chip: TpuChip | None) -> None:
    """What the sections ask of one another, but for the files of the data: what a run and a plan accept.

    Args:
      config: configuration of the run, with a resolved `model.compute_dtype`.
      available: devices of which `mesh` takes the first ones.
      chip: the TPU that they are; None for another platform.

    Raises:
      ConfigError: the text names the keys.
      UnsupportedError: the configuration asks for two things that do not work together so far.
    """
    devices = math.prod(dataclasses.astuple(config.mesh))
    stacked = stacked_layers(config) if chip is None else True
    if config.batch_size % config.microbatches:
        raise ConfigError(
            f"config: batch_size={config.batch_size} is not a multiple of microbatches={config.microbatches}; every "
            "microbatch has the same number of rows."
        )
    check_length(config)
    memory_limit(config.remat)
    compiler_options(config, chip, devices)
    if config.lora.rank and config.model.start_from is None:
        raise ConfigError("config: lora.rank trains adapters of an existing model; set model.start_from.")
    if config.lora.quantize and not config.lora.rank:
        raise ConfigError("config: lora.quantize freezes quantized weights; set lora.rank, such as 16.")
    if config.model.reduce_dtype != "float32":
        _check_reduced(config)
    if config.model.compute_dtype == "float16" and (chip is not None or config.precision == "fp8"):
        reason = f"{chip.name} has no unit for it" if chip is not None else "precision=fp8 has products of its own"
        raise UnsupportedError(f"config: model.compute_dtype=float16: {reason}; set model.compute_dtype=bfloat16.")
    if config.model.param_rounding == "stochastic" and config.model.param_dtype != "bfloat16":
        raise ConfigError(
            f"config: model.param_rounding=stochastic is for bfloat16 parameters, but model.param_dtype is "
            f"{config.model.param_dtype}; set model.param_rounding=nearest."
        )
    check_adapters(config)
    if config.precision == "fp8":
        if config.fp8.scaling != "delayed" and not config.fp8.dynamic_scale:
            raise ConfigError(
                f"config: fp8.dynamic_scale=false keeps scales, but fp8.scaling={config.fp8.scaling} has none to keep; "
                "set fp8.scaling=delayed."
            )
    if config.objective == "dpo":
        if config.model.start_from is None:
            raise ConfigError("config: objective=dpo goes on from a trained model; set model.start_from.")
        if any((config.loss.z_loss, config.loss.load_balance, config.loss.router_z_loss, config.loss.bias_rate)):
            raise ConfigError("config: objective=dpo has one loss alone; set the keys of loss to 0.")
    if config.evaluation.every and not config.data.holdout:
        raise ConfigError("config: evaluation.every needs held-out documents; set data.holdout, such as 0.01.")
    if config.optimizer.warmup_steps > config.steps:
        raise ConfigError(
            f"config: optimizer.warmup_steps={config.optimizer.warmup_steps} exceeds steps={config.steps}."
        )
    model = model_config(config, config.tokenizer.vocab_size)
    if config.mesh.pipeline > 1:
        check_pipeline(config, model, stacks_layers(stacked))
    # Any mesh.tensor divides 0, which stands for the vocab of a tokenizer that is not read yet; `make_layout` reads it.
    unknown = config.model.start_from is None and "vocab_size" not in (config.model.config or {})
    sized = dataclasses.replace(model, vocab_size=0) if unknown else model
    check_sizes(config.mesh, available, config.batch_size, config.microbatches, sized)
    if config.lora.quantize is not None:
        _check_frozen(config, config.lora.quantize, model, stacked)
    _check_names(config, model, stacked)


def _check_reduced(config: TrainConfig) -> None:
    """Raises ConfigError where gradients cannot be added up in bfloat16."""
    reduced, computed = config.model.reduce_dtype, config.model.compute_dtype
    name = f"config: model.reduce_dtype={reduced}"
    if computed != reduced:
        raise ConfigError(
            f"{name} rounds the matrices before they are gathered, but model.compute_dtype={computed} multiplies them "
            f"unrounded; set model.compute_dtype={reduced}."
        )
    if config.precision == "fp8" or config.lora.rank:
        setting = "precision=fp8" if config.precision == "fp8" else f"lora.rank={config.lora.rank}"
        raise ConfigError(f"{name} does not go with {setting}; set model.reduce_dtype=float32.")


def _check_names(config: TrainConfig, model: ModelConfig, stacked: bool | None) -> None:
    """Whether the model has what `remat`, `lora.targets` and `optimizer.groups` name, and the update rule can be made:
    by the shapes of the parameters alone.
    """

    def make(name: str, parameter: Parameter, layers: tuple[int, ...] | None) -> jax.Array:  # random keys trace slowly
        return jnp.zeros(parameter.shape if layers is None or len(layers) == 1 else (len(layers), *parameter.shape))

    model_of_shapes = nnx.eval_shape(lambda: Decoder(model, make=make, stacked=stacked))
    parts = split(model_of_shapes)
    if config.remat not in POLICIES and memory_limit(config.remat) is None:
        parts.checkpoint_policy(config.remat)
    trained, ranks = parts.params, parts.ranks
    if config.lora.rank:
        adapters = functools.partial(initial_adapters, config.lora, key=jax.random.key(0), ranks=ranks)
        trained, ranks = jax.eval_shape(adapters, trained), ADAPTER_RANKS
    stages = make_stages(config, model, trained, ranks, model_of_shapes.stacked)
    if stages is not None:
        trained = jax.eval_shape(stages.place, trained)
    optimizer(config.optimizer, config.steps, trained, ranks)


def check_adapters(config: TrainConfig) -> None:
    """Raises UnsupportedError where adapters would be trained with 8-bit products."""
    if config.precision == "fp8" and config.lora.rank:
        raise UnsupportedError(
            "config: precision=fp8 trains all parameters; with lora.rank, quantize the frozen ones by "
            "lora.quantize=fp8."
        )


def check_length(config: TrainConfig) -> None:
    """Raises ConfigError where a mesh does not divide the tokens of a row."""
    length, wide = config.data.sequence_length, config.mesh.sequence
    ends = 2 if wide > 1 and config.mesh.pipeline == 1 else 1  # of zig-zag order
    if length % (ends * wide):
        of = (
            (f"{wide}, mesh.sequence", "")
            if ends == 1
            else (f"{2 * wide}, twice mesh.sequence={wide}", " from each end")
        )
        raise ConfigError(
            f"config: data.sequence_length={length} is not a multiple of {of[0]}: each device has a piece{of[1]} of a "
            "row."
        )


def check_pipeline(config: TrainConfig, model: ModelConfig, stacked: bool) -> None:
    """What does not go through the stages of `mesh.pipeline` so far.

    Args:
      config: configuration of the run. model: model that it trains.
      stacked: True where layers are stacked without stages, too.

    Raises:
      ConfigError: the layers, the heads or the microbatches do not suit the stages.
      UnsupportedError: the configuration asks for what stages do not compute.
    """
    if config.remat == "offload":
        raise UnsupportedError(
            f"config: remat=offload with mesh.pipeline={config.mesh.pipeline} frees nothing: a stage keeps what its "
            "backward pass needs on the device, whatever the policy; set remat=full or mesh.pipeline=1."
        )
    if config.mesh.sequence > 1:
        _check_exchange(config, model)
    run, _, _ = cut(config, model)
    if config.lora.rank and not stacked:
        _check_targets(config, model, run)


def _check_targets(config: TrainConfig, model: ModelConfig, run: Segment) -> None:
    """Whether the adapters of layers that stages stack are alike."""
    pattern = target_pattern(config.lora)
    for place, kind in enumerate(run.kinds):
        targets = {
            layer: tuple(
                name
                for name, parameter in kind.parameters(model).items()
                if takes_adapter(name, len(parameter.shape)) and pattern.search(parameter_path(name, layer))
            )
            for layer in run.layers(place)
        }
        first, names = next(iter(targets.items()))
        for layer, others in targets.items():
            if others != names:
                raise UnsupportedError(
                    f"config: lora.targets={config.lora.targets!r} tells layers apart that "
                    f"mesh.pipeline={config.mesh.pipeline} stacks: it names {', '.join(names) or 'nothing'} in layer "
                    f"{first}, and {', '.join(others) or 'nothing'} in layer {layer}; write a pattern without the "
                    "number of a layer, such as layers/.*/query$, or set mesh.pipeline=1."
                )


def _check_exchange(config: TrainConfig, model: ModelConfig) -> None:
    """Whether stages can exchange the heads of a split sequence."""
    wide, heads = config.mesh.sequence, model.num_heads // config.mesh.tensor
    if heads % wide:
        fits = ", ".join(map(str, divisors(heads)))
        raise ConfigError(
            f"config: mesh.sequence={wide} with mesh.pipeline={config.mesh.pipeline} exchanges heads, and does not "
            f"divide the {heads} of a device; set mesh.sequence to one of {fits}."
        )


def _check_frozen(config: TrainConfig, quantize: str, model: ModelConfig, stacked: bool | None) -> None:
    """Whether the frozen weights can be held as `lora.quantize` says, and split as `mesh` says, by the headers of the
    checkpoint alone.
    """
    start = Path(config.model.start_from or "")
    if quantize == KEEP and not is_quantized(start):
        raise ConfigError(
            f"config: lora.quantize={KEEP}, but {start} is not published quantized; set lora.quantize to one of "
            f"{', '.join(QUANTIZATIONS)}, or null."
        )
    find: Callable[[str, Parameter, int | None], Storage | None]
    if quantize == KEEP:
        find = storages(start, model)
    else:
        find = lambda name, parameter, layer: QUANTIZATIONS[quantize] if parameter.matrix else None  # noqa: E731
    stages = config.mesh.pipeline > 1
    for segment in segments(model, stages or stacks_layers(stacked)):
        for place, kind in enumerate(segment.kinds):
            for name, parameter in kind.parameters(model).items():
                layers = segment.layers(place)
                forms_by_layer = {layer: find(name, parameter, layer) for layer in layers}
                if len(set(forms_by_layer.values())) > 1:
                    forms = ", ".join(
                        f"{form or 'a plain array'} in layer {layer}" for layer, form in forms_by_layer.items()
                    )
                    if stages:
                        remedy = "mesh.pipeline=1, or "
                    else:
                        remedy = "" if stacks_layers(None) else "remat=none, which keeps layers apart, or "
                    raise ConfigError(
                        f"config: lora.quantize={KEEP} would stack {name} of layers that differ ({forms}); set {remedy}"
                        "lora.quantize=null."
                    )
                _check_blocks(config, quantize, name, parameter, forms_by_layer[layers[0]])


def _check_blocks(config: TrainConfig, quantize: str, name: str, parameter: Parameter, storage: Storage | None) -> None:
    """No mesh axis that splits the rows of a weight for good may cut through rows that share scales."""
    if storage is None or storage.block_size is None:
        return
    if storage.shifted:
        raise ConfigError(
            f"config: lora.quantize={quantize} holds {name} as {storage}, which serving alone computes with; set "
            f"lora.quantize to one of {', '.join(QUANTIZATIONS)}, or null."
        )
    for axis, names in UNGATHERED.items():
        size, rows = getattr(config.mesh, axis), parameter.shape[-2]
        if size > 1 and parameter.axes[-2] in names and rows % (size * storage.block_size):
            raise ConfigError(
                f"config: lora.quantize={quantize} holds the {rows} rows of {name} as {storage} that share scales, and "
                f"mesh.{axis}={size} cuts them into parts of {rows / size:g}; set mesh.{axis}=1, or lora.quantize to "
                "int8 or fp8, whose scales are those of whole columns."
            )
