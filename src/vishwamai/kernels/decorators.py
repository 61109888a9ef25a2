"""Decorators that make a kernel of a JAX function: jitted, configured, asked before it is run, with errors that name
their cause.

A decorated function is one program. Its vishwamai operations read the configuration of the decorator; what it raises
arrives as a `KernelError` or a `DeviceError` that keeps the cause. The platform is a request: where there is no such
device the function runs on what is there, and a warning says so once (`strict=True` makes it an error).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.core
import numpy as np

from vishwamai.core import callers, jax_errors
from vishwamai.core import explain as core_explain
from vishwamai.core.config import KernelConfig, current_config, kernel_config
from vishwamai.core.errors import (
    DeviceError,
    FallbackWarning,
    KernelError,
    ShapeError,
    UnsupportedError,
    VishwamaiError,
)
from vishwamai.core.installing import install_line
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.kernels.call import ARRAY, Constant, StaticCall, is_array, is_torch_tensor
from vishwamai.measure import profiling

_JAX_PLATFORMS = {"tpu": ("tpu",), "gpu": ("gpu", "cuda", "rocm"), "cpu": ("cpu",)}
_FIXES = {
    "tpu": (f"on a TPU machine `{install_line('tpu')}`; to compile for one you do not have, use `.check(target, ...)`"),
    "gpu": "install a jaxlib with GPU support on a machine that has one",
}


class Kernel:
    """A decorated function; call it as the function itself.

    Arrays are traced; torch tensors are not, torch runs the function on them. Everything else among its arguments
    (numbers, strings, functions) is static: a new value compiles anew, so hand numbers that change with every call over
    as arrays.

    Attributes:
      function: the function as it was written.
      platform: "tpu", "gpu" or "cpu".
      config: the `KernelConfig` that its operations read; None leaves them the ambient one.
    """

    def __init__(
        self,
        function: Callable[..., PyTree],
        platform: str,
        overrides: dict[str, Any],
        config: KernelConfig | None = None,
        *,
        jit_options: dict[str, Any] | None = None,
        constants: bool = False,
        verify: Callable[[Callable[..., PyTree], tuple[jax.Array, ...]], None] | None = None,
    ):
        self._extra = dict(jit_options=jit_options, constants=constants, verify=verify)
        functools.update_wrapper(self, function)
        self.function = function
        self.platform = platform
        self._overrides = overrides
        self._base = config
        self._configs: dict[KernelConfig, KernelConfig] = {}  # what the keywords make of each base
        self._constants = constants  # arrays of integers and bools are part of the program
        self._verify = verify  # called once for each new program with (function of arrays, arrays)
        self._verified: set[object] = set()
        with self.named_errors(), self.configured():
            pass  # a keyword that is wrong is told where it stands, not at the first call

        def program(call: StaticCall, *arrays: jax.Array) -> PyTree:
            return self._run(call, *arrays)

        program.__name__ = program.__qualname__ = self.name  # what the compiled program is called
        self._program = jax.jit(program, static_argnums=0, **(jit_options or {}))

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def __repr__(self) -> str:
        return f"<{self.platform}_kernel {self.name}>"

    def __reduce__(self) -> str | tuple[object, ...]:
        """By its name, as functions are pickled, where its module has it under that name; else by its parts."""
        definition: Any = sys.modules.get(self.__module__)
        path = getattr(self, "__qualname__", "")  # the function's, if it has one
        for name in path.split("."):
            definition = getattr(definition, name, None)
        if definition is self:
            return path
        return _wrapped, (self.function, self.platform, self._overrides, self._base, self._extra)

    def __get__(self, instance: object, owner: object = None) -> Kernel | functools.partial[PyTree]:
        return self if instance is None else functools.partial(self, instance)

    @property
    def config(self) -> KernelConfig:
        with self.configured() as config:
            return config

    @contextlib.contextmanager
    def configured(self) -> Iterator[KernelConfig]:
        """Puts the kernel's configuration in force for the block: its keywords over its `config`, or over the ambient
        one.
        """
        base = current_config() if self._base is None else self._base
        if base not in self._configs:
            with kernel_config(base, **self._overrides) as config:
                self._configs[base] = config
        with kernel_config(self._configs[base]) as config:
            yield config

    def __call__(self, *args: object, **kwargs: object) -> PyTree:
        with self.named_errors(), self.configured() as config:
            tensors = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_torch_tensor(leaf)]
            if tensors:
                return self._call_on_tensors(tensors, config, args, kwargs)
            call, arrays = self.split(args, kwargs)
            traced = any(isinstance(x, jax.core.Tracer) for x in arrays)
            if not traced:
                arrays = self._placed(arrays, config)
            profile = profiling.active()
            if profile is None or profile.inside_kernel or traced:
                return self._program(call, *arrays)
            function = functools.partial(self._run, call)
            return profiling.run_kernel(profile, (self, call), self.name, function, arrays)

    def _call_on_tensors(
        self, tensors: list[AnyArray], config: KernelConfig, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> PyTree:
        """The function of torch tensors, as it is: torch runs it, and the operations of `vishwamai.torch` in it read
        the configuration.
        """
        if self.platform == "tpu":
            raise KernelError(f"{self.name}: torch tensors run on GPUs and CPUs; pass `jnp.asarray(tensor)`.")
        kinds = {"gpu" if t.device.type == "cuda" else t.device.type for t in tensors}
        if self.platform not in kinds:
            text = (
                f"{self.name}: the tensors are on {', '.join(sorted(kinds))}, so it runs there and not on the "
                f"{self.platform.upper()}"
            )
            if config.strict:
                raise DeviceError(f"{text}, which `strict=True` forbids; move them, `tensor.to(...)`.")
            _warn_once(text)
        profile = profiling.active()
        if profile is not None:
            profile.untimed[self.name] = profile.untimed.get(self.name, 0) + 1
        tensor_cores = config.use_tensor_cores and config.precision.products == "default" and "gpu" in kinds
        with kernel_config(precision="high") if tensor_cores else contextlib.nullcontext():
            return self.function(*args, **kwargs)

    def explain(self, *args: object, target: str | None = None, **kwargs: object) -> core_explain.Explanation:
        """Which implementation of every operation in the function runs for these arguments, and why not the others; see
        `vishwamai.explain`.

        Of torch tensors the function is run once, on the device where they are; see `vishwamai.torch.explain`.
        """
        with self.named_errors(), self.configured():
            if any(map(is_torch_tensor, jax.tree.leaves((args, kwargs)))):
                if target is not None:
                    raise KernelError(
                        f"{self.name}: `target` is {target!r}, but torch tensors are explained for the device that "
                        "they are on; pass jax.ShapeDtypeStruct's."
                    )
                from vishwamai.torch import explain

                return explain(self.function, *args, **kwargs)
            call, arrays = self.split(args, kwargs)
            return core_explain.explain(functools.partial(self._run, call), *arrays, target=target)

    def check(self, target: str, *args: object, **kwargs: object) -> Any:
        """Whether the function compiles for a TPU that need not be here, and fits it; see `vishwamai.aot.check`, which
        says what a crash of the compiler does.

        Args:
          target: "v5e", or a topology "v5e:4x4".
          *args: arrays, `jax.ShapeDtypeStruct`s, and static values.
        """
        from vishwamai import aot

        with self.named_errors(), self.configured():
            call, arrays = self.split(args, kwargs)
            return aot.check(functools.partial(self._run, call), *arrays, target=target)

    def lower(self, *args: object, **kwargs: object) -> jax.stages.Lowered:
        """The lowered program, as `jax.jit(...).lower` gives it; `.compile()` is called with the arrays alone."""
        with self.named_errors(), self.configured():
            call, arrays = self.split(args, kwargs)
            return self._program.lower(call, *arrays)

    def _run(self, call: StaticCall, *arrays: jax.Array) -> PyTree:
        args, kwargs = call.arguments(arrays)
        return self.function(*args, **kwargs)

    def split(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[StaticCall, tuple[jax.Array, ...]]:
        """The static side of a call, which is hashable, and its arrays."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        for leaf in leaves:
            if is_torch_tensor(leaf):
                raise KernelError(
                    f"{self.name}: an argument is a torch tensor of shape {tuple(leaf.shape)}, of which there is "
                    "nothing to trace; pass `jnp.asarray(tensor)`, or a jax.ShapeDtypeStruct."
                )
        static = tuple(map(self._static, leaves))
        call = StaticCall(treedef, static)
        arrays = tuple(leaf for leaf, value in zip(leaves, static) if value is ARRAY)
        if self._verify is not None:
            key = (call, tuple((x.shape, str(x.dtype)) for x in arrays))
            if key not in self._verified:
                self._verify(functools.partial(self._run, call), arrays)
                self._verified.add(key)
        return call, arrays

    def _static(self, leaf: PyTree) -> object:
        concrete = isinstance(leaf, (np.ndarray, jax.Array)) and not isinstance(leaf, jax.core.Tracer)
        if self._constants and concrete and isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in "iub":
            return Constant(np.asarray(leaf))
        return ARRAY if is_array(leaf) else leaf

    def _placed(self, arrays: tuple[jax.Array, ...], config: KernelConfig) -> tuple[jax.Array, ...]:
        """The arrays on a device of the kernel's platform; as they are where there is none."""
        default = jax.devices()[0].platform
        if default in _JAX_PLATFORMS[self.platform]:
            return arrays
        if self.platform == "cpu":
            return tuple(jax.device_put(x, jax.devices("cpu")[0]) for x in arrays)
        # JAX would have made an accelerator its default, had it found one (or been let to by JAX_PLATFORMS).
        text = f"{self.name}: JAX has no {self.platform.upper()} here, so it runs on {default}"
        if config.strict:
            raise DeviceError(f"{text}, which `strict=True` forbids; {_FIXES[self.platform]}.")
        _warn_once(text)
        return arrays

    @contextlib.contextmanager
    def named_errors(self) -> Iterator[None]:
        """What the block raises, as a `KernelError` or `DeviceError` with its cause.

        A call has it around itself. A program that runs asynchronously may fail afterwards, when its results are
        waited for: put that wait into such a block.

        >>> import jax, jax.numpy as jnp
        >>> kernel = cpu_kernel(jnp.tanh)
        >>> with kernel.named_errors():
        ...     y = jax.block_until_ready(kernel(jnp.ones(8)))
        """
        try:
            yield
        except VishwamaiError:
            raise
        except Exception as error:
            raise translated(self.name, error) from error


def _wrapped(
    function: Callable[..., object],
    platform: str,
    overrides: dict[str, Any],
    config: KernelConfig | None,
    extra: dict[str, Any],
) -> Kernel:
    """A kernel from its pickled parts."""
    return Kernel(function, platform, overrides, config, **extra)


@functools.cache
def _warn_once(text: str) -> None:
    callers.warn(text, FallbackWarning)


def translated(name: str, error: Exception) -> VishwamaiError:
    """The library's error for what a kernel raised: `DeviceError` for the runtime's complaints, `KernelError` and its
    kinds for all others.
    """
    first = (str(error).strip() or "no message").splitlines()[0][:500]
    text = f"{name}: {type(error).__name__}: {first}"
    if (of_callback := jax_errors.from_callback(error)) is not None:
        return of_callback
    if jax_errors.lacks_platform(error):
        return UnsupportedError(
            f"{name}: an operation in it has an implementation of another platform than this program's, and it cannot "
            f"run here ({first}); leave `implementation` out, or ask `.check(target, ...)` whether it compiles."
        )
    if (of_device := jax_errors.device_error(name, error)) is not None:
        return of_device
    if isinstance(error, NotImplementedError):
        return UnsupportedError(text)
    return ShapeError(text) if isinstance(error, ValueError) else KernelError(text)


def decorator(
    platform: str,
    function: Callable[..., object] | None,
    config: KernelConfig | None,
    overrides: dict[str, Any],
    **extra: Any,
) -> Any:
    """`@name`, `@name(...)` and `name(function, ...)` alike."""
    if platform not in _JAX_PLATFORMS:
        raise KernelError(f"kernel decorator: `platform` is {platform!r}; pass one of {', '.join(_JAX_PLATFORMS)}.")
    if function is not None and not callable(function):
        raise KernelError(f"{platform}_kernel: {function!r} is not a function; pass options by name.")
    if config is not None and not isinstance(config, KernelConfig):
        raise KernelError(f"{platform}_kernel: `config` is a {type(config).__name__}; pass a KernelConfig.")
    if function is None:
        return lambda wrapped: Kernel(wrapped, platform, overrides, config, **extra)
    return Kernel(function, platform, overrides, config, **extra)


def tpu_kernel(
    function: Callable[..., object] | None = None, *, config: KernelConfig | None = None, **options: Any
) -> Any:
    """Makes a kernel for TPUs of a JAX function: bare, with fields of `KernelConfig` as keywords, or with `config=`.

    The kernel is called as the function, and has `.explain(*args)`, `.check(target, *args)` and `.lower(*args)`; see
    `Kernel`.

    Raises:
      KernelError: a keyword is not a field of `KernelConfig` or its value is not legal (`use_fp16`, `use_tensor_cores`:
        a TPU has neither).

    >>> import jax.numpy as jnp, vishwamai
    >>> @tpu_kernel(use_bfloat16=True)
    ... def project(x, w):
    ...     return vishwamai.gemm(vishwamai.rms_norm(x), w)
    >>> project(jnp.ones((8, 64)), jnp.ones((64, 16))).dtype
    dtype('float32')
    >>> project.explain(jnp.ones((8, 64)), jnp.ones((64, 16)), target="v5e").calls[1].runs
    'pallas_tpu'
    """
    for name in ("use_fp16", "use_tensor_cores"):
        if options.get(name) or (isinstance(config, KernelConfig) and getattr(config, name)):
            raise KernelError(
                f"tpu_kernel: `{name}` is set, but a TPU has neither float16 nor tensor cores: its matrix units run "
                "every product; pass `use_bfloat16=True`, or nothing."
            )
    return decorator("tpu", function, config, options)


def gpu_kernel(
    function: Callable[..., object] | None = None, *, config: KernelConfig | None = None, **options: Any
) -> Any:
    """Makes a kernel for GPUs of a function of JAX arrays or torch tensors; see `tpu_kernel` for the forms,
    `KernelConfig` for the options.

    A function of torch tensors is called as it is: torch runs it, and the operations of `vishwamai.torch` inside read
    the configuration.

    >>> import jax.numpy as jnp, vishwamai
    >>> @gpu_kernel(use_tensor_cores=True)
    ... def product(a, b):
    ...     return vishwamai.gemm(a, b)
    >>> product(jnp.ones((8, 64)), jnp.ones((64, 16))).shape
    (8, 16)
    """
    return decorator("gpu", function, config, options)


def cpu_kernel(
    function: Callable[..., object] | None = None, *, config: KernelConfig | None = None, **options: Any
) -> Any:
    """Makes a kernel for the CPU of a JAX function, which runs there even beside an accelerator; see `tpu_kernel` for
    the forms.

    >>> import jax.numpy as jnp, vishwamai
    >>> @cpu_kernel
    ... def normed(x):
    ...     return vishwamai.layer_norm(x)
    >>> normed(jnp.ones((8, 64))).devices().pop().platform
    'cpu'
    """
    return decorator("cpu", function, config, options)
