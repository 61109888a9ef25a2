"""Weak scaling of a training step by estimate: the same tokens on each chip, from 16 chips to 4096.

    python benchmarks/weak_scaling.py                        Llama 3 8B and 70B on v5p and v6e; compiles four programs
    python benchmarks/weak_scaling.py --models 8b --chips v6e
    python benchmarks/weak_scaling.py --analytic             formulas alone, in seconds
    python benchmarks/weak_scaling.py --quick                a small model, to try the script

Nothing here is measured. Compute is that of the compiled program (`planning.time.program_time`: kernels by their
schedules, fusions by the compiler's cycles) on the smallest slice that holds the step; every chip has the same tokens
on every slice, so it is the same on all of them. Collectives are those that the step needs, over each slice's links.
`mesh.fsdp` has all chips of a slice. More chips than a slice has are several slices, `mesh.data`, over the data
center's network.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from published_steps import LLAMA_8B

from vishwamai.core import hardware
from vishwamai.core.figures import Estimate
from vishwamai.core.hardware import TPUS
from vishwamai.core.links import estimate_collective
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.planning.exchange import exchange_seconds
from vishwamai.planning.memory.allocation import training_config
from vishwamai.planning.memory.analytic import (
    Breakdown,
    described,
    exchanged_embedding,
    split_parameters,
    training_memory,
)
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.mesh_links import links_of
from vishwamai.planning.serving import size
from vishwamai.planning.time.program_time import StepTime, time_program
from vishwamai.planning.time.speed import training_speed, training_time
from vishwamai.planning.training import trace_training
from vishwamai.training.config import TrainConfig
from vishwamai.training.program import training_step

LLAMA_70B = LLAMA_8B | {
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
}
SMALL = LLAMA_8B | {
    "num_hidden_layers": 2,
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS = {
    "8b": ("Llama 3 8B", LLAMA_8B, 8192),
    "70b": ("Llama 3 70B", LLAMA_70B, 4096),
    "small": ("A small Llama", SMALL, 512),
}
"""Name, keys of its config.json, and tokens of a row, with which a step fits v6e."""
COUNTS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step runs: `slices` slices of one kind; `target` is one of them."""

    target: str
    slices: int

    @property
    def devices(self) -> int:
        """Of one slice."""
        return math.prod(Target.parse_tpu(self.target).topology or ()) * Target.parse_chip(self.target).devices

    def __str__(self) -> str:
        return self.target if self.slices == 1 else f"{self.slices} x {self.target}"


def place_of(chip: str, chips: int) -> Place:
    """The fewest slices that have so many chips.

    >>> str(place_of("v5p", 4096)), str(place_of("v6e", 1024))
    ('v5p:16x16x16', '4 x v6e:16x16')
    """
    for slices in range(1, chips + 1):
        sides = None if chips % slices else hardware.of_chips(TPUS[chip], chips // slices)
        if sides is not None:
            return Place(f"{chip}:{hardware.sides_text(sides)}", slices)
    raise AssertionError("every chip comes alone")


@dataclasses.dataclass(frozen=True)
class Step:
    """A step on each chip.

    Attributes:
      compute: kernels, fusions and waiting for copies.
      gathers, sums, between: seconds of weights that are gathered and of an embedding's rows that are exchanged, of
        gradients that are added up within a slice, and between slices.
      bare: the share of the parameters that are gathered before any work and added up after all.
    """

    compute: Estimate
    gathers: float
    sums: float
    between: float
    bare: float

    @property
    def collectives(self) -> Estimate:
        """All of them, one after the other."""
        return Estimate(self.gathers + self.sums + self.between, "analytic", "s")

    @property
    def in_turn(self) -> Estimate:
        """Seconds of a step that hides nothing."""
        return self.compute + self.collectives

    @property
    def hidden(self) -> float:
        """Seconds of collectives that work can hide at most.

        Nothing runs before the first parameters are gathered, and nothing after the last gradients are made. All else
        may go on behind the work of other layers.
        """
        first_and_last = self.bare * (self.gathers / 2 + self.sums + self.between)
        return min(self.collectives.value - first_and_last, self.compute.value)

    @property
    def overlapped(self) -> Estimate:
        """Seconds of a step that hides all that can be hidden."""
        return Estimate(self.in_turn.value - self.hidden, self.in_turn.level, "s")


def collectives_of(config: TrainConfig, place: Place) -> dict[str, float]:
    """Seconds of gathers, of sums within a slice and between slices, and the share `bare`, all as of `Step`.

    `config` is that of one slice.

    As in `planning.exchange`, the parameters are gathered forward and backward, and their float32 gradients added up.
    Of an embedding that is split into whole lanes of a TPU, rows of the result are exchanged instead.
    libtpu 0.0.51 makes an all-reduce of a sum over all chips of a square, or of three sides (benchmarks/split_sums.py),
    which takes the time of two reduce-scatters. Between slices the part of the gradients that a device holds goes
    around a ring twice, at the bandwidth of a chip to other slices; a latency is not published, and not counted.
    """
    links, chip = links_of(config.mesh, place.target, "fsdp"), Target.parse_chip(place.target)
    params, narrow = training_step(config).parts.params, jnp.dtype(config.model.compute_dtype).itemsize
    exchanged = config.mesh.fsdp * exchanged_embedding(config)
    tables = [] if exchanged else [size(leaf) for name, leaf in params.items() if name != "layers"]
    first = max([*tables, size(params["layers"]) / described(config).num_layers])
    wide = jnp.dtype(config.model.param_dtype).itemsize
    local, numbers = size(params) / wide, (size(params) - exchanged) / wide
    tokens = config.batch_size * config.data.sequence_length
    rows = tokens * described(config).hidden_size * narrow if exchanged else 0.0
    gathers = config.microbatches * estimate_collective("all_gather", numbers * narrow, links)
    exchanges = estimate_collective("all_to_all", rows, links) if exchanged else 0.0
    square = len(links.sides) == 3 or len(set(links.sides)) < len(links.sides)
    around = 2 * (place.slices - 1) / place.slices
    return {
        "gathers": 2 * (gathers + exchanges),
        "sums": config.microbatches
        * estimate_collective("all_reduce" if square else "reduce_scatter", 4 * numbers, links),
        "between": around * 4 * local / place.devices / (chip.dcn_bandwidth / chip.devices),
        "bare": first / (size(params) - exchanged),
    }


@dataclasses.dataclass(frozen=True)
class Row:
    """One number of chips: the step, or why there is none."""

    place: Place
    config: TrainConfig
    step: Step | None = None
    declined: str = ""

    @property
    def chips(self) -> int:
        """Of all slices."""
        return self.place.slices * self.place.devices // Target.parse_chip(self.place.target).devices

    def mfu(self, seconds: Estimate) -> float:
        """The model's share of the peak in this time; every slice has the same."""
        return training_speed(self.config, self.place.target, seconds).mfu.value

    def as_text(self, first: Step | None) -> str:
        """A row of the table; efficiency compares with `first`, the step on the fewest chips."""
        mesh = f"fsdp={self.config.mesh.fsdp}"
        mesh = mesh if self.place.slices == 1 else f"data={self.place.slices} {mesh}"
        tokens = self.place.slices * self.config.batch_size * self.config.data.sequence_length
        cells = [str(self.chips), str(self.place), mesh, f"{tokens / 1e6:.3g} M"]
        step = self.step
        if step is None or first is None:
            return f"| {' | '.join(cells)} | declined: {self.declined} | | | | | |"
        pairs = [(step.in_turn, first.in_turn), (step.overlapped, first.overlapped)]
        cells += [
            _seconds(step.compute.value),
            _seconds(step.collectives.value),
            f"{step.hidden / step.collectives.value:.0%}",
            " / ".join(_seconds(mine.value) for mine, _ in pairs),
            " / ".join(f"{self.mfu(mine):.1%}" for mine, _ in pairs),
            " / ".join(f"{theirs.value / mine.value:.2f}" for mine, theirs in pairs),
        ]
        return f"| {' | '.join(cells)} |"


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.3g}"


HEADER = (
    "| Chips | Slice | Mesh | Tokens in a step | Compute, s | Collectives, s | Hidden at most | Step, s | MFU "
    "| Efficiency |\n| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def by_formulas(config: TrainConfig, target: str, memory: Breakdown) -> Estimate:
    """The compute of a step without its program: what `training_time` has besides the links."""
    split, embedding = split_parameters(config), exchanged_embedding(config)
    exchanges = exchange_seconds(config, target, described(config), split, 1.0, embedding=embedding)
    links = sum(exchanges.values())
    return Estimate(training_time(config, target, memory).value - links, "analytic", "s")


def by_program(step_time: StepTime) -> Estimate:
    """The compute of a compiled step: all but waiting for collectives."""
    return Estimate(step_time.step.value - step_time.parts["collectives"].value, step_time.step.level, "s")


def kinds_of(program: StepTime) -> str:
    """Each kind of collective of a compiled program, in words; the time hidden behind other work is in it."""
    rows = [row for row in program.rows if row.part == "collectives"]
    return ", ".join(f"{row.name} {row.seconds * 1e3:.3f} ms ({row.calls} calls)" for row in rows)


def compute_of(config: TrainConfig, target: str, memory: Breakdown, analytic: bool) -> tuple[Estimate | None, Any]:
    """The compute of a step, and the compiled program or the memory that it needs; None where it does not fit."""
    if analytic:
        return by_formulas(config, target, memory), None
    with Compiler(timeout=7200) as compiler:
        hbm, step_time = time_program(compiler, trace_training(config, target))
    return (None, hbm.total) if step_time is None else (by_program(step_time), step_time)


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows by the number of chips, and the compiled program whose compute all of them have; None by formulas."""

    rows: tuple[Row, ...]
    program: StepTime | None

    def __str__(self) -> str:
        first = next((row.step for row in self.rows if row.step is not None), None)
        return "\n".join([HEADER, *(row.as_text(first) for row in self.rows)])


def scaling(
    model: dict[str, Any], chip: str, counts: Sequence[int], rows: int, length: int, remat: str, analytic: bool
) -> Table:
    """The table of a model: `rows` rows of `length` tokens on each chip, on slices of so many chips."""
    scaled: list[Row] = []
    compute, program = None, None
    for chips in counts:
        place = place_of(chip, chips)
        config = training_config(
            model | {"max_position_embeddings": length}, {"remat": remat}, place.target, rows * place.devices, length
        )
        memory = training_memory(config, place.target)
        needed: Any = memory.total
        if memory.fits and compute is None:
            compute, compiled = compute_of(config, place.target, memory, analytic)
            if compute is None:
                needed = compiled
            else:
                program = compiled
        if not memory.fits or compute is None:
            reason = f"a device needs {needed} and has {human(memory.limit)}"
            scaled.append(Row(place, config, declined=reason))
            continue
        scaled.append(Row(place, config, Step(compute, **collectives_of(config, place))))
    return Table(tuple(scaled), program)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="8b,70b", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--chips", default="v5p,v6e", help=f"of {', '.join(TPUS)}")
    parser.add_argument("--counts", default=",".join(map(str, COUNTS)), help="numbers of chips")
    parser.add_argument("--rows", type=int, default=1, help="on each device")
    parser.add_argument("--length", type=int, help="tokens of a row; 8192 of 8b and 4096 of 70b, which then fits v6e")
    parser.add_argument("--remat", default="full")
    parser.add_argument("--analytic", action="store_true", help="formulas alone")
    parser.add_argument("--quick", action="store_true", help="a small model on v5e")
    options = parser.parse_args(arguments)
    if options.quick:
        options.models, options.chips, options.counts = "small", "v5e", "4,16,512"
    counts = [int(count) for count in options.counts.split(",")]
    for name in options.models.split(","):
        title, model, length = MODELS[name]
        length = options.length or length
        for chip in options.chips.split(","):
            table = scaling(model, chip, counts, options.rows, length, options.remat, options.analytic)
            print(f"{title} on {chip}, {options.rows} x {length} tokens on a device, remat {options.remat}.")
            print("Estimates, not measurements. Two figures: nothing is hidden / all that can be hidden is.")
            if table.program is not None:
                print(f"\nThe compiled program:\n{table.program}\n  collectives: {kinds_of(table.program)}")
            print()
            print(f"{table}\n", flush=True)


if __name__ == "__main__":
    main()
