"""The cases on TPUs you do not have: do they compile, how much memory do they take, and how long does the compiler
think they run.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

from vishwamai.aot import compile_for
from vishwamai.aot.compile.libtpu import quiet_stderr
from vishwamai.aot.schedule import inspection
from vishwamai.aot.tuning.tuner import arguments
from vishwamai.bench.budget import Budget
from vishwamai.bench.runner import by_turns
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning, KernelError, VishwamaiError
from vishwamai.core.explain import explain
from vishwamai.core.target import Target
from vishwamai.ops.catalogue import Operation


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """One case on one chip.

    Attributes:
      implementation: which one runs there.
      roofline: seconds that the chip's data-sheet peaks allow at the best.
      compile_seconds: time of the compilation on this machine; None of a stored row (`bench.schedules`).
      compiles: bool, True where the compiler made a program; `problem` says why not, or what of it is not known, such
        as why `scheduled` has no time of it.
      vmem: scoped VMEM of the largest kernel, bytes per core; None without a kernel, or where the program's text cannot
        be read.
      hbm: arguments, outputs, temporaries and code, bytes of one device; `fits`: whether the device has them.
      seconds: the program's run time by the compiler's final schedule; None where no schedule was followed, and for
        programs of XLA's own operations. `estimate` says "schedule" with it. XLA's cost model is not shown: it repeats
        a kernel's own cost estimate.
    """

    op: str
    case: str
    target: str
    implementation: str
    roofline: float
    compile_seconds: float | None = None
    compiles: bool = False
    vmem: int | None = None
    hbm: int | None = None
    fits: bool = False
    seconds: float | None = None
    estimate: str = ""
    problem: str = ""


def compile_case(operation: Operation, case: Case, target: str) -> TargetRow:
    """Compiles one case, in its full size, for one chip."""
    shapes = case.shapes()

    def call(arrays: dict[str, jax.Array]) -> object:
        return case.run(arrays)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        explained = next(c for c in explain(call, shapes, target=target).calls if c.op == operation.name)
        start = time.perf_counter()
        try:
            with quiet_stderr():  # a program that does not fit, or cannot be read back, has C++ print a stack trace
                program, problem = compile_for(call, shapes, target=target), ""
        except VishwamaiError as error:
            program, problem = None, str(error)
    seconds = time.perf_counter() - start

    chip, spec = Target.parse_chip(target), explained.spec
    dtype = next(iter(case.arrays.values())).dtype
    roofline = max(spec.flops / chip.peak_per_device(dtype), spec.bytes_moved / chip.hbm_bandwidth_per_device)
    row = TargetRow(operation.name, case.name, target, explained.runs, roofline, seconds)
    if program is None:
        return dataclasses.replace(row, problem=problem)
    try:
        kernels = [k.vmem for k in program.kernels if k.pallas]
    except KernelError as error:  # its memory is known, its kernels are not
        kernels, problem = [], str(error)
    return dataclasses.replace(
        row,
        compiles=True,
        vmem=max(kernels, default=None),
        hbm=program.memory.total,
        fits=program.memory.fits,
        problem=problem,
    )


def scheduled(rows: Sequence[TargetRow], cases: Sequence[tuple[Operation, Case]], workers: int = 2) -> list[TargetRow]:
    """The rows, those with kernels timed by the compiler's final schedule (`vishwamai.aot.inspect`).

    Takes seconds for each program that is not in its cache yet.
    """
    by_name = {(operation.name, case.name): case for operation, case in cases}
    compiled = [row for row in rows if row.vmem is not None]

    def program(row: TargetRow) -> inspection.Inspection:
        case = by_name[row.op, row.case]
        # With the values of page tables and lengths: without them the kernels' loops would not be known.
        return inspection.Inspection(lambda arrays: case.run(arrays), (arguments(case),), target=row.target)

    schedules = inspection.inspect_many([program(row) for row in compiled], workers=workers) if compiled else ()
    schedule_of = dict(zip(compiled, schedules, strict=True))
    return [_timed(row, schedule_of.get(row)) for row in rows]


def _timed(row: TargetRow, schedule: inspection.KernelSchedule | VishwamaiError | None) -> TargetRow:
    """The row with the time of its schedule, or with why it has none."""
    if isinstance(schedule, inspection.KernelSchedule) and not schedule.guessed:
        return dataclasses.replace(row, seconds=schedule.seconds, estimate="schedule")
    if row.problem or not row.compiles:
        return row
    why = (
        _NO_KERNEL
        if schedule is None
        else schedule.guessed[0]
        if isinstance(schedule, inspection.KernelSchedule)
        else str(schedule)
    )
    return dataclasses.replace(row, problem=f"not timed: {why.splitlines()[0]}")


_NO_KERNEL = "XLA's own operations, without a kernel whose schedule is followed"


def run(
    programs: Sequence[tuple[Operation, Case, str]],
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
    seconds: float | None = None,
) -> Iterator[TargetRow]:
    """A row for every (operation, case, target), the first case of every operation first. A program that would not end
    within `seconds` (None = no bound), were it as slow as the slowest so far, is not begun, and its row is missing.
    """
    bound = Budget(seconds)
    order = {(op.name, case.name): i for i, (op, case) in enumerate(by_turns(list(_cases(programs))))}
    ordered = sorted(programs, key=lambda program: order[program[0].name, program[1].name])
    for i, (operation, case, target) in enumerate(ordered):
        if not bound.has_room:
            break
        on_case(i, len(ordered), f"{target}: {operation.name}: {case.name}")
        start = time.perf_counter()
        row = compile_case(operation, case, target)
        bound.took(time.perf_counter() - start)
        yield row
    on_case(len(ordered), len(ordered), "done")


def _cases(programs: Sequence[tuple[Operation, Case, str]]) -> Iterator[tuple[Operation, Case]]:
    """The cases of the programs, each once."""
    seen = set()
    for operation, case, _ in programs:
        if (operation.name, case.name) not in seen:
            seen.add((operation.name, case.name))
            yield operation, case
