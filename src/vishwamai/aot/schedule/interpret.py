"""Runs the scalar unit of a program, so that its loops, its grid and its predicated regions are followed as the chip
would.

Every basic block gets its true number of passes, every copy and every wait its place in time. What the scalar unit
computes from values that only the device would know (results of vector work, memory contents) is unknown, None,
and spreads; a branch on it is not taken and is counted in `Machine.unknown`. Values known ahead, such as
scalar-prefetch tables, are put into scalar memory where the program copies them; scalars that a caller hands
over in a register, such as the counter of the loop that a kernel is called in, are the caller's.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from vishwamai.aot.schedule.bundles import Bundle, BundleOperand, Scalar, Utilisation, block_starts
from vishwamai.aot.schedule.machine import MASK32, Machine, smem_words
from vishwamai.aot.schedule.mxu import Occupancy, Reservation, occupancy, product_rows
from vishwamai.aot.schedule.scalar import ARITHMETIC, COMPARE, Value, add, divide, logic, signed

_OFF_CHIP = ("operand:hbm:", "parameter:", "relocation:")
"""Symbols of addresses in HBM."""

Known = Mapping[int, np.ndarray]
"""Contents of operands, by operand index of the program."""
Call = Callable[[str | None, Sequence[Value]], object]
"""Runs the program that an `inlined_call` names, with the values of its operands."""


class BundledProgram:
    """A parsed program with everything about its blocks that does not depend on the run."""

    def __init__(self, name: str, bundles: Sequence[Bundle], utilisation: Utilisation, reservation: Reservation):
        self.name, self.bundles, self.utilisation = name, bundles, utilisation
        self.branch_delay = reservation.branch_delay
        starts, self.region_at = block_starts(bundles, reservation.branch_delay)
        ends = [*starts[1:], len(bundles)]
        self.ends = dict(zip(starts, ends))
        self.matrix: dict[int, Occupancy] = {}
        self.crosslane: dict[int, float] = {}
        self.units: dict[int, tuple[int, ...]] = {}
        self.rows: dict[int, dict[str, int]] = {}
        for start, end in zip(starts, ends):
            self.matrix[start] = occupancy(bundles[start:end], reservation)
            issued = sum(bundle.crosslane for bundle in bundles[start:end])
            self.crosslane[start] = issued * reservation.crosslane / reservation.crosslane_units
            self.units[start] = tuple(map(sum, zip(*utilisation.rows[start:end])))
            self.rows[start] = product_rows(bundles[start:end])
        # From each bundle, the next one at which anything but time passes.
        self.next_event = [len(bundles)] * (len(bundles) + 1)
        event = len(bundles)
        for index in range(len(bundles) - 1, -1, -1):
            if bundles[index].scalars or index in self.ends:
                event = index
            self.next_event[index] = event


class ScalarRun:
    """One execution of a program on a machine, called with `arguments` (addresses, and scalars in registers)."""

    def __init__(
        self, program: BundledProgram, machine: Machine, operand_values: Known, call: Call, arguments: Sequence[Value]
    ):
        self.program, self.machine, self.operand_values, self.call = program, machine, operand_values, call
        self.arguments = arguments
        self.quotients: dict[str, tuple[Value, ...]] = {}  # divisions whose results have not all been popped
        self.perhaps: dict[str, int] = {}  # what an unknown predicate selects, where the other choice is nothing
        self.values: dict[str, Value] = {}
        self.registers: dict[str, Value] = {}
        self.passes: collections.Counter[int] = collections.Counter()
        self._code = [tuple(_Instruction(scalar) for scalar in bundle.scalars) for bundle in program.bundles]

    def read(self, name: str) -> Value:
        """The value of that name; if it was never defined under it, what its register holds (phis merge names that
        way).
        """
        if name in self.values:
            return self.values[name]
        return self.registers.get(name.rpartition("_")[2]) if "_" in name else None

    def evaluate(self, operand: BundleOperand) -> Value:
        """The value of an operand."""
        kind, value = operand.kind, operand.value
        if kind == "register":
            return self.read(value)  # type: ignore[arg-type]
        if kind == "constant":
            return value  # type: ignore[return-value]
        if kind == "sum":
            total: Value = 0
            for part in value:  # type: ignore[union-attr]
                total = add(total, self.evaluate(part))
            return total
        if kind == "symbol":
            # allocations belong to their program, everything else is distinguished by the program's name as well
            name = self.program.name
            return self.machine.symbol(f"{value}@{name}" if str(value).startswith("#alloc") else f"{name}{value}")
        return None

    def run(self) -> collections.Counter[int]:
        """Runs to the end; returns how often each block was entered, by its first bundle."""
        program, machine = self.program, self.machine
        length, ends = len(program.bundles), program.ends
        steps = 0
        pc = 0
        jump_after, jump_to = -1, -1  # a pending branch takes effect after bundle `jump_after`
        while pc < length:
            if pc in ends:
                self.passes[pc] += 1
                stall = program.matrix[pc].stall
                machine.now += stall
                machine.mxu_stall += stall
            code = self._code[pc]
            if not code:
                following = program.next_event[pc + 1]
                if jump_to >= 0 and following > jump_after:
                    machine.now += jump_after + 1 - pc
                    pc, jump_to = jump_to, -1
                else:
                    machine.now += following - pc
                    pc = following
                continue
            machine.now += 1
            steps += 1
            if steps > machine.model.max_steps:
                machine.unknown[f"{program.name}: stopped after {steps} steps"] += 1
                break
            target = self._issue(pc, code)
            if target is not None and jump_to < 0:  # a branch in the delay slots of a taken one does not count
                jump_after, jump_to = pc + program.branch_delay, target
            if jump_to >= 0 and pc >= jump_after:
                pc, jump_to = jump_to, -1
            else:
                pc += 1
        return self.passes

    def _issue(self, pc: int, code: tuple[_Instruction, ...]) -> int | None:
        """Issues one bundle: all instructions read before any writes. Returns the bundle that a taken branch goes
        to.
        """
        writes: list[tuple[str, str, Value]] = []
        stores: list[tuple[int, Value]] = []
        target: int | None = None
        for instruction in code:
            holds: Value = True
            if instruction.predicate is not None:
                holds = self.read(instruction.predicate)
                if holds is not None:
                    holds = bool(holds) != instruction.negated
            effect = instruction.effect
            if effect == "branch":
                target = self._branch(pc, instruction, holds, target)
            elif effect == "call":
                if holds is not False:
                    name = instruction.scalar.target if isinstance(instruction.scalar.target, str) else None
                    self.call(name, [self.evaluate(operand) for operand in instruction.operands])
            elif effect == "divide":
                a, b = (self.evaluate(operand) for operand in instruction.operands)
                self.quotients[instruction.result] = divide(a, b, str(instruction.scalar.target))
            elif effect == "dma":
                self._dma(pc, instruction.scalar, holds)
            elif effect == "store":
                address = self.evaluate(instruction.operands[0])
                if holds is not False and address is not None:
                    value = self.evaluate(instruction.operands[1]) if len(instruction.operands) > 1 else None
                    stores.append((address, value if holds else None))
            elif effect == "phi":
                self.values[instruction.result] = self.registers.get(instruction.register)
            elif effect == "value":
                if instruction.cast and (writes or stores):  # renames a value that this very bundle defines
                    self._commit(writes, stores)
                    writes, stores = [], []
                self._define(pc, instruction, holds, writes)
        self._commit(writes, stores)
        return target

    def _commit(self, writes: list[tuple[str, str, Value]], stores: list[tuple[int, Value]]) -> None:
        for address, value in stores:
            self.machine.memory[address] = value
        for name, register, value in writes:
            self.values[name] = value
            self.registers[register] = value

    def _define(self, pc: int, instruction: _Instruction, holds: Value, writes: list[tuple[str, str, Value]]) -> None:
        if instruction.op.startswith("operand."):
            value = self._operand_value(instruction.op[8:], instruction.scalar.target)
        elif instruction.op == "core id":
            value = self.machine.core
        else:
            value = self._arithmetic(pc, instruction)
        if holds is None:
            value = None
        elif holds is False and not instruction.op.startswith("operand.") and instruction.op != "core id":
            if instruction.otherwise is None:
                return
            value = self.evaluate(instruction.otherwise)
        elif holds is False:
            return
        if instruction.alias:
            # A cast within one register writes nothing: its operand's producer may have been predicated off.
            self.values[instruction.result] = value
        else:
            writes.append((instruction.result, instruction.register, value))

    def _branch(self, pc: int, instruction: _Instruction, holds: Value, target: int | None) -> int | None:
        region = instruction.scalar.target
        if holds is None:
            if isinstance(region, int) and self.program.region_at.get(region, pc + 1) <= pc:
                self.machine.unknown[
                    f"{self.program.name}: loop that ends at {pc:#x}, of unknown length, counted as one turn"
                ] += 1
            elif self.program.name != "TLP":  # the top level's own unknown branches forward are launch checks
                self.machine.unknown[f"{self.program.name}: branch at {pc:#x} depends on data"] += 1
            return target
        if not holds:
            return target
        if not isinstance(region, int) or region not in self.program.region_at:
            self.machine.unknown[f"{self.program.name}: branch at {pc:#x} to an unknown region"] += 1
            return target
        return self.program.region_at[region]

    def _dma(self, pc: int, scalar: Scalar, holds: Value) -> None:
        machine = self.machine
        operands: list[BundleOperand] = list(scalar.operands)
        if holds is None:
            machine.unknown[f"{self.program.name}: copy at {pc:#x} depends on data"] += 1
        elif not holds:
            return
        if scalar.op == "dma.done.wait":
            amount = self.evaluate(operands[1]) if len(operands) > 1 else 0
            machine.wait(self.evaluate(operands[0]), amount)
        elif "_to_" in scalar.op or scalar.op == "dma.general":
            op = self._directed(pc, scalar)
            size = self.evaluate(operands[1]) if len(operands) > 1 else None
            if size is None:
                # XLA lets the program before fetch an operand (cross_program_prefetch_index), which a flag tells this
                # one: from HBM it comes anyway.
                size = self.perhaps.get(str(operands[1].value)) if len(operands) > 1 else None
                reason = "size of the copy" if size is None else "whether the program before made the copy"
                machine.unknown[f"{self.program.name}: {reason} at {pc:#x} depends on data"] += 1
            machine.copy(op, size, self.evaluate(operands[3]) if len(operands) > 3 else None, scalar.target or 0)
            if op.endswith("_to_smem"):
                source = machine.symbol_of(self.evaluate(operands[0]))
                base = self.evaluate(operands[2])
                if source is not None and source.startswith("operand") and base is not None:
                    self._fill(base, self.operand_values.get(int(source.rpartition(":")[2])))

    def _directed(self, pc: int, scalar: Scalar) -> str:
        """The copy's op with its memories. A strided copy may not name them: then the end that is an operand in HBM
        does.
        """
        if scalar.op != "dma.general":
            return scalar.op
        names = [self.machine.symbol_of(self.evaluate(scalar.operands[end])) or "" for end in (0, 2)]
        source, target = ("hbm" if name.startswith(_OFF_CHIP) else "vmem" for name in names)
        if source == target == "vmem":
            self.machine.unknown[
                f"{self.program.name}: copy at {pc:#x} between unknown memories, counted as one from HBM"
            ] += 1
            source = "hbm"
        return f"dma.{source}_to_{target}"

    def _fill(self, base: int, array: np.ndarray | None) -> None:
        if array is not None:
            for word, value in smem_words(array):
                self.machine.memory[base + word] = value

    def _operand_value(self, space: str, index: int | str | None) -> Value:
        array = self.operand_values.get(index) if isinstance(index, int) else None
        if space not in ("hbm", "vmem", "cmem", "smem"):  # a scalar, handed over in a register
            argument = self.arguments[index] if isinstance(index, int) and index < len(self.arguments) else None
            return argument if argument is not None or array is None else int(array.reshape(-1)[0]) & MASK32
        address = self.machine.symbol(f"operand:{space}:{self.program.name}:{index}")
        if space == "smem":
            self._fill(address, array)
        return address

    def _arithmetic(self, pc: int, instruction: _Instruction) -> Value:
        op, head = instruction.op, instruction.head
        operands: list[BundleOperand] = list(instruction.operands)
        count = len(operands)
        if head in ("smov", "int_to_ptr", "pmov"):
            return self.evaluate(operands[0])
        if head in ("sadd", "scalar_lea"):
            first = self.evaluate(operands[0])
            return add(first, self.evaluate(operands[1])) if count > 1 else first
        if head == "scalar_parameter_address":
            return self.machine.symbol(f"parameter:{self.evaluate(operands[0])}")
        if head == "reloc":
            return self.machine.symbol(f"relocation:{self.evaluate(operands[0])}")
        if head == "scalar_select":
            choice, one_way, other_way = (self.evaluate(operand) for operand in operands)
            if choice is None and one_way is not None and other_way is not None and 0 in (one_way, other_way):
                self.perhaps[instruction.result] = max(one_way, other_way)
            return None if choice is None else one_way if choice else other_way
        if head == "sld":
            address = self.evaluate(operands[0])
            return None if address is None else self.machine.memory.get(address)
        if head == "spop":  # of a division, quotient first; or from the vector unit
            division = str(operands[0].value)
            value, *rest = self.quotients.get(division, ()) or (None,)
            self.quotients[division] = tuple(rest)
            return value
        a = self.evaluate(operands[0])
        b = self.evaluate(operands[1]) if count > 1 else None
        if head == "pneg":
            return None if a is None else not a
        if head in ("por", "pand", "pnor", "pnand"):
            return logic(head, a, b)
        if head == "pxor":
            return None if a is None or b is None else bool(a) != bool(b)
        if a is None or (count > 1 and b is None):
            return 0 if head == "sand" and (a == 0 or b == 0) else None
        if head == "sclz":
            return 32 - a.bit_length()
        if b is None:
            self.machine.unknown[f"opcode {op}"] += 1
            return None
        if head in ("smin", "smax"):
            pick = min if head == "smin" else max
            return pick(signed(a), signed(b)) & MASK32 if ".s32" in op else pick(a, b)
        if head == "scmp":
            return COMPARE[op.split(".")[1]](*((signed(a), signed(b)) if ".s32" in op else (a, b)))
        compute = ARITHMETIC.get(head)
        if compute is None:
            self.machine.unknown[f"opcode {op}"] += 1
            return None
        return compute(a, b)


class _Instruction:
    """A scalar instruction with what its execution asks for laid ready."""

    __slots__ = (
        "alias",
        "cast",
        "effect",
        "head",
        "negated",
        "op",
        "operands",
        "otherwise",
        "predicate",
        "register",
        "result",
        "scalar",
    )

    def __init__(self, scalar: Scalar):
        self.scalar, self.op, self.operands = scalar, scalar.op, scalar.operands
        self.head = scalar.op.split(".")[0]
        self.result = scalar.result or ""
        self.register = self.result.rpartition("_")[2] if "_" in self.result else self.result
        self.predicate = scalar.predicate.register if scalar.predicate else None
        self.negated = bool(scalar.predicate and scalar.predicate.negated)
        self.otherwise = scalar.predicate.otherwise if scalar.predicate else None
        self.cast = scalar.op.startswith("int_to_ptr")
        source = self.operands[0] if self.cast and self.operands else None
        named = str(source.value) if source is not None and source.kind == "register" else ""
        self.alias = bool(named) and named.rpartition("_")[2] == self.register
        if scalar.op == "sbr.rel":
            self.effect = "branch"
        elif scalar.op == "inlined_call":
            self.effect = "call"
        elif self.head == "sdivrem":
            self.effect = "divide"
        elif scalar.op.startswith("dma."):
            self.effect = "dma"
        elif scalar.op == "sst":
            self.effect = "store"
        elif not self.result or self.result[0] not in "sp":
            self.effect = "none"
        elif scalar.op in ("sphi", "pphi"):
            self.effect = "phi"
        else:
            self.effect = "value"


def run(
    program: BundledProgram,
    machine: Machine,
    operand_values: Known | None = None,
    call: Call | None = None,
    arguments: Sequence[Value] = (),
) -> collections.Counter[int]:
    """Runs `program` on `machine`; returns the passes of its blocks. Calls to other programs go to `call`, which is
    ignored where None.
    """
    return ScalarRun(program, machine, operand_values or {}, call or (lambda name, arguments: None), arguments).run()
