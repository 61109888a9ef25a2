"""`tune`: finds tiles of the Triton kernels by timing them on the GPU at hand, and writes them where later calls find them.

A hill climb from the heuristic's tiles: each of a config's sizes doubled and halved, the whole function timed with every one of them, the fastest taken,
until nothing is faster or the budget of trials is spent. A config whose results differ from the heuristic's, or that the compiler refuses, is out. What
was found is written after each kernel, with the evidence, and a kernel that the table has already for the same versions is passed over, so an
interrupted run goes on where it was. Nothing here runs unless it is called.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vishwamai.core import triton_call, tuning
from vishwamai.core.config import current_config, kernel_config
from vishwamai.core.errors import DeviceError, KernelError
from vishwamai.torch import bridge

__all__ = ["Timer", "Tuned", "gpu_timer", "tune"]

MARGIN = 0.98
"""A config has to take less than this share of the best one's time to replace it: less is within the noise."""
_BACKWARD = "backward_"
_LIMITS = {"warps": (1, 16), "stages": (1, 6), "splits": (1, 64)}
"""By the last word of a field's name."""

Passes = Literal["forward", "backward", "both"]
Timer = Callable[[Callable[[], Any]], float]
"""`timer(run) -> seconds` of one call."""


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What a search found for one kernel.

    Attributes:
      op, implementation, key: where the table keeps it; `architecture`: which table.
      config: the best config.
      seconds, heuristic_seconds: of the whole function with it, and with what the search began from, the heuristic's unless a pass was tuned before.
      trials: how many configs were timed; 0 if the table had it already.
      refused: configs that were not timed, with the reasons.
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
    refused: tuple[str, ...]
    path: Path


def gpu_timer(rounds: int = 20) -> Timer:
    """A timer by CUDA events: the median of `rounds` calls, each after a write that empties the L2 cache."""
    flush = torch.empty(256 << 20, dtype=torch.int8, device="cuda")

    def seconds(run: Callable[[], Any]) -> float:
        for _ in range(3):
            run()
        times = []
        for _ in range(rounds):
            flush.zero_()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e-3)
        return statistics.median(times)

    return seconds


def neighbours(config: Any, passes: Passes) -> Iterator[Any]:
    """Configs that differ in one size of the passes named: doubled or halved; stages by one.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Tiles:
    ...     rows: int
    ...     warps: int
    ...     stages: int
    ...     backward_rows: int = 16
    ...     deterministic: bool = True
    >>> [dataclasses.astuple(t)[:3] for t in neighbours(Tiles(1, 16, 2), "forward")]
    [(2, 16, 2), (1, 8, 2), (1, 16, 3), (1, 16, 1)]
    """
    for field in dataclasses.fields(config):
        now = getattr(config, field.name)
        belongs = "backward" if field.name.startswith(_BACKWARD) else "forward"
        if not isinstance(now, int) or isinstance(now, bool) or passes not in (belongs, "both"):
            continue
        word = field.name.rpartition("_")[2]
        least, most = _LIMITS.get(word, (1, 1 << 20))
        for size in (now + 1, now - 1) if word == "stages" else (now * 2, now // 2):
            if least <= size <= most:
                yield dataclasses.replace(config, **{field.name: size})


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("vishwamai", "torch", "triton")}


def _tensors(results: Any) -> list[Tensor]:
    if isinstance(results, Tensor):
        return [results.detach().clone()]
    if isinstance(results, dict):
        results = list(results.values())
    return [x for part in results for x in _tensors(part)] if isinstance(results, (tuple, list)) else []


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


class _Search:
    """The search for one kernel in a function."""

    def __init__(self, kernel: tuple[str, str, str], run: Callable[[], Any], timer: Timer, passes: Passes):
        self.kernel, self.run, self.timer = kernel, run, timer
        self.passes: Passes = passes
        self.refused: list[str] = []
        self.trials = 0
        self.expected: list[Tensor] | None = None

    def time(self, config: Any) -> float | None:
        """Seconds of the function with `config`, or None, and why not is in `refused`."""
        from triton.errors import TritonError

        with tuning.trial(*self.kernel, config):
            try:
                results = _tensors(self.run())
            except (TritonError, torch.OutOfMemoryError) as error:
                self.refused.append(f"{config}: {type(error).__name__}: {str(error).strip().splitlines()[-1][:200]}")
                return None
            if self.expected is None:
                self.expected = results
                if not results:
                    raise KernelError(
                        "tune: the function returns no tensor by which its configs could be compared; return its results."
                    )
            reason = _differ(results, self.expected)
            if reason is not None:
                self.refused.append(f"{config}: {reason}")
                return None
            self.trials += 1
            return self.timer(self.run)

    def climb(self, start: Any, budget: int) -> tuple[Any, float, float]:
        """(the best config, its seconds, those of `start`)."""
        first = self.time(start)
        if first is None:
            raise KernelError(
                f"tune: {self.kernel[0]} does not run with the heuristic's own config: {self.refused[-1]}"
            )
        best, fastest, seen = start, first, {start}
        while self.trials < budget:
            fresh = [c for c in neighbours(best, self.passes) if c not in seen][: budget - self.trials]
            seen.update(fresh)
            timed = [(seconds, i) for i, c in enumerate(fresh) if (seconds := self.time(c)) is not None]
            if not timed or min(timed)[0] >= MARGIN * fastest:
                break
            fastest, best = min(timed)[0], fresh[min(timed)[1]]
        return best, fastest, first


def _table(path: Path) -> dict[str, dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, found: Tuned, passes: list[str]) -> None:
    entry = {
        "config": dataclasses.asdict(found.config),
        "passes": passes,
        "us": round(found.seconds * 1e6, 2),
        "heuristic_us": round(found.heuristic_seconds * 1e6, 2),
        "trials": found.trials,
        "versions": _versions(),
    }
    table = _table(path)
    table.setdefault(found.implementation, {})[found.key] = entry
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".fresh")
    fresh.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    fresh.replace(path)
    tuning.reload()


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
      function: calls operations of `vishwamai.torch` on tensors on a GPU, and returns their results, by which a wrong config is noticed. One operation
        is best: the whole function is what is timed.
      *args: what it is called with.
      budget: configs to time at most, for each kernel.
      passes: whose tiles are searched: those of the pass that the function runs, or of both where it takes gradients too. One pass after the other, each
        alone in a function, is more exact; what was found for one stays.
      directory: where the tables go, `<directory>/<architecture>/<op>.json`; default: the user's own (`VISHWAMAI_TUNING_DIR`), which calls look into.
      timer: seconds of a call; default `gpu_timer()`.
      again: also what the table has already, found with the same versions of vishwamai, torch and triton.

    Returns:
      What was found for each kernel; later calls of like sizes use it.

    Raises:
      DeviceError: the tensors are not on a GPU.
      KernelError: the function runs nothing that has tiles, or returns nothing to compare.
    """

    def run() -> Any:
        return function(*args)

    with bridge.recording() as chosen:
        run()
    if any(choice.platform != "cuda" for _, _, choice in chosen):
        raise DeviceError("tune: the tensors are on the CPU, whose kernels have no tiles to time; move them to a GPU.")
    kernels = {}
    for op, spec, choice in chosen:
        key = tuning.key_of(spec, gpu=True)
        if choice.config is not None and key is not None:
            kernels.setdefault((op.name, choice.implementation.name, key), (spec, choice))
    if not kernels:
        raise KernelError("tune: the function runs no kernel that has tiles.")
    timer = gpu_timer() if timer is None else timer
    wanted = {"forward", "backward"} if passes == "both" else {passes}
    where, results = _architecture(), []
    with kernel_config(current_config(), auto_optimize=True, block_size=None):
        for kernel, (spec, choice) in kernels.items():
            path = (directory or tuning.user_directory()) / where / f"{kernel[0]}.json"
            entry, config, done = _table(path).get(kernel[1], {}).get(kernel[2], {}), None, set()
            if entry.get("versions") == _versions():
                config, done = choice.implementation.config_type(**entry["config"]), set(entry["passes"])
            tuned = functools.partial(Tuned, *kernel, where, path=path)
            if wanted <= done and not again:
                known = dict(seconds=entry["us"] * 1e-6, heuristic_seconds=entry["heuristic_us"] * 1e-6)
                results.append(tuned(config=config, **known, trials=0, refused=()))
                continue
            search = _Search(kernel, run, timer, passes)
            start = choice.implementation.heuristic(spec, None) if config is None else config
            config, fastest, first = search.climb(start, budget)
            found = tuned(
                config=config,
                seconds=fastest,
                heuristic_seconds=first,
                trials=search.trials,
                refused=tuple(search.refused),
            )
            _write(path, found, sorted(wanted | done))
            results.append(found)
    return results


def _architecture() -> str:
    """Of the current GPU; without one, as in the interpreter, what kernels are compiled for."""
    if torch.cuda.is_available():
        return bridge.architecture_of(torch.empty(0, device="cuda")) or ""
    return f"sm_{triton_call.architecture()}"
