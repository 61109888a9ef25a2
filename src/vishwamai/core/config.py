"""The ambient configuration: *how* kernels run inside a block of code, without passing arguments through every layer.

The value lives in a JAX user context (`jax.make_user_context`), which is part of every trace-cache key: a function that was jitted under one
configuration is retraced under another. A plain context variable would go stale there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax

from vishwamai.core import hardware
from vishwamai.core.errors import KernelError
from vishwamai.core.precision import PrecisionConfig


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """How operations run; every field may change speed only, except `precision`, which says so itself.

    Attributes:
      block_size: edge of the tiles, in elements; None lets the tuning table or the heuristic decide. A kernel rounds it to what its chip can tile.
      precision: accumulation and product precision; see `PrecisionConfig`.
      implementation: name of the implementation to use wherever an operation offers it (`"xla"`, `"pallas_tpu"` ...); operations without it
        choose as usual.
      use_flash: False replaces blocked attention by the plain reference that holds the score matrix.
      auto_optimize: consult the tuning tables; False takes the heuristic alone.
      strict: raise `UnsupportedError` instead of falling back to a slower implementation with a warning.
      target: chip to choose for (`"v5e"` ...) when compiling for a chip that is not here; None means the default backend.
    """

    block_size: int | None = None
    precision: PrecisionConfig = PrecisionConfig()
    implementation: str | None = None
    use_flash: bool = True
    auto_optimize: bool = True
    strict: bool = False
    target: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.precision, str):
            object.__setattr__(self, "precision", PrecisionConfig(self.precision))
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
    return _AMBIENT.value or _DEFAULT


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
    fields = {field.name for field in dataclasses.fields(KernelConfig)}
    unknown = sorted(set(overrides) - fields)
    if unknown:
        raise KernelError(f"kernel_config: unknown field {unknown[0]!r}; the fields are {', '.join(sorted(fields))}.")
    value = dataclasses.replace(base, **overrides)  # type: ignore[arg-type]
    with _AMBIENT(value):
        yield value


def ambient_platform() -> str:
    """The platform that the program being traced will most likely run on: "tpu", "cpu", "cuda" or "rocm"."""
    if current_config().target is not None:
        return "tpu"
    backend = jax.default_backend()
    if backend == "gpu":
        return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
    return backend


def ambient_chip() -> hardware.Chip | None:
    """The TPU generation to choose tiles for: the ambient `target`, else the local chip, else None (no TPU here and none named)."""
    target = current_config().target
    if target is not None:
        return hardware.chip(target)
    if jax.default_backend() == "tpu":
        return hardware.chip_for(jax.devices()[0].device_kind)
    return None
