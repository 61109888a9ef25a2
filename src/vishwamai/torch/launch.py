"""Launches Triton kernels on torch tensors: the launcher that `core.gpu.launch` uses for them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vishwamai.core import gpu, triton_private
from vishwamai.core.errors import DeviceError
from vishwamai.core.triton_launch import KernelParameters, compiler_options, constants_of

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@functools.cache
def torch_dtype(dtype: DTypeLike) -> torch.dtype:
    """torch's dtype of the same name as NumPy's or JAX's."""
    return getattr(torch, "bool" if str(dtype) == "bool" else str(dtype))


def allocate(outputs: dict[str, gpu.Result], device: torch.device) -> dict[str, Tensor]:
    """Memory for a kernel's outputs."""

    def memory(out: gpu.Result) -> Tensor:
        if out.start is not None:
            return out.start
        return (torch.zeros if out.zeroed else torch.empty)(out.shape, dtype=torch_dtype(out.dtype), device=device)

    return {name: memory(out) for name, out in outputs.items()}


_CONSTANTS: dict[tuple[int, torch.device], Tensor] = {}


def placed(inputs: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The inputs with constants (NumPy's arrays) on the tensors' device; they are copied there once, for as long as
    they live.
    """
    arguments = {}
    for name, x in inputs.items():
        if isinstance(x, np.ndarray):
            key = (id(x), device)
            if key not in _CONSTANTS:
                _CONSTANTS[key] = torch.tensor(x, device=device)
                weakref.finalize(x, _CONSTANTS.pop, key, None)
            x = _CONSTANTS[key]
        arguments[name] = x
    return arguments


def arguments(
    how: gpu.Launch,
    inputs: dict[str, Tensor],
    outputs: dict[str, gpu.Result],
    results: dict[str, Tensor],
) -> dict[str, Any]:
    """The argument of every parameter of the kernel; buffers that are absent are None."""
    starts = {f"{name}_init": results[name] for name, out in outputs.items() if out.initialized}
    buffers = {**inputs, **results, **starts}
    constants = constants_of(how, amd_architecture(next(iter(buffers.values())).device.index or 0))
    return KernelParameters.of(how.kernel, how.bundles).bind({**constants, **buffers})


@functools.cache
def amd_architecture(device: int) -> str | None:
    """AMD's name of a GPU's architecture ("gfx942"); None where torch is not built for AMD."""
    return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0] if torch.version.hip else None


def _aligned(x: Tensor) -> Tensor:
    if x.data_ptr() % 16 == 0:
        return x
    copy = x.clone()
    assert copy.stride() == x.stride()  # which the kernel may have been told
    return copy


def _same_device(how: gpu.Launch, inputs: dict[str, Tensor]) -> None:
    (first, x), *rest = inputs.items()
    for name, tensor in rest:
        if tensor.device != x.device:
            raise DeviceError(
                f"{how.kernel.name}: `{name}` is on {tensor.device}, but `{first}` is on {x.device}; move all tensors "
                "to one GPU."
            )


def launch(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result]) -> list[Tensor]:
    """Runs the kernel on the tensors' own device, on its current stream.

    Raises:
      DeviceError: triton is not installed, or the tensors are not all on one GPU.
    """
    reason = gpu.why_not()
    if reason is not None:
        raise DeviceError(reason)
    first = next(iter(inputs.values()))
    if not first.is_cuda:
        raise DeviceError(f"{how.kernel.name}: the tensors are on {first.device}; a Triton kernel needs a GPU.")
    current = torch.cuda.current_device() == first.device.index
    with contextlib.nullcontext() if current else torch.cuda.device(first.device):
        results = allocate(outputs, first.device)
        # Kernels count on buffers that are aligned to 16 bytes, which a view into a tensor need not be.
        inputs = {name: _aligned(x) for name, x in placed(inputs, first.device).items()}
        _same_device(how, inputs)
        run(how, inputs, outputs, results)
    return list(results.values())


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    del alignment, stream  # torch aligns to 512 bytes, and allocates for the current stream
    return torch.empty(size, dtype=torch.int8, device=torch.device("cuda", torch.cuda.current_device()))


class _Ready(NamedTuple):
    """A kernel that is compiled for launches of one kind.

    Attributes:
      start: launches it on torch's current GPU and stream.
      constants: their values, by name.
      entries: name of every parameter, the type of its named tuple or None, and the names of that one's fields.
    """

    start: Callable[..., Any]
    constants: dict[str, Any]
    entries: tuple[tuple[str, Any, tuple[str, ...]], ...]


MOST = 4096
"""Kinds of launches that are kept; when there are more, all are forgotten."""
_READY: dict[Any, _Ready] = {}
"""By launch, device, and the buffers' names, dtypes and alignment. Triton's own way from arguments to the compiled
kernel takes longer than many a kernel.
"""


def run(how: gpu.Launch, inputs: dict[str, Tensor], outputs: dict[str, gpu.Result], results: dict[str, Tensor]) -> None:
    """Runs the kernel on torch's current GPU, where all the tensors are."""
    import triton

    # At every launch: the allocator is kept in a context variable, and autograd's backward runs in threads of its own.
    triton.set_allocator(_scratch)
    kind = (
        how,
        torch.cuda.current_device(),
        tuple([(name, x.dtype) for name, x in inputs.items()]),
        tuple([(name, out, out.start is None or out.start.data_ptr() % 16 == 0) for name, out in outputs.items()]),
    )
    ready = _READY.get(kind)
    if ready is None:
        values = arguments(how, inputs, outputs, results)
        kernel = how.kernel.load()[how.grid](**values, **compiler_options(how))
        parameters = KernelParameters.of(how.kernel, how.bundles)
        constants = constants_of(how, amd_architecture(torch.cuda.current_device()))
        if len(_READY) >= MOST:
            _READY.clear()
        _READY[kind] = _Ready(triton_private.starter(kernel, how.grid), constants, parameters.entries)
        return
    get = {**ready.constants, **inputs, **results}
    for name, out in outputs.items():
        if out.initialized:
            get[f"{name}_init"] = results[name]
    find = get.get
    ready.start(
        *[find(name) if bundle is None else bundle(*map(find, leaves)) for name, bundle, leaves in ready.entries]
    )


gpu.register_launcher("torch", launch)
