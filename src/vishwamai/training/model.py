"""The model of a run: made new or read, and taken apart for the step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from vishwamai.core.errors import ConfigError
from vishwamai.core.types import PyTree
from vishwamai.models import Decoder, ModelConfig, from_pretrained, read_config
from vishwamai.models.checkpoint import quantized
from vishwamai.models.families import FAMILIES
from vishwamai.models.hub import HubModel, local_model
from vishwamai.models.parameters import parameter_axes
from vishwamai.models.remote import address
from vishwamai.training.chat import end_of_text
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.remat import Policy, checkpoint_policy

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A model as values: `nnx.merge(graph, params, rest)` is the module.

    Attributes:
      config: configuration of the model.
      graph: its structure. params: its parameters, nested dictionaries, or their shapes. rest: its other variables.
      new: makes the parameters of a new model; None where `params` has arrays.
    """

    config: ModelConfig
    graph: nnx.GraphDef[Decoder]
    params: PyTree
    rest: PyTree
    new: Callable[[], PyTree] | None = None

    @property
    def axes(self) -> dict[str, tuple[str | None, ...]]:
        """Logical names of each parameter's axes by the last name of its path, without the axis of stacked layers."""
        return parameter_axes(self.config)

    @property
    def ranks(self) -> dict[str, int]:
        """The number of each parameter's axes, as `axes`."""
        return {name: len(names) for name, names in self.axes.items()}

    @property
    def stacked(self) -> bool:
        """Whether layers that repeat are stacked."""
        return self.merge(self.params).stacked

    @property
    def described(self) -> ModelParts:
        """The same with the shapes of the parameters."""
        return dataclasses.replace(self, params=jax.eval_shape(lambda: self.params), new=None)

    def checkpoint_policy(self, policy: str) -> Policy | None:
        """What the backward pass keeps under a policy of `remat`, as `jax.checkpoint` takes it."""
        policies: list[Policy | None] = []
        jax.eval_shape(lambda params: policies.append(checkpoint_policy(self.merge(params), policy)), self.params)
        return policies[0]

    def merge(self, params: PyTree) -> Decoder:
        """The module with these parameters."""
        return nnx.merge(self.graph, params, self.rest)


def split(model: Decoder) -> ModelParts:
    """A module as values."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    return ModelParts(model.config, graph, nnx.to_pure_dict(params), rest)


def with_local_model(config: TrainConfig, weights: bool = True) -> TrainConfig:
    """The configuration with directories in place of names of the Hub; `weights`: those are fetched too.

    Raises:
      ShapeError, DeviceError: as `vishwamai.models.hub.local_model`.
    """

    def local(path: str | None, weights: bool) -> str | None:
        if path is None or (HubModel.parse(path) is None and address(path) is None):
            return None
        return str(local_model(path, weights))

    model, tokenizer = config.model, config.tokenizer
    start, path = local(model.start_from, weights), local(tokenizer.path, False)
    return dataclasses.replace(
        config,
        model=model if start is None else dataclasses.replace(model, start_from=start),
        tokenizer=tokenizer if path is None else dataclasses.replace(tokenizer, path=path),
    )


def model_config(config: TrainConfig, vocab: int | None = None, **defaults: object) -> ModelConfig:
    """The model that a configuration trains, without its weights.

    Args:
      config: configuration of the run.
      vocab: tokens of its tokenizer; None for those of `tokenizer.path`, or the most that a new one may have.
      defaults: further keys that `model.config` may leave out.

    Raises:
      ConfigError: the section model has neither `config` nor `start_from`, or both; or `tokenizer.path` has no file.
    """
    section = config.model
    if (section.start_from is None) == (section.config is None):
        raise ConfigError("config: set either model.config (a new model) or model.start_from (a directory), not both.")
    if section.start_from is not None:
        return read_config(section.start_from)
    keys = section.config or {}
    if vocab is None and "vocab_size" not in keys:
        vocab = _vocab(config)
    defaults |= {"vocab_size": vocab, "max_position_embeddings": config.data.sequence_length}
    family = FAMILIES.get(str(keys.get("model_type")))
    aliases = {} if family is None else family.aliases
    names = {aliases.get(key, key) for key in keys}
    defaults = {key: value for key, value in defaults.items() if aliases.get(key, key) not in names}
    return ModelConfig.from_dict({**defaults, **keys}, "config: model.config")


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


def stacked_layers(config: TrainConfig) -> bool | None:
    """What `Decoder` takes as `stacked`: XLA on the CPU merges what is recomputed with the first computation, except in
    the body of a loop over the layers.
    """
    return None if config.remat == "none" else True


def model_shapes(config: TrainConfig, model: ModelConfig | None = None, stacked: bool | None = True) -> ModelParts:
    """The model of a configuration as shapes; no array is made.

    Args:
      config: configuration with a resolved `model.compute_dtype`.
      model: model in place of the one that it describes.
      stacked: stacking as `Decoder` takes it; layers are stacked on a TPU.

    Raises:
      ConfigError, UnsupportedError, ShapeError: the configuration describes no model that trains.
    """
    decoder = _decoder(config, model_config(config) if model is None else model, stacked)

    def create() -> Decoder:
        model_without_arrays = decoder()
        quantize = config.lora.quantize
        return (
            model_without_arrays
            if quantize is None
            else quantized(model_without_arrays, quantize, config.model.start_from)
        )

    return split(nnx.eval_shape(create))


def _decoder(config: TrainConfig, model: ModelConfig, stacked: bool | None) -> Callable[[], Decoder]:
    """Makes a new model with random weights of the configuration's seed."""
    dtype, param_dtype = jnp.dtype(config.model.compute_dtype), jnp.dtype(config.model.param_dtype)

    def create() -> Decoder:
        return Decoder(model, rngs=nnx.Rngs(config.seed), dtype=dtype, param_dtype=param_dtype, stacked=stacked)

    return create


def make_model(config: TrainConfig, tokenizer: Tokenizer) -> ModelParts:
    """The model that a configuration describes: a new one, with random weights of its seed, as shapes and `new`; that
    of `model.start_from` with its arrays. Over several devices they lie in the memory of the host.

    Raises:
      ConfigError: the section says neither or both, or the model's vocab is smaller than the tokenizer's.
    """
    config = resolved(config)
    section, stacked = config.model, stacked_layers(config)
    if section.start_from is not None and section.config is None:
        with host_memory(config):
            model = from_pretrained(
                section.start_from,
                dtype=jnp.dtype(section.param_dtype),
                stacked=stacked,
                quantize=config.lora.quantize,
            )
        model.dtype = jnp.dtype(section.compute_dtype)  # of activations; the reader has one dtype for both
        parts = split(model)
    else:
        end = tokenizer.token_to_id(end_of_text(config))
        decoder = _decoder(config, model_config(config, tokenizer.get_vocab_size(), eos_token_id=end), stacked)
        parts = dataclasses.replace(split(nnx.eval_shape(decoder)), new=lambda: split(decoder()).params)
    if parts.config.vocab_size < tokenizer.get_vocab_size():
        raise ConfigError(
            f"config: the model has a vocab of {parts.config.vocab_size}, but the tokenizer has "
            f"{tokenizer.get_vocab_size()} tokens; set model.config.vocab_size to at least that."
        )
    return parts


def host_memory(config: TrainConfig) -> contextlib.AbstractContextManager[object]:
    """Where arrays are made in the memory of the host, if the model does not have to fit one device."""
    if math.prod(vars(config.mesh).values()) == 1:
        return contextlib.nullcontext()
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return contextlib.nullcontext()
