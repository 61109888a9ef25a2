"""Whether a schedule can run: every action is there once, nothing waits for itself, and memory is enough."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ScheduleError
from vishwamai.parallel.pipeline.actions import (
    COMPUTE,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    needs,
    placement,
)


@checks_its_own("schedules")
def check_schedules(schedules: Sequence[Schedule], max_activations: float | None = None) -> None:
    """Checks that schedules can run together; returns nothing where they can.

    Args:
      schedules: one for each stage, with sends and receives (`with_transfers` adds them).
      max_activations: how much a stage may hold, in activations of one microbatch through all parts of a stage; None
        for any number. They are held from the forward pass to the end of the weight gradient.

    Raises:
      ScheduleError: an action is missing, there twice, or on a stage that does not hold its part; actions wait for one
        another in a circle, which the text gives; or a stage holds more than `max_activations`.

    >>> ours = [
    ...     Schedule.parse(0, [0], "0F0 0RECV_B0 0I0 0SEND_F0 0W0"),
    ...     Schedule.parse(1, [1], "1RECV_F0 1F0 1I0 1SEND_B0 1W0"),
    ... ]
    >>> try: check_schedules(ours)
    ... except ScheduleError as error: print(error)
    schedules: these actions wait for one another in a circle, and none can run: 0RECV_B0 (stage 0) waits for 1SEND_B0
    (stage 1), which waits for 1I0 (stage 1), which waits for 1F0 (stage 1), which waits for 1RECV_F0 (stage 1), which
    waits for 0SEND_F0 (stage 0), which waits for 0I0 (stage 0), which waits for 0RECV_B0 (stage 0).
    """
    stage_of = placement(schedules)
    _check_complete(schedules, stage_of)
    _check_order(schedules, stage_of)
    if max_activations is None:
        return
    for schedule in schedules:
        for action, activations in held_activations(schedule):
            if activations > max_activations:
                raise ScheduleError(
                    f"schedules: stage {schedule.stage} holds {activations:g} activations after {action}, but "
                    f"`max_activations` is {max_activations:g}; let a weight gradient run before that action."
                )


def held_activations(schedule: Schedule) -> Iterator[tuple[Action, float]]:
    """How much a stage holds while each "F" or "W" runs, in activations of one microbatch through all of its parts."""
    activations = 0
    for action in schedule.actions:
        activations += action.kind == FORWARD  # before the yield: the residuals are there while "F" runs
        if action.kind in (FORWARD, WEIGHT_GRADIENT):
            yield action, activations / len(schedule.parts)
        activations -= action.kind == WEIGHT_GRADIENT  # after it: "W" reads them to its end


def num_microbatches(schedules: Sequence[Schedule]) -> int:
    """How many microbatches the schedules name."""
    return 1 + max((action.microbatch for schedule in schedules for action in schedule.actions), default=-1)


def _expected(stage_of: dict[int, int], microbatches: int) -> dict[Action, int]:
    """Every action that a complete schedule has, with its stage."""
    expected = {}
    for part, stage in stage_of.items():
        kinds = [
            *COMPUTE,
            *((SEND_F, RECV_B) if stage_of.get(part + 1, stage) != stage else ()),
            *((SEND_B, RECV_F) if stage_of.get(part - 1, stage) != stage else ()),
        ]
        expected.update({Action(kind, part, m): stage for kind in kinds for m in range(microbatches)})
    return expected


def _check_complete(schedules: Sequence[Schedule], stage_of: dict[int, int]) -> None:
    if not any(schedule.actions for schedule in schedules):
        raise ScheduleError("schedules: there are no actions; give every stage those of one microbatch or more.")
    expected = _expected(stage_of, num_microbatches(schedules))
    for schedule in schedules:
        counts = collections.Counter(schedule.actions)
        for action, count in counts.items():
            if action not in expected:
                why = (
                    f"there is no part {action.part}"
                    if action.part not in stage_of
                    else "no other stage needs this transfer"
                )
                raise ScheduleError(f"schedules: stage {schedule.stage} has {action}, but {why}; leave it out.")
            if expected[action] != schedule.stage:
                raise ScheduleError(
                    f"schedules: stage {schedule.stage} has {action}, but part {action.part} is on stage "
                    f"{expected[action]}; move it there."
                )
            if count > 1:
                raise ScheduleError(f"schedules: stage {schedule.stage} has {action} {count} times; keep one.")
        missing = [str(a) for a, stage in expected.items() if stage == schedule.stage and a not in counts]
        if missing:
            transfers = all("_" in text for text in missing)
            fix = "`with_transfers(schedules)` adds sends and receives." if transfers else "Add them."
            listing = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            raise ScheduleError(f"schedules: stage {schedule.stage} lacks {listing}. {fix}")


def _check_order(schedules: Sequence[Schedule], stage_of: dict[int, int]) -> None:
    left = {schedule.stage: collections.deque(schedule.actions) for schedule in schedules}
    done: set[Action] = set()
    progress = True
    while progress:  # rounds over the stages until none moves: what is left waits for itself
        progress = False
        for queue in left.values():
            while queue and all(need in done for need in needs(queue[0], stage_of)):
                done.add(queue.popleft())
                progress = True
    if any(left.values()):
        circle = _circle({stage: list(queue) for stage, queue in left.items()}, stage_of)
        words = [f"{action} (stage {stage_of[action.part]})" for action in circle]
        raise ScheduleError(
            "schedules: these actions wait for one another in a circle, and none can run: "
            f"{words[0]} waits for {', which waits for '.join([*words[1:], words[0]])}."
        )


def _circle(left: dict[int, list[Action]], stage_of: dict[int, int]) -> list[Action]:
    """A circle among actions that cannot run: from a stage's next action to what it lacks, and from there to the next
    action of that stage, until one comes back.
    """
    place = {action: (stage, i) for stage, actions in left.items() for i, action in enumerate(actions)}
    walk: list[Action] = []
    current = next(actions[0] for actions in left.values() if actions)
    while current not in walk:
        walk.append(current)
        stage, i = place[current]
        # An action waits for what it reads, or else for the action before it.
        lacking = next((need for need in needs(current, stage_of) if need in place), None)
        current = lacking if lacking is not None else left[stage][i - 1]
    return walk[walk.index(current) :]
