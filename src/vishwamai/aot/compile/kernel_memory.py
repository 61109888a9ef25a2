"""The VMEM that the Pallas kernels of a traced program need at least: what cannot fit is refused before the compiler,
which may take a minute to say so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.core
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from vishwamai.aot.compile.diagnose import CompilerProblem, as_error
from vishwamai.core.hardware import TpuChip
from vishwamai.core.numbers import human
from vishwamai.core.qtensor import bits
from vishwamai.core.types import PyTree


def refuse_too_large(jaxpr: Jaxpr, chip: TpuChip) -> None:
    """Checks every Pallas kernel of a program.

    Raises:
        DeviceError: the blocks and the scratch of one exceed the chip's VMEM.
    """
    for equation in _kernels(jaxpr):
        allocations = sorted(_allocations(equation.params), reverse=True)
        used = sum(size for size, _ in allocations)
        if used > chip.vmem_bytes:
            name = equation.params.get("name") or equation.params["jaxpr"].debug_info.func_name
            problem = CompilerProblem(
                kind="vmem",
                summary=f"kernel {name!r}: its blocks and scratch take {human(used)}, but {chip.name} has "
                f"{human(chip.vmem_bytes)} of VMEM per core.",
                fix="use smaller blocks or scratch; no option raises the VMEM that there is.",
                kernel=name,
                used=used,
                limit=chip.vmem_bytes,
                allocations=tuple(f"{human(size)}: {words}" for size, words in allocations[:5]),
            )
            raise as_error(problem, str(problem))


def _kernels(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for equation in jaxpr.eqns:
        if equation.primitive.name != "pallas_call":
            for inner in jaxprs_in_params(equation.params):
                yield from _kernels(inner)
        elif not equation.params.get("interpret"):
            yield equation


def _allocations(params: dict[str, PyTree]) -> Iterator[tuple[int, str]]:
    """(bytes, words) of each allocation, without what the compiler adds: tiles that are filled up, its own scratch."""
    grid = params["grid_mapping"]
    for block in grid.block_mappings:
        if str(block.block_aval.memory_space) in _VMEM:
            buffers = _buffers(block, grid.grid)
            words = f"a block of {_words(block.block_aval)}"
            yield buffers * _size(block.block_aval), words + f" (buffered {buffers} times)" * (buffers > 1)
    for scratch in grid.scratch_avals:
        if str(getattr(scratch, "memory_space", None)) in _VMEM and hasattr(scratch, "dtype"):
            yield _size(scratch), f"scratch of {_words(scratch)}"


_VMEM = ("default", "MemorySpace.DEFAULT", "vmem", "MemorySpace.VMEM", "VMEM", "None")
"""How JAX prints the memories that a TPU kernel's block may name for VMEM, and no name."""


def _buffers(block: Any, grid: tuple[object, ...]) -> int:
    """Buffers of a block: as many as its kernel asks for, else two where its place moves with the grid."""
    if block.pipeline_mode is not None:
        return getattr(block.pipeline_mode, "buffer_count", 1)
    index = block.index_map_jaxpr.jaxpr
    read = [*index.outvars, *(v for equation in index.eqns for v in equation.invars)]
    axes = [v for v, size in zip(index.invars, grid) if isinstance(size, int) and size > 1]
    return 2 if any(v is axis for v in read if not isinstance(v, Literal) for axis in axes) else 1


def _size(array: jax.core.ShapedArray) -> int:
    size = bits(array.dtype)
    for length in array.shape:
        size *= length
    return size // 8


def _words(array: jax.core.ShapedArray) -> str:
    return f"{array.dtype}[{','.join(map(str, array.shape))}]"
