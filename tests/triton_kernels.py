"""Runs Triton kernels on arrays of the CPU: in Triton's interpreter on a machine without a GPU, thousands of times
slower than one; or compiled, on a GPU, to which the operands go and from which the results come back.

The interpreter is chosen when a kernel is decorated, so `TRITON_INTERPRET=1` must be in the environment before a
kernel's module is loaded; a process that was started with it cannot compile kernels. `triton_inside.py` corrects what
the interpreter does otherwise than a GPU. `TRITON_ON_GPU=1` chooses the GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor

import contract
from vishwamai.core import gpu, sharding, triton_private
from vishwamai.core.errors import DeviceError
from vishwamai.core.qtensor import INT4
from vishwamai.torch.launch import allocate, arguments, placed, run, torch_dtype

_ONE_AT_A_TIME = threading.Lock()
"""The interpreter keeps the program's place in the grid in global state."""


def _poison(results: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> None:
    """Fills fresh memory with NaN (integers: the largest), so that what a kernel leaves unwritten shows."""
    for name, out in outputs.items():
        if not out.initialized:
            results[name].fill_(
                float("nan") if results[name].is_floating_point() else torch.iinfo(results[name].dtype).max
            )


def _interpret(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> list[Tensor]:
    """Interprets a kernel on torch tensors on the CPU."""
    function = how.kernel.load()
    if not triton_private.is_interpreted(function):
        raise DeviceError(f"{how.kernel.name} was loaded to be compiled; set TRITON_INTERPRET=1 before Python starts.")
    import triton_inside  # here, since triton is optional: a test that interprets nothing imports this file, too

    triton_inside.correct()
    first = next(iter(inputs.values()))
    inputs = placed(inputs, first.device)
    results = allocate(outputs, first.device)
    _poison(results, outputs)
    with _ONE_AT_A_TIME:
        triton_inside.new_launch()
        function[how.grid](**arguments(how, inputs, outputs, results), num_warps=how.warps, num_stages=how.stages)
    return list(results.values())


_FENCE = 4096
"""Bytes before and behind a buffer on the GPU that no kernel may use: they are NaN in every floating dtype."""


class _OnGpu:
    """The buffers of one launch on the GPU; tensors that share memory share it there, too."""

    def __init__(self) -> None:
        self.memory: dict[int, Tensor] = {}

    def fenced(self, nbytes: int) -> Tensor:
        return torch.full((nbytes + 2 * _FENCE,), 0xFF, dtype=torch.uint8, device="cuda")

    def of(self, x: Tensor) -> Tensor:
        """The tensor on the GPU, with the strides and the neighbours that it has on the CPU."""
        store = x.untyped_storage()
        if (key := store.data_ptr()) not in self.memory:
            self.memory[key] = self.fenced(store.nbytes())
            bits = torch.empty(0, dtype=torch.uint8).set_(store)  # pyright: ignore[reportArgumentType, reportCallIssue]
            self.memory[key][_FENCE : _FENCE + len(bits)] = bits.cuda()
        body = self.memory[key][_FENCE : _FENCE + store.nbytes()].view(x.dtype)
        return body.as_strided(x.shape, x.stride(), body.storage_offset() + x.storage_offset())

    def fresh(self, name: str, out: gpu.Result) -> Tensor:
        """New memory for an output."""
        made = torch.empty(out.shape, dtype=torch_dtype(out.dtype))
        memory = self.memory[-1 - len(self.memory)] = self.fenced(made.nbytes)
        y = memory[_FENCE : _FENCE + made.nbytes].view(made.dtype).view(made.shape)
        if out.zeroed:
            y.zero_()
        return y

    def check(self, how: gpu.Launch) -> None:
        """No kernel wrote beside its buffers."""
        for memory in self.memory.values():
            fences = torch.cat([memory[:_FENCE], memory[-_FENCE:]])
            assert bool((fences == 0xFF).all()), f"{how.kernel.name} writes outside its buffers"


def _on_gpu(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> list[Tensor]:
    """Runs a kernel on the GPU, on copies of tensors on the CPU."""
    buffers = _OnGpu()
    given = {name: buffers.of(x) for name, x in placed(inputs, torch.device("cpu")).items()}
    results = {
        name: buffers.fresh(name, out) if out.start is None else buffers.of(out.start) for name, out in outputs.items()
    }
    _poison(results, outputs)
    run(how, given, outputs, results)
    buffers.check(how)
    if not outputs:  # it writes into its operands
        for name, x in inputs.items():
            x.copy_(given[name])
    back = {name: y.cpu() for name, y in results.items()}
    return [
        y if out.start is None else out.start.copy_(y) for y, out in zip(back.values(), outputs.values(), strict=True)
    ]


def launch_torch(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> list[Tensor]:
    """Runs a kernel on torch tensors on the CPU, as this process does it."""
    return (_interpret if contract.INTERPRETED else _on_gpu)(how, inputs, outputs)


def from_numpy(x: np.ndarray) -> Tensor:
    """A tensor with a copy of the array's values, of any dtype that JAX has; of int4 the bytes that XLA has on a GPU:
    two numbers in each, the first in the lower bits.
    """
    if x.dtype == INT4:
        nibbles = (x.astype(np.int8) & 15).reshape(*x.shape[:-1], -1, 2)
        x = nibbles[..., 0] | nibbles[..., 1] << 4
    bits = np.array(x, copy=True, order="C").view(f"u{x.dtype.itemsize}")
    return torch.from_numpy(bits).view(torch_dtype(x.dtype)).reshape(x.shape)


def to_numpy(x: Tensor, dtype: Any) -> np.ndarray:
    """The tensor's values as a NumPy array of the same dtype, from which `from_numpy` may have made it."""
    if dtype == INT4:
        byte = x.numpy()
        return np.stack((byte << 4 >> 4, byte >> 4), axis=-1).reshape(*byte.shape[:-1], -1).astype(dtype)
    unsigned = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[x.element_size()]
    return x.contiguous().view(unsigned).numpy().view(dtype)


def launch_jax(how: gpu.Launch, inputs: dict[str, Any], outputs: dict[str, gpu.Result]) -> list[Any]:
    """Runs a kernel on JAX arrays, inside any JAX program for the CPU."""

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
def triton_serves() -> Iterator[None]:
    """Within the block, Triton kernels serve torch tensors on the CPU and JAX programs: where JAX's default device is a
    GPU, by the library's own calls of them.

    Raises:
      DeviceError: neither `TRITON_INTERPRET=1` nor `TRITON_ON_GPU=1` is set.
    """
    if not contract.TRITON:
        raise DeviceError("set TRITON_INTERPRET=1, or TRITON_ON_GPU=1 on a machine with one, before Python starts.")
    launchers: dict[str, Any] = {"torch": launch_torch}
    if jax.default_backend() == "cpu":
        launchers["jax"] = launch_jax
    before = {name: gpu.register_launcher(name, f) for name, f in launchers.items()}
    try:
        yield
    finally:
        for name, launcher in before.items():
            assert launcher is not None
            gpu.register_launcher(name, launcher)
