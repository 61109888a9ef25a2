"""The block-sparse product in plain jax.numpy: gather the dense columns of every block, multiply, add up by block
column.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from vishwamai.core.gradients import autodiff_backward
from vishwamai.core.op import Implementation
from vishwamai.core.precision import lax_precision
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec


def forward(spec: SparseSpec, operands: Operands) -> tuple[Outputs, None]:
    """Work and memory are those of the blocks that are there: `[blocks, M, block]` beside the operands."""
    product = jax.vmap(lambda x, v, coordinates: _product(spec, x, v, coordinates), in_axes=_mapped(operands))
    return Outputs(
        product(*(x if axis == 0 else x[0] for x, axis in zip(operands, _mapped(operands), strict=True)))
    ), None


def _mapped(operands: Operands) -> tuple[int | None, ...]:
    groups = operands.dense.shape[0]
    return (0, *(0 if x.shape[0] == groups else None for x in operands[1:]))


def _product(spec: SparseSpec, dense: jax.Array, values: jax.Array, indices: jax.Array) -> jax.Array:
    """`[M, contracted] x [blocks, rows, columns] -> [M, width]`."""
    rows, columns = spec.block
    take, give = (columns, rows) if spec.transpose else (rows, columns)
    source, target = (indices[:, 1], indices[:, 0]) if spec.transpose else (indices[:, 0], indices[:, 1])
    strips = dense.reshape(spec.m, dense.shape[1] // take, take).swapaxes(0, 1)  # [block rows, M, take]
    out = jnp.einsum(
        "nmj,nij->nmi" if spec.transpose else "nmi,nij->nmj",
        strips.at[source].get(mode="clip"),
        values,
        precision=lax_precision(spec.precision),
        preferred_element_type=spec.accumulator,
    )
    total = jnp.zeros((spec.width // give, spec.m, give), spec.accumulator).at[target].add(out)
    return total.swapaxes(0, 1).reshape(spec.m, spec.width).astype(dense.dtype)


XLA = Implementation("xla", None, forward, autodiff_backward(forward), autodiff=True)
