"""`stage_times`: the times of a pipeline's actions, from the compiled programs of one part of the model."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from vishwamai.aot.compile.traced import trace
from vishwamai.core.arguments import check_callable, checked, described
from vishwamai.core.errors import DeviceError, ShapeError
from vishwamai.core.links import AxisLinks, estimate_collective
from vishwamai.core.numbers import human
from vishwamai.core.target import Target
from vishwamai.parallel.pipeline.simulate import ActionTimes
from vishwamai.parallel.pipeline.split import split_part
from vishwamai.planning.memory.compiler import Compiler
from vishwamai.planning.time.program_time import time_program


@checked
def stage_times(part: Callable[[Any, Any], Any], params: Any, x: Any, *, target: str = "v5e") -> ActionTimes:
    """Seconds of the actions "F", "I" and "W" of one part on a TPU, and of a transfer, for `parallel.simulate`.

    The part is cut into the three programs that `parallel.pipelined_loss` runs. Each is compiled for the chip and timed
    as `step_time` does, so the times are lower bounds and nothing runs. A transfer takes the time of `x` over one link.
    What the executor adds is not in them: the loss, and writing what is kept between actions into its buffers.

    Args:
      part: `(params of one part, x [rows, ...]) -> y`, like `x`, as `parallel.pipelined_loss` takes it, on one device.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s, those of one part.
      x: the rows of one microbatch, an array or a `jax.ShapeDtypeStruct`.
      target: a chip, "v5e"; a stage is one device.

    Raises:
      ShapeError: `part` gives another array than it takes, or `target` is a slice.
      DeviceError: libtpu is missing, the target is unknown, or a program does not fit.
      UnsupportedError, KernelError: as `step_time`.

    >>> import jax, jax.numpy as jnp
    >>> weights = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    >>> rows = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    >>> times = stage_times(lambda w, x: x + jnp.tanh(x @ w), weights, rows)  # doctest: +SKIP
    >>> times.forward < times.input_gradient + times.weight_gradient  # doctest: +SKIP
    True
    """
    check_callable("stage_times", "part", part)
    destination = Target.parse_tpu(target)
    chip = destination.tpu
    assert chip is not None
    if destination.topology is not None and math.prod(destination.topology) > 1:
        raise ShapeError(f"stage_times: `target` is {target!r}; pass a chip, {chip.name!r}: a stage is one device.")
    named = [
        (f"params{jax.tree_util.keystr(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    ]
    for name, leaf in [*named, ("x", x)]:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ShapeError(f"stage_times: `{name}` is {described(leaf)}; pass an array or a jax.ShapeDtypeStruct.")
    params, x = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, x))
    split = split_part(part, params, x)
    residuals, between = ([jax.ShapeDtypeStruct(array.shape, array.dtype) for array in ones] for ones in split[-2:])
    calls = {
        "forward": (split.forward, params, x),
        "input_gradient": (split.input_gradient, params, residuals, x),
        "weight_gradient": (split.weight_gradient, params, residuals, between),
    }
    seconds = {}
    with Compiler() as compiler:
        for name, (run, *arguments) in calls.items():
            memory, step = time_program(compiler, trace(run, *arguments, target=chip.name))
            if step is None:
                raise DeviceError(
                    f"stage_times: the program of {name} needs {memory.total}, but {chip.name} has "
                    f"{human(memory.limit)}."
                )
            seconds[name] = step.step.value
    link = AxisLinks(chip, (2,), (False,), on_chip=1)
    nbytes = math.prod(x.shape) * x.dtype.itemsize
    return ActionTimes(**seconds, transfer=estimate_collective("permute", nbytes, link))
