"""Ahead-of-time compilation for TPUs you do not have: compile, check and inspect programs for any TPU generation.

`compile_for` gives the program with its memory and cost, `check` says in words whether it fits, `inspect` follows the
final instruction bundles and says what bounds it. All need the package libtpu (the extra `aot`), none
needs a TPU.
"""

from vishwamai.aot.compile.check import Report, check
from vishwamai.aot.compile.compiled import Compiled, Cost, Memory, compile_for, place
from vishwamai.aot.compile.diagnose import CompilerProblem
from vishwamai.aot.compile.libtpu import has_libtpu, mesh_for, versions
from vishwamai.aot.schedule.inspection import Inspection, KernelSchedule, inspect, inspect_many

__all__ = [
    "Compiled",
    "Cost",
    "Inspection",
    "Memory",
    "CompilerProblem",
    "Report",
    "KernelSchedule",
    "check",
    "compile_for",
    "has_libtpu",
    "inspect",
    "inspect_many",
    "mesh_for",
    "place",
    "versions",
]
