"""How a program would run on a TPU that is not there: cycles, units, waiting, what bounds it. An estimate, from the compiler's own schedule.

`inspect` compiles the function for the target, follows the final bundles of every program of the executable (see `interpret`), and sets the
time against the roofline. How far it can be trusted is measured in docs/aot.md.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vishwamai.aot.advice import advise
from vishwamai.aot.diagnose import human
from vishwamai.aot.dump import Dump, Job, dump, dump_many, prepare
from vishwamai.aot.roofline import Roofline, roofline
from vishwamai.aot.simulate import TOP, ProgramTime, Simulation, simulate
from vishwamai.core.errors import ShapeError, VishwamaiError
from vishwamai.core.hardware import Chip

if TYPE_CHECKING:
    import os

__all__ = ["Case", "Schedule", "inspect", "inspect_many"]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The estimated run of one program on one jax device.

    Attributes:
        name: what was inspected; `target`: for what.
        simulation: cycles by program and block, on the slowest core.
        roofline: the bound that the time is set against; `flops_source`: where its FLOP come from.
        vmem: bytes of scoped VMEM by kernel; `pallas`: names of the Pallas kernels.
        warning: what the compiler's output lacks, or None.
    """

    name: str
    target: str
    simulation: Simulation
    roofline: Roofline
    flops_source: str
    vmem: Mapping[str, int]
    pallas: frozenset[str]
    warning: str | None = None

    @property
    def chip(self) -> Chip:
        """The chip."""
        return self.simulation.chip

    @property
    def seconds(self) -> float:
        """Estimated device time: the slowest core's cycles at the chip's clock."""
        return self.simulation.seconds

    @property
    def efficiency(self) -> float:
        """Roofline over estimate."""
        return self.roofline.seconds / self.seconds if self.seconds else 0.0

    @property
    def programs(self) -> tuple[ProgramTime, ...]:
        """The programs, slowest first."""
        return tuple(sorted(self.simulation.programs, key=lambda program: -program.cycles))

    @property
    def guessed(self) -> tuple[str, ...]:
        """What could not be followed; where this is not empty, the time is less certain than docs/aot.md says."""
        return tuple(
            f"{what}{f' ({count} times)' if count > 1 else ''}"
            for what, count in self.simulation.unknown.items()
            if not what.startswith(f"{TOP}: copy") and not what.startswith(f"{TOP}: size")
        )

    def kind(self, program: ProgramTime) -> str:
        """ "pallas", "xla" or "top level"."""
        return "top level" if program.name == TOP else "pallas" if program.name in self.pallas else "xla"

    def advice(self) -> tuple[str, ...]:
        """What bounds the program and what to try, most important first."""
        return advise(self)

    def table(self) -> str:
        """The schedule as plain text."""
        bound, chip = self.roofline, self.chip
        lines = [
            f"{self.name} on {self.target} (estimate from the compiled schedule; see docs/aot.md for its error)",
            f"  time       {_time(self.seconds)} at {chip.clock / 1e9:.2f} GHz; roofline {_time(bound.seconds)} by {bound.by}; "
            f"efficiency {self.efficiency:.0%}",
            f"  work       {bound.flops / 1e9:.2f} GFLOP ({self.flops_source}), {human(bound.bytes)} useful, "
            f"{human(self.simulation.hbm_bytes)} moved; {bound.flops / self.seconds / 1e12 if self.seconds else 0:.1f} TFLOP/s",
        ]
        if len(self.simulation.core_cycles) > 1:
            lines.append("  cores      " + ", ".join(f"{cycles:.0f} cycles" for cycles in self.simulation.core_cycles))
        lines.append("")
        lines += _columns(self)
        for program in self.programs[:3]:
            if program.blocks and program.name != TOP:
                hot = program.blocks[0]
                share = hot.cycles / program.cycles if program.cycles else 0
                lines.append(
                    f"  hottest block of {program.name}: {hot.address:#x}, {hot.length} bundles x {hot.passes}"
                    f"{f' + {hot.stall:.0f} stalled' if hot.stall else ''}, {share:.0%} of its time"
                )
        lines += ["", *(f"  * {advice}" for advice in self.advice())]
        if self.guessed:
            lines.append("  guessed: " + "; ".join(self.guessed[:4]) + (" ..." if len(self.guessed) > 4 else ""))
        if self.warning:
            lines.append(f"  note: {self.warning}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "name": self.name,
            "target": self.target,
            "estimate_seconds": self.seconds,
            "cycles": self.simulation.cycles,
            "core_cycles": list(self.simulation.core_cycles),
            "efficiency": self.efficiency,
            "roofline": dataclasses.asdict(self.roofline) | {"seconds": self.roofline.seconds, "by": self.roofline.by},
            "flops_source": self.flops_source,
            "hbm_bytes": self.simulation.hbm_bytes,
            "advice": list(self.advice()),
            "guessed": list(self.guessed),
            "programs": [
                {
                    "name": program.name,
                    "kind": self.kind(program),
                    "calls": program.calls,
                    "cycles": program.cycles,
                    "dma_wait": program.dma_wait,
                    "matrix_stall": program.matrix_stall,
                    "spills": program.spills,
                    "fills": program.fills,
                    "vmem": self.vmem.get(program.name),
                    "utilisation": {unit: round(program.utilisation(unit), 4) for unit in SHOWN_UNITS},
                }
                for program in self.programs
            ],
        }

    def report(self, path: str | os.PathLike[str]) -> None:
        """Writes a self-contained HTML page: the timeline of units per block, the roofline, what bounds it and what to try.

        Raises:
            DeviceError: plotly is not installed.
        """
        from vishwamai.aot.report import write

        write(self, path)


SHOWN_UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.2f} us"


def _columns(schedule: Schedule) -> list[str]:
    header = [
        "program",
        "kind",
        "calls",
        "time",
        "share",
        *(u.removeprefix("V") if u != "VALU" else u for u in SHOWN_UNITS),
    ]
    header += ["dma wait", "mxu stall", "spill/fill", "VMEM"]
    rows = []
    total = schedule.simulation.cycles or 1
    for program in schedule.programs[:12]:
        vmem = schedule.vmem.get(program.name)
        cycles = program.cycles or 1
        rows.append(
            [
                program.name,
                schedule.kind(program),
                str(program.calls),
                _time(program.cycles / schedule.chip.clock),
                f"{program.cycles / total:.0%}",
                *(f"{program.utilisation(unit):.0%}" for unit in SHOWN_UNITS),
                f"{program.dma_wait / cycles:.0%}",
                f"{program.matrix_stall / cycles:.0%}",
                f"{program.spills}/{program.fills}",
                human(vmem) if vmem is not None else "",
            ]
        )
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    left = 2
    return [
        "  " + "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths)))
        for row in [header, *rows]
    ]


@dataclasses.dataclass(frozen=True)
class Case:
    """One program to inspect: `inspect`'s arguments."""

    fn: Callable[..., Any]
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    target: str = "v5e"
    flops: float | None = None
    nbytes: float | None = None
    dtype: str | None = None
    name: str | None = None


def _custom_calls(found: Dump) -> frozenset[str]:
    """Names of the kernels by the top-level program's own remarks, for executables whose text cannot be read."""
    top = found.sources.get(TOP)
    return frozenset(re.findall(r"/\* %([\w.\-]+) = custom-call\(", top.bundles)) if top else frozenset()


def _schedule(case: Case, job: Job, found: Dump) -> Schedule:
    simulation = simulate(found.sources, found.chip, job.known, found.twins)
    issued = sum(simulation.flops.values())
    counted = found.cost.get("flops") or 0.0
    if case.flops is not None:
        flops, source = case.flops, "given"
    elif counted >= 0.25 * issued and not simulation.looped:
        # Less, and a kernel without a cost estimate hides from the compiler's count, which takes a loop's body once.
        flops, source = counted, "counted by the compiler"
    else:
        flops, source = issued, "as issued to the matrix units, padding included"
    # float32 products are several bfloat16 passes: as issued they run at that rate, as useful work at a sixth of it.
    kinds = simulation.flops or {"bf16": 1.0}
    dtype = case.dtype or max(kinds, key=lambda kind: kinds[kind]).replace("f32", "bf16")
    nbytes = float(job.io_bytes) if case.nbytes is None else case.nbytes
    return Schedule(
        name=case.name or getattr(case.fn, "__name__", "program"),
        target=case.target,
        simulation=simulation,
        roofline=roofline(found.chip, flops, nbytes, dtype),
        flops_source=source,
        vmem={kernel["name"]: kernel["vmem"] for kernel in found.kernels},
        pallas=frozenset(kernel["name"] for kernel in found.kernels if kernel["pallas"]) or _custom_calls(found),
        warning=found.warning,
    )


def inspect(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    target: str = "v5e",
    *,
    kwargs: Mapping[str, Any] | None = None,
    flops: float | None = None,
    nbytes: float | None = None,
    dtype: str | None = None,
    name: str | None = None,
) -> Schedule:
    """Estimates how `fn(*args, **kwargs)` runs on a TPU that need not be here, from the schedule that its compiler makes.

    Args:
        fn: a function, jitted or not.
        args: its arguments: arrays or `jax.ShapeDtypeStruct`s. Values of integer arrays that steer kernels (page tables, group sizes) are
            used; of a ShapeDtypeStruct they are unknown, and loops that hang on them are reported in `Schedule.guessed`.
        target: "v4", "v5e", "v5p", "v6e", "tpu7x", or a topology with sharded arguments (then for one of its devices; the time of
            communication is not counted).
        kwargs: keyword arguments.
        flops: useful FLOP of the call; default: the compiler's count, or what the matrix units are given.
        nbytes: useful bytes to and from HBM; default: all arguments and results once.
        dtype: whose peak the roofline takes, "bf16", "int8", "fp8", "float32"; default: that of the products.
        name: for the table; default: the function's.

    Raises:
        DeviceError, UnsupportedError, KernelError: as `compile_for`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
        >>> schedule = inspect(lambda a, b: a @ b, (x, x), "v5e")  # doctest: +SKIP
        >>> print(schedule.table())  # doctest: +SKIP
    """
    case = Case(fn, args, kwargs or {}, target, flops, nbytes, dtype, name)
    job = prepare(fn, args, case.kwargs, target)
    return _schedule(case, job, dump(job))


def inspect_many(cases: Sequence[Case], timeout: float = 900.0, workers: int = 1) -> list[Schedule | VishwamaiError]:
    """`inspect` for several cases of one or more targets, with up to `workers` compiler processes for all that are not in the cache.

    A case that the compiler refuses gives its error in place of a schedule. `timeout`: seconds for each process.

    Raises:
        ShapeError: there are no cases.
    """
    if not cases:
        raise ShapeError("inspect_many: `cases` is empty; pass at least one Case.")
    jobs = [_prepared(case) for case in cases]
    found = dump_many([job for job in jobs if isinstance(job, Job)], timeout, workers)
    results: list[Schedule | VishwamaiError] = []
    for case, job in zip(cases, jobs):
        if isinstance(job, Job):
            one = next(found)
            results.append(one if isinstance(one, VishwamaiError) else _schedule(case, job, one))
        else:
            results.append(job)
    return results


def _prepared(case: Case) -> Job | VishwamaiError:
    try:
        return prepare(case.fn, case.args, case.kwargs, case.target)
    except VishwamaiError as error:
        return error


def to_json(schedule: Schedule) -> str:
    """`Schedule.as_dict` as text."""
    return json.dumps(schedule.as_dict(), indent=1)
