"""Compiles exported programs with libtpu's dump on; runs as its own process,
`python -m vishwamai.aot.schedule.worker JOBS.json`.

libtpu takes the flags of its dump only from the environment, before it is loaded, and writes everything into one
directory; so dumping needs a process of its own, which moves the files of every job into that job's directory when the
job is done.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import traceback
from typing import Any

import jax
from jax import export

from vishwamai.aot.compile.diagnose import find_problem
from vishwamai.aot.compile.libtpu import stderr_has_a_reader
from vishwamai.aot.compile.options.config import RuntimeConfig
from vishwamai.aot.compile.program import compile_for
from vishwamai.aot.schedule.twins import twins
from vishwamai.core.errors import KernelError, VishwamaiError
from vishwamai.core.hlo import parse_module
from vishwamai.core.jax_errors import unreadable_program

OFFLOADED = (
    "copies run on the SparseCore, whose time is not counted here (and jaxlib cannot read the program's text back)"
)


def compile_job(blob: bytes, target: str, options: dict[str, str]) -> dict[str, Any]:
    """Compiles one exported program of flat arguments with options that were checked; says what the executable
    takes.
    """
    exported = export.deserialize(bytearray(blob))
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in exported.in_avals]
    checked = RuntimeConfig(compiler=tuple(options.items()))
    program = compile_for(exported.call, *shapes, target=target, compiler_options=checked)
    result = {"memory": dataclasses.asdict(program.memory), "cost": dataclasses.asdict(program.cost)}
    try:
        return result | {
            "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
            "twins": twins(parse_module(program.text)),
        }
    except KernelError as error:
        return result | {"warning": OFFLOADED if unreadable_program(str(error)) else str(error)}


def _report(error: VishwamaiError) -> dict[str, Any]:
    problem = find_problem(error)
    return {"rejected": str(error), "problem": dataclasses.asdict(problem) if problem else None}


def main(path: str) -> None:
    """Runs the jobs of a file: {"dump": directory, "jobs": [{"blob", "target", "options", "out"}, ...]}; each `out`
    gets its dump and a result.json.
    """
    stderr_has_a_reader()
    work = json.loads(pathlib.Path(path).read_text())
    dump = pathlib.Path(work["dump"])
    for job in work["jobs"]:
        out = pathlib.Path(job["out"])
        try:
            result = compile_job(pathlib.Path(job["blob"]).read_bytes(), job["target"], job["options"])
        except VishwamaiError as error:
            readable = not unreadable_program(str(error)) or not any(dump.glob("*TLP*final_bundles.txt"))
            result = (
                _report(error)
                if readable
                else {"warning": "jaxlib cannot read the executable back; the bundles are complete"}
            )
        except Exception:  # reported to the parent, which raises it
            result = {"crashed": traceback.format_exc()}
        for file in [file for file in dump.iterdir() if file.is_file()]:
            file.rename(out / file.name)
        (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])
