"""Triton kernels on a machine without a GPU, by Triton's interpreter: for tests and for debugging, thousands of times slower than a GPU.

The interpreter is chosen when a kernel is decorated, so `TRITON_INTERPRET=1` must be in the environment before a kernel's module is loaded; a process
that was started with it cannot compile kernels. What the interpreter of Triton 3.6 to 3.9 does otherwise than a GPU is mended here: `tl.dot` of bfloat16
multiplies the bit patterns as integers and that of float32 is exact whatever precision it is to have, float32 to bfloat16
truncates, to an 8-bit float it loses the carry into the exponent, an integer becomes bfloat16 by its bits, a tensor descriptor has no atomic addition, and with NumPy 2.4 a loop bound that
the kernel computed is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from vishwamai.core import gpu, sharding
from vishwamai.core.errors import DeviceError
from vishwamai.torch.launch import allocate, arguments, placed, torch_dtype

_ONE_AT_A_TIME = threading.Lock()
"""The interpreter keeps the program's place in the grid in global state."""


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
"""Namespaces whose `tl` a launch has replaced by the interpreter's; the interpreter itself does it again for every call of a device function."""


@functools.cache
def _mend() -> None:
    """Mends the interpreter, once."""
    import triton.language as tl
    from triton.runtime import interpreter

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


def _poison(results: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> None:
    """Fills fresh memory with NaN (integers: the largest), so that what a kernel leaves unwritten shows."""
    for name, out in outputs.items():
        if not out.initialized:
            results[name].fill_(
                float("nan") if results[name].is_floating_point() else torch.iinfo(results[name].dtype).max
            )


def launch_torch(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> list[Tensor]:
    """Interprets a kernel on torch tensors on the CPU."""
    function = how.kernel.load()
    if hasattr(function, "cache_key"):
        raise DeviceError(f"{how.kernel.name} was loaded to be compiled; set TRITON_INTERPRET=1 before Python starts.")
    _mend()
    first = next(iter(inputs.values()))
    inputs = placed(inputs, first.device)
    results = allocate(outputs, first.device)
    _poison(results, outputs)
    with _ONE_AT_A_TIME:
        _PATCHED.clear()
        function[how.grid](
            **arguments(how, function, inputs, outputs, results), num_warps=how.warps, num_stages=how.stages
        )
    return list(results.values())


def from_numpy(x: np.ndarray) -> Tensor:
    """A tensor with a copy of the array's values, of any dtype that JAX has."""
    bits = np.array(x, copy=True, order="C").view(f"u{x.dtype.itemsize}")
    return torch.from_numpy(bits).view(torch_dtype(x.dtype)).reshape(x.shape)


def to_numpy(x: Tensor, dtype: Any) -> np.ndarray:
    """The tensor's values as a NumPy array of the same dtype."""
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[x.element_size()]
    return x.contiguous().view(unsigned).numpy().view(dtype)


def launch_jax(how: gpu.Launch, inputs: dict[str, Any], outputs: dict[str, gpu.Result]) -> list[Any]:
    """Interprets a kernel on JAX arrays, inside any JAX program for the CPU."""

    traced = {name: x for name, x in inputs.items() if not isinstance(x, np.ndarray)}
    starts = {name: out.start for name, out in outputs.items() if out.start is not None}

    def on_host(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        copies = [from_numpy(np.asarray(x)) for x in arrays]
        given = dict(zip(traced, copies[: len(traced)], strict=True))
        tensors: dict[str, Any] = {name: given.get(name, x) for name, x in inputs.items()}
        begun = dict(zip(starts, copies[len(traced) :], strict=True))
        started = {name: dataclasses.replace(out, start=begun.get(name)) for name, out in outputs.items()}
        results = launch_torch(how, tensors, started)
        return tuple(to_numpy(y, out.dtype) for y, out in zip(results, outputs.values(), strict=True))

    arrays = (*traced.values(), *starts.values())
    structs = tuple(sharding.out_struct(out.shape, out.dtype, arrays) for out in outputs.values())
    return list(jax.pure_callback(on_host, structs, *arrays))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Within the block, Triton kernels run in the interpreter, on the CPU, for torch tensors and in JAX programs alike.

    Raises:
      DeviceError: `TRITON_INTERPRET=1` is not set.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise DeviceError("Triton's interpreter must be chosen before Python starts: set TRITON_INTERPRET=1.")
    before = {name: gpu.register_launcher(name, f) for name, f in (("torch", launch_torch), ("jax", launch_jax))}
    try:
        yield
    finally:
        for name, launcher in before.items():
            assert launcher is not None
            gpu.register_launcher(name, launcher)
