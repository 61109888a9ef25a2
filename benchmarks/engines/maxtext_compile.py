"""Compiles MaxText's step for a TPU slice, and writes down what `subjects/plans/maxtext.py` reads of it; runs in
MaxText's own environment.

    python maxtext_compile.py DIRECTORY compile_topology=v5e-16 ...
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import pathlib
import runpy
import sys
import time
from typing import Any

import jax


def main() -> None:
    directory, package = pathlib.Path(sys.argv[1]), importlib.util.find_spec("maxtext")
    assert package is not None and package.origin is not None, "MaxText is not installed"
    sys.argv[1] = str(pathlib.Path(package.origin).parent / "configs" / "base.yml")
    compiled_as_usual = jax.stages.Lowered.compile

    def compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = time.process_time()
        executable = compiled_as_usual(self, *args, **kwargs)
        seconds = time.process_time() - begin
        memory = executable.memory_analysis()
        assert memory is not None  # libtpu always gives it
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # programs of the SparseCore: the dump has the program
            (directory / "program.hlo").write_text(executable.as_text() or "")
        mesh = next(
            sharding.mesh for sharding in jax.tree.leaves(executable.input_shardings[0]) if hasattr(sharding, "mesh")
        )
        facts = {
            "compile_cpu_seconds": seconds,
            "devices": [[*device.coords, device.core_on_chip] for device in mesh.devices.flat],
            "memory": {
                "arguments": memory.argument_size_in_bytes,
                "outputs": memory.output_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "code": memory.generated_code_size_in_bytes,
                "aliased": memory.alias_size_in_bytes,
            },
        }
        (directory / "told.json").write_text(json.dumps(facts))
        return executable

    jax.stages.Lowered.compile = compiled
    runpy.run_module("maxtext.trainers.pre_train.train_compile", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
