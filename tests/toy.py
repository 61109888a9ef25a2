"""A small operation of the tests' own, to prove what the core promises to any operation.

`y[i] = weight * sum over j <= i of tanh(q[i] * k[j])`: attention in one dimension. The reference holds the T x T
matrix; the two kernels (the same plain JAX, one registered for the CPU and one for the TPU) walk over rows, and are
right only where they see whole sequences.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation, Op
from vishwamai.core.signature import Signature, array_specs, as_arrays, public_call
from vishwamai.core.spec import OpSpec
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size


class Operands(NamedTuple):
    q: Annotated[Any, "batch heads length"]
    k: Annotated[Any, "batch heads length"]
    weight: Annotated[Any, "batch? heads"]


class Outputs(NamedTuple):
    y: Annotated[Any, "batch heads length"]


@dataclasses.dataclass(frozen=True)
class ToySpec(OpSpec):
    """`even_only` makes the kernels decline odd lengths."""

    even_only: bool = False

    def tuning_key(self) -> str:
        return "x".join(map(str, self.operands.q.shape))


@dataclasses.dataclass(frozen=True)
class ToyConfig(Tiles):
    """Rows that one step computes."""

    rows: int = size("rows", 1, block_size=lambda tiles, n: n)


SEEN: list[tuple[str, tuple[int, ...], ToyConfig]] = []
"""(direction, shape of q, config) of every trace of a kernel."""


def why_not(spec: ToySpec, target: Target) -> str | None:
    length = spec.operands.q.shape[-1]
    return f"`q` has {length} positions, an odd number." if spec.even_only and length % 2 else None


def kernel_forward(spec: Any, config: ToyConfig, operands: Operands) -> tuple[Outputs, Any]:
    SEEN.append(("forward", operands.q.shape, config))
    q, k, weight = operands
    columns = jnp.arange(k.shape[-1])

    def row(i: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(columns <= i, jnp.tanh(q[..., i, None] * k), 0.0), axis=-1)

    return Outputs(weight[..., None] * jnp.moveaxis(lax.map(row, columns), 0, -1)), None


def kernel_backward(spec: Any, config: ToyConfig, operands: Operands, outputs: Any, residuals: Any, dout: Any) -> Any:
    del outputs, residuals
    SEEN.append(("backward", operands.q.shape, config))
    q, k, weight = operands
    columns = jnp.arange(k.shape[-1])

    def row(dk: jax.Array, i: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        t = jnp.where(columns <= i, jnp.tanh(q[..., i, None] * k), 0.0)
        slope = jnp.where(columns <= i, 1 - t * t, 0.0) * (dout.y[..., i] * weight)[..., None]
        return dk + slope * q[..., i, None], (jnp.sum(slope * k, -1), dout.y[..., i] * jnp.sum(t, -1))

    dk, (dq, dweight) = lax.scan(row, jnp.zeros_like(k), columns)
    dweight = jnp.sum(dweight, axis=0)
    if weight.shape[0] == 1:
        dweight = jnp.sum(dweight, axis=0, keepdims=True)
    return Operands(jnp.moveaxis(dq, 0, -1), dk, dweight)


def reference_forward(spec: Any, operands: Operands) -> tuple[Outputs, Any]:
    q, k, weight = operands
    matrix = jnp.tanh(q[..., :, None] * k[..., None, :])  # [B, H, T, T]
    return Outputs(weight[..., None] * jnp.sum(jnp.tril(matrix), axis=-1)), None


def implementation(name: str, platform: str | None) -> Implementation[ToySpec]:
    return Implementation(
        name, platform, kernel_forward, kernel_backward, why_not, lambda spec, target: ToyConfig(), ToyConfig
    )


MATRIX: Implementation[ToySpec] = Implementation(
    "matrix", None, reference_forward, autodiff_backward(reference_forward), autodiff=True
)
SPLIT = "batch heads"
TOY: Op[ToySpec] = Op("toy", (implementation("rows_cpu", "cpu"), implementation("rows_tpu", "tpu"), MATRIX), SPLIT)
SIGNATURE = Signature(Operands("batch heads length", "batch heads length", "heads"), Outputs("batch heads length"))


def toy(q: Any, k: Any, weight: Any, *, even_only: bool = False, config: Any = None, implementation: Any = None) -> Any:
    """The public function: q and k `[batch, heads, length]`, weight `[heads]`."""
    arrays = as_arrays("toy", Operands(q, k, weight))
    SIGNATURE.check("toy", arrays)
    spec = ToySpec(SIGNATURE.specs(array_specs(arrays)), even_only)
    return public_call(TOY, SIGNATURE, spec, arrays, config=config, implementation=implementation).y


def inputs(batch: int = 2, heads: int = 4, length: int = 24, seed: int = 0) -> tuple[np.ndarray, ...]:
    """q, k, weight in float32."""
    rng = np.random.default_rng(seed)
    shapes = ((batch, heads, length), (batch, heads, length), (heads,))
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in shapes)


def truth(q: Any, k: Any, weight: Any) -> np.ndarray:
    """The operation in float64 NumPy."""
    q, k, weight = (np.asarray(x, np.float64) for x in (q, k, weight))
    return weight[:, None] * np.tril(np.tanh(q[..., :, None] * k[..., None, :])).sum(-1)
