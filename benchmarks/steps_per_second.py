"""Steps per second of one training step with 8, 16 and 32 rows: measured on this CPU, estimated for five TPUs.

The step is that of a training configuration, examples/train_stdlib.yaml unless another is named. On TPUs its rows are
split over the 8 devices of a slice (`mesh.data=8`): the program is compiled for the slice, its memory is the compiler's
and its time an estimate from the compiled program. Nothing is measured on a TPU. On the CPU `vishwamai train` runs
`--steps` steps with each number of rows, and the median of their rates is printed, without the first quarter.

    python benchmarks/steps_per_second.py                   estimates: five slices, three batches; minutes
    python benchmarks/steps_per_second.py --only v5e v6e
    python benchmarks/steps_per_second.py --cpu             this CPU alone; on an idle machine
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

from vishwamai.aot.compile import libtpu
from vishwamai.bench import machine
from vishwamai.core.figures import Estimate, Measurement
from vishwamai.core.progress import Progress
from vishwamai.core.target import devices_of
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.search.plan import Candidate, plan_training
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.config_file import read_config

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "train_stdlib.yaml"
ROWS = (8, 16, 32)
SLICES = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
"""A slice of 8 devices of each chip; only a TPU7x chip has two of them."""
BUSY = 0.1
"""Share of the cores that other processes may use while the CPU is measured."""


def estimated(config: TrainConfig, target: str, rows: int, compiler: Compiler) -> Candidate:
    """The step of so many rows, compiled for a slice whose devices split them."""
    mesh = MeshSection(data=devices_of(target))
    plan = plan_training(dataclasses.replace(config, batch_size=rows, mesh=mesh), target, compiler=compiler)
    return plan.candidates[0]


def measured(config: TrainConfig, rows: int, steps: int) -> Measurement:
    """Seconds of a step of so many rows on this CPU, the median, by a run of `vishwamai train`."""
    from vishwamai.training.run import train

    config = dataclasses.replace(
        config,
        batch_size=rows,
        steps=steps,
        mesh=MeshSection(),
        evaluation=dataclasses.replace(config.evaluation, every=0),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=0),  # they may be more than the steps
    )
    with tempfile.TemporaryDirectory() as directory:
        records = list(train(config, pathlib.Path(directory) / "run"))
    durations = [after.step_seconds - before.step_seconds for before, after in zip(records, records[1:])]
    return Measurement(statistics.median(durations[steps // 4 :]), machine.cpu().name, "s")


def result_row(rows: int, result: Candidate | Measurement, where: str, length: int) -> str:
    """A row of the table, in Markdown."""
    memory = "-"
    if isinstance(result, Candidate):
        assert result.step is not None  # asked for
        step: Estimate | Measurement = result.step
        memory = f"{result.best.value / 2**20:.0f} MiB ({result.best.level})"
        how = result.step.level
    else:
        step, how = result, "measured"
    rate = 1 / step.value
    return f"| {rows} | {where} | {rate:.4g} ({how}) | {rate * rows * length:.3g} | {memory} |"


HEAD = "| Rows | Where | Steps/s | Tokens/s | Memory of a device |\n| ---: | --- | ---: | ---: | ---: |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(EXAMPLE), metavar="YAML", help="a training configuration")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="slices that have one of these texts")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="N", help="rows of a step")
    parser.add_argument("--cpu", action="store_true", help="measure on this CPU, and estimate nothing")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps that the CPU runs (default: 40)")
    options = parser.parse_args(arguments)
    config = read_config(options.config, ["model.compute_dtype=float32"])
    length = config.data.sequence_length
    if options.cpu:
        print(f"{machine.cpu().cores} cores\n\n{HEAD}", flush=True)
        usage = machine.Usage()
        for rows in options.rows:
            measurement = measured(config, rows, options.steps)
            print(result_row(rows, measurement, measurement.device, length), flush=True)
        if complaint := usage.complaint(BUSY):
            print(f"\nDo not quote this: {complaint}")
        return
    versions = " ".join(f"{name} {version}" for name, version in libtpu.versions().items())
    print(f"{versions}\n\n{HEAD}", flush=True)
    targets = [target for target in SLICES if any(text in target for text in options.only or [""])]
    with Progress("steps_per_second") as progress, Compiler() as compiler:
        for target in targets:
            for rows in options.rows:
                progress.say(f"compiling the step of {rows} rows for {target}")
                print(result_row(rows, estimated(config, target, rows, compiler), target, length), flush=True)


if __name__ == "__main__":
    main()
