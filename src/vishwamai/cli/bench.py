"""Checks the numbers of every operation and implementation that this machine can run, on the shapes of real models,
then times those that are right compared with the framework's own; shows the schedules of the same for TPUs you do not
have; and embeds real sentences with a real model.

Two cases of each operation and a backward pass, in less than five minutes: what does not fit is left out, and counted.
Writes report.json as it goes, and report.html at the end; Ctrl-C ends it with what there is, and --resume goes on. The
exit status is 1 where a number is wrong, and no speed is told for it.

  vishwamai bench --quick
  vishwamai bench --all
  vishwamai bench --ops attention,norm --target v5e,v6e --report attention.html
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vishwamai.cli import options, output
from vishwamai.cli.console import console, require_rich
from vishwamai.cli.function import CommandError
from vishwamai.core import logs
from vishwamai.core.hardware import TPUS
from vishwamai.core.interrupt import interrupt_taken
from vishwamai.core.target import Target

if TYPE_CHECKING:
    from vishwamai.bench.budget import Budget
    from vishwamai.bench.report import BenchReport, Earlier
    from vishwamai.bench.runner import BenchSettings


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="A,B", help="these operations only, such as attention,norm")
    how_many = parser.add_mutually_exclusive_group()
    how_many.add_argument("--quick", action="store_true", help="one small case of each operation: about a minute")
    how_many.add_argument("--all", action="store_true", help="every case, with its backward pass: an hour or more")
    parser.add_argument("--gradients", action="store_true", help="the backward pass of every case that is run")
    options.add_json(parser, "where to write the figures (report.json)", Path("report.json"))
    parser.add_argument(
        "--report", metavar="PATH", type=Path, action=output.File, help="where to write the HTML page (report.html)"
    )
    parser.add_argument("--resume", action="store_true", help="go on with the run whose figures are in --json")
    options.add_target(parser, f"TPUs to show: {', '.join(TPUS)} (the default; v5e with --quick), or none")
    parser.add_argument(
        "--schedule",
        action="store_true",
        help=(
            "estimate the kernels' time on those TPUs here, from the compiler's final schedule: seconds a program, "
            "kept in a cache; without it the schedules that come with the package are shown"
        ),
    )
    parser.add_argument("--no-model", action="store_true", help="leave the real model out")


def _targets(arguments: argparse.Namespace) -> list[str]:
    from vishwamai.aot.compile import libtpu

    if arguments.target == ["none"]:
        return []
    if arguments.schedule and not libtpu.has_libtpu():
        raise CommandError(f"--schedule needs libtpu: {libtpu.install_hint()}.")
    if arguments.target is None:
        return ["v5e"] if arguments.quick else list(TPUS)
    return [Target.parse_chip(name).name for name in arguments.target]


def _page_path(arguments: argparse.Namespace, notes: list[str]) -> Path | None:
    from vishwamai import reports

    if importlib.util.find_spec(reports.NEEDED) is not None:
        return arguments.report or Path("report.html")
    if arguments.report is not None:
        raise CommandError(f"{reports.install_hint()}.")
    notes.append(f"report.html was not written; {reports.install_hint()}.")
    return None


def _settings(arguments: argparse.Namespace) -> tuple[str, BenchSettings]:
    """(what is selected, how much that is)."""
    from vishwamai.bench.runner import BenchSettings

    presets = {"quick": BenchSettings.quick, "all": BenchSettings.all, "small": BenchSettings}
    selection = "quick" if arguments.quick else "all" if arguments.all else "small"
    settings = presets[selection]()
    return selection, dataclasses.replace(settings, gradients_per_op=None) if arguments.gradients else settings


def _earlier(arguments: argparse.Namespace, selection: str, versions: object, cpu: str) -> Earlier | None:
    """The run to go on with.

    Raises:
      CommandError: there is none, or it was another one.
    """
    from vishwamai.bench import report

    if not arguments.resume:
        return None
    if not arguments.json.exists():
        raise CommandError(f"--resume: there is no {arguments.json} to go on with; leave --resume out.")
    earlier = report.read_json(arguments.json)
    mine = {"selection": selection, "cpu": cpu, "versions": versions}
    theirs = {"selection": earlier.selection, "cpu": earlier.cpu, "versions": earlier.versions}
    changed = [name for name in mine if mine[name] != theirs[name]]
    if changed:
        raise CommandError(
            f"--resume: {arguments.json} was measured with other {' and '.join(changed)}; leave --resume out to "
            "start again."
        )
    return earlier


def run(arguments: argparse.Namespace) -> int:
    require_rich()
    from vishwamai.aot.compile import libtpu
    from vishwamai.bench import machine, report, runner
    from vishwamai.bench.budget import Budget
    from vishwamai.cli import bench_tables as tables
    from vishwamai.cli.progress import Steps
    from vishwamai.measure import machine_peaks
    from vishwamai.ops import catalogue

    selection, settings = _settings(arguments)
    budget = Budget(settings.total_seconds)
    notes: list[str] = []
    operations = catalogue.chosen(None if arguments.ops is None else arguments.ops.split(","))
    targets = _targets(arguments)
    page = _page_path(arguments, notes)
    for path, option in ((arguments.json, "--json"), (page, "--report")):
        if path is not None:  # a default, which nobody has checked
            output.check_file(path, option)
    cpu, versions = machine.cpu(), machine.versions()
    earlier = _earlier(arguments, selection, versions, cpu.name)
    out = console()
    with Steps() as steps:
        steps.start("measuring this machine's peaks")
        devices = [f"{d.platform}: {d.device_kind}" for d in libtpu.local_devices()]
        peaks = machine_peaks.measure_machine(arguments.quick)
        meter = runner.PeakMeter(machine_peaks.best_of(earlier.peaks, peaks) if earlier else peaks, arguments.quick)
        planned = runner.steps(operations, settings)
        done = list(earlier.done) if earlier else []
        bench_report = report.BenchReport(
            created=report.now(),
            command="vishwamai " + shlex.join(sys.argv[1:]),
            versions=versions,
            cpu=cpu,
            devices=tuple(devices),
            load=None,
            peaks=meter.best,
            measurements=earlier.measurements if earlier else (),
            targets=(),
            model=None,
            notes=tuple(notes),
            selection=selection,
            done=tuple(done),
            planned=len({step.key for step in planned} | set(done)),
        )
        case_tables = tables.Cases(out)
        out.print(tables.machine_text(cpu, devices, meter.best), soft_wrap=not out.is_terminal)
        try:
            left = [step for step in planned if step.key not in set(done)]
            timing_budget = budget.part(None, reserve=0.0 if arguments.no_model else settings.model_seconds)
            for step, measurements in runner.run(left, meter, settings, steps.on_case("timing"), timing_budget):
                case_tables.show(measurements, meter.best)
                bench_report = dataclasses.replace(
                    bench_report,
                    peaks=meter.best,
                    measurements=tuple(m.against(meter.best) for m in (*bench_report.measurements, *measurements)),
                    done=(*bench_report.done, step.key),
                )
                report.write_json(bench_report, arguments.json)
            notes += _not_begun(bench_report, settings)
            if targets:
                steps.start("schedules for TPUs you do not have")
                bound = timing_budget.part(settings.compile_seconds).seconds
                rows = _compile(operations, settings, arguments, targets, steps, notes, bound)
                bench_report = dataclasses.replace(bench_report, targets=tuple(rows))
                if rows:
                    out.print(*tables.target_lines(rows, targets, out.is_terminal), sep="\n", soft_wrap=True)
            if not arguments.no_model:
                bench_report = dataclasses.replace(
                    bench_report, model=_model(settings, budget, arguments.quick, steps, notes)
                )
                if bench_report.model is not None:
                    out.print(*tables.model_tables(bench_report.model), sep="\n")
            interrupted = 0
        except KeyboardInterrupt as stop:
            interrupted = interrupt_taken(stop)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    _finish(dataclasses.replace(bench_report, load=load, notes=tuple(notes)), arguments.json, page)
    if interrupted:
        logs.report(
            "bench",
            f"interrupted after {len(bench_report.done)} of {bench_report.planned} cases; the same command with "
            "--resume goes on.",
        )
        return interrupted
    return _verdict(bench_report)


def _not_begun(bench_report: BenchReport, settings: BenchSettings) -> list[str]:
    left = bench_report.planned - len(bench_report.done)
    if not left:
        return []
    return [
        f"{left} of {bench_report.planned} cases were not begun: there is a bound of {settings.case_seconds:.0f} "
        f"seconds for the cases, and of {settings.total_seconds:.0f} for the run. --resume goes on with them, --all "
        "has no bound."
    ]


def _finish(bench_report: BenchReport, where: Path, page: Path | None) -> None:
    """Writes the report, whole or not, and says what is in it."""
    from vishwamai.bench import report
    from vishwamai.cli import bench_tables as tables

    report.write_json(bench_report, where)
    paths = [str(where)]
    if page is not None:
        from vishwamai.bench import page as html

        html.write(bench_report, page)
        paths.append(str(page))
    out = console()
    out.print(*tables.standing_lines(bench_report.measurements), sep="\n", soft_wrap=not out.is_terminal)
    for banner in report.banners(bench_report.measurements, bench_report.versions):
        out.print(banner, style="bold yellow", markup=False, highlight=False, soft_wrap=not out.is_terminal)
    for note in bench_report.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=not out.is_terminal)
    out.print(f"wrote {' and '.join(paths)}", markup=False, soft_wrap=True)


def _model(settings: BenchSettings, budget: Budget, quick: bool, steps: Any, notes: list[str]) -> Any:
    from vishwamai.bench import model
    from vishwamai.models import minilm

    reason = minilm.why_not()
    if reason is not None:
        notes.append(f"{model.NAME} was not run: {reason}")
        return None
    if budget.left < settings.model_seconds:
        notes.append(
            f"{model.NAME} was not run: it is given {settings.model_seconds:.0f} seconds, and less was left of the "
            f"run's {settings.total_seconds:.0f}; --all has no bound."
        )
        return None
    steps.start(f"{model.NAME}: embedding real sentences")
    return model.run(seconds=4.0 if quick else 10.0)


def _compile(
    operations: Any,
    settings: BenchSettings,
    arguments: argparse.Namespace,
    targets: list[str],
    steps: Any,
    notes: list[str],
    bound: float | None,
) -> list[Any]:
    from vishwamai.aot.compile import libtpu
    from vishwamai.bench import runner, schedules
    from vishwamai.bench import targets as compiling

    cases = runner.planned(operations, settings)
    stored = [] if arguments.schedule else schedules.rows(cases, targets)
    compiled = {(row.op, row.case, row.target) for row in stored}
    pairs = [
        (op, case, target) for op, case in cases for target in targets if (op.name, case.name, target) not in compiled
    ]
    if stored:
        versions = ", ".join(sorted({schedules.libtpu(target) for target in targets} - {""}))
        notes.append(
            f"TPUs you do not have: {len(stored)} schedules come with the package, made by libtpu {versions}; "
            "--schedule makes them here."
        )
    if not libtpu.has_libtpu():
        if pairs:
            notes.append(
                f"{len(pairs)} programs for TPUs have no stored schedule; to compile them: {libtpu.install_hint()}."
            )
        return stored
    rows = list(compiling.run(pairs, steps.on_case("compiling for"), bound))
    if len(rows) < len(pairs):
        notes.append(
            f"{len(pairs) - len(rows)} of {len(pairs)} programs for {', '.join(targets)} have no stored schedule and "
            f"were not compiled within {bound or 0:.0f} seconds; --all compiles all."
        )
    if arguments.schedule:
        steps.start("following the compiler's schedules")
        rows = compiling.scheduled(rows, cases)
    return [*stored, *rows]


def _verdict(bench_report: Any) -> int:
    for m in bench_report.wrong:
        logs.say(f"WRONG: {m.op}, {m.case}, {m.candidate}: {m.numbers.detail}", level=logging.ERROR)
    if bench_report.model is not None:
        for agreement in bench_report.model.agreements:
            if not agreement.right:
                logs.say(
                    f"WRONG: embeddings differ from {agreement.peer}: least cosine {agreement.cosine:.6f}",
                    level=logging.ERROR,
                )
    return 0 if bench_report.right else 1
