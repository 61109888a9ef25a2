"""The timeline of a compiled program on one device, followed in the order of its schedule.

One instruction runs after the other. What an asynchronous pair starts goes on meanwhile: collectives on the links,
copies between HBM and VMEM, copies to the host's memory and from there, each in a queue. Permutes between other
pairs of devices have other links, which carry both ways at once, and go on side by side. At its end the program waits
for what is left; only that is exposed. A loop takes one turn's time as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from vishwamai.aot.schedule.machine import Model
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.hardware import TpuChip
from vishwamai.core.hlo import Instruction, Module, shape_bytes
from vishwamai.parallel.pipeline.stage import column_of
from vishwamai.parallel.pipeline.ticks import COLUMNS
from vishwamai.planning.time.collectives import base, called, directed_links, inside, is_collective

PARTS = ("kernels", "fusions", "collectives", "copies", "host", "stages")
"""What a device spends its time on: our kernels and others by Pallas, the compiler's own code, waiting for collectives,
waiting for copies between HBM and VMEM, waiting for the host's memory, waiting for other stages of a pipeline."""

_FREE = frozenset(
    ("parameter", "get-tuple-element", "tuple", "bitcast", "constant", "after-all", "partition-id", "replica-id")
    + ("opt-barrier", "domain")
)
"""Instructions without code of their own."""
_COPIES = frozenset(("copy", "slice", "dynamic-slice", "dynamic-update-slice"))
"""What moves data and computes nothing, where it runs asynchronously."""
_NO_WORK = frozenset(("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"))
"""Custom calls of the compiler that run nothing."""
_SCALAR = 64 << 10
"""Bytes up to which an instruction without an estimate is one of the scalar unit or of a few vectors."""
_CALLING = frozenset(("fusion", "async-start", "custom-call-start"))
"""What may have a collective in the computation that it calls."""
_HOST = re.compile(r"S\(5\)")
_CHOOSING = ("kind", "first", "last")
"""The columns of a pipeline's table that choose branches."""


@dataclasses.dataclass
class Timeline:
    """What was found, for one device.

    Attributes:
      exposed: seconds by each of `PARTS`. hidden: seconds of collectives and copies behind other work.
      by_name: seconds and calls of each kernel and fusion, of each kind of collective, and of both ways to the host, by
        part and name.
      host_bytes: bytes to and from the host's memory, where its bandwidth is not known.
      missing: instructions without a time, with their number of runs.
    """

    exposed: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    hidden: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    by_name: dict[tuple[str, str], tuple[float, int]] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0
    missing: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def seconds(self) -> float:
        """All exposed parts together."""
        return float(sum(self.exposed.values()))

    def add(self, part: str, name: str, seconds: float) -> None:
        """One instruction's time."""
        self.exposed[part] += seconds
        self.note(part, name, seconds)

    def note(self, part: str, name: str, seconds: float, calls: int = 1) -> None:
        """Its row in `by_name`."""
        before = self.by_name.get((part, name), (0.0, 0))
        self.by_name[part, name] = (before[0] + seconds, before[1] + calls)

    def include(self, part_line: Timeline, times: int = 1) -> None:
        """Another timeline, so many times over."""
        for mine, its in ((self.exposed, part_line.exposed), (self.hidden, part_line.hidden)):
            for name, value in its.items():
                mine[name] += value * times
        for name, value in part_line.missing.items():
            self.missing[name] += value * times
        for (part, name), (seconds, calls) in part_line.by_name.items():
            self.note(part, name, seconds * times, calls * times)
        self.host_bytes += part_line.host_bytes * times


class _Running:
    """What goes on asynchronously in one computation: when each start is done, one queue for each part.

    What permutes along other links than another permute has a queue of its own; all else waits for every queue.
    """

    def __init__(self) -> None:
        self.free: dict[str, float] = collections.defaultdict(float)
        self.ways: dict[str, dict[str, float]] = collections.defaultdict(dict)
        self.pending: dict[str, tuple[str, float, float]] = {}

    def start(self, name: str, part: str, now: float, seconds: float, ways: Collection[str] = ()) -> None:
        mine = self.ways[part]
        begin = max(self.free[part], now, *(mine.get(way, 0.0) for way in ways or mine))
        if ways:
            mine.update(dict.fromkeys(ways, begin + seconds))
        else:
            self.free[part] = begin + seconds
        self.pending[name] = (part, begin + seconds, seconds)


class Follower:
    """Follows a module; `ticked` says then whether the loop over ticks was found. `offloaded` has the names of what
    starts a collective on the SparseCores.

    Args:
      module: the program. chip: that it runs on.
      cycles: cycles of one call of an instruction by its schedule; None where there is none.
      links: seconds of a collective, and of one whose sum is split again.
      ticks: `parallel.pipeline.ticks.Ticks.table` of a pipeline, whose loop the module has.
    """

    def __init__(
        self,
        module: Module,
        chip: TpuChip,
        cycles: Callable[[str], float | None],
        links: Callable[[Instruction, bool], float],
        ticks: np.ndarray | None = None,
    ):
        self.module, self.chip, self.cycles, self.links, self.ticks = module, chip, cycles, links, ticks
        self.ticked = False
        self._cell: Mapping[str, int] = {}
        self._channels = {
            _channel(part)
            for body in module.computations.values()
            if any(part.target == "AsyncCollectiveStart" for part in body)
            for part in body
            if _channel(part)
        }
        self._ends = {
            start: done
            for body in module.computations.values()
            for done in body
            if done.opcode.endswith("-done")
            for start in done.operands
        }
        self.offloaded = {
            done.operands[0]
            for body in module.computations.values()
            for done in body
            if done.opcode == "custom-call-update" and inside(module, module.by_name[done.operands[0]])
        }
        self._copied = chip.hbm_bandwidth_per_device * Model().hbm_efficiency

    def follow(self, name: str | None = None) -> Timeline:
        """The timeline of a computation, of the whole program by default."""
        line, running = Timeline(), _Running()
        body = self.module.computations[name or self.module.entry]
        sources = {instruction.name: instruction.operands for instruction in body}
        for instruction in body:
            self._instruction(instruction, line, running, sources)
        for start in list(running.pending):  # waited for in the next turn, which waits for this one
            self._wait(start, line, running)
        return line

    def _instruction(
        self, instruction: Instruction, line: Timeline, running: _Running, sources: Mapping[str, tuple[str, ...]]
    ) -> None:
        opcode = instruction.opcode
        if opcode in _FREE or instruction.target in _NO_WORK:
            return
        if opcode == "while":
            self._loop(instruction, line)
        elif opcode in ("call", "conditional"):
            names = self._branches(instruction) or tuple(
                name for kind in ("to_apply", "calls") if (name := instruction.called(kind))
            )
            branches = [self.follow(name) for name in names]
            line.include(max(branches, key=lambda branch: branch.seconds, default=Timeline()))
        elif opcode.endswith("-done") or self._halves(instruction) == "done":
            start = _start_of(instruction, running.pending, sources)
            if start is not None:
                self._wait(start, line, running)
        elif instruction.name in self.offloaded:
            return  # its program waits for its operands
        elif opcode == "custom-call-update" and instruction.operands[0] in self.offloaded:
            self._collective(self.module.by_name[instruction.operands[0]], line, running, instruction.name)
        elif self._halves(instruction) == "between":
            self._code(instruction, line)
        elif is_collective(opcode) or (opcode in _CALLING and inside(self.module, instruction)):
            self._collective(instruction, line, running)
        elif opcode.endswith("-start"):
            self._copy(instruction, line, running)
        else:
            self._code(instruction, line)

    def _halves(self, instruction: Instruction) -> str | None:
        """Which part of an asynchronous collective a fusion has: "start", "done", or "between" (work that hides it)."""
        body = (
            self.module.computations.get(instruction.called("calls") or "", ())
            if instruction.opcode == "fusion"
            else ()
        )
        targets = {part.target for part in body}
        opcodes = {part.opcode.rpartition("-")[2] for part in body if is_collective(part.opcode)}
        if "AsyncCollectiveStart" in targets or opcodes == {"start"}:
            return "start"
        if "AsyncCollectiveDone" in targets or opcodes == {"done"}:
            return "done"
        return "between" if any(_channel(part) in self._channels for part in body if _channel(part)) else None

    def _loop(self, loop: Instruction, line: Timeline) -> None:
        turns, body = trip_count(self.module, loop), loop.called("body")
        if self.ticks is not None and turns == len(self.ticks) and self._has_ticks(body):
            self._over_ticks(body, self.ticks, line)
            return
        if turns is None:
            line.missing[f"loop {loop.name}: how often it runs is not known; it counts once"] += 1
        line.include(self.follow(body), 1 if turns is None else turns)

    def _branches(self, conditional: Instruction) -> tuple[str, ...]:
        """The branches of a conditional that may be taken: one where a tick of a pipeline chooses it."""
        chosen = self._cell.get(column_of(conditional.source) or "")
        if chosen is None:
            return conditional.branches
        named = conditional.called("true_computation" if chosen else "false_computation")
        return conditional.branches[chosen : chosen + 1] if named is None else (named,)

    def _has_ticks(self, body: str | None) -> bool:
        """Whether the body of a loop chooses a stage's action."""
        instructions = self.module.computations.get(body or "", ())
        return any(
            instruction.opcode == "conditional" and column_of(instruction.source) == "kind"
            for instruction in instructions
        )

    def _over_ticks(self, body: str | None, table: np.ndarray, line: Timeline) -> None:
        """The time of the stage that is busy longest, and what it waits for the others."""
        columns = [COLUMNS.index(name) for name in _CHOOSING]
        cells = [[tuple(map(int, cell)) for cell in row] for row in table[:, :, columns]]
        turns: dict[tuple[int, ...], Timeline] = {}
        for cell in {cell for row in cells for cell in row}:
            self._cell = dict(zip(_CHOOSING, cell))
            turns[cell] = self.follow(body)
        self._cell, self.ticked = {}, True
        busy = max(zip(*cells), key=lambda stage: sum(turns[cell].seconds for cell in stage))
        for cell, times in collections.Counter(busy).items():
            line.include(turns[cell], times)
        longest = (max(turns[cell].seconds for cell in row) for row in cells)
        line.exposed["stages"] += sum(longest) - sum(turns[cell].seconds for cell in busy)

    def _collective(self, instruction: Instruction, line: Timeline, running: _Running, name: str | None = None) -> None:
        parts = [instruction] if is_collective(instruction.opcode) else inside(self.module, instruction)
        body = self.module.computations.get(called(instruction) or "", ())
        scattered = any(part.opcode == "dynamic-slice" for part in body)
        try:
            seconds = sum(self.links(part, scattered) for part in parts if not part.opcode.endswith("-done"))
        except UnsupportedError as error:
            line.missing[f"{base(parts[0].opcode)}: {error}"] += 1
            return
        kind = "reduce-scatter" if scattered and parts[0].opcode == "all-reduce" else base(parts[0].opcode)
        if instruction.opcode.endswith("-start") or self._halves(instruction) == "start":
            ways = {way for part in parts for way in directed_links(part)}
            running.start(name or instruction.name, "collectives", line.seconds, seconds, ways)
            line.note("collectives", kind, seconds)
        else:
            line.add("collectives", kind, seconds)
        if instruction.opcode == "fusion" and instruction.cycles:
            line.add("fusions", "fusion with a collective", instruction.cycles / self.chip.clock)

    def _copy(self, copy: Instruction, line: Timeline, running: _Running) -> None:
        body = self.module.computations.get(copy.called("calls") or "", ())
        end = self._ends.get(copy.name)
        nbytes = _copy_bytes(self.module, copy, body, end)
        if _HOST.search(copy.shape) or any(_HOST.search(part.shape) for part in body):
            way = "to" if end is not None and _HOST.search(end.shape) else "from"
            self._host(copy, way, nbytes, line, running)
            return
        opcodes = {part.opcode for part in body} - _FREE or {base(copy.opcode)}
        if not opcodes <= _COPIES:
            line.missing[f"{copy.opcode} {family(copy.name)}: its time is not known"] += 1
            return
        running.start(copy.name, "copies", line.seconds, nbytes / self._copied + Model().dma_latency)

    def _host(self, copy: Instruction, way: str, nbytes: int, line: Timeline, running: _Running) -> None:
        bandwidth = self.chip.host_bandwidth_per_device
        if bandwidth is None:
            line.host_bytes += nbytes
            return
        running.start(copy.name, "host", line.seconds, nbytes / bandwidth, (way,))
        line.note("host", f"{way} the host's memory", nbytes / bandwidth)

    def _wait(self, start: str, line: Timeline, running: _Running) -> None:
        part, end, seconds = running.pending.pop(start)
        left = max(0.0, end - line.seconds)
        line.exposed[part] += left
        line.hidden[part] += max(0.0, seconds - left)

    def _code(self, instruction: Instruction, line: Timeline) -> None:
        kernel = instruction.opcode == "custom-call"
        cycles = None if kernel else instruction.cycles
        if cycles is None:
            cycles = self.cycles(instruction.name)
        if cycles is not None:
            line.add("kernels" if kernel else "fusions", family(instruction.name), cycles / self.chip.clock)
        elif kernel or instruction.opcode == "fusion" or instruction.nbytes > _SCALAR:
            label = (
                instruction.target if kernel and instruction.target != "tpu_custom_call" else family(instruction.name)
            )
            line.missing[f"{instruction.opcode} {label}: no schedule was found"] += 1


def _channel(instruction: Instruction) -> str | None:
    """The number that the parts of one collective share."""
    match = re.search(r"channel_id=(\d+)", instruction.attributes) if is_collective(instruction.opcode) else None
    return None if match is None else match[1]


def family(name: str) -> str:
    """An instruction's name without its numbers.

    >>> family("attention_forward.12"), family("fusion.3.clone")
    ('attention_forward', 'fusion.clone')
    """
    return re.sub(r"\.\d+(?=\.|$)|[.\d]+$", "", name) or name


def _copy_bytes(module: Module, start: Instruction, body: Sequence[Instruction], end: Instruction | None) -> int:
    """Bytes that an asynchronous copy brings: what its end gives, or what it writes into a part of that."""
    for part in (start, *body):
        if base(part.opcode) == "dynamic-update-slice":
            return module.by_name[part.operands[1]].nbytes
    return shape_bytes(start.shape) // 2 if end is None else end.nbytes


def _start_of(done: Instruction, pending: Mapping[str, object], sources: Mapping[str, tuple[str, ...]]) -> str | None:
    """The pending start that an end belongs to, through what hands it on."""
    seen, names = set(), list(done.operands)
    while names:
        name = names.pop(0)
        if name in pending:
            return name
        if name not in seen and len(seen) < 64:
            seen.add(name)
            names += sources.get(name, ())
    return None


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a loop runs: its condition compares a counter with a constant; None where it does not.

    The counter starts at the constant that the loop's operand has, else at 0, and grows by 1, as in every loop of
    `jax.lax.scan`.
    """
    match = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if match:
        return int(match[1])
    condition = module.computations.get(loop.called("condition") or "", ())
    root = condition[-1] if condition else None
    if root is None or root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    counter, bound = (module.by_name.get(name) for name in root.operands)
    limit = _constant(module, bound)
    if limit is None or counter is None or counter.opcode != "get-tuple-element":
        return None
    index = re.search(r"index=(\d+)", counter.attributes)
    carried = module.by_name.get(loop.operands[0])
    first = None
    if index and carried is not None and carried.opcode == "tuple":
        first = _constant(module, module.by_name.get(carried.operands[int(index[1])]))
    return max(0, limit - (first or 0))


def _constant(module: Module, instruction: Instruction | None) -> int | None:
    """The integer that an instruction is, through copies; None where it is not one."""
    for _ in range(8):
        if instruction is None or instruction.opcode == "constant":
            break
        if base(instruction.opcode) not in ("copy", "bitcast", "convert", "reshape") or not instruction.operands:
            return None
        instruction = module.by_name.get(instruction.operands[0])
    if instruction is None or not re.fullmatch(r"-?\d+", instruction.text.strip()):
        return None
    return int(instruction.text)
