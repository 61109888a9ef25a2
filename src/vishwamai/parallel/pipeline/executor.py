"""Runs any schedule as one SPMD program: a `shard_map` over the stages, in which each runs its share (`stage.py`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from vishwamai.core.arguments import check_callable, checked, described
from vishwamai.core.errors import ShapeError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.parallel.in_order import among_processes
from vishwamai.parallel.pipeline.actions import Schedule
from vishwamai.parallel.pipeline.check import num_microbatches
from vishwamai.parallel.pipeline.stage import Ends, run_stage
from vishwamai.parallel.pipeline.ticks import Ticks, ticks_of


@checked
def place_parts(params: object, schedules: Sequence[Schedule]) -> PyTree:
    """Parameters of parts in the order of the model, as stages hold them.

    Args:
      params: pytree of arrays `[parts, ...]`.
      schedules: one for each stage.

    Returns:
      The same tree of arrays `[stages, parts of a stage, ...]`. It is differentiable, so a gradient comes back in the
      order of the model.

    Raises:
      ShapeError: an array has not so many parts.
      ScheduleError: the schedules cannot run.

    >>> from vishwamai.parallel import PipelineScheduler
    >>> schedules = PipelineScheduler("zb_v").schedule_microbatches(num_stages=2, batch_size=4)
    >>> place_parts(jnp.arange(4), schedules).tolist()
    [[0, 3], [1, 2]]
    """
    order = np.asarray(ticks_of(schedules).order)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not hasattr(leaf, "shape") or leaf.shape[:1] != (len(order),):
            raise ShapeError(
                f"place_parts: `params{jax.tree_util.keystr(path)}` is {described(leaf)}; pass an array "
                f"[{len(order)}, ...], one entry for each part."
            )
    return jax.tree.map(lambda x: jnp.asarray(x)[order].reshape(len(schedules), -1, *x.shape[1:]), params)


@checked
def pipelined_loss(
    part: Callable[[PyTree, jax.Array], jax.Array],
    loss: Callable[[PyTree, jax.Array, PyTree], jax.Array],
    schedules: Sequence[Schedule],
    mesh: Mesh,
    *,
    axis: str = "stage",
    batch_axes: Sequence[str] = (),
    param_specs: PyTree = None,
) -> Callable[[PyTree, PyTree, jax.Array, PyTree], jax.Array]:
    """The mean loss of a batch, computed by a pipeline, as a function that `jax.grad` takes.

    A value without a gradient costs the whole schedule, too. Every part takes and gives one array of the same shape and
    dtype. What comes before the first part (an embedding) is computed outside; its gradient goes through `inputs`.

    Args:
      part: `(params of one part, x [rows, ...]) -> y`, like `x`. Inside it runs on one device: the other axes of the
        mesh are there for its own collectives.
      loss: `(loss_params, y, targets of the rows) -> scalar`, the mean over the rows of one microbatch on one device.
      schedules: one for each stage, of `PipelineScheduler` or your own.
      mesh: it has the axis `axis` with one device for each stage.
      axis: the mesh axis of the stages.
      batch_axes: mesh axes over which rows are split: data parallel, or FSDP.
      param_specs: pytree like the parameters of one part, or None for whole ones: a `PartitionSpec` for the dimensions
        of one part's array. Where it names a batch axis (FSDP), `part` gathers the array with `jax.lax.all_gather`,
        whose gradient adds up and splits.

    Returns:
      `f(params, loss_params, inputs, targets) -> loss`: parameters as `place_parts` gives them, a pytree of the loss's
      own floating parameters, floating inputs `[batch, ...]` and a pytree of targets `[batch, ...]`. It is
      differentiable in all but the targets. Gradients add up in float32 at least.

    Raises:
      ScheduleError: the schedules cannot run.
      UnsupportedError: parts in a row are not on neighbours in the ring of stages.
      ShapeError: the mesh has no such axis or another size; and from `f`, arrays do not fit.

    >>> import jax, jax.numpy as jnp
    >>> from vishwamai.parallel import PipelineScheduler
    >>> schedules = PipelineScheduler("1f1b").schedule_microbatches(num_stages=1, batch_size=4)
    >>> mesh = jax.make_mesh((1,), ("stage",))
    >>> part = lambda w, x: jnp.tanh(x @ w)
    >>> loss = pipelined_loss(part, lambda head, y, target: jnp.mean((y @ head - target) ** 2), schedules, mesh)
    >>> weights = place_parts(0.1 * jnp.ones((1, 3, 3)), schedules)
    >>> f = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    >>> value, (of_weights, of_head) = f(weights, jnp.ones(3), jnp.ones((4, 3)), jnp.zeros(4))
    >>> of_weights.shape, of_head.shape
    ((1, 1, 3, 3), (3,))
    """
    check_callable("pipelined_loss", "part", part)
    check_callable("pipelined_loss", "loss", loss)
    ticks = ticks_of(schedules)
    sizes = dict(mesh.shape)
    if sizes.get(axis) != len(schedules):
        raise ShapeError(
            f"pipelined_loss: the mesh has the axes {sizes}; give `axis` {axis!r} {len(schedules)} devices, one for "
            "each stage."
        )
    batch_axes = tuple(batch_axes)
    unknown = [name for name in batch_axes if name not in sizes or name == axis]
    if unknown:
        raise ShapeError(
            f"pipelined_loss: `batch_axes` has {unknown}; pass axes of the mesh {sizes} other than {axis!r}."
        )
    shards = math.prod(sizes[name] for name in batch_axes)
    microbatches = num_microbatches(schedules)

    def compute(
        params: PyTree, loss_params: PyTree, inputs: jax.Array, targets: PyTree
    ) -> tuple[jax.Array, tuple[PyTree, PyTree, jax.Array]]:
        _check(params, inputs, targets, len(schedules), microbatches, shards)
        # A device holds the parts of its stage, unsplit unless `param_specs` splits them.
        stage_specs = jax.tree.map(lambda _: PartitionSpec(), params) if param_specs is None else param_specs
        stage_specs = jax.tree.map(
            # [stages, parts of a stage, ...]
            lambda spec: PartitionSpec(axis, None, *spec),
            stage_specs,
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )
        # [microbatches, rows, ...]: every stage has all microbatches, of its shard's rows
        rows = PartitionSpec(None, batch_axes or None)
        operands = (jax.tree.map(functools.partial(_cut, microbatches), x) for x in (inputs, targets))
        arguments = (params, loss_params, *operands, jnp.asarray(ticks.table))
        replicated = jax.tree.map(lambda _: PartitionSpec(), loss_params)
        # the last one is the table's: a stage has its own column
        specs = (stage_specs, replicated, rows, jax.tree.map(lambda _: rows, targets), PartitionSpec(None, axis))
        run = functools.partial(_run, part, loss, ticks, axis, batch_axes, shards, stage_specs)
        if mesh.explicit_axes:  # `shard_map` takes only arrays that lie as its specs say
            arguments = jax.tree.map(lambda x, spec: _laid(x, mesh, spec), arguments, specs)
        value, of_params, of_loss, of_inputs = jax.shard_map(
            among_processes(run),
            mesh=mesh,
            in_specs=specs,
            out_specs=(PartitionSpec(), stage_specs, replicated, rows),
            check_vma=False,
        )(*arguments)
        # computed with the loss: a stage's backward passes run among its forward passes
        gradients = (of_params, of_loss, of_inputs)
        if mesh.explicit_axes:  # a gradient has the sharding of its argument
            operands = (params, loss_params, _cut(microbatches, inputs))
            gradients = jax.tree.map(lambda g, x: _laid(g, mesh, jax.typeof(x).sharding.spec), gradients, operands)
        of_params, of_loss, of_inputs = gradients
        return value, (of_params, of_loss, of_inputs.reshape(inputs.shape))

    @jax.custom_vjp
    def f(params: PyTree, loss_params: PyTree, inputs: jax.Array, targets: PyTree) -> jax.Array:
        return compute(params, loss_params, inputs, targets)[0]

    # The residuals are the gradients, so that the backward pass is a scaling.
    def backward(gradients: tuple[PyTree, PyTree, jax.Array], ct: jax.Array) -> tuple[PyTree, PyTree, jax.Array, None]:
        scaled = jax.tree.map(lambda g: (g * ct).astype(g.dtype), gradients)
        return (*scaled, None)  # targets have no gradient

    f.defvjp(compute, backward)
    return f


def _laid(x: AnyArray, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    explicit = {n for n, kind in zip(mesh.axis_names, mesh.axis_types) if kind == AxisType.Explicit}

    def seen(entry: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
        names = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        return tuple(name for name in names if name in explicit) or None

    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*map(seen, spec))))


def _cut(microbatches: int, x: AnyArray) -> jax.Array:
    return jnp.reshape(x, (microbatches, -1, *jnp.shape(x)[1:]))


def _check(params: PyTree, inputs: jax.Array, targets: PyTree, stages: int, microbatches: int, shards: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if jnp.ndim(leaf) < 2 or leaf.shape[0] != stages:
            raise ShapeError(
                f"pipelined_loss: `params{jax.tree_util.keystr(path)}` is {described(leaf)}; pass what `place_parts` "
                f"gives, [{stages} stages, parts of a stage, ...]."
            )
    for path, leaf in jax.tree_util.tree_leaves_with_path((inputs, targets)):
        if jnp.ndim(leaf) < 1 or leaf.shape[0] != jnp.shape(inputs)[0] or not leaf.size:
            raise ShapeError(
                f"pipelined_loss: (inputs, targets){jax.tree_util.keystr(path)} is {described(leaf)}; pass arrays of "
                "as many rows."
            )
    if jnp.shape(inputs)[0] % (microbatches * shards):
        raise ShapeError(
            f"pipelined_loss: {jnp.shape(inputs)[0]} rows do not divide into {microbatches} microbatches on {shards} "
            f"shards; pass a multiple of {microbatches * shards}."
        )


def _run(
    part: Callable[[PyTree, jax.Array], jax.Array],
    loss: Callable[[PyTree, jax.Array, PyTree], jax.Array],
    ticks: Ticks,
    axis: str,
    batch_axes: tuple[str, ...],
    shards: int,
    specs: PyTree,
    params: PyTree,
    loss_params: PyTree,
    inputs: jax.Array,
    targets: PyTree,
    table: jax.Array,
) -> tuple[jax.Array, PyTree, PyTree, jax.Array]:
    """One stage's share. `inputs` and `targets` are `[microbatches, rows, ...]`, `table` `[ticks, 1, columns]`."""
    params = jax.tree.map(lambda x: x[0], params)  # [chunks, ...]
    microbatches = inputs.shape[0]

    def mean(loss_params: PyTree, y: jax.Array, m: jax.Array | int) -> tuple[jax.Array, jax.Array]:
        # means of equal numbers of rows: their sum over all is the mean of the batch
        value = loss(loss_params, y, jax.tree.map(lambda x: x[m], targets)) / (microbatches * shards)
        return value, value  # the scalar that is differentiated, and the same to be reported

    ends = Ends(
        enter=lambda m: inputs[m],
        gradients=jnp.zeros_like(inputs),
        left=lambda gradients, m, dx: gradients.at[m].set(dx),
        params=loss_params,
        loss=mean,
    )
    gradients = run_stage(lambda p, x, *_: part(p, x), ends, ticks, axis, params, table)

    def total(g: jax.Array, like: jax.Array, spec: PartitionSpec) -> jax.Array:
        # Where FSDP splits a parameter, the gradient of `part`'s all-gather has added it up over that axis already.
        split_over = {name for entry in spec for name in ((entry,) if isinstance(entry, str) else entry or ())}
        axes = tuple(name for name in batch_axes if name not in split_over)
        # [None]: the stages' axis again, which `out_specs` joins
        return (jax.lax.psum(g, axes) if axes else g).astype(like.dtype)[None]

    everywhere = (axis, *batch_axes)  # zeros on stages without the last part
    return (
        jax.lax.psum(gradients.sums, everywhere),
        jax.tree.map(total, gradients.params, params, specs),
        jax.tree.map(lambda g, like: jax.lax.psum(g, everywhere).astype(like.dtype), gradients.ends, loss_params),
        jax.lax.psum(gradients.entry, axis),  # zeros but on the first stage; rows stay split
    )
