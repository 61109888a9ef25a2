"""Memory by class, from shapes alone: the analytic level for training steps and serving.

The parts of a training step are exact sums of shapes: parameters, gradients, what the optimizer and the backward pass
keep. When they are alive together is a model of three moments; docs/notes/planning_programs.md compares it with the
compiler's totals.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from vishwamai.core import hardware
from vishwamai.core.config import kernel_config
from vishwamai.core.errors import FallbackWarning
from vishwamai.core.figures import Estimate
from vishwamai.core.target import Target
from vishwamai.core.types import PyTree
from vishwamai.models import ModelConfig
from vishwamai.models.pages import states_of
from vishwamai.ops.loss.gathered import PIECE_BYTES
from vishwamai.planning.exchange import experts_room, rows_in_pieces
from vishwamai.planning.memory.pipeline_buffers import Slot, slot_of
from vishwamai.planning.memory.residuals import residual_bytes, share_of
from vishwamai.planning.serving import Serving, size
from vishwamai.training.compute_dtype import resolved
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.fp8 import FP8Optimizer
from vishwamai.training.gather import keeps_narrow, rounds
from vishwamai.training.model import model_shapes
from vishwamai.training.parameter_names import LAYERS
from vishwamai.training.pipeline.stages import cut
from vishwamai.training.program import TrainingStep, training_step
from vishwamai.training.sharding import Layout, batch_specs, make_layout, row_parts
from vishwamai.training.slices import TPU, on_slice

CLASSES = ("parameters", "gradients", "optimizer", "activations", "kv", "states", "temporaries")
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

    Raises:
      VishwamaiError: as `training.slices.on_slice` and `training.program.training_step`.
    """
    config = on_slice(config, target)
    shapes, lay = _shapes(_key(config)), _layout(_key(config), config.mesh)
    optimizer = lay.state - lay.params
    wide = config.microbatches > 1  # gradients are added up in float32
    gradients = lay.params * (4 / jnp.dtype(config.model.param_dtype).itemsize if wide else 1)
    if not wide and keeps_narrow(config, vars(config.mesh)):
        embedding = size(shapes.parts.params["embed"]) / config.mesh.fsdp
        gradients -= (sum(nbytes for axes, nbytes in lay.split.items() if "fsdp" in axes) - embedding) / 2

    # Of a device's tokens, in rows.
    rows = config.batch_size / (row_parts(config.mesh) * config.mesh.sequence) / config.microbatches
    if config.mesh.pipeline > 1:
        return _pipelined_memory(config, target, rows)
    fixed, row = _residuals(config)
    # A layer that is computed again takes what a plain one takes, by the probes of docs/notes/planning_programs.md.
    keys = config.optimization.of_kernels
    plain = dataclasses.replace(config, remat="none", precision="plain", optimization=keys)
    everything = _residuals(plain, fused=True)
    layers = shapes.parts.config.num_layers
    recomputed = 0.0 if config.remat == "none" else rows * everything[1] / layers
    tables = [size(leaf) / config.mesh.tensor for name, leaf in shapes.parts.params.items() if name != LAYERS]
    table, split = max(tables), config.mesh.fsdp > 1
    narrower = jnp.dtype(config.model.compute_dtype).itemsize / jnp.dtype(config.model.param_dtype).itemsize
    head = narrower * table if lay.in_parts and narrower < 1 else 0.0  # kept where it is not gathered in pieces
    layer = (everything[0] - head) / layers  # one layer's weights in the dtype of products

    # While a layer's gradient is computed: its weights whole, and the gradient of the head.
    backward = rows * row + fixed + recomputed - head
    if lay.in_parts:
        ahead = narrower < 1 and not rounds(config)  # the parts of all layers, which are then converted before the loop
        copies = narrower * (lay.params - sum(tables) / config.mesh.fsdp) if ahead else 0.0
        work = _WORK_IN_PARTS if ahead or narrower == 1 else _WORK_ROUNDED
        backward += copies + work * layer if config.remat != "none" else min(table, PIECE_BYTES)
    else:
        backward += table if split else 0.0
        backward += _LAYER_WORK * layer if config.remat != "none" else 0.0
    backward += _joined(config, target, shapes.parts.config)
    # At the end of the backward pass: the embedding's gradient whole, before it is split, and what it is made of.
    embedding = 0.0 if lay.in_parts else 3.0 * table if split else table
    # The sum of the microbatches before is alive all the time. The one with this microbatch is a second one from the
    # end on, except where the gradients are summed over devices first (`gather.summed`): they are then added in place.
    before = gradients if wide else 0.0
    peak = max(backward + before, embedding + (1 if split else 2) * before)
    activations = min(rows * row, peak)
    return _breakdown(
        target,
        {
            "parameters": lay.params + sum(lay.frozen.values()),
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": activations,
            "temporaries": peak - activations,
        },
    )


def _pipelined_memory(config: TrainConfig, target: str, rows: float) -> Breakdown:
    """Of a device of a stage, with so many rows of a microbatch: the buffers of its schedule are alive all the time."""
    shapes, lay, mesh = _shapes(_key(config)), _layout(_key(config), config.mesh), config.mesh
    model = shapes.parts.config
    run, _, ticks = cut(config, model)
    narrow, wide = (jnp.dtype(dtype).itemsize for dtype in (config.model.compute_dtype, config.model.param_dtype))
    slot = _slot(config, rows)
    stream = rows * config.data.sequence_length * model.hidden_size * narrow
    buffers = (ticks.values + 1) * stream + (ticks.between + 1) * slot.between
    # The embedding and the head are whole on every stage while the schedule runs; so are their float32 gradients.
    ends = sum(size(leaf) for name, leaf in shapes.parts.params.items() if name != LAYERS) / (mesh.tensor * mesh.fsdp)
    ends *= 1 if config.lora.rank else 1 + max(4, wide) / wide
    # A forward pass gathers what it keeps before the buffer takes it. A backward pass computes a layer again.
    again = slot.saved
    if config.remat != "none":
        plain = dataclasses.replace(
            config, remat="none", precision="plain", optimization=config.optimization.of_kernels
        )
        layers = len(run.kinds) * run.repeats / len(ticks.order)
        layer = size(shapes.parts.params[LAYERS]) * narrow / wide / model.num_layers / mesh.tensor
        again = max(again, _slot(plain, rows).saved / layers + _LAYER_WORK * layer)
    return _breakdown(
        target,
        {
            "parameters": lay.params + sum(lay.frozen.values()),
            "gradients": lay.params * max(4, wide) / wide,
            "optimizer": lay.state - lay.params,
            "activations": (ticks.residuals + 1) * slot.saved,
            "temporaries": buffers + ends + again,
        },
    )


def _slot(config: TrainConfig, rows: float) -> Slot:
    """Of a microbatch with so many rows on a device."""
    mesh = dataclasses.replace(config.mesh, data=1, fsdp=1, sequence=1)
    alike = _key(config, remat=config.remat, mesh=mesh, microbatches=config.microbatches).config
    # A slot is the same with any number of microbatches that the schedule takes.
    single, double = _slots(_Key(alike, repr(dataclasses.replace(alike, microbatches=1))))
    saved, between = (a + (b - a) * (rows - 1) for a, b in zip(single, double))
    return Slot(saved, between / config.mesh.fsdp)


@contextlib.contextmanager
def _for_tpus(config: TrainConfig) -> Iterator[None]:
    """Traces the block for a TPU, whichever: what is kept is the same on all. This machine's kernels may keep more."""
    chip = next(iter(hardware.TPUS))
    with kernel_config(target=chip), config.optimization.kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)  # nothing runs
        yield


@functools.lru_cache(maxsize=256)
def _slots(key: _Key) -> tuple[Slot, Slot]:
    """Of one row on a device, and of two."""
    step, mesh = _shapes(key), key.config.mesh
    layout = _device_layout(step, mesh)
    with _for_tpus(key.config):
        single, double = (slot_of(step, layout, rows * mesh.expert) for rows in (1, 2))
    return single, double


def _joined(config: TrainConfig, target: str, model: ModelConfig) -> float:
    """Where experts' rows travel in pieces: the rows and gradients of all pieces, which the gradient of the weights
    sorts by expert.
    """
    if model.experts is None or not rows_in_pieces(config, target, model):
        return 0.0
    inner = (model.experts.inner_size or model.intermediate_size) // config.mesh.tensor
    features = model.hidden_size + 2 * inner
    return config.mesh.expert * experts_room(config, model) * features * jnp.dtype(config.model.compute_dtype).itemsize


_LAYER_WORK = 3.4
"""A layer's weights in the dtype of products, so many times: gathered, converted, and their gradient."""

_WORK_IN_PARTS = 0.5
"""The same where no table is whole, next to the parts of all layers in that dtype where those are converted ahead."""

_WORK_ROUNDED = 1.3
"""The same where a layer's parts are rounded inside the loop."""


@dataclasses.dataclass(frozen=True)
class _Key:
    """A configuration as a key: its dictionaries have no hash."""

    config: TrainConfig = dataclasses.field(compare=False)
    text: str


def _key(config: TrainConfig, **keys: object) -> _Key:
    """Without what neither shapes nor kept bytes depend on, so that many configurations have one key."""
    alike = dataclasses.replace(
        resolved(config, TPU),
        batch_size=1,
        optimization=config.optimization.of_kernels,
        steps=1,
        seed=0,
        **{"remat": "none", "mesh": MeshSection(), "microbatches": 1, **keys},
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
    """Bytes of one device's parameters that are trained, by the mesh axes that split them, of all that a step changes,
    and of the parameters below adapters, as the first ones. Whether the embedding and the head are used `in_parts`, as
    of `Layout`, and then the bytes of `embedding` that no device gathers.
    """

    split: Mapping[tuple[str, ...], float]
    state: float
    frozen: Mapping[tuple[str, ...], float]
    in_parts: bool
    embedding: float

    @property
    def params(self) -> float:
        return sum(self.split.values())


@functools.lru_cache(maxsize=4096)
def _layout(key: _Key, mesh: MeshSection) -> _Local:
    step = _shapes(key)
    layout = _device_layout(step, mesh)
    split, frozen = (_split(layout, tree) for tree in (step.state.params, step.frozen))
    # An embedding that is also the head is gathered in the head's pieces. One below adapters counts as gathered.
    sharded = layout.in_parts.issuperset(("embed", "head")) and "embed" in step.state.params
    table = {"embed": step.state.params["embed"]} if sharded else {}
    embedding = _split(layout, table).get(("fsdp",), 0.0)
    return _Local(split, sum(_split(layout, step.state).values()), frozen, bool(layout.in_parts), embedding)


def _split(layout: Layout, tree: PyTree) -> dict[tuple[str, ...], float]:
    """Bytes of one device's part of a tree, by the mesh axes that split them."""
    if layout.mesh is None:
        return {(): size(tree)}
    parts: dict[tuple[str, ...], float] = {}
    for leaf, spec in zip(jax.tree.leaves(tree), jax.tree.leaves(layout.specs(tree))):
        axes = tuple(sorted(axis for axis in spec if axis is not None))
        parts[axes] = parts.get(axes, 0.0) + size(leaf) / math.prod(layout.mesh.shape[axis] for axis in axes)
    return parts


def split_parameters(config: TrainConfig) -> Mapping[tuple[str, ...], float]:
    """Bytes of a device's trained parameters, by the mesh axes that split them."""
    return _layout(_key(config), config.mesh).split


def exchanged_embedding(config: TrainConfig) -> float:
    """Bytes of a device's part of the embedding where devices exchange rows of its result, and none gathers it."""
    return _layout(_key(config), config.mesh).embedding


def frozen_parameters(config: TrainConfig) -> Mapping[tuple[str, ...], float]:
    """Those of the parameters below adapters, which stay as they are; nothing without adapters."""
    return _layout(_key(config), config.mesh).frozen


def _residuals(config: TrainConfig, fused: bool = False) -> tuple[float, float]:
    """Bytes that the backward pass keeps: those that do not depend on the rows, and those of each row; `fused` as of
    `residual_bytes`.
    """
    key, tensor, expert = _key(config, remat=config.remat), config.mesh.tensor, config.mesh.expert
    if tensor > 2 and tensor % 2 == 0:  # every array is whole or split, which two sizes tell
        meshes = (MeshSection(expert=expert, tensor=n) for n in (1, 2))
        first, second = (_residuals(dataclasses.replace(config, mesh=mesh), fused) for mesh in meshes)
        fixed, row = (2 * y - x + 2 * (x - y) / tensor for x, y in zip(first, second))
        return fixed, row
    experts = described(config).experts
    if expert > 4 and experts is not None and experts.count % 4 == 0:
        # Buffers have room for the tokens of all devices of the axis, and weights are split over them.
        (fixed, row), (less, more) = (_residuals_per_device(key, tensor, size, fused) for size in (2, 4))
        return 2 * less - fixed + 4 * (fixed - less) / expert, row + (more - row) * (expert - 2) / 2
    return _residuals_per_device(key, tensor, expert, fused)


@functools.lru_cache(maxsize=256)
def _residuals_per_device(key: _Key, tensor: int, expert: int, fused: bool) -> tuple[float, float]:
    """Of a device of `mesh.tensor` and `mesh.expert`."""
    model = share_of(_shapes(key).parts.config, tensor)
    step = training_step(key.config, model_shapes(key.config, model))
    layout = _device_layout(step, MeshSection(expert=expert))
    update, attach_scales = step.update_rule()
    loss, params = step.loss(layout, attach_scales), step.state.params
    if isinstance(update, FP8Optimizer):
        params = jax.eval_shape(update.with_scales, params, step.state.optimizer)

    def of(rows: int) -> int:
        batch = step.batch(rows * expert)
        with _for_tpus(key.config):
            if layout.mesh is None:
                return residual_bytes(lambda *args: loss(*args)[0], params, batch, step.frozen, fused=fused)
            mesh = AbstractMesh(layout.mesh.axis_sizes, layout.mesh.axis_names)
            specs = (layout.specs(params), batch_specs(batch), layout.specs(step.frozen))
            over = (mesh, specs)
            return residual_bytes(lambda *args: loss(*args)[0], params, batch, step.frozen, over=over, fused=fused)

    single, double = of(1), of(2)
    return 2 * single - double, double - single


def _device_layout(step: TrainingStep, mesh: MeshSection) -> Layout:
    """The layout of a step on a mesh of devices that need not exist."""
    names = [object() for _ in range(math.prod(vars(mesh).values()))]  # only their number counts
    return make_layout(mesh, step.parts.params, step.parts.axes, len(names), 1, names, step.parts.config)


def serving_memory(serving: Serving, target: str) -> Breakdown:
    """The memory of a decoding step on one device of a target.

    The temporaries are the float32 logits, twice, and a layer's inner activations.
    """
    config, rows = serving.config, serving.batch_size
    logits = 4 * rows * config.vocab_size
    inner = 4 * rows * (2 * config.intermediate_size + 4 * config.hidden_size)
    pools = serving.pages()
    states = [states_of(pool) for pool in pools]
    return _breakdown(
        target,
        {
            "parameters": size(serving.parameters()[1]),
            "kv": size(pools) - size(states),
            "states": size(states),
            "temporaries": 2 * logits + inner,
        },
    )
