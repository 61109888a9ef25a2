"""The table of docs/serving.md: `serve.py` with several formats and engines in turns, each in a process of its own.

    python benchmarks/serve_table.py DIR                                     # ours: bf16, int8 and int4
    python benchmarks/serve_table.py DIR --rows bf16,serve_llama:bf16,int8,serve_llama:q8_0 \\
        --python serve_llama=PYTHON --rounds 2                               # next to llama.cpp, in its own environment

A row is a format of ours, or `CONTESTANT:FORMAT` (`serve.py`). Rates are tokens per second, the best of the rounds. The
shares are those of `serve.py`, in percent, of the round with the best rate. Memory is the most that the process had.
"ready" counts from the start of a process: with kept programs and weights that are read, rounded and packed anew, and
with kept weights, too. The first process of a row fills what is kept and is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RATES = ("prefill", "decode 1", "decode 8", "decode 32")


def run(row: str, pythons: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What `serve.py` found of a row."""
    contestant, _, format = row.rpartition(":")
    named = ["--contestant", contestant] if contestant else []
    command = [pythons.get(contestant, sys.executable), str(Path(__file__).with_name("serve.py")), *arguments]
    done = subprocess.run([*command, "--format", format, *named], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{row}: exit status {done.returncode}")
    return json.loads(done.stdout)


def line(row: str, rounds: Sequence[dict[str, Any]], read: Sequence[dict[str, Any]]) -> str:
    """A row in Markdown."""
    cells = [row]
    best = {name: max(rounds, key=lambda row: row.get(name, 0.0)) for name in RATES}
    cells += [f"{best[name][name]:.1f}" if name in best[name] else "" for name in RATES]
    shares = [best[name].get(f"programs, {name}") for name in RATES]
    cells += ["" if share is None else f"{share:.0%}" for share in (best["decode 1"].get("bandwidth"), *shares)]
    cells.append(f"{min(figures['memory_gib'] for figures in rounds):.2f}")
    cells += [f"{min(figures['ready_s'] for figures in of):.1f}" if of else "" for of in (read, rounds)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory")
    parser.add_argument("--rows", default="bf16,int8,int4", type=lambda text: text.split(","))
    parser.add_argument("--python", action="append", default=[], help="CONTESTANT=PYTHON: its interpreter")
    parser.add_argument("--rounds", type=int, default=1)
    options, more = parser.parse_known_args()  # the others are those of `serve.py`
    pythons = dict(assignment.split("=", 1) for assignment in options.python)
    arguments_of_run = (options.directory, *more)
    figures: dict[str, list[dict[str, Any]]] = {row: [] for row in options.rows}
    read: dict[str, list[dict[str, Any]]] = {row: [] for row in options.rows}
    for row in options.rows:
        run(row, pythons, *arguments_of_run, "--ready")
    for _ in range(options.rounds):
        for row in options.rows:
            if ":" not in row:
                read[row].append(run(row, pythons, *arguments_of_run, "--ready", "--no-keep-packed"))
            figures[row].append(run(row, pythons, *arguments_of_run))
            print(json.dumps({"row": row, **figures[row][-1]}), file=sys.stderr, flush=True)
    heads = ["", *RATES, "bandwidth", *(f"programs, {name}" for name in RATES), "GiB", "ready, s", "kept, s"]
    print(f"| {' | '.join(heads)} |\n|---{'|---:' * (len(heads) - 1)}|")
    print(*(line(row, figures[row], read[row]) for row in options.rows), sep="\n")


if __name__ == "__main__":
    main()
