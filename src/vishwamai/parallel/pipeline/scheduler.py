"""`PipelineScheduler`: a schedule by its name."""

from __future__ import annotations

import dataclasses

from vishwamai.core.arguments import checked
from vishwamai.core.errors import ScheduleError
from vishwamai.parallel.pipeline.actions import Schedule
from vishwamai.parallel.pipeline.check import check_schedules
from vishwamai.parallel.pipeline.generators import GENERATORS


@checked
@dataclasses.dataclass(frozen=True)
class PipelineScheduler:
    """Which schedule a pipeline runs.

    Attributes:
      kind: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v" or "dualpipe_v".
      microbatch_size: rows of a microbatch.
      chunks: parts of the model on each stage, for "interleaved_1f1b". The V-shaped schedules have 2, the others 1.
      max_activations: bound of a stage's activations, as `check_schedules` counts it; None for any number.

    Raises:
      ScheduleError: the kind is unknown, or a number is not positive.

    >>> for one in PipelineScheduler("1f1b", microbatch_size=4).schedule_microbatches(num_stages=2, batch_size=8):
    ...     print(one)
    stage 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0W0 0RECV_B1 0I1 0W1
    stage 1: 1RECV_F0 1F0 1I0 1W0 1SEND_B0 1RECV_F1 1F1 1I1 1W1 1SEND_B1
    """

    kind: str = "1f1b"
    microbatch_size: int = 1
    chunks: int = 2
    max_activations: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in GENERATORS:
            raise ScheduleError(
                f"PipelineScheduler: there is no kind {self.kind!r}; pass one of {', '.join(GENERATORS)}."
            )
        for name in ("microbatch_size", "chunks"):
            _check_positive("PipelineScheduler", name, getattr(self, name))

    def schedule_microbatches(self, num_stages: int, batch_size: int) -> list[Schedule]:
        """The schedule of every stage.

        Args:
          num_stages: devices, or groups of devices, in a row.
          batch_size: rows of a step, a multiple of `microbatch_size`.

        Raises:
          ScheduleError: a number is not positive, the batch is not a multiple of the microbatch, the kind does not take
            so few microbatches, or a stage would hold more than `max_activations`.
        """
        _check_positive("schedule_microbatches", "num_stages", num_stages)
        _check_positive("schedule_microbatches", "batch_size", batch_size)
        if batch_size % self.microbatch_size:
            raise ScheduleError(
                f"schedule_microbatches: `batch_size` {batch_size} is not a multiple of `microbatch_size` "
                f"{self.microbatch_size}; pass {-(-batch_size // self.microbatch_size) * self.microbatch_size}."
            )
        options = {"chunks": self.chunks} if self.kind == "interleaved_1f1b" else {}
        schedules = GENERATORS[self.kind](num_stages, batch_size // self.microbatch_size, **options)
        check_schedules(schedules, self.max_activations)
        return schedules


def _check_positive(function: str, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ScheduleError(f"{function}: `{name}` is {value!r}; pass a number from 1.")
