"""Checks the numbers of every operation and implementation that this machine can run, on the shapes of real models, then times those that are right
side by side with the framework's own; compiles the same for TPUs that are not here; and embeds real sentences with a real model.

Writes report.json and report.html. The exit status is 1 where a number is wrong, and no speed is told for it.

  vishwamai bench --quick
  vishwamai bench --ops attention,norm --targets v5e,v6e --report attention.html
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from vishwamai.cli.console import require_rich
from vishwamai.cli.function import CommandError
from vishwamai.core.hardware import CHIPS, chip

SUMMARY = "check and time every operation that this machine can run, beside the framework's own"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ops", metavar="A,B", help="these operations only, such as attention,norm")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller cases: about a minute")
    parser.add_argument("--long", action="store_true", help="the longest cases too")
    parser.add_argument("--gradients", action="store_true", help="the backward passes too")
    parser.add_argument(
        "--json",
        metavar="PATH",
        type=Path,
        default=Path("report.json"),
        help="where to write the figures (report.json)",
    )
    parser.add_argument("--report", metavar="PATH", type=Path, help="where to write the HTML page (report.html)")
    parser.add_argument(
        "--targets",
        metavar="CHIPS",
        help=f"TPUs to compile for: {','.join(CHIPS)} (the default where libtpu is installed; v5e with --quick), or none",
    )
    parser.add_argument(
        "--schedule",
        action="store_true",
        help="estimate the kernels' time on those TPUs from the compiler's final schedule: seconds a program, kept in a cache",
    )
    parser.add_argument("--no-model", action="store_true", help="leave the real model out")


def _targets(arguments: argparse.Namespace, notes: list[str]) -> list[str]:
    from vishwamai.aot import libtpu

    if arguments.targets == "none":
        return []
    if not libtpu.has_libtpu():
        if arguments.targets is not None:
            raise CommandError(f"--targets needs libtpu: {libtpu.INSTALL}.")
        notes.append(
            f"TPUs that are not here were not compiled for, because libtpu is not installed: {libtpu.INSTALL}."
        )
        return []
    if arguments.targets is None:
        return ["v5e"] if arguments.quick else list(CHIPS)
    return [chip(name).name for name in arguments.targets.split(",")]


def _page_path(arguments: argparse.Namespace, notes: list[str]) -> Path | None:
    if importlib.util.find_spec("plotly") is not None:
        return arguments.report or Path("report.html")
    install = 'the HTML page needs the package plotly: pip install "vishwamai[report]"'
    if arguments.report is not None:
        raise CommandError(f"{install}.")
    notes.append(f"report.html was not written; {install}.")
    return None


def run(arguments: argparse.Namespace) -> int:
    require_rich()
    from vishwamai.bench import catalogue, machine, peaks, report, runner
    from vishwamai.cli import bench_tables as tables
    from vishwamai.cli.console import console

    notes: list[str] = []
    operations = catalogue.chosen(arguments.ops.split(",") if arguments.ops else None)
    targets = _targets(arguments, notes)
    page = _page_path(arguments, notes)
    settings = runner.Settings.quick() if arguments.quick else runner.Settings()
    out = console()
    cpu = machine.cpu()
    devices = [f"{d.platform}: {d.device_kind}" for d in machine.devices()]
    with tables.Steps() as steps:
        steps.start("measuring this machine's peaks")
        limits = peaks.measure(arguments.quick)
        out.print(tables.machine_text(cpu, devices, limits))
        measurements: list[runner.Measurement] = []
        for m in runner.run(operations, limits, settings, arguments.long, arguments.gradients, steps.on_case("timing")):
            measurements.append(m)
        out.print(*tables.measurement_tables(measurements), sep="\n")
        model = None if arguments.no_model else _model(arguments.quick, steps, notes)
        if model is not None:
            out.print(*tables.model_tables(model), sep="\n")
        rows = _compile(operations, settings, arguments, targets, steps, notes) if targets else []
        if rows:
            out.print(tables.target_table(rows, targets))
    made = report.Report(
        created=report.now(),
        command="vishwamai " + shlex.join(sys.argv[1:]),
        versions=machine.versions(),
        cpu=cpu,
        devices=tuple(devices),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        peaks=limits,
        measurements=tuple(measurements),
        targets=tuple(rows),
        model=model,
        notes=tuple(notes),
    )
    report.write_json(made, arguments.json)
    written = [str(arguments.json)]
    if page is not None:
        from vishwamai.bench import page as html

        html.write(made, page)
        written.append(str(page))
    for note in notes:
        out.print(f"note: {note}", markup=False)
    out.print(f"wrote {' and '.join(written)}", markup=False)
    return _verdict(made)


def _model(quick: bool, steps: Any, notes: list[str]) -> Any:
    from vishwamai.bench import model
    from vishwamai.models import minilm

    reason = minilm.why_not()
    if reason is not None:
        notes.append(f"{model.NAME} was not run: {reason}")
        return None
    steps.start(f"{model.NAME}: embedding real sentences")
    return model.run(seconds=4.0 if quick else 20.0)


def _compile(
    operations: Any, settings: Any, arguments: argparse.Namespace, targets: list[str], steps: Any, notes: list[str]
) -> list[Any]:
    from vishwamai.bench import runner
    from vishwamai.bench import targets as compiling

    cases = runner.planned(operations, settings, arguments.long)
    bound = None if arguments.long else settings.compile_seconds
    rows = list(compiling.run(cases, targets, steps.on_case("compiling for"), bound))
    left = len(cases) - len(rows) // len(targets)
    if left:
        notes.append(
            f"{left} of {len(cases)} cases were not compiled for {', '.join(targets)}: that had taken {bound:.0f} seconds; "
            "--long compiles all, --targets with fewer chips more of them."
        )
    if not arguments.schedule:
        return rows
    steps.start("following the compiler's schedules")
    return compiling.scheduled(rows, cases)


def _verdict(made: Any) -> int:
    for m in made.wrong:
        print(f"WRONG: {m.op}, {m.case}, {m.candidate}: {m.numbers.what}", file=sys.stderr)
    if made.model is not None:
        for agreement in made.model.agreements:
            if not agreement.right:
                print(
                    f"WRONG: embeddings differ from {agreement.other}: least cosine {agreement.cosine:.6f}",
                    file=sys.stderr,
                )
    return 0 if made.right else 1
