"""LoRA: a frozen weight W and a trained product of two thin matrices, W + (alpha / rank) A B.

Hu et al., "LoRA" (2021). With a quantized W it is QLoRA (Dettmers et al., 2023): a layer's W is dequantized where the
layer runs, and again in the backward pass if the layer is recomputed (`remat`).

Over several devices, the thin matrices are split as the axes of W that they have, and are made whole with it.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from vishwamai.core.errors import ConfigError
from vishwamai.core.qtensor import QTensor
from vishwamai.core.types import PyTree
from vishwamai.training.config import LoraSection
from vishwamai.training.optimizers import path_names
from vishwamai.training.parameter_names import is_bias, parameter_name

ADAPTER_RANKS = {"down": 2, "up": 2}
"""Axes of the arrays of an adapter, without that of stacked layers."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "down", "up"), meta_fields=("scale",))
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A weight with its adapter; it stands for `weight + scale * down @ up`.

    Attributes:
      weight: `[..., in, out]`, an array or a `QTensor`.
      down: `[..., in, rank]`. up: `[..., rank, out]`.
      scale: alpha / rank.
    """

    weight: PyTree
    down: jax.Array
    up: jax.Array
    scale: float

    def merge(self) -> jax.Array:
        """The sum, `[..., in, out]`, in the adapter's dtype."""
        weight = self.weight.dequantize() if isinstance(self.weight, QTensor) else self.weight
        return weight.astype(self.down.dtype) + self.scale * (self.down @ self.up)


def initial_adapters(
    section: LoraSection, params: PyTree, key: jax.Array, ranks: Mapping[str, int] | None = None
) -> dict[str, dict[str, jax.Array]]:
    """Adapters of the weights that the section's pattern names, by path; they start as no change.

    Args:
      section: section of the configuration.
      params: the frozen parameters.
      key: random key of the `down` matrices; `up` starts at 0.
      ranks: axes of a parameter by the last name of its path, where the parameter has one more for stacked layers.

    Raises:
      ConfigError: the pattern is not a regular expression, or names no matrix of a layer.

    >>> params = {"layers": {0: {"query": jnp.ones((8, 4)), "norm": jnp.ones(8)}}}
    >>> adapters = initial_adapters(LoraSection(rank=2), params, jax.random.key(0))
    >>> {path: {name: x.shape for name, x in a.items()} for path, a in adapters.items()}
    {'layers/0/query': {'down': (8, 2), 'up': (2, 4)}}
    """
    names = jax.tree.leaves(path_names_of_weights(params))
    weights = jax.tree.leaves(params, is_leaf=_is_weight)
    inside = {name: w for name, w in zip(names, weights) if name.startswith("layers/")}

    def is_matrix(name: str, weight: PyTree) -> bool:
        return takes_adapter(name, len(weight.shape) if ranks is None else ranks[name.rpartition("/")[2]])

    pattern = target_pattern(section)
    chosen = {name: w for name, w in inside.items() if pattern.search(name) and is_matrix(name, w)}
    if not chosen:
        raise ConfigError(
            f"config: lora.targets {section.targets!r} names no matrix of a layer; the first layer has "
            f"{', '.join(name for name in inside if name.startswith('layers/0/'))}."
        )
    adapters = {}
    for part, (name, weight) in zip(jax.random.split(key, len(chosen)), chosen.items()):
        *stack, rows, columns = weight.shape
        down = jax.random.normal(part, (*stack, rows, section.rank)) * rows**-0.5
        adapters[name] = {"down": down, "up": jnp.zeros((*stack, section.rank, columns))}
    return adapters


def target_pattern(section: LoraSection) -> re.Pattern[str]:
    """`lora.targets`, compiled.

    Raises:
      ConfigError: it is not a regular expression.
    """
    try:
        return re.compile(section.targets)
    except re.error as error:
        raise ConfigError(f"config: lora.targets {section.targets!r} is not a regular expression: {error}.") from error


def takes_adapter(name: str, axes: int) -> bool:
    """Whether a parameter of a layer, with so many axes, is a matrix; the biases of experts have an axis more than
    others.

    >>> takes_adapter("expert_down", 3), takes_adapter("expert_down_bias", 2), takes_adapter("norm", 1)
    (True, False, False)
    """
    return axes >= 2 and not is_bias(name)


def attach(section: LoraSection, params: PyTree, adapters: dict[str, dict[str, jax.Array]]) -> PyTree:
    """The parameters with an `Adapted` in place of each adapted weight."""
    scale = section.alpha / section.rank

    def adapt(name: str, weight: PyTree) -> PyTree:
        return Adapted(weight, **adapters[name], scale=scale) if name in adapters else weight

    return jax.tree.map(adapt, path_names_of_weights(params), params)


def merge_adapters(tree: PyTree, gather: Callable[[str, object], object] = lambda _, x: x) -> PyTree:
    """Plain arrays in place of each `Adapted`, and of each quantized weight.

    Args:
      tree: parameters of `attach`.
      gather: all-gather of an array or a `QTensor` by the name of `parameter_names.parameter_name`, such as
        `gather.gather_parameter`.
    """

    def merge(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        name = parameter_name(path)
        if isinstance(leaf, Adapted):
            thin = {part: gather(f"{name}/{part}", getattr(leaf, part)) for part in ADAPTER_RANKS}
            return dataclasses.replace(leaf, weight=gather(name, leaf.weight), **thin).merge()
        leaf = gather(name, leaf)
        return leaf.dequantize() if isinstance(leaf, QTensor) else leaf

    return jax.tree_util.tree_map_with_path(merge, tree, is_leaf=_is_weight)


def path_names_of_weights(params: PyTree) -> PyTree:
    """`path_names`, with one name for a quantized weight."""
    return path_names(jax.tree.map(lambda _: 0, params, is_leaf=_is_weight))


def _is_weight(leaf: PyTree) -> bool:
    return isinstance(leaf, QTensor | Adapted)
