"""`report.html`: the curves of a run, and where its time went, as one file that needs nothing else."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path

from vishwamai import reports
from vishwamai.core import caches
from vishwamai.reports import charts
from vishwamai.training.config import TrainConfig
from vishwamai.training.config_file import describe
from vishwamai.training.facts import RunFacts
from vishwamai.training.records import Record


def write_report(
    config: TrainConfig, records: Sequence[Record], path: Path, bad: Sequence[str] = (), sample: str | None = None
) -> None:
    """Writes the page, some hundred KB at most; a file of that name is replaced whole.

    Args:
      config: configuration of the run.
      records: records of the run, at least one.
      path: the file to write.
      bad: records of the data that could not be read.
      sample: text that the model wrote.
    """
    held_out = [(float(r.step), r.evaluation_loss) for r in records if r.evaluation_loss is not None]

    def curve(name: str, field: str) -> charts.Curve:
        return charts.Curve(name, [(float(r.step), float(getattr(r, field))) for r in records])

    loss = [curve("training", "loss"), charts.Curve("held out", held_out, "c4")]
    figures = [
        ("Loss", charts.lines(loss, x="step", y="nats per token")),
        ("Gradient norm", charts.lines([curve("norm", "gradient_norm")], x="step", y="before clipping", zero=True)),
        ("Learning rate", charts.lines([curve("rate", "learning_rate")], x="step", zero=True)),
        ("Speed", charts.lines([curve("tokens/s", "tokens_per_second")], x="step", y="tokens per second", zero=True)),
    ]
    unread = f"{len(bad)} records that could not be read"
    runs = "\n\n".join(_run_text(record) for record in records if record.run is not None)
    texts = [("Run", runs), ("Sample", sample), (unread, "\n".join(bad[:100])), ("Configuration", describe(config))]
    facts = [(value, name) for name, value in _facts(records)]
    diverged = [r.step for r in records if not math.isfinite(r.loss)]
    page = reports.render(
        "training/report.html",
        title="Training run",
        facts=facts,
        figures=figures,
        texts=texts,
        diverged=diverged,
    )
    caches.write(path, page)


def goodput(records: Sequence[Record]) -> float:
    """Share of the wall time that was spent in steps, over the run and its resumptions.

    The rest is compilation of the first step, data, evaluation and checkpoints.
    """
    ends = _ends(records)
    wall, inside = sum(r.seconds for r in ends), sum(r.step_seconds for r in ends)
    compiling = records[0].step_seconds - (records[1].step_seconds - records[0].step_seconds) if len(records) > 1 else 0
    return max(inside - max(compiling, 0.0), 0.0) / wall


def _run_text(record: Record) -> str:
    """What a process of the run trained, and where."""
    values = dict(record.run or {})
    versions = ", ".join(f"{name} {version}" for name, version in values.pop("versions", {}).items())
    try:
        text = str(RunFacts(**values, versions={}))
    except TypeError:  # of another release
        text = "\n".join(f"{name}: {value}" for name, value in values.items())
    return f"{values.get('date')}, {values.get('machine')}\n{versions}\n{text}"


def _ends(records: Sequence[Record]) -> list[Record]:
    """The last record of each process of the run."""
    later = zip(records, [*records[1:], None])
    return [record for record, after in later if after is None or after.seconds < record.seconds]


def _facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    last = records[-1]
    rates = sorted(r.tokens_per_second for r in records)
    facts = [
        ("last loss", f"{last.loss:.3f}"),
        ("steps", f"{last.step:,}"),
        ("tokens", f"{last.tokens:,}"),
        ("tokens/s, median", f"{rates[len(rates) // 2]:,.0f}"),
        ("of the time in steps", f"{goodput(records):.0%}"),
        ("peak memory", f"{max(r.memory for r in records) / 2**30:.2f} GiB"),
        ("duration", str(datetime.timedelta(seconds=round(sum(r.seconds for r in _ends(records)))))),
        ("steps skipped", str(last.skipped)),
        ("activations and products", last.compute_dtype or "unknown"),
    ]
    evaluated = [r.evaluation_loss for r in records if r.evaluation_loss is not None]
    return [("held-out loss", f"{evaluated[-1]:.3f}"), *facts] if evaluated else facts
