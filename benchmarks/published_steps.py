"""Training steps that others measured, next to this library's step of the same model and shape, estimated.

    python benchmarks/published_steps.py            all rows; each takes minutes of compilation
    python benchmarks/published_steps.py --rows 0
    python benchmarks/published_steps.py --analytic formulas alone, in seconds

The published figures are MaxText's, on TPUs, from the repository tpu-recipes (the file of each row is in `ROWS`). The
programs differ: MaxText keeps activations in the host's memory, this library computes them again. So the ratio says
how far the two are apart, not only how far the estimate is from the truth.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from vishwamai.core.target import devices_of
from vishwamai.planning.allocation import training_config
from vishwamai.planning.compiler import Compiler
from vishwamai.planning.program_time import time_program
from vishwamai.planning.speed import training_speed, training_time
from vishwamai.planning.training import trace_training

LLAMA_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
}


class Published(NamedTuple):
    """One published step: seconds, and what it computed. `source`: a file below training/ of tpu-recipes."""

    name: str
    model: dict[str, Any]
    target: str
    rows: int
    length: int
    seconds: float
    source: str


ROWS = (
    Published("Llama 3.1 8B", LLAMA_8B, "v6e:4x4", 3, 8192, 3.393, "trillium/Llama3.1-8B-MaxText/v6e-16"),
    Published("Llama 3.1 8B", LLAMA_8B, "v6e:16x16", 4, 8192, 4.546, "trillium/Llama3.1-8B-MaxText/v6e-256"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="which of ROWS")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--analytic", action="store_true", help="formulas alone")
    chosen = parser.parse_args()
    for index in chosen.rows:
        row = ROWS[index]
        model = row.model | {"max_position_embeddings": row.length}
        config = training_config(
            model,
            {"remat": chosen.remat},
            row.target,
            row.rows * devices_of(row.target),
            row.length,
        )
        analytic = training_time(config, row.target)
        print(f"{row.name} on {row.target}, {row.rows} rows of {row.length} on a chip, remat {chosen.remat}")
        print(f"  published {row.seconds:.3f} s ({row.source})")
        print(f"  analytic  {analytic.value:.3f} s, {analytic.value / row.seconds:.2f} of it", flush=True)
        if chosen.analytic:
            continue
        with Compiler(timeout=7200) as compiler:
            memory, found = time_program(compiler, trace_training(config, row.target))
        print(f"  memory    {memory}")
        if found is not None:
            print(f"  verified  {found.step.value:.3f} s, {found.step.value / row.seconds:.2f} of it")
            print(f"  {training_speed(config, row.target, found.step)}\n{found}", flush=True)


if __name__ == "__main__":
    main()
