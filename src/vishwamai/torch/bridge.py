"""Runs an `Op` on torch tensors: on a GPU its Triton kernels, on the CPU what serves JAX there (the native kernels), on
the same memory by DLPack.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from vishwamai.core import ffi, gpu, hardware, observe, tuning
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.op import CallPlan, Choice, Op
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.torch.launch import amd_architecture, launch, torch_dtype
from vishwamai.torch.replay import repeatable

_INTERPRETED = Target("cuda", None, "torch", local=True)


@functools.cache
def _on_gpu(device: int) -> Target:
    architecture = amd_architecture(device) or "sm_{}{}".format(*torch.cuda.get_device_capability(device))
    return Target("cuda", hardware.gpu_for(torch.cuda.get_device_name(device), architecture), "torch", local=True)


@functools.cache
def cpu_target() -> Target:
    return Target("cpu", ffi.chip(), "torch", local=True)


def target_of(tensor: Tensor) -> Target:
    """Where a tensor is: platform "cuda" on a GPU (AMD's too), "cpu" on the CPU; the kernels for GPUs serve the CPU
    where another launcher is registered in the place of Triton's (the tests' interpreter).

    Raises:
      DeviceError: the tensor is somewhere else.
    """
    if tensor.is_cuda:
        return _on_gpu(tensor.device.index or 0)
    if tensor.device.type == "cpu":
        return cpu_target() if gpu.launcher("torch") is launch else _INTERPRETED
    raise DeviceError(f"a tensor is on {tensor.device}; move it to a GPU or to the CPU, for instance `x.cpu()`.")


def platform_of(tensor: Tensor) -> str:
    """ "cuda" or "cpu", see `target_of`."""
    return target_of(tensor).platform


@functools.lru_cache(maxsize=4096)
def _choose(
    op: Op, spec: object, target: Target, config: object, implementation: str | None, ambient: Any, generation: int
) -> CallPlan:
    del ambient, generation  # only parts of the key: the config in force, and what the tables hold
    return CallPlan(op, spec, (op.choose(spec, target, config=config, implementation=implementation),))


def choose(
    op: Op, spec: object, tensor: Tensor, *, config: object = None, implementation: str | None = None
) -> CallPlan:
    """The plan of a call on tensors on the device of `tensor`; it has one choice.

    Raises:
      UnsupportedError: nothing serves the spec there; or a kernel for the device declines in strict mode.
    """
    target = target_of(tensor)
    plan = _choose(op, spec, target, config, implementation, current_config(), tuning.generation())
    op.report_fallback(plan.choices[0])
    observe.report(plan)
    return plan


def cast_for_matmul(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands of a matrix product as `use_bfloat16`, `use_fp16` and `use_fp8` want them: float32 ones rounded, all
    others as they are; as `core.config.cast_for_matmul` does.

    The setting is not read while `torch.compile` traces.
    """
    if torch.compiler.is_compiling():
        return tensors
    config = current_config()
    if not (config.use_bfloat16 or config.use_fp16 or config.use_fp8):
        return tensors
    dtype = torch.float16 if config.use_fp16 else torch.bfloat16
    if config.use_fp8:
        return tuple(_with_values_of_fp8(x, dtype) for x in tensors)
    return tuple(x.to(dtype) if x.dtype == torch.float32 else x for x in tensors)


def _with_values_of_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As `core.config` has it for JAX."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return x
    wide, limit = x.float(), torch.finfo(torch.float8_e4m3fn).max
    with torch.no_grad():
        largest = wide.abs().max() if wide.numel() else wide.new_zeros(())
        _, exponent = torch.frexp(largest / limit)
        scale = torch.where((largest > 0) & largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), 1.0)
        change = (wide / scale).clamp(-limit, limit).to(torch.float8_e4m3fn).float() * scale - wide
    return (wide + change).to(dtype if x.dtype == torch.float32 else x.dtype)


def products(precision: str | None) -> str:
    """The precision of float32 products as an operator takes it: the caller's, or the ambient one, which is not read
    while `torch.compile` traces.
    """
    return precision or ("default" if torch.compiler.is_compiling() else current_config().precision.products)


def constant(number: Any) -> Any:
    """A number that the compiler may hold for a symbol, as itself: to hash it, the compiler has to know it."""
    return list({number})[0] if torch.compiler.is_compiling() else number


def seeds(function: str, name: str, tensor: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 seeds of dropout of that shape: the caller's, of which 32 bits count, or new ones of torch's generator."""
    if tensor is None:
        bits = torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device)
    elif tensor.shape != shape or tensor.is_floating_point() or tensor.is_complex():
        raise ShapeError(
            f"{function}: `{name}` has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; pass integers of shape "
            f"{tuple(shape)}, or None."
        )
    else:
        bits = (tensor.to(device, torch.int64) + 2**31) % 2**32 - 2**31
    return bits.to(torch.int32)


def with_the_calls_config(
    gradient: Callable[..., Any], setup_context: Callable[..., None]
) -> tuple[Callable[..., Any], Callable[..., None]]:
    """The two with a backward pass that has the configuration and the observers in force at the call: autograd runs it
    later, and in threads of its own.
    """

    def setup(ctx: Any, inputs: tuple[AnyArray, ...], output: PyTree) -> None:
        ctx.kernel_config, ctx.observers = current_config(), observe.tokens()
        setup_context(ctx, inputs, output)

    def backward(ctx: Any, *cotangents: AnyArray) -> PyTree:
        with kernel_config(ctx.kernel_config), observe.resumed(ctx.observers):
            return gradient(ctx, *cotangents)

    return backward, setup


def forward(plan: CallPlan, operands: Any, residuals: bool = False, *how: Any) -> tuple[PyTree, PyTree]:
    """(outputs, residuals or None) of contiguous tensors in the op's own layout; `how`: more arguments of a kernel for
    GPUs, to which other tensors may be legal.
    """
    (choice,) = plan.choices
    if choice.platform == "cuda":
        function = functools.partial(choice.implementation.forward, plan.spec, choice.config)
        of = plan.op.name, choice.implementation.name, "forward", plan.spec, choice.config
        run = functools.partial(repeatable, of, function, operands, residuals, *how)
    else:
        run = functools.partial(on_cpu, _cpu_forward(choice, plan.spec, residuals), operands)
    return _pass(plan, "forward_with_residuals" if residuals else "forward", run, (operands,))


def backward(
    plan: CallPlan,
    operands: object,
    outputs: object,
    residuals: AnyArray,
    cotangents: object,
    unwanted: Iterable[str] = (),
    *how: Any,
) -> Any:
    """Gradients of the operands, None for those that have none, and on the CPU for the `unwanted` ones, which may then
    cost nothing.
    """
    (choice,) = plan.choices
    arguments = (operands, outputs, residuals, cotangents)
    if choice.platform == "cuda":
        function = functools.partial(choice.implementation.backward, plan.spec, choice.config)
        of = plan.op.name, choice.implementation.name, "backward", plan.spec, choice.config
        run = functools.partial(repeatable, of, function, *arguments, *how)
    else:
        run = functools.partial(on_cpu, _cpu_backward(choice, plan.spec, frozenset(unwanted)), *arguments)
    return _pass(plan, "backward", run, arguments)


def _pass(plan: CallPlan, direction: str, run: Callable[[], object], arguments: tuple[PyTree, ...]) -> PyTree:
    """The results of a pass, which an observer may run in our place, several times to measure it."""
    observer = observe.interceptor()
    if observer is None:
        return run()

    def finished() -> Any:
        results = run()
        if arguments[0][0].is_cuda:
            torch.cuda.synchronize(arguments[0][0].device)
        return results

    return observer.run_eager(plan, direction, finished, arguments)


@functools.lru_cache(maxsize=1024)
def _cpu_forward(choice: Choice, spec: object, residuals: bool) -> Callable[..., Any]:
    return jax.jit(lambda operands: choice.implementation.forward(spec, choice.config, operands, residuals))


@functools.lru_cache(maxsize=1024)
def _cpu_backward(choice: Choice, spec: object, unwanted: frozenset[str]) -> Callable[..., Any]:
    def run(*arguments: PyTree) -> Any:
        gradients = choice.implementation.backward(spec, choice.config, *arguments)
        return gradients._replace(**dict.fromkeys(unwanted)) if unwanted else gradients

    return jax.jit(run)


def on_cpu(function: Callable[..., object], *arguments: object) -> PyTree:
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
