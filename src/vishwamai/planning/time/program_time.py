"""`step_time`: how long a program takes on each device of a TPU slice, from the compiled program.

Kernels take the time of their schedules (`vishwamai.aot.schedule`), the compiler's own fusions the cycles that it
estimates, collectives that of the links; `planning.time.timeline` puts them together. docs/planning-time.md compares
the sum with published steps.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import pathlib
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vishwamai.aot.compile import answers, libtpu
from vishwamai.aot.compile.traced import Program, ScalarOperands, devices_in_order, trace
from vishwamai.aot.schedule.dump import read_sources
from vishwamai.aot.schedule.simulate import Simulator
from vishwamai.aot.schedule.twins import twins
from vishwamai.core.arguments import checked
from vishwamai.core.errors import DeviceError
from vishwamai.core.figures import Estimate
from vishwamai.core.hlo import parse_module
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.planning.memory.compiler import FOLDER, TEXT, Compiler, ProgramMemory, memory_of, verified_memory
from vishwamai.planning.time import calibration
from vishwamai.planning.time.collectives import link_seconds
from vishwamai.planning.time.timeline import PARTS, Follower, Timeline, family

FORMAT = 7
"""Counts up when a timeline is followed in another way, so that kept ones are not read."""

_SHOWN = 8
_WIDTH = 78
"""Columns of a note, two less than a terminal's: `vishwamai plan` indents them."""


@dataclasses.dataclass(frozen=True)
class Row:
    """The calls of one kernel, fusion or kind of collective, all together.

    Attributes:
      part: one of `timeline.PARTS`. name: without number. seconds: of all calls, hidden ones too. calls: how many.
    """

    part: str
    name: str
    seconds: float
    calls: int


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a compiled program on one device of its target; print it for the table.

    Attributes:
      target: the chip or slice.
      step: seconds, the sum of `parts`.
      parts: seconds that each of `timeline.PARTS` takes: kernels, fusions, and waiting for collectives, copies, the
        host's memory and other stages. Of a pipeline they are those of the stage that is busy longest.
      hidden: seconds of collectives and copies that go on behind other work.
      rows: shares of the time, the longest first.
      memory: HBM of the same compiled program.
      missing: operations whose time is not in the sum.
      uncertain: figures that a schedule does not tell: loops and copies that depend on data.
      kernel_factor: factor of the kernels' part, as `vishwamai calibrate` measured; None without it.
    """

    target: str
    step: Estimate
    parts: Mapping[str, Estimate]
    hidden: Mapping[str, Estimate]
    rows: tuple[Row, ...]
    memory: ProgramMemory
    missing: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    kernel_factor: float | None = None

    def __str__(self) -> str:
        least = "at least " if self.missing else ""
        lines = [f"{self.target}: {least}{self.step} on each device"]
        total = self.step.value or 1.0
        for name, part in self.parts.items():
            hidden = self.hidden[name].value if name in self.hidden else 0.0
            if not (part.value or hidden) and name in ("host", "stages"):
                continue  # most programs leave the host alone and have no stages
            behind = f"  and {hidden * 1e3:.3f} ms hidden" if hidden else ""
            lines.append(f"  {name:<12}{part.value * 1e3:>12.3f} ms {part.value / total:>6.1%}{behind}")
        lines += [
            f"    {row.name[:40]:<40}{row.seconds * 1e3:>12.3f} ms {row.calls:>6} calls" for row in self.rows[:_SHOWN]
        ]
        if self.kernel_factor is not None:
            lines.append(f"  kernels are multiplied with {self.kernel_factor:.3f}, which was measured")
        notes = [f"not in the sum: {text}" for text in self.missing]
        notes += [f"less certain: {text}" for text in self.uncertain]
        for note in notes:
            lines += textwrap.wrap(note, _WIDTH, initial_indent="  ", subsequent_indent="    ")
        return "\n".join(lines)


@checked
def step_time(fn: Callable[..., object], *args: object, target: str = "v5e", **kwargs: object) -> StepTime:
    """Estimates how long `fn(*args, **kwargs)` takes on each device of a target, from its compiled program.

    The program is compiled, and followed in the order of its schedule. Every loop counts as often as it runs. A
    collective takes what `parallel.estimate_collective` says of its devices, at the least. An asynchronous one costs
    what the work between its start and its end does not hide. Nothing runs, so the level of the result is "verified".
    docs/planning-time.md says what it leaves out and how far it is from published steps.

    Args:
      fn: a function, jitted or not.
      *args: its arguments: arrays or `jax.ShapeDtypeStruct`s, with shardings where the target has many devices.
      target: "v5e" for one device, "v5e:4x4" for all devices of a slice.
      **kwargs: keyword arguments of `fn`.

    Raises:
      DeviceError: libtpu is missing or writes no schedules, the target is unknown, or the program does not fit.
      UnsupportedError, KernelError: as `probe`.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> found = step_time(lambda a, b: a @ b, x, x, target="v5e")  # doctest: +SKIP
    >>> found.step.level, found.step.value < 0.002  # doctest: +SKIP
    ('verified', True)
    """
    with Compiler() as compiler:
        memory, estimate = time_program(compiler, trace(fn, *args, target=target, **kwargs))
    if estimate is None:
        raise DeviceError(f"step_time: the program needs {memory.total}, but {target} has {human(memory.limit)}.")
    return estimate


def time_program(compiler: Compiler, program: Program) -> tuple[ProgramMemory, StepTime | None]:
    """The memory of the compiled program, and its time; no time where it does not fit.

    Raises:
      VishwamaiError: as `step_time`, for a program that fits.
    """
    key = f"{program.fingerprint}-time{FORMAT}{_digest(program.scalars)}"
    stored, full = (answers.read(FOLDER, name) for name in (key, f"{program.fingerprint}-full"))
    if full is not None and "needed" in full:  # it does not fit, which is all there is to know
        return verified_memory(program, full), None
    if stored is None or not {"memory", "time"} <= stored.keys():
        with compiler.dumped(program) as (answer, directory):
            stored = dict(answer)
            if "memory" in stored:
                stored["time"] = _follow(
                    directory, program.target, devices_in_order(program), program.scalars, program.ticks
                )
        if "time" in stored:
            answers.write(FOLDER, key, stored)
    memory = verified_memory(program, stored)
    return memory, _read(program.target, memory, stored["time"]) if "time" in stored else None


def _digest(scalars: ScalarOperands) -> str:
    """Of the tables that steer kernels; nothing where none are known."""
    if not scalars:
        return ""
    tables = [
        (name, call, i, array.tolist())
        for name, calls in scalars.items()
        for call, of in enumerate(calls)
        for i, array in of.items()
    ]
    return f"-{hashlib.sha256(json.dumps(sorted(tables)).encode()).hexdigest()[:16]}"


def written_time(
    directory: pathlib.Path, target: str, devices: Sequence[object], memory: Mapping[str, int]
) -> StepTime:
    """The time of a program that another process compiled for a target.

    Args:
      directory: files that libtpu wrote with the options `aot.schedule.dump.dump_flags`, and the optimised program as
        `compiler.TEXT`.
      target: target of `step_time`.
      devices: result of `aot.compile.libtpu.devices_for`, in the order of the program's mesh.
      memory: bytes, by the names of `ProgramMemory.parts`.

    Raises:
      DeviceError: the directory has no schedules.
    """
    return _read(target, memory_of(target, memory), _follow(directory, target, devices))


def _follow(
    directory: pathlib.Path,
    target: str,
    devices: Sequence[object],
    scalars: ScalarOperands | None = None,
    ticks: np.ndarray | None = None,
) -> dict[str, object]:
    """The timeline of what the compiler wrote, as plain values; `scalars` and `ticks`: attributes of `Program`."""
    schedule_text = directory / TEXT
    estimated = schedule_text.exists()
    text = schedule_text if estimated else next(directory.glob("*-TLP-hlo.txt"), None)
    sources = read_sources(directory)
    if text is None or not sources:
        raise DeviceError(
            f"step_time: libtpu {libtpu.versions()['libtpu']} wrote no schedules for {target}; 0.0.51 is known to."
        )
    module, chip = parse_module(text.read_text()), Target.parse_chip(target)
    schedules = _Schedules(Simulator(sources, chip, scalars or {}, twins(module)))
    follower = Follower(module, chip, schedules.cycles, link_seconds(module, devices), ticks)
    timeline = follower.follow()
    names = ", ".join(f"{name} ({count})" for name, count in schedules.unknown.items())
    uncertain = [f"branches and copies that depend on data: {names}"] if names else []
    if ticks is not None and not follower.ticked:
        uncertain.append("the loop over the pipeline's ticks was not found, so each tick counts its longest action")
    if follower.offloaded:
        uncertain.append("collectives on the SparseCores take the links' time at the least, and share HBM with kernels")
    if not estimated:
        uncertain.append("the compiler's cycles cannot be read back, so its fusions have the time of their schedules")
    return _plain(timeline) | {"uncertain": uncertain}


class _Schedules:
    """The cycles of one call of an instruction, by the schedule of its program. Each is followed once, or once for each
    call whose tables are known.
    """

    def __init__(self, simulator: Simulator):
        self.simulator = simulator
        self.cycles_by_call: dict[str, float] = {}
        self.unknown: collections.Counter[str] = collections.Counter()

    def cycles(self, name: str) -> float | None:
        """None where the compiler wrote no schedule for it."""
        program = self.simulator.program_of(name)
        if program is None or program not in self.simulator.sources:
            return None
        call = name if self.simulator.known_of(name) else program
        if call not in self.cycles_by_call:
            simulation = self.simulator.simulate(only=call)
            self.cycles_by_call[call] = simulation.cycles
            if simulation.unknown:
                self.unknown[family(program)] += sum(simulation.unknown.values())
        return self.cycles_by_call[call]


def _plain(timeline: Timeline) -> dict[str, object]:
    missing = [f"{label}{f' ({count} times)' if count > 1 else ''}" for label, count in timeline.missing.items()]
    if timeline.host_bytes:
        missing.append(f"{human(timeline.host_bytes)} to and from the host's memory, whose bandwidth no source states")
    rows = sorted(timeline.by_name.items(), key=lambda row: -row[1][0])
    return {
        "exposed": dict(timeline.exposed),
        "hidden": dict(timeline.hidden),
        "rows": [[part, name, seconds, calls] for (part, name), (seconds, calls) in rows],
        "missing": missing,
    }


def _read(target: str, memory: ProgramMemory, plain: Mapping[str, Any]) -> StepTime:
    def seconds(value: float) -> Estimate:
        return Estimate(value, "verified", "s")

    measured = calibration.in_use(Target.parse_chip(target).name)
    factor = None if measured is None else measured.factor
    exposed = dict(plain["exposed"])
    more = exposed.get("kernels", 0.0) * ((factor or 1.0) - 1.0)
    busy = sum(value for name, value in exposed.items() if name != "stages")
    exposed["kernels"] = exposed.get("kernels", 0.0) + more
    exposed["stages"] = exposed.get("stages", 0.0) * (1 + more / (busy or 1.0))  # they wait for kernels alike
    parts = {name: seconds(exposed.get(name, 0.0)) for name in PARTS}
    return StepTime(
        target=target,
        step=seconds(sum(part.value for part in parts.values())),
        parts=parts,
        hidden={name: seconds(value) for name, value in plain["hidden"].items()},
        rows=tuple(Row(*row) for row in plain["rows"]),
        memory=memory,
        missing=tuple(plain["missing"]),
        uncertain=tuple(plain["uncertain"]),
        kernel_factor=factor,
    )
