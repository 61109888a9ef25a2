"""The native CPU kernels side by side with torch and XLA, in one process: a line for each case, with rates and ratios,
then the ratios' means.

Every round calls the contestants in a new random order. A ratio is that of the best times; in brackets stands the
median of the rounds' ratios. A contestant whose numbers are outside the contract's tolerance (a peer: eight times that)
is named and not timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping

import jax

import vishwamai
from vishwamai.bench import numbers
from vishwamai.bench.candidates import Contestant, candidates, theirs
from vishwamai.bench.contest import ContestOutcome, contest
from vishwamai.bench.gradient import gradient_case, work
from vishwamai.bench.subject import Peer, subject
from vishwamai.core import ffi
from vishwamai.core.cases import Case
from vishwamai.measure.timing import Sampler, sampler, side_by_side
from vishwamai.ops.catalogue import operations, specs_of

HIGH = 2.0**-16
"""Relative rounding unit of our float32 products at precision "high"."""

PEERS = 8.0
"""A peer may err so many times as much as the contract allows ours: it is a baseline as long as it computes the
same.
"""


@dataclasses.dataclass(frozen=True)
class Comparison:
    """One line: a case, and who takes part in addition to our native kernel and torch.

    Attributes:
      unit: unit of the rate: "GFLOP/s", "GOP/s" or "GB/s".
      gradients: bool, True for forward and backward pass together.
      xla: our implementation that stands for XLA where the operation has no peer in JAX; None leaves XLA out.
      more: further contestants by label. One that is called "ours" takes the place of our kernel, which is then called
        "plain".
    """

    case: Case
    unit: str = "GFLOP/s"
    gradients: bool = False
    xla: str | None = "xla"
    more: Mapping[str, Peer] = dataclasses.field(default_factory=dict)


Suites = Mapping[str, Callable[[argparse.Namespace], Iterable[Comparison]]]


def contestants(comparison: Comparison) -> list[Contestant]:
    """Ours, torch and XLA under these names, and the contestants of `more`."""
    about, operation = subject(comparison.case.op), operations()[comparison.case.op]
    able, _ = candidates(operation, comparison.case, about, comparison.gradients)
    by_label: dict[str, Contestant] = {}
    for candidate in able:
        if candidate.implementation == "native_cpu":
            by_label["ours"] = candidate
        elif candidate.framework == "torch":
            by_label.setdefault("torch", candidate)
        elif candidate.framework == "jax" and comparison.xla:
            by_label["xla"] = candidate
    for candidate in able:
        if comparison.xla and candidate.implementation == comparison.xla:
            by_label.setdefault("xla", candidate)
    if "ours" in comparison.more:
        by_label["plain"] = by_label.pop("ours")
    by_label |= {label: theirs(peer, comparison.case, comparison.gradients) for label, peer in comparison.more.items()}
    first = {"ours": 0, "plain": 1, "torch": 2}
    return [
        dataclasses.replace(by_label[label], name=label) for label in sorted(by_label, key=lambda x: first.get(x, 3))
    ]


def run(
    comparison: Comparison, rounds: int, seconds: float, sample: Sampler, unit: float = 0.0
) -> tuple[list[ContestOutcome], float]:
    """(the outcomes, the work of one call: FLOP or bytes)."""
    case, about = comparison.case, subject(comparison.case.op)
    able = contestants(comparison)
    spec = specs_of(operations()[case.op], case)[0]
    flops, nbytes = spec.flops, spec.bytes_moved
    if comparison.gradients:
        case = gradient_case(case)
        assert case is not None, f"{comparison.case.name} has no gradient"
        flops, nbytes = work(case, spec)
    arrays = case.make()
    part = about.gradient_sample(case, arrays) if comparison.gradients else about.sample(case, arrays)
    right = numbers.truth(part, comparison.gradients, unit)
    outcomes = contest(
        able,
        arrays,
        lambda contestant, outputs: numbers.check(
            outputs, part, right, 1.0 if contestant.name in ("ours", "plain") else PEERS
        ),
        lambda calls: side_by_side(calls, rounds=rounds, sample=sample, sample_seconds=seconds),
    )
    return outcomes, float(nbytes if comparison.unit == "GB/s" else flops)


def _line(
    comparison: Comparison, outcomes: Iterable[ContestOutcome], work: float
) -> tuple[str, dict[str, float], dict[str, float]]:
    """(the line, rates by contestant, ratios of best times by peer)."""
    times = {o.candidate.name: o.timing for o in outcomes if o.timing is not None}
    rates = {name: work / timing.best / 1e9 for name, timing in times.items()}
    cells, ratios = [f"{name} {rate:.4g}" for name, rate in rates.items()], {}
    ours = times.get("ours")
    for peer, timing in times.items():
        if peer != "ours" and ours is not None:
            ratios[peer] = ours.best_ratio(timing)
            cells.append(f"| x {peer} {ratios[peer]:.2f} ({ours.ratio(timing):.2f})")
    return f"{comparison.case.name:42} {comparison.unit}: {' '.join(cells)}", rates, ratios


def _compare(suites: Suites, options: argparse.Namespace, sample: Sampler) -> dict[str, list[float]]:
    """Runs the suites and prints a line for each case; the ratios of best times, by suite, dtype and peer."""
    ratios_of: dict[str, list[float]] = {}
    for suite in options.suite:
        for comparison in suites[suite](options):
            outcomes, work = run(
                comparison, options.rounds, options.seconds, sample, HIGH if options.precision == "high" else 0.0
            )
            name = comparison.case.name
            for o in outcomes:
                if o.timing is None:
                    why = o.numbers.detail if o.numbers else o.note
                    print(f"  {name}: {o.candidate.name} is not timed: {why}", file=sys.stderr)
            line, rates, ratios = _line(comparison, outcomes, work)
            print(line, flush=True)
            dtype = name.split()[1] if suite != "int8" else ""
            for peer, ratio in ratios.items():
                ratios_of.setdefault(f"{suite} {dtype} / {peer}", []).append(ratio)
            if options.json:
                errors = {o.candidate.name: o.numbers.error for o in outcomes if o.numbers}
                with open(options.json, "a") as file:
                    file.write(
                        json.dumps({"case": name, "unit": comparison.unit, "rates": rates, "errors": errors}) + "\n"
                    )
    return ratios_of


def _comma(text: str) -> list[str]:
    return text.split(",")


def main(suites: Suites, doc: str | None, default: Iterable[str]) -> None:
    """The command line of a file that lists suites."""
    import torch

    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    parser.add_argument("--suite", default=list(default), type=_comma, help=f"of {', '.join(suites)}")
    parser.add_argument("--dtypes", default=["float32", "bfloat16"], type=_comma)
    parser.add_argument(
        "--lengths", default=[512, 1024, 2048], type=lambda text: [int(x) for x in text.split(",")], help="of attention"
    )
    parser.add_argument("--xla-length", default=1024, type=int, help="longest attention that XLA runs, which is slow")
    parser.add_argument("--precision", help='of our float32 products: "high" keeps 16 bits, for which the check allows')
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--seconds", default=0.05, type=float, help="of each contestant in each round")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: the CPU time of this process; pin it to one core"
    )
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as this process may use")
    parser.add_argument("--json", help="append one line per case to this file")
    options = parser.parse_args()
    threads = options.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    sample = sampler(time.perf_counter if options.clock == "wall" else time.process_time, warm=True)
    print(
        f"# isa {ffi.isa()}, jax {jax.__version__}, torch {torch.__version__}, {threads} threads, clock {options.clock}"
    )
    with vishwamai.kernel_config(**({"precision": options.precision} if options.precision else {})):
        ratios = _compare(suites, options, sample)
    print("# geometric means of the ratios of best times")
    for name, values in ratios.items():
        mean = math.exp(statistics.mean(map(math.log, values)))
        print(f"#   {name:40} {mean:.2f} (least {min(values):.2f}, of {len(values)})")
