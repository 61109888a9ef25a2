"""Sharded parameters inside `shard_map`: their all-gather, the sums of their gradients, and what is rounded on the way.

The gradient of a gather adds up and splits the gradients: Rajbhandari et al., "ZeRO" (2020); Zhao et al., "PyTorch
FSDP" (2023). The loss and its gradient run in one `shard_map`, so every operation sees the arrays of one device.

The model rounds its matrices to bfloat16 before it multiplies them, so a device rounds its part and sends half of the
bytes. The gradient of the gather adds up in `model.reduce_dtype`. Where that is bfloat16, the gradients of all layers
stay in it until the update, because every one of them is a number of bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from vishwamai.core.qtensor import QTensor, bits
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.parallel.in_order import among_processes
from vishwamai.training.config import TrainConfig
from vishwamai.training.fp8 import SCALES
from vishwamai.training.parameter_names import of_layers, parameter_name
from vishwamai.training.sharding import (
    ALL,
    PIPELINE,
    ROWS,
    TOKENS,
    Layout,
    batch_specs,
    is_quantized,
    split_axis,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


def gathered(x: PyTree, axis: int, over: str) -> PyTree:
    """Inside `shard_map`: a whole array or `QTensor` from the parts along an axis, counted from the end.

    Args:
      over: the mesh axis that splits it. Scales of a `QTensor` whose number it does not divide are whole already.
    """
    if not isinstance(x, QTensor):
        return _gathered(x, axis, over)
    values = _gathered(x.values, axis, over)
    size = values.shape[axis]
    if axis == x.axis:
        size = (
            1 if x.block_size is None else -(-size // x.block_size)
        )  # number of scales of the whole array along its quantized axis
    scales = x.scales if x.scales.shape[axis] == size else _gathered(x.scales, axis, over)
    return dataclasses.replace(x, values=values, scales=scales)


def _gathered(x: PyTree, axis: int, over: str) -> PyTree:
    """Numbers of 8 bits or fewer travel as bytes, which every backend's collectives take; two of 4 bits in one where
    the last axis is even.
    """
    dtype, where = x.dtype, axis + x.ndim
    pairs = bits(dtype) == 4 and x.shape[-1] % 2 == 0
    if pairs:
        x = jax.lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 2), jnp.uint8)
    elif bits(dtype) == 4:
        x = jax.lax.bitcast_convert_type(x, jnp.uint4).astype(jnp.uint8)
    elif bits(dtype) == 8:
        x = jax.lax.bitcast_convert_type(x, jnp.uint8)
    x = jax.lax.all_gather(x, over, axis=where, tiled=True)
    if pairs:
        x = jax.lax.bitcast_convert_type(x, dtype)
        return x.reshape(*x.shape[:-2], -1)
    if bits(dtype) == 4:
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint4), dtype)
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype != dtype else x


def gather_parameters(layout: Layout, arrays: PyTree) -> PyTree:
    """Inside `over_devices`: whole parameters from this device's parts, by the last name of each path."""
    if layout.mesh is None:
        return arrays

    def gather(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
        return gather_parameter(layout, parameter_name(path), x)

    return jax.tree_util.tree_map_with_path(gather, arrays, is_leaf=is_quantized)


def summed(layout: Layout, gradients: PyTree) -> PyTree:
    """Inside `over_devices`: the gradients of a microbatch, those that "fsdp" splits added up before others are.

    The compiler for TPUs moves a sum over devices out of a loop that only adds its results up. For the embedding
    and the head every device would then keep the whole gradient: on 16 devices, 3.6 GiB more of Llama 3 8B. The
    gradients of layers come out of a loop of their own.
    """

    def settle(path: jax.tree_util.KeyPath, g: PyTree) -> PyTree:
        split = split_axis(layout.axes, parameter_name(path)) is not None
        return jax.lax.optimization_barrier(g) if split and not of_layers(path) else g

    return jax.tree_util.tree_map_with_path(settle, gradients)


def gather_parameter(layout: Layout, name: str, x: PyTree) -> PyTree:
    """Inside `over_devices`: a whole parameter, an array or a `QTensor`, by its name; those `in_parts` stay split."""
    axis = gathered_axis(layout, name)
    return x if axis is None else gathered(x, axis, "fsdp")


def gathered_axis(layout: Layout, name: str) -> int | None:
    """The axis along which devices gather a parameter, counted from the end; None where they do not."""
    return None if name in layout.in_parts else split_axis(layout.axes, name)


def over_devices(
    layout: Layout, compute: Callable[..., PyTree], params: PyTree, gradients: bool = True, frozen: PyTree = None
) -> Callable[..., PyTree]:
    """`compute(params, batch, *scalars)` to (gradients, sums) of each device's tokens, as one function of all.

    The gradients are those of the sum over all devices, which counts a token `copies` times; they come out split
    like the parameters. The sums count it once. Without `gradients`, `compute` gives None in their place. It takes
    `frozen` by that name, parameters without gradients, where there are some.
    """
    if layout.mesh is None:
        return compute if frozen is None else functools.partial(compute, frozen=frozen)
    specs, others = layout.specs(params), layout.specs(frozen)

    def local(params: PyTree, batch: PyTree, scalars: PyTree, frozen: PyTree) -> tuple[PyTree, PyTree]:
        grown, sums = compute(params, batch, *scalars, **({} if frozen is None else {"frozen": frozen}))

        def total(path: jax.tree_util.KeyPath, g: PyTree) -> PyTree:
            staged = {PIPELINE} if layout.staged(path) else set()
            if path[0] == jax.tree_util.DictKey(SCALES):
                return jax.lax.pmax(g, tuple(axis for axis in ALL if axis not in staged))
            # The gradient of a gather has been added up already, and what no device gathers has no copies.
            name = parameter_name(path)
            done = {split for split, axes in layout.splits if split_axis(axes, name) is not None}
            return jax.lax.psum(g, tuple(axis for axis in ALL if axis not in done | staged))

        return jax.tree_util.tree_map_with_path(total, grown), jax.lax.psum(sums, TOKENS)

    def call(params: PyTree, batch: PyTree, *scalars: jax.Array) -> tuple[PyTree, PyTree]:
        places = (specs, batch_specs(batch), PartitionSpec(), others)
        out = (specs if gradients else PartitionSpec(), PartitionSpec())
        run = jax.shard_map(among_processes(local), mesh=layout.mesh, in_specs=places, out_specs=out, check_vma=False)
        return run(params, batch, scalars, frozen)

    return call


def by_part(layout: Layout, compute: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """`compute(*trees)`, as a function of the parts that each device has of every array: of parameters, of what an
    optimizer keeps for them, and of scalars. What it computes of an element takes no other element.
    """
    if layout.mesh is None:
        return compute

    def call(*trees: PyTree) -> PyTree:
        out = layout.specs(jax.eval_shape(compute, *trees))
        run = jax.shard_map(compute, mesh=layout.mesh, in_specs=layout.specs(trees), out_specs=out, check_vma=False)
        return run(*trees)

    return call


def by_row(layout: Layout, compute: Callable[..., PyTree], params: PyTree) -> Callable[..., PyTree]:
    """`compute(params, batch)` to arrays `[rows, ...]` of each device's rows, as one function of all rows."""
    if layout.mesh is None:
        return compute
    specs = layout.specs(params)

    def call(params: PyTree, batch: PyTree) -> PyTree:
        places = (specs, batch_specs(batch))
        run = jax.shard_map(
            among_processes(compute),
            mesh=layout.mesh,
            in_specs=places,
            out_specs=PartitionSpec(ROWS),
            check_vma=False,
        )
        return run(params, batch)

    return call


UNROUNDED = frozenset({"embed", "router"})
"""Parameters that a model does not round to its compute dtype before it uses them."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("value", "gradient"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A parameter that is used rounded.

    Attributes:
      value: the parameter, which has no gradient of its own.
      gradient: array that the gradient is taken of in its place, of its shape, in the dtype of the gradient.
    """

    value: PyTree
    gradient: PyTree


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How a run rounds what it gathers.

    Attributes:
      layout: the devices.
      sums: dtype in which the gradient of a gather adds up. stored: in which it stays until the update.
    """

    layout: Layout
    sums: DTypeLike
    stored: DTypeLike

    def places(self, params: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
        """What gradients are taken of, and a function from that to the parameters of a loss that calls `gather`."""

        def place(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
            return jnp.zeros(x.shape, self.stored) if self._rounds(parameter_name(path)) else x

        def joined(path: jax.tree_util.KeyPath, x: PyTree, of: PyTree) -> PyTree:
            return Rounded(x, of) if self._rounds(parameter_name(path)) else of

        def parameters(of: PyTree) -> PyTree:
            return jax.tree_util.tree_map_with_path(joined, params, of)

        return jax.tree_util.tree_map_with_path(place, params), parameters

    def gather(self, arrays: PyTree) -> PyTree:
        """As `gather_parameters`, of parameters some of which are `Rounded`."""

        def gather(path: jax.tree_util.KeyPath, x: PyTree) -> PyTree:
            name = parameter_name(path)
            if not self._rounds(name):
                return gather_parameter(self.layout, name, x)
            x = x if isinstance(x, Rounded) else Rounded(jax.lax.stop_gradient(x), x)
            return _rounded_whole(x.value, x.gradient, gathered_axis(self.layout, name), self.sums, x.gradient.dtype)

        return jax.tree_util.tree_map_with_path(gather, arrays, is_leaf=lambda x: isinstance(x, Rounded))

    def _rounds(self, name: str) -> bool:
        """Whether a parameter is rounded: what is used in parts adds up its gradient in the dtype that it has."""
        split = split_axis(self.layout.axes, name) is not None and name not in UNROUNDED
        return split and (name not in self.layout.in_parts or self.sums == jnp.bfloat16)


def rounds(config: TrainConfig) -> bool:
    """Whether a configuration rounds what it gathers, where it gathers."""
    dtypes = config.model.compute_dtype, config.model.param_dtype
    return dtypes == ("bfloat16", "float32") and config.precision != "fp8" and not config.lora.rank


def rounding(config: TrainConfig, layout: Layout) -> Rounding | None:
    """The rounding of a configuration; None where nothing is rounded."""
    if layout.mesh is None or not rounds(config):
        return None
    stored = jnp.bfloat16 if keeps_narrow(config, layout.mesh.shape) else jnp.float32
    return Rounding(layout, jnp.dtype(config.model.reduce_dtype), jnp.dtype(stored))


def keeps_narrow(config: TrainConfig, sizes: Mapping[str, int]) -> bool:
    """Whether the gradients of what is rounded stay in bfloat16 until the update: no other mesh axis, which adds up in
    float32, has several devices.

    Args:
      config: configuration of the run. sizes: sizes of the mesh, by axis.
    """
    only_fsdp = all(size == 1 for axis, size in sizes.items() if axis != "fsdp")
    return rounds(config) and config.model.reduce_dtype == "bfloat16" and only_fsdp


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rounded_whole(x: PyTree, gradient: AnyArray, axis: int | None, sums: DTypeLike, dtype: DTypeLike) -> PyTree:
    """The parts of `x` in bfloat16, gathered along an axis where it is given.

    Args:
      x: a part, in float32. gradient: of its shape; it alone has a gradient.
      sums: dtype in which that adds up. dtype: of the gradient.
    """
    narrow = to_bfloat16(x)
    return narrow if axis is None else gathered(narrow, axis, "fsdp")


def _forward(x: PyTree, gradient: PyTree, axis: int | None, sums: DTypeLike, dtype: DTypeLike) -> tuple[PyTree, None]:
    return _rounded_whole(x, gradient, axis, sums, dtype), None


def _backward(axis: int | None, sums: DTypeLike, dtype: DTypeLike, _: None, g: PyTree) -> tuple[None, PyTree]:
    if axis is not None:
        # The transpose of the gather: each device adds up and keeps its own part.
        g = jax.lax.psum_scatter(g.astype(sums), "fsdp", scatter_dimension=axis + g.ndim, tiled=True)
    return None, g.astype(dtype)


_rounded_whole.defvjp(_forward, _backward)


def to_bfloat16(x: PyTree) -> PyTree:
    """`x.astype(bfloat16)` of float32, by its bits.

    XLA takes a conversion out of the loop over layers, and then keeps the parts of all layers in both dtypes: 0.8 GiB
    of Llama 3 8B on each of 16 devices. It leaves bits where they are.
    """
    # reduce_precision rounds to nearest even, so the low 16 bits are zero and are cut off.
    high = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), jnp.uint32) >> 16
    narrow = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.nan, narrow)  # the upper half of a NaN can be that of an infinity
