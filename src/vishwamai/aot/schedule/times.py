"""What a simulation counts: the cycles of blocks, programs and the executable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vishwamai.core.hardware import TpuChip

TOP = "TLP"
"""libtpu's name for the top-level program."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A basic block of a program. `length` bundles, entered `passes` times; `stall`: cycles a pass waits for the matrix
    units.

    `units` are the instructions of one pass by unit; `matrix` and `crosslane` the busy cycles of one pass of the
    busiest matrix unit and of the cross-lane units.
    """

    address: int
    length: int
    passes: int
    stall: float
    matrix: float
    crosslane: float
    units: Mapping[str, int]

    @property
    def cycles(self) -> float:
        """All passes together, waiting for copies excluded."""
        return (self.length + self.stall) * self.passes


@dataclasses.dataclass(frozen=True)
class ProgramTime:
    """What one program took on one core, all its calls together; times in cycles.

    Attributes:
        name: libtpu's name, that of the HLO instruction.
        calls: how often it was called; `bundles`: issued.
        dma_wait: waiting for copies; `matrix_stall`: waiting for the matrix units.
        matrix: busy cycles of the busiest matrix unit; `crosslane`: of the cross-lane units.
        units: instructions issued by unit; `capacity`: how many of each one bundle can hold.
        spills, fills: registers written to and read back from VMEM, in the code.
        hbm_bytes: copied to and from HBM.
        flops: multiply-adds x 2 that went through the matrix units, padding included, by kind of operand.
        blocks: hottest first.
    """

    name: str
    calls: int
    cycles: float
    bundles: int
    dma_wait: float
    matrix_stall: float
    matrix: float
    crosslane: float
    units: Mapping[str, int]
    capacity: Mapping[str, int]
    spills: int
    fills: int
    hbm_bytes: int
    flops: Mapping[str, float]
    blocks: tuple[Block, ...]

    def utilisation(self, unit: str) -> float:
        """Share of the cycles in which `unit` is busy: "MXU", "XLU" by reservation, the others by slots filled."""
        if not self.cycles:
            return 0.0
        if unit == "MXU":
            return self.matrix / self.cycles
        if unit == "XLU":
            return self.crosslane / self.cycles
        return self.units[unit] / (self.cycles * max(1, self.capacity[unit]))


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a whole executable took on its slowest core.

    `core_cycles`: each core's total; `hbm_bytes`: of all cores; `flops`: through the matrix units of all cores, by kind
    of operand; `looped`: whether the top level calls its programs in a loop; `unknown`: what had to be guessed, with
    counts.
    """

    chip: TpuChip
    cycles: float
    core_cycles: tuple[float, ...]
    dma_wait: float
    matrix_stall: float
    matrix: float
    hbm_bytes: int
    flops: Mapping[str, float]
    programs: tuple[ProgramTime, ...]
    looped: bool
    unknown: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """The cycles at the chip's clock."""
        return self.cycles / self.chip.clock
