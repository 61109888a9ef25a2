"""Trains a language model from text, JSONL or Parquet files, as a YAML file describes it.

vishwamai train examples/train_stdlib.yaml --output runs/stdlib
vishwamai train examples/train_stdlib.yaml --output runs/stdlib \\
    --resume steps=600
vishwamai train --print-config
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vishwamai.cli import console, output
from vishwamai.cli.function import CommandError
from vishwamai.cli.progress import duration, say
from vishwamai.core import logs
from vishwamai.core.installing import install_line

if TYPE_CHECKING:
    from rich.columns import Columns

    from vishwamai.training.config import TrainConfig
    from vishwamai.training.records import Record
    from vishwamai.training.stop import Stopped

_NEEDED = ("flax", "optax", "orbax", "grain", "pydantic", "yaml", "jinja2")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG.yaml",
        help="the run (the defaults); or a model to start from: a directory, or ORG/NAME[@REVISION] of the Hub",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes of it: optimizer.learning_rate=3e-4")
    parser.add_argument("--output", metavar="DIR", type=Path, action=output.Directory, help="directory of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in DIR")
    parser.add_argument(
        "--profile", metavar="N", type=int, default=0, help="trace N steps into DIR/profile, for XProf and Perfetto"
    )
    parser.add_argument(
        "--push-to-hub", metavar="ORG/NAME", help="upload the model at the end, with a model card (HF_TOKEN)"
    )
    parser.add_argument(
        "--public", action="store_true", help="a new repository of --push-to-hub is for everyone to see"
    )
    parser.add_argument(
        "--print-schema", action="store_true", help="print the JSON Schema of CONFIG.yaml, for editors, and end"
    )
    parser.add_argument("--print-config", action="store_true", help="print every key with its value and doc, and end")


def run(arguments: argparse.Namespace) -> int:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"train needs {', '.join(missing)}: {install_line('train')}.")
    from vishwamai.models.hub import HubModel, Upload
    from vishwamai.training.config_file import describe, json_schema, read_config

    if arguments.print_schema:
        print(json.dumps(json_schema(), indent=2))
        return 0
    path, overrides = arguments.config, list(arguments.overrides)
    if path is not None and "=" in path and not Path(path).exists():
        path, overrides = None, [path, *overrides]
    elif path is not None and (HubModel.parse(path) is not None or Path(path).is_dir()):
        path, overrides = None, [f"model.start_from={json.dumps(path)}", *overrides]
    config = read_config(path, overrides)
    if arguments.print_config:
        print(describe(config), end="")
        return 0
    if arguments.profile < 0:
        raise CommandError(f"train: --profile is {arguments.profile}; pass the number of steps to trace.")
    if arguments.output is None:
        raise CommandError("train needs a directory for the run: --output DIR.")
    from vishwamai.aot.compile import libtpu
    from vishwamai.core.config import ambient_target
    from vishwamai.parallel import initialize
    from vishwamai.parallel.optimization import explain_optimization
    from vishwamai.training.compute_dtype import resolved_for_run
    from vishwamai.training.data import unread
    from vishwamai.training.run import finish, train
    from vishwamai.training.together import first_alone

    first = initialize().index == 0  # the others compute with it and say nothing
    libtpu.local_devices()
    if first and config.optimization.explicit:
        import jax

        effects = explain_optimization(config.optimization, "training", jax.device_count())
        console.console().print(str(effects), highlight=False, markup=False)
    if first and config.precision == "fp8":
        widened = ambient_target().widens_fp8(("float8_e4m3fn", "float8_e5m2"))
        if widened:
            console.console().print(f"precision=fp8: {widened}.", highlight=False)
    config = resolved_for_run(config, arguments.output)
    if first:
        console.console().print(f"computes in {config.model.compute_dtype}, on {ambient_target()}.", highlight=False)
        say("reading the data, then compiling the first step")
    upload = None
    if first and arguments.push_to_hub is not None:
        upload = Upload(arguments.push_to_hub, private=not arguments.public)
    started = time.perf_counter()
    records = train(
        config, arguments.output, arguments.resume, arguments.profile, lambda facts: print(facts, flush=True)
    )
    if first:
        _show_unread(unread(arguments.output / "data"))
    stopped = _follow(config, records, show=first)
    if stopped is not None:
        text = (
            f"Stopped at step {stopped.step} of {config.steps}; the checkpoint is in "
            f"{arguments.output / 'checkpoints'}. The same command with --resume goes on."
        )
        if first:
            console.console().print(text)
        return stopped.status
    text = first_alone(lambda: finish(config, arguments.output))
    if not first:
        return 0
    if text is not None:
        console.console().print(console_rule("sample"), text, console_rule(""), sep="\n", markup=False, highlight=False)
    if upload is not None:
        from vishwamai.training.card import model_card
        from vishwamai.training.records import read_records

        say(f"uploading the model to {upload.repo}")
        card = model_card(config, read_records(arguments.output / "metrics.jsonl"), upload.repo)
        print(f"Uploaded: {upload.send(arguments.output / 'model', card)}")
    console.console().print(
        f"Done in {duration(time.perf_counter() - started)}. Model: {arguments.output / 'model'}  "
        f"Report: {arguments.output / 'report.html'}"
    )
    return 0


def _show_unread(unread: dict[Path, list[str]]) -> None:
    """What of the data will not be trained on: how many records, the first ones, and the files that name all."""
    lines = [line for names in unread.values() for line in names]
    if not lines:
        return
    more = [f"  and {len(lines) - 3} more"] if len(lines) > 3 else []
    count = f"{len(lines)} record{'s' if len(lines) > 1 else ''} could not be read:"
    files = f"All are in {', '.join(map(str, unread))}."
    logs.say("\n".join([count, *(f"  {line}" for line in lines[:3]), *more, files]), level=logging.WARNING)


def console_rule(title: str) -> str:
    return f"{f' {title} ' if title else '':-^80}"


def _follow(config: TrainConfig, records: Generator[Record, None, Stopped | None], show: bool) -> Stopped | None:
    """Shows the records as they come: a live block on a terminal, a line now and then in a file. Returns what stopped
    the run early.
    """
    stopped = None

    def until_end() -> Iterator[Record]:
        nonlocal stopped
        stopped = yield from records

    out = console.console()
    if not (out.is_terminal and show):
        every = max(config.steps // 20, 1)
        for record in until_end():
            if show and (record.step == 1 or record.step % every == 0 or record.evaluation_loss is not None):
                print(_line(config, record), flush=True)
        return stopped
    from rich.live import Live

    with Live(console=out, refresh_per_second=4) as live:
        for record in until_end():
            live.update(_block(config, record))
    return stopped


def _cells(config: TrainConfig, record: Record) -> dict[str, str]:
    left = (config.steps - record.step) * config.batch_size * config.data.sequence_length / record.tokens_per_second
    cells = {
        "step": f"{record.step}/{config.steps}",
        "loss": f"{record.loss:.4f}",
        "tokens/s": f"{record.tokens_per_second:,.0f}",
        "gradient norm": f"{record.gradient_norm:.3f}",
        "rate": f"{record.learning_rate:.2e}",
        "memory": f"{record.memory / 2**30:.2f} GiB",
        "left": duration(left),
    }
    if record.mfu is not None:
        cells["MFU"] = f"{record.mfu:.1%}{' (above the peak)' if record.mfu > 1 else ''}"
    if record.accuracy is not None:
        cells["preferred"] = f"{record.accuracy:.0%}"
    if record.skipped:
        cells["skipped"] = str(record.skipped)
    if record.evaluation_loss is not None:
        cells["held-out loss"] = f"{record.evaluation_loss:.4f}"
    return cells


def _line(config: TrainConfig, record: Record) -> str:
    return "  ".join(f"{name} {value}" for name, value in _cells(config, record).items())


def _block(config: TrainConfig, record: Record) -> Columns:
    """Names and values side by side, in as many rows as the terminal's width asks for."""
    from rich.columns import Columns
    from rich.text import Text

    cells = _cells(config, record)
    return Columns([Text.assemble((f"{name} ", "dim"), value) for name, value in cells.items()], padding=(0, 3))
