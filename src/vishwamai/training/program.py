"""One training program: a checked configuration to shapes, shardings, the step and its compiler options.

`run` fills the arrays and loops, a plan compiles the same program, and benchmarks time it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from vishwamai.aot.compile import libtpu
from vishwamai.core.hardware import TpuChip
from vishwamai.core.target import Target
from vishwamai.core.types import PyTree
from vishwamai.training.compiling import compiler_options
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import TrainConfig
from vishwamai.training.gather import by_row, gather_parameter, gather_parameters, over_devices, rounding, summed
from vishwamai.training.head import head_operands
from vishwamai.training.lora import ADAPTER_RANKS, attach, initial_adapters, merge_adapters
from vishwamai.training.losses import Loss, loss_count, model_loss, run_model
from vishwamai.training.model import ModelParts, model_shapes
from vishwamai.training.packing import REFERENCE
from vishwamai.training.pipeline.loss import PipelinedLoss, pipelined, pipelined_logprobs
from vishwamai.training.pipeline.stages import Stages, make_stages
from vishwamai.training.preferences import answer_logprobs
from vishwamai.training.sharding import Layout, batch_spec, make_layout
from vishwamai.training.slices import on_slice
from vishwamai.training.step import (
    Optimizer,
    TrainState,
    accumulated,
    first_loss_scale,
    initial_state,
    train_step,
    update_rule,
)

Shapes = PyTree
"""A tree of `jax.ShapeDtypeStruct`s."""


@dataclasses.dataclass(frozen=True)
class TrainingStep:
    """Shapes of one step of a configuration, on any devices.

    Attributes:
      config: the configuration.
      parts: its model, with shapes for parameters.
      state: shapes of what a step changes.
      frozen: shapes of the parameters below adapters; None without adapters.
      stages: None without `mesh.pipeline`.
    """

    config: TrainConfig
    parts: ModelParts
    state: TrainState
    frozen: Shapes = None
    stages: Stages | None = None

    def batch(self, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch of so many rows."""
        shape = jax.ShapeDtypeStruct((rows, self.config.data.sequence_length), jnp.int32)
        arrays: dict[str, jax.ShapeDtypeStruct] = {}
        arrays |= dict.fromkeys(("tokens", "labels", "positions", "segment_ids"), shape)
        if self.config.objective == "dpo":  # the log-probabilities of both answers under the reference
            arrays[REFERENCE] = jax.ShapeDtypeStruct((rows, 2), jnp.float32)
        return arrays

    def update_rule(self, axes: tuple[str, ...] = ()) -> tuple[Optimizer, Callable[[PyTree], PyTree] | None]:
        """`step.update_rule` of the parameters that are trained."""
        ranks = self.parts.ranks if self.frozen is None else ADAPTER_RANKS
        return update_rule(self.config, self.state.params, ranks, axes)

    def loss(self, layout: Layout, attach_scales: Callable[[PyTree], PyTree] | None, policy: str | None = None) -> Any:
        """`make_loss` on the devices of a layout."""
        return make_loss(self.config, self.parts, layout, self.stages, attach_scales, policy)

    def place(self, params: PyTree) -> PyTree:
        """Parameters in the form of checkpoints as the stages hold them."""
        return params if self.stages is None else self.stages.place(params)

    def initial(self, params: PyTree, update: Optimizer) -> TrainState:
        """The state before the first step."""
        average = self.config.optimizer.ema_decay is not None
        return initial_state(params, update, average, first_loss_scale(self.config))


@dataclasses.dataclass(frozen=True)
class TrainingProgram:
    """The step of a configuration on devices, which are there or described.

    Attributes:
      shapes: shapes of the state, the batch and the frozen parameters.
      layout: their placement on the mesh.
      update: the update rule.
      attach_scales: puts the scales of 8-bit products among the parameters; None without them.
      options: options of the compiler, by name.
    """

    shapes: TrainingStep
    layout: Layout
    update: Optimizer
    attach_scales: Callable[[PyTree], PyTree] | None
    options: dict[str, str]

    @property
    def config(self) -> TrainConfig:
        """The configuration."""
        return self.shapes.config

    def loss(self, policy: str | None = None) -> Any:
        """The loss, under a policy of `remat` in place of the configuration's."""
        return self.shapes.loss(self.layout, self.attach_scales, policy)

    def step(self, policy: str | None = None) -> Callable[..., tuple[TrainState, dict[str, PyTree]]]:
        """One step as a function of state, batch and frozen parameters."""
        return make_step(self.config, self.loss(policy), self.update, self.layout)

    def evaluation(self) -> Callable[..., tuple[jax.Array, jax.Array]]:
        """Parameters, batch and frozen parameters to the sum of the loss, and over how many tokens or pairs."""
        loss, layout = self.loss("none"), self.layout

        def count(params: PyTree, batch: PyTree, **frozen: PyTree) -> tuple[None, tuple[jax.Array, jax.Array]]:
            if isinstance(loss, PipelinedLoss):
                options = {"microbatches": self.config.microbatches, "gradients": False}
                sums = pipelined(loss, params, batch, 1.0, **options, **frozen)[1]
            else:
                sums = loss(params, batch, **frozen)[1]
            return None, (sums["loss"], loss_count(batch, layout.model_axes))

        def evaluate(params: PyTree, batch: PyTree, frozen: PyTree = None) -> tuple[jax.Array, jax.Array]:
            return over_devices(layout, count, params, gradients=False, frozen=frozen)(params, batch)[1]

        return evaluate

    def reference(self, params: PyTree) -> Callable[[PyTree, PyTree], jax.Array]:
        """Parameters like `params`, without adapters, and a batch to the log-probabilities of its answers."""
        loss, parts, layout = self.loss("none"), self.shapes.parts, self.layout
        gather = None if layout.mesh is None else functools.partial(gather_parameters, layout)
        if self.config.lora.rank:
            gather = functools.partial(merge_adapters, gather=functools.partial(gather_parameter, layout))

        def logprobs(params: PyTree, batch: PyTree) -> jax.Array:
            if isinstance(loss, PipelinedLoss):
                base = dataclasses.replace(loss, adapt=None)
                return pipelined_logprobs(base, params, batch, microbatches=self.config.microbatches)
            axes = layout.model_axes
            model, hidden, _ = run_model(parts.graph, parts.rest, params, batch, gather=gather, axes=axes)
            hidden, head = head_operands(model.config, model.top_arrays(), hidden, axes)
            return answer_logprobs(model.config, head, hidden, batch, axes)

        return by_row(layout, logprobs, params)

    @property
    def arguments(self) -> tuple[Shapes, ...]:
        """Shapes of the state, a batch and the frozen parameters where there are some, with their shardings."""
        state, frozen, batch = self.shapes.state, self.shapes.frozen, self.shapes.batch(self.config.batch_size)
        mesh = self.layout.mesh
        if mesh is not None:

            def placed(leaf: PyTree, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

            state, frozen = (jax.tree.map(placed, tree, self.layout.specs(tree)) for tree in (state, frozen))
            batch = {name: placed(leaf, batch_spec(name)) for name, leaf in batch.items()}
        return (state, batch) if frozen is None else (state, batch, frozen)


def training_step(config: TrainConfig, parts: ModelParts | None = None) -> TrainingStep:
    """The shapes of a step; no array is made.

    Args:
      config: configuration of the run.
      parts: its model, of which shapes are enough; None for that of the configuration, as it is on a TPU.
    """
    parts = model_shapes(config) if parts is None else parts
    params, frozen, ranks = parts.params, None, parts.ranks
    if config.lora.rank:
        frozen, ranks = params, ADAPTER_RANKS
        params = jax.eval_shape(lambda p: initial_adapters(config.lora, p, jax.random.key(0), parts.ranks), frozen)
    stages = make_stages(config, parts.config, params, ranks, parts.stacked)
    if stages is not None:
        params, frozen = jax.eval_shape(lambda *trees: tuple(map(stages.place, trees)), params, frozen)
    update, _ = update_rule(config, params, ranks)
    average = config.optimizer.ema_decay is not None
    state = jax.eval_shape(lambda p: initial_state(p, update, average, first_loss_scale(config)), params)
    return TrainingStep(config, parts, state, frozen, stages)


def training_program(
    config: TrainConfig, parts: ModelParts, chip: TpuChip | None, devices: Sequence[object] | None = None
) -> TrainingProgram:
    """The program of a configuration.

    Args:
      config: checked by `checks.check_step`.
      parts: its model, of which shapes are enough.
      chip: the TPU that it is for; None for another platform.
      devices: devices of the chip; None for those of JAX.

    Raises:
      VishwamaiError: as `make_layout`, `make_stages` and `compiler_options`.
    """
    config = resolved(config, None if chip is None else Target("tpu", chip))
    rows = config.batch_size, config.microbatches
    layout = make_layout(config.mesh, parts.params, parts.axes, *rows, devices=devices, model=parts.config)
    shapes = training_step(config, parts)
    return TrainingProgram(
        shapes, layout, *shapes.update_rule(layout.mesh_axes), compiler_options(config, chip, layout.devices)
    )


def program_on(target: str, config: TrainConfig) -> TrainingProgram:
    """The program of a configuration on the devices of a TPU target, which need not be there.

    Args:
      target: chip or slice.
      config: configuration of a run, of which no file of the data is read.

    Raises:
      VishwamaiError: as `slices.on_slice`, `model_shapes` and `training_program`.
    """
    config = on_slice(config, target)
    return training_program(config, model_shapes(config), Target.parse_chip(target), libtpu.devices_for(target))


def make_loss(
    config: TrainConfig,
    parts: ModelParts,
    layout: Layout,
    stages: Stages | None = None,
    attach_scales: Callable[[PyTree], PyTree] | None = None,
    policy: str | None = None,
) -> Any:
    """The `Loss` as a function of the trained parameters, a batch, and the frozen ones below adapters where there are
    some; with stages a `PipelinedLoss`.

    Args:
      config: configuration of the run. parts: its model, of which shapes are enough. layout: placement on its devices.
      stages: result of `make_stages`.
      attach_scales: result of `step.update_rule`.
      policy: policy in place of `config.remat`.
    """
    adapters, axes, policy_function = (
        config.lora.rank > 0,
        layout.model_axes,
        parts.checkpoint_policy(policy or config.remat),
    )
    rounded = rounding(config, layout)
    gather = None
    if layout.mesh is not None:
        gather = functools.partial(gather_parameters, layout) if rounded is None else rounded.gather
    if adapters:
        gather = functools.partial(merge_adapters, gather=functools.partial(gather_parameter, layout))
    if stages is not None:
        dtype = parts.merge(parts.params).dtype
        adapt = functools.partial(attach, config.lora) if adapters else None
        arguments = gather, axes, attach_scales, layout.ends, adapt, config.dpo.beta
        return PipelinedLoss(stages, parts.config, dtype, config.loss, policy_function, *arguments)
    full = model_loss(
        parts.graph, parts.rest, config.loss, policy_function, gather, attach_scales, axes, config.dpo.beta
    )

    def loss(params: PyTree, batch: PyTree, frozen: PyTree = None) -> tuple[PyTree, dict[str, PyTree]]:
        return full(params if frozen is None else attach(config.lora, frozen, params), batch)

    return loss


def make_step(
    config: TrainConfig, loss: Loss | PipelinedLoss, optimizer: Optimizer, layout: Layout
) -> Callable[..., tuple[TrainState, dict[str, PyTree]]]:
    """`step.train_step` as a function of state, batch and frozen parameters.

    Args: as of `train_step`; `loss` of `make_loss`.
    """
    rounded = rounding(config, layout)
    accumulate: Callable[..., object] | None = None
    if isinstance(loss, PipelinedLoss):
        accumulate = pipelined
    elif rounded is not None:
        accumulate = functools.partial(accumulated, summed=functools.partial(summed, layout), places=rounded.places)

    def step(state: TrainState, batch: PyTree, frozen: PyTree = None) -> tuple[TrainState, dict[str, PyTree]]:
        options = {"loss": loss, "accumulate": accumulate, "frozen": frozen}
        with config.optimization.kernels():
            return train_step(state, batch, **options, optimizer=optimizer, config=config, layout=layout)

    return step
