"""What one stage does, inside `shard_map`: a `scan` over the ticks of a schedule, with `ppermute` between stages.

The table of `ticks.py` says what a stage does in each tick and where its values are. The gradients of inputs and of
weights are functions of their own (`split.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vishwamai.core.types import PyTree
from vishwamai.parallel.pipeline.split import split_part
from vishwamai.parallel.pipeline.ticks import COLUMNS, Ticks


class Ends(NamedTuple):
    """What comes before the first part and after the last one, as functions of the number of a microbatch.

    Attributes:
      enter: `m -> x`, the input of the first part.
      gradients: initial sum of the gradients of `enter`.
      left: `(gradients, m, dx) -> gradients`, with the gradient of microbatch `m` added.
      params: pytree of the floating parameters of `loss`.
      loss: `(params, y, m) -> (scalar, sums)`. The gradients are those of the sum of the scalars over all microbatches;
        `sums` is a pytree of scalars to add up.
    """

    enter: Callable[[jax.Array], jax.Array]
    gradients: PyTree
    left: Callable[[PyTree, jax.Array, jax.Array], PyTree]
    params: PyTree
    loss: Callable[[PyTree, jax.Array, jax.Array | int], tuple[jax.Array, PyTree]]


class Found(NamedTuple):
    """What one device has found, to be added up over the devices that share it.

    Attributes:
      sums: loss sums, float32; zeros on all stages but that of the last part.
      params: gradients of the stage's parameters. ends: those of `Ends.params`. Both in float32 at least; without
        gradients, the former are () and the latter zeros.
      entry: `Ends.gradients` with all gradients added.
      seen: values that the parts have seen, each leaf `[chunks, ...]`, added up over the microbatches.
    """

    sums: PyTree
    params: PyTree
    ends: PyTree
    entry: PyTree
    seen: PyTree


def zeros_like(tree: PyTree) -> PyTree:
    """Where gradients add up: zeros in float32 at least."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), tree)


_CHOSEN = "tick_"


def chosen_by(column: str) -> AbstractContextManager[object]:
    """The scope of a branch that a column of `Ticks.table` chooses; `column_of` reads it in the compiled program."""
    return jax.named_scope(_CHOSEN + column)


def column_of(source: str) -> str | None:
    """The column that chooses the branch of a conditional; None for other conditionals.

    Args:
      source: the scopes and the operation that it comes from.

    >>> column_of("jit(f)/while/body/tick_kind/cond/branch_2_fun/tick_last/cond"), column_of("jit(f)/cond")
    ('last', None)
    """
    scope = source.split("/")[-2:-1]
    return scope[0].removeprefix(_CHOSEN) if scope and scope[0].startswith(_CHOSEN) else None


def run_stage(
    part: Callable[..., PyTree],
    ends: Ends,
    ticks: Ticks,
    axis: str,
    params: PyTree,
    table: jax.Array,
    extras: PyTree = (),
    gradients: bool = True,
    sees: bool = False,
    largest: PyTree = None,
    frozen: PyTree = (),
) -> Found:
    """A stage's share of a schedule.

    Args:
      part: `(params of one part, x, given, frozen) -> y`, like `x`.
      ends: functions before and after the parts.
      ticks: table of the schedules.
      axis: the mesh axis of the stages.
      params: pytree of arrays `[chunks, ...]`, those of the stage's parts.
      table: int32 `[ticks, 1, columns]`, the stage's column of `ticks.table`.
      extras: pytree of arrays `[microbatches, rows, ...]` without a gradient, which `part` gets for its microbatch.
      gradients: False runs the forward passes and the loss alone.
      sees: `part` gives `(y, seen)`, of which `seen` is a pytree without a gradient.
      largest: pytree of bools like `params`, true where the gradients of microbatches are joined by the maximum and not
        added; None for none.
      frozen: pytree of arrays `[chunks, ...]` without a gradient, which `part` gets for its part.
    """
    stages = jax.lax.axis_size(axis)
    entry = jax.eval_shape(ends.enter, jnp.zeros((), jnp.int32))  # shape of a value between parts
    # One part's parameters, one microbatch's extras, one part's frozen arrays.
    one_of = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (params, extras, frozen))
    split = split_part(part, one_of[0], entry, *one_of[1:], sees=sees) if gradients else None
    largest = jax.tree.map(lambda _: False, params) if largest is None else largest
    # shapes alone: nothing is computed here
    seen = jax.eval_shape(part, one_of[0], entry, *one_of[1:])[1] if sees else ()
    chunks = jax.tree.leaves((params, frozen))[0].shape[0]

    def room(slots: int, kind: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros((slots + 1, *kind.shape), kind.dtype)  # the last one takes what nothing reads

    sums = jax.eval_shape(lambda: ends.loss(ends.params, jnp.zeros(entry.shape, entry.dtype), 0)[1])
    # Slots of the buffers are assigned ahead of time (`ticks`): a slot is written again only after its last reader.
    state = {
        "values": room(ticks.values, entry),
        # residuals of the microbatches between their "F" and "W"
        "kept": [] if split is None else [room(ticks.residuals, kind) for kind in split.residuals],
        "between": [] if split is None else [room(ticks.between, kind) for kind in split.between],
        "params": () if split is None else zeros_like(params),
        "ends": zeros_like(ends.params),
        # Not zeros of ours: the caller knows what `Ends.left` adds to.
        "entry": ends.gradients,
        "sums": jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), sums),
        "seen": jax.tree.map(lambda x: jnp.zeros((chunks, *x.shape), x.dtype), seen),
    }

    def local_rows(row: dict[str, object]) -> PyTree:
        return jax.tree.map(lambda x: x[row["chunk"]], params)

    def also(row: dict[str, object]) -> tuple[PyTree, PyTree]:
        # a traced index: one program for all parts of a stage
        of_part = jax.tree.map(lambda x: x[row["chunk"]], frozen)
        return jax.tree.map(lambda x: x[row["microbatch"]], extras), of_part

    def write(buffers: list[jax.Array], slot: jax.Array, values: Sequence[jax.Array]) -> list[jax.Array]:
        # XLA updates the carry of a loop in place
        return [buffer.at[slot].set(value) for buffer, value in zip(buffers, values, strict=True)]

    def added(total: PyTree, more: PyTree) -> PyTree:
        # in the sums' float32, not in the gradients' bfloat16
        return jax.tree.map(lambda t, x: t + x.astype(t.dtype), total, more)

    def idle(state: dict, row: dict) -> dict:
        return state

    def forward(state: dict, row: dict) -> dict:
        def read(m: jax.Array) -> jax.Array:
            return state["values"][row["read"]]

        with chosen_by("first"):
            # only the first stage embeds tokens
            x = jax.lax.cond(row["first"] == 1, ends.enter, read, row["microbatch"])
        if split is not None:
            y, saved = split.forward(local_rows(row), x, *also(row))
            state = state | {"kept": write(state["kept"], row["kept"], saved)}  # residuals, read by "I" and "W"
        else:
            y = part(local_rows(row), x, *also(row))
        if sees:
            y, seen = y
            state = state | {"seen": jax.tree.map(lambda t, s: t.at[row["chunk"]].add(s), state["seen"], seen)}
        return state | {"values": state["values"].at[row["write"]].set(y)}

    def of_loss(state: dict, row: dict) -> tuple[dict, jax.Array]:
        y, m = state["values"][row["read"]], row["microbatch"]
        if split is None:
            # without gradients the loss alone is run
            return state | {"sums": added(state["sums"], ends.loss(ends.params, y, m)[1])}, jnp.zeros_like(y)
        # The loss runs once, in the input gradient of the last part: its output waits in a slot until then.
        (of_params, dy), sums = jax.grad(ends.loss, argnums=(0, 1), has_aux=True)(ends.params, y, m)
        return state | {"ends": added(state["ends"], of_params), "sums": added(state["sums"], sums)}, dy

    def of_next(state: dict, row: dict) -> tuple[dict, jax.Array]:
        return state, state["values"][row["read"]]

    def input_gradient(state: dict, row: dict) -> dict:
        with chosen_by("last"):
            state, dy = jax.lax.cond(row["last"] == 1, of_loss, of_next, state, row)
        if split is None:
            return state
        # written by this microbatch's "F", in an earlier tick
        saved = [buffer[row["kept"]] for buffer in state["kept"]]
        dx, between = split.input_gradient(local_rows(row), saved, dy, *also(row))  # the next stage waits for dx alone
        with chosen_by("first"):
            entry = jax.lax.cond(
                row["first"] == 1, ends.left, lambda gradients, m, dx: gradients, state["entry"], row["microbatch"], dx
            )
        return state | {
            "values": state["values"].at[row["write"]].set(dx),
            "between": write(state["between"], row["between"], between),
            "entry": entry,
        }

    def weight_gradient(state: dict, row: dict) -> dict:
        if split is None:
            return state
        # `between` spares the weight gradient what the input gradient has computed already.
        saved, between = ([b[row[name]] for b in state[name]] for name in ("kept", "between"))
        gradients = split.weight_gradient(local_rows(row), saved, between, *also(row))
        chunk = row["chunk"]

        def joined(total: jax.Array, new: jax.Array, most: bool) -> jax.Array:
            # statistics such as the largest logit do not add up
            return total.at[chunk].max(new) if most else total.at[chunk].add(new)

        return state | {"params": jax.tree.map(joined, state["params"], gradients, largest)}

    def transfer(values: jax.Array, row: dict, way: str, step: int) -> jax.Array:
        # All stages send in every tick, if only the unused slot: a collective must run on all devices.
        ring = [(stage, (stage + step) % stages) for stage in range(stages)]
        return jax.lax.ppermute(values[row[f"send_{way}"]], axis, ring)

    # by `ticks.NUMBER`; all return the same tree, which `switch` asks for
    branches = (idle, forward, input_gradient, weight_gradient)

    def tick(state: dict, cells: jax.Array) -> tuple[dict, None]:
        row: dict[str, jax.Array] = dict(zip(COLUMNS, cells[0]))
        with chosen_by("kind"):
            state = jax.lax.switch(row["kind"], branches, state, row)
        values = state["values"]
        ways = [(way, step) for way, step, used in (("up", 1, ticks.up), ("down", -1, ticks.down)) if used]
        # both before a write: they may overlap
        received = [(way, transfer(values, row, way, step)) for way, step in ways]
        for way, value in received:
            values = values.at[row[f"recv_{way}"]].set(value)
        return state | {"values": values}, None

    state, _ = jax.lax.scan(tick, state, table)  # one traced tick, whatever the length of the schedule
    return Found(*(state[name] for name in Found._fields))
