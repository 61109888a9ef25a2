"""What a schedule costs: a clock for every stage, and how many activations each holds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from vishwamai.core.arguments import checks_its_own
from vishwamai.core.errors import ScheduleError
from vishwamai.parallel.pipeline import timeline
from vishwamai.parallel.pipeline.actions import COMPUTE, RECV_B, RECV_F, Action, Schedule, needs, placement
from vishwamai.parallel.pipeline.check import check_schedules, held_activations


@dataclasses.dataclass(frozen=True)
class ActionTimes:
    """Times of one part, in any one unit.

    Attributes:
      forward: seconds of "F". input_gradient: seconds of "I". weight_gradient: seconds of "W".
      transfer: seconds from a send to the arrival of the value. The stage computes meanwhile.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    transfer: float = 0.0

    def __call__(self, action: Action) -> float:
        times = {"F": self.forward, "I": self.input_gradient, "W": self.weight_gradient}
        return times.get(action.kind, self.transfer)


@dataclasses.dataclass(frozen=True)
class Span:
    """When an action ran."""

    action: Action
    begin: float
    end: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What `simulate` gives.

    Attributes:
      spans: "F", "I" and "W" of every stage, in order.
      peak_activations: largest number that every stage holds, in activations of one microbatch through all parts of a
        stage. They are held from the forward pass to the end of the weight gradient.
    """

    spans: tuple[tuple[Span, ...], ...]
    peak_activations: tuple[float, ...]

    @property
    def duration(self) -> float:
        """From the first action to the end of the last, in the unit of the times."""
        return max(span.end for stage in self.spans for span in stage)

    @property
    def bubble_share(self) -> float:
        """The share of all stages' time in which nothing is computed."""
        busy = sum(span.end - span.begin for stage in self.spans for span in stage)
        return 1 - busy / (len(self.spans) * self.duration)

    def html(self) -> str:
        """A page that draws the timeline: one row for each stage, one box for each action."""
        return timeline.page(self)


@checks_its_own("schedules")
def simulate(schedules: Sequence[Schedule], times: Callable[[Action], float] | None = None) -> Timeline:
    """Runs schedules on a clock: an action starts when its stage is free and what it reads has arrived.

    Args:
      schedules: one for each stage; they are checked first.
      times: the time of each action: `ActionTimes`, or a function of the action. The time of a send lasts until the
        value has arrived; a receive has none. None for a time of 1 for "F", "I" and "W" and 0 for transfers.

    Raises:
      ScheduleError: the schedules cannot run, or a time is negative or not a number.

    >>> from vishwamai.parallel import PipelineScheduler
    >>> ran = simulate(PipelineScheduler("zb_v").schedule_microbatches(8, 16))
    >>> round(ran.bubble_share, 3), max(ran.peak_activations)
    (0.068, 8.0)
    """
    check_schedules(schedules)
    times = times or ActionTimes()
    stage_of = placement(schedules)
    queues = [collections.deque(schedule.actions) for schedule in schedules]
    clocks = [0.0] * len(schedules)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in schedules]
    # Stages in turns, each as far as its needs are met; the checked schedules have no deadlock.
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue and all(need in ends for need in needs(queue[0], stage_of)):
                action = queue.popleft()
                if action.kind in (RECV_F, RECV_B):
                    # a receive waits for its send
                    ends[action] = clocks[stage] = max(clocks[stage], ends[needs(action, stage_of)[0]])
                    continue
                length = times(action)
                if not isinstance(length, (int, float)) or not 0 <= length < float("inf"):
                    raise ScheduleError(f"simulate: `times` gives {length!r} for {action}; give a time from 0.")
                # a send does not hold the stage
                ends[action] = clocks[stage] + length
                if action.kind in COMPUTE:
                    spans[stage].append(Span(action, clocks[stage], ends[action]))
                    clocks[stage] = ends[action]
    peaks = tuple(
        max((activations for _, activations in held_activations(schedule)), default=0.0) for schedule in schedules
    )
    return Timeline(tuple(map(tuple, spans)), peaks)
