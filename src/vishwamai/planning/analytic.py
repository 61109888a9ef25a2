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
from vishwamai.planning.figures import Estimate
from vishwamai.planning.kept import kept_bytes
from vishwamai.planning.serving import Serving, size
from vishwamai.planning.training import devices_of, on_slice, training_step
from vishwamai.training.config import TrainConfig
from vishwamai.training.fp8 import FP8Optimizer
from vishwamai.training.mesh import Layout, make_layout, row_parts

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
    step = training_step(config)
    parts, devices = step.parts, devices_of(target)
    names = [object() for _ in range(devices)]  # only their number counts
    rows = config.batch_size, config.microbatches
    layout = make_layout(config.mesh, parts.params, parts.axes, *rows, names, parts.config)
    trained = _local(layout, step.state.params)
    params = trained if step.frozen is None else trained + size(step.frozen)
    optimizer = _local(layout, step.state) - trained
    wide = config.microbatches > 1  # gradients are added up in float32
    gradients = trained * (4 / jnp.dtype(config.model.param_dtype).itemsize if wide else 1)

    # Of a device's tokens, in rows.
    rows = config.batch_size / (row_parts(config.mesh) * config.mesh.sequence) / config.microbatches
    fixed, row = _kept(config)
    # A layer that is computed again takes what a plain one takes, by the probes of docs/planning.md.
    keys = config.optimization.of_kernels
    everything = _kept(dataclasses.replace(config, remat="none", precision="plain", optimization=keys))
    layers = step.parts.config.num_layers
    recomputed = 0.0 if config.remat == "none" else rows * everything[1] / layers
    layer = everything[0] / layers  # one layer's weights in the dtype of products
    table = max(size(leaf) for name, leaf in parts.params.items() if name != "layers") / config.mesh.tensor
    split = layout.mesh is not None and layout.mesh.shape["fsdp"] > 1

    # While a layer's gradient is computed: its weights whole, and the gradient of the head.
    backward = rows * row + fixed + recomputed + (table if split else 0)
    if config.remat != "none":
        backward += _LAYER_WORK * layer
    # At the end of the backward pass: the embedding's gradient whole, before it is split, and what it is made of.
    embedding = 3.0 * table if split else table
    peak = max(backward, embedding)
    if wide:
        peak += 2 * gradients  # the sum before and after a microbatch
    activations = min(rows * row, peak)
    return _breakdown(
        target,
        {
            "parameters": params,
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "temporaries": peak - activations,
        },
    )


_LAYER_WORK = 3.4
"""A layer's weights in the dtype of products, so many times: gathered, converted, and their gradient."""


def _local(layout: Layout, tree: Tree) -> float:
    """Bytes of one device's part of a tree."""
    if layout.mesh is None:
        return size(tree)
    parts = 0.0
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(layout.specs(tree))):
        parts += size(leaf) / math.prod(layout.mesh.shape[axis] for axis in spec if axis is not None)
    return parts


@dataclasses.dataclass(frozen=True)
class _Key:
    """A configuration as a key: its dictionaries have no hash."""

    config: TrainConfig = dataclasses.field(compare=False)
    text: str


def _kept(config: TrainConfig) -> tuple[float, float]:
    """Bytes that the backward pass keeps: those that do not depend on the rows, and those of each row."""
    # What they do not depend on is left out, so that many configurations have one key.
    alike = dataclasses.replace(
        config,
        batch_size=1,
        microbatches=1,
        mesh=type(config.mesh)(tensor=config.mesh.tensor),
        optimization=config.optimization.of_kernels,
        steps=1,
        seed=0,
    )
    return _kept_of(_Key(alike, repr(alike)))


@functools.lru_cache(maxsize=64)
def _kept_of(key: _Key) -> tuple[float, float]:
    step = training_step(key.config, of_one_device=True)
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
