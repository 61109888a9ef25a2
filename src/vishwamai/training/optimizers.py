"""Update rules and schedules from optax, with weight decay and learning rate by groups of parameters.

A group is chosen by the parameter's path, its names joined by slashes, such as `layers/0/query`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import optax

from vishwamai.core.errors import ConfigError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.training.adamw import adamw
from vishwamai.training.config import OptimizerSection
from vishwamai.training.moments import scale_by_adam_8bit
from vishwamai.training.parameter_names import is_bias


def path_names(tree: PyTree) -> PyTree:
    """The same tree with each leaf's path in place of the leaf.

    >>> path_names({"layers": [{"up": 1.0}]})
    {'layers': [{'up': 'layers/0/up'}]}
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), tree
    )


def schedule(section: OptimizerSection, steps: int) -> optax.Schedule:
    """The learning rate by the number of earlier steps: a linear warmup, of which the last step has the peak, then the
    schedule down to `end_factor`, which the last of `steps` has.

    "wsd" (warmup, stable, decay) is that of Hu et al., "MiniCPM" (2024).

    >>> rate = schedule(OptimizerSection(learning_rate=1.0, warmup_steps=10, schedule="linear", end_factor=0.0), 110)
    >>> [round(float(rate(earlier)), 2) for earlier in (0, 4, 9, 59, 109)]
    [0.1, 0.5, 1.0, 0.5, 0.0]
    """
    peak, warmup = section.learning_rate, section.warmup_steps
    first = max(warmup - 1, 0)  # earlier steps of the step that has the peak
    rest = max(steps - 1 - first, 1)  # steps from the peak to the end
    fall = max((steps - warmup) // 5, 1)
    after = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, section.end_factor),
        "linear": lambda: optax.linear_schedule(peak, peak * section.end_factor, rest),
        "wsd": lambda: optax.linear_schedule(peak, peak * section.end_factor, fall, transition_begin=rest - fall),
    }[section.schedule]()
    if not first:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, first), after], [first])


def optimizer(
    section: OptimizerSection, steps: int, params: PyTree, ranks: Mapping[str, int] | None = None
) -> optax.GradientTransformation:
    """The transformation of gradients into updates; clipping is the step's, which knows the norm.

    Args:
      section: section of the configuration.
      steps: number of steps of the run, for the schedule.
      params: the parameters or their shapes, for the groups.
      ranks: axes of a parameter by the last name of its path, where the parameter has one more for stacked layers.

    Raises:
      ConfigError: a group's pattern is not a regular expression, or matches no parameter; or the rule has no 8-bit
        moments.
    """
    decay, factor = groups(section, params, ranks)
    grouped, rate = _grouped(decay, factor), optax.scale_by_learning_rate(schedule(section, steps))
    if section.name == "adamw" and section.moment_dtype != "int8":
        return adamw(section, grouped, decay, factor, rate)
    return optax.chain(_rule(section, ranks), grouped, rate)


def apply_updates(params: PyTree, updates: PyTree, key: jax.Array | None = None) -> PyTree:
    """The parameters after a step.

    Args:
      params: parameters before the update.
      updates: updates of the optimizer.
      key: random key of the rounding of bfloat16 parameters, whose mean is the sum; None rounds to the nearest.

    >>> params, updates = {"w": jnp.ones(4096, jnp.bfloat16)}, {"w": jnp.full(4096, 2.0**-11)}  # a quarter of a step
    >>> float(apply_updates(params, updates)["w"].astype(jnp.float32).mean())
    1.0
    >>> mean = apply_updates(params, updates, jax.random.key(0))["w"].astype(jnp.float32).mean()
    >>> bool(abs(mean - 1 - 2.0**-11) < 1e-4)
    True
    """
    if key is None:
        return optax.apply_updates(params, updates)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.tree.unflatten(structure, list(jax.random.split(key, len(leaves))))
    return jax.tree.map(_added, params, updates, keys)


def _added(parameter: jax.Array, update: jax.Array, key: jax.Array) -> jax.Array:
    if parameter.dtype != jnp.bfloat16:
        return (parameter + update).astype(parameter.dtype)
    total = parameter.astype(jnp.float32) + update.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(total, jnp.uint32)
    below = jax.random.bits(key, bits.shape, jnp.uint32) >> 16  # of the 16 bits that bfloat16 lacks
    rounded = jax.lax.bitcast_convert_type(((bits + below) >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(total), rounded, total.astype(jnp.bfloat16))


def groups(section: OptimizerSection, params: PyTree, ranks: Mapping[str, int] | None = None) -> tuple[PyTree, PyTree]:
    """Weight decay and factor of the learning rate, two trees of floats like `params`.

    The first group whose pattern is found in a parameter's path holds. Without one, the decay is the optimizer's for
    parameters with two or more axes, and 0 for the others: norms and biases, those of experts among them.

    Raises:
      ConfigError: as `optimizer`.
    """
    names = path_names(params)
    path_list = jax.tree.leaves(names)
    for number, group in enumerate(section.groups):
        try:
            matches = [name for name in path_list if re.search(group.pattern, name)]
        except re.error as error:
            raise ConfigError(
                f"config: optimizer.groups.{number}.pattern {group.pattern!r} is not a regular expression: {error}."
            ) from error
        if not matches:
            raise ConfigError(
                f"config: optimizer.groups.{number}.pattern {group.pattern!r} matches no parameter; the parameters are "
                f"{', '.join(path_list[:12])}{', ...' if len(path_list) > 12 else ''}."
            )

    def of(name: str, leaf: object) -> tuple[float, float]:
        base_decay = section.weight_decay if _rank(name, leaf, ranks) >= 2 else 0.0
        for group in section.groups:
            if re.search(group.pattern, name):
                return base_decay if group.weight_decay is None else group.weight_decay, group.learning_rate_scale
        return base_decay, 1.0

    decay = jax.tree.map(lambda name, leaf: of(name, leaf)[0], names, params)
    return decay, jax.tree.map(lambda name, leaf: of(name, leaf)[1], names, params)


def _rank(name: str, leaf: PyTree, ranks: Mapping[str, int] | None) -> int:
    """Axes of a parameter without that of stacked layers; a bias counts as a vector, though experts have one each."""
    last = name.rpartition("/")[2]
    return 1 if is_bias(last) else ranks[last] if ranks is not None else leaf.ndim


def _rule(section: OptimizerSection, ranks: Mapping[str, int] | None) -> optax.GradientTransformation:
    if section.moment_dtype == "int8":
        if section.name != "adamw":
            raise ConfigError(
                f"config: optimizer.moment_dtype=int8 is for adamw; {section.name} takes float32 or bfloat16."
            )
        return scale_by_adam_8bit(section.b1, section.b2, section.eps)
    moment = jnp.dtype(section.moment_dtype)
    b1, b2, eps = section.b1, section.b2, section.eps
    return {
        "lion": lambda: optax.scale_by_lion(b1, b2, mu_dtype=moment),
        # `muon` includes the sign and a rate, which here come last. An RMS of 0.2, as AdamW's updates have, lets the
        # two share a learning rate (Liu et al., "Muon is Scalable for LLM Training", 2025).
        "muon": lambda: optax.chain(
            optax.contrib.muon(
                1.0,
                beta=0.95,
                eps=eps,
                mu_dtype=moment,
                adam_b1=b1,
                adam_b2=b2,
                consistent_rms=0.2,
                muon_weight_dimension_numbers=functools.partial(_matrices, ranks),
            ),
            optax.scale(-1.0),
        ),
        "adafactor": lambda: optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0)),
        "sgd": lambda: optax.trace(b1) if b1 else optax.identity(),
    }[section.name]()


def _matrices(ranks: Mapping[str, int] | None, params: PyTree) -> PyTree:
    """How Muon sees each parameter: matrices of the hidden layers, alone or stacked by expert; None goes to Adam."""

    def of(name: str, leaf: PyTree) -> optax.contrib.MuonDimensionNumbers | None:
        if _rank(name, leaf, ranks) < 2 or re.search(r"embed|head", name):
            return None
        return optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree.map(of, path_names(params), params)


def _grouped(decay: PyTree, factor: PyTree) -> optax.GradientTransformation:
    """Updates plus `decay` times the parameters, times `factor`; both are Python floats by parameter."""

    def update(updates: PyTree, state: object, params: PyTree = None) -> tuple[PyTree, PyTree]:
        def scale(u: AnyArray, p: AnyArray, decay: float, factor: float) -> AnyArray:
            return factor * (u + decay * p.astype(u.dtype)) if factor else jnp.zeros_like(u)

        return jax.tree.map(scale, updates, params, decay, factor), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
