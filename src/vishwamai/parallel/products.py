"""Products with their collective: an all-gather before, or a reduce-scatter after, in pieces around a ring whose
transfers hide behind the products.

Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models" (2023).
They are the two halves of a layer of tensor and sequence parallelism (Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models", 2022): rows are gathered before a weight that is split by columns, and
scattered after one that is split by rows. The gradient of each is the other, and a ring for the weight's gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NoReturn

import jax
import jax.numpy as jnp

from vishwamai.core import observe
from vishwamai.core.activations import ACTIVATIONS, activate
from vishwamai.core.arguments import checked
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.links import AxisLinks
from vishwamai.core.precision import PrecisionConfig, accumulator_dtype, resolve_precision
from vishwamai.core.shape_checks import Argument, check_float, check_shapes
from vishwamai.core.sharding import match_varying, mesh_axis_size
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.types import AnyArray
from vishwamai.ops.gated import gated_linear_unit
from vishwamai.ops.matmul import gemm
from vishwamai.parallel.overlap import decide
from vishwamai.parallel.ring_pieces import RingPieces
from vishwamai.parallel.ring_products import Static, gathered_gated, gathered_product, scattered_product

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float

_Kind = Literal["all_gather", "reduce_scatter"]


@checked
def all_gather_gemm(
    x: Float[Array, "*batch rows features"],
    w: Float[Array, "features columns"],
    *,
    axis: str,
    bias: Float[Array, " columns"] | None = None,
    activation: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    out_dtype: DTypeLike | None = None,
    overlap: bool | None = None,
    links: AxisLinks | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*batch all_rows columns"]:
    """`gemm` of the rows of all devices of the mesh axis `axis`; for use inside `shard_map`.

    As a ring, every device multiplies the rows that it has while others are on their way. The result is that of
    `gemm(all_gather(x), w)`, and its gradient is exact. A ring is differentiable once.

    Args:
      x: this device's rows, `[..., rows, features]`: bfloat16, float16, float32 or float64.
      w: this device's columns of the weight, `[features, columns]`, of the dtype of `x`.
      axis: the mesh axis over which rows and columns are split.
      bias: `[columns]`, as in `gemm`.
      activation: argument of `gemm`.
      precision: argument of `gemm`.
      out_dtype: argument of `gemm`.
      overlap: True for the ring, False for the collective and the product one after the other. None lets the model of
        the links decide (`estimate_overlap`), which knows TPUs alone; `vishwamai.explain` gives both times.
      links: `AxisLinks` of `axis_links(mesh, axis)`, for `overlap=None`. None takes those of the mesh that
        `jax.set_mesh` has put in force, else a line of neighbours.
      config: argument of `gemm`, of each product of the forward pass.
      implementation: argument of `gemm`.

    Returns:
      `[..., devices * rows, columns]` in `out_dtype`.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: a second derivative of a ring; or what `gemm` raises.

    >>> import functools, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> product = jax.shard_map(
    ...     functools.partial(all_gather_gemm, axis="tensor", overlap=True),
    ...     mesh=mesh,
    ...     in_specs=(jax.P("tensor", None), jax.P(None, "tensor")),
    ...     out_specs=jax.P(None, "tensor"),
    ... )
    >>> product(jnp.ones((4, 8)), jnp.ones((8, 2))).shape
    (4, 2)
    """
    name = "all_gather_gemm"
    _check(name, x, (("w", w),), bias, activation)
    size = mesh_axis_size(name, "axis", (axis,))
    out_dtype = _result(name, x, out_dtype)
    x, w = match_varying(cast_for_matmul(x, w))  # before the choice: both ways then see one dtype
    bias = None if bias is None else match_varying((jnp.asarray(bias), x))[0]
    if not _rings(name, "all_gather", x, w.shape[1], axis, size, overlap, links):
        x = jax.lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
        return gemm(
            x,
            w,
            bias=bias,
            activation=activation,
            precision=precision,
            out_dtype=out_dtype,
            config=config,
            implementation=implementation,
        )
    products = resolve_precision(precision, current_config().precision, x.dtype)
    return gathered_product(
        Static(RingPieces(axis, size), products, implementation, activation, out_dtype, config), x, w, bias
    )


@checked
def gemm_reduce_scatter(
    x: Float[Array, "*batch all_rows features"],
    w: Float[Array, "features columns"],
    *,
    axis: str,
    bias: Float[Array, " columns"] | None = None,
    activation: str | None = None,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    out_dtype: DTypeLike | None = None,
    overlap: bool | None = None,
    links: AxisLinks | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*batch rows columns"]:
    """This device's rows of the sum over the mesh axis `axis` of all devices' `x @ w`, with `gemm`'s epilogue after the
    sum; for use inside `shard_map`.

    As a ring, the sum for a device travels to it, and grows by each device's product on the way. The result is that of
    `psum_scatter(gemm(x, w))`, and its gradient is exact.

    Args:
      x: all rows, this device's part of the features: `[..., devices * rows, features]`, as in `all_gather_gemm`.
      w: this device's part of the weight's rows, `[features, columns]`, of the dtype of `x`.
      axis: the mesh axis over which the features are split, and over which the result's rows will be.
      bias: `[columns]`, the same on every device; added once, to the sum.
      activation: function of the sum, as in `gemm`.
      precision: argument of `gemm`.
      out_dtype: argument of `gemm`. Sums travel in it too.
      overlap: argument of `all_gather_gemm`.
      links: argument of `all_gather_gemm`.
      config: argument of `gemm`, of each product of the forward pass.
      implementation: argument of `gemm`.

    Returns:
      `[..., rows, columns]` in `out_dtype`.

    Raises:
      ShapeError: an argument is not legal, the devices do not divide the rows, or the call is not inside a `shard_map`
        over `axis`.

    >>> import functools, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> product = jax.shard_map(
    ...     functools.partial(gemm_reduce_scatter, axis="tensor", overlap=True),
    ...     mesh=mesh,
    ...     in_specs=(jax.P(None, "tensor"), jax.P("tensor", None)),
    ...     out_specs=jax.P("tensor", None),
    ... )
    >>> product(jnp.ones((4, 8)), jnp.ones((8, 2))).shape
    (4, 2)
    """
    name = "gemm_reduce_scatter"
    _check(name, x, (("w", w),), bias, activation)
    size = mesh_axis_size(name, "axis", (axis,))
    if x.shape[-2] % size:  # the all-gather needs no such check: it has one device's rows
        _fail(name, f"the {size} devices of {axis!r} do not divide the {x.shape[-2]} rows of `x`; pad them.")
    out_dtype = _result(name, x, out_dtype)
    x, w = match_varying(cast_for_matmul(x, w))
    wide = accumulator_dtype(x.dtype)
    if _rings(name, "reduce_scatter", x, w.shape[1], axis, size, overlap, links):
        products = resolve_precision(precision, current_config().precision, x.dtype)
        total: jax.Array = scattered_product(
            Static(RingPieces(axis, size), products, implementation, None, out_dtype, config), x, w
        )
    else:
        y = gemm(x, w, precision=precision, out_dtype=out_dtype, config=config, implementation=implementation)
        # Rounded before the sum, as the ring's sums are that travel in `out_dtype`.
        total = jax.lax.psum_scatter(y, axis, scatter_dimension=y.ndim - 2, tiled=True).astype(wide)
    if bias is not None:
        total = total + jnp.asarray(bias).astype(wide)
    return activate(activation, total).astype(out_dtype)


@checked
def all_gather_gated_linear_unit(
    x: Float[Array, "*batch rows features"],
    weights: Any,
    activation: str | None = "silu",
    *,
    axis: str,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    overlap: bool | None = None,
    links: AxisLinks | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*batch all_rows hidden"]:
    """`gated_linear_unit` of the rows of all devices of the mesh axis `axis`; for use inside `shard_map`.

    As a ring it is as `all_gather_gemm`; `gemm_reduce_scatter` is the product after it.

    Args:
      x: this device's rows, `[..., rows, features]`, as in `all_gather_gemm`.
      weights: (gate, up), this device's columns of each, `[features, hidden]`, of the dtype of `x`.
      activation: argument of `gated_linear_unit`.
      axis: the mesh axis over which rows and columns are split.
      precision: argument of `gated_linear_unit`.
      overlap: argument of `all_gather_gemm`.
      links: argument of `all_gather_gemm`.
      config: argument of `gated_linear_unit`, of each product of the forward pass.
      implementation: argument of `gated_linear_unit`.

    Returns:
      `[..., devices * rows, hidden]` in the dtype of `x`.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: a second derivative of a ring; or what `gated_linear_unit` raises.

    >>> import numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tensor",))
    >>> unit = jax.shard_map(
    ...     lambda x, *weights: all_gather_gated_linear_unit(x, weights, axis="tensor", overlap=True),
    ...     mesh=mesh,
    ...     in_specs=(jax.P("tensor", None), jax.P(None, "tensor"), jax.P(None, "tensor")),
    ...     out_specs=jax.P(None, "tensor"),
    ... )
    >>> unit(jnp.ones((4, 8)), jnp.ones((8, 2)), jnp.ones((8, 2))).shape
    (4, 2)
    """
    name = "all_gather_gated_linear_unit"
    if not isinstance(weights, (tuple, list)) or len(weights) != 2:
        _fail(name, "`weights` is not a pair; pass (gate, up), each of shape (features, hidden).")
    gate, up = (as_array(name, f"weights[{i}]", w) for i, w in enumerate(weights))
    _check(name, x, (("weights[0]", gate), ("weights[1]", up)), None, activation)
    size = mesh_axis_size(name, "axis", (axis,))
    out_dtype = x.dtype
    x, gate, up = match_varying(cast_for_matmul(x, gate, up))
    # both weights' columns: one trip of x serves two products
    if not _rings(name, "all_gather", x, 2 * gate.shape[1], axis, size, overlap, links):
        x = jax.lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
        y = gated_linear_unit(
            x, (gate, up), activation, precision=precision, config=config, implementation=implementation
        )
        return y.astype(out_dtype)
    products = resolve_precision(precision, current_config().precision, x.dtype)
    static = Static(RingPieces(axis, size), products, implementation, activation, x.dtype, config)
    y: jax.Array = gathered_gated(static, x, gate, up)
    return y.astype(out_dtype)


def _rings(
    name: str, kind: _Kind, x: AnyArray, n: int, axis: str, size: int, overlap: bool | None, links: AxisLinks | None
) -> bool:
    """Whether the call goes around a ring, which `explain` says."""
    if overlap is None:
        # rows of the whole product: gathered ones, or all that are there
        m = x.size // x.shape[-1] * (size if kind == "all_gather" else 1)
        overlap, why = decide(kind, m, x.shape[-1], n, x.dtype, axis, links)
    else:
        why = f"{'ring' if overlap else 'plain'}: `overlap` says so."
    observe.note(f"{name} over {axis} ({size}): {why}")
    return overlap and size > 1


def _result(name: str, x: AnyArray, out_dtype: DTypeLike | None) -> jnp.dtype:
    return x.dtype if out_dtype is None else as_jax_dtype(name, "out_dtype", out_dtype)


def _check(name: str, x: AnyArray, weights: AnyArray, bias: AnyArray, activation: str | None) -> None:
    """Raises ShapeError for what does not fit."""
    check_float(name, "x", x.dtype)
    if activation is not None and activation not in ACTIVATIONS:
        _fail(name, f"`activation` is {activation!r}; pass one of {', '.join(ACTIVATIONS)}, or None.")
    shapes = [Argument("x", "*batch rows features", tuple(x.shape), None, None)]
    for label, w in weights:
        shapes.append(Argument(label, "features columns", tuple(w.shape), None, None))
        if w.dtype != x.dtype:
            _fail(name, f"`{label}` is {w.dtype.name}, but `x` is {x.dtype.name}; pass both in one dtype.")
    if bias is not None:
        shapes.append(Argument("bias", "columns", tuple(jnp.shape(bias)), None, None))
    check_shapes(name, shapes)


def _fail(name: str, text: str) -> NoReturn:
    raise ShapeError(f"{name}: {text}")
