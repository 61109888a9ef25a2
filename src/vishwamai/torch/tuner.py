"""`tune`: finds tiles of the Triton kernels by timing them on the GPU at hand, and writes them where later calls find
them.

The hill climb, its steps and the tables are those of `vishwamai.aot.tuning`. Here the whole function is timed with each
config; one whose results differ from the heuristic's, or that the compiler rejects, is out. What was found is written
after each kernel, and a kernel that the table has already for the same versions is passed over, so an interrupted run
goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import jax
import torch
from torch import Tensor

import vishwamai
from vishwamai.core import observe, tuning
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.measure.gpu_timing import gpu_sampler
from vishwamai.torch.arguments import checks_its_own

__all__ = ["Timer", "Tuned", "gpu_timer", "tune"]

MARGIN = 0.98
"""A config has to take less than this share of the best one's time to replace it: less is within the noise."""

Passes = Literal["forward", "backward", "both"]
Timer = Callable[[Callable[[], object]], float]
"""`timer(run) -> seconds` of one call."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a search found for one kernel.

    Attributes:
      op, implementation, key: place in the table; `architecture`: the table's name.
      config: the best config.
      seconds, heuristic_seconds: time of the function with it, and with the search's first config, the heuristic's
        unless a pass was tuned before.
      trials: how many configs were timed; 0 if the table had it already.
      rejected: configs that were not timed, with the reasons.
      path: the table.
    """

    op: str
    implementation: str
    key: str
    architecture: str
    config: Any
    seconds: float
    heuristic_seconds: float
    trials: int
    rejected: tuple[str, ...]
    path: Path


def gpu_timer(rounds: int = 20) -> Timer:
    """A timer by CUDA events: the median of `rounds` calls, each after a write that empties the L2 cache."""
    sample = gpu_sampler()

    def seconds(run: Callable[[], object]) -> float:
        for _ in range(3):
            run()
        return statistics.median(sample(run, 1) for _ in range(rounds))

    return seconds


def _versions() -> dict[str, str]:
    return {
        "vishwamai": vishwamai.__version__,
        **{name: importlib.metadata.version(name) for name in ("torch", "triton")},
    }


def _tensors(results: object) -> list[Tensor]:
    return [x.detach().clone() for x in jax.tree.leaves(results) if isinstance(x, Tensor)]


def _differ(results: list[Tensor], expected: list[Tensor]) -> str | None:
    """How far results are from the heuristic's, if that is more than another order of sums explains."""
    for got, want in zip(results, expected, strict=True):
        if not want.is_floating_point():
            if not torch.equal(got, want):
                return "integers differ"
            continue
        allowed = 4 * torch.finfo(want.dtype).eps * float(want.double().norm())
        error = float((got.double() - want.double()).norm())
        if not error <= allowed:
            return f"results differ by {error:.1e}, allowed {allowed:.1e}"
    return None


class _Trial(NamedTuple):
    config: Any
    seconds: float


class _Search:
    """The search for one kernel in a function."""

    def __init__(self, kernel: tuple[str, str, str], run: Callable[[], object], timer: Timer, budget: int):
        self.kernel, self.run, self.timer, self.budget = kernel, run, timer, max(1, budget)
        self.rejected: list[str] = []
        self.trials = 0
        self.expected: list[Tensor] | None = None

    def evaluate(self, configs: Iterable[Any]) -> list[_Trial]:
        """The trials of those configs that run and give the right results; the others are noted in `rejected`."""
        trials = []
        for config in configs:
            if self.trials == self.budget:
                break
            with tuning.trial(*self.kernel, config):
                reason = self._wrong(config)
                if reason is None:
                    self.trials += 1
                    trials.append(_Trial(config, self.timer(self.run)))
                else:
                    self.rejected.append(f"{config}: {reason}")
        return trials

    def _wrong(self, config: Any) -> str | None:
        """Why the function does not run with a config, or how far its results are from those of the first one."""
        from triton.errors import TritonError

        try:
            results = _tensors(self.run())
        except (TritonError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}"
        if self.expected is None:
            self.expected = results
        if not results:
            raise KernelError(
                "tune: the function returns no tensor by which its configs could be compared; return its results."
            )
        return _differ(results, self.expected)


@checks_its_own("passes")
def tune(
    function: Callable[..., Any],
    *args: Any,
    budget: int = 40,
    passes: Passes = "forward",
    directory: Path | None = None,
    timer: Timer | None = None,
    again: bool = False,
) -> list[Tuned]:
    """Tunes every Triton kernel that `function` runs, by timing the function; a slow call, of minutes.

    Args:
      function: calls operations of `vishwamai.torch` on tensors on a GPU, and returns their results, by which a wrong
        config is noticed. One operation is best: the whole function is what is timed.
      *args: its arguments.
      budget: configs to time at most, for each kernel.
      passes: whose tiles are searched: those of the pass that the function runs, or of both where it takes gradients
        too. One pass after the other, each alone in a function, is more exact; what was found for one stays.
      directory: folder of the tables, `<directory>/<architecture>/<op>.json`; default: the user's own
        (`VISHWAMAI_TUNING_DIR`), which calls look into.
      timer: seconds of a call; default `gpu_timer()`.
      again: also what the table has already, found with the same versions of vishwamai, torch and triton.

    Returns:
      What was found for each kernel; later calls of like sizes use it.

    Raises:
      DeviceError: the tensors are not on a GPU, or the tables cannot be written.
      KernelError: the function runs nothing that has tiles, or returns nothing to compare; or `passes` is none of the
        three.
    """
    if not isinstance(passes, str) or passes not in get_args(Passes):
        raise KernelError(f"tune: `passes` is {passes!r}; pass {', '.join(map(repr, get_args(Passes)))}.")
    from vishwamai.aot.tuning import tables, variations
    from vishwamai.aot.tuning.climb import climb

    def run() -> Any:
        return function(*args)

    with observe.recording() as plans:
        run()
    chosen = [(plan.op, plan.spec, plan.choices[0]) for plan in plans]
    if any(choice.platform != "cuda" for _, _, choice in chosen):
        raise DeviceError("tune: the tensors are on the CPU, whose kernels have no tiles to time; move them to a GPU.")
    kernels = {}
    for op, spec, choice in chosen:
        key = tuning.key_of(spec, choice.target.platform)
        if choice.config is not None and key is not None:
            kernels.setdefault((op.name, choice.implementation.name, key), (spec, choice))
    if not kernels:
        raise KernelError("tune: the function runs no kernel that has tiles.")
    timer = gpu_timer() if timer is None else timer
    requested = {"forward", "backward"} if passes == "both" else {passes}
    place = tuning.writable_directory(directory)
    where, results = tuning.table_of(chosen[0][2].target), []
    assert where is not None  # every GPU has an architecture
    with kernel_config(current_config(), auto_optimize=True, block_size=None):
        for kernel, (spec, choice) in kernels.items():
            path = tables.table_path(place, where, kernel[0])
            entry, config, done = tables.read(path).get(kernel[1], {}).get(kernel[2], {}), None, set()
            if entry.get("versions") == _versions():
                config, done = choice.implementation.config_type.from_json(entry["config"]), set(entry["passes"])
            tuned = functools.partial(Tuned, *kernel, where, path=path)
            if requested <= done and not again:
                timing = dict(seconds=entry["us"] * 1e-6, heuristic_seconds=entry["heuristic_us"] * 1e-6)
                results.append(tuned(config=config, **timing, trials=0, rejected=()))
                continue
            search = _Search(kernel, run, timer, budget)
            start = choice.implementation.heuristic(spec, choice.target) if config is None else config
            paths = [path for of, paths in variations.passes(start).items() if of in requested for path in paths]
            outcome = climb(start, search.evaluate, functools.partial(variations.single_changes, paths=paths), MARGIN)
            if outcome is None:
                raise KernelError(
                    f"tune: {kernel[0]} does not run with the heuristic's own config: {search.rejected[-1]}"
                )
            (config, seconds), (_, first) = outcome
            evidence = {
                "config": dataclasses.asdict(config),
                "passes": sorted(requested | done),
                "us": round(seconds * 1e6, 2),
                "heuristic_us": round(first * 1e6, 2),
                "trials": search.trials,
                "versions": _versions(),
            }
            op, implementation, key = kernel
            tables.write(place, where, op, implementation, key, evidence)
            tuning.reload()
            timing = dict(seconds=seconds, heuristic_seconds=first, trials=search.trials)
            results.append(tuned(config=config, **timing, rejected=tuple(search.rejected)))
    return results
