"""What an error of JAX means. JAX raises plain `TypeError`, `ValueError` and `NotImplementedError`, so only the text
tells them apart.

Every text of JAX that the package depends on is here. `tests/core/test_jax_errors.py` provokes each error, and so fails
under a version of JAX that words it in another way. The texts of libtpu are in `vishwamai.aot`.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import NamedTuple

import jax

from vishwamai.core import errors
from vishwamai.core.errors import DeviceError, VishwamaiError


def lacks_forward_mode(error: Exception) -> bool:
    """Forward-mode differentiation of a `jax.custom_vjp`."""
    return isinstance(error, TypeError) and "forward-mode autodiff" in str(error)


def lacks_platform(error: Exception) -> bool:
    """A kernel or primitive in a program for a platform that it has no code for: a Pallas kernel on the CPU, a
    primitive without a lowering rule.
    """
    text = str(error)
    return isinstance(error, (ValueError, NotImplementedError)) and (
        "interpret mode" in text or "translation rule" in text
    )


def out_of_memory(error: Exception) -> bool:
    """The device's memory, or the host's, is exhausted."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def from_callback(error: Exception) -> VishwamaiError | None:
    """Our own error that a callback of the program raised (`KernelConfig(checks=True)`), which JAX wraps with its
    traceback; None for others.
    """
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    kinds = {name: kind for name, kind in vars(errors).items() if isinstance(kind, type)}
    names = "|".join(name for name, kind in kinds.items() if issubclass(kind, VishwamaiError))
    match = re.search(rf"^(?:vishwamai\.core\.errors\.)?({names}): (.+?)\s*\Z", str(error), re.MULTILINE | re.DOTALL)
    return None if match is None else kinds[match[1]](match[2])


def device_error(activity: str, error: Exception) -> DeviceError | None:
    """The library's error for a complaint of the runtime, or of the host's allocator, while `activity` runs; None for
    any other error.
    """
    first = (str(error).strip() or "no message").splitlines()[0][:500]
    text = f"{activity}: {type(error).__name__}: {first}"
    if isinstance(error, jax.errors.JaxRuntimeError):
        fix = " Out of memory: make the batch smaller, or wrap layers in `jax.checkpoint`."
        return DeviceError(text + fix if out_of_memory(error) else text)
    if isinstance(error, MemoryError):
        return DeviceError(f"{text} Out of memory on the host.")
    return None


@contextlib.contextmanager
def out_of_memory_named(activity: str) -> Iterator[None]:
    """Makes a `DeviceError` of an out of memory in the block, which has to wait for its results: the error of a program
    that runs asynchronously comes with the first wait.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        translated = device_error(activity, error)
        if translated is None or not out_of_memory(error):
            raise
        raise translated from error


def unreadable_program(text: str) -> bool:
    """libtpu put asynchronous SparseCore copies into a program, which it compiles and jaxlib cannot read back."""
    return "async-update" in text


def from_pallas_lowering(error: BaseException) -> bool:
    """The error comes from Pallas' lowering for TPUs, not from the function that is lowered."""
    text = str(error)
    return isinstance(error, (NotImplementedError, ValueError)) and (
        "Pallas TPU lowering" in text or "Mosaic kernels" in text
    )


def missing_primitive(text: str) -> str | None:
    """Name of the primitive that Pallas does not have inside a TPU kernel; None for any other error."""
    match = re.search(r"Unimplemented primitive in Pallas TPU lowering for (\w+): (\S+?)\.", text)
    return match[2] if match else None


def cannot_partition_kernel(text: str) -> bool:
    """A Pallas kernel for TPUs got operands that are sharded over automatic mesh axes."""
    return "Mosaic kernels cannot be automatically partitioned" in text


class BlockShape(NamedTuple):
    """A block that Mosaic cannot tile: its kernel, its place in the source, its sizes and the array's shape, each as
    JAX prints it.
    """

    kernel: str
    where: str
    block: str
    array: str


def illegal_block_shape(text: str) -> bool:
    """The last two dimensions of a Pallas block fit no tile."""
    return "last two dimensions of your block shape" in text


def block_shape(text: str) -> BlockShape | None:
    """The block that an `illegal_block_shape` is about; None if the text does not name it."""
    match = re.search(r"in pallas_call (\S+) at (\S+) has block shape (\(.*?\)), array shape (\(.*?\))", text)
    if match is None:
        return None
    sizes = ", ".join(re.findall(r"block_size=(\d+)", match[3]))
    return BlockShape(match[1], match[2].rstrip("."), f"({sizes})", match[4])
