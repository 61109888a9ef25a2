"""One update of the parameters, as a pure function of a state and a batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vishwamai.core.execute import by_platform
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.training.adam import kept_where
from vishwamai.training.adamw import AdamW, why_not
from vishwamai.training.config import TrainConfig
from vishwamai.training.fp8 import SCALES, FP8Optimizer
from vishwamai.training.gather import by_part, over_devices, summed
from vishwamai.training.losses import EXPERT_COUNTS, Loss, loss_count
from vishwamai.training.optimizers import apply_updates, optimizer
from vishwamai.training.packing import IGNORED
from vishwamai.training.sharding import Layout

if TYPE_CHECKING:
    pass


class LossScale(NamedTuple):
    """The factor of the loss that keeps gradients of float16 in its range. Micikevicius et al., "Mixed Precision
    Training" (2018).

    Attributes:
      factor: float32 scalar.
      steps: int32 scalar, steps since it changed.
    """

    factor: jax.Array
    steps: jax.Array

    def after(self, overflow: AnyArray) -> LossScale:
        """Half the factor where gradients have overflowed, twice the factor after `_GROWS_AFTER` steps without."""
        steps = jnp.where(overflow, 0, self.steps + 1)
        grows = steps == _GROWS_AFTER
        factor = jnp.where(overflow, self.factor / 2, jnp.where(grows, self.factor * 2, self.factor))
        return LossScale(jnp.clip(factor, 1.0, 2.0**24), jnp.where(grows, 0, steps))


_GROWS_AFTER = 2000


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("step", "params", "optimizer", "average", "skips", "skipped", "loss_scale"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes.

    Attributes:
      step: int32 scalar, steps taken, the skipped ones included.
      params: the parameters, as plain nested dictionaries.
      optimizer: optax's state.
      average: moving average of the parameters in float32, or None.
      skips: int32 scalar, steps skipped in a row.
      skipped: int32 scalar, steps skipped in all.
      loss_scale: scale of float16's loss, or None.
    """

    step: jax.Array
    params: PyTree
    optimizer: PyTree
    average: PyTree
    skips: jax.Array
    skipped: jax.Array
    loss_scale: LossScale | None = None


Optimizer = optax.GradientTransformation | FP8Optimizer


def update_rule(
    config: TrainConfig, params: PyTree, ranks: Mapping[str, int], axes: tuple[str, ...] = ()
) -> tuple[Optimizer, Callable[[PyTree], PyTree] | None]:
    """The update rule of a configuration, and what `losses.model_loss` takes as `attach`.

    Args:
      config: configuration of the run.
      params: trained parameters, or their shapes.
      ranks: axes of a parameter by the last name of its path, without that of stacked layers.
      axes: inside `shard_map`, the axes of the mesh.
    """
    update = optimizer(config.optimizer, config.steps, params, ranks)
    if config.precision != "fp8":
        return update, None
    scaled = FP8Optimizer(inner=update, ranks=ranks, axes=axes, **dataclasses.asdict(config.fp8))
    return scaled, scaled.attach


def initial_state(
    params: PyTree, optimizer: Optimizer, average: bool = False, loss_scale: float | None = None
) -> TrainState:
    """The state before the first step.

    Args:
      params: the parameters.
      optimizer: result of `optimizers.optimizer`.
      average: keep a moving average of the parameters.
      loss_scale: the first factor of the loss, of float16; None for other dtypes.
    """
    # Each array is one of its own, so that all of them can be donated.
    step, skips, skipped = (jnp.zeros((), jnp.int32) for _ in range(3))
    mean = jax.tree.map(lambda p: jnp.array(p, jnp.float32, copy=True), params) if average else None
    scale = None if loss_scale is None else LossScale(jnp.float32(loss_scale), jnp.zeros((), jnp.int32))
    return TrainState(step, params, optimizer.init(params), mean, skips, skipped, scale)


def moved_corrections(params: PyTree, counts: dict[str, PyTree], rate: float) -> PyTree:
    """The parameters with each router's correction moved by `rate`: up for experts that got less than the mean, down
    for those that got more. DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.1.2.

    Args:
      params: the parameters of a decoder.
      counts: tokens that chose each expert, `[..., experts]`, by entry of its layers.
      rate: length of the move; the paper's u, 0.001.
    """
    layers = dict(params["layers"])
    for place, count in counts.items():
        layer = next(key for key in layers if str(key) == place)
        correction, count = layers[layer]["router_correction"], count.astype(jnp.float32)
        step = rate * jnp.sign(count.mean(axis=-1, keepdims=True) - count)
        layers[layer] = layers[layer] | {"router_correction": correction + step.astype(correction.dtype)}
    return params | {"layers": layers}


def accumulated(
    loss: Loss,
    params: PyTree,
    batch: dict[str, PyTree],
    scale: AnyArray,
    *,
    microbatches: int,
    summed: Callable[[PyTree], PyTree] = lambda gradients: gradients,
    places: Callable[[PyTree], tuple[PyTree, Callable[[PyTree], PyTree]]] = lambda params: (params, lambda of: of),
    **frozen: PyTree,
) -> tuple[PyTree, PyTree]:
    """Gradients of `scale * loss`, and the sums that `loss` reports, over equal parts of the batch in turn.

    Args:
      summed: `gather.summed`, of the gradients of a part.
      places: arrays that gradients are taken of, `Rounding.places`; the parameters themselves by default.
      frozen: parameters without gradients.
    """
    of, joined = places(params)

    def part(batch: dict[str, PyTree]) -> tuple[PyTree, PyTree]:
        def scaled(of: PyTree) -> tuple[PyTree, PyTree]:
            total, sums = loss(joined(of), batch, **frozen)
            return total * scale, sums

        return jax.grad(scaled, has_aux=True)(of)

    if microbatches == 1:
        return part(batch)
    parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)

    def join(path: jax.tree_util.KeyPath, total: AnyArray, part: AnyArray) -> AnyArray:
        part = part.astype(total.dtype)
        # path[0] is 0 for the gradients, path[1] their first name.
        return jnp.maximum(total, part) if path[1] == jax.tree_util.DictKey(SCALES) else total + part

    def add(total: PyTree, microbatch: dict[str, PyTree]) -> tuple[PyTree, None]:
        gradients, sums = part(microbatch)
        return jax.tree_util.tree_map_with_path(join, total, (summed(gradients), sums)), None

    shapes = jax.eval_shape(part, jax.tree.map(lambda x: x[0], parts))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, jnp.promote_types(s.dtype, jnp.float32)), shapes)
    return jax.lax.scan(add, zeros, parts)[0]


def updated(
    optimizer: Optimizer,
    gradients: PyTree,
    largest: PyTree,
    params: PyTree,
    state: PyTree,
    clip: AnyArray,
    good: AnyArray,
    layout: Layout,
    key: jax.Array | None = None,
) -> tuple[PyTree, PyTree]:
    """Parameters and the optimizer's state after a step; both as they were where it is not `good`.

    Args:
      optimizer: result of `optimizers.optimizer`.
      gradients: gradients of the parameters. largest: maxima for the scales of 8-bit products, or empty.
      params, state: parameters and optimizer state before the step.
      clip: factor of the gradients, or None.
      good: boolean scalar, whether to take the step.
      layout: the devices.
      key: random key of `optimizers.apply_updates`.
    """
    rule = optimizer if isinstance(optimizer, FP8Optimizer) else optax.with_extra_args_support(optimizer)

    def by_xla(
        gradients: PyTree, params: PyTree, state: PyTree, factor: jax.Array, good: jax.Array
    ) -> tuple[PyTree, PyTree]:
        if clip is not None:
            gradients = jax.tree.map(lambda g: g * factor, gradients)
        gradients_and_scales: PyTree = gradients | largest if largest else gradients
        updates, after = rule.update(gradients_and_scales, state, params, good=good)
        return kept_where(good, (apply_updates(params, updates, key), after), (params, state))

    branches = {}
    if isinstance(optimizer, AdamW) and why_not(gradients, params, state[0]) is None:
        branches["cpu"] = by_part(layout, optimizer.one_pass)
    factor = jnp.ones((), jnp.float32) if clip is None else clip
    return by_platform(by_xla, branches, gradients, params, state, factor, good)


def train_step(
    state: TrainState,
    batch: dict[str, PyTree],
    *,
    loss: Any,
    optimizer: Optimizer,
    config: TrainConfig,
    layout: Layout | None = None,
    accumulate: Callable[..., tuple[PyTree, PyTree]] | None = None,
    frozen: PyTree = None,
) -> tuple[TrainState, dict[str, PyTree]]:
    """One step: gradients over the microbatches, clipping, the guard, the update, the average.

    A step whose loss or gradient norm is not finite, or whose norm is above `guard.max_norm`, changes nothing but the
    counters. The loss is divided by `counted` of the whole batch, so microbatches do not change it.

    Args:
      state: training state before the step.
      batch: arrays `[rows, sequence_length]`, as `data.Batch`.
      loss: result of `losses.model_loss`, or another function with its signature; or a loss that `accumulate` takes.
      optimizer: result of `optimizers.optimizer`.
      config: read for its microbatches, clipping, guard and average.
      layout: the devices; None for one.
      accumulate: gradients and sums over the microbatches, such as `pipeline.loss.pipelined`; None for `accumulated`.
      frozen: parameters without gradients, which `loss` or `accumulate` takes by that name where there are some.

    Returns:
      The state after the step, and scalars: `loss`, `gradient_norm`, `tokens` (counted ones), `skips`, `skipped`; with
      experts also `load_balance`, `router_z`, and `overload` (the fullest expert's tokens, relative to the mean).
    """
    layout = Layout() if layout is None else layout
    over_parts = accumulate or functools.partial(accumulated, summed=functools.partial(summed, layout))
    tokens = jnp.sum(batch["labels"] != IGNORED)
    scale = 1.0 / jnp.maximum(loss_count(batch), 1).astype(jnp.float32)
    grows = None if state.loss_scale is None else state.loss_scale.factor
    trained = state.params
    if isinstance(optimizer, FP8Optimizer):
        trained = optimizer.with_scales(trained, state.optimizer)

    def compute(params: PyTree, batch: PyTree, scale: AnyArray, **frozen: PyTree) -> tuple[PyTree, PyTree]:
        return over_parts(loss, params, batch, scale, microbatches=config.microbatches, **frozen)

    of_all = over_devices(layout, compute, trained, frozen=frozen)
    factor = scale / layout.copies
    gradients, sums = of_all(trained, batch, factor if grows is None else factor * grows)
    counts = sums.pop(EXPERT_COUNTS, None)
    largest = {SCALES: gradients.pop(SCALES)} if isinstance(gradients, dict) and SCALES in gradients else {}
    # Those of `rounding` may be narrower than their parameters.
    gradients = jax.tree.map(lambda g, p: g.astype(jnp.promote_types(g.dtype, p.dtype)), gradients, state.params)
    if grows is not None:
        gradients = jax.tree.map(lambda g: g / grows, gradients)
    norm = optax.tree.norm(gradients)
    limit = config.optimizer.clip_norm
    clip = None if limit is None else jnp.minimum(1.0, limit / jnp.maximum(norm, 1e-30))
    good = jnp.isfinite(norm) & jnp.isfinite(sums["loss"])
    loss_scale = None if state.loss_scale is None else state.loss_scale.after(~good)
    if config.guard.max_norm is not None:
        good &= norm <= config.guard.max_norm
    key = None
    if config.model.param_rounding == "stochastic":
        key = jax.random.fold_in(jax.random.key(config.seed), state.step)
    params, moments = updated(optimizer, gradients, largest, state.params, state.optimizer, clip, good, layout, key)
    if counts is not None and config.loss.bias_rate:
        params = kept_where(good, moved_corrections(params, counts, config.loss.bias_rate), params)
    average = state.average
    if average is not None:
        decay = config.optimizer.ema_decay or 0.0
        next_average = jax.tree.map(lambda a, p: decay * a + (1 - decay) * p.astype(a.dtype), average, params)
        average = kept_where(good, next_average, average)
    bad = jnp.where(good, 0, 1).astype(jnp.int32)
    after = TrainState(
        state.step + 1, params, moments, average, jnp.where(good, 0, state.skips + 1), state.skipped + bad, loss_scale
    )
    scalars = {"gradient_norm": norm, "tokens": tokens, "skips": after.skips, "skipped": after.skipped}
    if counts is not None:
        ratios = [jnp.max(count / jnp.maximum(jnp.mean(count, axis=-1, keepdims=True), 1)) for count in counts.values()]
        scalars["overload"] = functools.reduce(jnp.maximum, ratios)
    return after, {name: value * scale for name, value in sums.items()} | scalars


def first_loss_scale(config: TrainConfig) -> float | None:
    """The first factor of the loss of a configuration; None where products are not in float16."""
    return config.optimizer.loss_scale if config.model.compute_dtype == "float16" else None
