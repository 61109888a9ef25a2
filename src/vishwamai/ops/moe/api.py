"""The public grouped matrix product: `grouped_gemm`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.arguments import checked
from vishwamai.core.config import cast_for_matmul
from vishwamai.core.errors import ShapeError, UnsupportedError
from vishwamai.core.op import Op
from vishwamai.core.qtensor import QTensor, undifferentiable
from vishwamai.core.quantized.code_product import by_columns
from vishwamai.core.quantized.code_tensor import CodeTensor
from vishwamai.core.quantized.packed_product import packed_product
from vishwamai.core.quantized.packed_qtensor import PackedQTensor
from vishwamai.core.signature import array_specs, public_call
from vishwamai.core.spec import as_array, as_jax_dtype
from vishwamai.core.types import AnyArray
from vishwamai.core.value_checks import check_values
from vishwamai.ops.moe.cpu import NATIVE
from vishwamai.ops.moe.gpu import TRITON
from vishwamai.ops.moe.reference import XLA
from vishwamai.ops.moe.spec import (
    GroupedSpec,
    Operands,
    check_held,
    check_offset,
    check_sizes,
    check_transposed,
    describe,
    held_groups,
    signature,
    split,
    unpack_weights,
)
from vishwamai.ops.moe.tpu import PALLAS_TPU

if TYPE_CHECKING:
    import jax
    from jax import Array
    from jaxtyping import Float, Int

MOE: Op[GroupedSpec] = Op("grouped_gemm", (PALLAS_TPU, TRITON, NATIVE, XLA), split=split)


@checked
def grouped_gemm(
    lhs: Float[Array, "*batch M K"] | QTensor,
    rhs: Float[Array, "*batch G K N"] | QTensor | PackedQTensor | CodeTensor,
    group_sizes: Int[Array, "*batch G"],
    *,
    group_offset: int | Int[Array, ""] | None = None,
    transpose_rhs: bool = False,
    out_dtype: Any = None,
    block_size: int | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Float[Array, "*batch M N"]:
    """Matrix product whose rows are in consecutive groups, each with its own right-hand matrix:
    `out[i] = lhs[i] @ rhs[group of i]`.

    The meaning is that of `jax.lax.ragged_dot`: group g has the `group_sizes[g]` rows after those of the groups before
    it (none where the size is 0), and rows after the last group give 0. With `group_offset=o`, `rhs` has the matrices
    of groups o to o + G - 1 alone, and the rows of all other groups give 0, at no cost. The cost is that of one product
    of `[M, K]` with `[K, N]`, whatever the number of groups. Sums are float32 (float64 for float64); float32 products
    are at full precision. The algorithm on TPU is that of Gale et al., "MegaBlocks" (2022), with tiles that two groups
    share computed for the rows of each alone.

    Args:
      lhs: `[..., M, K]`, bfloat16, float16, float32 or float64.
      rhs: `[G, K, N]`, or `[..., G, K, N]` with the batch axes of `lhs`; of the dtype of `lhs`. Or a `QTensor` of such
        a shape whose numbers share scales along K (`axis=-2`, in blocks or not), or all of them one scale; its values
        are multiplied in the dtype of `lhs`. Or a `PackedQTensor` of G groups (see `pack_weight`), with `lhs` `[M, K]`.
        Or a `CodeTensor`, which is dequantized to the dtype of `lhs` a tile of columns at a time.
      group_sizes: `[G]` (with `group_offset`, of all groups) or `[..., G]`, integers of zero or more, whose sum is at
        most M. Others are an error where their values are known. Where they are traced, a negative size counts as 0 and
        what is beyond M is cut off; `KernelConfig(checks=True)` makes them an error there too.
      group_offset: the first group that `rhs` has a matrix for, an int or a traced scalar; one out of range is an error
        where it is known, and is clamped where it is traced. None: `rhs` has the matrices of all groups.
      transpose_rhs: the matrices are stored `[..., G, N, K]`, the contracted axis last, as checkpoints of experts often
        hold them. No copy is made. Not with quantized matrices.
      out_dtype: dtype of the result; by default that of `lhs`.
      block_size: about how many rows and columns a tile has; None lets the library choose.
      config: tiles (a `GroupedConfig`), a block size, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., M, N]` in `out_dtype`. Gradients exist for `lhs` (0 in rows without a matrix) and `rhs` (0 for a group
      without rows; none of a quantized one).

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: the implementation asked for cannot serve the call; or `lhs` is a `QTensor`; or the gradient of
        a quantized `rhs` is taken.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> grouped_gemm(rows, jnp.array([[[10.0]], [[7.0]], [[100.0]]]), jnp.array([1, 0, 2]))[:, 0].tolist()
    [10.0, 200.0, 300.0, 0.0]
    >>> grouped_gemm(rows, jnp.array([[[7.0]], [[100.0]]]), jnp.array([1, 0, 2]), group_offset=1)[:, 0].tolist()
    [0.0, 200.0, 300.0, 0.0]
    """
    config = block_size if config is None else config
    check_transposed(rhs, transpose_rhs)
    if isinstance(lhs, QTensor):
        raise UnsupportedError(
            f"grouped_gemm: `lhs` is a QTensor of {lhs.format}, which no grouped kernel takes; pass "
            "`vishwamai.dequantize(lhs)`."
        )
    if isinstance(rhs, CodeTensor):
        rows = as_array("grouped_gemm", "lhs", lhs)

        def product(tile: Any) -> Any:
            options = {"out_dtype": out_dtype, "config": config, "implementation": implementation}
            return grouped_gemm(rows, tile, group_sizes, group_offset=group_offset, **options)

        return by_columns("grouped_gemm", product, (rhs,), rows.dtype)
    if isinstance(rhs, PackedQTensor):
        if jnp.ndim(lhs) != 2 or config is not None or group_offset is not None:
            raise ShapeError(
                f"grouped_gemm: `rhs` is a PackedQTensor; pass `lhs` of shape [M, K], not {jnp.shape(lhs)}, and "
                "neither block_size nor config nor group_offset."
            )
        check_values(functools.partial(check_sizes, rows=lhs.shape[0]), group_sizes)
        return packed_product(
            "grouped_gemm", lhs, rhs, sizes=group_sizes, out_dtype=out_dtype, implementation=implementation
        )
    scale, block_k = None, 0
    if isinstance(rhs, QTensor):
        rhs, scale, block_k = unpack_weights(rhs)
        guarded: Any = undifferentiable("grouped_gemm: `rhs` is a QTensor", rhs, scale)
        rhs, scale = guarded
    named = (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
    lhs, rhs, group_sizes = (as_array("grouped_gemm", name, x) for name, x in named)
    if out_dtype is None and lhs.dtype == jnp.float32:
        out_dtype = jnp.float32  # whatever the ambient `use_bfloat16` makes of the operands
    elif out_dtype is not None:
        out_dtype = as_jax_dtype("grouped_gemm", "out_dtype", out_dtype)
    if scale is None:
        lhs, rhs = cast_for_matmul(lhs, rhs)
    else:
        (lhs,) = cast_for_matmul(lhs)
    sizes, first_row = group_sizes, None
    if group_offset is not None:
        sizes, first_row = _local_groups(lhs, rhs, group_sizes, group_offset)
    arrays = Operands(lhs, rhs, sizes, scale, first_row)
    spec = describe(array_specs(arrays), out_dtype, block_k, transpose_rhs)
    check_values(functools.partial(check_sizes, rows=lhs.shape[-2]), group_sizes)
    arrays = arrays._replace(group_sizes=sizes.astype(jnp.int32))
    return public_call(MOE, signature(transpose_rhs), spec, arrays, config=config, implementation=implementation).out


def _local_groups(
    lhs: AnyArray, rhs: AnyArray, group_sizes: jax.Array, group_offset: object
) -> tuple[AnyArray, AnyArray]:
    """(the sizes of the groups that `rhs` has matrices for, cut off at the last row; the row where the first begins).

    Raises:
      ShapeError: the arguments contradict one another.
    """
    offset = as_array("grouped_gemm", "group_offset", group_offset)
    check_held(lhs, rhs, group_sizes, offset, bool(jnp.issubdtype(offset.dtype, jnp.integer)))
    groups, local = group_sizes.shape[-1], rhs.shape[-3]
    check_values(functools.partial(check_offset, groups=groups, local=local), offset)
    offset = jnp.clip(offset.astype(jnp.int32), 0, groups - local)
    return held_groups(group_sizes.astype(jnp.int32), offset, local=local, rows=lhs.shape[-2])
