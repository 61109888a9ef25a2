"""Asks the compiler about exported programs; runs as its own process, `python -m vishwamai.planning.worker`.

libtpu can end the process that it runs in, so the planner keeps it in this one. A request is a line of JSON on standard
input, its answer a line on standard output.
"""

from __future__ import annotations

import contextlib
import pathlib
from typing import Any

import jax
from jax import export

from vishwamai.aot.compile import child, libtpu
from vishwamai.aot.compile.diagnose import diagnose, from_compiler, translate
from vishwamai.core.errors import KernelError
from vishwamai.core.target import Target
from vishwamai.planning.peak import OPTIONS, read_dump
from vishwamai.planning.program import read_sharding


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The compiler's answer about one program.

    Args:
      request: "blob" (path of the export), "target", "donated" and "places" (for each argument), "hbm_mib" (the HBM
        that the compiler is told the device has; None for what it has), "options" of the compiler, "dump" (a directory
        for its live ranges, or None), and "text" (where the optimised program is written, or None).

    Returns:
      "memory" of the program, or what keeps it from compiling: "needed" (bytes of HBM) with the largest "allocations",
      or "rejected" in words. With a dump also "peak", of `peak.read_dump`.
    """
    reply = _compiled(request)
    if request["dump"] is not None and "rejected" not in reply:
        try:
            reply["peak"] = read_dump(pathlib.Path(request["dump"]))
        except KernelError as error:
            return {"rejected": str(error), "kind": "compiler"}
    return reply


def _compiled(request: dict[str, Any]) -> dict[str, Any]:
    chip = Target.parse_chip(request["target"])
    exported = export.deserialize(bytearray(pathlib.Path(request["blob"]).read_bytes()))
    devices = libtpu.devices_for(request["target"])
    donated = tuple(i for i, donation in enumerate(request["donated"]) if donation)
    single = jax.sharding.SingleDeviceSharding(devices[0])
    placed = [single if text is None else read_sharding(text, devices) for text in request["places"]]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p) for a, p in zip(exported.in_avals, placed)]
    out: dict[str, Any] = {} if placed else {"out_shardings": single}  # without arguments nothing else names the device
    hbm = request["hbm_mib"]
    try:
        lowered = jax.jit(exported.call, donate_argnums=donated, **out).lower(*shapes)
        options = request["options"] | ({} if hbm is None else {"xla_tpu_max_hbm_size_mib": str(hbm)})
        if request["dump"] is not None:
            options |= {"xla_dump_to": request["dump"], **OPTIONS}
        compiled = lowered.compile(compiler_options=options)
    except Exception as error:
        if not from_compiler(error):
            raise
        problem = diagnose(str(error), chip)
        if problem.kind == "hbm":
            return {"needed": problem.used, "allocations": problem.allocations}
        return {"rejected": str(translate(error, chip)), "kind": problem.kind}
    if request["text"] is not None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # copies of the SparseCore: the dump has the program
            pathlib.Path(request["text"]).write_text(compiled.as_text() or "")
    stats = compiled.memory_analysis()
    assert stats is not None  # libtpu always gives it
    return {
        "memory": {
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
            "aliased": stats.alias_size_in_bytes,
        }
    }


if __name__ == "__main__":
    child.answer_lines(answer)
