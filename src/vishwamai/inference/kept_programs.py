"""Compiled programs cached by trace inputs, so that the next start does not trace them.

JAX's compilation cache knows a program by its lowered form, and tracing and lowering take longer than reading what was
compiled. Here a program is known by everything that decides what is traced and compiled: the function with its static
arguments, the shapes of the others, the configuration of kernels and of JAX, the source of this package, the versions
of the packages below it, the variables of the environment, and the machine. Its file lies in the directory of JAX's
cache, in a folder that its user alone may write, and takes the place of the files there. A file is a digest, a header
in JSON and the program as XLA writes it. That is machine code, so a file that another user could have written is
declined. Programs of one CPU device are kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import vishwamai
from vishwamai.core import caches, ffi, jax_cache, jax_private, observe
from vishwamai.core.config import current_config
from vishwamai.core.execute import platform_of
from vishwamai.core.types import PyTree
from vishwamai.inference.sampling import Proposals, Sampled

PACKAGES = ("flax", "jax", "jaxlib", "ml_dtypes", "numpy")
_VARIABLES = ("JAX_", "VISHWAMAI_", "XLA_")
"""How the names begin that these packages read."""

_TUPLES = {kind.__name__: kind for kind in (Proposals, Sampled)}
"""Named tuples of the outputs of programs."""


def compiled(
    function: jax.stages.Wrapped, arguments: tuple[PyTree, ...], on_read: Callable[[], None] = lambda: None
) -> jax.stages.Compiled:
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
    program = writable(lowered)
    if not any(plan.op.fallbacks(plan.choice("cpu")) for plan in recorder.plans):
        try:
            write_program(path, program, arguments)
        except OSError as error:  # the next start traces it
            caches.warn_once(f"compiled programs are not kept for the next start: {error}")
    return program


def writable(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """The compiled program, without JAX's compilation cache: a program that was read there cannot be written, because
    jaxlib 0.10.2 leaves the functions out that it calls.
    """
    jax_cache.turn(on=False)
    try:
        return lowered.compile()
    finally:
        jax_cache.turn(on=True)


def write_program(path: Path, program: object, arguments: tuple[PyTree, ...]) -> bool:
    """Writes a program that `writable` compiled for these arguments; False where it cannot be written.

    Raises:
      OSError: the file cannot be written, or others may write its directory.
    """
    content = _content(program, arguments)
    if content is None:
        return False
    caches.private_directory(path.parent)
    caches.write(path, hashlib.sha256(content).digest() + content)
    path.chmod(0o600)
    return True


def read_program(path: Path, arguments: tuple[PyTree, ...], place: object) -> jax.stages.Compiled:
    """The program of a file, for its device or its mesh.

    Raises:
      OSError: there is none, or another user could have written it.
      Exception: it is damaged, or of another device.
    """
    with caches.open_private(path) as file:
        content = file.read()
    digest, content = content[:32], content[32:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("the file is damaged")
    text, _, executable = zlib.decompress(content).partition(b"\n")
    header = json.loads(text)
    in_tree = jax.tree.structure((arguments, {}))
    out_tree = jax.tree.structure(_tree(header["outputs"], _parts(in_tree)))
    return jax_private.deserialized(executable, header, place, in_tree, out_tree)


def _read(path: Path, arguments: tuple[PyTree, ...]) -> jax.stages.Compiled | None:
    """The program of a file; None where there is none, it is damaged, or another user could have written it."""
    try:
        (device,) = devices_of(arguments)
        return read_program(path, arguments, device)
    except FileNotFoundError:
        return None
    except Exception as error:  # what is damaged raises anything
        caches.warn_once(f"{path}: the program cannot be loaded ({error}); it is compiled again.")
        return None


def _content(program: Any, arguments: tuple[object, ...]) -> bytes | None:
    """What a file holds below its digest; None where the program cannot be written."""
    parts = jax_private.serialized(program)
    if parts is None:
        return None
    executable, header = parts
    try:
        header["outputs"] = _named(program.out_tree, _parts(jax.tree.structure((arguments, {}))))
    except ValueError:  # outputs of a type that is neither JSON's nor among the arguments
        return None
    return zlib.compress(json.dumps(header).encode() + b"\n" + executable, 1)


def _parts(tree: Any) -> list[Any]:
    """The nodes of a structure that are of another type than JSON's, outer ones first."""
    node = tree.node_data()
    inner = [part for child in tree.children() for part in _parts(child)] if node else []
    return inner if node is None or node[0] in (tuple, list, dict, type(None)) else [tree, *inner]


def _named(tree: Any, parts: list[Any]) -> Any:
    """The structure of outputs for JSON. What is of another type than JSON's is a named tuple of `_TUPLES`, or part of
    the arguments, such as pages, and named by its number among `parts`.
    """
    node, children = tree.node_data(), tree.children()
    if node is None:
        return "array"
    kind, data = node
    if kind is type(None):
        return None
    if kind in (tuple, list):
        return {kind.__name__: [_named(child, parts) for child in children]}
    if kind is dict:
        return {"dict": [list(data), [_named(child, parts) for child in children]]}
    if kind in _TUPLES.values():
        return {kind.__name__: [_named(child, parts) for child in children]}
    return {"argument": parts.index(tree)}


def _tree(value: Any, parts: list[Any]) -> Any:
    """A tree of the structure that `_named` wrote."""
    if value is None:
        return None
    if value == "array":
        return 0
    ((kind, content),) = value.items()
    if kind == "argument":
        return parts[content].unflatten([0] * parts[content].num_leaves)
    if kind == "dict":
        keys, children = content
        return dict(zip(keys, (_tree(child, parts) for child in children), strict=True))
    children = [_tree(child, parts) for child in content]
    return _TUPLES[kind](*children) if kind in _TUPLES else {"tuple": tuple, "list": list}[kind](children)


def _path(function: jax.stages.Wrapped, arguments: tuple[PyTree, ...]) -> Path | None:
    """Where the program is kept; None where it is not to be."""
    root = jax_cache.directory()
    if not root or "://" in root or platform_of(arguments) != "cpu" or len(devices_of(arguments)) != 1:
        return None
    if observe.tokens() or current_config().checks:  # an observer is told what is traced; checks call the host back
        return None
    return Path(root, "traced", f"{hashlib.sha256(identity(function, arguments).encode()).hexdigest()}-cache")


def identity(function: Any, arguments: tuple[PyTree, ...]) -> str:
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
            versions(),
            source_of_cpu(),
            machine(),
        )
    )


def _kind(x: PyTree) -> tuple[object, ...]:
    """What tracing reads of an argument."""
    place = (str(x.sharding), x.committed) if isinstance(x, jax.Array) else None
    return x.shape, x.dtype.name, getattr(x, "weak_type", False), place


def devices_of(arguments: tuple[object, ...]) -> set[Any]:
    """Those of the arrays."""
    arrays = (x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array))
    return {device for x in arrays for device in x.devices()}


@functools.cache
def versions() -> tuple[tuple[str, str], ...]:
    """The versions of the packages below this one."""
    return tuple((name, importlib.metadata.version(name)) for name in PACKAGES)


@functools.cache
def source_digest() -> str:
    """A digest of the Python files of this package."""
    root = Path(vishwamai.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def source_of_cpu() -> tuple[str, str]:
    """Digests of this package: its Python files and the native module."""
    native = ffi.native().__file__ if ffi.why_not() is None else None
    return source_digest(), hashlib.sha256(b"" if native is None else Path(native).read_bytes()).hexdigest()


@functools.cache
def machine() -> tuple[object, ...]:
    """What XLA compiles for: the processor with its features, and the cores that its threads may use."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    lines = sorted(set(re.findall(r"^(?:model name|flags|Features|CPU part)\s*:.*$", text, re.M)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return tuple(lines), cores, ffi.isa() if ffi.why_not() is None else None
