"""The ambient configuration: *how* kernels run inside a block of code, without passing arguments through every layer.

The value lives in a JAX user context (`jax.make_user_context`), which is part of every trace-cache key: a function that
was jitted under one configuration is retraced under another. A plain context variable would go stale there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.core import ffi, hardware
from vishwamai.core.call_plan import Implementation
from vishwamai.core.errors import KernelError, UnsupportedError
from vishwamai.core.hardware.nodes import memory_nodes
from vishwamai.core.precision import PrecisionConfig
from vishwamai.core.target import Target
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from jax.typing import DTypeLike


SPLIT_SEQUENCE = ("ring", "zigzag", "ulysses", "hybrid", "gather")
"""What attention can do with a sequence that is split over devices."""


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How operations run; every field may change speed only, except `precision` and the `use_...` fields about dtypes,
    which change rounding, and `split_sequence="zigzag"`, which says in what order a sequence lies.

    A field that can have no effect on a platform is named by `without_effect`, which `explain` prints.

    Attributes:
      block_size: edge of the tiles, in elements; None lets the tuning table or the heuristic decide. A kernel rounds it
        to what its chip can tile.
      precision: accumulation and product precision: a `PrecisionConfig`, its name ("high"), or a `jax.lax.Precision`.
      use_bfloat16: float32 operands of matrix products (`gemm`, `einsum`, `flash_attention`, `gated_linear_unit`,
        `grouped_gemm`, `block_sparse_matmul`, `linear_cross_entropy`) are rounded to bfloat16 before they are
        multiplied. Sums stay float32, and results have the dtype that they would have had; where an operation writes
        its result in its operands' dtype (attention, gated units, block-sparse products) it is rounded to bfloat16 on
        the way. Other operations keep their dtype, which `explain` says.
      use_fp16: the same with float16; an error on TPUs, which have no float16 unit.
      use_fp8: the same with the values of float8_e4m3fn, each operand with a scale of its own, a power of two; 16-bit
        operands are rounded too. The products of these values are exact in bfloat16, which multiplies them. Gradients
        are not rounded. `precision: fp8` in training and `quantize="fp8"` in serving use the 8-bit units of a chip.
      use_tensor_cores: GPUs only. True lets float32 products run on the tensor cores as TF32 (`precision="high"`),
        unless `precision` says otherwise; None and False keep float32 accuracy. 16- and 8-bit products run on tensor
        cores always.
      implementation: name of the implementation to use wherever an operation offers it (`"xla"`, `"pallas_tpu"` ...);
        operations without it choose as usual.
      use_flash: False replaces blocked attention, over pages too, by the plain reference that holds the score matrix.
      use_efficient_attention: another name of `use_flash`; None follows it, and a contradiction is an error.
      auto_optimize: consult the tuning tables; False takes the heuristic alone.
      strict: raise `UnsupportedError` instead of falling back to a slower implementation with a warning.
      target: device to choose for, when it is not this machine: a TPU (`"v5e"`), a GPU (`"h100"`, `"sm_90"`) or a CPU
        (`"cpu:avx2"`), see `core.target`; None means the default backend.
      checks: check the values of traced integer operands (labels, group sizes, page tables, lengths) while the program
        runs. Each becomes a callback to the host, and a wrong value an error of the program. Eager calls are checked
        always; False costs nothing.
      split_sequence: method of attention where query, key and value are split along the sequence over the same
        explicit mesh axes: one of `SPLIT_SEQUENCE` (see `vishwamai.parallel`); None lets the library choose, on a TPU
        by the model of its links. "zigzag" is a ring, and says that the sequence lies in zig-zag order (`to_zigzag`):
        there `causal` means the order of the sequence, and a causal `flash_attention` that cannot go around a ring is
        an error, and so is one of packed sequences. Paged attention, and the functions of `vishwamai.torch`, take
        sequences in order whatever it says.
      threads: CPUs only. The most threads that work on a call of a native kernel; None for as many as
        `VISHWAMAI_CPU_THREADS`, else `OMP_NUM_THREADS`, allows, else all of XLA's pool.
      numa: CPUs only. Where the threads of native kernels work on a machine with several memory nodes: None gives each
        node a share of every call's work, so that what one call writes first is read there by the next; the number of a
        node keeps the call on its processors; "off" leaves it to the system.
    """

    block_size: int | None = None
    precision: PrecisionConfig = PrecisionConfig()
    use_bfloat16: bool = False
    use_fp16: bool = False
    use_fp8: bool = False
    use_tensor_cores: bool | None = None
    implementation: str | None = None
    use_flash: bool = True
    use_efficient_attention: bool | None = None
    auto_optimize: bool = True
    strict: bool = False
    target: str | None = None
    checks: bool = False
    split_sequence: str | None = None
    threads: int | None = None
    numa: int | str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type in ("bool", "bool | None"):
                value = getattr(self, field.name)
                object.__setattr__(self, field.name, _flag(field.name, value, "None" in field.type))
        if isinstance(self.precision, jax.lax.Precision):
            object.__setattr__(self, "precision", PrecisionConfig(self.precision.name.lower()))
        elif not isinstance(self.precision, PrecisionConfig):
            object.__setattr__(self, "precision", PrecisionConfig(self.precision))
        if self.use_bfloat16 and self.use_fp16:
            raise KernelError("KernelConfig: `use_bfloat16` and `use_fp16` are both True; pass one of them.")
        if self.use_efficient_attention is not None:
            if self.use_efficient_attention and not self.use_flash:
                raise KernelError(
                    "KernelConfig: `use_efficient_attention` is True and `use_flash` is False, but they are one "
                    "option; pass one of them."
                )
            object.__setattr__(self, "use_flash", self.use_efficient_attention)
        if self.block_size is not None:
            object.__setattr__(self, "block_size", check_block_size("KernelConfig: `block_size`", self.block_size))
        if self.implementation is not None and not (
            isinstance(self.implementation, str) and self.implementation in Implementation.names
        ):
            raise KernelError(
                f"KernelConfig: `implementation` is {self.implementation!r}, which no operation has; pass one of "
                f"{', '.join(map(repr, Implementation.names))}, or None to let the library choose."
            )
        if self.target is not None:
            Target.parse(self.target)
        if self.threads is not None:
            object.__setattr__(self, "threads", _count("threads", self.threads, 1, "a positive number, or None"))
        if self.numa is not None and not (isinstance(self.numa, str) and self.numa == "off"):
            number = _count("numa", self.numa, 0, 'the number of a memory node, "off", or None')
            nodes = [node.number for node in memory_nodes()]
            if number not in nodes:
                raise KernelError(
                    f"KernelConfig: `numa` is {number}, but this machine has the memory nodes "
                    f'{", ".join(map(str, nodes))}; pass one of them, "off", or None.'
                )
            object.__setattr__(self, "numa", number)
        if self.split_sequence is not None and not (
            isinstance(self.split_sequence, str) and self.split_sequence in SPLIT_SEQUENCE
        ):
            raise KernelError(
                f"KernelConfig: `split_sequence` is {self.split_sequence!r}; pass one of "
                f"{', '.join(map(repr, SPLIT_SEQUENCE))}, or None to let the library choose."
            )


def _flag(name: str, value: object, optional: bool) -> bool | None:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if optional and value is None:
        return None
    legal = "True, False or None" if optional else "True or False"
    raise KernelError(f"KernelConfig: `{name}` is {value!r}, of type {type(value).__name__}; pass {legal}.")


def _count(name: str, value: object, least: int, remedy: str) -> int:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or not least <= value < 2**31:
        raise KernelError(f"KernelConfig: `{name}` is {value!r}; pass {remedy}.")
    return int(value)


def check_block_size(argument: str, value: object) -> int:
    """`value` as a block size; `argument` names the argument in the error.

    >>> check_block_size("gemm: `config`", 128)
    128

    Raises:
      KernelError: it is not a positive integer.
    """
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 1:
        raise KernelError(f"{argument} is {value!r}; pass a positive number of elements, such as 128, or None.")
    return int(value)


_AMBIENT = jax.make_user_context(default_value=None)
_DEFAULT = KernelConfig()


def current_config() -> KernelConfig:
    """Returns the configuration in force at this point of the program."""
    config = _AMBIENT.value or _DEFAULT
    if (
        config.use_tensor_cores
        and config.precision.products == "default"
        and ambient_target().platform in ("cuda", "rocm")
    ):
        return dataclasses.replace(config, precision=PrecisionConfig("high"))
    return config


@contextlib.contextmanager
def kernel_config(config: KernelConfig | None = None, **overrides: object) -> Iterator[KernelConfig]:
    """Puts a configuration in force for the `with` block; keywords override fields of `config`, or of the one in force.

    >>> with kernel_config(strict=True):
    ...     with kernel_config(block_size=256) as inner:
    ...         print(inner.strict, inner.block_size, current_config().block_size)
    True 256 256

    Raises:
      KernelError: a keyword is not a field of `KernelConfig`, or its value is not legal.
    """
    if config is not None and not isinstance(config, KernelConfig):
        raise KernelError(
            f"kernel_config: `config` is {config!r}, of type {type(config).__name__}; pass a KernelConfig, or its "
            "fields by name."
        )
    base = current_config() if config is None else config
    if not overrides:
        with _in_force(base):
            yield base
        return
    fields = {field.name for field in dataclasses.fields(KernelConfig)}
    unknown = sorted(set(overrides) - fields)
    if unknown:
        raise KernelError(f"kernel_config: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(fields))}.")
    # Two names of one option: whichever is given now decides over what was said before by the other.
    if "use_flash" in overrides and "use_efficient_attention" not in overrides:
        overrides["use_efficient_attention"] = None
    elif overrides.get("use_efficient_attention") is not None and "use_flash" not in overrides:
        overrides["use_flash"] = _flag("use_efficient_attention", overrides["use_efficient_attention"], True)
    value = dataclasses.replace(base, **overrides)  # type: ignore[arg-type]
    with _in_force(value):
        yield value


@contextlib.contextmanager
def _in_force(config: KernelConfig) -> Iterator[None]:
    placement = None
    if config.threads is not None or config.numa is not None:
        node = -1 if config.numa is None else ffi.UNPLACED if config.numa == "off" else config.numa
        placement = (config.threads or 0, node)
    with _AMBIENT(config), ffi.PLACEMENT(placement):
        yield


def ambient_target() -> Target:
    """What the program being traced will most likely run on: the ambient `target`, else this machine's default
    backend.
    """
    named = (_AMBIENT.value or _DEFAULT).target
    return _local_target(jax.default_backend()) if named is None else Target.parse(named)


def local_platform() -> str:
    """The platform of JAX's default backend, as programs are lowered for it: "tpu", "cuda", "rocm" or "cpu"."""
    return _local_target(jax.default_backend()).platform


@functools.cache
def _local_target(backend: str) -> Target:
    if backend == "cpu":
        return Target("cpu", ffi.chip(), local=True)
    device = jax.devices(backend)[0]
    if backend != "gpu":
        return Target(backend, hardware.tpu_for(device.device_kind), local=True)
    if "rocm" in device.client.platform_version.lower():
        # JAX does not tell the architecture; a product that we know has one.
        chip = next((gpu for gpu in hardware.GPUS.values() if gpu.is_called(device.device_kind)), None)
        return Target("rocm", chip, local=True)
    capability = os.environ.get("VISHWAMAI_CUDA_ARCH") or str(device.compute_capability).replace(".", "")
    return Target("cuda", hardware.gpu_for(device.device_kind, f"sm_{capability}"), local=True)


def cuda_architecture() -> str:
    """What kernels for NVIDIA's GPUs are compiled for, "sm_90": `VISHWAMAI_CUDA_ARCH`, else the ambient target's, else
    Hopper.
    """
    named = os.environ.get("VISHWAMAI_CUDA_ARCH")
    if named:
        return f"sm_{named}"
    target = ambient_target()
    return target.gpu.architecture if target.platform == "cuda" and target.gpu is not None else "sm_90"


def cast_for_matmul(*arrays: AnyArray) -> tuple[AnyArray, ...]:
    """The operands of a matrix product as `use_bfloat16`, `use_fp16` and `use_fp8` want them: float32 ones rounded, all
    others as they are.

    Raises:
      UnsupportedError: `use_fp16` on a TPU.
    """
    config = current_config()
    if not (config.use_bfloat16 or config.use_fp16 or config.use_fp8):
        return arrays
    if config.use_fp16 and ambient_target().platform == "tpu":
        raise UnsupportedError(
            "KernelConfig: `use_fp16` is True, but no TPU multiplies float16; pass `use_bfloat16=True` instead."
        )
    dtype = jnp.float16 if config.use_fp16 else jnp.bfloat16
    if config.use_fp8:
        return tuple(_with_values_of_fp8(x, dtype) for x in arrays)
    return tuple(x.astype(dtype) if x.dtype == jnp.float32 else x for x in arrays)


_FP8 = jnp.finfo(jnp.float8_e4m3fn)


def _with_values_of_fp8(x: AnyArray, dtype: DTypeLike) -> AnyArray:
    """A float operand with the values that e4m3 has under its scale; the gradient passes as if it were not rounded."""
    if not isinstance(x, jax.Array) or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return x
    wide = x.astype(jnp.float32)
    largest = jax.lax.stop_gradient(jnp.max(jnp.abs(wide), initial=0.0))
    _, exponent = jnp.frexp(largest / float(_FP8.max))
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), jnp.ldexp(jnp.float32(1), exponent), 1.0)
    limit = float(_FP8.max)
    rounded = jnp.clip(wide / scale, -limit, limit).astype(jnp.float8_e4m3fn).astype(jnp.float32) * scale
    # The difference of a number and its rounding is exact, and so is the sum.
    return (wide + jax.lax.stop_gradient(rounded - wide)).astype(dtype if x.dtype == jnp.float32 else x.dtype)


def without_effect(config: KernelConfig, platform: str) -> tuple[str, ...]:
    """A sentence for every field of `config` that was set and can change nothing on `platform` ("tpu", "cuda", "rocm"
    or "cpu").

    >>> without_effect(KernelConfig(use_tensor_cores=True), "cpu")
    ('use_tensor_cores has no effect: a cpu has no tensor cores.',)
    """
    notes = []
    for name in ("threads", "numa"):
        if getattr(config, name) is not None and platform != "cpu":
            notes.append(f"{name} has no effect: it is about the CPU's native kernels.")
    if config.use_tensor_cores is not None and platform in ("tpu", "cpu"):
        units = "matrix units, which run every product," if platform == "tpu" else "no tensor cores"
        notes.append(f"use_tensor_cores has no effect: a {platform} has {units}.".replace(",.", "."))
    if config.use_tensor_cores and platform not in ("tpu", "cpu") and config.precision.products != "default":
        notes.append(f'use_tensor_cores has no effect: `precision` is "{config.precision.products}", which decides.')
    return tuple(notes)
