"""One program of the engine: compiled ahead or by its first call, or read where an earlier start stored it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from vishwamai.core.execute import only_for, platform_of
from vishwamai.core.qtensor import bits
from vishwamai.core.types import PyTree
from vishwamai.inference import kept_programs
from vishwamai.inference.sharding import on_mesh

COMPILE = ("ahead", "lazy")
"""When programs are compiled: all before the first request, or most of them on demand."""


Kernels = Callable[[], contextlib.AbstractContextManager[object]]
"""Puts a configuration of kernels in force, such as `Optimization.kernels`."""


Store = Callable[
    [str, jax.stages.Wrapped, tuple[PyTree, ...], Callable[[], None], "Mesh | None"], Callable[..., PyTree]
]
"""Gives the compiled program of (its name, the jitted function, the arguments, what is called where it is read, the
mesh).
"""


def cached(
    name: str,
    function: jax.stages.Wrapped,
    arguments: tuple[PyTree, ...],
    on_read: Callable[[], None],
    mesh: Mesh | None = None,
) -> Callable[..., PyTree]:
    """The `Store` of each start: the program is compiled, or read where an earlier start kept it."""
    return kept_programs.compiled(function, arguments, on_read)


class CompiledFunction:
    """A function that is compiled once, for the arguments of one shape: by `compile`, or by its first call.

    Args:
      name: text for the progress report.
      function: jitted, as `kept_programs.compiled` takes it.
      mesh: mesh of the traced program.
      kernels: the configuration of kernels for which it is traced.
      report: called with the name before it is compiled.
      store: callable that compiles it, or reads it.

    Attributes:
      from_cache: it was read, not compiled.
    """

    def __init__(
        self,
        name: str,
        function: jax.stages.Wrapped,
        mesh: Mesh | None,
        kernels: Kernels,
        report: Callable[[str], None],
        store: Store = cached,
    ):
        self.name, self._function, self._mesh, self._kernels, self._report = name, function, mesh, kernels, report
        self._store = store
        self._compiled: Callable[..., PyTree] | None = None
        self._platform: str | None = None
        self.from_cache = False

    def compile(self, *arguments: PyTree) -> Callable[..., PyTree]:
        """Compiles it for arguments of these shapes; the compiled function."""
        self._report(self.name)
        self._platform = platform_of(arguments)
        with self._traced():
            if _has_four_bits(arguments):
                self._function.lower(*arguments).compile()
                self._compiled = self._jitted
            else:
                self._compiled = self._store(self.name, self._function, arguments, self._read, self._mesh)
        return self._compiled

    def __call__(self, *arguments: PyTree) -> PyTree:
        compiled = self._compiled
        if compiled is None:
            compiled = self.compile(*arguments)
        return compiled(*arguments)

    def _read(self) -> None:
        self.from_cache = True

    def _jitted(self, *arguments: PyTree) -> PyTree:
        with self._traced():
            return self._function(*arguments)

    @contextlib.contextmanager
    def _traced(self) -> Iterator[None]:
        """What the function is traced under: the same for `compile` and each call, which so find one program."""
        with on_mesh(self._mesh), self._kernels(), only_for(self._platform):
            yield


def _has_four_bits(arguments: PyTree) -> bool:
    """Whether 4-bit arrays of the CPU are among them. A compiled program declines them where they are committed to
    devices, because JAX reports another layout for them than for its arguments; the jitted function, which finds the
    same program, takes them.
    """
    arrays = (x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array))
    return jax.default_backend() == "cpu" and any(bits(x.dtype) < 8 for x in arrays)
