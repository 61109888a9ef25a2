"""The page of `compare.py`: the checks, then every format's table with ours, the peers and the ratios."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

RATES = ("prefill", "decode 1", "decode 8", "decode 32")


@dataclasses.dataclass(frozen=True)
class Row:
    """A contestant in a format and a setting.

    Attributes:
      engine: name of the engine, "ours" or a peer's.
      ours: our format that it is compared with.
      format: its own name of the format.
      setting: its setting; empty for none.
      contestant: its module; empty for ours.
      python: its interpreter.
    """

    engine: str
    ours: str
    format: str
    setting: str = ""
    contestant: str = ""
    python: str = sys.executable

    def __str__(self) -> str:
        return " ".join(filter(None, (self.engine, self.format, self.setting)))


Figures = Mapping[Row, Sequence[Mapping[str, Any]]]


def values(rounds: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """A figure of the rounds that have it."""
    return [figures[name] for figures in rounds if figures.get(name) is not None]


def better(rows: Sequence[Row], figures: Figures, name: str) -> Row | None:
    """The row with the best median of a rate; None where none has it."""
    having = [row for row in rows if values(figures[row], name)]
    return max(having, key=lambda row: statistics.median(values(figures[row], name)), default=None)


def ratio(mine: Row, peer: Row, figures: Figures, name: str) -> float | None:
    """How many times as fast as a peer ours is: the median over the rounds that both have."""
    pairs = [
        (first[name], second[name])
        for first, second in zip(figures[mine], figures[peer])
        if first.get(name) is not None and second.get(name) is not None
    ]
    return statistics.median(first / second for first, second in pairs) if pairs else None


def _cell(rows: Sequence[Row], figures: Figures, name: str) -> str:
    row = better(rows, figures, name)
    if row is None:
        return ""
    rates = values(figures[row], name)
    spread = f" ({min(rates):.1f} to {max(rates):.1f})" if len(rates) > 1 else ""
    return f"{statistics.median(rates):.1f}{spread}{f', {row.setting}' if row.setting else ''}"


def _least(rows: Sequence[Row], figures: Figures, name: str, form: str) -> str:
    every = [value for row in rows for value in values(figures[row], name)]
    return format(min(every), form) if every else ""


def _table(ours: str, figures: Figures, results: Mapping[Row, Mapping[str, Any]]) -> list[str]:
    """The lines of one of our formats."""
    groups: dict[str, list[Row]] = {}
    for row in figures:
        if row.ours == ours:
            groups.setdefault(row.engine, []).append(row)
    heads = ["", "perplexity", *RATES, "GiB", "ready, s"]
    lines = [f"| {' | '.join(heads)} |", f"|---{'|---:' * (len(heads) - 1)}|"]
    for engine, rows in groups.items():
        losses = [results[row]["loss"] for row in rows if "loss" in results[row]]
        cells = [f"{engine}, {rows[0].format}", f"{math.exp(min(losses)):.3f}" if losses else ""]
        cells += [_cell(rows, figures, name) for name in RATES]
        cells += [_least(rows, figures, "memory_gib", ".2f"), _least(rows, figures, "ready_s", ".1f")]
        lines.append(f"| {' | '.join(cells)} |")
        if engine != "ours" and "ours" in groups:
            ratios = []
            for name in RATES:
                peer = better(rows, figures, name)
                times = None if peer is None else ratio(groups["ours"][0], peer, figures, name)
                ratios.append("" if times is None else f"**{times:.2f}**")
            lines.append(f"| ours / {engine} | | {' | '.join(ratios)} | | |")
    return lines


def page(facts: Mapping[str, Any], results: Mapping[Row, Mapping[str, Any]], figures: Figures) -> str:
    """The page in Markdown."""
    machine = facts["machine"]
    lines = [
        f"# {facts['model']} on a CPU",
        "",
        f"{machine['name']}, {facts['threads']} threads, {' '.join(machine['flags'])}. Prompts of {facts['prompt']} "
        f"tokens, {facts['steps']} decoded after each. Tokens per second: the median of the rounds, the least to the "
        "most, and the better setting. Ratios are medians over the rounds; above 1 ours is faster.",
        "",
        *_quiet(facts, figures),
        *(f"- {name}: {', '.join(f'{k} {v}' for k, v in had.items())}" for name, had in facts["versions"].items()),
        *(f"- skipped: {name}: {reason}" for name, reason in facts["skipped"].items()),
        *(f"- no speed: {name}: {reason}" for name, reason in facts["wrong"].items()),
        *(
            f"- failed: {row}: {rounds[-1]['error']}"
            for row, rounds in figures.items()
            if rounds and "error" in rounds[-1]
        ),
    ]
    reference = next(iter(results.values()))
    lines += ["", f"The perplexity of the reference (ours in float32) is {math.exp(reference['loss']):.3f}."]
    for ours in dict.fromkeys(row.ours for row in figures):
        rounds = max(len(figures[row]) for row in figures if row.ours == ours)
        lines += ["", f"## {ours}, {rounds} rounds", "", *_table(ours, figures, results)]
    return "\n".join(lines) + "\n"


def _quiet(facts: Mapping[str, Any], figures: Figures) -> list[str]:
    cores, limit = facts["machine"]["cores"], facts["quiet"]
    used = [facts["others_before"], *(value for rounds in figures.values() for value in values(rounds, "others"))]
    most = max((value for value in used if value is not None), default=None)
    if most is None:
        return ["What other processes used is not known here.", ""]
    if most <= limit * cores:
        return [f"The machine was quiet: other processes used at most {most:.2f} of {cores} processors.", ""]
    return [
        f"**The machine was not quiet: other processes used up to {most:.2f} of {cores} processors. Do not cite these "
        "figures.**",
        "",
    ]
