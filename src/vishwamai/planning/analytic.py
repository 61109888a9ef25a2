"""Memory by class, from shapes alone: the analytic level for training steps and serving.

The parts of a training step are exact sums of shapes: parameters, gradients, what the optimizer and the backward pass
keep. When they are alive together is a model of three moments, compared with the compiler's totals in docs/planning.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core.target import Target
from vishwamai.models import ModelConfig
from vishwamai.planning.figures import Estimate
from vishwamai.planning.kept import kept_bytes
from vishwamai.planning.serving import Serving, size
from vishwamai.planning.training import TrainingStep, on_slice, share_of, training_step
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.fp8 import FP8Optimizer
from vishwamai.training.mesh import Layout, make_layout, row_parts
from vishwamai.training.parts import parameter_name

Tree = Any
CLASSES = ("parameters", "gradients", "optimizer", "activations", "kv", "temporaries")
"""What memory is used for; a breakdown has all of them."""


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """HBM of one device by class.

    Attributes:
      target: the chip or slice. limit: bytes that the compiler lets one device use.
      parts: bytes of each of `CLASSES`, all of the same level.
    """

    target: str
    limit: int
    parts: Mapping[str, Estimate]

    @property
    def total(self) -> Estimate:
        """The sum of the parts."""
        return functools.reduce(lambda a, b: a + b, self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether one device holds it."""
        return self.total.value <= self.limit


def _breakdown(target: str, sizes: Mapping[str, float]) -> Breakdown:
    parts = {name: Estimate(sizes.get(name, 0), "analytic") for name in CLASSES}
    return Breakdown(target, Target.parse_chip(target).hbm_usable_bytes, parts)


def training_memory(config: TrainConfig, target: str) -> Breakdown:
    """The memory of a training step on each device of a target.

    Needs no compiler; takes seconds the first time for a model and a policy, and milliseconds after that.

    Raises: as `planning.training.on_slice` and `training_step`.
    """
    config = on_slice(config, target)
    whole, lay = _shapes(_key(config)), _layout(_key(config), config.mesh)
    frozen = 0 if whole.frozen is None else size(whole.frozen)
    optimizer = lay.state - lay.params
    wide = config.microbatches > 1  # gradients are added up in float32
    gradients = lay.params * (4 / jnp.dtype(config.model.param_dtype).itemsize if wide else 1)

    # Of a device's tokens, in rows.
    rows = config.batch_size / (row_parts(config.mesh) * config.mesh.sequence) / config.microbatches
    fixed, row = _kept(config)
    # A layer that is computed again takes what a plain one takes, by the probes of docs/planning.md.
    keys = config.optimization.of_kernels
    everything = _kept(dataclasses.replace(config, remat="none", precision="plain", optimization=keys))
    layers = whole.parts.config.num_layers
    recomputed = 0.0 if config.remat == "none" else rows * everything[1] / layers
    layer = everything[0] / layers  # one layer's weights in the dtype of products
    tables = (size(leaf) for name, leaf in whole.parts.params.items() if name != "layers")
    table, split = max(tables) / config.mesh.tensor, config.mesh.fsdp > 1

    # While a layer's gradient is computed: its weights whole, and the gradient of the head.
    backward = rows * row + fixed + recomputed + (table if split else 0)
    if config.remat != "none":
        backward += _LAYER_WORK * layer
    # At the end of the backward pass: the embedding's gradient whole, before it is split, and what it is made of.
    embedding = 3.0 * table if split else table
    # The sum of the microbatches before is alive all the time, the one with this microbatch from the end on.
    before = gradients if wide else 0.0
    peak = max(backward + before, embedding + 2 * before)
    activations = min(rows * row, peak)
    return _breakdown(
        target,
        {
            "parameters": lay.params + frozen,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "temporaries": peak - activations,
        },
    )


_LAYER_WORK = 3.4
"""A layer's weights in the dtype of products, so many times: gathered, converted, and their gradient."""


@dataclasses.dataclass(frozen=True)
class _Key:
    """A configuration as a key: its dictionaries have no hash."""

    config: TrainConfig = dataclasses.field(compare=False)
    text: str


def _key(config: TrainConfig, **keys: Any) -> _Key:
    """Without what neither shapes nor kept bytes depend on, so that many configurations have one key."""
    alike = dataclasses.replace(
        config,
        batch_size=1,
        microbatches=1,
        mesh=MeshSection(),
        optimization=config.optimization.of_kernels,
        steps=1,
        seed=0,
        **{"remat": "none", **keys},
    )
    return _Key(alike, repr(alike))


@functools.lru_cache(maxsize=16)
def _shapes(key: _Key) -> TrainingStep:
    return training_step(key.config)


def described(config: TrainConfig) -> ModelConfig:
    """The model that a configuration trains; read once."""
    return _shapes(_key(config)).parts.config


@dataclasses.dataclass(frozen=True)
class _Local:
    """Bytes of one device's parameters that are trained, and of all that a step changes."""

    params: float
    state: float


@functools.lru_cache(maxsize=4096)
def _layout(key: _Key, mesh: MeshSection) -> _Local:
    step = _shapes(key)
    names = [object() for _ in range(math.prod(vars(mesh).values()))]  # only their number counts
    layout = make_layout(mesh, step.parts.params, step.parts.axes, len(names), 1, names, step.parts.config)
    return _Local(_local(layout, step.state.params), _local(layout, step.state))


def _local(layout: Layout, tree: Tree) -> float:
    """Bytes of one device's part of a tree."""
    if layout.mesh is None:
        return size(tree)
    parts = 0.0
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(layout.specs(tree))):
        parts += size(leaf) / math.prod(layout.mesh.shape[axis] for axis in spec if axis is not None)
    return parts


def _kept(config: TrainConfig) -> tuple[float, float]:
    """Bytes that the backward pass keeps: those that do not depend on the rows, and those of each row."""
    key, tensor, expert = _key(config, remat=config.remat), config.mesh.tensor, config.mesh.expert
    if tensor > 2 and tensor % 2 == 0:  # every array is whole or split, which two sizes tell
        one, two = (_kept(dataclasses.replace(config, mesh=MeshSection(expert=expert, tensor=n))) for n in (1, 2))
        fixed, row = (2 * y - x + 2 * (x - y) / tensor for x, y in zip(one, two))
        return fixed, row
    fixed, row = _kept_of(key, tensor, 0)
    experts = described(config).experts
    if expert == 1 or experts is None:
        return fixed, row
    # The buffers of the exchange have room for all choices of every device's tokens: `moe_layer`'s exchange="dense".
    more = 1 if experts.top_k < experts.count else -1
    choices = (_kept_of(key, tensor, more)[1] - row) / more * experts.top_k
    return fixed * (1 - _of_experts(_key(config)) * (1 - 1 / expert)), row + (expert - 1) * choices


def of_experts(config: TrainConfig) -> float:
    """The share of a device's parameters that `mesh.expert` splits."""
    share = _of_experts(_key(config)) / config.mesh.expert
    return share / (1 - (config.mesh.expert - 1) * share)


@functools.lru_cache(maxsize=16)
def _of_experts(key: _Key) -> float:
    """The share of a model's parameters that are experts'."""
    parts = _shapes(key).parts
    leaves = jax.tree_util.tree_leaves_with_path(parts.params)
    split = sum(size(leaf) for path, leaf in leaves if "experts" in parts.axes[parameter_name(path)])
    return split / size(parts.params)


@functools.lru_cache(maxsize=64)
def _kept_of(key: _Key, tensor: int, more_choices: int) -> tuple[float, float]:
    """Of a device of `mesh.tensor`, where each token is sent to so many more experts than the model says."""
    model = share_of(_shapes(key).parts.config, tensor)
    if more_choices and model.experts is not None:
        experts = dataclasses.replace(model.experts, top_k=model.experts.top_k + more_choices)
        model = dataclasses.replace(model, experts=experts)
    step = training_step(key.config, model)
    update, attach_scales = step.update_rule()
    loss, params = step.loss(Layout(), attach_scales), step.state.params
    if isinstance(update, FP8Optimizer):
        params = jax.eval_shape(update.with_scales, params, step.state.optimizer)

    def of(rows: int) -> int:
        with key.config.optimization.kernels():
            return kept_bytes(lambda *args: loss(*args)[0], params, step.batch(rows), step.frozen)

    one, two = of(1), of(2)
    return 2 * one - two, two - one


def serving_memory(serving: Serving, target: str) -> Breakdown:
    """The memory of a decoding step on one device of a target.

    The temporaries are the float32 logits, twice, and a layer's inner activations.
    """
    config, rows = serving.config, serving.batch_size
    logits = 4 * rows * config.vocab_size
    inner = 4 * rows * (2 * config.intermediate_size + 4 * config.hidden_size)
    return _breakdown(
        target,
        {
            "parameters": size(serving.parameters()[1]),
            "kv": size(serving.pages()),
            "temporaries": 2 * logits + inner,
        },
    )
