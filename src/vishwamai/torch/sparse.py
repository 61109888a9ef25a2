"""`block_sparse_matmul` of torch tensors, as a custom operator with gradients (eager and under `torch.compile`)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vishwamai.core.config import current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, resolve_precision
from vishwamai.core.spec import ArraySpec, array_spec
from vishwamai.ops.sparse.api import SPARSE
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec, make_spec
from vishwamai.torch import bridge


@functools.lru_cache(maxsize=1024)
def _spec(dense: ArraySpec, values: ArraySpec, shape: tuple[int, ...], transpose: bool, precision: str) -> SparseSpec:
    # What the indices hold is not looked at: they are on the device, and those out of range are clipped.
    indices = np.zeros((values.shape[0], 2), np.int32)
    products = resolve_precision(precision, PrecisionConfig.DEFAULT, dense.dtype)
    return make_spec(dense, values, indices, shape, transpose, products)


def _described(
    dense: Tensor, values: Tensor, indices: Tensor, shape: list[int], transpose: bool, precision: str
) -> tuple[SparseSpec, Operands]:
    """The spec, and the caller's tensors in its layout; indices out of range are clipped, where they are."""
    spec = _spec(array_spec(dense), array_spec(values), tuple(shape), transpose, precision)
    rows, columns = spec.block
    most = max(0, spec.rows // rows - 1), max(0, spec.columns // columns - 1)
    clipped = torch.stack([indices[:, axis].clamp(0, most[axis]) for axis in (0, 1)], 1)
    operands = Operands(
        dense.contiguous().reshape(1, -1, dense.shape[-1]),
        values.contiguous()[None],
        clipped.to(torch.int32)[None],
    )
    return spec, operands


@torch.library.custom_op("vishwamai::block_sparse_matmul", mutates_args=())
def _block_sparse_matmul(
    dense: Tensor, values: Tensor, indices: Tensor, shape: list[int], transpose: bool, precision: str
) -> Tensor:
    """See `block_sparse_matmul`."""
    spec, operands = _described(dense, values, indices, shape, transpose, precision)
    outputs, _ = bridge.forward(bridge.choose(SPARSE, spec, dense), spec, operands)
    return outputs.out.reshape(*dense.shape[:-1], spec.width)


@_block_sparse_matmul.register_fake
def _(dense: Tensor, values: Tensor, indices: Tensor, shape: list[int], transpose: bool, precision: str) -> Tensor:
    del values, indices, precision
    return dense.new_empty((*dense.shape[:-1], shape[0 if transpose else 1]))


@torch.library.custom_op("vishwamai::block_sparse_matmul_backward", mutates_args=())
def _block_sparse_matmul_backward(
    dout: Tensor, dense: Tensor, values: Tensor, indices: Tensor, shape: list[int], transpose: bool, precision: str
) -> tuple[Tensor, Tensor]:
    """Gradients of dense and values."""
    spec, operands = _described(dense, values, indices, shape, transpose, precision)
    cotangent = dout.contiguous().reshape(1, -1, spec.width)
    choice = bridge.choose(SPARSE, spec, dense)
    # Neither pass reads the result, but JAX wants one of its shape.
    gradients = bridge.backward(choice, spec, operands, Outputs(cotangent), None, Outputs(cotangent))
    return gradients.dense.reshape(dense.shape), gradients.values.reshape(values.shape)


@_block_sparse_matmul_backward.register_fake
def _(
    dout: Tensor, dense: Tensor, values: Tensor, indices: Tensor, shape: list[int], transpose: bool, precision: str
) -> tuple[Tensor, Tensor]:
    del dout, indices, shape, transpose, precision
    return dense.new_empty(dense.shape), values.new_empty(values.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    dense, values, indices, *ctx.options = inputs
    ctx.save_for_backward(dense, values, indices)


def _gradient(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
    return *_block_sparse_matmul_backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None


bridge.register_autograd(_block_sparse_matmul, _gradient, _setup)


def _coordinates(indices: Tensor | tuple[Tensor, Tensor], values: Tensor) -> Tensor:
    """Block rows and columns `[blocks, 2]`, of block COO or block CSR."""
    if isinstance(indices, Tensor):
        if indices.shape != (values.shape[0], 2) or indices.is_floating_point():
            raise ShapeError(
                f"block_sparse_matmul: `indices` has shape {tuple(indices.shape)} and dtype {indices.dtype}, but `values` has {values.shape[0]} blocks; "
                f"pass integers [{values.shape[0]}, 2] (block row, block column), or a pair (row_starts, block_columns)."
            )
        return indices
    starts, columns = indices
    if starts.dim() != 1 or columns.shape != (values.shape[0],) or starts.is_floating_point():
        raise ShapeError(
            f"block_sparse_matmul: `indices` is a pair of shapes {tuple(starts.shape)} and {tuple(columns.shape)}, but `values` has {values.shape[0]} "
            "blocks; pass (row_starts [block rows + 1], block_columns [blocks])."
        )
    blocks = torch.arange(values.shape[0], device=starts.device, dtype=starts.dtype)
    rows = torch.searchsorted(starts.contiguous(), blocks, right=True) - 1  # its size does not depend on what it holds
    return torch.stack([rows.to(columns.dtype), columns], 1)


def block_sparse_matmul(
    dense: Tensor,
    values: Tensor,
    indices: Tensor | tuple[Tensor, Tensor],
    *,
    shape: tuple[int, int],
    transpose: bool = False,
    precision: str | None = None,
) -> Tensor:
    """`dense @ S`, where S is zero but for the blocks `values` at `indices`; see `vishwamai.block_sparse_matmul`.

    Args:
      dense: `[..., rows]` (`[..., columns]` if `transpose`), bfloat16, float16 or float32 (float64 on the CPU).
      values: `[blocks, block_rows, block_columns]`, of the same dtype. Blocks at one place add up.
      indices: `[blocks, 2]` integers (block row, block column) in any order, or the pair of block CSR, `[block rows + 1]` and `[blocks]`, on the
        device of `values`; those out of range are clipped. They may change from call to call: the host never looks at them.
      shape: (rows, columns) of S, multiples of the block's.
      transpose: multiply by S^T.
      precision: of float32 products: "high" or "highest"; None for the ambient one.

    Returns:
      `[..., columns]` (`[..., rows]` if `transpose`), in the dtype of `dense`. Gradients: of `dense`, and of `values` in their own form.

    Raises:
      ShapeError: an argument is not legal or does not fit the others.
      UnsupportedError: no kernel serves the call on the tensors' device.

    >>> import torch
    >>> values = torch.stack([torch.eye(2), 3 * torch.eye(2)])
    >>> block_sparse_matmul(torch.tensor([1.0, 2.0, 3.0, 4.0]), values, torch.tensor([[0, 1], [1, 0]]), shape=(4, 4))
    tensor([ 9., 12.,  1.,  2.])
    """
    products = precision or ("default" if torch.compiler.is_compiling() else current_config().precision.products)
    out_dtype = dense.dtype
    dense, values = bridge.narrowed(dense, values)
    out = _block_sparse_matmul(dense, values, _coordinates(indices, values), list(shape), transpose, products)
    return out.to(out_dtype)
