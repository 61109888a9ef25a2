"""The TPU that is not there: compile, check and inspect programs for any TPU generation on a machine without one.

`compile_for` gives the program with its memory and cost, `check` says in words whether it fits, `inspect` follows the final instruction
bundles and says what bounds it. All need the package libtpu (`pip install "vishwamai[aot]"`), none needs a TPU.
"""

from vishwamai.aot.check import Report, check
from vishwamai.aot.compile import Compiled, Cost, Memory, compile_for, place
from vishwamai.aot.diagnose import Problem
from vishwamai.aot.libtpu import has_libtpu, mesh_for, versions
from vishwamai.aot.schedule import Case, Schedule, inspect, inspect_many

__all__ = [
    "Case",
    "Compiled",
    "Cost",
    "Memory",
    "Problem",
    "Report",
    "Schedule",
    "check",
    "compile_for",
    "has_libtpu",
    "inspect",
    "inspect_many",
    "mesh_for",
    "place",
    "versions",
]
