"""A whole executable, core by core: the top-level program calls kernels and fusions, each is run, and the cycles are
counted per program.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vishwamai.aot.schedule.bundles import UNITS, parse, parse_utilisation
from vishwamai.aot.schedule.interpret import BundledProgram, Known, run
from vishwamai.aot.schedule.machine import Machine, Model
from vishwamai.aot.schedule.mxu import RESERVATIONS
from vishwamai.aot.schedule.scalar import Value
from vishwamai.aot.schedule.times import TOP, Block, ProgramTime, Simulation
from vishwamai.core.errors import DeviceError
from vishwamai.core.hardware import TpuChip


@dataclasses.dataclass(frozen=True)
class Source:
    """The dumped text of one program: its final bundles, and the compiler's count of units (may be empty)."""

    bundles: str
    utilisation: str


def _total(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: collections.Counter[str] = collections.Counter()
    for count in counts:
        total.update(count)  # type: ignore[arg-type]
    return dict(total)


def _one_each(tables: Sequence[Known], calls: int) -> Sequence[Known]:
    """What is known of each of `calls` calls: one entry each, or one for all; nothing where equal calls were merged and
    it is not clear which.
    """
    distinct: list[Known] = []
    for table in tables:
        if not any(
            table.keys() == previous.keys() and all(np.array_equal(table[i], previous[i]) for i in table)
            for previous in distinct
        ):
            distinct.append(table)
    if len(distinct) == 1:
        return distinct * calls
    return tables if len(tables) == calls else distinct if len(distinct) == calls else ()


_CUSTOM_CALL = re.compile(r":\s*(>*)\s*\{[^\n]*/\* %([\w.\-]+) = custom-call\(")


def _calls(sources: Mapping[str, Source]) -> dict[str, list[str]]:
    """The custom calls of the top-level program by kernel, in the order of their numbers.

    Where some lie deeper in loops than others (the dump marks a loop's bundles by ">"), their numbers say nothing of
    the order, and their kernel is left out.
    """
    groups: dict[str, dict[str, str]] = collections.defaultdict(dict)
    top = sources.get(TOP)
    for depth, name in _CUSTOM_CALL.findall(top.bundles) if top else ():
        base, _, number = name.rpartition(".")
        groups[base if number.isdigit() else name][name] = depth
    # one depth: the numbers are then in the order of the calls
    same = {base: names for base, names in groups.items() if len(set(names.values())) == 1}
    # by length first: `k.10` comes after `k.9`
    return {base: sorted(names, key=lambda name: (len(name), name)) for base, names in same.items()}


class _Tally:
    """Sums over the calls of one program."""

    def __init__(self) -> None:
        self.calls = self.hbm_bytes = 0
        self.cycles = self.dma_wait = self.matrix_stall = 0.0
        self.passes: collections.Counter[int] = collections.Counter()


class Simulator:
    """Parses the programs of one executable once and runs them core by core.

    Args:
        sources: the dumped programs by name.
        chip: the chip that they were compiled for.
        known: contents of operands by kernel name ("*" for one without), one mapping of operand index to array for each
          call, in order.
        twins: a fingerprint by instruction; one that has no program of its own runs that of another with the same (see
          `twins`).
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        chip: TpuChip,
        tables: Mapping[str, Sequence[Known]] | None = None,
        twins: Mapping[str, str] | None = None,
        model: Model | None = None,
    ):
        self.sources, self.chip, self.operand_values, self.model = sources, chip, tables or {}, model or Model()
        self._parsed: dict[str, BundledProgram] = {}
        self._twins = twins or {}
        self._calls = _calls(sources)
        self._emitted = {mark: name for name, mark in self._twins.items() if name in sources}

    def program(self, name: str) -> BundledProgram:
        """The parsed program of that name."""
        if name not in self._parsed:
            source = self.sources[name]
            bundles = parse(source.bundles)
            units = parse_utilisation(source.utilisation, len(bundles))
            self._parsed[name] = BundledProgram(name, bundles, units, RESERVATIONS[self.chip.name])
        return self._parsed[name]

    def program_of(self, name: str | None) -> str | None:
        """The program that an instruction runs: its own, or that of the twin under whose name the code was emitted."""
        if name is None or name in self.sources:
            return name
        return self._emitted.get(self._twins.get(name, ""), name)

    def known_of(self, called: str) -> Known:
        """What is known of the operands of a call: XLA numbers the calls of a kernel in the order of the program."""
        base, _, number = called.rpartition(".")
        base = base if number.isdigit() else called
        same = self._calls.get(base, ())
        for kernel, calls in self.operand_values.items():
            if re.sub(r"[^\w.\-]", "_", kernel) == base:
                tables = _one_each(calls, len(same) or len(calls))
                if called in same:
                    return tables[same.index(called)] if tables else {}
                return tables[0] if tables and all(table is tables[0] for table in tables) else {}
        unnamed = self.operand_values.get("*", ())
        return unnamed[0] if len(unnamed) == 1 else {}

    def _core(self, core: int, only: str | None) -> tuple[Machine, dict[str, _Tally], int]:
        """The core after its run, the sums of each program, and how often the instruction that was called most was."""
        machine = Machine(self.chip, core, self.model)
        tallies: dict[str, _Tally] = {}
        calls: collections.Counter[str] = collections.Counter()

        def call(name: str | None, arguments: Sequence[Value] = ()) -> None:
            called, name = name or "", self.program_of(name)
            if name is None or name not in self.sources:
                if not str(name).startswith("<late"):
                    machine.unknown[f"program {name} is not in the dump"] += 1
                return
            if name.startswith("<late"):
                return
            calls[called] += 1
            tally = tallies.setdefault(name, _Tally())
            # one machine for all programs: the figures of a call are what it adds
            before = machine.now, machine.dma_wait, machine.mxu_stall, machine.hbm_bytes
            passes = run(self.program(name), machine, self.known_of(called), call, arguments)
            tally.calls += 1
            tally.cycles += machine.now - before[0]
            tally.dma_wait += machine.dma_wait - before[1]
            tally.matrix_stall += machine.mxu_stall - before[2]
            tally.hbm_bytes += machine.hbm_bytes - before[3]
            tally.passes.update(passes)

        if only is not None:
            call(only)
        elif TOP in self.sources:
            top = tallies.setdefault(TOP, _Tally())
            top.calls = 1
            top.passes = run(self.program(TOP), machine, {}, call)
            others = [tally for name, tally in tallies.items() if name != TOP]
            top.cycles = machine.now - sum(tally.cycles for tally in others)  # what is left is the top level's own work
            top.dma_wait = machine.dma_wait - sum(tally.dma_wait for tally in others)
            top.matrix_stall = machine.mxu_stall - sum(tally.matrix_stall for tally in others)
            top.hbm_bytes = machine.hbm_bytes - sum(tally.hbm_bytes for tally in others)
        else:
            for name in self.sources:
                call(name)
        return machine, tallies, max(calls.values(), default=0)

    def simulate(self, only: str | None = None) -> Simulation:
        """Runs every core of one jax device; the slowest counts. `only`: one call of that instruction, not all."""
        results = [self._core(core, only) for core in range(self.chip.cores_per_device)]
        # cores run side by side: the device is done when the slowest is
        machine, tallies, calls = max(results, key=lambda result: result[0].now)
        programs = tuple(self._report(name, tally) for name, tally in tallies.items())
        return Simulation(
            chip=self.chip,
            cycles=machine.now,
            core_cycles=tuple(result[0].now for result in results),
            dma_wait=machine.dma_wait,
            matrix_stall=machine.mxu_stall,
            matrix=sum(program.matrix for program in programs),
            hbm_bytes=sum(result[0].hbm_bytes for result in results),
            flops=_total(self._flops(name, tally) for _, by_name, _ in results for name, tally in by_name.items()),
            programs=programs,
            looped=calls > 1,
            unknown=dict(machine.unknown),
        )

    def _flops(self, name: str, tally: _Tally) -> dict[str, float]:
        per_row = 2.0 * self.chip.mxu_size**2  # a row through the matrix unit meets mxu_size x mxu_size multiply-adds
        rows = self.program(name).rows
        return _total(
            {kind: count * passes * per_row for kind, count in rows[start].items()}
            for start, passes in tally.passes.items()
        )

    def _report(self, name: str, tally: _Tally) -> ProgramTime:
        program = self.program(name)
        if any(len(program.units[start]) != len(UNITS) for start in tally.passes):
            raise DeviceError(
                f"the libtpu here says how busy other units are than the {len(UNITS)} that `inspect` reads; 0.0.48.1 "
                "to 0.0.52 were tried: pip install 'libtpu==0.0.52' (compile and check work with this one)."
            )
        blocks = [
            Block(
                address=start,
                length=program.ends[start] - start,
                passes=passes,
                stall=program.matrix[start].stall,
                matrix=program.matrix[start].busy,
                crosslane=program.crosslane[start],
                units=dict(zip(UNITS, program.units[start])),
            )
            for start, passes in tally.passes.items()
        ]
        blocks.sort(key=lambda block: (-block.cycles, block.address))
        rows = program.utilisation.rows
        return ProgramTime(
            name=name,
            calls=tally.calls,
            cycles=tally.cycles,
            bundles=sum(block.length * block.passes for block in blocks),
            dma_wait=tally.dma_wait,
            matrix_stall=tally.matrix_stall,
            matrix=sum(block.matrix * block.passes for block in blocks),
            crosslane=sum(block.crosslane * block.passes for block in blocks),
            units={unit: sum(block.units[unit] * block.passes for block in blocks) for unit in UNITS},
            capacity=dict(zip(UNITS, program.utilisation.capacity)),
            spills=sum(row[UNITS.index("VSTORE:SPILL")] for row in rows),
            fills=sum(row[UNITS.index("VLOAD:FILL")] for row in rows),
            hbm_bytes=tally.hbm_bytes,
            flops=self._flops(name, tally),
            blocks=tuple(blocks),
        )


def simulate(
    sources: Mapping[str, Source],
    chip: TpuChip,
    tables: Mapping[str, Sequence[Known]] | None = None,
    twins: Mapping[str, str] | None = None,
) -> Simulation:
    """Runs an executable whose programs were dumped; see `Simulator`."""
    return Simulator(sources, chip, tables, twins).simulate()
