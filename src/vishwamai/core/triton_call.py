"""A Triton kernel in a JAX program: compiled to PTX, and called by XLA's own custom call `__gpu$xla.gpu.ptx`.

Nothing is compiled and triton is not imported while a program is traced: `triton_call` binds a primitive, and the PTX is made when the program is
lowered for CUDA. So the branch for GPUs costs a program for another platform next to nothing, and a machine without a GPU can lower and export for
one. Sizes, strides and scalars are compile-time constants, since the custom call passes buffers and nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.api_util import shaped_abstractify
from jax.extend.core import Primitive
from jax.interpreters import mlir

from vishwamai.core.errors import DeviceError

INSTALL_HINT = "pip install 'vishwamai[gpu]'"
PTX_VERSION = 87
"""Of CUDA 12.8, which every driver that jax 0.10 supports takes; Triton would otherwise ask the local driver."""

POINTERS = {
    "float64": "*fp64",
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "int64": "*i64",
    "int32": "*i32",
    "uint32": "*u32",
    "int8": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}
"""Triton's name of a pointer to each dtype."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A `@triton.jit` function by its name, so that naming it imports neither its module nor triton.

    >>> Kernel("vishwamai.ops.norm.gpu_kernels", "forward")
    Kernel(module='vishwamai.ops.norm.gpu_kernels', name='forward')
    """

    module: str
    name: str

    def load(self) -> Any:
        """The function itself."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclasses.dataclass(frozen=True)
class TritonDtype:
    """A dtype among a kernel's constants, by Triton's short name ("bf16", "fp32", "int8"): naming it does not import triton."""

    name: str

    def load(self) -> Any:
        """Triton's own object."""
        return importlib.import_module("triton.language").dtype(self.name)


def constants_of(launch: Launch) -> dict[str, Any]:
    """The values of a launch's constants as Triton takes them."""
    return {name: value.load() if isinstance(value, TritonDtype) else value for name, value in launch.constants}


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched: everything but its buffers.

    Attributes:
      kernel: which.
      grid: programs along each axis, three at most.
      constants: values of the kernel's other parameters, by name, in any order.
      warps: warps of a program.
      stages: buffers that the compiler's software pipeline uses.
    """

    kernel: Kernel
    grid: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int = 4
    stages: int = 3


def compiler_options(launch: Launch) -> dict[str, Any]:
    """What Triton's compiler is told besides the arguments: a*b + c in one instruction, which is Triton's default to 3.9 and no longer after."""
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}


@functools.cache
def why_not() -> str | None:
    """None where triton is installed, else the reason and its mend."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed: {INSTALL_HINT}."
    return None


def architecture() -> int:
    """Compute capability that kernels are compiled for, 90 for 9.0: `VISHWAMAI_CUDA_ARCH`, else that of the first GPU, else 90 (sm_90a, Hopper)."""
    named = os.environ.get("VISHWAMAI_CUDA_ARCH")
    if named:
        return int(named)
    if jax.default_backend() == "gpu":
        return int(str(jax.devices()[0].compute_capability).replace(".", ""))
    return 90


@functools.lru_cache(maxsize=4096)
def compiled(kernel: Kernel, types: tuple[tuple[str, str], ...], launch: Launch, target: int | str = 90) -> Any:
    """Triton's compiled kernel, for a GPU that need not be here.

    Args:
      types: (parameter, Triton's type of it) for every pointer, all of them divisible by 16 bytes as XLA's and torch's buffers are.
      launch: constants, warps and stages; its grid does not matter.
      target: compute capability (90), or AMD's name of an architecture ("gfx942").

    Raises:
      DeviceError: triton is not installed.
    """
    reason = why_not()
    if reason is not None:
        raise DeviceError(reason)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = kernel.load()
    if not hasattr(function, "cache_key"):
        raise DeviceError(f"{kernel}: it was loaded under TRITON_INTERPRET=1 and cannot be compiled; start without it.")
    pointers, constants = dict(types), constants_of(launch)
    strangers = sorted((set(pointers) | set(constants)) - set(function.arg_names))
    assert not strangers, f"{kernel.name} has no parameters {strangers}"
    signature, values, attributes = {}, {}, {}
    for i, name in enumerate(function.arg_names):
        if name in pointers:
            signature[name] = pointers[name]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name], values[(i,)] = "constexpr", constants.get(name)  # an absent buffer is None
    source = ASTSource(function, signature, values, attributes)
    options = compiler_options(launch)
    if isinstance(target, int):
        options["ptx_version"] = PTX_VERSION
        where = GPUTarget("cuda", target, 32)
    else:
        where = GPUTarget("hip", target, 64 if target.startswith("gfx9") else 32)
    return triton.compile(source, target=where, options=options)


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """A constant array among a primitive's parameters, where it is no operand that partitioning would have to place; itself alone is equal to it."""

    values: np.ndarray


def triton_call(
    launch: Launch,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, jax.ShapeDtypeStruct],
    aliases: Mapping[str, str] | None = None,
) -> list[jax.Array]:
    """Calls a Triton kernel on JAX arrays.

    Args:
      launch: the kernel and how it is launched.
      inputs: arrays by the names of the kernel's parameters, in the order of its parameters; NumPy's become constants of the program.
      outputs: shapes and dtypes of the results, in the order of the kernel's parameters, all of them after the inputs.
      aliases: input whose memory an output takes over, by the output's name: how an output starts from values (zeros to add to).

    Returns:
      the results in order. The primitive has no gradient and no batching rule: an `Op` brings both.
    """
    tables = tuple((name, Table(x)) for name, x in inputs.items() if isinstance(x, np.ndarray))
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
    *operands: Any, launch: Launch, tables: Any, inputs: Sequence[str], outputs: Sequence[str], avals: Any, aliases: Any
) -> Any:
    constants, given = dict(tables), iter(operands)
    operands = tuple(jnp.asarray(constants[name].values) if name in constants else next(given) for name in inputs)
    types = tuple(
        (name, POINTERS[array.dtype.name]) for name, array in zip((*inputs, *outputs), (*operands, *avals), strict=True)
    )
    kernel = compiled(launch.kernel, types, dataclasses.replace(launch, grid=()), architecture())
    order = [name for name in launch.kernel.load().arg_names if name in dict(types)]
    assert order == [name for name, _ in types], (
        f"{launch.kernel.name}: buffers are passed as {types}, but declared as {order}"
    )
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    # Triton appends two pointers of its own: global scratch (tensor descriptors made on the device live there) and the profiler's.
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
