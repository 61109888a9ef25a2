"""What a program will take on TPUs you do not have, before it is compiled or run; see docs/planning.md.

Three levels: "analytic" (formulas), "probe" (the compiler's answer without a full compilation) and "verified" (the
compiled program).

Figures keep their level (`core.figures`). Programs: `training`, `serving`; the rows that experts exchange and the links
of a mesh: `exchange`, `mesh_links`. `memory` has the memory of a program, `time` the time of its step, `search` the
choice of settings. `__all__` has the names that docs/api.md promises; the others serve this library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vishwamai.aot.compile.traced import Program, trace
from vishwamai.core.figures import Estimate
from vishwamai.core.figures import Level as Level
from vishwamai.core.figures import Measurement as Measurement
from vishwamai.planning.memory.compiler import Compiler, ProgramMemory, probe, verify
from vishwamai.planning.memory.peak import LiveArray as LiveArray
from vishwamai.planning.memory.peak import PeakMemory as PeakMemory
from vishwamai.planning.search.controller import MemorySettings, optimize_memory_usage
from vishwamai.planning.search.diagnosis import Change as Change
from vishwamai.planning.search.diagnosis import Diagnosis, explain_memory
from vishwamai.planning.time.program_time import StepTime, step_time
from vishwamai.planning.time.stage_times import stage_times as stage_times

if TYPE_CHECKING:
    from vishwamai.planning.search.plan import Plan, plan_training

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
    return getattr(importlib.import_module("vishwamai.planning.search.plan"), name)
