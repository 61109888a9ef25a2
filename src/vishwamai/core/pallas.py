"""What every Pallas TPU kernel of ours needs: rounding to tiles, memory planning, and one way to call a kernel with its
refs by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from vishwamai.core import hardware
from vishwamai.core.errors import KernelError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.sharding import out_struct
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size
from vishwamai.core.types import AnyArray, PyTree, Ref, Slice

if TYPE_CHECKING:
    from vishwamai.core.spec import OpSpec


Input = tuple[jax.Array | None, pl.BlockSpec | None]
Output = tuple[Sequence[int], DTypeLike, pl.BlockSpec | None]
DEFAULT_VMEM_BYTES = 16 << 20
"""VMEM that every generation grants a kernel without being asked."""
LANES = 128
"""Columns of a tile of memory, and of a vector register."""
STEPS = 32
"""Steps of each core that a kernel bound by memory aims at: the first load and the last store are then about two parts
in fifty.
"""
SMALLEST_TRANSFER, LARGEST_TRANSFER = 512 << 10, 2 << 20
"""Bytes of one array's block: below, a transfer takes less than its latency of about 0.6 us; above, nothing is
gained.
"""
_ROWS = 32
"""Of a tile, that an epilogue works on together."""
TPU_DTYPES = frozenset(jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16))
"""Floating dtypes that every TPU generation loads, stores and converts in the vector unit."""


def planning_chip(target: Target) -> TpuChip:
    """The chip to plan memory for: the one named, or, where none is known, v4, whose 16 MiB of VMEM every generation
    has.
    """
    return target.tpu or hardware.TPUS["v4"]


def dot(
    lhs: jax.Array, rhs: jax.Array, axes: tuple[int, int], total: DTypeLike = jnp.float32, **kwargs: Any
) -> jax.Array:
    """The product of two matrices inside a kernel, `axes` the contracted axis of each, summed in `total`; `kwargs` go
    to `lax.dot_general`.
    """
    if axes == (1, 1) and rhs.shape[0] == 1:
        # Mosaic takes a product with one row for one of a matrix with a vector, and jax 0.10 does not lower those of
        # narrow numbers.
        return dot(lhs, jnp.broadcast_to(rhs, (8, rhs.shape[1])), axes, total, **kwargs)[:, :1]
    return lax.dot_general(lhs, rhs, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=total, **kwargs)


def zero_past(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with everything from index `size` of `axis` on set to zero."""
    if x.shape[0] == 1:  # Mosaic compares no single row of packed numbers
        return zero_past(jnp.broadcast_to(x, (8, x.shape[1])), axis, size)[:1]
    keep = lax.broadcasted_iota(jnp.int32, x.shape, axis) < size
    return jnp.where(keep, x, jnp.zeros_like(x))


def by_rows(rows: int, work: Callable[[Slice], None]) -> None:
    """`work(slice)` for some rows at a time, few enough for the registers, in a loop."""
    count, rest = divmod(rows, _ROWS)

    def some(i: jax.Array, carry: None) -> None:
        work(pl.ds(pl.multiple_of(i * _ROWS, _ROWS), _ROWS))

    if count:
        lax.fori_loop(0, count, some, None, unroll=2 if count % 2 == 0 else 1)
    if rest:
        work(pl.ds(count * _ROWS, rest))


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is `n` or more."""
    return -(-n // multiple) * multiple


def sublanes(dtype: DTypeLike) -> int:
    """Rows of one tile: 8 for 32-bit, 16 for 16-bit, 32 for 8-bit elements."""
    return 8 * max(1, 4 // jnp.dtype(dtype).itemsize)


def tiled_bytes(shape: Sequence[int], dtype: DTypeLike, lanes: int = 128) -> int:
    """Bytes that an array takes in VMEM, where its last two axes are padded to whole tiles."""
    rows = round_up(shape[-2], sublanes(dtype)) if len(shape) > 1 else 1
    return math.prod(shape[:-2]) * rows * round_up(shape[-1], lanes) * jnp.dtype(dtype).itemsize


def vmem_budget(target: Target) -> int:
    """Bytes of VMEM that a kernel plans with, see `TpuChip.vmem_budget`."""
    return planning_chip(target).vmem_budget


def planned_vmem(need: int, now: int, target: Target) -> int:
    """The plan for tiles that need so much: what there is to plan with, or what the plan is `now`, at most; the
    compiler has the last word.
    """
    return min(need, max(vmem_budget(target), now))


def vmem_limit(vmem_bytes: int, granule: int = 1 << 20) -> int | None:
    """The VMEM limit to ask of the compiler for a plan of `vmem_bytes`: a quarter more, in whole `granule`s; None where
    the default is enough.
    """
    limit = round_up(vmem_bytes * 5 // 4, granule)
    return limit if limit > DEFAULT_VMEM_BYTES else None


def call(
    body: Callable[..., None],
    *,
    name: str,
    grid: Sequence[PyTree],
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
    scalars: Mapping[str, PyTree] = MappingProxyType({}),
    scratch: Mapping[str, Any] = MappingProxyType({}),
    aliases: Mapping[str, str] = MappingProxyType({}),
    semantics: Sequence[str],
    vmem_bytes: int,
    vmem_granule: int = 1 << 20,
    flops: int,
    bytes_accessed: int,
    transcendentals: int = 0,
) -> tuple[AnyArray, ...]:
    """Runs a kernel body over a grid; the body gets every ref by its name, as a keyword argument, and None for what is
    absent.

    Args:
      body: `body(**refs)`, in the names of `scalars`, `inputs`, `outputs` and `scratch`.
      name: the kernel's name in profiles and in the compiler's reports.
      grid: steps along each axis.
      inputs: (array, BlockSpec) by ref; absent: None, or None for the array.
      outputs: (shape, dtype, BlockSpec) by ref, or None. They vary over every mesh axis that an input or a scalar
        varies over.
      scalars: prefetched arrays by ref, which the index maps get after the grid's indices.
      scratch: shapes by ref (`pltpu.VMEM`, semaphores), or None.
      aliases: the output, by its ref, that takes the memory of an input.
      semantics: "parallel" (may be split over the cores of a megacore chip) or "arbitrary", for each grid axis.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together; see `vmem_limit`.
      flops, bytes_accessed, transcendentals: counts of the cost estimate for XLA's scheduler.

    Returns:
      the outputs in their order, None for those that are absent.
    """
    scalar_arrays = {ref: array for ref, array in scalars.items() if array is not None}
    present = {ref: entry for ref, entry in inputs.items() if entry is not None and entry[0] is not None}
    output_specs = {ref: entry for ref, entry in outputs.items() if entry is not None}
    scratch_refs = {ref: shape for ref, shape in scratch.items() if shape is not None}
    names = (*scalar_arrays, *present, *output_specs, *scratch_refs)
    absent = dict.fromkeys((*scalars, *inputs, *outputs, *scratch))
    arrays = (*scalar_arrays.values(), *(array for array, _ in present.values()))

    def kernel(*refs: Ref) -> None:
        body(**absent | dict(zip(names, refs, strict=True)))

    results = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalar_arrays),
            grid=tuple(grid),
            in_specs=[spec for _, spec in present.values()],
            out_specs=[spec for _, _, spec in output_specs.values()],
            scratch_shapes=list(scratch_refs.values()),
        ),
        out_shape=[out_struct(shape, dtype, arrays) for shape, dtype, _ in output_specs.values()],
        input_output_aliases={names.index(source): list(output_specs).index(ref) for source, ref in aliases.items()},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=tuple(semantics),  # type: ignore[arg-type]
            vmem_limit_bytes=vmem_limit(vmem_bytes, vmem_granule),
        ),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=bytes_accessed, transcendentals=transcendentals),
        name=name,
    )(*arrays)
    by_ref = dict(zip(output_specs, results, strict=True))
    return tuple(by_ref.get(ref) for ref in outputs)


class VmemTiles(Tiles):
    """Tiles of a kernel that plans its VMEM: `needs` says what the plans are."""

    def needs(self, spec: OpSpec, target: Target) -> Mapping[str, int]:
        """Bytes of VMEM that the tiles need, by the field that holds the plan for it."""
        raise NotImplementedError

    def planned(self, spec: OpSpec, target: Target) -> Self:
        """The same with memory planned for its tiles, see `planned_vmem`."""
        needs = self.needs(spec, target).items()
        return dataclasses.replace(
            self, **{name: planned_vmem(need, getattr(self, name), target) for name, need in needs}
        )

    def resized(self, block_size: int, spec: OpSpec, target: Target) -> Self:
        """Tiles of about `block_size`, or of the largest half, quarter, ... of it that fits what there is to plan with,
        or what these tiles plan; these tiles where none does.
        """
        longest = max(size for operand in spec.operands if operand is not None for size in operand.shape)
        size, most = min(block_size, 1 << (longest - 1).bit_length()), vmem_budget(target)
        while size >= 1:
            tiles = self.with_block_size(size)
            needs = tiles.needs(spec, target).items()
            if all(need <= max(most, getattr(self, name)) for name, need in needs):
                return tiles.planned(spec, target)
            size //= 2
        return self

    def shortage(self, spec: OpSpec, target: Target) -> str | None:
        need, most = max(self.needs(spec, target).values()), planning_chip(target).vmem_bytes
        if need <= most * 5 // 4:  # what is counted of temporaries is more than the compiler keeps
            return None
        return f"its tiles need about {need:,} bytes of VMEM, more than the {most:,} of a core, so it may not compile"


@dataclasses.dataclass(frozen=True)
class RowTiles(VmemTiles):
    """Tiles of a kernel that holds whole rows.

    Attributes:
      block_rows: rows that one grid step holds in VMEM.
      chunk_rows: rows that are worked on together in registers, a multiple of 8; divides `block_rows`.
      vmem_bytes: bytes of VMEM that a step plans to use, buffers and temporaries together.

    Raises:
      KernelError: rows of a block would be left over.
    """

    block_rows: int = size("rows", block_size=lambda tiles, n: round_up(n, tiles.chunk_rows))
    chunk_rows: int = size("rows", least=8)
    vmem_bytes: int = 0

    def __post_init__(self) -> None:
        if self.block_rows < 1 or self.chunk_rows < 1 or self.chunk_rows % 8 or self.block_rows % self.chunk_rows:
            raise KernelError(
                f"{type(self).__name__}: chunk_rows is {self.chunk_rows} and block_rows {self.block_rows}; "
                "chunk_rows must be a multiple of 8, and block_rows one of chunk_rows."
            )
