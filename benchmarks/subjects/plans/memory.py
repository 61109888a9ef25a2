"""How far the memory of a plan can be trusted: formulas and probe against the compiled program, for thirty programs.

The programs are steps of training and of serving on five chips: dense models, mixtures of experts, 8-bit products,
every remat policy, and meshes of every axis. Each is compiled in a process of its own, so one that ends its compiler
costs a line. Answers are kept in a file as they are found: the same command goes on where it stopped. The formulas are
computed anew each time. Prints a row for each program, then how many are within 10 % (probe) and 15 % (formulas).

    python benchmarks/plans.py memory                      an hour on two cores
    python benchmarks/plans.py memory --only v5e offload --verify no
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vishwamai.aot.compile import libtpu
from vishwamai.aot.compile.traced import Program
from vishwamai.core import caches
from vishwamai.core.progress import Progress
from vishwamai.models import ModelConfig
from vishwamai.planning.memory.allocation import training_config
from vishwamai.planning.memory.analytic import serving_memory, training_memory
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.serving import Serving, trace_serving
from vishwamai.planning.training import trace_training

GIB = 1 << 30
BOUNDS = {"probe": 0.10, "analytic": 0.15}
"""How far each level may be from the compiled program, by the issue that asked for it."""

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}
QWEN = LLAMA | {"model_type": "qwen3", "vocab_size": 151936, "num_key_value_heads": 8, "intermediate_size": 6144}
GEMMA = LLAMA | {"model_type": "gemma2", "vocab_size": 64000, "head_dim": 256, "num_attention_heads": 8}
MIXTRAL = LLAMA | {
    "model_type": "mixtral",
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN_MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
FP8 = {"precision": "fp8"}


class Case(NamedTuple):
    """One program: rows of so many tokens on all devices. `keys`: of the training step, or of what is served."""

    name: str
    target: str
    model: Mapping[str, Any]
    rows: int
    length: int
    keys: Mapping[str, Any] = {}
    serves: bool = False

    @property
    def label(self) -> str:
        """How the table and `--only` name it."""
        return f"{self.target} {self.name}"

    def subject(self) -> Any:
        """The training configuration, or what is served."""
        if self.serves:
            return Serving(ModelConfig.from_dict(dict(self.model)), self.rows, self.length, **self.keys)
        return training_config(self.model, self.keys, self.target, self.rows, self.length)

    def program(self) -> Program:
        """The traced program."""
        return (trace_serving if self.serves else trace_training)(self.subject(), self.target)

    def analytic(self) -> dict[str, float]:
        """Bytes by class and formulas."""
        memory = (serving_memory if self.serves else training_memory)(self.subject(), self.target)
        return {name: part.value for name, part in memory.parts.items()}

    def digest(self, versions: Mapping[str, str]) -> str:
        """Of what an answer belongs to."""
        text = json.dumps([self, versions], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


CASES = (
    Case("dense, none", "v5e", LLAMA, 4, 2048, {"remat": "none"}),
    Case("dense, dots", "v5e", LLAMA, 8, 2048, {"remat": "dots"}),
    Case("dense, block_wise", "v5e", LLAMA, 8, 2048, {"remat": "block_wise"}),
    Case("dense, full", "v5e", LLAMA, 8, 2048, {"remat": "full"}),
    Case("dense, offload", "v5e", LLAMA, 8, 2048, {"remat": "offload"}),
    Case("fp8, full", "v5e", LLAMA, 8, 2048, {"remat": "full"} | FP8),
    Case("served", "v5e", LLAMA | {"num_hidden_layers": 24}, 64, 2048, serves=True),
    Case("dense, fsdp=4, microbatches=2", "v5e:2x2", LLAMA, 32, 2048, {"remat": "full", "microbatches": 2}),
    Case("dense, tensor=4, dots", "v5e:2x2", LLAMA, 16, 2048, {"remat": "dots", "mesh": {"tensor": 4}}),
    Case("dense, sequence=4, full", "v5e:2x2", LLAMA, 4, 8192, {"remat": "full", "mesh": {"sequence": 4}}),
    Case("MoE, expert=4, full", "v5e:2x2", MIXTRAL, 16, 2048, {"remat": "full", "mesh": {"expert": 4}}),
    Case("dense, full", "v4", QWEN, 8, 2048, {"remat": "full"}),
    Case("dense, none, bfloat16 moments", "v4", LLAMA, 8, 2048, {"optimizer": {"moment_dtype": "bfloat16"}}),
    Case("MoE, dots", "v4", MIXTRAL, 4, 2048, {"remat": "dots"}),
    Case("dense, fsdp=2 tensor=2", "v4:2x2x1", GEMMA, 16, 2048, {"remat": "dots", "mesh": {"fsdp": 2, "tensor": 2}}),
    Case("served, windows", "v4", GEMMA | {"num_hidden_layers": 12}, 32, 4096, serves=True),
    Case("dense, dots", "v5p", QWEN | {"num_hidden_layers": 12}, 8, 2048, {"remat": "dots"}),
    Case("MoE, none", "v5p", QWEN_MOE, 8, 2048, {"remat": "none"}),
    Case("dense, offload", "v5p", LLAMA | {"num_hidden_layers": 16}, 16, 2048, {"remat": "offload"}),
    Case("fp8 by blocks, dots", "v5p", LLAMA, 8, 2048, FP8 | {"remat": "dots", "fp8": {"scaling": "block"}}),
    Case("dense, data=4, none", "v5p:2x2x1", LLAMA, 32, 2048, {"remat": "none", "mesh": {"data": 4}}),
    Case("dense, full", "v6e", GEMMA | {"num_hidden_layers": 12}, 8, 2048, {"remat": "full"}),
    Case("fp8, none", "v6e", LLAMA, 4, 2048, {"remat": "none"} | FP8),
    Case("fp8, fsdp=4, full", "v6e:2x2", LLAMA, 32, 2048, {"remat": "full"} | FP8),
    Case("MoE, fsdp=2 expert=2", "v6e:2x2", MIXTRAL, 16, 2048, {"remat": "full", "mesh": {"fsdp": 2, "expert": 2}}),
    Case("served, int8", "v6e", LLAMA | {"num_hidden_layers": 32}, 64, 4096, {"kv_dtype": "int8"}, True),
    Case("dense, none", "tpu7x", QWEN, 8, 2048, {"remat": "none"}),
    Case("fp8, dots", "tpu7x", LLAMA | {"num_hidden_layers": 16}, 8, 2048, {"remat": "dots"} | FP8),
    Case("MoE, block_wise", "tpu7x", MIXTRAL | {"num_hidden_layers": 8}, 8, 2048, {"remat": "block_wise"}),
    Case("dense, fsdp=8, full", "tpu7x:2x2x1", LLAMA | {"num_hidden_layers": 16}, 64, 2048, {"remat": "full"}),
)
"""The thirty programs."""


def ask(case: Case, verify: bool) -> dict[str, Any]:
    """The compiler's answers about a case: bytes by level, with the seconds and the memory that they took."""
    with Compiler(timeout=1800) as compiler:
        program = case.program()
        answer: dict[str, Any] = {"probe": compiler.probe(program).total.value}
        if verify:
            memory = compiler.verify(program)
            answer |= {"verified": memory.total.value, "fits": memory.fits}
    used = [resource.getrusage(process) for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return answer | {
        "cpu_s": round(sum(usage.ru_utime for usage in used), 1),
        "rss_mib": max(usage.ru_maxrss for usage in used) >> 10,
    }


def ask_apart(index: int, verify: bool) -> dict[str, Any]:
    """`ask` in a process of its own; "error" where that fails."""
    command = [sys.executable, __file__, "--one", str(index), *([] if verify else ["--verify", "no"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    output = (done.stderr or "").strip().splitlines()
    return {"error": output[-1][:300] if output else f"ended with status {done.returncode}"}


def row(case: Case, answer: Mapping[str, Any]) -> dict[str, Any]:
    """A case with all that is known of it, and the errors as shares of the compiled program."""
    parts = case.analytic()
    entry: dict[str, Any] = {"name": case.label, **answer, "analytic": sum(parts.values()), "parts": parts}
    true = answer.get("verified") or answer.get("probe")
    if true:
        entry["errors"] = {level: entry[level] / true - 1 for level in BOUNDS if level in entry}
    return entry


def entry_text(entry: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "error" in entry:
        return f"{entry['name']:<42} {entry['error']}"
    cells = [
        f"{entry[name] / GIB:9.2f}" if name in entry else f"{'-':>9}" for name in ("analytic", "probe", "verified")
    ]
    errors = [f"{entry['errors'][name]:+9.1%}" for name in BOUNDS]
    return f"{entry['name']:<42}{''.join(cells)}{''.join(errors)}{'' if entry.get('fits', True) else '  does not fit'}"


HEAD = f"{'GiB of one device':<42}{'analytic':>9}{'probe':>9}{'verified':>9}{'probe':>9}{'analytic':>9}"


def summary(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """How many are within the bounds, and how far the others are from them."""
    rows = [entry for entry in rows if "errors" in entry]
    lines = []
    for level, bound in BOUNDS.items():
        errors = {entry["name"]: entry["errors"][level] for entry in rows}
        if not errors:
            continue
        outside = {name: error for name, error in errors.items() if abs(error) > bound}
        worst = ", ".join(f"{name} {e:+.1%}" for name, e in sorted(outside.items(), key=lambda x: -abs(x[1])))
        median = statistics.median(map(abs, errors.values()))
        lines.append(
            f"{level}: {len(errors) - len(outside)} of {len(errors)} within {bound:.0%}, median {median:.1%}, "
            f"{min(errors.values()):+.1%} to {max(errors.values()):+.1%}{'; outside: ' + worst if worst else ''}"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="programs whose names have one of these texts")
    parser.add_argument("--verify", choices=("yes", "no"), default="yes", help="no: compare with the probe")
    parser.add_argument("--json", type=pathlib.Path, default="plan_accuracy.json", help="where answers are kept")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    verify = options.verify == "yes"
    if options.one is not None:
        print(json.dumps(ask(CASES[options.one], verify)))
        return
    versions = libtpu.versions()
    patterns = options.only or [""]
    chosen = [i for i, case in enumerate(CASES) if any(text in case.label for text in patterns)]
    stored = json.loads(options.json.read_text()) if options.json.exists() else {}
    rows = []
    print(f"{', '.join(f'{name} {version}' for name, version in versions.items())}\n{HEAD}", flush=True)
    with Progress("plan_accuracy") as progress:
        for done, index in enumerate(chosen):
            case = CASES[index]
            key, progress_of = case.digest(versions), f"{done} of {len(chosen)} done, {case.label}"
            answer = stored.get(key, {})
            if "probe" not in answer or (verify and "verified" not in answer):
                progress.say(f"{progress_of}: {'compiling' if verify else 'probing'}")
                answer = ask_apart(index, verify)
                if "error" not in answer:
                    stored[key] = {"name": case.label, **answer}
                    caches.write(options.json, json.dumps(stored, indent=1))
            progress.say(f"{progress_of}: by formulas")
            rows.append(row(case, answer))
            print(entry_text(rows[-1]), flush=True)
    print("\n".join(["", *summary(rows)]))


if __name__ == "__main__":
    main()
