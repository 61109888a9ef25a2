"""The cases on TPUs that are not here: do they compile, how much memory do they take, and how long does the compiler think they run."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax

from vishwamai.aot import compile_for, schedule
from vishwamai.bench.catalogue import Operation
from vishwamai.core.cases import Case
from vishwamai.core.errors import FallbackWarning, KernelError, VishwamaiError
from vishwamai.core.explain import explain
from vishwamai.core.hardware import chip


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """One case on one chip.

    Attributes:
      implementation: which one runs there.
      roofline: seconds that the chip's data-sheet peaks allow at the best.
      compile_seconds: what the compilation took here.
      compiles: whether the compiler made a program; `problem` says why not, or what of it is not known.
      vmem: scoped VMEM of the largest kernel, bytes per core; None without a kernel, or where the program's text cannot be read.
      hbm: arguments, outputs, temporaries and code, bytes of one device; `fits`: whether the device has them.
      seconds: an estimate of a kernel's run time; None where there is none, and for programs of XLA's own operations, whose loops it would count as
        one pass, or where the model says less than the roofline. By `estimate`: XLA's "cost model", which knows a kernel's own cost estimate only, or the compiler's final "schedule".
    """

    op: str
    case: str
    target: str
    implementation: str
    roofline: float
    compile_seconds: float
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
            program, problem = compile_for(call, shapes, target=target), ""
        except VishwamaiError as error:
            program, problem = None, str(error)
    seconds = time.perf_counter() - start

    found, spec = chip(target), explained.spec
    dtype = next(iter(case.arrays.values())).dtype
    roofline = max(spec.flops / found.peak_per_device(dtype), spec.bytes_moved / found.hbm_bandwidth_per_device)
    row = TargetRow(operation.name, case.name, target, explained.runs, roofline, seconds)
    if program is None:
        return dataclasses.replace(row, problem=problem)
    try:
        kernels = [k.vmem for k in program.kernels if k.pallas]
    except KernelError as error:  # its memory is known, its kernels are not
        kernels, problem = [], str(error)
    estimate = program.cost.seconds if kernels else None
    # Less than the roofline allows cannot be: XLA's model counts a float32 product as one pass, and marks what it does not know by negative times.
    estimate = None if estimate is None or estimate < 0.9 * roofline else estimate
    return dataclasses.replace(
        row,
        compiles=True,
        vmem=max(kernels, default=None),
        hbm=program.memory.total,
        fits=program.memory.fits,
        seconds=estimate,
        estimate="" if estimate is None else "cost model",
        problem=problem,
    )


def scheduled(rows: Sequence[TargetRow], cases: Sequence[tuple[Operation, Case]], workers: int = 2) -> list[TargetRow]:
    """The rows, those with kernels timed by the compiler's final schedule (`vishwamai.aot.inspect`) in place of its cost model.

    Takes seconds for each program that is not in its cache yet.
    """
    by_name = {(operation.name, case.name): case for operation, case in cases}
    wanted = [row for row in rows if row.vmem is not None]
    if not wanted:
        return list(rows)

    def program(row: TargetRow) -> schedule.Case:
        case = by_name[row.op, row.case]
        return schedule.Case(lambda arrays: case.run(arrays), (case.shapes(),), target=row.target)

    found = dict(zip(wanted, schedule.inspect_many([program(row) for row in wanted], workers=workers), strict=True))

    def timed(row: TargetRow) -> TargetRow:
        made = found.get(row)
        if not isinstance(made, schedule.Schedule):
            return row
        return dataclasses.replace(row, seconds=made.seconds, estimate="schedule")

    return [timed(row) for row in rows]


def _by_turns(cases: Sequence[tuple[Operation, Case]]) -> list[tuple[Operation, Case]]:
    """The first case of every operation, then the second of each, so that a bound on the time leaves no operation out."""
    turns: dict[str, int] = {}
    numbered = []
    for operation, case in cases:
        turns[operation.name] = turns.get(operation.name, 0) + 1
        numbered.append((turns[operation.name], operation, case))
    return [(operation, case) for _, operation, case in sorted(numbered, key=lambda entry: entry[0])]


def run(
    cases: Sequence[tuple[Operation, Case]],
    targets: Sequence[str],
    on_case: Callable[[int, int, str], None] = lambda done, total, name: None,
    seconds: float | None = None,
) -> Iterator[TargetRow]:
    """A row for every case on every target; after `seconds` (None = no bound) no further case is begun, and its rows are missing."""
    total = len(cases) * len(targets)
    start = time.perf_counter()
    for i, (operation, case) in enumerate(_by_turns(cases)):
        if seconds is not None and time.perf_counter() - start > seconds:
            break
        for j, target in enumerate(targets):
            on_case(i * len(targets) + j, total, f"{target}: {operation.name}: {case.name}")
            yield compile_case(operation, case, target)
    on_case(total, total, "done")
