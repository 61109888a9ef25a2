"""The figures of an estimated run, which the table, the advice and the page are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from vishwamai.aot.schedule.roofline import Roofline
from vishwamai.aot.schedule.times import TOP, ProgramTime, Simulation
from vishwamai.core.hardware import TpuChip

SHOWN_UNITS = ("MXU", "VALU", "XLU", "EUP", "VLOAD", "VSTORE")


@dataclasses.dataclass(frozen=True)
class ScheduleEstimate:
    """The estimated run of one program on one jax device: the figures.

    Attributes:
        name: inspected program; `target`: its device.
        simulation: cycles by program and block, on the slowest core.
        roofline: the bound that the time is set against; `flops_source`: where its FLOP come from.
        vmem: bytes of scoped VMEM by kernel; `pallas`: names of the Pallas kernels.
        warning: missing part of the compiler's output, or None.
    """

    name: str
    target: str
    simulation: Simulation
    roofline: Roofline
    flops_source: str
    vmem: Mapping[str, int]
    pallas: frozenset[str]
    warning: str | None = None

    @property
    def chip(self) -> TpuChip:
        """The chip."""
        return self.simulation.chip

    @property
    def seconds(self) -> float:
        """Estimated device time: the slowest core's cycles at the chip's clock."""
        return self.simulation.seconds

    @property
    def efficiency(self) -> float:
        """Roofline over estimate."""
        return self.roofline.seconds / self.seconds if self.seconds else 0.0

    @property
    def programs(self) -> tuple[ProgramTime, ...]:
        """The programs, slowest first."""
        return tuple(sorted(self.simulation.programs, key=lambda program: -program.cycles))

    @property
    def guessed(self) -> tuple[str, ...]:
        """What could not be followed; where this is not empty, the time is less certain than docs/aot.md says."""
        return tuple(
            f"{text}{f' ({count} times)' if count > 1 else ''}"
            for text, count in self.simulation.unknown.items()
            if not text.startswith(f"{TOP}: copy") and not text.startswith(f"{TOP}: size")
        )

    def kind(self, program: ProgramTime) -> str:
        """ "pallas", "xla" or "top level"."""
        return "top level" if program.name == TOP else "pallas" if program.name in self.pallas else "xla"
