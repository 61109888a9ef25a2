"""The public grouped matrix product: `grouped_gemm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from vishwamai.core.config import narrowed
from vishwamai.core.op import Op
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import as_array
from vishwamai.ops.moe.cpu import NATIVE
from vishwamai.ops.moe.gpu import TRITON
from vishwamai.ops.moe.reference import XLA
from vishwamai.ops.moe.spec import GroupedSpec, Operands, flat_shape, grouped_axes, make_spec
from vishwamai.ops.moe.tpu import PALLAS_TPU

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Float, Int

MOE: Op[GroupedSpec] = Op("moe", (PALLAS_TPU, TRITON, NATIVE, XLA), grouped_axes, shareable=("rhs", "group_sizes"))


def grouped_gemm(
    lhs: Float[Array, "*batch M K"],
    rhs: Float[Array, "*batch G K N"],
    group_sizes: Int[Array, "*batch G"],
    *,
    out_dtype: Any = None,
    block_size: int | None = None,
    config: Any = None,
    implementation: str | None = None,
) -> Float[Array, "*batch M N"]:
    """Matrix product whose rows are in consecutive groups, each with its own right-hand matrix: `out[i] = lhs[i] @ rhs[group of i]`.

    The meaning is that of `jax.lax.ragged_dot`: group g has the `group_sizes[g]` rows after those of the groups before it (none where the size is 0),
    and rows after the last group give 0. The cost is that of one product of `[M, K]` with `[K, N]`, whatever the number of groups. Sums are float32
    (float64 for float64); float32 products are at full precision. The algorithm on TPU is that of Gale et al., "MegaBlocks" (2022), with tiles that two
    groups share computed for the rows of each alone.

    Args:
      lhs: `[..., M, K]`, bfloat16, float16, float32 or float64.
      rhs: `[G, K, N]`, or `[..., G, K, N]` with the batch axes of `lhs`; of the dtype of `lhs`.
      group_sizes: `[G]` or `[..., G]`, integers of zero or more, whose sum should be at most M (what is beyond is cut off).
      out_dtype: dtype of the result; by default that of `lhs`.
      block_size: about how many rows and columns a tile has; None lets the library choose.
      config: tiles (a `GroupedConfig`), a block size, or None.
      implementation: name of the implementation to use, or None for the best one; see `vishwamai.explain`.

    Returns:
      `[..., M, N]` in `out_dtype`. Gradients exist for `lhs` (0 in rows without a group) and `rhs` (0 for a group without rows).

    Raises:
      ShapeError: the arguments contradict one another.
      UnsupportedError: the implementation asked for cannot serve the call.

    >>> import jax.numpy as jnp
    >>> rows = jnp.array([[1.0], [2.0], [3.0], [4.0]])
    >>> grouped_gemm(rows, jnp.array([[[10.0]], [[7.0]], [[100.0]]]), jnp.array([1, 0, 2]))[:, 0].tolist()
    [10.0, 200.0, 300.0, 0.0]
    """
    config = block_size if config is None else config
    named = (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
    lhs, rhs, group_sizes = (as_array("grouped_gemm", name, x) for name, x in named)
    if out_dtype is None and lhs.dtype == jnp.float32:
        out_dtype = jnp.float32  # whatever the ambient `use_bfloat16` makes of the operands
    lhs, rhs = narrowed(lhs, rhs)
    arrays = (lhs, rhs, group_sizes)

    def run(lhs: Any, rhs: Any, group_sizes: Any) -> Any:
        spec = make_spec(lhs, rhs, group_sizes, out_dtype)
        operands = Operands(
            lhs.reshape(flat_shape(lhs.shape, 2)),
            rhs.reshape(flat_shape(rhs.shape, 3)),
            group_sizes.astype(jnp.int32).reshape(flat_shape(group_sizes.shape, 1)),
        )
        out = MOE(spec, operands, config=config, implementation=implementation).out
        return out.reshape(*lhs.shape[:-1], rhs.shape[-1])

    make_spec(*arrays, out_dtype)  # the caller's own shapes are checked before anything is split
    return follow_explicit_axes(run, _caller_axes(*arrays), *arrays)


def _caller_axes(*arrays: Any) -> Axes:
    """The factors of the caller's own arrays."""
    batch = tuple(f"b{i}" for i in range(arrays[0].ndim - 2))
    core = (("m", "k"), ("g", "k", "n"), ("g",))
    dims = tuple((*(batch if x.ndim > len(own) else ()), *own) for x, own in zip(arrays, core, strict=True))
    return Axes(dims, (*batch, "m", "n"), frozenset({*batch, "k", "n"}))
