"""Runs an `Op` on torch tensors: on a GPU its Triton kernels, on the CPU what serves JAX there (the native kernels), on the same memory by DLPack."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from vishwamai.core import gpu, tuning
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.errors import DeviceError, FallbackWarning, UnsupportedError
from vishwamai.core.op import Choice, Op
from vishwamai.torch.launch import launch, torch_dtype


def platform_of(tensor: Tensor) -> str:
    """ "cuda" for a tensor on a GPU (AMD's too), "cpu" for one on the CPU; within `interpret.interpreted()` the kernels for GPUs serve the CPU.

    Raises:
      DeviceError: the tensor is somewhere else.
    """
    if tensor.is_cuda or (tensor.device.type == "cpu" and gpu.launcher("torch") is not launch):
        return "cuda"
    if tensor.device.type == "cpu":
        return "cpu"
    raise DeviceError(f"a tensor is on {tensor.device}; move it to a GPU or to the CPU, for instance `x.cpu()`.")


def architecture_of(tensor: Tensor) -> str | None:
    """ "sm_90" for a tensor on an H100, "gfx942" on an MI300; None on the CPU. Tuned tiles are looked up by it."""
    return _architecture(tensor.device.index or 0) if tensor.is_cuda else None


@functools.cache
def _architecture(device: int) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.lru_cache(maxsize=4096)
def _choose(
    op: Op,
    spec: Any,
    platform: str,
    config: Any,
    implementation: str | None,
    ambient: Any,
    architecture: str | None,
    generation: int,
) -> Choice:
    del generation  # only part of the key: what the tables hold may have changed
    choice = op.choose(spec, platform, config=config, implementation=implementation, architecture=architecture)
    if platform == "cuda" and choice.implementation.platform is None:
        reasons = "; ".join(f"{name!r} declines: {reason}" for name, reason in choice.refused)
        raise UnsupportedError(f"{op.name}: no kernel serves torch tensors on a GPU here: {reasons or 'there is none'}")
    for impl in op.implementations:
        reason = dict(choice.refused).get(impl.name)
        if impl.platform == platform and reason is not None:
            text = f"{op.name}: {impl.name!r} declined, so {choice.implementation.name!r} runs on {platform}: {reason}"
            if ambient.strict:
                raise UnsupportedError(f"{text} (strict mode: `KernelConfig(strict=True)` forbids the fallback)")
            _warn_once(text)
    return choice


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=6)


_RECORDS: list[list[tuple[Op, Any, Choice]]] = []


@contextlib.contextmanager
def recording() -> Iterator[list[tuple[Op, Any, Choice]]]:
    """Within the block, what every operation on torch tensors chooses is noted down, in order: (op, spec, choice)."""
    found: list[tuple[Op, Any, Choice]] = []
    _RECORDS.append(found)
    try:
        yield found
    finally:
        _RECORDS.remove(found)


def choose(op: Op, spec: Any, tensor: Tensor, *, config: Any = None, implementation: str | None = None) -> Choice:
    """What runs for tensors on the device of `tensor`.

    Raises:
      UnsupportedError: nothing serves the spec there.
    """
    choice = _choose(
        op,
        spec,
        platform_of(tensor),
        config,
        implementation,
        current_config(),
        architecture_of(tensor),
        tuning.generation(),
    )
    for found in _RECORDS:
        found.append((op, spec, choice))
    return choice


def narrowed(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product as `use_bfloat16` or `use_fp16` want them: float32 ones rounded, all others as they are; as `core.config.narrowed` does.

    The wish is not read while `torch.compile` traces.
    """
    if torch.compiler.is_compiling():
        return tensors
    config = current_config()
    if not (config.use_bfloat16 or config.use_fp16):
        return tensors
    dtype = torch.bfloat16 if config.use_bfloat16 else torch.float16
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def register_autograd(op: Any, gradient: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """`op.register_autograd`, with a backward pass that reads the configuration in force at the call: autograd runs it later, and in threads of its own."""

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.kernel_config = current_config()
        setup_context(ctx, inputs, output)

    def backward(ctx: Any, *cotangents: Any) -> Any:
        with kernel_config(ctx.kernel_config):
            return gradient(ctx, *cotangents)

    op.register_autograd(backward, setup_context=setup)


def forward(choice: Choice, spec: Any, operands: Any, residuals: bool = False) -> tuple[Any, Any]:
    """(outputs, residuals or None) of contiguous tensors in the op's own layout."""
    if choice.platform == "cuda":
        return choice.implementation.forward(spec, choice.config, operands, residuals)
    return _on_cpu(_cpu_forward(choice, spec, residuals), operands)


def backward(
    choice: Choice,
    spec: Any,
    operands: Any,
    outputs: Any,
    residuals: Any,
    cotangents: Any,
    unwanted: tuple[str, ...] = (),
) -> Any:
    """Gradients of the operands, None for those that have none, and on the CPU for the `unwanted` ones, which may then cost nothing."""
    if choice.platform == "cuda":
        return choice.implementation.backward(spec, choice.config, operands, outputs, residuals, cotangents)
    return _on_cpu(_cpu_backward(choice, spec, unwanted), operands, outputs, residuals, cotangents)


@functools.lru_cache(maxsize=1024)
def _cpu_forward(choice: Choice, spec: Any, residuals: bool) -> Callable[..., Any]:
    return jax.jit(lambda operands: choice.implementation.forward(spec, choice.config, operands, residuals))


@functools.lru_cache(maxsize=1024)
def _cpu_backward(choice: Choice, spec: Any, unwanted: tuple[str, ...]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        gradients = choice.implementation.backward(spec, choice.config, *arguments)
        return gradients._replace(**dict.fromkeys(unwanted)) if unwanted else gradients

    return jax.jit(run)


def _on_cpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a JAX function on torch tensors on the CPU; nothing is copied, and it has finished when this returns."""
    tensors = [leaf for leaf in jax.tree.leaves(arguments) if isinstance(leaf, Tensor)]
    wide = any(t.dtype in (torch.float64, torch.int64) for t in tensors)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        results = function(*jax.tree.map(to_jax, arguments))
        # Before torch may write to the operands' memory, or read the results'.
        return jax.tree.map(to_torch, jax.block_until_ready(results))


_BITS = {torch.bool: torch.uint8, torch.float8_e4m3fn: torch.uint8, torch.float8_e5m2: torch.uint8}


def to_jax(tensor: Tensor) -> jax.Array:
    """A JAX array on the memory of a contiguous CPU tensor."""
    tensor = tensor.detach().contiguous()
    if tensor.numel() == 0:
        return jnp.zeros(tensor.shape, str(tensor.dtype).removeprefix("torch."))
    if tensor.dtype in _BITS:
        bits = jax.dlpack.from_dlpack(tensor.view(_BITS[tensor.dtype]))
        return bits.view(str(tensor.dtype).removeprefix("torch."))
    return jax.dlpack.from_dlpack(tensor)


def to_torch(array: jax.Array) -> Tensor:
    """A CPU tensor on the memory of a JAX array that nothing else holds."""
    dtype = torch_dtype(array.dtype)
    if array.size == 0:
        return torch.zeros(array.shape, dtype=dtype)
    if dtype in _BITS:
        return torch.from_dlpack(array.view(jnp.uint8)).view(dtype)
    return torch.from_dlpack(array)
