"""Training with products of 8-bit floats: e4m3 forward, e5m2 gradients, and the scales that keep both in range.

Micikevicius et al., "FP8 Formats for Deep Learning" (2022). A layer's products go through `vishwamai.gemm` on 8-bit
operands; those of its experts through `vishwamai.grouped_gemm`, whose kernels take 8-bit values widened to bfloat16,
which is exact. Embedding, head, router, norms and attention stay as they are.

Each product has three scales: of its input, its weight and the gradient of its result. "delayed" takes them from the
largest magnitudes of earlier steps; "current" from the tensor itself; "block" gives one to every 128 numbers along the
contracted axis, with e4m3 gradients: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.

The magnitudes of a step come out of its backward pass as the gradients of the scales, so that they pass through `scan`,
`jax.checkpoint` and `shard_map` as gradients do; they are joined by the maximum where gradients are added.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

import vishwamai
from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ConfigError
from vishwamai.core.weight import Weight
from vishwamai.training.adam import kept_where
from vishwamai.training.optimizers import path_names

Tree = Any
Scaling = Literal["delayed", "current", "block"]

SCALES = "fp8"
"""Key of the scales in a tree of parameters; their gradients are the largest magnitudes."""

TENSORS = ("input", "weight", "gradient")
"""What has a scale in every product."""

BLOCK = 128
_E4M3, _E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
_MATRICES = r"/(query|key|value|output|gate|up|down|(query|latent)_down|query_up|(expert|shared)_(gate|up|down))$"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How operands are rounded.

    Attributes:
      scaling: where scales come from.
      margin: a scale maps `(1 + margin)` times the largest magnitude to the format's largest number.
      axes: inside `shard_map`, the mesh axes over which rows are split; "current" scales are those of all rows.
    """

    scaling: Scaling = "delayed"
    margin: float = 0.01
    axes: tuple[str, ...] = ()


class FP8State(NamedTuple):
    """State of `FP8Optimizer`.

    Attributes:
      inner: state of the optimizer inside.
      scales: float32 by path and tensor; 0 before the first step. Empty unless scaling is "delayed".
      history: float32 `[..., steps]`, the largest magnitudes of the last steps, newest first.
    """

    inner: Any
    scales: dict[str, dict[str, Any]]
    history: dict[str, dict[str, Any]]


@checks_its_own("scaling")
@dataclasses.dataclass(frozen=True)
class FP8Optimizer:
    """An optax transformation that also keeps the scales of 8-bit products.

    A step that has a gradient or a magnitude that is not finite changes nothing: its updates are 0, and scales, history
    and the inner state stay.

    Attributes:
      inner: the update rule.
      margin: see `Recipe`.
      dynamic_scale: scales follow the history; False keeps those of the first finite step.
      scaling: "delayed", "current" or "block"; only the first has state.
      history: steps over which "delayed" takes the maximum.
      targets: regular expression that is searched in the paths of parameters with products.
      ranks: axes of a parameter by the last name of its path, where the parameter has one more for stacked layers.
      axes: see `Recipe`.

    >>> import vishwamai.training.fp8 as fp8
    >>> params = {"layers": {0: {"up": jnp.full((4, 2), 0.3)}}}
    >>> optimizer = FP8Optimizer(optax.sgd(0.1))
    >>> state = optimizer.init(params)
    >>> def loss(trained, x):
    ...     layer = optimizer.attach(trained)["layers"][0]
    ...     return jnp.sum(layer["up"].product(x, jnp.float32))
    >>> gradients = jax.grad(loss)(optimizer.with_scales(params, state), jnp.full((3, 4), 8.0))
    >>> updates, state = optimizer.update(gradients, state, params)
    >>> updates["layers"][0]["up"].shape, state.history["layers/0/up"]["input"][:2].tolist()
    ((4, 2), [8.0, 0.0])
    """

    inner: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.adamw(1e-3))
    margin: float = 0.01
    dynamic_scale: bool = True
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

    def init(self, params: Tree) -> FP8State:
        """The state before the first step.

        Raises:
          ConfigError: `targets` matches no parameter.
        """
        leading = self._targets(params)
        if not leading:
            raise ConfigError(f"fp8: `targets` {self.targets!r} matches no parameter; the layers have no such matrix.")
        if self.scaling != "delayed":
            return FP8State(self.inner.init(params), {}, {})

        def zeros(*tail: int) -> dict[str, dict[str, Any]]:
            return {
                name: {tensor: jnp.zeros((*shape, *tail), jnp.float32) for tensor in TENSORS}
                for name, shape in leading.items()
            }

        return FP8State(self.inner.init(params), zeros(), zeros(self.history))

    def update(
        self, gradients: Tree, state: FP8State, params: Tree = None, *, good: Any = True
    ) -> tuple[Tree, FP8State]:
        """Updates of the parameters, and the state after them.

        Args:
          gradients: with respect to what `with_scales` returns.
          state: before the step.
          params: the parameters, without scales.
          good: whether to take the step, if all is finite.
        """
        gradients = dict(gradients)
        largest = gradients.pop(SCALES, {})
        good = jax.tree.reduce(
            lambda all_so_far, x: all_so_far & jnp.all(jnp.isfinite(x)), (gradients, largest), jnp.asarray(good)
        )
        rule = optax.with_extra_args_support(self.inner)
        updates, inner = rule.update(gradients, state.inner, params, good=good)
        updates = jax.tree.map(lambda u: jnp.where(good, u, 0), updates)
        history = jax.tree.map(
            lambda old, new: jnp.concatenate([new[..., None].astype(old.dtype), old[..., :-1]], axis=-1),
            state.history,
            largest,
        )
        scales = jax.tree_util.tree_map_with_path(self._scale, history, state.scales)
        return updates, kept_where(good, FP8State(inner, scales, history), state)

    def with_scales(self, params: Tree, state: FP8State) -> Tree:
        """The parameters and the scales as one tree, to differentiate by."""
        return params | {SCALES: state.scales} if state.scales else params

    def attach(self, trained: Tree) -> Tree:
        """The parameters with an `FP8Weight` in place of each matrix that multiplies in 8 bits."""
        return attach(trained, self.recipe, self._is_target)

    def _is_target(self, name: str) -> bool:
        return name.startswith("layers/") and re.search(self.targets, name) is not None

    def _targets(self, params: Tree) -> dict[str, tuple[int, ...]]:
        """Paths of the matrices, each with the shape of its scales: that of the axis of stacked layers, or ()."""
        names = jax.tree.leaves(path_names(params))
        found = {}
        for name, leaf in zip(names, jax.tree.leaves(params), strict=True):
            if self._is_target(name):
                last = name.rpartition("/")[2]
                rank = leaf.ndim if self.ranks is None else self.ranks[last]
                found[name] = leaf.shape[: leaf.ndim - rank]
        return found

    def _scale(self, path: Any, history: Any, before: Any) -> Any:
        form = _E5M2 if path[-1].key == "gradient" else _E4M3
        now = _scale_of(history.max(axis=-1), form, self.margin)
        return now if self.dynamic_scale else jnp.where(before > 0, before, now)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "scales"), meta_fields=("recipe",))
@dataclasses.dataclass(frozen=True)
class FP8Weight(Weight):
    """A matrix whose products are those of 8-bit floats.

    Attributes:
      weight: `[in, out]`, or `[experts, in, out]`, in the dtype of the parameters.
      scales: of `TENSORS`, float32 scalars, or empty.
      recipe: how operands are rounded.
    """

    weight: Any
    scales: dict[str, Any]
    recipe: Recipe

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def dtype(self) -> Any:
        return self.weight.dtype

    def product(self, x: Any, out_dtype: Any) -> Any:
        form = _Form(self.recipe, x.dtype, self.weight.dtype, jnp.dtype(out_dtype))
        return _product(form, x, self.weight, self.scales)

    def grouped(self, x: Any, group_sizes: Any) -> Any:
        form = _Form(self.recipe, x.dtype, self.weight.dtype, x.dtype)
        return _grouped(form, x, self.weight, self.scales, group_sizes)


def attach(trained: Tree, recipe: Recipe, is_target: Callable[[str], bool]) -> Tree:
    """See `FP8Optimizer.attach`."""
    params = dict(trained)
    scales = params.pop(SCALES, {})

    def one(name: str, leaf: Any) -> Any:
        return FP8Weight(leaf, scales.get(name, {}), recipe) if is_target(name) else leaf

    return jax.tree.map(one, path_names(params), params)


def detach(attached: Tree) -> Tree:
    """The tree that `attach` took, of the one that it gave or of its gradients."""
    scales: dict[str, dict[str, Any]] = {}

    def one(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, FP8Weight):
            return leaf
        if leaf.scales:
            scales[jax.tree_util.keystr(path, simple=True, separator="/")] = leaf.scales
        return leaf.weight

    params = jax.tree_util.tree_map_with_path(one, attached, is_leaf=lambda x: isinstance(x, FP8Weight))
    return params | ({SCALES: scales} if scales else {})


def are_scales(attached: Tree) -> Tree:
    """For each leaf of what `attach` gives, whether it is a scale, whose gradients are joined by the maximum."""
    return jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.GetAttrKey("scales") in path, attached)


class _Form(NamedTuple):
    """What of a product is known when it is traced."""

    recipe: Recipe
    input: Any
    weight: Any
    out: Any


def _scale_of(largest: Any, form: Any, margin: float) -> Any:
    """What values of the format are multiplied by; 1 where all are 0."""
    scale = largest * ((1 + margin) / float(jnp.finfo(form).max))
    return jnp.where(scale > 0, scale, 1.0).astype(jnp.float32)


class _Narrow(NamedTuple):
    """Values in 8 bits, their scale, and the largest magnitude of what they stand for."""

    values: Any
    scale: Any
    largest: Any


def _narrow(recipe: Recipe, x: Any, scale: Any, form: Any) -> _Narrow:
    """Rounds an array to 8 bits; what is beyond the format's largest number becomes it, and NaN stays NaN."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    if recipe.axes and recipe.scaling == "current":
        largest = jax.lax.pmax(largest, recipe.axes)
    now = _scale_of(largest, form, recipe.margin)
    used = now if scale is None else jnp.where(scale > 0, scale, now)
    limit = float(jnp.finfo(form).max)
    return _Narrow(jnp.clip(wide / used, -limit, limit).astype(form), used, largest)


def _blocks(x: Any, axis: int) -> Any:
    """A `QTensor` of e4m3 with a scale for every 128 numbers along `axis`."""
    return vishwamai.quantize(x, "fp8_e4m3", axis=axis, block_size=BLOCK)


def _flat(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form: _Form, x: Any, weight: Any, scales: dict[str, Any]) -> Any:
    return _product_forward(form, x, weight, scales)[0]


def _product_forward(form: _Form, x: Any, weight: Any, scales: dict[str, Any]) -> tuple[Any, Any]:
    if form.recipe.scaling == "block":
        return vishwamai.gemm(_blocks(x, -1), _blocks(weight, -2), out_dtype=form.out), (x, weight)
    a = _narrow(form.recipe, x, scales.get("input"), _E4M3)
    b = _narrow(form.recipe, weight, scales.get("weight"), _E4M3)
    out = vishwamai.gemm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, out_dtype=form.out)
    return out, (a, b, scales.get("gradient"))


def _product_backward(form: _Form, saved: Any, g: Any) -> tuple[Any, Any, dict[str, Any]]:
    if form.recipe.scaling == "block":
        x, weight = saved
        dx = vishwamai.gemm(_blocks(g, -1), _blocks(weight, -1), transpose_b=True, out_dtype=form.input)
        rows, given = _flat(x), _flat(g)
        dw = vishwamai.gemm(_blocks(rows, -2), _blocks(given, -2), transpose_a=True, out_dtype=form.weight)
        return dx, dw, {}
    a, b, scale = saved
    c = _narrow(form.recipe, g, scale, _E5M2)
    dx = vishwamai.gemm(c.values, b.values, transpose_b=True, scale_a=c.scale, scale_b=b.scale, out_dtype=form.input)
    dw = vishwamai.gemm(
        _flat(a.values), _flat(c.values), transpose_a=True, scale_a=a.scale, scale_b=c.scale, out_dtype=form.weight
    )
    return dx, dw, _found(form, a, b, c)


def _found(form: _Form, a: _Narrow, b: _Narrow, c: _Narrow) -> dict[str, Any]:
    """The gradients of the scales: the largest magnitudes."""
    return dict(zip(TENSORS, (a.largest, b.largest, c.largest))) if form.recipe.scaling == "delayed" else {}


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(form: _Form, x: Any, weight: Any, scales: dict[str, Any], sizes: Any) -> Any:
    return _grouped_forward(form, x, weight, scales, sizes)[0]


def _rounded(recipe: Recipe, x: Any, scale: Any, kind: Any, axis: int) -> _Narrow:
    """Values of 8 bits as bfloat16, which holds them exactly; with scales for blocks, rounded with their scale."""
    if recipe.scaling == "block":
        return _Narrow(_blocks(x, axis).dequantize(jnp.bfloat16), jnp.float32(1.0), jnp.float32(0.0))
    narrow = _narrow(recipe, x, scale, kind)
    return narrow._replace(values=narrow.values.astype(jnp.bfloat16))


def _grouped_forward(form: _Form, x: Any, weight: Any, scales: dict[str, Any], sizes: Any) -> tuple[Any, Any]:
    a = _rounded(form.recipe, x, scales.get("input"), _E4M3, -1)
    b = _rounded(form.recipe, weight, scales.get("weight"), _E4M3, -2)
    out = vishwamai.grouped_gemm(a.values, b.values, sizes, out_dtype=jnp.float32) * (a.scale * b.scale)
    again = (x, weight) if form.recipe.scaling == "block" else (_stored(a), _stored(b))
    return out.astype(form.out), (*again, scales.get("gradient"), sizes)


def _stored(narrow: _Narrow) -> _Narrow:
    """With values of 8 bits again, as they lie in memory until the backward pass."""
    return narrow._replace(values=narrow.values.astype(_E4M3))


def _grouped_backward(form: _Form, saved: Any, g: Any) -> tuple[Any, Any, dict[str, Any], None]:
    a, b, scale, sizes = saved
    block = form.recipe.scaling == "block"
    c = _rounded(form.recipe, g, scale, _E5M2, -1)
    if block:
        # Each of the two products contracts another axis, so each has operands of its own.
        x, weight = a, b
        to_x = (jnp.zeros_like(x, jnp.bfloat16), _rounded(form.recipe, weight, None, _E4M3, -1).values)
        rows = _rounded(form.recipe, x, None, _E4M3, -2).values
        to_weight = (rows, jnp.zeros_like(weight, jnp.bfloat16))
        cotangents = c.values, _rounded(form.recipe, g, None, _E4M3, -2).values
        factors = jnp.float32(1.0), jnp.float32(1.0)
    else:
        to_x = to_weight = (a.values.astype(jnp.bfloat16), b.values.astype(jnp.bfloat16))
        cotangents = c.values, c.values
        factors = c.scale * b.scale, c.scale * a.scale
    dx = _pull(to_x, sizes, cotangents[0])[0].astype(jnp.float32) * factors[0]
    dw = _pull(to_weight, sizes, cotangents[1])[1].astype(jnp.float32) * factors[1]
    found = {} if block else _found(form, a, b, c)
    return dx.astype(form.input), dw.astype(form.weight), found, None


def _pull(operands: tuple[Any, Any], sizes: Any, cotangent: Any) -> tuple[Any, Any]:
    """The gradients of a grouped product by its two operands; the one that is not used is not computed."""
    return jax.vjp(lambda lhs, rhs: vishwamai.grouped_gemm(lhs, rhs, sizes), *operands)[1](cotangent)


_grouped.defvjp(_grouped_forward, _grouped_backward)
