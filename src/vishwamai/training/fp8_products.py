"""Products of 8-bit floats, and a weight that multiplies by them.

A layer's products go through `vishwamai.gemm` on 8-bit operands; those of its experts through `vishwamai.grouped_gemm`,
whose kernels take 8-bit values widened to bfloat16, which is exact.

The magnitudes of a step come out of its backward pass as the gradients of the scales, so that they pass through `scan`,
`jax.checkpoint` and `shard_map` as gradients do; they are joined by the maximum where gradients are added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp

import vishwamai
from vishwamai.core.qtensor import QTensor
from vishwamai.core.types import PyTree
from vishwamai.core.weight import WrappedWeight

if TYPE_CHECKING:
    from jax.typing import DTypeLike


Scaling = Literal["delayed", "current", "block"]

TENSORS = ("input", "weight", "gradient")
"""What has a scale in every product."""

BLOCK = 128
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How operands are rounded.

    Attributes:
      scaling: source of the scales, `fp8.scaling`.
      margin: a scale maps `(1 + margin)` times the largest magnitude to the format's largest number.
      axes: inside `shard_map`, the mesh axes over which rows are split; "current" scales are those of all rows.
    """

    scaling: Scaling = "delayed"
    margin: float = 0.01
    axes: tuple[str, ...] = ()


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight", "scales"), meta_fields=("recipe",))
@dataclasses.dataclass(frozen=True)
class FP8Weight(WrappedWeight):
    """A matrix whose products are those of 8-bit floats.

    Attributes:
      weight: matrix or matrices in the dtype of the parameters.
      scales: scales of `TENSORS`, float32 scalars, or empty.
      recipe: rounding of the operands.
    """

    scales: dict[str, jax.Array]
    recipe: Recipe

    def product(self, x: jax.Array, out_dtype: DTypeLike | None) -> jax.Array:
        form = _Form(self.recipe, x.dtype, self.weight.dtype, jnp.dtype(out_dtype))
        return _product(form, x, self.weight, self.scales)

    def grouped(self, x: jax.Array, group_sizes: jax.Array) -> jax.Array:
        form = _Form(self.recipe, x.dtype, self.weight.dtype, x.dtype)
        return _grouped(form, x, self.weight, self.scales, group_sizes)


class _Form(NamedTuple):
    """What of a product is known when it is traced."""

    recipe: Recipe
    input: jnp.dtype
    weight: jnp.dtype
    out: jnp.dtype


def scale_of(largest: jax.Array, form: DTypeLike, margin: float) -> jax.Array:
    """What values of the format are multiplied by; 1 where all are 0."""
    scale = largest * ((1 + margin) / float(jnp.finfo(form).max))
    return jnp.where(scale > 0, scale, 1.0).astype(jnp.float32)


class _Narrow(NamedTuple):
    """Values in 8 bits, their scale, and the largest magnitude of what they stand for."""

    values: jax.Array
    scale: jax.Array
    largest: jax.Array


def _narrow(recipe: Recipe, x: jax.Array, scale: jax.Array | None, form: DTypeLike) -> _Narrow:
    """Rounds an array to 8 bits; what is beyond the format's largest number becomes it, and NaN stays NaN."""
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    if recipe.axes and recipe.scaling == "current":
        largest = jax.lax.pmax(largest, recipe.axes)
    now = scale_of(largest, form, recipe.margin)
    used = now if scale is None else jnp.where(scale > 0, scale, now)
    limit = float(jnp.finfo(form).max)
    return _Narrow(jnp.clip(wide / used, -limit, limit).astype(form), used, largest)


def _blocks(x: jax.Array, axis: int) -> QTensor:
    """A `QTensor` of e4m3 with a scale for every 128 numbers along `axis`."""
    return vishwamai.quantize(x, "fp8_e4m3", axis=axis, block_size=BLOCK)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(form: _Form, x: jax.Array, weight: jax.Array, scales: Mapping[str, jax.Array]) -> jax.Array:
    return _product_forward(form, x, weight, scales)[0]


def _product_forward(
    form: _Form, x: jax.Array, weight: jax.Array, scales: Mapping[str, jax.Array]
) -> tuple[jax.Array, PyTree]:
    if form.recipe.scaling == "block":
        return vishwamai.gemm(_blocks(x, -1), _blocks(weight, -2), out_dtype=form.out), (x, weight)
    a = _narrow(form.recipe, x, scales.get("input"), E4M3)
    b = _narrow(form.recipe, weight, scales.get("weight"), E4M3)
    out = vishwamai.gemm(a.values, b.values, scale_a=a.scale, scale_b=b.scale, out_dtype=form.out)
    return out, (a, b, scales.get("gradient"))


def _product_backward(form: _Form, saved: PyTree, g: jax.Array) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    if form.recipe.scaling == "block":
        x, weight = saved
        dx = vishwamai.gemm(_blocks(g, -1), _blocks(weight, -1), transpose_b=True, out_dtype=form.input)
        rows, gradient_rows = _flat(x), _flat(g)
        dw = vishwamai.gemm(_blocks(rows, -2), _blocks(gradient_rows, -2), transpose_a=True, out_dtype=form.weight)
        return dx, dw, {}
    a, b, scale = saved
    c = _narrow(form.recipe, g, scale, E5M2)
    dx = vishwamai.gemm(c.values, b.values, transpose_b=True, scale_a=c.scale, scale_b=b.scale, out_dtype=form.input)
    dw = vishwamai.gemm(
        _flat(a.values), _flat(c.values), transpose_a=True, scale_a=a.scale, scale_b=c.scale, out_dtype=form.weight
    )
    return dx, dw, _magnitudes(form, a, b, c)


def _magnitudes(form: _Form, a: _Narrow, b: _Narrow, c: _Narrow) -> dict[str, jax.Array]:
    """The gradients of the scales: the largest magnitudes."""
    return dict(zip(TENSORS, (a.largest, b.largest, c.largest))) if form.recipe.scaling == "delayed" else {}


_product.defvjp(_product_forward, _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(form: _Form, x: jax.Array, weight: jax.Array, scales: dict[str, jax.Array], sizes: jax.Array) -> jax.Array:
    return _grouped_forward(form, x, weight, scales, sizes)[0]


def _rounded(recipe: Recipe, x: jax.Array, scale: jax.Array | None, kind: DTypeLike, axis: int) -> _Narrow:
    """Values of 8 bits as bfloat16, which holds them exactly; with scales for blocks, rounded with their scale."""
    if recipe.scaling == "block":
        return _Narrow(_blocks(x, axis).dequantize(jnp.bfloat16), jnp.float32(1.0), jnp.float32(0.0))
    narrow = _narrow(recipe, x, scale, kind)
    return narrow._replace(values=narrow.values.astype(jnp.bfloat16))


def _grouped_forward(
    form: _Form, x: jax.Array, weight: jax.Array, scales: Mapping[str, jax.Array], sizes: jax.Array
) -> tuple[jax.Array, PyTree]:
    a = _rounded(form.recipe, x, scales.get("input"), E4M3, -1)
    b = _rounded(form.recipe, weight, scales.get("weight"), E4M3, -2)
    out = vishwamai.grouped_gemm(a.values, b.values, sizes, out_dtype=jnp.float32) * (a.scale * b.scale)
    again = (x, weight) if form.recipe.scaling == "block" else (_stored(a), _stored(b))
    return out.astype(form.out), (*again, scales.get("gradient"), sizes)


def _stored(narrow: _Narrow) -> _Narrow:
    """With values of 8 bits again, as they lie in memory until the backward pass."""
    return narrow._replace(values=narrow.values.astype(E4M3))


def _grouped_backward(
    form: _Form, saved: PyTree, g: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, jax.Array], None]:
    a, b, scale, sizes = saved
    block = form.recipe.scaling == "block"
    c = _rounded(form.recipe, g, scale, E5M2, -1)
    if block:
        # Each of the two products contracts another axis, so each has operands of its own.
        x, weight = a, b
        to_x = (jnp.zeros_like(x, jnp.bfloat16), _rounded(form.recipe, weight, None, E4M3, -1).values)
        rows = _rounded(form.recipe, x, None, E4M3, -2).values
        to_weight = (rows, jnp.zeros_like(weight, jnp.bfloat16))
        cotangents = c.values, _rounded(form.recipe, g, None, E4M3, -2).values
        factors = jnp.float32(1.0), jnp.float32(1.0)
    else:
        to_x = to_weight = (a.values.astype(jnp.bfloat16), b.values.astype(jnp.bfloat16))
        cotangents = c.values, c.values
        factors = c.scale * b.scale, c.scale * a.scale
    dx = _pull(to_x, sizes, cotangents[0])[0].astype(jnp.float32) * factors[0]
    dw = _pull(to_weight, sizes, cotangents[1])[1].astype(jnp.float32) * factors[1]
    magnitudes = {} if block else _magnitudes(form, a, b, c)
    return dx.astype(form.input), dw.astype(form.weight), magnitudes, None


def _pull(operands: tuple[object, object], sizes: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, PyTree]:
    """The gradients of a grouped product by its two operands; the one that is not used is not computed."""
    return jax.vjp(lambda lhs, rhs: vishwamai.grouped_gemm(lhs, rhs, sizes), *operands)[1](cotangent)


_grouped.defvjp(_grouped_forward, _grouped_backward)
