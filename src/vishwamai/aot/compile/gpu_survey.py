"""The code of the launches of real models' shapes, as a table."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from vishwamai.aot.compile.gpu import Code, RecordedLaunch, inspect_launch, launches
from vishwamai.core.cases import Case
from vishwamai.core.target import Target
from vishwamai.ops import catalogue

COLUMNS = ("registers", "spill", "shared", "programs", "wgmma", "mma", "tma")


def table(rows: Iterable[tuple[str, Code]]) -> str:
    """A Markdown table of named codes.

    >>> print(table([("8 rows", Code("forward", 4, 3, 40, 0, 64, 12, 0, 0, 0, 0, 4, 4))]))
    | launch | kernel | warps x stages | registers | spill | shared | programs | wgmma | mma | tma | 16-byte loads |
    |---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|
    | 8 rows | forward | 4 x 3 | 40 | 0 | 64 | 12 | 0 | 0 | 0 | 4 of 4 |
    """
    heads = ["launch", "kernel", "warps x stages", *COLUMNS, "16-byte loads"]
    lines = [f"| {' | '.join(heads)} |", f"|---|---|{'--:|' * (len(heads) - 2)}"]
    for name, code in rows:
        cells = [name, code.kernel, f"{code.warps} x {code.stages}"]
        cells += [f"{getattr(code, column):,}" for column in COLUMNS]
        lines.append(f"| {' | '.join([*cells, f'{code.wide} of {code.loads + code.copies}'])} |")
    return "\n".join(lines)


def model_cases() -> Iterator[Case]:
    """The shapes of real models that an operation's Triton implementation serves, of every operation that has one."""
    return filter(is_served, candidates())


def candidates() -> Iterator[Case]:
    """The shapes of real models, of every operation with a Triton kernel; nothing is traced."""
    for operation in catalogue.operations().values():
        if operation.has_kernel("cuda"):
            yield from operation.tagged("model")


def is_served(case: Case) -> bool:
    """Whether a case's op has a Triton implementation that takes it."""
    operation = catalogue.operations()[case.op]
    spec, *_ = catalogue.specs_of(operation, case)
    return any(
        impl.name == "triton" and impl.why_not(spec, Target("cuda", local=True)) is None
        for impl in operation.op.implementations
    )


def survey(cases: Iterable[Case], target: int | str = 90) -> list[tuple[str, Code]]:
    """The code of every launch of `cases`, named by its case; a launch that an earlier case made is not repeated."""
    seen: set[RecordedLaunch] = set()
    rows = []
    for case in cases:
        for recorded in launches(case):
            key = dataclasses.replace(recorded, launch=dataclasses.replace(recorded.launch, grid=()))
            if key not in seen:
                seen.add(key)
                rows.append((f"{case.op}: {case.name}", inspect_launch(recorded, target)))
    return rows
