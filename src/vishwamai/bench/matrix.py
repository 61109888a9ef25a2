"""The support matrix: which implementation serves which dtype and feature, asked of every implementation's `why_not`
over the contract's cases.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from vishwamai.core.cases import Case
from vishwamai.core.hardware import TPUS
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops import catalogue
from vishwamai.ops.catalogue import Operation, specs_of


@dataclasses.dataclass(frozen=True)
class Cell:
    """What one implementation says to the cases with one feature.

    Attributes:
      served, asked: how many of the cases it serves, each counted once for every chip of its platform.
      reasons: its different reasons for the others, each with the chips that it holds for (none named = all).
    """

    served: int
    cases: int
    reasons: tuple[str, ...]

    @property
    def mark(self) -> str:
        """ "yes", "no", or "partly"."""
        return "yes" if self.served == self.cases else "no" if self.served == 0 else "partly"


@dataclasses.dataclass(frozen=True)
class MatrixRow:
    """One feature (or dtype) of one op, with a cell for each of the op's implementations by name."""

    op: str
    feature: str
    cells: dict[str, Cell]


EMPTY = "an empty axis"


def basics(case: Case) -> list[str]:
    """What an implementation may decline whatever the options are: the case's dtype, and arrays with nothing in
    them.
    """
    dtypes = [next(iter(case.arrays.values())).dtype]
    return [*dtypes, EMPTY] if any(0 in init.shape for init in case.arrays.values()) else dtypes


def features(case: Case, optional: frozenset[str]) -> list[str]:
    """What else is special about a case: the optional arrays and the options that it uses."""
    names = [name for name in case.arrays if name in optional]
    for name, value in case.options.items():
        if isinstance(value, str):
            names.append(f'{name}="{value}"')
        elif value is not None and value is not False:
            names.append(name)
    return names


def _ask(impl: Implementation, specs: Sequence[object], target: Target | None) -> Cell:
    """What `impl` says to the specs of one case on `target`; without one, a TPU kernel is asked for every
    generation.
    """
    chips = tuple(TPUS.values()) if impl.platform == "tpu" else (None,)
    targets = [Target(impl.platform or "cpu", chip) for chip in chips] if target is None else [target]
    served = 0
    by_reason: dict[str, set[str]] = {}
    for where in targets:
        reasons = {reason for spec in specs if (reason := impl.why_not(spec, where)) is not None}
        served += not reasons
        for reason in reasons:
            by_reason.setdefault(reason, set()).add(where.chip.name if where.chip else "")
    texts = (
        reason if len(names) == len(targets) else f"on {', '.join(name for name in TPUS if name in names)}: {reason}"
        for reason, names in by_reason.items()
    )
    return Cell(served, len(targets), tuple(texts))


def rows_of(operation: Operation, target: Target | None = None) -> list[MatrixRow]:
    """The rows of one op: its dtypes, then its features; with `target`, of the implementations that are for it."""
    cases = [case for case in operation.cases if "contract" in case.tags]
    common = frozenset.intersection(*(frozenset(case.arrays) for case in cases))
    optional = frozenset().union(*(case.arrays for case in cases)) - common
    plain = {case.name: basics(case) for case in cases}
    special = {case.name: features(case, optional) for case in cases}
    implementations = [impl for impl in operation.op.implementations if target is None or impl.is_for(target)]
    answers = {}
    for case in cases:
        specs = specs_of(operation, case)
        answers[case.name] = {impl.name: _ask(impl, specs, target) for impl in implementations}
    lost: dict[str, set[str]] = {impl.name: set() for impl in implementations}

    def cell(impl: Implementation, feature: str, having: list[Case]) -> Cell:
        # What is declined altogether, a dtype or an empty axis, is said in its own row and is no fault of another
        # feature.
        clear = [case for case in having if not lost[impl.name] & (set(plain[case.name]) - {feature})] or having
        cells = [answers[case.name][impl.name] for case in clear]
        texts = dict.fromkeys(reason for cell in cells for reason in cell.reasons)
        return Cell(sum(cell.served for cell in cells), sum(cell.cases for cell in cells), tuple(texts))

    def row(feature: str, marks: dict[str, list[str]]) -> MatrixRow:
        having = [case for case in cases if feature in marks[case.name]]
        cells = {impl.name: cell(impl, feature, having) for impl in implementations}
        for name, cell_of_name in cells.items():
            if marks is plain and cell_of_name.mark == "no":
                lost[name].add(feature)
        return MatrixRow(operation.name, feature, cells)

    names = [
        dict.fromkeys(feature for by_feature in marks.values() for feature in by_feature) for marks in (plain, special)
    ]
    # Emptiness first: a case of an odd dtype is never the empty one, so no dtype hides it.
    ordered = sorted(names[0], key=lambda feature: feature != EMPTY)
    rows = [row(feature, plain) for feature in ordered]
    rows = [r for r in rows if r.feature != EMPTY] + [row(feature, special) for feature in names[1]]
    return rows + ([row(EMPTY, plain)] if EMPTY in names[0] else [])


def matrix(names: Sequence[str] | None = None, target: Target | None = None) -> list[MatrixRow]:
    """The rows of every op, or of those named; with `target`, what it is said to serve there."""
    return [
        row
        for operation in catalogue.operations().values()
        if names is None or operation.name in names
        for row in rows_of(operation, target)
    ]


def columns(rows: Sequence[MatrixRow]) -> list[str]:
    """The implementations in order of preference: "any platform" ones last."""
    return list(dict.fromkeys(name for row in rows for name in row.cells))


_PLATFORMS = {"tpu": "TPU", "cuda": "GPU", "cpu": "CPU", None: "any platform"}


def summary(operations: Sequence[Operation]) -> str:
    """A Markdown table of the implementations of each op by platform, in order of preference."""
    lines = [f"| | {' | '.join(_PLATFORMS.values())} |", f"|---|{'|'.join('---' for _ in _PLATFORMS)}|"]
    for operation in operations:
        of = {
            platform: [f"`{impl.name}`" for impl in operation.op.implementations if impl.platform == platform]
            for platform in _PLATFORMS
        }
        lines.append(f"| {operation.name} | {' | '.join(', '.join(names) for names in of.values())} |")
    return "\n".join(lines)


def markdown(rows: Sequence[MatrixRow]) -> str:
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
                cell = row.cells[name]
                numbers = sorted({notes.setdefault(f"{name}: {reason}", len(notes) + 1) for reason in cell.reasons})
                cells.append(f"{cell.mark} {numbers}" if numbers else cell.mark)
            lines.append(f"| {row.feature} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
        if notes:
            parts.append("\n".join(f"{number}. {text}" for text, number in notes.items()))
    return "\n\n".join(parts)
