"""A Triton kernel in a JAX program: compiled to PTX, and called by XLA's own custom call `__gpu$xla.gpu.ptx`.

Nothing is compiled and triton is not imported while a program is traced: `triton_call` binds a primitive, and the PTX
is made when the program is lowered for CUDA. So the branch for GPUs costs a program for another platform next to
nothing, and a machine without a GPU can lower and export for one. Sizes, strides and scalars are compile-time
constants, since the custom call passes buffers and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.api_util import shaped_abstractify
from jax.extend.core import Primitive
from jax.interpreters import mlir

from vishwamai.core.triton_launch import POINTERS, KernelParameters, Launch, architecture, compiled
from vishwamai.core.types import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class ConstantTable:
    """A constant array among a primitive's parameters, where it is not an operand that partitioning would have to
    place; itself alone is equal to it.
    """

    values: np.ndarray


def triton_call(
    launch: Launch,
    inputs: Mapping[str, PyTree],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    aliases: Mapping[str, str] | None = None,
) -> list[jax.Array]:
    """Calls a Triton kernel on JAX arrays.

    Args:
      launch: the kernel and how it is launched.
      inputs: arrays by the names of the kernel's parameters, in the order of its parameters; NumPy's become constants
        of the program.
      outputs: shapes and dtypes of the results, in the order of the kernel's parameters, all of them after the inputs.
      aliases: input whose memory an output takes over, by the output's name: how an output starts from values (zeros to
        add to).

    Returns:
      the results in order. The primitive has no gradient and no batching rule: an `Op` brings both.
    """
    tables = tuple((name, ConstantTable(x)) for name, x in inputs.items() if isinstance(x, np.ndarray))
    results = _triton_call.bind(
        *(x for x in inputs.values() if not isinstance(x, np.ndarray)),
        launch=launch,
        tables=tables,
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        avals=tuple(shaped_abstractify(struct).update(dtype=struct.dtype) for struct in outputs.values()),
        aliases=tuple((aliases or {}).items()),
    )
    return list(results)


_triton_call = Primitive("triton_call")
_triton_call.multiple_results = True
_triton_call.def_abstract_eval(lambda *operands, avals, **_: list(avals))
_triton_call.def_impl(lambda *operands, **params: jax.jit(functools.partial(_triton_call.bind, **params))(*operands))


def _ptx_pointers(ptx: str) -> int:
    """How many 64-bit parameters the kernel's entry takes."""
    entry = re.search(r"\.entry\s+\S+?\((.*?)\)", ptx, re.DOTALL)
    assert entry is not None
    return len(re.findall(r"\.param\s+\.u64", entry[1]))


def _lower(
    *operands: Any,
    launch: Launch,
    tables: Any,
    inputs: Sequence[str],
    outputs: Sequence[str],
    avals: Any,
    aliases: Any,
) -> Any:
    constants, arrays = dict(tables), iter(operands)
    operands = tuple(jnp.asarray(constants[name].values) if name in constants else next(arrays) for name in inputs)
    types = tuple(
        (name, POINTERS[array.dtype.name]) for name, array in zip((*inputs, *outputs), (*operands, *avals), strict=True)
    )
    kernel = compiled(launch.kernel, types, dataclasses.replace(launch, grid=()), architecture())
    parameters = KernelParameters.of(launch.kernel, launch.bundles)
    order = [leaf for _, _, leaves in parameters.entries for leaf in leaves if leaf in dict(types)]
    assert order == [name for name, _ in types], (
        f"{launch.kernel.name}: buffers are passed as {types}, but declared as {order}"
    )
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    # Triton appends two pointers of its own: global scratch (tensor descriptors made on the device live there) and the
    # profiler's.
    assert _ptx_pointers(ptx) == len(types) + 2, f"{launch.kernel.name}: its PTX takes other parameters than buffers"
    assert metadata.num_ctas == 1
    threads = re.search(r"\.reqntid\s+(\d+)", ptx)
    assert threads is not None
    grid = (*launch.grid, 1, 1)[:3]
    scratch = max(1, metadata.global_scratch_size * math.prod(grid))
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
    call = jax.ffi.ffi_call(
        "__gpu$xla.gpu.ptx",
        (*structs, jax.ShapeDtypeStruct((scratch,), jnp.uint8), jax.ShapeDtypeStruct((1,), jnp.uint8)),
        input_output_aliases={inputs.index(source): outputs.index(result) for result, source in aliases},
    )
    sizes = {f"grid_{axis}": np.int32(n) for axis, n in zip("xyz", grid)}
    sizes |= {"block_x": np.int32(threads[1]), "block_y": np.int32(1), "block_z": np.int32(1)}
    results = call(
        *operands,
        name=metadata.name,
        kernel_type="ptx",
        kernel_data=ptx,
        shared_mem_bytes=np.int32(metadata.shared),
        **sizes,
    )
    return list(results[: len(avals)])


mlir.register_lowering(_triton_call, mlir.lower_fun(_lower, multiple_results=True), platform="cuda")
