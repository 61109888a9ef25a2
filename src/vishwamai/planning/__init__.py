"""What a program will take on TPUs you do not have, before it is compiled or run; see docs/planning.md.

Three levels: "analytic" (formulas), "probe" (the compiler's answer without a full compilation) and "verified" (the
compiled program).

Figures keep their level (`figures`). Programs: `program`, `training`, `serving`; the compiler in a process of its own:
`compiler`, `worker`, `cache`. Memory: `analytic`, `residuals`, `stages`, `allocation`, `peak`, `usage`. Time: `speed`,
`exchange`, `mesh_links`, `program_time`, `timeline`, `collectives`, `published` (the range of published steps),
`calibrate`, `calibration`. Choice: `search`, `batch`, `diagnosis`, `advice`, `controller`, `flags`.
"""

from vishwamai.planning.compiler import Compiler, ProgramMemory, probe, verify
from vishwamai.planning.controller import MemorySettings, optimize_memory_usage
from vishwamai.planning.diagnosis import Change, Diagnosis, explain_memory
from vishwamai.planning.figures import Estimate, Level, Measurement
from vishwamai.planning.peak import LiveArray, PeakMemory
from vishwamai.planning.program import Program, trace
from vishwamai.planning.program_time import StepTime, step_time
from vishwamai.planning.stage_times import stage_times

__all__ = [
    "Change",
    "Compiler",
    "Diagnosis",
    "Estimate",
    "Level",
    "LiveArray",
    "Measurement",
    "MemorySettings",
    "PeakMemory",
    "Program",
    "ProgramMemory",
    "StepTime",
    "explain_memory",
    "optimize_memory_usage",
    "probe",
    "stage_times",
    "step_time",
    "trace",
    "verify",
]
