"""Whole steps of serving on one device of TPUs you do not have: a decoding step of many sequences, and a prompt.

    python benchmarks/tpu.py serving                              Llama 3 8B, 64 sequences of 4096 tokens, and a prompt
    python benchmarks/tpu.py serving --targets v5p --steps prompt

The step is the one that the engine runs: all layers, the pages' update and the choice of the next token. "decode" takes
the largest logit; "draw" draws with a temperature of 0.8, top-k of 50 and top-p of 0.95. A step is compiled
by the TPU's own compiler and followed as `vishwamai.planning.step_time` does, with the tables that steer the kernels.
"bound" is the time that HBM needs for the weights and the pages that are live, or the matrix units for a prompt's
products; "share" is bound / time. "moved" is the time of copies, transposes and reshapes that XLA adds between kernels.
v6e has too little memory for 64 sequences in bfloat16: its weights and pages have 8 bits.
"""

from __future__ import annotations

from typing import Any

from subjects.plans.published import LLAMA_8B

from vishwamai.bench import estimates
from vishwamai.core.target import Target
from vishwamai.inference import Sampling
from vishwamai.models import ModelConfig
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.serving import Serving, kv_bytes_per_token, size, trace_serving
from vishwamai.planning.time.program_time import StepTime, time_program
from vishwamai.training.flops import flops_per_token

NARROW: dict[str, dict[str, Any]] = {"v6e": {"kv_dtype": "int8", "quantize": "int8"}}
"""Where bfloat16 does not fit."""
STEPS = ("decode", "draw", "prompt")
DRAW = Sampling(temperature=0.8, top_k=50, top_p=0.95)


def bound(serving: Serving, target: str, prompt: int | None) -> float:
    """Seconds that one device needs at least."""
    chip = Target.parse_chip(target)
    if prompt is None:
        _, variables = serving.parameters()
        embedding = serving.config.vocab_size * serving.config.hidden_size * 2  # of which a step reads a few rows
        live = serving.batch_size * serving.length * kv_bytes_per_token(serving)
        return (size(variables) - embedding + live) / chip.hbm_bandwidth_per_device
    head = 2.0 * serving.config.vocab_size * serving.config.hidden_size
    # A token sees half of the prompt in the mean, and one token has logits.
    work = (flops_per_token(serving.config, prompt // 2) / 3 - head) * prompt + head
    return work / chip.peak_per_device(serving.dtype)  # weights of 8 bits are widened


def copy_seconds(step_time: StepTime) -> tuple[float, list[str]]:
    """Seconds of what only moves data, and its rows, the longest first."""
    rows = ((row.name, row.seconds, row.calls) for row in step_time.rows if row.part == "fusions")
    lost, named = estimates.layout_copies(rows)
    copies = step_time.parts["copies"].value
    waited = [f"waiting for copies {copies * 1e6:.0f} us"] if copies else []
    return lost + copies, named + waited


def main() -> None:
    parser = estimates.parser(__doc__, targets=["v5p", "v6e", "tpu7x"], steps=STEPS)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--length", type=int, default=4096, help="tokens of each sequence")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--layers", type=int, default=LLAMA_8B["num_hidden_layers"])
    options = parser.parse_args()
    config = ModelConfig.from_dict(
        LLAMA_8B | {"max_position_embeddings": options.length, "num_hidden_layers": options.layers}
    )
    for target in options.targets:
        serving = Serving(config, options.sequences, options.length, page_size=64, **NARROW.get(target, {}))
        for step in options.steps:
            prompt, sampling = options.prompt if step == "prompt" else None, DRAW if step == "draw" else None
            _print(serving, target, prompt, sampling)


def _print(serving: Serving, target: str, prompt: int | None, sampling: Sampling | None) -> None:
    subject = f"a prompt of {prompt} tokens" if prompt else f"{serving.batch_size} sequences of {serving.length} tokens"
    subject += ", drawn" if sampling else ""
    kinds = f"weights {serving.quantize or serving.dtype}, pages {serving.kv_dtype}"
    print(f"{target}: {subject}, {kinds}", flush=True)
    with Compiler(timeout=3600) as compiler:
        memory, step_time = time_program(compiler, trace_serving(serving, target, prompt, sampling))
    if step_time is None:
        print(f"  {memory}")
        return
    least = bound(serving, target, prompt)
    lost, rows = copy_seconds(step_time)
    seconds = step_time.step.value
    print(f"  bound {least * 1e3:.3f} ms, share {least / seconds:.3f}, moved {lost / seconds:.1%}")
    print(*(f"    moved: {text}" for text in rows), step_time, sep="\n", flush=True)
