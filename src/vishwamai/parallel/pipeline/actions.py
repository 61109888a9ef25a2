"""A pipeline schedule as data: for every stage the list of its actions, in the order in which it runs them.

The model is cut into parts, numbered in the order of the forward pass. A stage is a device (or a group of devices) and
holds one part or several. The batch is cut into microbatches. The backward pass of a part has two actions, since only
the input gradient is needed by the part before it: Qi et al., "Zero Bubble Pipeline Parallelism" (2023).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from vishwamai.core.arguments import checked, checks_its_own
from vishwamai.core.errors import ScheduleError

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "F", "I", "W"
SEND_F, RECV_F, SEND_B, RECV_B = "SEND_F", "RECV_F", "SEND_B", "RECV_B"
COMPUTE = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
KINDS = (*COMPUTE, SEND_F, RECV_F, SEND_B, RECV_B)

_WRITTEN = re.compile(rf"(\d+)({'|'.join(sorted(KINDS, key=len, reverse=True))})(\d+)")


@dataclasses.dataclass(frozen=True)
class Action:
    """One step of a stage; written as PyTorch writes it, "2F0" is the forward pass of microbatch 0 through part 2.

    Attributes:
      kind: "F" forward, "I" input gradient, "W" weight gradient; "SEND_F" sends the part's output to the next part and
        "RECV_F" receives the part's input; "SEND_B" sends the gradient of the part's input to the part before and
        "RECV_B" receives the gradient of the part's output.
      part: number of the model's part, from 0.
      microbatch: number, from 0.

    >>> print(Action("SEND_F", 2, 0))
    2SEND_F0
    """

    kind: str
    part: int
    microbatch: int

    def __post_init__(self) -> None:
        numbers = all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (self.part, self.microbatch))
        if not isinstance(self.kind, str) or self.kind not in KINDS or not numbers:
            raise ScheduleError(
                f"Action: kind {self.kind!r}, part {self.part!r}, microbatch {self.microbatch!r}; pass one of "
                f"{', '.join(KINDS)} and two numbers from 0."
            )

    def __str__(self) -> str:
        return f"{self.part}{self.kind}{self.microbatch}"


@checked
@dataclasses.dataclass(frozen=True)
class Schedule:
    """What one stage runs.

    Attributes:
      stage: its number, from 0.
      parts: the parts of the model that it holds.
      actions: sequence in order. A send does not wait for its receiver; a receive waits until the value has arrived.

    >>> print(Schedule.parse(0, [0], "0F0 0SEND_F0 0RECV_B0 0I0 0W0"))
    stage 0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0
    >>> Schedule(0, (0,), (Action("F", 0, 0),)) == Schedule.parse(0, [0], "0F0")
    True
    """

    stage: int
    parts: tuple[int, ...]
    actions: tuple[Action, ...]

    @classmethod
    def parse(cls, stage: int, parts: Sequence[int], text: str) -> Schedule:
        """Reads actions as they are written, separated by spaces.

        Raises:
          ScheduleError: a word is not an action.
        """
        actions = []
        for word in text.split():
            match = _WRITTEN.fullmatch(word)
            if match is None:
                raise ScheduleError(
                    f'Schedule.parse: {word!r} is not an action; write part, kind and microbatch, "2F0", with one of '
                    f"the kinds {', '.join(KINDS)}."
                )
            actions.append(Action(match[2], int(match[1]), int(match[3])))
        return cls(stage, tuple(parts), tuple(actions))

    def __str__(self) -> str:
        return f"stage {self.stage}: {' '.join(map(str, self.actions))}"


def placement(schedules: Sequence[Schedule]) -> dict[int, int]:
    """The stage of every part.

    Raises:
      ScheduleError: stages or parts are not numbered from 0, or a part has two stages.
    """
    several = isinstance(schedules, Sequence) and len(schedules) > 0
    if not several or not all(isinstance(schedule, Schedule) for schedule in schedules):
        raise ScheduleError(f"schedules: pass a list with one `Schedule` for each stage, not {schedules!r}.")
    stages = [schedule.stage for schedule in schedules]
    if stages != list(range(len(schedules))):
        raise ScheduleError(f"schedules: the stages are {stages}; pass one `Schedule` for each stage, 0 first.")
    stage_of: dict[int, int] = {}
    for schedule in schedules:
        for part in schedule.parts:
            if part in stage_of:
                raise ScheduleError(f"schedules: part {part} is on the stages {stage_of[part]} and {schedule.stage}.")
            stage_of[part] = schedule.stage
    missing = sorted(set(range(len(stage_of))) ^ set(stage_of))
    if not stage_of or missing:
        raise ScheduleError(f"schedules: the parts are {sorted(stage_of)}; number them from 0 without a gap.")
    return stage_of


def needs(action: Action, stage_of: Mapping[int, int]) -> list[Action]:
    """The actions whose results an action reads."""
    kind, part, microbatch = action.kind, action.part, action.microbatch
    last = len(stage_of) - 1

    def produced(kind: str, part: int = part) -> Action:
        return Action(kind, part, microbatch)

    def remote(neighbour: int) -> bool:
        return stage_of.get(neighbour) != stage_of.get(part)

    if kind == FORWARD:
        return [] if part == 0 else [produced(RECV_F) if remote(part - 1) else produced(FORWARD, part - 1)]
    if kind == INPUT_GRADIENT:
        # the last part's gradient comes from the loss, on the same stage
        after = [] if part == last else [produced(RECV_B) if remote(part + 1) else produced(INPUT_GRADIENT, part + 1)]
        return [produced(FORWARD), *after]
    if kind == WEIGHT_GRADIENT:
        return [produced(INPUT_GRADIENT)]
    if kind == SEND_F:
        return [produced(FORWARD)]
    if kind == SEND_B:
        return [produced(INPUT_GRADIENT)]
    return [produced(SEND_F, part - 1)] if kind == RECV_F else [produced(SEND_B, part + 1)]


@checks_its_own("schedules")
def with_transfers(schedules: Sequence[Schedule], *, after_weights: bool = False) -> list[Schedule]:
    """Schedules of "F", "I" and "W" with their sends and receives added.

    A value is sent as soon as it is there, and received right before it is read.

    Args:
      schedules: one for each stage, without sends and receives.
      after_weights: a gradient is sent after the weight gradient where that follows at once, as a framework does whose
        backward pass gives both together.

    Raises:
      ScheduleError: as `placement`.

    >>> plain = [Schedule.parse(0, [0], "0F0 0I0 0W0"), Schedule.parse(1, [1], "1F0 1I0 1W0")]
    >>> for one in with_transfers(plain): print(one)
    stage 0: 0F0 0SEND_F0 0RECV_B0 0I0 0W0
    stage 1: 1RECV_F0 1F0 1I0 1SEND_B0 1W0
    """
    stage_of = placement(schedules)
    completed = []
    for schedule in schedules:
        actions: list[Action] = []
        late: Action | None = None  # a send that waits for the weight gradient after it
        for i, action in enumerate(schedule.actions):
            if action.part in stage_of:
                actions += [need for need in needs(action, stage_of) if need.kind in (RECV_F, RECV_B)]
            actions.append(action)
            if late is not None:
                actions.append(late)
                late = None
            neighbour = action.part + {FORWARD: 1, INPUT_GRADIENT: -1}.get(action.kind, 0)
            if stage_of.get(neighbour, schedule.stage) == schedule.stage:
                continue
            send = Action(SEND_F if action.kind == FORWARD else SEND_B, action.part, action.microbatch)
            weights = Action(WEIGHT_GRADIENT, action.part, action.microbatch)
            follows = i + 1 < len(schedule.actions) and schedule.actions[i + 1] == weights
            if after_weights and action.kind == INPUT_GRADIENT and follows:
                late = send
            else:
                actions.append(send)
        completed.append(dataclasses.replace(schedule, actions=tuple(actions)))
    return completed
