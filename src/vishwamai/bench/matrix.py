"""The support matrix: which implementation serves which dtype and feature, asked of every implementation's `why_not` over the contract's cases."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vishwamai.bench import catalogue
from vishwamai.bench.catalogue import Operation, specs_of
from vishwamai.core.cases import Case
from vishwamai.core.hardware import CHIPS
from vishwamai.core.op import Implementation


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one implementation says to the cases with one feature.

    Attributes:
      served, asked: how many of the cases it serves, on every chip of its platform.
      reasons: its different reasons for the others, each with the chips that it holds for (none named = all).
    """

    served: int
    asked: int
    reasons: tuple[str, ...]

    @property
    def mark(self) -> str:
        """ "yes", "no", or "partly"."""
        return "yes" if self.served == self.asked else "no" if self.served == 0 else "partly"


@dataclasses.dataclass(frozen=True)
class Row:
    """One feature (or dtype) of one op, with a cell for each of the op's implementations by name."""

    op: str
    feature: str
    cells: dict[str, Cell]


def features(case: Case, optional: frozenset[str]) -> list[str]:
    """What is special about a case: its dtype first, then the optional arrays and the options that it uses."""
    first = next(iter(case.arrays.values()))
    found = [first.dtype]
    found += [name for name in case.arrays if name in optional]
    for name, value in case.options.items():
        if isinstance(value, str):
            found.append(f'{name}="{value}"')
        elif value is not None and value is not False:
            found.append(name)
    return found


def _refusals(impl: Implementation, specs: Sequence[object]) -> list[str]:
    """Why `impl` declines the specs; for a TPU kernel asked for every generation."""
    if impl.platform != "tpu":
        return [reason for spec in specs if (reason := impl.why_not(spec, None)) is not None]
    by_reason: dict[str, list[str]] = {}
    for chip in CHIPS.values():
        for spec in specs:
            reason = impl.why_not(spec, chip)
            if reason is not None:
                by_reason.setdefault(reason, []).append(chip.name)
    everywhere = len(CHIPS)
    return [r if len(chips) >= everywhere else f"on {', '.join(chips)}: {r}" for r, chips in by_reason.items()]


def rows_of(operation: Operation) -> list[Row]:
    """The rows of one op: its dtypes, then its features."""
    cases = [case for case in operation.cases if "contract" in case.tags]
    common = frozenset.intersection(*(frozenset(case.arrays) for case in cases))
    optional = frozenset().union(*(case.arrays for case in cases)) - common
    marks = {case.name: features(case, optional) for case in cases}
    dtypes = list(dict.fromkeys(found[0] for found in marks.values()))
    others = list(dict.fromkeys(feature for found in marks.values() for feature in found[1:]))
    implementations = operation.op.implementations
    refused = {}
    for case in cases:
        specs = specs_of(operation, case)
        refused[case.name] = {impl.name: _refusals(impl, specs) for impl in implementations}

    def cell(impl: Implementation, wanted: list[Case]) -> Cell:
        reasons = [refused[case.name][impl.name] for case in wanted]
        texts = dict.fromkeys(reason for some in reasons for reason in some)
        return Cell(sum(not some for some in reasons), len(wanted), tuple(texts))

    rows = []
    lost: dict[str, set[str]] = {impl.name: set() for impl in implementations}
    for dtype in dtypes:
        cells = {impl.name: cell(impl, [c for c in cases if marks[c.name][0] == dtype]) for impl in implementations}
        rows.append(Row(operation.name, dtype, cells))
        for name, found in cells.items():
            if found.mark == "no":
                lost[name].add(dtype)
    for feature in others:
        having = [case for case in cases if feature in marks[case.name][1:]]
        cells = {}
        for impl in implementations:
            # A dtype that is refused altogether is said in its own row, and is no fault of the feature.
            wanted = [case for case in having if marks[case.name][0] not in lost[impl.name]]
            cells[impl.name] = cell(impl, wanted or having)
        rows.append(Row(operation.name, feature, cells))
    return rows


def matrix(names: Sequence[str] | None = None) -> list[Row]:
    """The rows of every op, or of those named."""
    return [
        row
        for operation in catalogue.operations().values()
        if names is None or operation.name in names
        for row in rows_of(operation)
    ]


def columns(rows: Sequence[Row]) -> list[str]:
    """The implementations in order of preference: "any platform" ones last."""
    return list(dict.fromkeys(name for row in rows for name in row.cells))


def markdown(rows: Sequence[Row]) -> str:
    """The matrix as a Markdown table per op, with the reasons as a numbered list under it."""
    parts = []
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        names = columns(mine)
        notes: dict[str, int] = {}
        lines = [f"| {op} | {' | '.join(names)} |", f"|---|{'|'.join(':-:' for _ in names)}|"]
        for row in mine:
            cells = []
            for name in names:
                found = row.cells[name]
                numbers = sorted({notes.setdefault(f"{name}: {reason}", len(notes) + 1) for reason in found.reasons})
                cells.append(" ".join([found.mark, *(f"[{n}]" for n in numbers)]))
            lines.append(f"| {row.feature} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        if notes:
            parts.append("\n".join(f"{number}. {text}" for text, number in notes.items()))
    return "\n\n".join(parts)
