"""The arrays in a TPU's memory at the peak of a program, from its live ranges (`aot.compile.live_ranges`)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from vishwamai.aot.compile.traced import Program
from vishwamai.core.figures import Estimate
from vishwamai.core.numbers import human


@dataclasses.dataclass(frozen=True)
class LiveArray:
    """Arrays of one origin that are alive at the peak.

    Attributes:
      use: "parameters", "optimizer", "batch" or "arguments" for what the caller passes; "activations" for what the
        forward pass keeps, "gradients" for arrays of a parameter's shape from the backward pass, "temporaries" for the
        rest.
      nbytes: bytes of all of them, on one device. count: number of arrays.
      shape: shape of each, such as "bf16[8,2048]".
      path: path of an argument, such as "[0].params['embed']"; "" for others.
      source: the operation that made it, such as "attention_forward"; "" where the program does not say.
      where: its line in the source, such as "blocks.py:123"; "" where the program does not say.
    """

    use: str
    nbytes: int
    count: int
    shape: str
    path: str
    source: str
    where: str

    def __str__(self) -> str:
        origin = self.path or " at ".join(part for part in (self.source, self.where) if part) or "unnamed"
        times = f"{self.count} x " if self.count > 1 else ""
        return f"{human(self.nbytes):>10}  {self.use:<12} {times}{self.shape}  {origin}"


@dataclasses.dataclass(frozen=True)
class PeakMemory:
    """HBM of one device at the peak of a program.

    Attributes:
      target: the chip or slice. total: bytes that the compiler asks for. limit: bytes that it lets one device use.
      arrays: arrays that are alive at the peak, the largest first.
    """

    target: str
    total: Estimate
    limit: int
    arrays: tuple[LiveArray, ...]

    @property
    def by_use(self) -> dict[str, int]:
        """Bytes by use, the largest first; "gaps" is what the total has beyond the arrays: padding and fragments."""
        uses: dict[str, int] = {}
        for array in self.arrays:
            uses[array.use] = uses.get(array.use, 0) + array.nbytes
        uses["gaps"] = max(0, int(self.total.value) - sum(uses.values()))
        return dict(sorted(uses.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        uses = ", ".join(f"{name} {human(size)}" for name, size in self.by_use.items() if size)
        lines = [f"{self.target}: {self.total} of {human(self.limit)} at the peak: {uses}"]
        lines += [f"  {array}" for array in self.arrays[:SHOWN]]
        if len(self.arrays) > SHOWN:
            lines.append(f"  {human(sum(array.nbytes for array in self.arrays[SHOWN:])):>10}  in smaller ones")
        return "\n".join(lines)


SHOWN = 12
"""Arrays that the text of a `PeakMemory` lists."""


def peak_memory(program: Program, needed: float, arrays: Iterable[Mapping[str, Any]]) -> PeakMemory:
    """What `read_dump` found, in words: arguments by their paths, arrays of one origin together.

    Args:
      program: program that was compiled. needed: bytes that the compiler asks for. arrays: result of `read_dump`.
    """
    arrays = [*arrays]
    passed = [array for array in arrays if array["argument"] is not None]
    params = {_dims(array["shape"]) for array in passed if _use(program, array["argument"]) == "parameters"}
    merged: dict[tuple[str, ...], list[int]] = {}
    for array in arrays:
        use, path = "temporaries", ""
        if array["argument"] is not None:
            use, path = _use(program, array["argument"]), program.arguments[array["argument"]].path
        elif array["pass"] == "backward" and _dims(array["shape"]) in params:
            use = "gradients"
        elif array["pass"] == "forward":
            use = "activations"
        source = re.sub(r"args\[(\d+)\]", lambda m: program.arguments[int(m[1])].path, array["source"])
        key = (use, array["shape"], path, source, array["where"])
        merged.setdefault(key, []).append(array["nbytes"])
    groups = [
        LiveArray(use, sum(sizes), len(sizes), shape, path, source, where)
        for (use, shape, path, source, where), sizes in merged.items()
    ]
    groups.sort(key=lambda group: -group.nbytes)
    return PeakMemory(program.target, Estimate(needed, "probe"), program.limit, tuple(groups))


def _dims(shape: str) -> tuple[str, ...]:
    """The dims of a shape such as "bf16[8,1,2048]", without those of 1."""
    return tuple(n for n in re.findall(r"\d+", shape.partition("[")[2]) if n != "1")


_USES = {"params": "parameters", "frozen": "parameters", "optimizer": "optimizer", "average": "optimizer"}


def _use(program: Program, number: int) -> str:
    """What an argument is for: by the fields of a `TrainState`, where the program is a training step."""
    path = program.arguments[number].path
    if program.name != "training_step_of":
        return "arguments"
    return next((use for name, use in _USES.items() if path.startswith(f"[0].{name}")), "batch")
