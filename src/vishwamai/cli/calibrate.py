"""Measures operations and a layer on the device of this machine, next to what was estimated for it.

vishwamai calibrate
vishwamai calibrate --use calibration-v5e.json
vishwamai calibrate --show calibration-v5e.json

On a TPU it takes minutes and writes calibration-v5e.json as it goes; Ctrl-C ends it with the rows that there are.
--use corrects later estimates of that chip by it, and --show prints it. The file has versions, chip and figures, and
nothing else of the machine. docs/calibrate.md goes from a new TPU to the table. On a CPU or GPU it measures, too; there
is no estimate to compare with.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path

from vishwamai.cli import output
from vishwamai.cli.console import tell
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import Countdown
from vishwamai.core import caches, logs
from vishwamai.core.installing import install_line
from vishwamai.core.interrupt import interrupt_taken


def configure(parser: argparse.ArgumentParser) -> None:
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="one case of each operation")
    size.add_argument("--all", action="store_true", help="every case, and every backward pass")
    parser.add_argument("--ops", metavar="NAMES", help="operations with commas between them (default: all)")
    parser.add_argument("--no-layer", action="store_true", help="leave the layer out")
    parser.add_argument(
        "--output",
        type=Path,
        action=output.File,
        metavar="JSON",
        help="where to write (default: calibration-CHIP.json)",
    )
    parser.add_argument("--use", type=Path, metavar="JSON", help="measure nothing; take this file into use")
    parser.add_argument("--show", type=Path, metavar="JSON", help="measure nothing; print this file")


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where a case gave wrong numbers."""
    from vishwamai.planning.time import calibration

    use, show = arguments.use, arguments.show
    if use is not None and show is not None:
        raise CommandError("pass either --use or --show.")
    if use is not None or show is not None:
        previous = None
        if use is not None:
            factors, previous = calibration.use(use)
        else:
            assert show is not None
            factors = calibration.parse(_text(show), str(show))
        tell("\n".join(calibration.table(factors)))
        if previous is not None:
            tell(f"  in use: {previous}")
        return 0
    missing = [name for name in ("flax",) if importlib.util.find_spec(name) is None]
    if missing and not arguments.no_layer:
        raise CommandError(f"calibrate measures a layer with flax: {install_line('models')}, or --no-layer.")
    return _measure(arguments)


def _measure(arguments: argparse.Namespace) -> int:
    from vishwamai.bench.runner import BenchSettings, steps
    from vishwamai.ops import catalogue
    from vishwamai.planning.time import calibration
    from vishwamai.planning.time.calibrate import calibrate, name_here

    settings = BenchSettings.quick() if arguments.quick else BenchSettings.all() if arguments.all else BenchSettings()
    # A schedule is of the whole case, so cases are not made smaller where the device is fast enough for them.
    settings = dataclasses.replace(settings, call_seconds=max(settings.call_seconds, 0.2))
    operations = catalogue.chosen(None if arguments.ops is None else arguments.ops.split(","))
    path = arguments.output or Path(f"calibration-{name_here()}.json")
    if arguments.output is None:
        output.check_file(path, "--output")
    planned, measured, status = steps(operations, settings), None, 0
    try:
        with Countdown() as progress:
            for measured in calibrate(planned, settings, not arguments.no_layer, progress.say):
                caches.write(path, measured.text())
    except KeyboardInterrupt as stop:
        if measured is None:
            raise
        status = interrupt_taken(stop)
    assert measured is not None
    tell("\n".join(calibration.table(measured)))
    tell(f"  written to {path}")
    if status:
        logs.report("calibrate", "interrupted; the file has the rows above.")
        return status
    return 1 if any("numbers are wrong" in row.note for row in measured.rows) else 0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from error
