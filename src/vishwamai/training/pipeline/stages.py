"""Stages of a pipeline: which layers each holds, and the parameters as the stages hold them.

The layers are cut into parts of equal periods, and the schedule says which parts a stage has. A stage's layers lie one
after another along the leading axis of stacked parameters, which the mesh axis "pipeline" splits. Everything outside of
the layers is on every stage. Checkpoints and exported models have the usual form.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core.errors import ConfigError, ScheduleError, UnsupportedError
from vishwamai.core.numbers import divisors
from vishwamai.core.types import PyTree
from vishwamai.models.config import ModelConfig
from vishwamai.models.layers.layer import LayerKind
from vishwamai.models.periods import Segment, segments
from vishwamai.parallel import PipelineScheduler, Schedule
from vishwamai.parallel.pipeline.ticks import Ticks, ticks_of
from vishwamai.training.config import PipelineSection, TrainConfig
from vishwamai.training.optimizers import groups
from vishwamai.training.parameter_names import LAYERS, in_layers
from vishwamai.training.sharding import Layout


@dataclasses.dataclass(frozen=True)
class Stages:
    """How layers lie on stages.

    Attributes:
      schedules: one for each stage.
      ticks: schedule that the stages run.
      kinds: the layers of one period.
      repeats: periods in the model.
      stacked: the usual form of the parameters has a leading axis for the periods; otherwise each layer is alone.
    """

    schedules: tuple[Schedule, ...]
    ticks: Ticks
    kinds: tuple[LayerKind, ...]
    repeats: int
    stacked: bool

    @property
    def chunks(self) -> int:
        """Parts of a stage."""
        return len(self.schedules[0].parts)

    @property
    def periods(self) -> int:
        """Periods of a part."""
        return self.repeats // len(self.ticks.order)

    @property
    def order(self) -> tuple[int, ...]:
        """The periods in the order of the stages."""
        return tuple(part * self.periods + i for part in self.ticks.order for i in range(self.periods))

    @property
    def unchanged(self) -> bool:
        """Whether the stages hold the usual form."""
        return self.stacked and self.order == tuple(range(self.repeats))

    def place(self, tree: PyTree) -> PyTree:
        """A tree of parameters, or of what an optimizer keeps for them, with the layers as the stages hold them."""
        order = self.order

        def placed(layers: dict[object, PyTree]) -> dict[object, PyTree]:
            if self.stacked:
                return jax.tree.map(lambda x: x[np.array(order)], layers)
            places = range(len(self.kinds))
            periods = {place: [layers[place + len(self.kinds) * i] for i in order] for place in places}
            return {place: jax.tree.map(lambda *x: jnp.stack(x), *alike) for place, alike in periods.items()}

        return tree if self.unchanged else _of_layers(tree, placed)

    def unplace(self, tree: PyTree) -> PyTree:
        """The tree that `place` placed, in the form of checkpoints."""
        back = [int(i) for i in np.argsort(self.order)]

        def separate(layers: dict[object, PyTree]) -> dict[object, PyTree]:
            if self.stacked:
                return jax.tree.map(lambda x: x[np.array(back)], layers)
            return {
                place + len(self.kinds) * i: jax.tree.map(lambda x, period=period: x[period], layers[place])
                for i, period in enumerate(back)
                for place in range(len(self.kinds))
            }

        return tree if self.unchanged else _of_layers(tree, separate)


def _of_layers(tree: PyTree, change: Callable[[dict[object, PyTree]], dict[object, PyTree]]) -> PyTree:
    """A tree in which every dictionary's entry `LAYERS` is changed, and every dictionary by the paths of its leaves."""

    def has_layers(node: object) -> bool:
        return isinstance(node, dict) and any(in_layers(key) for key in node)

    def change_node(node: PyTree) -> PyTree:
        if not has_layers(node):
            return node
        if LAYERS in node:
            return node | {LAYERS: change(node[LAYERS])}
        layers: dict[object, dict[str, PyTree]] = {}
        for key, leaf in node.items():
            _, number, name = key.split("/", 2)
            layers.setdefault(int(number), {})[name] = leaf
        return {f"{LAYERS}/{i}/{name}": leaf for i, layer in change(layers).items() for name, leaf in layer.items()}

    return jax.tree.map(change_node, tree, is_leaf=has_layers)


def rearrange(stages: Stages | None, tree: PyTree, layout: Layout, *, placed: bool) -> PyTree:
    """A tree on the mesh, laid out: `Stages.place` of it if `placed`, otherwise `Stages.unplace`."""
    if stages is None or stages.unchanged:
        return tree
    change = stages.place if placed else stages.unplace
    return jax.jit(change, out_shardings=layout.shardings(jax.eval_shape(change, tree), placed))(tree)


def make_stages(
    config: TrainConfig, model: ModelConfig, params: PyTree, ranks: Mapping[str, int], stacked: bool
) -> Stages | None:
    """The stages of a configuration; None without `mesh.pipeline`.

    Args:
      config: configuration of the run.
      model: model that it trains.
      params: its parameters in the usual form, or their shapes. ranks: as `step.update_rule`.
      stacked: the usual form has stacked layers.

    Raises:
      ConfigError: the schedule does not suit the microbatches, or the layers do not divide into parts.
      UnsupportedError: the layers are not equal, or the optimizer tells apart what stages stack.
    """
    size = config.mesh.pipeline
    if size == 1:
        return None
    run, schedules, ticks = cut(config, model)
    stages = Stages(schedules, ticks, run.kinds, run.repeats, stacked)
    if not stacked:
        _check_optimizer(config, stages, params, ranks)
    return stages


def cut(config: TrainConfig, model: ModelConfig) -> tuple[Segment, tuple[Schedule, ...], Ticks]:
    """The periods of a model, and the schedules of its stages with what they run.

    Raises:
      VishwamaiError: as `make_stages`.
    """
    return _cut(config.mesh.pipeline, config.pipeline, config.microbatches, model)


@functools.lru_cache(maxsize=64)  # a plan asks for the same ones again and again
def _cut(
    size: int, section: PipelineSection, microbatches: int, model: ModelConfig
) -> tuple[Segment, tuple[Schedule, ...], Ticks]:
    axis = f"mesh.pipeline={size}"
    run, *more = segments(model, True)
    if more:
        listed = ", ".join(f"{run.repeats} x {len(run.kinds)}" for run in (run, *more))
        raise UnsupportedError(
            f"config: {axis} needs layers that repeat from the first to the last, and this model has runs of {listed} "
            "layers; set mesh.pipeline=1, and mesh.fsdp or mesh.tensor in its place."
        )
    try:
        schedules = PipelineScheduler(section.schedule, chunks=section.chunks).schedule_microbatches(size, microbatches)
    except ScheduleError as error:
        raise ConfigError(f"config: {axis} with microbatches={microbatches}: {error}") from error
    ticks = ticks_of(schedules)
    if run.repeats % len(ticks.order):
        chunks = len(ticks.order) // size
        fits = [1, *(n for n in divisors(run.repeats) if n > 1 and run.repeats % (n * chunks) == 0)]
        unit = "layers" if len(run.kinds) == 1 else f"periods of {len(run.kinds)} layers"
        way = f"set mesh.pipeline to one of {', '.join(map(str, fits))}"
        way += ", or a pipeline.schedule with one part on each stage" if chunks > 1 else ""
        raise ConfigError(
            f"config: {axis} with pipeline.schedule={section.schedule} cuts the model into {len(ticks.order)} parts, "
            f"which do not divide its {run.repeats} {unit}; {way}."
        )
    return run, tuple(schedules), ticks


def _check_optimizer(config: TrainConfig, stages: Stages, params: PyTree, ranks: Mapping[str, int]) -> None:
    """What sees a stack of layers otherwise than the layers."""
    section = config.optimizer
    for name, value in (("name", "adafactor"), ("moment_dtype", "int8")):
        if getattr(section, name) == value:
            raise UnsupportedError(
                f"config: optimizer.{name}={value} goes by the size of arrays, and mesh.pipeline stacks layers that "
                "are apart here; set remat to another policy than none, which stacks them everywhere."
            )
    separate = [stages.place(jax.tree.map(jnp.asarray, tree)) for tree in groups(section, params, ranks)]
    stacks = groups(section, jax.eval_shape(stages.place, params), ranks)
    for layers, stack in zip(separate, stacks):
        same = jax.tree.map(lambda a, s: bool(np.all(np.asarray(a) == np.float32(s))), layers, stack)
        for path, fits in jax.tree_util.tree_leaves_with_path(same):
            if not fits:
                raise UnsupportedError(
                    "config: optimizer.groups tells layers apart that mesh.pipeline stacks, at "
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')}; write patterns without the number of "
                    "a layer, such as layers/.*/query."
                )
