"""The ambient configuration: *how* kernels run inside a block of code, without passing arguments through every layer.

The value lives in a JAX user context (`jax.make_user_context`), which is part of every trace-cache key: a function that was jitted under one
configuration is retraced under another. A plain context variable would go stale there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from vishwamai.core import hardware
from vishwamai.core.errors import KernelError, UnsupportedError
from vishwamai.core.precision import PrecisionConfig


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How operations run; every field may change speed only, except `precision` and the `use_...` fields about dtypes, which change rounding.

    A field that can have no effect on a platform is named by `without_effect`, which `explain` prints.

    Attributes:
      block_size: edge of the tiles, in elements; None lets the tuning table or the heuristic decide. A kernel rounds it to what its chip can tile.
      precision: accumulation and product precision: a `PrecisionConfig`, its name ("high"), or a `jax.lax.Precision`.
      use_bfloat16: float32 operands of matrix products (`gemm`, `einsum`, `flash_attention`, `gated_linear_unit`, `grouped_gemm`, `block_sparse_matmul`,
        `linear_cross_entropy`) are rounded to bfloat16 before they are multiplied. Sums stay float32, and results have the dtype that they would have
        had; where an operation writes its result in its operands' dtype (attention, gated units, block-sparse products) it is rounded to bfloat16 on
        the way. Other operations keep their dtype, which `explain` says.
      use_fp16: the same with float16; an error on TPUs, which have no float16 unit.
      use_tensor_cores: GPUs only. True lets float32 products run on the tensor cores as TF32 (`precision="high"`), unless `precision` says otherwise;
        None and False keep float32 accuracy. 16- and 8-bit products run on tensor cores always.
      implementation: name of the implementation to use wherever an operation offers it (`"xla"`, `"pallas_tpu"` ...); operations without it
        choose as usual.
      use_flash: False replaces blocked attention by the plain reference that holds the score matrix.
      use_efficient_attention: another name of `use_flash`; None follows it, and a contradiction is an error.
      auto_optimize: consult the tuning tables; False takes the heuristic alone.
      strict: raise `UnsupportedError` instead of falling back to a slower implementation with a warning.
      target: chip to choose for (`"v5e"` ...) when compiling for a chip that is not here; None means the default backend.
    """

    block_size: int | None = None
    precision: PrecisionConfig = PrecisionConfig()
    use_bfloat16: bool = False
    use_fp16: bool = False
    use_tensor_cores: bool | None = None
    implementation: str | None = None
    use_flash: bool = True
    use_efficient_attention: bool | None = None
    auto_optimize: bool = True
    strict: bool = False
    target: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.precision, jax.lax.Precision):
            object.__setattr__(self, "precision", PrecisionConfig(self.precision.name.lower()))
        elif not isinstance(self.precision, PrecisionConfig):
            object.__setattr__(self, "precision", PrecisionConfig(self.precision))
        if self.use_bfloat16 and self.use_fp16:
            raise KernelError("KernelConfig: `use_bfloat16` and `use_fp16` are both True; pass one of them.")
        if self.use_efficient_attention is not None:
            if self.use_efficient_attention and not self.use_flash:
                raise KernelError(
                    "KernelConfig: `use_efficient_attention` is True and `use_flash` is False, but they are one option; pass one of them."
                )
            object.__setattr__(self, "use_flash", self.use_efficient_attention)
        if self.block_size is not None and (not isinstance(self.block_size, int) or self.block_size < 1):
            raise KernelError(
                f"KernelConfig: `block_size` is {self.block_size!r}; pass a positive number of elements, such as 128, or None."
            )
        if self.target is not None:
            hardware.chip(self.target)


_AMBIENT = jax.make_user_context(default_value=None)
_DEFAULT = KernelConfig()


def current_config() -> KernelConfig:
    """Returns the configuration in force at this point of the program."""
    config = _AMBIENT.value or _DEFAULT
    if config.use_tensor_cores and config.precision.products == "default" and ambient_platform() in ("cuda", "rocm"):
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
    base = current_config() if config is None else config
    if not overrides:
        with _AMBIENT(base):
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
        overrides["use_flash"] = overrides["use_efficient_attention"]
    value = dataclasses.replace(base, **overrides)  # type: ignore[arg-type]
    with _AMBIENT(value):
        yield value


def ambient_platform() -> str:
    """The platform that the program being traced will most likely run on: "tpu", "cpu", "cuda" or "rocm"."""
    if (_AMBIENT.value or _DEFAULT).target is not None:
        return "tpu"
    backend = jax.default_backend()
    if backend == "gpu":
        return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
    return backend


def narrowed(*arrays: Any) -> tuple[Any, ...]:
    """The operands of a matrix product as `use_bfloat16` or `use_fp16` want them: float32 ones rounded, all others as they are.

    Raises:
      UnsupportedError: `use_fp16` on a TPU.
    """
    config = current_config()
    if not (config.use_bfloat16 or config.use_fp16):
        return arrays
    if config.use_fp16 and ambient_platform() == "tpu":
        raise UnsupportedError(
            "KernelConfig: `use_fp16` is True, but no TPU multiplies float16; pass `use_bfloat16=True` instead."
        )
    dtype = jnp.bfloat16 if config.use_bfloat16 else jnp.float16
    return tuple(x.astype(dtype) if x.dtype == jnp.float32 else x for x in arrays)


def without_effect(config: KernelConfig, platform: str) -> tuple[str, ...]:
    """A sentence for every field of `config` that was set and can change nothing on `platform` ("tpu", "cuda", "rocm" or "cpu").

    >>> without_effect(KernelConfig(use_tensor_cores=True), "cpu")
    ('use_tensor_cores has no effect: a cpu has no tensor cores.',)
    """
    found = []
    if config.use_tensor_cores is not None and platform in ("tpu", "cpu"):
        what = "matrix units, which run every product," if platform == "tpu" else "no tensor cores"
        found.append(f"use_tensor_cores has no effect: a {platform} has {what}.".replace(",.", "."))
    if config.use_tensor_cores and platform not in ("tpu", "cpu") and config.precision.products != "default":
        found.append(f'use_tensor_cores has no effect: `precision` is "{config.precision.products}", which decides.')
    return tuple(found)


def ambient_chip() -> hardware.Chip | None:
    """The TPU generation to choose tiles for: the ambient `target`, else the local chip, else None (no TPU here and none named)."""
    target = current_config().target
    if target is not None:
        return hardware.chip(target)
    if jax.default_backend() == "tpu":
        return hardware.chip_for(jax.devices()[0].device_kind)
    return None
