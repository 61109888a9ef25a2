"""The memory of a program, probed or verified by the compiler in its process."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vishwamai.aot.compile import answers
from vishwamai.aot.compile.child import Answer, Child, Ended, Question
from vishwamai.aot.compile.diagnose import as_error
from vishwamai.aot.compile.options.config import RuntimeConfig, compiler_options_of
from vishwamai.aot.compile.traced import Program, trace
from vishwamai.aot.schedule.dump import dump_flags
from vishwamai.core import caches
from vishwamai.core.arguments import checked
from vishwamai.core.errors import DeviceError, KernelError, UnsupportedError
from vishwamai.core.figures import Estimate
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.planning.memory.peak import PeakMemory, peak_memory

Options = Mapping[str, "str | bool"]
"""Options of the compiler, checked by `compiler_options_of`."""

PROBE_MIB = 1
"""The HBM that a probe allows first, in MiB: the compiler declines almost every program, and says what it needs, before
it generates code.
"""

AGAIN = 0.99
"""The HBM that a probe allows then, as a share of what the compiler said: it saves memory, at the cost of time, as long
as a program does not fit, and a mixture of experts took 15.7 % less than its compiled program.
"""

FOLDER = "plans"
"""The folder of the cache `aot` for the answers about programs."""

TEXT = "program.hlo"
"""The file of the optimised program, next to the bundles."""


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """HBM of one device for one program.

    Attributes:
      target: the chip or slice.
      total: bytes while the program runs, its arguments included; its level says how they were found.
      limit: bytes that the compiler lets one device use.
      parts: bytes of a compiled program: "arguments", "outputs", "temporaries", "code" and "aliased" (outputs that
        lie in donated arguments, which `total` counts once). Empty for a probe.
      allocations: largest allocations of a program that does not fit, where the compiler names them.
    """

    target: str
    total: Estimate
    limit: int
    parts: Mapping[str, Estimate] = dataclasses.field(default_factory=dict)
    allocations: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one device holds it."""
        return self.total.value <= self.limit

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {human(part.value)}" for name, part in self.parts.items())
        fits = "fits" if self.fits else "does not fit"
        return f"{self.target}: {self.total} of {human(self.limit)}: {fits}{f'; {parts}' if parts else ''}"


@checked
class Compiler:
    """Asks the compiler about programs, in its process; a context manager ends that.

    Args:
      timeout: seconds after which a question fails.
    """

    def __init__(self, timeout: float = 900.0):
        self._child = Child(timeout)

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, *error: object) -> None:
        running = self._child.running
        self._child.__exit__(*error)
        if running:
            caches.trim("aot")

    def probe(self, program: Program, options: Options | None = None) -> ProgramMemory:
        """What the compiler says that the program needs, before it compiles it; `options`: of the compiler, checked.

        Raises:
          UnsupportedError, KernelError: the compiler rejects the program, or ended its process; the text says which.
        """
        first = self._ask(program, PROBE_MIB, options)
        if "memory" in first:  # a program so small that it fits
            return memory_of(program.target, first["memory"])
        answer = self._ask(program, _allowed_again(program, first["needed"]), options)
        total = Estimate(_probed(first["needed"], _needed(program, answer), program.limit), "probe")
        return ProgramMemory(program.target, total, program.limit)

    def verify(self, program: Program, options: Options | None = None) -> ProgramMemory:
        """The memory of the program that the compiler makes; a program that does not fit has the compiler's total.

        Raises:
          VishwamaiError: as `probe`.
        """
        return verified_memory(program, self._ask(program, None, options))

    @contextlib.contextmanager
    def dumped(self, program: Program) -> Iterator[tuple[Answer, pathlib.Path]]:
        """Compiles the program, with what the compiler writes of it: its answer, and a directory that has the bundles
        and, where it can be read, the optimised program as `TEXT`. The directory is removed after the block.

        Raises:
          VishwamaiError: as `probe`.
        """
        self._child.stop()  # the options that make libtpu write are read when it is loaded
        with _scratch(program) as directory:
            with Child(self._child.timeout, dump_flags(directory)) as child:
                answer = _answer(child, program, {"text": str(directory / TEXT)})
            answers.write(FOLDER, f"{program.fingerprint}-full", answer)
            _raise_rejected(answer)
            yield answer, directory

    def peak(self, program: Program, options: Options | None = None) -> PeakMemory:
        """What lies in the memory at the program's peak, by the live ranges of a probe.

        Raises:
          VishwamaiError: as `probe`; also KernelError: the installed libtpu writes no live ranges that can be read.
        """
        first = self._ask(program, PROBE_MIB, options)
        allowed = _allowed_again(program, first["needed"]) if "needed" in first else PROBE_MIB
        answer = self._ask(program, allowed, options, live_ranges=True)
        return peak_memory(program, _needed(program, answer), answer["peak"])

    def _ask(self, program: Program, hbm_mib: int | None, options: Options | None, live_ranges: bool = False) -> Answer:
        options = dict(options or {})
        key = f"{program.fingerprint}-{'full' if hbm_mib is None else hbm_mib}{'-peak' if live_ranges else ''}"
        if options:
            key += f"-{hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()[:16]}"
        answer = answers.read(FOLDER, key)
        if answer is None or not _sound(answer) or (live_ranges and not {"rejected", "peak"} & answer.keys()):
            answer = self._answer(program, hbm_mib, options, live_ranges)
            answers.write(FOLDER, key, answer)
        _raise_rejected(answer)
        return answer

    def _answer(self, program: Program, hbm_mib: int | None, options: Options, live_ranges: bool) -> Answer:
        with _scratch(program) as directory:
            more = {"live_ranges": str(directory / "dump")} if live_ranges else {}
            return _answer(self._child, program, {"hbm_mib": hbm_mib, **more}, options)


def _answer(child: Child, program: Program, more: Question, options: Options | None = None) -> Answer:
    """The answer of the compiler's process about a program.

    Args:
      more: entries of the question. options: of the compiler, in addition to the program's.
    """
    with _scratch(program) as directory:
        question = program.question(directory) | more
        question["options"] |= options or {}
        try:
            return child.ask(question)
        except Ended as end:
            raise KernelError(f"planning {program.name!r} for {program.target} failed: {end}") from None


@contextlib.contextmanager
def _scratch(program: Program) -> Iterator[pathlib.Path]:
    """A directory for the files of a question, removed after the block.

    Raises:
      DeviceError: it cannot be written, as on a full disk.
    """
    try:
        with tempfile.TemporaryDirectory(prefix="vishwamai-plan-") as directory:
            yield pathlib.Path(directory)
    except OSError as error:
        raise DeviceError(
            f"planning {program.name!r} for {program.target}: the compiler's files cannot be written: {error}. Free "
            "space there, or let TMPDIR name another directory."
        ) from error


def _sound(answer: dict[str, object]) -> bool:
    """Whether a kept answer has the form of one."""
    memory = answer.get("memory")
    if isinstance(memory, dict):
        return all(isinstance(memory.get(name), int) for name in _PARTS)
    if isinstance(answer.get("needed"), int):
        return isinstance(answer.get("allocations"), list)
    return isinstance(answer.get("rejected"), str)


_PARTS = ("arguments", "outputs", "temporaries", "code", "aliased")


def _raise_rejected(answer: dict[str, Any]) -> None:
    """Raises what keeps a program from compiling, where its answer says so and memory is not the reason."""
    if "rejected" not in answer or "needed" in answer:
        return
    if (answer.get("problem") or {}).get("kind") in ("mosaic", "pallas", "sharding"):
        raise UnsupportedError(answer["rejected"])
    raise as_error(None, answer["rejected"])


def _allowed_again(program: Program, needed: int) -> int:
    """The HBM that the second question of a probe allows, in MiB: a little less than the answer to the first, and never
    more than the device has.
    """
    return max(PROBE_MIB, min(int(AGAIN * needed), program.limit) >> 20)


def _needed(program: Program, answer: dict[str, Any]) -> float:
    """Bytes that an answer says, of a program that was declined or compiled."""
    return answer["needed"] if "needed" in answer else memory_of(program.target, answer["memory"]).total.value


def _probed(first: float, second: float, limit: int) -> float:
    """What a program takes, by both answers: one that can be made to fit takes no more than the device has.

    >>> _probed(9.2, 10.6, 16), _probed(15.5, 16.5, 16), _probed(18.0, 18.4, 16)
    (10.6, 16, 18.4)
    """
    return min(max(first, second), limit) if first <= limit else second


def verified_memory(program: Program, answer: dict[str, Any]) -> ProgramMemory:
    """The memory of an answer about the compiled program."""
    if "memory" in answer:
        return memory_of(program.target, answer["memory"])
    needed = Estimate(answer["needed"], "verified")
    return ProgramMemory(program.target, needed, program.limit, allocations=tuple(answer["allocations"]))


def memory_of(target: str, memory: Mapping[str, int]) -> ProgramMemory:
    """The memory of a program compiled for a target, in bytes by the names of `ProgramMemory.parts`."""
    parts = {name: Estimate(memory[name], "verified") for name in _PARTS}
    total = sum(memory[name] for name in _PARTS[:4]) - memory["aliased"]
    limit = Target.parse_chip(target).hbm_usable_bytes
    return ProgramMemory(target, Estimate(total, "verified"), limit, parts)


@checked
def probe(
    fn: Callable[..., object],
    *args: object,
    target: str = "v5e",
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None,
    **kwargs: object,
) -> ProgramMemory:
    """The HBM that `fn(*args, **kwargs)` needs on each device of a target, asked of its compiler without compiling.

    The compiler is told of a device with almost no memory. It declines the program after it has scheduled it, and
    names the total. That takes seconds for programs that take minutes to compile. Its error is in
    docs/notes/planning_programs.md.
    libtpu runs in a process of its own. Answers are kept in the cache of `vishwamai.aot`.

    Args:
      fn: a function, jitted or not; a jitted one's donated arguments stay donated.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s, with shardings where the target has many devices.
      target: "v5e" for one device, "v5e:4x4" for all devices of a slice.
      compiler_options: options of libtpu's compiler, as of `vishwamai.aot.compile_for`.
      **kwargs: keyword arguments of `fn`.

    Raises:
      DeviceError: libtpu is missing, or the target is unknown.
      UnsupportedError: the compiler cannot build an operation of a kernel, or split a kernel over devices.
      KernelError: the compiler rejects for another reason, or ended its process; the text gives its words.
      ConfigError: the installed libtpu lacks an option, or does not take its value.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    >>> found = probe(lambda a: (a @ a).sum(), x, target="v5e")  # doctest: +SKIP
    >>> found.fits, found.total.level  # doctest: +SKIP
    (True, 'probe')
    """
    options = compiler_options_of("probe", compiler_options)
    program = trace(fn, *args, target=target, **kwargs)
    with Compiler() as compiler:
        return compiler.probe(program, options)


@checked
def verify(
    fn: Callable[..., object],
    *args: object,
    target: str = "v5e",
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None,
    **kwargs: object,
) -> ProgramMemory:
    """The HBM of `fn(*args, **kwargs)` compiled for a target, to the byte; takes as long as the compilation.

    Args, Raises: as `probe`.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    >>> found = verify(lambda a: a @ a, x, target="v5e")  # doctest: +SKIP
    >>> int(found.parts["arguments"].value) >> 20, found.total.level  # doctest: +SKIP
    (2, 'verified')
    """
    options = compiler_options_of("verify", compiler_options)
    program = trace(fn, *args, target=target, **kwargs)
    with Compiler() as compiler:
        return compiler.verify(program, options)
