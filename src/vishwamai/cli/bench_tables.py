"""What `vishwamai bench` shows: 80 columns on a terminal, one line a case in a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vishwamai.bench import report
from vishwamai.bench.machine import Cpu
from vishwamai.bench.model import NAME, ModelResult
from vishwamai.bench.runner import BenchSettings, CaseMeasurement
from vishwamai.bench.targets import TargetRow
from vishwamai.cli.console import table
from vishwamai.measure.machine_peaks import MachinePeaks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


def machine_text(cpu: Cpu, devices: Iterable[str], peaks: MachinePeaks) -> Text:
    """The machine and its measured peaks, in three lines."""
    from rich.text import Text

    products = ", ".join(f"{dtype} {report.rate(peaks.peak(dtype))} GFLOP/s" for dtype in peaks.flops)
    return Text(
        f"{cpu.name}, {cpu.cores} cores; jax on {', '.join(devices)}\n"
        f"measured peaks: {products}; memory {report.rate(peaks.best_bandwidth)} GB/s\n"
        f"  ({peaks.how})"
    )


_WIDTHS = (30, 6, 9, 7, 15, 10)
_HEAD = ("", "", "median", "spread", "rate", "of peak")
_EVERY = 8
"""Cases between two headings of the columns."""


class Cases:
    """Shows each case as soon as it is known: a block of lines on a terminal, one line in a pipe."""

    def __init__(self, out: Console) -> None:
        self._out = out
        self._printed = 0

    def show(self, measurements: Sequence[CaseMeasurement], peaks: MachinePeaks) -> None:
        """Shows the measurements of one step."""
        if not measurements:
            return
        if self._out.is_terminal:
            self._out.print(_block(measurements, peaks, head=self._printed % _EVERY == 0))
        else:
            self._out.print(case_line(measurements, peaks), soft_wrap=True, markup=False, highlight=False)
        self._printed += 1


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _cells(m: CaseMeasurement, peaks: MachinePeaks) -> tuple[str, ...]:
    assert m.timing is not None
    return (
        "right" if m.numbers else "",
        report.seconds(m.timing.median),
        f"{m.timing.spread:.0%}",
        report.best_rate(m, peaks),
        report.share(m),
    )


def _block(measurements: Sequence[CaseMeasurement], peaks: MachinePeaks, head: bool) -> Text:
    """A line for each candidate of a case, 79 columns wide; those that were not timed last."""
    from rich.text import Text

    def line(cells: Sequence[str], style: str) -> None:
        first, *rest = (_cut(cell, width) for cell, width in zip(cells, _WIDTHS))
        padded = "".join(cell.rjust(width) for cell, width in zip(rest, _WIDTHS[1:]))
        out.append(f"  {first.ljust(_WIDTHS[0])}{padded}".rstrip() + "\n", style)

    out = Text()
    if head:
        line(_HEAD, "dim")
    out.append(_cut(f"{measurements[0].op}: {measurements[0].case}", 79) + "\n", "bold")
    for m in measurements:
        if m.timing is None:
            wrong = m.numbers is not None and not m.numbers.right
            why = m.note or (m.numbers.detail if m.numbers else "")
            out.append(f"  {m.candidate}: ")
            out.append("WRONG, " if wrong else "", "bold red")
            out.append(f"not timed: {why}\n", "dim")
        else:
            style = "bold" if m.default else "" if m.framework == "vishwamai" else "dim"
            line((m.candidate, *_cells(m, peaks)), style)
    default = next((m for m in measurements if m.default and m.timing is not None), None)
    if default is not None and report.best_peer(default):
        reason = f" ({default.withheld})" if default.withheld else ""
        good = default.best_peer is None or default.best_peer[1] >= 1
        out.append(f"  against the best peer: {report.best_peer(default)}{reason}\n", "green" if good else "red")
    return out


def case_line(measurements: Sequence[CaseMeasurement], peaks: MachinePeaks) -> str:
    """A whole case in one line: what runs by default, its figures, the best peer."""
    parts = [f"{measurements[0].op}: {measurements[0].case}"]
    for m in measurements:
        if m.default and m.timing is not None:
            right, median, spread, rate, share = _cells(m, peaks)
            parts.append(f"{m.candidate} {right} {median} (spread {spread}) {rate}")
            parts.append(f"share of peak {share}")
            if report.best_peer(m):
                reason = f" ({m.withheld})" if m.withheld else ""
                parts.append(f"against the best peer {report.best_peer(m)}{reason}")
        elif m.numbers is not None and not m.numbers.right and m.framework == "vishwamai":
            parts.append(f"{m.candidate} WRONG, not timed: {m.numbers.detail}")
        elif m.default:
            parts.append(f"{m.candidate} not timed: {m.note}")
    return "; ".join(" ".join(part.split()) for part in parts)


def standing_lines(measurements: Sequence[CaseMeasurement]) -> list[Text]:
    """Wins and losses against the best peer, the slowest first, and the score."""
    from rich.text import Text

    standings = report.standings(measurements)
    if not standings and not any(m.withheld for m in measurements):
        return []
    lines = [Text("Times as fast as the best peer, the slowest first", "bold")] if standings else []
    for standing in standings:
        text = f"{standing.ratio:5.2f}x  {_cut(f'{standing.op}: {standing.case}', 46):46}  {_cut(standing.peer, 22)}"
        lines.append(Text(text, "green" if standing.ratio >= 1 else "red"))
    score = report.score(measurements)
    return [*lines, Text(f"{score[0].upper()}{score[1:]}.", "bold")]


def model_tables(result: ModelResult) -> list[Any]:
    """The real model: first its numbers, then its speed."""
    first = table(
        f"{NAME}, its embeddings compared with another program's",
        ["other", "sentences", "least cosine", "max abs error", "numbers"],
        frozenset({"sentences", "least cosine", "max abs error"}),
    )
    for a in result.agreements:
        verdict = "[green]right[/]" if a.right else "[bold red]WRONG[/]"
        first.add_row(a.peer, str(a.sentences), f"{a.cosine:.7f}", f"{a.error:.2e}", verdict)
    if not result.speeds:
        return [first]
    columns = ["batch", "tokens", "by", "median", "spread", "sentences/s", "ours is"]
    second = table(f"{NAME}, speed", columns, frozenset(columns) - {"by"})
    for speed in result.speeds:
        ours = speed.timings["vishwamai"]
        for name, timing in speed.timings.items():
            is_ours = name == "vishwamai"
            unsteady = max(ours.spread, timing.spread) > BenchSettings.spread
            second.add_row(
                str(speed.batch) if is_ours else "",
                str(speed.tokens) if is_ours else "",
                f"[bold]{name}[/]" if is_ours else name,
                report.seconds(timing.median),
                f"{timing.spread:.0%}",
                f"{speed.sentences_per_second[name]:.0f}",
                "" if is_ours else report.WITHHELD if unsteady else f"{ours.ratio(timing):.2f}x",
            )
        second.add_section()
    return [first, second]


def target_lines(rows: Sequence[TargetRow], targets: Sequence[str], terminal: bool) -> list[Text]:
    """For each case, on every chip the kernel's estimated time and its share of the roofline, or what hinders it: two
    lines of at most 80 columns on a terminal, one in a pipe. The report has the memory, too.
    """
    from rich.text import Text

    lines = [
        Text("TPUs you do not have", "bold"),
        Text(f"time by {report.estimates(rows)}, and its share of the chip's roofline", "dim"),
    ]
    width = 77 // len(targets) if terminal else 0
    if terminal:
        lines.append(Text("  " + "".join(target.ljust(width) for target in targets), "dim"))
    by_key = {(r.op, r.case, r.target): r for r in rows}
    for op, case in sorted(dict.fromkeys((r.op, r.case) for r in rows), key=lambda key: key[0]):
        cells = [report.target_cell(by_key.get((op, case, target))) for target in targets]
        if terminal:
            lines.append(Text(_cut(f"{op}: {case}", 79), "bold"))
            lines.append(Text.assemble("  ", *((_cut(text, width - 1).ljust(width), colour) for text, colour in cells)))
        else:
            summary = "; ".join(f"{target} {text}" for target, (text, _) in zip(targets, cells))
            lines.append(Text(f"{op}: {case}; {summary}"))
    return [*lines, *(Text(problem, "dim") for problem in report.target_problems(rows))]
