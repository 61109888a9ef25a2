"""Training steps that others measured, next to this library's step of the same model and shape, estimated.

    python benchmarks/plans.py published            all rows; each takes minutes of compilation
    python benchmarks/plans.py published --rows 0
    python benchmarks/plans.py published --analytic formulas alone, in seconds

The published figures are MaxText's, on TPUs, from the repositories tpu-recipes and maxtext (the file of each row is in
`ROWS`). The programs differ: in the first rows MaxText keeps activations in the host's memory, this library computes
them again. So the ratio says how far the two are apart, not only how far the estimate is from the truth.
"""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from vishwamai.core.target import devices_of
from vishwamai.models import ModelConfig
from vishwamai.planning.memory.allocation import training_config
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.time.program_time import time_program
from vishwamai.planning.time.speed import training_speed, training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config import TrainConfig
from vishwamai.training.flops import flops_per_token

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


MIXTRAL = LLAMA_8B | {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "rope_theta": 1e6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}

TRILLIUM = "tpu-recipes/training/trillium"
RECIPES = f"{TRILLIUM}/Llama3.1-8B-MaxText"


class Published(NamedTuple):
    """One published step: seconds, and what it computed. `source`: a repository and a file in it. `keys`: of the step,
    where remat is not full or the mesh not fsdp alone.
    """

    name: str
    model: dict[str, Any]
    target: str
    rows: int
    length: int
    seconds: float
    source: str
    keys: dict[str, Any] = {}


def maxtext(billions: int) -> dict[str, Any]:
    """The model that MaxText's `global_parameter_scale` names, a power of two."""
    thirds, rest = divmod(billions.bit_length() - 1, 3)
    heads = 16 << thirds + (rest > 0)
    return {
        "model_type": "llama",
        "num_hidden_layers": 16 << thirds,
        "vocab_size": 32000,
        "hidden_size": 2048 << thirds + (rest > 1),
        "intermediate_size": 448 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 128,
    }


def by_rate(billions: int, target: str, rows: int, tflops: float, keys: dict[str, Any] | None = None) -> Published:
    """A step of 2048 tokens in a row whose rate is published, in TFLOP/s of a chip; MaxText counts operations as
    `training.flops` does.
    """
    model, length = maxtext(billions), 2048
    described = ModelConfig.from_dict(model | {"max_position_embeddings": length})
    seconds = flops_per_token(described, length) * rows * length / (tflops * 1e12)
    source = f"maxtext/MaxText/configs/{target.partition(':')[0]}/{billions}b.sh"
    return Published(f"MaxText {billions}B", model, target, rows, length, seconds, source, keys or {})


V5P = {"remat": "dots", "mesh": {"fsdp": 16, "tensor": 4}}
ROWS = (
    Published("Llama 3.1 8B", LLAMA_8B, "v6e:4x4", 3, 8192, 3.393, f"{RECIPES}/v6e-16"),
    Published("Llama 3.1 8B", LLAMA_8B, "v6e:16x16", 4, 8192, 4.546, f"{RECIPES}/v6e-256"),
    by_rate(16, "v5e:16x16", 6, 120),
    by_rate(32, "v5e:16x16", 4, 132),
    by_rate(64, "v5e:16x16", 2, 118),
    by_rate(32, "v5p:4x4x4", 7, 328, V5P),
    by_rate(64, "v5p:4x4x4", 3, 323, V5P),
    Published("Mixtral 8x7B", MIXTRAL, "v6e:16x16", 8, 4096, 8.409, f"{TRILLIUM}/Mixtral-8x7B-MaxText"),
)
"""`planning.time.published` has the estimates of these rows, which `vishwamai plan` prints as a range."""


def configured(row: Published, keys: dict[str, Any]) -> TrainConfig:
    """The step of a row, changed by `keys`."""
    model = row.model | {"max_position_embeddings": row.length}
    keys = {"remat": "full"} | row.keys | keys
    return training_config(model, keys, row.target, row.rows * devices_of(row.target), row.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="which of ROWS")
    parser.add_argument("--remat", help="in place of each row's own")
    parser.add_argument("--analytic", action="store_true", help="formulas alone")
    chosen = parser.parse_args()
    for index in chosen.rows:
        row = ROWS[index]
        config = configured(row, {} if chosen.remat is None else {"remat": chosen.remat})
        analytic = training_time(config, row.target)
        print(f"{row.name} on {row.target}, {row.rows} rows of {row.length} on a chip, remat {config.remat}")
        print(f"  published {row.seconds:.3f} s ({row.source})")
        print(f"  analytic  {analytic.value:.3f} s, {analytic.value / row.seconds:.2f} of it", flush=True)
        if chosen.analytic:
            continue
        with Compiler(timeout=7200) as compiler:
            memory, step_time = time_program(compiler, trace_training(config, row.target))
        print(f"  memory    {memory}")
        if step_time is not None:
            print(f"  verified  {step_time.step.value:.3f} s, {step_time.step.value / row.seconds:.2f} of it")
            print(f"  {training_speed(config, row.target, step_time.step)}\n{step_time}", flush=True)
