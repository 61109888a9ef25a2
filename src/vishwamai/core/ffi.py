"""The compiled CPU kernels: loading them, registering them with XLA, and saying how to get them where they are missing.

The extension module `vishwamai.core._cpu` is built by `pip install` when a C++ compiler is there. It is loaded at the
first question about it, never at import; `VISHWAMAI_CPU_MODULE` names another build of it, such as the one with
sanitizers. `VISHWAMAI_CPU_THREADS`, else `OMP_NUM_THREADS`, bounds the threads of the kernels. An operand or a result
that is absent travels as an array with no elements, since an FFI call has a fixed number of both.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import callers, sharding
from vishwamai.core.errors import ConfigError, DeviceError
from vishwamai.core.hardware import CPUS, CpuChip
from vishwamai.core.hardware.nodes import memory_nodes, usable_processors
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree

if TYPE_CHECKING:
    from jax.typing import DTypeLike


BUILD_HINT = (
    "install a C++20 compiler (`apt-get install g++`); then run `make native` in a checkout of the source, or "
    "install that source again with `pip install --force-reinstall --no-deps` and its path or URL"
)


ISAS = tuple(CPUS)
"""The instruction sets that the kernels are compiled for, as core/cpp/isa.h numbers them."""


PLACEMENT = jax.make_user_context(default_value=None)
"""(threads, node) of the calls that are traced in it, as `KernelConfig` has them; None for as many as there are."""
UNPLACED = -2
"""The node that stands for none: threads work where the system puts them. -1 spreads them over all nodes."""


def _module() -> ModuleType:
    path = os.environ.get("VISHWAMAI_CPU_MODULE")
    if path is None:
        return importlib.import_module("vishwamai.core._cpu")
    spec = importlib.util.spec_from_file_location("vishwamai.core._cpu", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"VISHWAMAI_CPU_MODULE={path} is not an extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check_threads() -> None:
    """Raises if `VISHWAMAI_CPU_THREADS`, which the module reads, is not a number of threads."""
    text = os.environ.get("VISHWAMAI_CPU_THREADS", "")
    if text and not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 20):
        raise ConfigError(
            f"VISHWAMAI_CPU_THREADS is {text!r}; set it to the number of threads that the CPU kernels may use (1, 2, "
            "...), or unset it for all."
        )


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """(module, None), or (None, why it cannot be loaded)."""
    _check_threads()
    try:
        module = _module()
    except ImportError as error:
        if getattr(error, "name", None) == "vishwamai.core._cpu" and isinstance(error, ModuleNotFoundError):
            return None, f"the native CPU kernels are not built: {BUILD_HINT}."
        return None, f"the native CPU kernels cannot be loaded ({error}): {BUILD_HINT}."
    for name, handler in _handlers(module).items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    if hasattr(module, "set_nodes"):
        module.set_nodes(usable_processors(memory_nodes()))
    complaint = module.isa_complaint()
    if complaint is not None:
        callers.warn(f"{complaint}; using {module.isa()}.")
    return module, None


@functools.cache
def _handlers(module: ModuleType) -> dict[str, Any]:
    """The module's handlers by name."""
    return dict(module.registrations())


def why_not(target: Target | None = None, handler: str | None = None) -> str | None:
    """None where the native CPU kernels can run, or need not since the program is not made on this machine; else the
    reason and how to fix it.

    Args:
      target: device of the program; None for this machine.
      handler: the one that is needed, which a module built before it was written lacks.
    """
    if target is not None and not target.local:
        return None
    module, reason = _load()
    if module is not None and handler is not None and handler not in _handlers(module):
        return f"the native CPU kernels were built before {handler!r} was added: {BUILD_HINT}."
    return reason


def native() -> ModuleType:
    """The extension module.

    Raises:
      DeviceError: it is not built or cannot be loaded; the text says how to fix that.
    """
    module, reason = _load()
    if module is None:
        raise DeviceError(reason)
    return module


def isa() -> str:
    """The instruction set that the kernels use here: one of `ISAS`; `VISHWAMAI_CPU_ISA` forces a lesser one."""
    return native().isa()


def isas() -> tuple[str, ...]:
    """The instruction sets that this machine and build both have: those that `VISHWAMAI_CPU_ISA` may name here."""
    best = CPUS[native().best_isa()]
    names = [name for name, cpu in CPUS.items() if cpu.architecture in (None, best.architecture)]
    return tuple(names[: names.index(best.name) + 1])


def chip() -> CpuChip | None:
    """The instruction set that the kernels use here; None where they are not built."""
    return None if _load()[0] is None else CPUS[isa()]


def absent(dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The array that stands for an operand that is not there."""
    return jnp.zeros((0,), dtype)


def result(shape: Sequence[int] | None, dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """A result of the call; `shape` None stands for one that is not wanted."""
    return jax.ShapeDtypeStruct((0,) if shape is None else tuple(shape), jnp.dtype(dtype))


def call(
    name: str,
    results: Sequence[jax.ShapeDtypeStruct],
    *operands: AnyArray,
    aliases: dict[int, int] | None = None,
    vmap_method: str | None = None,
    **attributes: PyTree,
) -> list[AnyArray]:
    """Calls a native kernel inside a JAX program.

    Args:
      name: the handler, such as "vishwamai_norm_forward".
      results: shapes and dtypes, see `result`.
      *operands: arrays; None stands for an absent one.
      aliases: which operand is changed in place and becomes which result, by index; XLA copies the operand where it is
        needed afterwards.
      vmap_method: rule of `jax.vmap` for the call, see `jax.ffi.ffi_call`; None where it is folded before.
      **attributes: NumPy scalars or bools, of the exact types that the handler declares.

    Returns:
      the results in order, None for each that was not wanted.
    """
    module = native()
    if PLACEMENT.value is not None:
        if not hasattr(module, "set_nodes"):
            raise DeviceError(f"the native CPU kernels were built before they took `threads` and `numa`: {BUILD_HINT}.")
        threads, node = PLACEMENT.value
        attributes |= {"vishwamai_threads": np.int64(threads), "vishwamai_node": np.int64(node)}
    present = [absent() if operand is None else operand for operand in operands]
    structs = tuple(sharding.out_struct(r.shape, r.dtype, present) for r in results)
    kernel = jax.ffi.ffi_call(name, structs, input_output_aliases=aliases, vmap_method=vmap_method)
    values = kernel(*present, **attributes)
    return [None if r.shape == (0,) else value for r, value in zip(results, values, strict=True)]
