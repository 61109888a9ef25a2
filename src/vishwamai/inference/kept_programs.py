"""Compiled programs cached by trace inputs, so that the next start does not trace them.

JAX's compilation cache knows a program by its lowered form, and tracing and lowering take longer than reading what was
compiled. Here a program is known by everything that decides what is traced and compiled: the function with its static
arguments, the shapes of the others, the configuration of kernels and of JAX, the source of this package, the versions
of the packages below it, the variables of the environment, and the machine. Its file lies in the directory of JAX's
cache, in a folder that its user alone may write, and takes the place of the files there. A file is a pickle, so one
that another user could have written is declined. Programs of one CPU device are kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

import vishwamai
from vishwamai.core import caches, ffi, jax_cache, observe
from vishwamai.core.config import current_config
from vishwamai.core.execute import platform_of

_PACKAGES = ("flax", "jax", "jaxlib", "ml_dtypes", "numpy")
_VARIABLES = ("JAX_", "VISHWAMAI_", "XLA_")
"""How the names begin that these packages read."""


def compiled(function: Any, arguments: tuple[Any, ...], on_read: Callable[[], None] = lambda: None) -> Any:
    """`function.lower(*arguments).compile()`, read where it was kept.

    It is kept where JAX's compilation cache is on. It is not where a kernel declines: each start is to warn of that.

    Args:
      function: a function of this package, jitted, or a `functools.partial` of one whose values `repr` tells apart.
      arguments: arrays of the call, or their shapes.
      on_read: called where the program is read.
    """
    path = _path(function, arguments)
    if path is None:
        return function.lower(*arguments).compile()
    cached = _read(path, arguments)
    if cached is not None:
        on_read()
        return cached
    recorder = observe.PlanRecorder()
    with observe.watching(recorder):
        lowered = function.lower(*arguments)
    with _without_cache_of_jax():
        executable_program = lowered.compile()
    if not any(plan.op.fallbacks(plan.choice("cpu")) for plan in recorder.plans):
        executable, _, out_tree = serialize_executable.serialize(executable_program)
        content = zlib.compress(pickle.dumps((executable, out_tree)), 1)
        try:
            caches.private_directory(path.parent)
            caches.write(path, hashlib.sha256(content).digest() + content)
            path.chmod(0o600)
        except OSError as error:  # the next start traces it
            caches.warn_once(f"compiled programs are not kept for the next start: {error}")
    return executable_program


@contextlib.contextmanager
def _without_cache_of_jax() -> Iterator[None]:
    """JAX's compilation cache is off in the block: a program that was read there cannot be written, because jaxlib
    0.10.2 leaves the functions out that it calls.
    """
    jax_cache.turn(on=False)
    try:
        yield
    finally:
        jax_cache.turn(on=True)


def _read(path: Path, arguments: tuple[Any, ...]) -> Any:
    """The program of a file; None where there is none, it is damaged, or another user could have written it."""
    try:
        with caches.open_private(path) as file:
            content = file.read()
        digest, content = content[:32], content[32:]
        if hashlib.sha256(content).digest() != digest:
            raise ValueError("the file is damaged")
        executable, out_tree = pickle.loads(zlib.decompress(content))
        in_tree, devices = jax.tree.structure((arguments, {})), tuple(_devices(arguments))
        return serialize_executable.deserialize_and_load(executable, in_tree, out_tree, "cpu", devices)
    except FileNotFoundError:
        return None
    except Exception as error:  # what is damaged raises anything
        caches.warn_once(f"{path}: the program cannot be loaded ({error}); it is compiled again.")
        return None


def _path(function: Any, arguments: tuple[Any, ...]) -> Path | None:
    """Where the program is kept; None where it is not to be."""
    root = jax_cache.directory()
    if not root or "://" in root or platform_of(arguments) != "cpu" or len(_devices(arguments)) != 1:
        return None
    if observe.tokens() or current_config().checks:  # an observer is told what is traced; checks call the host back
        return None
    return Path(root, "traced", f"{hashlib.sha256(identity(function, arguments).encode()).hexdigest()}-cache")


def identity(function: Any, arguments: tuple[Any, ...]) -> str:
    """All that decides what the program is, as text."""
    partial = function.__wrapped__
    partial = partial if isinstance(partial, functools.partial) else functools.partial(partial)
    leaves, tree = jax.tree.flatten(arguments)
    return repr(
        (
            (partial.func.__module__, partial.func.__qualname__, partial.args, partial.keywords),
            (tree, [_kind(x) for x in leaves]),
            (current_config(), jax.sharding.get_abstract_mesh(), sorted(jax.config.values.items())),
            sorted((name, value) for name, value in os.environ.items() if name.startswith(_VARIABLES)),
            _versions(),
            _source(),
            _machine(),
        )
    )


def _kind(x: Any) -> tuple[Any, ...]:
    """What tracing reads of an argument."""
    place = (str(x.sharding), x.committed) if isinstance(x, jax.Array) else None
    return x.shape, x.dtype.name, getattr(x, "weak_type", False), place


def _devices(arguments: tuple[Any, ...]) -> set[Any]:
    arrays = (x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array))
    return {device for x in arrays for device in x.devices()}


@functools.cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, importlib.metadata.version(name)) for name in _PACKAGES)


@functools.cache
def _source() -> str:
    """A digest of this package: its Python files and the native module."""
    root = Path(vishwamai.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    native = ffi.native().__file__ if ffi.why_not() is None else None
    digest.update(b"" if native is None else Path(native).read_bytes())
    return digest.hexdigest()


@functools.cache
def _machine() -> tuple[Any, ...]:
    """What XLA compiles for: the processor with its features, and the cores that its threads may use."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    lines = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.M)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return tuple(lines), cores, ffi.isa() if ffi.why_not() is None else None
