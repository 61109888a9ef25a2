"""Parameters that are rounded where the devices of "fsdp" gather them, and the dtype of their gradients.

The model rounds its matrices to bfloat16 before it multiplies them, so each device may as well round its part and send
half of the bytes. The gradient of the gather adds up in `model.reduce_dtype`. Where that is bfloat16, the gradients of
all layers are kept in it until the update, because every one of them is a number of bfloat16.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.training.config import TrainConfig
from vishwamai.training.layout import Layout
from vishwamai.training.parts import gathered, parameter_name, split_axis

Tree = Any

UNROUNDED = frozenset({"embed", "router"})
"""Parameters that a model does not round to its compute dtype before it uses them."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("value", "gradient"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A parameter that is used rounded.

    Attributes:
      value: the parameter, which has no gradient of its own.
      gradient: what the gradient is taken of in its place: an array of its shape, in the dtype of the gradient.
    """

    value: Any
    gradient: Any


@dataclasses.dataclass(frozen=True)
class Rounding:
    """How a run rounds what it gathers.

    Attributes:
      layout: the devices.
      sums: dtype in which the gradient of a gather adds up. kept: in which it stays until the update.
    """

    layout: Layout
    sums: Any
    kept: Any

    def places(self, params: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
        """What gradients are taken of, and a function from that to the parameters of a loss that calls `gather`."""

        def place(path: Any, x: Any) -> Any:
            return jnp.zeros(x.shape, self.kept) if self._rounds(parameter_name(path)) else x

        def joined(path: Any, x: Any, of: Any) -> Any:
            return Rounded(x, of) if self._rounds(parameter_name(path)) else of

        found = jax.tree_util.tree_map_with_path(place, params)
        return found, lambda of: jax.tree_util.tree_map_with_path(joined, params, of)

    def gather(self, arrays: Tree) -> Tree:
        """As `Layout.gather`, of parameters some of which are `Rounded`."""

        def one(path: Any, x: Any) -> Any:
            name = parameter_name(path)
            if not self._rounds(name):
                return self.layout.whole(name, x)
            x = x if isinstance(x, Rounded) else Rounded(jax.lax.stop_gradient(x), x)
            return _rounded_whole(x.value, x.gradient, self.layout.gathered_axis(name), self.sums, x.gradient.dtype)

        return jax.tree_util.tree_map_with_path(one, arrays, is_leaf=lambda x: isinstance(x, Rounded))

    def _rounds(self, name: str) -> bool:
        """Whether a parameter is rounded: what is used in parts adds up its gradient in the dtype that it has."""
        split = split_axis(self.layout.axes, name) is not None and name not in UNROUNDED
        return split and (name not in self.layout.in_parts or self.sums == jnp.bfloat16)


def rounds(config: TrainConfig) -> bool:
    """Whether a configuration rounds what it gathers, where it gathers."""
    dtypes = config.model.compute_dtype, config.model.param_dtype
    return dtypes == ("bfloat16", "float32") and config.precision != "fp8" and not config.lora.rank


def rounding(config: TrainConfig, layout: Layout) -> Rounding | None:
    """That of a configuration; None where nothing is rounded."""
    if layout.mesh is None or not rounds(config):
        return None
    kept = jnp.bfloat16 if keeps_narrow(config, layout.mesh.shape) else jnp.float32
    return Rounding(layout, jnp.dtype(config.model.reduce_dtype), jnp.dtype(kept))


def keeps_narrow(config: TrainConfig, sizes: Mapping[str, int]) -> bool:
    """Whether the gradients of what is rounded stay in bfloat16 until the update: no other mesh axis, which adds up in
    float32, has several devices.

    Args:
      config: of the run. sizes: of the mesh, by axis.
    """
    alone = all(size == 1 for axis, size in sizes.items() if axis != "fsdp")
    return rounds(config) and config.model.reduce_dtype == "bfloat16" and alone


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rounded_whole(x: Any, gradient: Any, axis: int | None, sums: Any, dtype: Any) -> Any:
    """The parts of `x` in bfloat16, gathered along an axis where it is given.

    Args:
      x: a part, in float32. gradient: of its shape; it alone has a gradient.
      sums: dtype in which that adds up. dtype: of the gradient.
    """
    narrow = to_bfloat16(x)
    return narrow if axis is None else gathered(narrow, axis, "fsdp")


def _forward(x: Any, gradient: Any, axis: int | None, sums: Any, dtype: Any) -> tuple[Any, None]:
    return _rounded_whole(x, gradient, axis, sums, dtype), None


def _backward(axis: int | None, sums: Any, dtype: Any, _: None, g: Any) -> tuple[None, Any]:
    if axis is not None:
        g = jax.lax.psum_scatter(g.astype(sums), "fsdp", scatter_dimension=axis + g.ndim, tiled=True)
    return None, g.astype(dtype)


_rounded_whole.defvjp(_forward, _backward)


def to_bfloat16(x: Any) -> Any:
    """`x.astype(bfloat16)` of float32, by its bits.

    XLA takes a conversion out of the loop over layers, and then keeps the parts of all layers in both dtypes: 0.8 GiB
    of Llama 3 8B on each of 16 devices. It leaves bits where they are.
    """
    high = jax.lax.bitcast_convert_type(jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7), jnp.uint32) >> 16
    narrow = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isnan(x), jnp.nan, narrow)  # the upper half of a NaN can be that of an infinity
