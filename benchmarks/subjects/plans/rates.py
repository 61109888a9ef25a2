"""Rates of one model, measured on this CPU and estimated for five TPUs: steps of training, and tokens of decoding.

The model is that of a training configuration, examples/train_stdlib.yaml unless another is named. Nothing is measured
on a TPU: programs are compiled, their memory is the compiler's and their time an estimate.

`steps`: steps per second with 8, 16 and 32 rows. On TPUs the rows are split over the 8 devices of a slice
(`mesh.data=8`). On the CPU `vishwamai train` runs `--steps` steps with each number of rows, and the median of their
rates is printed, without the first quarter.

`decoding`: tokens per second with 512, 1024 and 2048 tokens in each sequence, in bfloat16 with random weights, on one
device. Published steps took longer than such estimates, by the ratio of each row. They are training steps, as no
decoding step is published with its program. On the CPU the engine serves prompts that leave room for `--steps` tokens,
and the median of its steps is printed.

    python benchmarks/plans.py rates steps                   estimates: five slices, three batches; minutes
    python benchmarks/plans.py rates decoding --only v5e v6e
    python benchmarks/plans.py rates steps --cpu             this CPU alone; on an idle machine
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.aot.compile import libtpu
from vishwamai.bench import machine
from vishwamai.core.figures import Estimate, Measurement
from vishwamai.core.numbers import human
from vishwamai.core.progress import Progress
from vishwamai.core.target import devices_of
from vishwamai.inference import Delta, Engine, Limits, Request, Sampling
from vishwamai.models import Decoder, ModelConfig, pack_weights
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.search.candidates import Candidate
from vishwamai.planning.search.plan import plan_training
from vishwamai.planning.serving import Serving, trace_serving
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.published import published_range
from vishwamai.training.config import MeshSection, TrainConfig
from vishwamai.training.config_file import read_config

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "train_stdlib.yaml"
ROWS = (8, 16, 32)
SLICES = ("v4:2x2x2", "v5e:2x4", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1")
"""A slice of 8 devices of each chip; only a TPU7x chip has two of them."""
BUSY = 0.1
"""Share of the cores that other processes may use while the CPU is measured."""
LENGTHS = (512, 1024, 2048)
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
STEP_TOKENS = 512
STEPS_HEAD = "| Rows | Where | Steps/s | Tokens/s | Memory of a device |\n| ---: | --- | ---: | ---: | ---: |"
DECODING_HEAD = "| Tokens | Where | Tokens/s | Memory | Published / estimate |\n| ---: | --- | ---: | ---: | --- |"


def estimated_step(config: TrainConfig, target: str, rows: int, compiler: Compiler) -> Candidate:
    """The step of so many rows, compiled for a slice whose devices split them."""
    mesh = MeshSection(data=devices_of(target))
    plan = plan_training(dataclasses.replace(config, batch_size=rows, mesh=mesh), target, compiler=compiler)
    return plan.candidates[0]


def measured_step(config: TrainConfig, rows: int, steps: int) -> Measurement:
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


def model_of(path: str) -> ModelConfig:
    """The model of a training configuration, with as many positions as the longest sequence has."""
    config = read_config(path)
    keys = (config.model.config or {}) | {"vocab_size": config.tokenizer.vocab_size}
    return ModelConfig.from_dict(keys | {"max_position_embeddings": max(LENGTHS)})


def estimated_decoding(config: ModelConfig, chip: str, sequences: int, length: int, compiler: Compiler) -> str:
    """The row of one device of a chip."""
    program = trace_serving(Serving(config, sequences, length), chip)
    memory, step_time = time_program(compiler, program)
    if step_time is None:
        return f"| {length} | {chip} | does not fit | {memory.total} | |"
    rate = sequences / step_time.step.value
    ratios = published_range(chip, experts=False)
    of = f"{ratios.count} steps of {'this chip' if ratios.chip else 'other chips'}"
    return (
        f"| {length} | {chip} | {rate:.4g} ({step_time.step.level}) | {human(memory.total.value)} | "
        f"{ratios.low:.2f} to {ratios.high:.2f}, {of} |"
    )


def measured_decoding(config: ModelConfig, sequences: int, length: int, steps: int) -> str:
    """The row of this CPU: the engine's decoding steps of all sequences, the median."""
    from flax import nnx

    gc.collect()  # the engine before
    before = _alive()
    model = pack_weights(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, stacked=False))
    limits = Limits(sequences, STEP_TOKENS, length, 16, mixed_tokens=STEP_TOKENS)
    new = steps + 1 + -(-sequences * length // (STEP_TOKENS - sequences))  # the first prompts are done before the last
    engine = Engine(model, limits=limits, kv_dtype="bfloat16", prefix_cache=False)
    counts = dict.fromkeys(range(sequences), 0)
    draw = np.random.default_rng(0)

    def submit(number: int) -> None:
        def sink(delta: Delta) -> None:
            counts[number] += len(delta.token_ids)

        prompt = tuple(draw.integers(0, config.vocab_size, length - new).tolist())
        engine.submit(Request(prompt, Sampling(max_new_tokens=new, ignore_eos=True), sink))

    for number in range(sequences):
        submit(number)
    durations = []
    while not engine.idle:
        tokens = sum(counts.values())
        all_decode = min(counts.values()) > 0
        start = time.perf_counter()
        engine.step()
        if all_decode and sum(counts.values()) - tokens == sequences:
            durations.append(time.perf_counter() - start)
    rate = sequences / statistics.median(durations[len(durations) // 4 :])
    return f"| {length} | {machine.cpu().name} | {rate:.4g} (measured) | {human(_alive() - before)} | |"


def _alive() -> int:
    """Bytes of all arrays."""
    return sum(array.nbytes for array in jax.live_arrays())


def step_rows(options: argparse.Namespace) -> Iterator[str]:
    """The rows of the table of `steps`."""
    config = read_config(options.config, ["model.compute_dtype=float32"])
    length = config.data.sequence_length
    if options.cpu:
        for rows in options.rows:
            measurement = measured_step(config, rows, options.steps)
            yield result_row(rows, measurement, measurement.device, length)
        return
    with Progress("rates") as progress, Compiler() as compiler:
        for target in (target for target in SLICES if any(text in target for text in options.only or [""])):
            for rows in options.rows:
                progress.say(f"compiling the step of {rows} rows for {target}")
                yield result_row(rows, estimated_step(config, target, rows, compiler), target, length)


def decoding_rows(options: argparse.Namespace) -> Iterator[str]:
    """The rows of the table of `decoding`."""
    config = model_of(options.config)
    if options.cpu:
        for length in options.lengths:
            yield measured_decoding(config, options.sequences, length, options.steps)
        return
    with Compiler() as compiler:
        for chip in options.only or CHIPS:
            for length in options.lengths:
                yield estimated_decoding(config, chip, options.sequences, length, compiler)


TABLES: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[str]]]] = {
    "steps": (STEPS_HEAD, step_rows),
    "decoding": (DECODING_HEAD, decoding_rows),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--config", default=str(EXAMPLE), metavar="YAML", help="a training configuration")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="slices that have one of these texts, or chips")
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS, metavar="N", help="rows of a step")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="decoded at once (8)")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="tokens of a sequence")
    parser.add_argument("--cpu", action="store_true", help="measure on this CPU, and estimate nothing")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps that the CPU runs (40)")
    options = parser.parse_args(arguments)
    if options.table == "decoding" and not set(options.only or CHIPS) <= set(CHIPS):
        parser.error(f"decoding is for chips: --only takes {', '.join(CHIPS)}")
    head, rows = TABLES[options.table]
    where = f"{machine.cpu().cores} cores"
    if not options.cpu:
        where = " ".join(f"{name} {version}" for name, version in libtpu.versions().items())
    print(f"{where}\n\n{head}", flush=True)
    usage = machine.Usage()
    for row in rows(options):
        print(row, flush=True)
    if options.cpu and (complaint := usage.complaint(BUSY)):
        print(f"\nDo not quote this: {complaint}")
