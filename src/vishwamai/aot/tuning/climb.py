"""The hill climb of both tuners: of TPUs by the compiler's schedule, of GPUs by the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

__all__ = ["Trial", "climb"]


class Trial(Protocol):
    """What is known of a config that ran."""

    @property
    def config(self) -> Any: ...
    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Trial)


def climb(
    start: Any,
    evaluate: Callable[[Sequence[Any]], Sequence[T]],
    neighbours: Callable[[Any], Iterable[Any]],
    margin: float,
    enough: Callable[[T], bool] = lambda trial: False,
) -> tuple[T, T] | None:
    """From `start` to the fastest of its neighbours, and on from there, until none is faster.

    Args:
        start: the first config.
        evaluate: the trials of those configs that are legal, run, and are within the budget.
        neighbours: the configs a step away from one.
        margin: a config has to take less than this share of the best one's time to replace it.
        enough: predicate of a trial that ends the search.

    Returns:
        (the best trial, the trial of `start`), or None where `start` itself has none.

    Example:
        >>> import types
        >>> def evaluate(configs):
        ...     return [types.SimpleNamespace(config=n, seconds=abs(n - 5)) for n in configs]
        >>> best, first = climb(1, evaluate, lambda n: (n - 1, n + 1), 0.99)
        >>> best.config, first.seconds
        (5, 4)
    """
    tried = evaluate([start])
    if not tried:
        return None
    best = first = tried[0]
    seen = {start}
    while not enough(best):
        fresh = [config for config in neighbours(best.config) if config not in seen]
        seen.update(fresh)
        fastest = min(evaluate(fresh), key=lambda trial: trial.seconds, default=best)
        if fastest.seconds >= margin * best.seconds:
            break
        best = fastest
    return best, first
