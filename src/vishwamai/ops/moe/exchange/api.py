"""Grouped products with the all-to-all of their rows, before or after: the exchange of expert parallelism, for use
inside the caller's `shard_map`.

Lepikhin et al., "GShard" (2020): tokens travel to the devices of their experts, and results travel back. In pieces
(`pieces.py`), the transfers hide behind the products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import jax.numpy as jnp

from vishwamai.core import observe
from vishwamai.core.arguments import checked
from vishwamai.core.errors import ShapeError
from vishwamai.core.links import AxisLinks
from vishwamai.core.qtensor import QTensor
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.sharding import match_varying, mesh_axis_size
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.types import AnyArray
from vishwamai.ops.moe.exchange.pieces import Pieces, Weights, arrive, depart
from vishwamai.ops.moe.exchange.times import decide, estimate_exchange
from vishwamai.ops.moe.exchange.transport import all_to_all, run_experts
from vishwamai.ops.moe.spec import experts_spec

if TYPE_CHECKING:
    from jax import Array
    from jax.typing import DTypeLike
    from jaxtyping import Float, Int


@checked
def all_to_all_grouped_gemm(
    rows: Float[Array, "devices room features"],
    rhs: Float[Array, "experts features columns"] | QTensor | PackedQTensor,
    group_sizes: Int[Array, "devices experts"],
    *,
    axis: str,
    bias: Float[Array, "experts columns"] | None = None,
    out_dtype: Any = None,
    overlap: bool | None = None,
    links: AxisLinks | None = None,
    config: object = None,
    implementation: str | None = None,
) -> tuple[Any, Any]:
    """`grouped_gemm` of the rows that all devices of the mesh axis `axis` have for this device's experts; for use
    inside `shard_map`.

    In pieces, a device multiplies the rows that are there while others are on their way. The values and gradients are
    those of the all-to-all with one product after it. The pieces are differentiable once.

    Args:
      rows: `[devices, room, features]`, this device's rows for the experts of each device, sorted by expert: bfloat16,
        float16, float32 or float64. What is behind them in a buffer is not used.
      rhs: this device's experts, `[experts, features, columns]`, of the dtype of `rows`; or what `grouped_gemm` takes
        in their place.
      group_sizes: `[devices, experts]`, this device's rows for each expert of each device; their sum is at most `room`
        for each device.
      axis: the mesh axis over which the experts are split.
      bias: `[experts, columns]`, added to the rows of each expert.
      out_dtype: argument of `grouped_gemm`.
      overlap: True for pieces, False for the all-to-all and the product one after the other. None lets the model of the
        links decide (`estimate_exchange`), which knows TPUs alone; `vishwamai.explain` gives both times.
      links: `AxisLinks` of `axis_links(mesh, axis)`, for `overlap=None`. None takes those of the mesh that
        `jax.set_mesh` has put in force, else a line of neighbours.
      config: argument of `grouped_gemm`.
      implementation: argument of `grouped_gemm`.

    Returns:
      (`[devices, room, columns]`, the products of the rows from each device, 0 where a buffer has no row; `[devices,
      experts]`, the rows from each device for each of this device's experts), which `grouped_gemm_all_to_all` takes.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: a second derivative of pieces; or what `grouped_gemm` raises.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("expert",))
    >>> def there(rows, rhs, sizes):
    ...     return all_to_all_grouped_gemm(rows, rhs, sizes, axis="expert", overlap=True)
    >>> split = jax.P("expert")
    >>> run = jax.shard_map(there, mesh=mesh, in_specs=split, out_specs=split)
    >>> out, sizes = run(jnp.ones((1, 4, 8)), jnp.ones((2, 8, 3)), jnp.array([[1, 2]]))
    >>> out[0, :, 0].tolist(), sizes.tolist()
    ([8.0, 8.0, 8.0, 0.0], [[1, 2]])
    """
    name = "all_to_all_grouped_gemm"
    rows, weights, group_sizes, size, out_dtype = _checked(name, rows, rhs, bias, group_sizes, axis, out_dtype)
    arriving = all_to_all(group_sizes, (axis,))
    pieces = Pieces(axis, size, config, implementation, out_dtype)
    if _in_pieces(name, pieces, rows, weights, overlap, links):
        parts = [products[0] for products in arrive(pieces, rows, weights, arriving)]
        return pieces.joined(parts, -1), arriving
    return _plain(pieces, all_to_all(rows, (axis,)), weights, arriving), arriving


@checked
def grouped_gemm_all_to_all(
    rows: Float[Array, "devices room features"],
    rhs: Float[Array, "experts features columns"] | QTensor | PackedQTensor,
    group_sizes: Int[Array, "devices experts"],
    *,
    axis: str,
    bias: Float[Array, "experts columns"] | None = None,
    out_dtype: Any = None,
    overlap: bool | None = None,
    links: AxisLinks | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "devices room columns"]:
    """`grouped_gemm` of the rows that came from all devices of the mesh axis `axis`, and the way back of the results;
    for use inside `shard_map`.

    In pieces, results travel while others are computed. The values and gradients are those of one product with the
    all-to-all after it. The pieces are differentiable once.

    Args:
      rows: `[devices, room, features]`, the rows from each device, sorted by expert, as `all_to_all_grouped_gemm` gives
        them.
      rhs: this device's experts, as in `all_to_all_grouped_gemm`.
      group_sizes: `[devices, experts]`, the rows from each device for each of this device's experts, as
        `all_to_all_grouped_gemm` gives them.
      axis: argument of `all_to_all_grouped_gemm`.
      bias: argument of `all_to_all_grouped_gemm`.
      out_dtype: argument of `grouped_gemm`. Results travel in it too.
      overlap: argument of `all_to_all_grouped_gemm`.
      links: argument of `all_to_all_grouped_gemm`.
      config: argument of `grouped_gemm`.
      implementation: argument of `grouped_gemm`.

    Returns:
      `[devices, room, columns]`, what each device's experts made of this device's rows, in their places.

    Raises:
      ShapeError: an argument is not legal, or the call is not inside a `shard_map` over `axis`.
      UnsupportedError: a second derivative of pieces; or what `grouped_gemm` raises.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("expert",))
    >>> def back(rows, rhs, sizes):
    ...     return grouped_gemm_all_to_all(rows, rhs, sizes, axis="expert", overlap=True)
    >>> split = jax.P("expert")
    >>> run = jax.shard_map(back, mesh=mesh, in_specs=split, out_specs=split)
    >>> run(jnp.ones((1, 4, 8)), jnp.ones((2, 8, 3)), jnp.array([[1, 2]]))[0, :, 0].tolist()
    [8.0, 8.0, 8.0, 0.0]
    """
    name = "grouped_gemm_all_to_all"
    rows, weights, group_sizes, size, out_dtype = _checked(name, rows, rhs, bias, group_sizes, axis, out_dtype)
    pieces = Pieces(axis, size, config, implementation, out_dtype)
    if _in_pieces(name, pieces, rows, weights, overlap, links):
        return depart(pieces, pieces.cut(rows), weights, group_sizes)
    return all_to_all(_plain(pieces, rows, weights, group_sizes), (axis,))


def _plain(pieces: Pieces, rows: Any, weights: Weights, sizes: Any) -> Any:
    """One product of the rows `[devices, room, features]` of all devices."""

    def experts(rows: Any, group_sizes: AnyArray) -> Any:
        return pieces.products(rows, weights, group_sizes)[0]

    return run_experts(rows, sizes, experts)


def _in_pieces(
    name: str, pieces: Pieces, rows: Any, weights: Weights, overlap: bool | None, links: AxisLinks | None
) -> bool:
    """Whether the call is made in pieces, which `explain` says."""
    _, room, features = rows.shape
    experts, _, columns = experts_spec(weights[0][0]).shape
    results = name == "grouped_gemm_all_to_all"

    def estimates(links: AxisLinks) -> list[Any]:
        return [estimate_exchange(room, features, columns, experts, rows.dtype.name, links, results=results)]

    chosen, why = decide(name, pieces.axis, pieces.size, overlap, links, estimates)
    observe.note(f"{name} over {pieces.axis} ({pieces.size}): {why}")
    return chosen


def _checked(
    name: str, rows: Any, rhs: AnyArray, bias: AnyArray, group_sizes: AnyArray, axis: str, out_dtype: DTypeLike | None
) -> tuple[Any, Weights, Any, int, Any]:
    """The arguments as arrays that vary alike, the number of devices, and the dtype of the result.

    Raises:
      ShapeError: something does not fit.
    """
    size = mesh_axis_size(name, "axis", (axis,))
    rows, group_sizes = as_array(name, "rows", rows), as_array(name, "group_sizes", group_sizes)
    bias = None if bias is None else as_array(name, "bias", bias)
    if not isinstance(rhs, (QTensor, PackedQTensor)):
        rhs = as_array(name, "rhs", rhs)
        if rhs.dtype != rows.dtype:
            _fail(name, f"`rhs` is {rhs.dtype.name}, but `rows` is {rows.dtype.name}; pass both in one dtype.")
    if not jnp.issubdtype(rows.dtype, jnp.floating):
        _fail(name, f"`rows` has dtype {rows.dtype.name}; pass a floating-point array.")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        _fail(name, f"`group_sizes` has dtype {group_sizes.dtype.name}; pass integers.")
    shape = experts_spec(rhs).shape
    if rows.ndim != 3 or rows.shape[0] != size:
        _fail(
            name,
            f"`rows` has shape {rows.shape}, but {axis!r} has {size} devices; pass ({size}, room, features), the rows "
            "for each.",
        )
    if len(shape) != 3 or shape[1] != rows.shape[2]:
        _fail(
            name,
            f"`rhs` has shape {shape}, but `rows` of shape {rows.shape} have {rows.shape[2]} features; pass (experts, "
            f"{rows.shape[2]}, columns).",
        )
    if group_sizes.shape != (size, shape[0]):
        _fail(
            name,
            f"`group_sizes` has shape {group_sizes.shape}; pass ({size}, {shape[0]}), for {size} devices the rows of "
            f"each of {shape[0]} experts.",
        )
    if bias is not None and bias.shape != (shape[0], shape[2]):
        _fail(name, f"`bias` has shape {bias.shape}; pass {(shape[0], shape[2])}, for each expert its columns.")
    dtype = None if out_dtype is None else as_jax_dtype(name, "out_dtype", out_dtype)
    rows, rhs, bias, group_sizes = match_varying((rows, rhs, bias, group_sizes.astype(jnp.int32)))
    return rows, ((rhs, bias),), group_sizes, size, dtype


def _fail(name: str, text: str) -> NoReturn:
    raise ShapeError(f"{name}: {text}")
