"""Plans of Llama 3 8B and 70B, Mixtral 8x7B and Qwen3-30B-A3B on slices of v5e, v5p, v6e and TPU7x, searched.

The configurations are those of examples/plans. Prints a row for each: the mesh, policy and microbatches that the search
chose, the memory of one device, and the time of a step. First every search is probed, then the chosen programs are
compiled, so that a run that is interrupted has something of each. Each search runs in a process of its own. Answers are
kept in a file as they are found, and by the planner: the same command goes on where it stopped.

    python benchmarks/searched_plans.py                                  hours on two cores
    python benchmarks/searched_plans.py --only llama-3-8b v5e --price v5e=1.2
    python benchmarks/searched_plans.py --probe-only
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from vishwamai.aot.compile import libtpu
from vishwamai.core import caches
from vishwamai.core.figures import Estimate, cost_of_tokens
from vishwamai.core.progress import Progress
from vishwamai.core.target import Target, devices_of

GIB = 1 << 30
CONFIGS = pathlib.Path(__file__).parents[1] / "examples" / "plans"


class Case(NamedTuple):
    """One search: a file of examples/plans, and a slice."""

    model: str
    target: str

    @property
    def label(self) -> str:
        """How `--only` names it."""
        return f"{self.model} {self.target}"


SLICES = {
    "llama-3-8b": ("v6e:4x4", "v5p:2x2x4", "tpu7x:2x2x2", "v5e:4x4"),
    "qwen3-30b-a3b": ("v6e:4x8", "v5p:2x4x4", "tpu7x:2x2x4", "v5e:8x8"),
    "mixtral-8x7b": ("v6e:8x8", "v5p:4x4x4", "tpu7x:2x4x4", "v5e:8x16"),
    "llama-3-70b": ("v6e:8x16", "v5p:4x4x8", "tpu7x:4x4x4", "v5e:16x16"),
}
"""For each configuration one slice of each chip."""
CASES = tuple(Case(model, targets[i]) for i in range(4) for model, targets in SLICES.items())


def ask(case: Case, verify: bool, finalists: int) -> dict[str, Any]:
    """What the search chooses, as plain values; "chosen" is None where nothing fits."""
    from vishwamai.planning.search.plan import plan_training
    from vishwamai.training.config_file import read_config

    config = read_config(str(CONFIGS / f"{case.model}.yaml"), [])

    def say(text: str, left: float | None = None) -> None:
        print(text, file=sys.stderr, flush=True)

    plan = plan_training(config, case.target, search=True, verify=verify, finalists=finalists, report=say)
    used = [resource.getrusage(process).ru_maxrss for process in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    answer: dict[str, Any] = {
        "name": case.label,
        "rss_mib": max(used) >> 10,
        "limit": plan.limit,
        "candidates": plan.count,
        "rows": config.batch_size,
        "length": config.data.sequence_length,
        "chosen": None,
    }
    if plan.chosen is None:
        return answer
    chosen, speed = plan.chosen, plan.chosen.speed
    assert speed is not None
    return answer | {
        "chosen": chosen.name,
        "bytes": chosen.best.value,
        "level": chosen.best.level,
        "formula_s": None if chosen.formula is None else chosen.formula.value,
        "step_s": speed.step.value,
        "step_level": speed.step.level,
        "missing": [] if chosen.time is None else list(chosen.time.missing),
        "mfu": speed.mfu.value,
        "tokens_per_chip": speed.tokens_per_chip.value,
    }


def ask_apart(index: int, verify: bool, finalists: int) -> dict[str, Any]:
    """`ask` in a process of its own; "error" where that fails."""
    command = [sys.executable, __file__, "--one", str(index), "--finalists", str(finalists)]
    done = subprocess.run([*command, *([] if verify else ["--probe-only"])], stdout=subprocess.PIPE, text=True)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"name": CASES[index].label, "error": f"ended with status {done.returncode}"}


def entry_text(entry: Mapping[str, Any], prices: Mapping[str, float]) -> str:
    """A row of the table, in Markdown."""
    model, target = entry["name"].split(" ")
    chip = Target.parse_chip(target)
    chips = devices_of(target) // chip.devices
    head = f"| {model} | {target} | {chips} |"
    if "error" in entry:
        return f"{head} {entry['error']} | | | | | |"
    if entry["chosen"] is None:
        return f"{head} nothing fits | | | | | |"
    least = "at least " if entry["missing"] else ""
    price = prices.get(chip.name)
    cost = "-"
    if price is not None:
        step, tokens = Estimate(entry["step_s"], entry["step_level"]), entry["rows"] * entry["length"]
        cost = f"{cost_of_tokens(price, step, tokens, chips).value:.3f}"
    return (
        f"{head} `{entry['chosen']}` | {entry['bytes'] / GIB:.2f} of {entry['limit'] / GIB:.2f} ({entry['level']}) | "
        f"{least}{entry['step_s']:.3g} s ({entry['step_level']}) | {entry['mfu']:.1%} | "
        f"{entry['tokens_per_chip']:.0f} | {cost} |"
    )


COLUMNS = {
    "Model": "---",
    "Slice": "---",
    "Chips": "---:",
    "Chosen": "---",
    "Memory of a device, GiB": "---:",
    "Step": "---:",
    "MFU": "---:",
    "Tokens/s a chip": "---:",
    "USD per million tokens": "---:",
}
"""How each is aligned."""
HEAD = f"| {' | '.join(COLUMNS)} |\n| {' | '.join(COLUMNS.values())} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="searches whose names have all of these texts")
    parser.add_argument("--probe-only", action="store_true", help="compile nothing: times are by formulas")
    parser.add_argument("--finalists", type=int, default=1, metavar="N", help="meshes that are compiled (default: 1)")
    parser.add_argument("--price", action="append", default=[], metavar="CHIP=USD", help="of a chip and hour")
    parser.add_argument("--json", type=pathlib.Path, default="searched_plans.json", help="where answers are kept")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(ask(CASES[options.one], not options.probe_only, options.finalists)))
        return
    prices = {chip: float(usd) for chip, usd in (price.split("=") for price in options.price)}
    versions = " ".join(f"{name} {version}" for name, version in libtpu.versions().items())
    chosen = [i for i, case in enumerate(CASES) if all(text in case.label for text in options.only or [""])]
    stored = json.loads(options.json.read_text()) if options.json.exists() else {}

    def key(index: int, verify: bool) -> str:
        return f"{CASES[index].label}, {f'{options.finalists} compiled' if verify else 'probed'}, {versions}"

    with Progress("searched_plans") as progress:
        for verify in (False,) if options.probe_only else (False, True):
            for done, index in enumerate(chosen):
                if key(index, verify) in stored or key(index, True) in stored:
                    continue
                doing = "compiling" if verify else "searching"
                progress.say(f"{doing} {CASES[index].label}, {done} of {len(chosen)} done")
                answer = ask_apart(index, verify, options.finalists)
                print(entry_text(answer, prices), flush=True)
                if "error" not in answer:
                    stored[key(index, verify)] = answer
                    caches.write(options.json, json.dumps(stored, indent=1))
    print(f"\n{versions}\n\n{HEAD}")
    largest = 0
    for index in sorted(chosen, key=lambda index: list(SLICES).index(CASES[index].model)):
        answer = stored.get(key(index, True)) or stored.get(key(index, False))
        if answer is not None:
            print(entry_text(answer, prices))
            largest = max(largest, answer.get("rss_mib", 0))
    print(f"\nThe largest process took {largest} MiB.")


if __name__ == "__main__":
    main()
