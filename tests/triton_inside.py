"""Triton's interpreter, corrected where it differs from a GPU; and the other private names of Triton that tests use.

What the interpreter of Triton 3.6 to 3.9 does otherwise than a GPU is corrected by `correct`: `tl.dot` of bfloat16
multiplies the bit patterns as integers, and that of float32 is exact whatever precision is requested; float32 to
bfloat16 truncates, and to an 8-bit float loses the carry into the exponent; an integer becomes bfloat16 by its bits; a
tensor descriptor has no atomic addition; and with NumPy 2.4 a loop bound that the kernel computed is an error.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import _allocation, interpreter
from triton.runtime.driver import driver

__all__ = ["IdleHopper", "allocator", "correct", "driver", "interpreter_builder", "new_launch"]

interpreter_builder = interpreter.InterpreterBuilder


class IdleHopper(DriverBase):
    """A Hopper on the CPU: kernels are compiled for it to the last step, and a launch does nothing."""

    class Utils:
        def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> Any:
            assert kernel[:4] == b"\x7fELF"
            return object(), name, 32, 0, 1024

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448}

    class Launcher:
        def __init__(self, source: Any, metadata: Any):
            pass

        def __call__(self, *arguments: Any) -> None:
            pass

    utils, launcher_cls = Utils(), Launcher
    is_active = classmethod(lambda cls: True)  # type: ignore[assignment]

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> Any:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def allocator() -> Any:
    """What allocates a kernel's scratch memory in this thread."""
    return _allocation._allocator.get()


_PARTS = {"TF32x3": (10, 2), "BF16x3": (7, 2), "BF16x6": (7, 3), "TF32": (10, 1)}
"""How the tensor cores take float32: bits of a part's fraction, and parts of a factor."""


def _split(x: np.ndarray, bits: int, count: int) -> list[np.ndarray]:
    """float32 as the sum of `count` parts with short fractions, the largest first."""
    parts, drop = [], 23 - bits
    for _ in range(count):
        whole = x.view(np.uint32)
        rounded = (whole + (1 << (drop - 1)) - 1 + ((whole >> drop) & 1)) >> drop << drop
        part = np.where(np.isfinite(x), rounded.astype(np.uint32).view(np.float32), x)
        parts.append(part)
        x = np.where(np.isfinite(x), x - part, np.float32(0))  # nothing is left of infinity
    return parts


_EIGHT_BITS = {"fp8e4nv": jnp.float8_e4m3fn, "fp8e5": jnp.float8_e5m2}
"""By Triton's names; a GPU rounds to the nearest and stays below infinity."""

_PATCHED: set[int] = set()
"""Namespaces whose `tl` a launch has replaced by the interpreter's; the interpreter itself does it again for every call
of a device function.
"""


def new_launch() -> None:
    """To be called before each launch."""
    _PATCHED.clear()


@functools.cache
def correct() -> None:
    """Corrects the interpreter, once."""
    builder: Any = interpreter.InterpreterBuilder
    handle = interpreter.TensorHandle
    dot, truncate = builder.create_dot, builder.create_fp_trunc

    def wide(h: Any) -> Any:
        if h.dtype.scalar != tl.bfloat16:
            return h
        return handle((h.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        parts = _PARTS.get(str(precision).rpartition(".")[2])
        if parts is None or a.dtype.scalar != tl.float32:
            return dot(self, wide(a), wide(b), d, precision, imprecise)
        (bits, count), total = parts, d.data
        split_a, split_b = _split(a.data, bits, count), _split(b.data, bits, count)
        pairs = [(i, j) for i in range(count) for j in range(count - i)]
        for i, j in sorted(pairs, key=sum, reverse=True):
            total = total + split_a[i] @ split_b[j]  # the smallest products first
        return handle(total, d.dtype.scalar)

    def create_fp_trunc(self: Any, source: Any, dst_type: Any) -> Any:
        if source.dtype.scalar != tl.float32 or dst_type.scalar != tl.bfloat16:
            return truncate(self, source, dst_type)
        bits = source.data.astype(np.float32).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        rounded = np.where(np.isnan(source.data), (bits >> 16) | 0x40, nearest).astype(np.uint16)
        return handle(rounded, tl.bfloat16)

    from_signed, from_unsigned = builder.create_si_to_fp, builder.create_ui_to_fp

    def from_integer(convert: Any) -> Any:
        def create(self: Any, source: Any, dst_type: Any) -> Any:
            if dst_type.scalar != tl.bfloat16:
                return convert(self, source, dst_type)
            return create_fp_trunc(self, handle(source.data.astype(np.float32), tl.float32), dst_type)

        return create

    convert = builder.create_fp_to_fp

    def create_fp_to_fp(self: Any, source: Any, dst_type: Any, rounding: Any) -> Any:
        narrow = _EIGHT_BITS.get(str(dst_type.scalar))
        if source.dtype.scalar != tl.float32 or narrow is None:
            return convert(self, source, dst_type, rounding)
        most = float(jnp.finfo(narrow).max)
        nearest = np.where(np.isnan(source.data), source.data, np.clip(source.data, -most, most)).astype(narrow)
        return handle(nearest.view(np.uint8), dst_type.scalar)

    def create_descriptor_reduce(self: Any, kind: Any, desc: Any, value: Any, indices: Any) -> Any:
        del kind  # addition is the only one that our kernels use

        def rest(method: Any, given: int) -> list[None]:
            return [None] * (len(inspect.signature(method).parameters) - given)

        old = self.create_descriptor_load(desc, indices, *rest(self.create_descriptor_load, 2))
        total = handle(old.data + value.data, value.dtype)
        return self.create_descriptor_store(desc, total, indices, *rest(self.create_descriptor_store, 3))

    patch_tensor = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self.fn.__globals__) not in _PATCHED:
            interpreter._patch_lang(self.fn)
            _PATCHED.add(id(self.fn.__globals__))
        return self.rewrite()(*args, **kwargs)

    interpreter._patch_lang_tensor = patch_lang_tensor
    interpreter.InterpretedFunction.__call__ = call
    allowed = (*(name.lower() for name in _PARTS), "ieee")
    object.__setattr__(interpreter.interpreter_builder.options, "allowed_dot_input_precisions", allowed)
    builder.create_dot, builder.create_fp_trunc = create_dot, create_fp_trunc
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_si_to_fp, builder.create_ui_to_fp = from_integer(from_signed), from_integer(from_unsigned)
    if not hasattr(builder, "create_descriptor_reduce"):
        builder.create_descriptor_reduce = create_descriptor_reduce
