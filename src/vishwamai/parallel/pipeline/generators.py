"""The published schedules, as lists of actions.

- GPipe: Huang et al., "GPipe" (2018).
- 1F1B: Narayanan et al., "PipeDream" (2019); Fan et al., "DAPPLE" (2020). Interleaved 1F1B: Narayanan et al.,
  "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
- ZB-H1: Qi et al., "Zero Bubble Pipeline Parallelism" (2023). ZB-V: Qi et al., "Pipeline Parallelism with Controllable
  Memory" (2024).
- DualPipe-V: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), cut to a V as in github.com/deepseek-ai/DualPipe.
"""

from __future__ import annotations

from collections.abc import Callable

from vishwamai.core.errors import ScheduleError
from vishwamai.parallel.pipeline.actions import (
    FORWARD,
    INPUT_GRADIENT,
    WEIGHT_GRADIENT,
    Action,
    Schedule,
    with_transfers,
)


class _Stage:
    """Actions of one stage as they are written down; each method runs the next microbatch of the stage's part."""

    def __init__(self, parts: tuple[int, ...], microbatches: int) -> None:
        self.parts, self.microbatches = parts, microbatches
        self.actions: list[Action] = []
        self.counts: dict[tuple[str, int], int] = {}

    def run(self, kind: str, chunk: int = 0) -> None:
        count = self.counts.get((kind, chunk), 0)
        self.counts[kind, chunk] = count + 1
        if count < self.microbatches:  # past the last microbatch there is nothing to do
            self.actions.append(Action(kind, self.parts[chunk], count))

    def forward(self, chunk: int = 0) -> None:
        self.run(FORWARD, chunk)

    def input_gradient(self, chunk: int = 0) -> None:
        self.run(INPUT_GRADIENT, chunk)

    def weight_gradient(self, chunk: int = 0) -> None:
        self.run(WEIGHT_GRADIENT, chunk)

    def backward(self, chunk: int = 0) -> None:
        self.input_gradient(chunk)
        self.weight_gradient(chunk)

    def count(self, kind: str, chunk: int = 0) -> int:
        return self.counts.get((kind, chunk), 0)


def _schedules(
    num_stages: int,
    microbatches: int,
    parts: Callable[[int], tuple[int, ...]],
    write: Callable[[int, _Stage], None],
    after_weights: bool,
) -> list[Schedule]:
    schedules = []
    for rank in range(num_stages):
        stage = _Stage(parts(rank), microbatches)
        write(rank, stage)
        schedules.append(Schedule(rank, stage.parts, tuple(stage.actions)))
    return with_transfers(schedules, after_weights=after_weights)


def gpipe(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """All forward passes, then all backward passes."""

    def write(rank: int, stage: _Stage) -> None:
        for _ in range(num_microbatches):
            stage.forward()
        for _ in range(num_microbatches):
            stage.backward()

    return _schedules(num_stages, num_microbatches, lambda rank: (rank,), write, True)


def one_f_one_b(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """A backward pass as soon as one can run, then forward and backward passes in turns."""

    def write(rank: int, stage: _Stage) -> None:
        # the way to the last stage: its first gradient comes back after as many
        warm_up = min(num_stages - rank - 1, num_microbatches)
        for _ in range(warm_up):
            stage.forward()
        for _ in range(num_microbatches - warm_up):
            stage.forward()
            stage.backward()
        for _ in range(warm_up):
            stage.backward()

    return _schedules(num_stages, num_microbatches, lambda rank: (rank,), write, True)


def interleaved_1f1b(num_stages: int, num_microbatches: int, chunks: int = 2) -> list[Schedule]:
    """1F1B where a stage holds `chunks` parts that are `num_stages` apart.

    Raises:
      ScheduleError: the number of microbatches is not a multiple of `num_stages`.
    """
    if num_microbatches % num_stages:
        raise ScheduleError(
            f"interleaved_1f1b: {num_microbatches} microbatches are not a multiple of {num_stages} stages; pass "
            f"{-(-num_microbatches // num_stages) * num_stages}, or take another schedule."
        )
    total, group = num_microbatches * chunks, num_stages * chunks

    def write(rank: int, stage: _Stage) -> None:
        def forward(step: int) -> None:
            stage.forward(step % group // num_stages)  # `num_stages` microbatches of a chunk, then of the next chunk

        def backward(step: int) -> None:
            stage.backward(chunks - 1 - step % group // num_stages)  # the last chunk's gradients come first

        # Forward passes before the first gradient can arrive: twice the way to the last stage, and all chunks before
        # the last.
        warm_up = min(total, 2 * (num_stages - rank - 1) + (chunks - 1) * num_stages)
        for step in range(warm_up):
            forward(step)
        for step in range(total - warm_up):
            forward(step + warm_up)
            backward(step)
        for step in range(total - warm_up, total):
            backward(step)

    parts = _every(num_stages, chunks)
    return _schedules(num_stages, num_microbatches, parts, write, True)


def zb_h1(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """1F1B whose weight gradients wait for gaps, in the memory of 1F1B's first stage."""

    def write(rank: int, stage: _Stage) -> None:
        warm_up = min(num_stages - rank - 1, num_microbatches)
        for _ in range(warm_up):
            stage.forward()
        for step in range(num_microbatches - warm_up):
            stage.forward()
            stage.input_gradient()
            if step >= rank:  # later stages keep weight gradients for their gaps at the end
                stage.weight_gradient()
        for _ in range(warm_up):
            stage.input_gradient()
            stage.weight_gradient()
        while stage.count(WEIGHT_GRADIENT) < num_microbatches:
            stage.weight_gradient()

    return _schedules(num_stages, num_microbatches, lambda rank: (rank,), write, False)


def zb_v(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """Two parts a stage, placed in a V: the stage with the first part has the last, too. No gaps where "F", "I" and
    "W" take the same time, in the memory of 1F1B.
    """
    filled = max(2 * num_stages - 1, num_microbatches)  # what is beyond `num_microbatches` is left out

    def write(rank: int, stage: _Stage) -> None:
        for _ in range(2 * (num_stages - rank) - 1):  # down the V and up again, until the first gradient can be there
            stage.forward(0)
        for _ in range(rank):
            stage.forward(1)
            stage.forward(0)
        for _ in range(num_stages - rank):
            stage.forward(1)
            stage.backward(1)
        # steady state: both parts in turns
        while stage.count(FORWARD, 1) < stage.count(FORWARD, 0) or stage.count(FORWARD, 0) < filled:
            if stage.count(FORWARD, 0) < filled:
                stage.forward(0)
            stage.backward(0)
            stage.forward(1)
            stage.backward(1)
        for _ in range(rank):
            stage.input_gradient(0)
            stage.input_gradient(1)
        for _ in range(num_stages - rank):
            stage.input_gradient(0)
            stage.weight_gradient(0)
        for chunk in (1, 0):  # weight gradients fill the gap in which the other stages finish
            while stage.count(WEIGHT_GRADIENT, chunk) < stage.count(INPUT_GRADIENT, chunk):
                stage.weight_gradient(chunk)

    return _schedules(num_stages, num_microbatches, _v_shape(num_stages), write, False)


def dualpipe_v(num_stages: int, num_microbatches: int) -> list[Schedule]:
    """Two parts a stage, placed in a V; a forward pass of one stands next to a backward pass of the other, so that the
    transfers of each can hide behind the products of the other.

    Raises:
      ScheduleError: there are fewer than two microbatches for each stage.
    """
    if num_microbatches < 2 * num_stages:
        raise ScheduleError(
            f"dualpipe_v: {num_microbatches} microbatches for {num_stages} stages; pass at least {2 * num_stages}, or "
            'take "zb_v".'
        )

    def write(rank: int, stage: _Stage) -> None:
        waiting: list[int] = []  # chunks whose weight gradient is due

        def backward(chunk: int, split: bool) -> None:
            stage.input_gradient(chunk)
            if split:
                waiting.append(chunk)
            else:
                stage.weight_gradient(chunk)

        def weights() -> None:
            stage.weight_gradient(waiting.pop(0))

        after = num_stages - rank - 1
        for _ in range(2 * after):
            stage.forward(0)
        for _ in range(rank + 1):
            stage.forward(0)
            stage.forward(1)
        for _ in range(after):
            backward(1, True)
            weights()
            stage.forward(1)
        # each forward pass is paired with a backward pass of the other part
        for _ in range(num_microbatches - 2 * num_stages + rank + 1):
            stage.forward(0)
            backward(1, False)
            stage.forward(1)
            backward(0, False)
        for _ in range(after):
            backward(1, False)
            stage.forward(1)
            backward(0, False)
        split = False
        for step in range(rank + 1):
            middle = step == (rank + 1) // 2
            split = split or (middle and rank % 2 == 1)
            backward(1, split)
            split = split or (middle and rank % 2 == 0)
            backward(0, split)
        for _ in range(after):
            weights()
            backward(0, True)
        while waiting:  # what no gap has taken
            weights()

    return _schedules(num_stages, num_microbatches, _v_shape(num_stages), write, True)


def _every(num_stages: int, chunks: int) -> Callable[[int], tuple[int, ...]]:
    return lambda rank: tuple(rank + chunk * num_stages for chunk in range(chunks))


def _v_shape(num_stages: int) -> Callable[[int], tuple[int, ...]]:
    return lambda rank: (rank, 2 * num_stages - 1 - rank)


GENERATORS: dict[str, Callable[..., list[Schedule]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
    "dualpipe_v": dualpipe_v,
}
"""By the name that `PipelineScheduler` takes."""
