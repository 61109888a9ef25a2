"""How a Triton kernel is launched, in words that import no triton: the kernel by its name, its constants, its named
tuples; and its compilation for any GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

from vishwamai.core import triton_private
from vishwamai.core.config import cuda_architecture
from vishwamai.core.errors import DeviceError
from vishwamai.core.installing import install_line

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
    "int4": "*i8",
    "uint8": "*u8",
    "bool": "*i1",
}
"""Triton's name of a pointer to each dtype; of int4 to bytes, in which XLA keeps two numbers, the first in the lower
bits.
"""


@dataclasses.dataclass(frozen=True)
class TritonKernel:
    """A `@triton.jit` function by its name, so that naming it imports neither its module nor triton.

    >>> TritonKernel("vishwamai.ops.norm.gpu_kernels", "forward")
    TritonKernel(module='vishwamai.ops.norm.gpu_kernels', name='forward')
    """

    module: str
    name: str

    def load(self) -> Any:
        """The function itself."""
        return getattr(importlib.import_module(self.module), self.name)


@dataclasses.dataclass(frozen=True)
class TritonDtype:
    """A dtype among a kernel's constants, by Triton's short name ("bf16", "fp32", "int8"): naming it does not import
    triton.
    """

    name: str

    def load(self) -> Any:
        """Triton's own object."""
        return importlib.import_module("triton.language").dtype(self.name)


def constants_of(launch: Launch, amd: str | None = None) -> dict[str, Any]:
    """The values of a launch's constants as Triton takes them; on AMD's architecture `amd` ("gfx942"), in the forms
    that it has for products of float32.
    """
    values = {name: value.load() if isinstance(value, TritonDtype) else value for name, value in launch.constants}
    return values if amd is None else {name: _on_amd(value, amd) for name, value in values.items()}


def _on_amd(value: Any, architecture: str) -> Any:
    if hasattr(value, "_fields"):
        return type(value)(*(_on_amd(field, architecture) for field in value))
    if not isinstance(value, str) or (value == "tf32" and architecture in _WITH_TF32):
        return value
    return _AMD_PRECISION.get(value, value)


_AMD_PRECISION = {"tf32x3": "bf16x6", "tf32": "bf16x3"}
"""`input_precision` of NVIDIA's matrix units, and what comes next above it on AMD's: numbers cut into three parts of
bfloat16, or into two, for AMD's have no TF32.
"""
_WITH_TF32 = ("gfx942",)
"""AMD's architectures whose matrix units have TF32, by the backend of Triton 3.6."""


Bundle = tuple[str, type]
"""A parameter that is a named tuple, and its type. Its fields are buffers and numbers, named `parameter.field`."""


@dataclasses.dataclass(frozen=True)
class KernelParameters:
    """The parameters of a kernel.

    Attributes:
      entries: name of every parameter, the type of its named tuple or None, and the names of its fields (itself
        where it is not a tuple).
      names: all those names of fields.
    """

    kernel: TritonKernel
    entries: tuple[tuple[str, Any, tuple[str, ...]], ...]
    names: frozenset[str]

    @staticmethod
    @functools.lru_cache(maxsize=4096)
    def of(kernel: TritonKernel, bundles: tuple[Bundle, ...]) -> KernelParameters:
        types: dict[str, object] = dict(bundles)
        entries = []
        for name in kernel.load().arg_names:
            bundle = types.get(name)
            entries.append((name, bundle, (name,) if bundle is None else fields_of(name, bundle)))
        return KernelParameters(kernel, tuple(entries), frozenset(leaf for _, _, leaves in entries for leaf in leaves))

    def check(self, values: Mapping[str, object]) -> None:
        """Every value has its parameter."""
        assert values.keys() <= self.names, f"{self.kernel.name} has no parameters {sorted(values.keys() - self.names)}"

    def bind(self, values: Mapping[str, object]) -> dict[str, Any]:
        """The argument of every parameter, named tuples put together; an absent one is None."""
        self.check(values)
        return {
            name: values.get(name) if bundle is None else bundle(*map(values.get, leaves))
            for name, bundle, leaves in self.entries
        }


@functools.lru_cache(maxsize=4096)
def fields_of(name: str, bundle: Any) -> tuple[str, ...]:
    """Names of the fields of a parameter that is a named tuple."""
    return tuple(f"{name}.{field}" for field in bundle._fields)


@dataclasses.dataclass(frozen=True)
class Launch:
    """How a kernel is launched: everything but its buffers.

    Attributes:
      kernel: which.
      grid: programs along each axis, three at most.
      constants: values of the kernel's other parameters, by name, in any order.
      warps: warps of a program.
      stages: buffers that the compiler's software pipeline uses.
      bundles: parameters that are named tuples with buffers among their fields.
    """

    kernel: TritonKernel
    grid: tuple[int, ...]
    constants: tuple[tuple[str, Any], ...]
    warps: int = 4
    stages: int = 3
    bundles: tuple[Bundle, ...] = ()

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.kernel, self.grid, self.constants, self.warps, self.stages, self.bundles))

    def __hash__(self) -> int:
        return self._hash  # it is long, and asked for at every launch


def compiler_options(launch: Launch) -> dict[str, object]:
    """What Triton's compiler is told besides the arguments: a*b + c in one instruction, which is Triton's default to
    3.9 and no longer after.
    """
    return {"num_warps": launch.warps, "num_stages": launch.stages, "enable_fp_fusion": True}


@functools.cache
def why_not() -> str | None:
    """None where triton is installed, else the reason and its fix."""
    if importlib.util.find_spec("triton") is None:
        return f"triton is not installed: {install_line('gpu')}."
    return None


def architecture() -> int:
    """Compute capability that kernels are compiled for, 90 for 9.0 (sm_90a, Hopper), see
    `core.config.cuda_architecture`.
    """
    return int(cuda_architecture().removeprefix("sm_"))


@functools.lru_cache(maxsize=4096)
def compiled(kernel: TritonKernel, types: tuple[tuple[str, str], ...], launch: Launch, target: int | str = 90) -> Any:
    """Triton's compiled kernel, for a GPU that need not be here.

    Args:
      types: (parameter, Triton's type of it) for every pointer, all of them divisible by 16 bytes as XLA's and torch's
        buffers are.
      launch: constants, warps and stages; its grid does not matter.
      target: compute capability (90), or AMD's name of an architecture ("gfx942").

    Raises:
      DeviceError: triton is not installed.
    """
    reason = why_not()
    if reason is not None:
        raise DeviceError(reason)
    function = kernel.load()
    if triton_private.is_interpreted(function):
        raise DeviceError(f"{kernel}: it was loaded under TRITON_INTERPRET=1 and cannot be compiled; start without it.")
    pointers, constants = dict(types), constants_of(launch, target if isinstance(target, str) else None)
    parameters = KernelParameters.of(kernel, launch.bundles)
    parameters.check({**pointers, **constants})
    constexprs = triton_private.constexpr_parameters(function)
    signature, values, aligned = {}, {}, []

    def place(path: triton_private.Path, name: str, value: Any) -> Any:
        """The type of one argument; what is not a pointer is a constant, and an absent buffer is None."""
        if name in pointers:
            aligned.append(path)
            return pointers[name]
        if hasattr(value, "_fields") and name not in constexprs:
            return type(value)(*(place((*path, i), f"{name}.", x) for i, x in enumerate(value)))
        values[path] = value
        return "constexpr"

    for i, (name, bundle, leaves) in enumerate(parameters.entries):
        if bundle is None:
            signature[name] = place((i,), name, constants.get(name))
        else:
            signature[name] = bundle(*(place((i, j), leaf, constants.get(leaf)) for j, leaf in enumerate(leaves)))
    options = compiler_options(launch)
    if isinstance(target, int):
        options["ptx_version"] = PTX_VERSION
    return triton_private.compile_kernel(function, signature, values, aligned, target, options)
