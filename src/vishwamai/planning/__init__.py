"""What a program will take on TPUs you do not have, before it is compiled or run; see docs/planning.md.

Three levels: "analytic" (formulas), "probe" (the compiler's answer without a full compilation) and "verified" (the
compiled program).

Figures keep their level (`figures`). Programs: `training`, `serving`; the compiler's answers: `compiler`. Memory:
`analytic`, `residuals`, `stages`, `allocation`, `peak`, `usage`. Time: `speed`, `exchange`, `mesh_links`,
`program_time`, `timeline`, `collectives`, `published` (the range of published steps), `calibrate`, `calibration`.
Choice: `search`, `batch`, `diagnosis`, `advice`, `controller`, `flags`. `__all__` has the names that docs/api.md
promises; the others serve this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vishwamai.aot.compile.traced import Program, trace
from vishwamai.planning.compiler import Compiler, ProgramMemory, probe, verify
from vishwamai.planning.controller import MemorySettings, optimize_memory_usage
from vishwamai.planning.diagnosis import Change as Change
from vishwamai.planning.diagnosis import Diagnosis, explain_memory
from vishwamai.planning.figures import Estimate
from vishwamai.planning.figures import Level as Level
from vishwamai.planning.figures import Measurement as Measurement
from vishwamai.planning.peak import LiveArray as LiveArray
from vishwamai.planning.peak import PeakMemory as PeakMemory
from vishwamai.planning.program_time import StepTime, step_time
from vishwamai.planning.stage_times import stage_times as stage_times

if TYPE_CHECKING:
    from vishwamai.planning.search import Plan, plan_training

__all__ = [
    "Compiler",
    "Diagnosis",
    "Estimate",
    "MemorySettings",
    "Plan",
    "Program",
    "ProgramMemory",
    "StepTime",
    "explain_memory",
    "optimize_memory_usage",
    "plan_training",
    "probe",
    "step_time",
    "trace",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in ("Plan", "plan_training"):  # training needs flax and optax, and functions do not
        raise AttributeError(f"module 'vishwamai.planning' has no attribute {name!r}")
    return getattr(importlib.import_module("vishwamai.planning.search"), name)
