"""The block-sparse product on TPU (Pallas): rows of the dense operand stay in VMEM, the blocks of the sparse one stream past.

A grid step holds a panel of dense rows with all their features, and makes some block columns of the result. It walks the blocks of each of them, in
the order of a list in scalar memory, while the next blocks are on their way from HBM; blocks that do not exist cost nothing, and a column
without any is written as zeros. The same kernel computes the gradient of the dense operand, with rows and columns exchanged. The gradient of the values
is one product for each block, of dense columns with columns of the cotangent.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vishwamai.core.hardware import Chip
from vishwamai.core.op import Implementation
from vishwamai.core.pallas import TPU_DTYPES, round_up, sublanes, tiled_bytes, vmem_budget
from vishwamai.core.sharding import out_struct
from vishwamai.ops.sparse.spec import Operands, Outputs, SparseSpec

LANES = 128
SCHEDULE_WORDS = 160 * 1024
"""32-bit words of scalar memory (1 MiB on every generation) that the lists may take."""
IN_FLIGHT = 1 << 20
"""Bytes of blocks on their way at once: what covers the latency of HBM."""


@dataclasses.dataclass(frozen=True)
class SparseConfig:
    """Tiles of the product.

    Attributes:
      block_m: dense rows of a grid step.
      panel: block columns of the result that a grid step makes; backward_panel: block rows of the dense operand's gradient.
      buffers: blocks that are held or on their way.
      values_m: dense rows of a step of the gradient of the values.
      vmem_bytes: the most that a grid step plans to use.
    """

    block_m: int
    panel: int
    backward_panel: int
    buffers: int
    values_m: int
    vmem_bytes: int

    def with_block_size(self, block_size: int) -> SparseConfig:
        """The same with `block_size` dense rows to a step, no more than now."""
        return dataclasses.replace(
            self,
            block_m=min(self.block_m, round_up(block_size, 16)),
            values_m=min(self.values_m, round_up(block_size, 128)),
        )


def why_not(spec: SparseSpec, chip: Chip | None) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    o = spec.operands
    if o.dense.dtype not in TPU_DTYPES:
        return f"`dense` is {o.dense.dtype.name}, and the kernel computes in float32 and bfloat16."
    if 0 in (*o.dense.shape, *o.values.shape, spec.rows, spec.columns):
        return "an array is empty."
    rows, columns = spec.block
    if rows % LANES or columns % LANES:
        return f"the blocks are {rows} x {columns}, and the kernel takes multiples of {LANES}, the lanes of a register."
    lists = max(o.values.shape[0], o.indices.shape[0])
    words = lists * (2 * spec.blocks + max(spec.rows // rows, spec.columns // columns) + 1)
    if words > SCHEDULE_WORDS:
        return f"{spec.blocks:,} blocks take {words:,} words of schedule, and scalar memory has {SCHEDULE_WORDS:,} for it; use larger blocks."
    if heuristic(spec, chip).vmem_bytes > vmem_budget(chip):
        return (
            f"16 rows of {max(spec.rows, spec.columns):,} features beside blocks of {rows} x {columns} take more than the {vmem_budget(chip):,} bytes of "
            "VMEM there are to plan with."
        )
    return None


def _product_bytes(spec: SparseSpec, block_m: int, features: int, panel: int, give: int, buffers: int) -> int:
    dtype = spec.operands.dense.dtype
    return (
        2 * tiled_bytes((block_m, features), dtype)
        + 2 * tiled_bytes((block_m, panel * give), dtype)
        + buffers * tiled_bytes(spec.block, dtype)
        + 3 * tiled_bytes((block_m, give), jnp.float32)
    )


def heuristic(spec: SparseSpec, chip: Chip | None) -> SparseConfig:
    """As many dense rows to a step as fit, up to 2048: each of them is one more use of every block that passes."""
    rows, columns = spec.block
    dtype, budget = spec.operands.dense.dtype, vmem_budget(chip)
    m = round_up(spec.m if spec.operands.values.shape[0] > 1 else spec.m * spec.groups, sublanes(dtype))
    buffers = max(4, min(32, IN_FLIGHT // (rows * columns * dtype.itemsize)))
    while buffers > 2 and buffers * tiled_bytes(spec.block, dtype) > budget // 4:
        buffers -= 1

    def panel(width: int, block: int) -> int:
        """Block columns whose results fill up to 1024 lanes."""
        return max(1, min(width // block, 1024 // block))

    sides = (spec.rows, spec.columns, rows, columns)
    if spec.transpose:
        sides = (spec.columns, spec.rows, columns, rows)
    contracted, width, take, give = sides
    panels = panel(width, give), panel(contracted, take)

    def need(block_m: int) -> int:
        return max(
            _product_bytes(spec, block_m, contracted, panels[0], give, buffers),
            _product_bytes(spec, block_m, width, panels[1], take, buffers),
        )

    sizes = [size for size in (2048, 1024, 512, 256, 128, 64, 32, 16) if size < 2 * m]
    block_m = next((size for size in sizes if need(size) <= budget), 16)

    def values_need(size: int) -> int:
        blocks = 2 * (tiled_bytes((size, rows), dtype) + tiled_bytes((size, columns), dtype))
        return blocks + tiled_bytes((rows, size), dtype) + 4 * tiled_bytes((rows, columns), jnp.float32)

    lengths = [size for size in (8192, 4096, 2048, 1024, 512, 256, 128) if size < 2 * round_up(m, 128)]
    values_m = next((size for size in lengths if values_need(size) <= budget), 128)
    return SparseConfig(min(block_m, m), *panels, buffers, min(values_m, m), max(need(block_m), values_need(values_m)))


# --- The lists -------------------------------------------------------------------------------------------------------------------------------------


def _sorted_blocks(indices: jax.Array, target: int, targets: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Blocks in the order of their place along axis `target` (0 block row, 1 block column): (number, place along the other axis, starts).

    Args:
      indices: int32 `[L, blocks, 2]`.

    Returns:
      int32, flat: `[L * blocks]`, `[L * blocks]`, `[L * (targets + 1)]`.
    """
    along, other = indices[..., target], indices[..., 1 - target]
    # Stable: among equals the caller's order, so that the sums are the same at every call.
    order = jnp.argsort(along, axis=-1, stable=True).astype(jnp.int32)
    arranged = jnp.take_along_axis(along, order, axis=-1)
    edges = jnp.arange(targets + 1, dtype=jnp.int32)
    starts = (arranged[:, :, None] < edges).sum(1, dtype=jnp.int32)
    return order.reshape(-1), jnp.take_along_axis(other, order, axis=-1).reshape(-1), starts.reshape(-1)


# --- dense @ S -------------------------------------------------------------------------------------------------------------------------------------


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _product_body(
    numbers: Any,
    places: Any,
    starts: Any,
    dense: Any,
    values: Any,
    out: Any,
    held: Any,
    total: Any,
    arrived: Any,
    *,
    blocks: int,
    targets: int,
    config: SparseConfig,
    panel: int,
    own_lists: bool,
    own_values: bool,
    transpose: bool,
) -> None:
    group, strip = pl.program_id(0), pl.program_id(2)
    first_block = group * blocks if own_lists else 0
    first_start = group * (targets + 1) if own_lists else 0
    take, give = (held.shape[2], held.shape[1]) if transpose else (held.shape[1], held.shape[2])
    depth = config.buffers

    def start_of(column: Any) -> Any:
        return starts[first_start + jnp.minimum(strip * panel + column, targets)]

    last_block = starts[first_start + targets]

    def copy(n: Any) -> Any:
        slot = lax.rem(n, jnp.int32(depth))
        source = values.at[group if own_values else 0, numbers[first_block + n]]
        return pltpu.make_async_copy(source, held.at[slot], arrived.at[slot])

    def fetch(n: Any) -> None:
        pl.when(n < last_block)(lambda: copy(n).start())

    # The list runs through all strips of a panel of dense rows, and so do the copies.
    @pl.when(strip == 0)
    def _() -> None:
        lax.fori_loop(0, depth, lambda n, carry: fetch(n), None)

    def add(n: Any, carry: None) -> None:
        copy(n).wait()
        place = places[first_block + n]
        x = dense[:, pl.ds(pl.multiple_of(place * take, LANES), take)]
        total[...] += _dot(x, held[lax.rem(n, jnp.int32(depth))], (1, 1) if transpose else (1, 0))
        fetch(n + depth)  # its buffer is free
        return carry

    def column(c: Any, carry: None) -> None:
        total[...] = jnp.zeros(total.shape, jnp.float32)
        lax.fori_loop(start_of(c), start_of(c + 1), add, None)
        out[:, pl.ds(pl.multiple_of(c * give, LANES), give)] = total[...].astype(out.dtype)
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
    block_m = min(config.block_m, round_up(m, sublanes(dense.dtype)))

    def body(*refs: Any) -> None:
        _product_body(
            *refs,
            blocks=spec.blocks,
            targets=targets,
            config=config,
            panel=panel,
            own_lists=indices.shape[0] > 1,
            own_values=values.shape[0] > 1,
            transpose=transpose,
        )

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(groups, pl.cdiv(m, block_m), pl.cdiv(targets, panel)),
            in_specs=[
                pl.BlockSpec((None, block_m, features), lambda g, i, p, *_: (g, i, 0)),
                pl.BlockSpec(memory_space=pl.ANY),
            ],
            out_specs=pl.BlockSpec((None, block_m, panel * give), lambda g, i, p, *_: (g, i, p)),
            scratch_shapes=[
                pltpu.VMEM((config.buffers, rows, columns), values.dtype),
                pltpu.VMEM((block_m, give), jnp.float32),
                pltpu.SemaphoreType.DMA((config.buffers,)),
            ],
        ),
        out_shape=out_struct((groups, m, width), dense.dtype, dense, values, indices),
        compiler_params=_params(config, ("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * groups * m * spec.blocks * rows * columns,
            bytes_accessed=(dense.size + groups * m * width + pl.cdiv(m, block_m) * values.size) * dense.dtype.itemsize,
            transcendentals=0,
        ),
        name=name,
    )(numbers, places, starts, dense, values)


def _params(config: SparseConfig, semantics: tuple[str, ...]) -> pltpu.CompilerParams:
    limit = round_up(config.vmem_bytes * 5 // 4, 1 << 20)
    # 16 MiB is what every generation grants unasked.
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit if limit > 16 << 20 else None)  # type: ignore[arg-type]


# --- The gradient of the values --------------------------------------------------------------------------------------------------------------------


def _values_body(
    numbers: Any, rows: Any, columns: Any, left: Any, right: Any, out: Any, total: Any, *, m: int, steps: int
) -> None:
    step = pl.program_id(2)
    x, y = left[...], right[...]
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
    """For every block `left[:, its rows]^T @ right[:, its columns]`, summed over M: `[G, blocks, block_rows, block_columns]`."""
    groups, m, _ = left.shape
    rows, columns = spec.block
    numbers, other, _ = _sorted_blocks(
        indices, 0, 1
    )  # by rows, so that consecutive blocks share what stands on their left
    along = jnp.take_along_axis(indices[..., 0], numbers.reshape(indices.shape[:2]), axis=-1).reshape(-1)
    block_m = min(config.values_m, round_up(m, sublanes(left.dtype)))
    steps = pl.cdiv(m, block_m)
    own_lists = indices.shape[0] > 1

    def at(g: Any, n: Any) -> Any:
        return (g * spec.blocks if own_lists else 0) + n

    def body(*refs: Any) -> None:
        _values_body(*refs, m=m, steps=steps)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(groups, spec.blocks, steps),
            in_specs=[
                pl.BlockSpec((None, block_m, rows), lambda g, n, i, _, rows, columns: (g, i, rows[at(g, n)])),
                pl.BlockSpec((None, block_m, columns), lambda g, n, i, _, rows, columns: (g, i, columns[at(g, n)])),
            ],
            out_specs=pl.BlockSpec(
                (None, None, rows, columns), lambda g, n, i, numbers, *_: (g, numbers[at(g, n)], 0, 0)
            ),
            scratch_shapes=[pltpu.VMEM((rows, columns), jnp.float32)],
        ),
        out_shape=out_struct((groups, spec.blocks, rows, columns), left.dtype, left, right, indices),
        compiler_params=_params(config, ("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * groups * m * spec.blocks * rows * columns,
            bytes_accessed=groups * spec.blocks * (m * (rows + columns) + rows * columns) * left.dtype.itemsize,
            transcendentals=0,
        ),
        name="sparse_values_gradient",
    )(numbers, along, other, left, right)


# --- Forward and backward --------------------------------------------------------------------------------------------------------------------------


def _joined(operands: Operands, *arrays: jax.Array) -> list[jax.Array]:
    """`[G, M, features]` arrays as one group, where all groups share the sparse matrix."""
    if operands.values.shape[0] > 1 or operands.indices.shape[0] > 1:
        return list(arrays)
    return [x.reshape(1, -1, x.shape[-1]) for x in arrays]


def forward(spec: SparseSpec, config: SparseConfig, operands: Operands, residuals: bool) -> tuple[Outputs, None]:
    del residuals
    (dense,) = _joined(operands, operands.dense)
    out = _product(spec, config, dense, operands.values, operands.indices, spec.transpose, "sparse_forward")
    return Outputs(out.reshape(spec.groups, spec.m, spec.width)), None


def backward(
    spec: SparseSpec, config: SparseConfig, operands: Operands, outputs: Outputs, residuals: None, cotangents: Outputs
) -> Operands:
    del outputs, residuals
    dense, cotangent = _joined(operands, operands.dense, cotangents.out)
    d_dense = _product(
        spec, config, cotangent, operands.values, operands.indices, not spec.transpose, "sparse_dense_gradient"
    )
    sides = (cotangent, dense) if spec.transpose else (dense, cotangent)
    d_values = _values_gradient(spec, config, *sides, operands.indices)
    if operands.values.shape[0] < d_values.shape[0]:
        d_values = d_values.sum(0, keepdims=True)
    return Operands(d_dense.reshape(operands.dense.shape), d_values.astype(operands.values.dtype), None)


PALLAS_TPU = Implementation("pallas_tpu", "tpu", forward, backward, why_not, heuristic, SparseConfig)
