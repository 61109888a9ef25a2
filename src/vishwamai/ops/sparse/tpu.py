"""The block-sparse product on TPU (Pallas): rows of the dense operand stay in VMEM, the blocks of the sparse one stream
past.

A grid step holds a panel of dense rows with all their features, and makes some block columns of the result. It walks
the blocks of each of them, in the order of a list in scalar memory, while the next blocks are on their way from HBM;
blocks that do not exist cost nothing, and a column without any is written as zeros. The same kernel computes the
gradient of the dense operand, with rows and columns exchanged. The gradient of the values is one product for each
block, of dense columns with columns of the cotangent.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.op import Implementation
from vishwamai.core.pallas import LANES, call, round_up, sublanes
from vishwamai.core.types import AnyArray, PyTree, Ref, Transfer
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec
from vishwamai.ops.sparse.tpu_tiles import SparseConfig, heuristic, why_not


def _sorted_blocks(indices: jax.Array, target: int, targets: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks in the order of their place along axis `target` (0 block row, 1 block column): (number, place along the
    other axis, starts).

    Args:
      indices: int32 `[L, blocks, 2]`.

    Returns:
      int32, flat: `[L * blocks]`, `[L * blocks]`, `[L * (targets + 1)]`.
    """
    along, across = indices[..., target], indices[..., 1 - target]
    # Stable: among equals the caller's order, so that the sums are the same at every call.
    order = jnp.argsort(along, axis=-1, stable=True).astype(jnp.int32)
    arranged = jnp.take_along_axis(along, order, axis=-1)  # [L, blocks], ascending
    edges = jnp.arange(targets + 1, dtype=jnp.int32)
    starts = (arranged[:, :, None] < edges).sum(1, dtype=jnp.int32)  # [L, targets + 1], as in CSR
    return order.reshape(-1), jnp.take_along_axis(across, order, axis=-1).reshape(-1), starts.reshape(-1)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    # The MXU rounds float32 operands to bfloat16 unless asked for six passes.
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _product_body(
    numbers: Ref,
    places: Ref,
    starts: Ref,
    dense: Ref,
    values: Ref,
    out: Ref,
    tiles: Ref,
    total: Ref,
    arrived: Ref,
    *,
    blocks: int,
    targets: int,
    config: SparseConfig,
    panel: int,
    own_lists: bool,
    own_values: bool,
    transpose: bool,
) -> None:
    """One step: `block_m` dense rows times the blocks of `panel` block columns, which are copied ahead of their use."""
    group, strip = pl.program_id(0), pl.program_id(2)
    first_block = group * blocks if own_lists else 0
    first_start = group * (targets + 1) if own_lists else 0
    # Sides of a block along the contracted axis and along the result's columns.
    take, give = (tiles.shape[2], tiles.shape[1]) if transpose else (tiles.shape[1], tiles.shape[2])
    depth = config.buffers

    def start_of(column: jax.Array) -> AnyArray:
        return starts[first_start + jnp.minimum(strip * panel + column, targets)]

    last_block = starts[first_start + targets]

    def copy(n: jax.Array) -> Transfer:
        slot = lax.rem(n, jnp.int32(depth))  # a ring of buffers
        source = values.at[group if own_values else 0, numbers[first_block + n]]
        return pltpu.make_async_copy(source, tiles.at[slot], arrived.at[slot])

    def fetch(n: jax.Array) -> None:
        pl.when(n < last_block)(lambda: copy(n).start())  # past the last block there is nothing to fetch

    # The list runs through all strips of a panel of dense rows, and so do the copies.
    @pl.when(strip == 0)
    def _() -> None:
        lax.fori_loop(0, depth, lambda n, carry: fetch(n), None)

    def add(n: AnyArray, carry: None) -> None:
        copy(n).wait()
        place = places[first_block + n]
        x = dense[:, pl.ds(pl.multiple_of(place * take, LANES), take)]  # [block_m, take]
        total[...] += _dot(x, tiles[lax.rem(n, jnp.int32(depth))], (1, 1) if transpose else (1, 0))
        fetch(n + depth)  # its buffer is free
        return carry

    def column(c: jax.Array, carry: None) -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)
        lax.fori_loop(start_of(c), start_of(c + 1), add, None)
        out[:, pl.ds(pl.multiple_of(c * give, LANES), give)] = total[...].astype(out.dtype)  # [block_m, give]
        return carry

    lax.fori_loop(0, jnp.minimum(panel, targets - strip * panel), column, None)


def _product(
    spec: SparseSpec,
    config: SparseConfig,
    dense: jax.Array,
    values: jax.Array,
    indices: jax.Array,
    transpose: bool,
    name: str,
) -> jax.Array:
    """`dense @ S` or `dense @ S^T`: `[G, M, contracted] -> [G, M, width]`; `values` and `indices` `[G or 1, ...]`."""
    groups, m, features = dense.shape
    rows, columns = spec.block
    give, width = (rows, spec.rows) if transpose else (columns, spec.columns)
    targets = width // give
    panel = min(config.backward_panel if transpose != spec.transpose else config.panel, targets)
    numbers, places, starts = _sorted_blocks(indices, 0 if transpose else 1, targets)
    block_m = min(config.block_m, round_up(m, sublanes(dense.dtype)))  # no more rows than a small operand has

    body = functools.partial(
        _product_body,
        blocks=spec.blocks,
        targets=targets,
        config=config,
        panel=panel,
        own_lists=indices.shape[0] > 1,
        own_values=values.shape[0] > 1,
        transpose=transpose,
    )
    out_block = pl.BlockSpec((None, block_m, panel * give), lambda g, i, p, *_: (g, i, p))
    (out,) = call(
        body,
        name=name,
        grid=(groups, pl.cdiv(m, block_m), pl.cdiv(targets, panel)),
        scalars=dict(numbers=numbers, places=places, starts=starts),
        inputs=dict(
            dense=(dense, pl.BlockSpec((None, block_m, features), lambda g, i, p, *_: (g, i, 0))),
            values=(values, pl.BlockSpec(memory_space=pl.ANY)),
        ),
        outputs=dict(out=((groups, m, width), dense.dtype, out_block)),
        scratch=dict(
            tiles=pltpu.VMEM((config.buffers, rows, columns), values.dtype),
            total=pltpu.VMEM((block_m, give), jnp.float32),
            arrived=pltpu.SemaphoreType.DMA((config.buffers,)),
        ),
        semantics=("parallel", "parallel", "arbitrary"),
        vmem_bytes=config.vmem_bytes,
        flops=2 * groups * m * spec.blocks * rows * columns,
        bytes_accessed=(dense.size + groups * m * width + pl.cdiv(m, block_m) * values.size) * dense.dtype.itemsize,
    )
    return out


def _values_body(
    numbers: Ref, rows: Ref, columns: Ref, left: Ref, right: Ref, out: Ref, total: Ref, *, m: int, steps: int
) -> None:
    """One step of a block's gradient: the sum over M of left^T right grows by the product of `block_m` rows."""
    del numbers, rows, columns  # the index maps read them
    step = pl.program_id(2)
    x, y = left[...], right[...]  # [block_m, block_rows], [block_m, block_columns]
    if m % x.shape[0]:  # past the end of the array there is anything
        inside = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) < m - step * x.shape[0]
        x, y = jnp.where(inside, x, jnp.zeros_like(x)), jnp.where(inside, y, jnp.zeros_like(y))
    product = _dot(x, y, (0, 0))
    if steps == 1:
        out[...] = product.astype(out.dtype)
        return

    @pl.when(step == 0)
    def _() -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)

    total[...] += product

    @pl.when(step == steps - 1)
    def _() -> None:
        out[...] = total[...].astype(out.dtype)


def _values_gradient(
    spec: SparseSpec, config: SparseConfig, left: jax.Array, right: jax.Array, indices: jax.Array
) -> jax.Array:
    """For every block `left[:, its rows]^T @ right[:, its columns]`, summed over M:
    `[G, blocks, block_rows, block_columns]`.
    """
    groups, m, _ = left.shape
    rows, columns = spec.block
    numbers, across, _ = _sorted_blocks(
        indices, 0, 1
    )  # by rows, so that consecutive blocks share what stands on their left
    along = jnp.take_along_axis(indices[..., 0], numbers.reshape(indices.shape[:2]), axis=-1).reshape(-1)
    block_m = min(config.values_m, round_up(m, sublanes(left.dtype)))
    steps = pl.cdiv(m, block_m)
    own_lists = indices.shape[0] > 1

    def block_index(g: AnyArray, n: AnyArray) -> AnyArray:
        return (g * spec.blocks if own_lists else 0) + n

    def left_index(g: AnyArray, n: AnyArray, i: AnyArray, numbers: Ref, rows: Ref, columns: Ref) -> PyTree:
        return g, i, rows[block_index(g, n)]

    def right_index(g: AnyArray, n: AnyArray, i: AnyArray, numbers: Ref, rows: Ref, columns: Ref) -> PyTree:
        return g, i, columns[block_index(g, n)]

    def out_index(g: AnyArray, n: AnyArray, i: AnyArray, numbers: Ref, *_: object) -> PyTree:
        return g, numbers[block_index(g, n)], 0, 0

    out_block = pl.BlockSpec((None, None, rows, columns), out_index)
    (gradient,) = call(
        functools.partial(_values_body, m=m, steps=steps),
        name="sparse_values_gradient",
        grid=(groups, spec.blocks, steps),
        scalars=dict(numbers=numbers, rows=along, columns=across),
        inputs=dict(
            left=(left, pl.BlockSpec((None, block_m, rows), left_index)),
            right=(right, pl.BlockSpec((None, block_m, columns), right_index)),
        ),
        outputs=dict(out=((groups, spec.blocks, rows, columns), left.dtype, out_block)),
        scratch=dict(total=pltpu.VMEM((rows, columns), jnp.float32)),
        semantics=("parallel", "parallel", "arbitrary"),
        vmem_bytes=config.vmem_bytes,
        flops=2 * groups * m * spec.blocks * rows * columns,
        bytes_accessed=groups * spec.blocks * (m * (rows + columns) + rows * columns) * left.dtype.itemsize,
    )
    return gradient


def _joined(operands: Operands, *arrays: jax.Array) -> list[jax.Array]:
    """`[G, M, features]` arrays as one group, where all groups share the sparse matrix."""
    if operands.values.shape[0] > 1 or operands.indices.shape[0] > 1:
        return list(arrays)
    return [x.reshape(1, -1, x.shape[-1]) for x in arrays]


def forward(spec: SparseSpec, config: SparseConfig, operands: Operands) -> tuple[Outputs, None]:
    (dense,) = _joined(operands, operands.dense)
    out = _product(spec, config, dense, operands.values, operands.indices, spec.transpose, "sparse_forward")
    return Outputs(out.reshape(spec.groups, spec.m, spec.width)), None


def backward(spec: SparseSpec, config: SparseConfig, operands: Operands, cotangents: Outputs) -> Operands:
    dense, cotangent = _joined(operands, operands.dense, cotangents.out)
    d_dense = _product(
        spec, config, cotangent, operands.values, operands.indices, not spec.transpose, "sparse_dense_gradient"
    )
    sides = (cotangent, dense) if spec.transpose else (dense, cotangent)
    d_values = _values_gradient(spec, config, *sides, operands.indices)
    if operands.values.shape[0] < d_values.shape[0]:  # one matrix for all groups: its gradients add up
        d_values = d_values.sum(0, keepdims=True)
    return Operands(d_dense.reshape(operands.dense.shape), d_values.astype(operands.values.dtype), None)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, SparseConfig)
