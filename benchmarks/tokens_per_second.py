"""Tokens per second of decoding with 512, 1024 and 2048 tokens in each sequence: measured on this CPU, estimated for
five TPUs.

The model is that of a training configuration, examples/train_stdlib.yaml unless another is named, in bfloat16 with
random weights. A step decodes one token of each sequence, and every sequence has its full length. For a TPU the step of
one device is compiled: its memory is the compiler's, and its time an estimate. Published steps took longer than such
estimates, by the ratio of each row. They are training steps, as no decoding step is published with its program. On the
CPU the engine serves prompts that leave room for `--steps` tokens, and the median of its steps is printed.

    python benchmarks/tokens_per_second.py                   estimates: five chips, three lengths; minutes
    python benchmarks/tokens_per_second.py --only v5e v6e
    python benchmarks/tokens_per_second.py --cpu             this CPU alone; on an idle machine
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from steps_per_second import BUSY, EXAMPLE

from vishwamai.aot.compile import libtpu
from vishwamai.bench import machine
from vishwamai.core.numbers import human
from vishwamai.inference import Delta, Engine, Limits, Request, Sampling
from vishwamai.models import Decoder, ModelConfig, pack_weights
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.serving import Serving, trace_serving
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.published import published_range
from vishwamai.training.config_file import read_config

LENGTHS = (512, 1024, 2048)
CHIPS = ("v4", "v5e", "v5p", "v6e", "tpu7x")
STEP_TOKENS = 512
HEAD = "| Tokens | Where | Tokens/s | Memory | Published / estimate |\n| ---: | --- | ---: | ---: | --- |"


def model_of(path: str) -> ModelConfig:
    """The model of a training configuration, with as many positions as the longest sequence has."""
    config = read_config(path)
    keys = (config.model.config or {}) | {"vocab_size": config.tokenizer.vocab_size}
    return ModelConfig.from_dict(keys | {"max_position_embeddings": max(LENGTHS)})


def estimated(config: ModelConfig, chip: str, sequences: int, length: int, compiler: Compiler) -> str:
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


def measured(config: ModelConfig, sequences: int, length: int, steps: int) -> str:
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(EXAMPLE), metavar="YAML", help="a training configuration")
    parser.add_argument("--only", nargs="+", default=CHIPS, choices=CHIPS, help="chips")
    parser.add_argument("--sequences", type=int, default=8, metavar="N", help="decoded at once (8)")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N", help="tokens of a sequence")
    parser.add_argument("--cpu", action="store_true", help="measure on this CPU, and estimate nothing")
    parser.add_argument("--steps", type=int, default=40, metavar="N", help="steps that the CPU runs (40)")
    options = parser.parse_args(arguments)
    config = model_of(options.config)
    if options.cpu:
        print(f"{machine.cpu().cores} cores\n\n{HEAD}", flush=True)
        usage = machine.Usage()
        for length in options.lengths:
            print(measured(config, options.sequences, length, options.steps), flush=True)
        if complaint := usage.complaint(BUSY):
            print(f"\nDo not quote this: {complaint}")
        return
    versions = " ".join(f"{name} {version}" for name, version in libtpu.versions().items())
    print(f"{versions}\n\n{HEAD}", flush=True)
    with Compiler() as compiler:
        for chip in options.only:
            for length in options.lengths:
                print(estimated(config, chip, options.sequences, length, compiler), flush=True)


if __name__ == "__main__":
    main()
