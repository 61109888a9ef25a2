"""The compiler's process, `python -m vishwamai.aot.worker`: compiles exported programs, and tries options.

A question is a line of JSON on standard input, its answer a line on standard output (`aot.compile.child`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding

from vishwamai.aot.compile import child, libtpu, live_ranges
from vishwamai.aot.compile.compiled import Compiled, described, memory_of
from vishwamai.aot.compile.diagnose import find_problem, from_compiler, translate
from vishwamai.aot.compile.options import trials
from vishwamai.aot.compile.traced import read_sharding
from vishwamai.aot.schedule.twins import twins
from vishwamai.core.errors import KernelError
from vishwamai.core.hlo import parse_module
from vishwamai.core.jax_errors import unreadable_program
from vishwamai.core.target import Target

OFFLOADED = (
    "copies run on the SparseCore, whose time is not counted here (and jaxlib cannot read the program's text back)"
)


def answer(question: child.Question) -> child.Answer:
    """The answer about an option (`options.trials`) or about a program.

    Args:
      question: `trials.answer`'s, or of a program: "blob" (path of the export), "target", "donated" and "places" (for
        each argument), "options" of the compiler, and where they matter: "hbm_mib" (the HBM that the compiler is told
        the device has), "live_ranges" (a directory for them), "text" (file for the optimised program), "bundles" (the
        directory into which libtpu writes, by `schedule.dump.dump_flags`) and "out" (that takes the files from there).

    Returns:
      "memory" of the program, or "rejected" in words with the "problem"; of one that needs too much HBM also "needed"
      in bytes and its largest "allocations". With live ranges "peak", of `live_ranges.read_dump`. With bundles "cost",
      "kernels" and "twins", or a "warning".
    """
    if "blob" not in question:
        return trials.answer(question)
    bundles = question.get("bundles")
    reply: child.Answer = _compiled(question)
    if bundles is not None:
        dump, out = pathlib.Path(bundles), pathlib.Path(question["out"])
        if unreadable_program(reply.get("rejected", "")) and any(dump.glob("*TLP*final_bundles.txt")):
            reply = {"warning": "jaxlib cannot read the executable back; the bundles are complete"}
        for file in [file for file in dump.iterdir() if file.is_file()]:
            file.rename(out / file.name)
    if question.get("live_ranges") is not None and ("memory" in reply or "needed" in reply):
        try:
            reply["peak"] = live_ranges.read_dump(pathlib.Path(question["live_ranges"]))
        except KernelError as error:
            return {"rejected": str(error), "problem": None}
    return reply


def _compiled(question: child.Question) -> child.Answer:
    chip = Target.parse_chip(question["target"])
    exported = export.deserialize(bytearray(pathlib.Path(question["blob"]).read_bytes()))
    devices = libtpu.devices_for(question["target"])
    donated = tuple(i for i, donation in enumerate(question["donated"]) if donation)
    single = jax.sharding.SingleDeviceSharding(devices[0])
    places = [single if text is None else read_sharding(text, devices) for text in question["places"]]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p) for a, p in zip(exported.in_avals, places)]
    out: dict[str, Any] = {} if places else {"out_shardings": single}  # without arguments nothing else names the device
    options = dict(question["options"])
    if question.get("hbm_mib") is not None:
        options["xla_tpu_max_hbm_size_mib"] = str(question["hbm_mib"])
    if question.get("live_ranges") is not None:
        options |= {"xla_dump_to": question["live_ranges"], **live_ranges.OPTIONS}
    try:
        lowered = jax.jit(exported.call, donate_argnums=donated, **out).lower(*shapes)
        compiled = lowered.compile(compiler_options=options)
        if question.get("bundles") is not None:
            return _details(described(compiled, chip, len(devices)))
        memory = memory_of(compiled, chip)
    except Exception as error:
        if not from_compiler(error):
            raise
        translated = translate(error, chip, [place for place in places if isinstance(place, NamedSharding)])
        problem = find_problem(translated)
        assert problem is not None
        needed = {"needed": problem.used, "allocations": problem.allocations} if problem.kind == "hbm" else {}
        return {"rejected": str(translated), "problem": dataclasses.asdict(problem), **needed}
    if "text" in question:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # copies of the SparseCore: the dump has the program
            pathlib.Path(question["text"]).write_text(compiled.as_text() or "")
    return {"memory": dataclasses.asdict(memory)}


def _details(compiled: Compiled) -> child.Answer:
    reply = {"memory": dataclasses.asdict(compiled.memory), "cost": dataclasses.asdict(compiled.cost)}
    try:
        return reply | {
            "kernels": [dataclasses.asdict(kernel) for kernel in compiled.kernels],
            "twins": twins(parse_module(compiled.text)),
        }
    except KernelError as error:
        return reply | {"warning": OFFLOADED if unreadable_program(str(error)) else str(error)}


if __name__ == "__main__":
    child.answer_lines(answer)
