"""What `vishwamai bench` shows on the terminal: its progress, and a table for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vishwamai.bench import report
from vishwamai.bench.machine import Cpu
from vishwamai.bench.model import NAME, ModelResult
from vishwamai.bench.peaks import Peaks
from vishwamai.bench.runner import Measurement
from vishwamai.bench.targets import TargetRow
from vishwamai.cli.console import console, progress, table

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


class Steps:
    """The progress bar; where standard output is not a terminal, nothing."""

    def __init__(self) -> None:
        self._progress = progress()
        self._task: Any = None

    def __enter__(self) -> Steps:
        if console().is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, what: str, total: int = 1) -> None:
        """A new bar, in place of the one before."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=total)

    def on_case(self, verb: str) -> Callable[[int, int, str], None]:
        """A callback that moves the bar: `(done, total, name)`."""
        started = False

        def told(done: int, total: int, name: str) -> None:
            nonlocal started
            if not started:
                self.start(verb, total)
                started = True
            self._progress.update(self._task, completed=done, description=f"{verb} {name}")

        return told


def machine_text(cpu: Cpu, devices: Iterable[str], peaks: Peaks) -> Text:
    """The machine and its measured peaks, in three lines."""
    from rich.text import Text

    products = ", ".join(f"{dtype} {report.rate(peaks.peak(dtype))} GFLOP/s" for dtype in peaks.flops)
    return Text(
        f"{cpu.name}, {cpu.cores} cores; jax on {', '.join(devices)}\n"
        f"measured peaks: {products}; memory {report.rate(peaks.best_bandwidth)} GB/s\n"
        f"  ({peaks.how})"
    )


def _numbers(m: Measurement) -> Text:
    from rich.text import Text

    if m.numbers is None:
        return Text("")
    if not m.numbers.right:
        return Text("WRONG", "bold red")
    return Text("right", "green")


def measurement_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """One table for each operation."""
    from rich.text import Text

    made = []
    right = frozenset(report.COLUMNS[3:])
    for op in dict.fromkeys(m.op for m in measurements):
        out = table(op, report.COLUMNS, right)
        mine = [m for m in measurements if m.op == op]
        for (_, case), rows in report.groups(mine).items():
            shown = case
            for m in rows:
                style = "bold" if m.default else "" if m.framework == "vishwamai" else "dim"
                if m.timing is None:
                    why = m.note or (m.numbers.what if m.numbers else "")
                    out.add_row(Text(shown), Text(m.candidate, style), _numbers(m), Text(f"not timed: {why}", "dim"))
                else:
                    out.add_row(
                        Text(shown),
                        Text(m.candidate, style),
                        _numbers(m),
                        *report.figures(m, m.timing, rows),
                    )
                shown = ""
            out.add_section()
        made.append(out)
    return made


def model_tables(result: ModelResult) -> list[Any]:
    """The real model: first its numbers, then its speed."""
    first = table(
        f"{NAME}, its embeddings beside another program's",
        ["other", "sentences", "least cosine", "max abs error", "numbers"],
        frozenset({"sentences", "least cosine", "max abs error"}),
    )
    for a in result.agreements:
        verdict = "[green]right[/]" if a.right else "[bold red]WRONG[/]"
        first.add_row(a.other, str(a.sentences), f"{a.cosine:.7f}", f"{a.error:.2e}", verdict)
    if not result.speeds:
        return [first]
    columns = ["batch", "tokens", "by", "median", "spread", "sentences/s", "ours is"]
    second = table(f"{NAME}, speed", columns, frozenset(columns) - {"by"})
    for speed in result.speeds:
        ours = speed.timings["vishwamai"]
        for name, timing in speed.timings.items():
            own = name == "vishwamai"
            second.add_row(
                str(speed.batch) if own else "",
                str(speed.tokens) if own else "",
                f"[bold]{name}[/]" if own else name,
                report.seconds(timing.median),
                f"{timing.spread:.0%}",
                f"{speed.sentences_per_second[name]:.0f}",
                "" if own else f"{ours.ratio(timing):.2f}x",
            )
        second.add_section()
    return [first, second]


def target_table(rows: Sequence[TargetRow], targets: Sequence[str]) -> Table:
    """One line for each case: on every chip the kernel's VMEM and estimated time, or what stands in the way."""
    from rich.text import Text

    out = table(
        f"TPUs that are not here: VMEM of the largest kernel, its time by {report.estimates(rows)} (share of the chip's roofline)",
        ["case", *targets],
    )
    cases = sorted(dict.fromkeys((r.op, r.case) for r in rows), key=lambda key: key[0])
    for op, case in cases:
        cells = []
        for target in targets:
            row = next(r for r in rows if (r.op, r.case, r.target) == (op, case, target))
            cells.append(Text(*report.target_words(row)))
        out.add_row(Text(f"{op}: {case}"), *cells)
    problems = dict.fromkeys(f"{r.op}: {r.case}, {r.target}: {r.problem}" for r in rows if r.problem)
    if problems:
        out.caption = "\n".join(problems)
        out.caption_justify = "left"
    return out
