"""The public block-sparse product: `block_sparse_matmul`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.config import cast_for_matmul, current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.op import Op
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.signature import public_call
from vishwamai.core.spec import as_array
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values
from vishwamai.ops.sparse.cpu import NATIVE
from vishwamai.ops.sparse.gpu import TRITON
from vishwamai.ops.sparse.reference import XLA
from vishwamai.ops.sparse.spec import SIGNATURE, Operands, SparseSpec, check_places, make_spec, static
from vishwamai.ops.sparse.tpu import PALLAS_TPU

if TYPE_CHECKING:
    import jax
    from jax import Array
    from jaxtyping import Float, Int

SPARSE: Op[SparseSpec] = Op("block_sparse_matmul", (PALLAS_TPU, TRITON, NATIVE, XLA), split="groups m")


@checks_its_own("shape")
def block_sparse_matmul(
    dense: Float[Array, "*batch rows"],
    values: Float[Array, "blocks block_rows block_columns"],
    indices: Int[Array | np.ndarray, "blocks 2"] | tuple[object, object],
    *,
    shape: tuple[int, int] | None = None,
    transpose: bool = False,
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*batch columns"]:
    """`dense @ S`, where S is zero except for the blocks `values` at `indices`; work and memory are those of the blocks
    that are there.

    Gray, Radford, Kingma, "GPU Kernels for Block-Sparse Weights" (2017). The gradient of `values` has their own form,
    so that a block-sparse weight trains without ever being dense.

    Args:
      dense: `[..., rows]` (`[..., columns]` if `transpose`), bfloat16, float16, float32 or float64; sums are float32
        (float64 for float64).
      values: `[blocks, block_rows, block_columns]`, of the same dtype. Blocks at one place add up.
      indices: position of each block: integers `[blocks, 2]` of (block row, block column) in any order (block COO); or
        a pair of `[block rows + 1]` and `[blocks]`: where each block row starts, and the blocks' columns (block CSR).
        NumPy arrays are checked, and give S's width; traced ones may change from call to call without a compilation,
        and those out of range are clipped, or an error of the program under `KernelConfig(checks=True)`.
      shape: (rows, columns) of S, multiples of the block's. None: as many as `dense` has features, by as many as the
        indices reach.
      transpose: multiply by S^T.
      precision: mode of float32 products: "high" or "highest" (what "default" means too); None for the ambient one.
      config: tiles (a `SparseConfig`), a number of dense rows, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., columns]` (`[..., rows]` if `transpose`), in the operands' dtype.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp, numpy as np
    >>> values = jnp.stack([jnp.eye(2), 3 * jnp.eye(2)])
    >>> indices = np.array([[0, 1], [1, 0]])
    >>> block_sparse_matmul(jnp.array([1.0, 2.0, 3.0, 4.0]), values, indices).tolist()
    [9.0, 12.0, 1.0, 2.0]
    >>> block_sparse_matmul(jnp.ones((5, 4)), values, (np.array([0, 1, 2]), np.array([1, 0])), shape=(4, 6)).shape
    (5, 6)
    """
    dense = as_array("block_sparse_matmul", "dense", dense)
    values = as_array("block_sparse_matmul", "values", values)
    out_dtype = dense.dtype
    dense, values = cast_for_matmul(dense, values)
    indices = _coordinates(indices, values)
    products = resolve_precision(precision, current_config().precision, dense.dtype)
    spec = make_spec(dense, values, indices, shape, transpose, products)
    rows, columns = spec.block
    block_counts = spec.rows // rows, spec.columns // columns
    if static(indices) is None:  # `make_spec` has checked the others
        check_values(functools.partial(check_places, most=block_counts), indices)
    most = np.array([max(0, n - 1) for n in block_counts], np.int32)
    arrays = Operands(dense, values, jnp.clip(jnp.asarray(indices).astype(jnp.int32), 0, most))
    out = public_call(SPARSE, SIGNATURE, spec, arrays, config=config, implementation=implementation).out
    return out.astype(out_dtype)


def _coordinates(indices: AnyArray, values: AnyArray) -> AnyArray:
    """Block rows and columns `[blocks, 2]`; NumPy where the caller's indices are known."""
    if not isinstance(indices, (tuple, list)):
        concrete = static(indices)
        return indices if concrete is None else concrete
    if len(indices) != 2 or any(np.ndim(x) != 1 for x in indices) or not np.size(indices[0]):
        raise ShapeError(
            "block_sparse_matmul: `indices` is a sequence, but no pair of vectors; pass (row_starts [block rows + 1], "
            "block_columns [blocks]), or one array [blocks, 2]."
        )
    starts, columns = (static(x) for x in indices)
    blocks = values.shape[0] if values.ndim else 0
    if np.shape(indices[1]) != (blocks,):
        raise ShapeError(
            f"block_sparse_matmul: `indices` has {np.shape(indices[1])} block columns, but `values` has {blocks} "
            "blocks; pass one for each."
        )
    if starts is None or columns is None:
        counts = jnp.diff(indices[0])
        rows = jnp.repeat(jnp.arange(counts.size), counts, total_repeat_length=blocks)
        return jnp.stack([rows, jnp.asarray(indices[1])], axis=1)
    if starts[0] != 0 or starts[-1] != blocks or (np.diff(starts) < 0).any():
        raise ShapeError(
            f"block_sparse_matmul: `indices` has row_starts from {starts[0]} to {starts[-1]}, but `values` has "
            f"{blocks} blocks; pass numbers that never fall, from 0 to {blocks}."
        )
    return np.stack([np.repeat(np.arange(starts.size - 1), np.diff(starts)), columns], axis=1)
