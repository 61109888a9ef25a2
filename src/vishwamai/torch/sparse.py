"""`block_sparse_matmul` of torch tensors."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.ops.sparse.api import SPARSE
from vishwamai.ops.sparse.spec import SIGNATURE, Operands, Outputs, SparseSpec, make_spec
from vishwamai.torch import autocast, bridge
from vishwamai.torch.arguments import checked
from vishwamai.torch.operator import TorchOperator


def _describe(operands: Operands, rows: int, columns: int, transpose: bool, precision: str) -> SparseSpec:
    dense, values, _ = operands
    # What the indices hold is not looked at: they are on the device, and those out of range are clipped.
    indices = np.zeros((values.shape[0], 2), np.int32)
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, dense.dtype)
    return make_spec(dense, values, indices, (rows, columns), transpose, products)


def _pack(spec: SparseSpec, tensors: Operands) -> Operands:
    rows, columns = spec.block
    most = max(0, spec.rows // rows - 1), max(0, spec.columns // columns - 1)
    clipped = torch.stack([tensors.indices[:, axis].clamp(0, most[axis]) for axis in (0, 1)], 1)
    operands = Operands(tensors.dense.contiguous(), tensors.values.contiguous(), clipped.to(torch.int32))
    return SIGNATURE.pack(operands)


_sparse = TorchOperator(
    SPARSE,
    Outputs,
    SIGNATURE,
    _describe,
    gradients=("dense", "values"),
    sizes=lambda call: {"n": call.rows if call.transpose else call.columns},
    pack=_pack,
)


def _coordinates(indices: Tensor | tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    """Block rows and columns `[blocks, 2]`, of block COO or block CSR."""
    if isinstance(indices, Tensor):
        if indices.shape != (values.shape[0], 2) or indices.is_floating_point():
            raise ShapeError(
                f"block_sparse_matmul: `indices` has shape {tuple(indices.shape)} and dtype {indices.dtype}, but "
                f"`values` has {values.shape[0]} blocks; pass integers [{values.shape[0]}, 2] (block row, block "
                "column), or a pair (row_starts, block_columns)."
            )
        return indices
    starts, columns = indices
    if starts.dim() != 1 or columns.shape != (values.shape[0],) or starts.is_floating_point():
        raise ShapeError(
            f"block_sparse_matmul: `indices` is a pair of shapes {tuple(starts.shape)} and {tuple(columns.shape)}, but "
            f"`values` has {values.shape[0]} blocks; pass (row_starts [block rows + 1], block_columns [blocks])."
        )
    blocks = torch.arange(values.shape[0], device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts.contiguous(), blocks, right=True) - 1  # its size does not depend on what it holds
    return torch.stack([rows.to(columns.dtype), columns], 1)


@checked
def block_sparse_matmul(
    dense: Tensor,
    values: Tensor,
    indices: Tensor | tuple[Tensor, Tensor],
    *,
    shape: tuple[int, int],
    transpose: bool = False,
    precision: str | None = None,
) -> Tensor:
    """`dense @ S`, where S is zero except for the blocks `values` at `indices`; see `vishwamai.block_sparse_matmul`.

    Arguments, result and errors are those of JAX's, except that indices may change from call to call: the host never
    looks at them, and those out of range are clipped.

    >>> import torch
    >>> values = torch.stack([torch.eye(2), 3 * torch.eye(2)])
    >>> block_sparse_matmul(torch.tensor([1.0, 2.0, 3.0, 4.0]), values, torch.tensor([[0, 1], [1, 0]]), shape=(4, 4))
    tensor([ 9., 12.,  1.,  2.])
    """
    dense, values = autocast.factors(dense, values)
    out_dtype = dense.dtype
    dense, values = bridge.cast_for_matmul(dense, values)
    coordinates = _coordinates(indices, values)
    return _sparse(dense, values, coordinates, *shape, transpose, bridge.products(precision))[0].to(out_dtype)
