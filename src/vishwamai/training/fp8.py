"""Training with products of 8-bit floats: e4m3 forward, e5m2 gradients, and the scales that keep both in range.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022). The matrices of a layer and of its experts multiply by
`fp8_products`. Embedding, head, router, norms and attention stay as they are.

Each product has three scales: of its input, its weight and the gradient of its result. "delayed" takes them from the
largest magnitudes of earlier steps; "current" from the tensor itself; "block" gives one to every 128 numbers along the
contracted axis, with e4m3 gradients: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.

The magnitudes of a step come out of its backward pass as the gradients of the scales.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ConfigError
from vishwamai.core.types import PyTree
from vishwamai.training.adam import kept_where
from vishwamai.training.fp8_products import E4M3, E5M2, TENSORS, FP8Weight, Recipe, Scaling, scale_of
from vishwamai.training.optimizers import path_names

SCALES = "fp8"
"""Key of the scales in a tree of parameters; their gradients are the largest magnitudes."""

_MATRICES = (
    r"^layers/(.*/)?(query|key|value|output|gate|up|down|(query|latent)_down|query_up|(expert|shared)_(gate|up|down))$"
)


class FP8State(NamedTuple):
    """State of `FP8Optimizer`.

    Attributes:
      inner: state of the optimizer inside.
      scales: float32 by path and tensor; 0 before the first step. Empty unless scaling is "delayed".
      history: float32 `[..., steps]`, the largest magnitudes of the last steps, newest first.
    """

    inner: PyTree
    scales: dict[str, dict[str, jax.Array]]
    history: dict[str, dict[str, jax.Array]]


@checks_its_own("scaling")
@dataclasses.dataclass(frozen=True)
class FP8Optimizer:
    """An optax transformation that also keeps the scales of 8-bit products.

    A step that has a gradient or a magnitude that is not finite changes nothing: its updates are 0, and scales, history
    and the inner state stay.

    Attributes:
      margin: see `Recipe`.
      dynamic_scale: scales follow the history; False keeps those of the first finite step.
      inner: the update rule, of optax; AdamW with a rate of 1e-3 if it is left out.
      scaling: "delayed", "current" or "block"; only the first has state.
      history: steps over which "delayed" takes the maximum.
      targets: regular expression that is searched in the paths of parameters with products, "layers/0/up"; that of the
        layers' matrices of a `vishwamai.models.Decoder` if it is left out.
      ranks: axes of a parameter by the last name of its path, where the parameter has one more for stacked layers.
      axes: see `Recipe`.

    >>> params = {"up": jnp.full((4, 2), 0.3), "bias": jnp.zeros(2)}
    >>> def loss(params, x):
    ...     return jnp.sum(x @ params["up"] + params["bias"])  # a product of 8-bit floats
    >>> optimizer = FP8Optimizer(0.01, True, targets="up")
    >>> state = optimizer.init(params)
    >>> value, gradients = optimizer.value_and_grad(loss)(params, state, jnp.full((3, 4), 8.0))
    >>> updates, state = optimizer.update(gradients, state, params)
    >>> params = optax.apply_updates(params, updates)
    >>> round(float(value), 2), state.history["up"]["input"][:2].tolist()
    (58.76, [8.0, 0.0])
    """

    margin: float = 0.01
    dynamic_scale: bool = True
    inner: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))
    scaling: Scaling = "delayed"
    history: int = 16
    targets: str = _MATRICES
    ranks: Mapping[str, int] | None = None
    axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, str) or self.scaling not in ("delayed", "current", "block"):
            raise ConfigError(f"fp8: `scaling` is {self.scaling!r}; pass 'delayed', 'current' or 'block'.")
        if not 0 <= self.margin < 1 or not isinstance(self.history, int) or self.history < 1:
            raise ConfigError(
                f"fp8: `margin` is {self.margin!r} and `history` is {self.history!r}; pass a margin of 0 to 1 and at "
                "least one step of history."
            )
        if not self.dynamic_scale and self.scaling != "delayed":
            raise ConfigError(
                f"fp8: dynamic_scale=False keeps scales, but {self.scaling!r} scaling has none to keep; pass "
                "scaling='delayed'."
            )

    @property
    def recipe(self) -> Recipe:
        """How products round."""
        return Recipe(self.scaling, self.margin, self.axes)

    def init(self, params: PyTree) -> FP8State:
        """The state before the first step.

        Raises:
          ConfigError: `targets` matches no parameter.
        """
        leading = self._targets(params)
        if not leading:
            raise ConfigError(f"fp8: `targets` {self.targets!r} matches no parameter; the layers have no such matrix.")
        if self.scaling != "delayed":
            return FP8State(self.inner.init(params), {}, {})

        def zeros(*tail: int) -> dict[str, dict[str, jax.Array]]:
            return {
                name: {tensor: jnp.zeros((*shape, *tail), jnp.float32) for tensor in TENSORS}
                for name, shape in leading.items()
            }

        return FP8State(self.inner.init(params), zeros(), zeros(self.history))

    def update(
        self, gradients: PyTree, state: FP8State, params: PyTree = None, *, good: bool | jax.Array = True
    ) -> tuple[PyTree, FP8State]:
        """Updates of the parameters, and the state after them.

        Args:
          gradients: gradients of `value_and_grad`, or with respect to the result of `with_scales`. Those of parameters
            alone, without magnitudes, leave the scales as they are.
          state: optimizer state before the step.
          params: the parameters, without scales.
          good: boolean scalar, whether to take the step, if all is finite.
        """
        gradients = dict(gradients)
        largest = gradients.pop(SCALES, {})
        good = jax.tree.reduce(
            lambda all_so_far, x: all_so_far & jnp.all(jnp.isfinite(x)), (gradients, largest), jnp.asarray(good)
        )
        rule = optax.with_extra_args_support(self.inner)
        updates, inner = rule.update(gradients, state.inner, params, good=good)
        updates = jax.tree.map(lambda u: jnp.where(good, u, 0), updates)
        history, scales = state.history, state.scales
        if largest:
            history = jax.tree.map(
                lambda old, new: jnp.concatenate([new[..., None].astype(old.dtype), old[..., :-1]], axis=-1),
                history,
                largest,
            )
            scales = jax.tree_util.tree_map_with_path(self._scale, history, scales)
        return updates, kept_where(good, FP8State(inner, scales, history), state)

    def with_scales(self, params: PyTree, state: FP8State) -> PyTree:
        """The parameters and the scales as one tree, to differentiate by."""
        return params | {SCALES: state.scales} if state.scales else params

    def value_and_grad(
        self, loss: Callable[..., object], has_aux: bool = False
    ) -> Callable[..., tuple[PyTree, PyTree]]:
        """`jax.value_and_grad` of a loss whose products with the targets are those of 8-bit floats.

        Args:
          loss: function of parameters and further arguments. Among them, a target is an `FP8Weight`: `x @ weight`
            multiplies in 8 bits, and so do the layers of `vishwamai.models`.
          has_aux: flag as in `jax.value_and_grad`.

        Returns:
          A function of (parameters, state, further arguments) to the value and the gradients that `update` takes.
        """
        differentiated = jax.value_and_grad(
            lambda trained, *args, **options: loss(self.attach(trained), *args, **options), has_aux=has_aux
        )
        return lambda params, state, *args, **options: differentiated(self.with_scales(params, state), *args, **options)

    def attach(self, trained: PyTree) -> PyTree:
        """The parameters with an `FP8Weight` in place of each matrix that multiplies in 8 bits."""
        return attach(trained, self.recipe, self._is_target)

    def _is_target(self, name: str) -> bool:
        return re.search(self.targets, name) is not None

    def _targets(self, params: PyTree) -> dict[str, tuple[int, ...]]:
        """Paths of the matrices, each with the shape of its scales: that of the axis of stacked layers, or ()."""
        names = jax.tree.leaves(path_names(params))
        shapes = {}
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            if self._is_target(name):
                last = name.rpartition("/")[2]
                rank = leaf.ndim if self.ranks is None else self.ranks[last]
                shapes[name] = leaf.shape[: leaf.ndim - rank]
        return shapes

    def _scale(self, path: jax.tree_util.KeyPath, history: jax.Array, before: jax.Array) -> jax.Array:
        form = E5M2 if path[-1].key == "gradient" else E4M3
        now = scale_of(history.max(axis=-1), form, self.margin)
        return now if self.dynamic_scale else jnp.where(before > 0, before, now)


def attach(trained: PyTree, recipe: Recipe, is_target: Callable[[str], bool]) -> PyTree:
    """See `FP8Optimizer.attach`."""
    params = dict(trained)
    scales = params.pop(SCALES, {})

    def weight(name: str, leaf: PyTree) -> PyTree:
        return FP8Weight(leaf, scales.get(name, {}), recipe) if is_target(name) else leaf

    return jax.tree.map(weight, path_names(params), params)


def detach(attached: PyTree) -> PyTree:
    """The tree that `attach` took, of the one that it gave or of its gradients."""
    scales: dict[str, dict[str, jax.Array]] = {}

    def detached(path: jax.tree_util.KeyPath, leaf: PyTree) -> PyTree:
        if not isinstance(leaf, FP8Weight):
            return leaf
        if leaf.scales:
            scales[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf.scales
        return leaf.weight

    params = jax.tree_util.tree_map_with_path(detached, attached, is_leaf=lambda x: isinstance(x, FP8Weight))
    return params | ({SCALES: scales} if scales else {})


def are_scales(attached: PyTree) -> PyTree:
    """For each leaf of what `attach` gives, whether it is a scale, whose gradients are joined by the maximum."""
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.GetAttrKey("scales") in path, attached)
