"""`MemoryPlanner`: the memory of a step from three sizes, by class, and the same program compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ConfigError, ShapeError
from vishwamai.core.figures import Level
from vishwamai.core.target import Target, devices_of
from vishwamai.core.types import PyTree
from vishwamai.models import ModelConfig
from vishwamai.planning.memory.analytic import Breakdown, serving_memory, training_memory
from vishwamai.planning.memory.compiler import Compiler, ProgramMemory
from vishwamai.planning.serving import Serving, trace_serving
from vishwamai.planning.training import trace_training
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import from_dict
from vishwamai.training.slices import TPU

PURPOSES = ("training", "serving")
SERVED = ("bfloat16", "float16", "float32", "int8", "float8_e4m3fn")
"""Dtypes of a served model's parameters, keys and values."""


class Allocation(dict[str, int]):
    """Bytes of one device by class, with "total" and "free", which is negative where the step does not fit.

    Attributes:
      level: level of all figures, "analytic". target: chip or slice.
      limit: bytes that the compiler lets one device use.
      subject: the training configuration, or what is served.
    """

    def __init__(self, breakdown: Breakdown, subject: TrainConfig | Serving):
        parts = {name: round(part.value) for name, part in breakdown.parts.items()}
        total = sum(parts.values())
        super().__init__(parts, total=total, free=breakdown.limit - total)
        self.level: Level = breakdown.total.level
        self.target, self.limit, self.subject = breakdown.target, breakdown.limit, subject

    @property
    def fits(self) -> bool:
        """Whether one device holds the step."""
        return self["free"] >= 0

    def probe(self) -> ProgramMemory:
        """The compiler's total of the same program, before it compiles it. Raises: as `planning.probe`."""
        return self._compiled("probe")

    def verify(self) -> ProgramMemory:
        """The memory of the same program as it is compiled, to the byte. Raises: as `planning.verify`."""
        return self._compiled("verify")

    def _compiled(self, question: str) -> ProgramMemory:
        subject, target = self.subject, self.target
        program = trace_serving(subject, target) if isinstance(subject, Serving) else trace_training(subject, target)
        with Compiler() as compiler:
            return getattr(compiler, question)(program)


@checked
@dataclasses.dataclass(frozen=True)
class MemoryPlanner:
    """What a training or decoding step of a decoder takes on each device of a target.

    Attributes:
      model: keys of a Hugging Face config.json. Those that are not given are a Llama's of 32 layers, with a vocab of
        32,000, heads of 128 and 8/3 of the width within the feed-forward layer.
      target: a chip, or a slice such as "v5e:4x4". A training step splits parameters over all its devices
        (`mesh.fsdp`) unless `step` says otherwise; serving takes one device.
      purpose: "training" or "serving".
      step: keys of a training configuration (docs/training.md), such as `{"remat": "full"}`; or "dtype", "kv_dtype"
        and "page_size" of serving.

    Raises:
      ShapeError: the purpose is unknown, or a key is no text.
      DeviceError: the target is unknown.

    >>> planner = MemoryPlanner({"num_hidden_layers": 2, "vocab_size": 512}, "v5e")
    >>> found = planner.allocate(batch_size=4, sequence_length=64, hidden_dim=128)
    >>> found["parameters"], found["optimizer"] > 2 * found["parameters"], found.level, found.fits
    (2624000, True, 'analytic', True)
    >>> found["total"] + found["free"] == found.limit
    True
    """

    model: Mapping[str, Any] | None = None
    target: str = "v5e"
    purpose: str = "training"
    step: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.purpose not in PURPOSES:
            raise ShapeError(f"MemoryPlanner: `purpose` is {self.purpose!r}; pass 'training' or 'serving'.")
        for name in ("model", "step"):
            keys = getattr(self, name) or {}
            if not all(isinstance(key, str) for key in keys):
                raise ShapeError(f"MemoryPlanner: `{name}` has the keys {list(keys)}; pass names as text.")
        Target.parse_chip(self.target)

    def allocate(self, batch_size: int, sequence_length: int, hidden_dim: int) -> Allocation:
        """Bytes of one device, by formulas; no compiler is asked.

        Args:
          batch_size: rows of a step over all devices, or sequences that are served at once.
          sequence_length: tokens of a row, or of a sequence at its end.
          hidden_dim: width of the model, its `hidden_size`.

        Returns:
          The dictionary `{"parameters": ..., "gradients": ..., "optimizer": ..., "activations": ..., "kv": ...,
          "states": ..., "temporaries": ..., "total": ..., "free": ...}`; its `verify()` compiles the step.

        Raises:
          ShapeError: a size is not positive, or `model` states another width.
          ConfigError, UnsupportedError, DeviceError: the model, the step or the target cannot be planned.
        """
        subject = self.subject(batch_size, sequence_length, hidden_dim)
        if isinstance(subject, Serving):
            return Allocation(serving_memory(subject, self.target), subject)
        return Allocation(training_memory(subject, self.target), subject)

    def subject(self, batch_size: int, sequence_length: int, hidden_dim: int) -> TrainConfig | Serving:
        """What is planned: a training configuration, or what is served. Args, Raises: as `allocate`."""
        sizes = {"batch_size": batch_size, "sequence_length": sequence_length, "hidden_dim": hidden_dim}
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ShapeError(f"allocate: `{name}` is {value!r}; pass a positive whole number.")
        model = llama_like(hidden_dim, sequence_length) | dict(self.model or {})
        if model["hidden_size"] != hidden_dim:
            raise ShapeError(
                f"allocate: `hidden_dim` is {hidden_dim}, but the planner's model has hidden_size="
                f"{model['hidden_size']}; pass that, or leave hidden_size out of the model."
            )
        step = dict(self.step or {})
        if self.purpose == "serving":
            options = {field.name for field in dataclasses.fields(Serving)} - {"config", "batch_size", "length"}
            if set(step) - options:
                raise ConfigError(
                    f"MemoryPlanner: serving has no key {', '.join(sorted(set(step) - options))}; it has "
                    f"{', '.join(sorted(options))}."
                )
            for name in options & {"dtype", "kv_dtype"} & set(step):
                if step[name] not in SERVED:
                    raise ConfigError(f"MemoryPlanner: {name} is {step[name]!r}; pass one of {', '.join(SERVED)}.")
            config = ModelConfig.from_dict(model, "MemoryPlanner: model")
            return Serving(config, batch_size, sequence_length, **step)
        return training_config(model, step, self.target, batch_size, sequence_length)


def llama_like(hidden_dim: int, sequence_length: int) -> dict[str, object]:
    """Keys of a Llama of a width; what `MemoryPlanner` says of them.

    >>> {name: llama_like(4096, 2048)[name] for name in ("intermediate_size", "num_attention_heads")}
    {'intermediate_size': 11008, 'num_attention_heads': 32}
    """
    return {
        "model_type": "llama",
        "vocab_size": 32_000,
        "hidden_size": hidden_dim,
        "intermediate_size": math.ceil(hidden_dim * 8 / 3 / 256) * 256,  # as Llama rounds it
        "num_hidden_layers": 32,
        "num_attention_heads": max(1, hidden_dim // 128),
        "max_position_embeddings": sequence_length,
    }


def training_config(
    model: Mapping[str, PyTree], step: Mapping[str, object], target: str, batch_size: int, sequence_length: int
) -> TrainConfig:
    """The training configuration of a model on a target; products are bfloat16 unless `step` says otherwise.

    Raises:
      ConfigError: `step` has an unknown key, or a value of another type; or a row has more tokens than positions count.
    """
    if sequence_length >= 2**31:
        raise ConfigError(
            f"config: data.sequence_length is {sequence_length}; positions are 32-bit integers, so pass less than "
            "2**31."
        )
    values = {"mesh": {"fsdp": devices_of(target)}, **step, "batch_size": batch_size}
    for name in ("model", "data"):
        if not isinstance(values.get(name, {}), Mapping):
            raise ConfigError(f"config: {name} is {values[name]!r}; expected a section, a dictionary.")
    values["model"] = {**values.get("model", {}), "config": dict(model)}
    values["data"] = {**values.get("data", {}), "sequence_length": sequence_length}
    return resolved(from_dict(values), TPU)
