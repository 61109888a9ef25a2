"""A schedule as a table for a program in which all stages step together: an "F", "I" or "W" in a tick, then transfers.

In every tick a stage computes at most one action, then sends at most one value to each of its two neighbours in the
ring of stages. Every value has a slot of a buffer from where it is made to where it is read last; slots are used again.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from vishwamai.core.errors import UnsupportedError
from vishwamai.parallel.pipeline.actions import (
    COMPUTE,
    FORWARD,
    INPUT_GRADIENT,
    RECV_B,
    RECV_F,
    SEND_F,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    needs,
    placement,
)
from vishwamai.parallel.pipeline.check import check_schedules, num_microbatches

IDLE = 0
NUMBER = {FORWARD: 1, INPUT_GRADIENT: 2, WEIGHT_GRADIENT: 3}
COLUMNS = (
    "kind", "chunk", "microbatch", "first", "last",
    "read", "write", "kept", "between",
    "send_up", "send_down", "recv_up", "recv_down",
)  # fmt: skip
"""Of `Ticks.table`. "kind": 0 idle, else `NUMBER`; "chunk": which of the stage's parts; "first" and "last": whether it
is the first or last part of the model; "read" to "between": slots; "up" is the ring's direction to the next stage.
"""
_READ, _WRITE, _SEND, _RECEIVE = range(4)  # the phases of a tick


@dataclasses.dataclass(frozen=True)
class Ticks:
    """What the executor runs.

    Attributes:
      table: int32 `[ticks, stages, columns]`. A slot that is not used has the number behind the last.
      values: slots for activations and gradients between parts. residuals: for what the forward pass keeps. between:
        for what the input gradient keeps for the weight gradient.
      order: the parts in the order of stages, then of each stage's chunks.
      up: bool, True where a value goes up. down: bool, True where one goes down.
    """

    table: np.ndarray
    values: int
    residuals: int
    between: int
    order: tuple[int, ...]
    up: bool
    down: bool


def ticks_of(schedules: Sequence[Schedule]) -> Ticks:
    """The table of checked schedules.

    Raises:
      ScheduleError: the schedules cannot run.
      UnsupportedError: two parts in a row are on stages that are not neighbours in the ring, or the stages hold
        different numbers of parts.
    """
    check_schedules(schedules)
    stage_of = placement(schedules)
    stages, last_part = len(schedules), len(stage_of) - 1
    if len({len(schedule.parts) for schedule in schedules}) > 1:
        raise UnsupportedError(
            f"pipeline: the stages hold {[len(schedule.parts) for schedule in schedules]} parts; give every stage as "
            "many."
        )
    # Times of actions; slots are chosen below, once the life of every value is known.
    tick_of, sent, arrived = _walk(schedules, stage_of)

    # The life of each value: where, from when, until when, as ticks and phases.
    values: list[tuple[int, int, int, tuple[str, Action]]] = []
    saved, between = [], []

    def when(tick: int, phase: int) -> int:
        return 4 * tick + phase  # so that reads of a tick come before its writes, sends and receives

    for part, stage in stage_of.items():
        for m in range(num_microbatches(schedules)):
            f, i, w = (Action(kind, part, m) for kind in COMPUTE)
            saved.append((stage, when(tick_of[f], _WRITE), when(tick_of[w], _READ), f))
            between.append((stage, when(tick_of[i], _WRITE), when(tick_of[w], _READ), i))
            # activations go to the next part, gradients to the one before
            for producer, neighbour, reader in ((f, part + 1, FORWARD), (i, part - 1, INPUT_GRADIENT)):
                begin = when(tick_of[producer], _WRITE)
                if neighbour < 0:
                    continue  # the gradient of the inputs has a place of its own
                # the last output: its loss is in "I"
                reads = Action(reader, neighbour, m) if neighbour <= last_part else i
                if stage_of.get(neighbour, stage) == stage:
                    values.append((stage, begin, when(tick_of[reads], _READ), ("own", producer)))  # no transfer
                    continue
                destination = stage_of[neighbour]
                # the slot is free as soon as the value is sent
                values.append((stage, begin, when(sent[producer], _SEND), ("out", producer)))
                values.append(
                    # written at the end of the tick before it may be read
                    (destination, when(arrived[producer] - 1, _RECEIVE), when(tick_of[reads], _READ), ("in", producer))
                )

    value_slot, value_count = _colour(values)
    residual_slot, residual_count = _colour(saved)
    between_slot, between_count = _colour(between)
    column = {name: i for i, name in enumerate(COLUMNS)}
    table = np.zeros((1 + max(tick_of.values()), stages, len(COLUMNS)), np.int32)  # kind 0: idle
    # Unused slots point behind the last one, where nothing is read: every tick may write without a branch.
    for name in COLUMNS[column["read"] :]:
        table[:, :, column[name]] = {"kept": residual_count, "between": between_count}.get(name, value_count)

    def put(tick: int, stage: int, **cells: int) -> None:
        for name, cell in cells.items():
            table[tick, stage, column[name]] = cell

    up = down = False
    for action, tick in tick_of.items():
        kind, part, m = action.kind, action.part, action.microbatch
        stage = stage_of[part]
        put(
            tick, stage, kind=NUMBER[kind], chunk=schedules[stage].parts.index(part), microbatch=m,
            first=int(part == 0), last=int(part == last_part), kept=residual_slot[Action(FORWARD, part, m)],
        )  # fmt: skip
        if kind != FORWARD:
            put(tick, stage, between=between_slot[Action(INPUT_GRADIENT, part, m)])
        if kind == WEIGHT_GRADIENT:  # it reads only what its stage saved, and sends nothing
            continue
        if kind == FORWARD:
            source = Action(kind, part - 1, m) if part else None
        else:  # the loss reads the last output
            source = Action(kind, part + 1, m) if part < last_part else Action(FORWARD, part, m)
        for form in ("own", "in"):
            if source is not None and (form, source) in value_slot:
                put(tick, stage, read=value_slot[form, source])
        for form in ("own", "out"):
            if (form, action) in value_slot:
                put(tick, stage, write=value_slot[form, action])
        if action in sent:
            destination = stage_of[part + (1 if kind == FORWARD else -1)]
            upward = _is_up(action, stage, destination, stages)
            up, down = up or upward, down or not upward
            way = "up" if upward else "down"
            put(sent[action], stage, **{f"send_{way}": value_slot["out", action]})
            put(sent[action], destination, **{f"recv_{way}": value_slot["in", action]})
    order = tuple(part for schedule in schedules for part in schedule.parts)
    return Ticks(table, value_count, residual_count, between_count, order, up, down)


def _is_up(producer: Action, stage: int, destination: int, stages: int) -> bool:
    """Whether the value goes up the ring; with two stages activations go up and gradients down."""
    ways = [step for step in (1, -1) if (destination - stage) % stages == step % stages]
    if not ways:
        raise UnsupportedError(
            f"pipeline: the value of {producer} goes from stage {stage} to stage {destination}, but values travel "
            f"between neighbours in the ring of {stages} stages; put the parts {producer.part} and "
            f"{producer.part + (1 if producer.kind == FORWARD else -1)} on neighbours."
        )
    # With two stages both ways lead there: each kind takes one, so that a tick can carry both.
    return (1 if producer.kind == FORWARD else -1) == ways[0] if len(ways) == 2 else ways[0] == 1


def _walk(
    schedules: Sequence[Schedule], stage_of: dict[int, int]
) -> tuple[dict[Action, int], dict[Action, int], dict[Action, int]]:
    """The tick of every "F", "I" and "W"; the tick at whose end each value is sent; the tick from which it is there."""
    stages = len(schedules)
    queues = [collections.deque(schedule.actions) for schedule in schedules]
    waiting: dict[tuple[int, bool], collections.deque[Action]] = collections.defaultdict(collections.deque)
    tick_of: dict[Action, int] = {}
    sent: dict[Action, int] = {}
    arrived: dict[Action, int] = {}
    tick = 0
    while any(queues):
        for stage, queue in enumerate(queues):
            computed = False
            while queue:
                action = queue[0]
                if action.kind in COMPUTE:
                    ready = all(
                        need.kind not in COMPUTE or tick_of.get(need, tick) < tick for need in needs(action, stage_of)
                    )
                    if computed or not ready:  # one action a tick
                        break
                    tick_of[action], computed = tick, True
                elif action.kind in (RECV_F, RECV_B):
                    (send,) = needs(action, stage_of)
                    if arrived.get(needs(send, stage_of)[0], tick + 1) > tick:  # not there yet: the stage waits
                        break
                else:
                    (producer,) = needs(action, stage_of)
                    destination = stage_of[producer.part + (1 if action.kind == SEND_F else -1)]
                    # a send does not hold its stage: it waits in its direction's queue
                    waiting[stage, _is_up(producer, stage, destination, stages)].append(producer)
                queue.popleft()
        # One value a tick in each direction: further ones wait for the next tick.
        for values in waiting.values():
            if values:
                producer = values.popleft()
                sent[producer], arrived[producer] = tick, tick + 1
        tick += 1
    return tick_of, sent, arrived


def _colour(lives: list) -> tuple[dict, int]:
    """A slot for every life `(stage, begin, end, name)`, so that two that overlap on a stage have different ones; and
    how many slots a stage needs.
    """
    slots: dict = {}
    most = 0
    free: dict[int, list[int]] = collections.defaultdict(list)
    used: dict[int, int] = collections.defaultdict(int)
    ends: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    for stage, begin, end, name in sorted(lives, key=lambda life: life[1]):
        # Lives in the order of their begin: greedy colouring of intervals needs as few slots as overlap at once.
        while ends[stage] and ends[stage][0][0] < begin:
            heapq.heappush(free[stage], heapq.heappop(ends[stage])[1])
        if free[stage]:
            slot = heapq.heappop(free[stage])  # the lowest: the buffer stays short
        else:
            slot = used[stage]
            used[stage] += 1
        slots[name] = slot
        heapq.heappush(ends[stage], (end, slot))  # by end: the slot that is free first is found first
        most = max(most, used[stage])
    return slots, most
