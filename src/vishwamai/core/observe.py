"""Observers: the one way in which operations report what they plan and run.

`watching(observer)` puts an observer in force for a block of code. Its token, an integer, lives in a JAX user context,
which is part of every trace-cache key: a function that was traced before the block is traced again in it, and no cache
keeps an observer alive. Tokens are never used twice; a second block with the token of the first would find the first
one's traces and see no calls.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from vishwamai.core.call_plan import CallPlan


class Observer:
    """Watches the op calls in a block of code.

    Attributes:
      dry_run: the block is traced to learn what would run, so nothing warns of fallbacks.
      intercepts: `run_pass` runs the forward and backward passes in place of `core.execute`.
    """

    dry_run = False
    intercepts = False

    def planned(self, plan: CallPlan) -> None:
        """Called with the `CallPlan` of every op call, in order."""

    def noted(self, text: str) -> None:
        """Called with what an operation says about a call, beside its plans: how it is spread over devices."""

    def run_pass(
        self, plan: CallPlan, direction: str, function: Callable[..., object], arguments: tuple[object, ...]
    ) -> Any:
        """Returns the results of one pass of a plan, "forward", "forward_with_residuals" or "backward"."""
        del plan, direction
        return function(*arguments)

    def run_eager(
        self, plan: CallPlan, direction: str, run: Callable[[], object], arguments: tuple[object, ...]
    ) -> Any:
        """`run_pass` for tensors of torch: `run()` computes the pass anew and returns when its results are there."""
        del plan, direction, arguments
        return run()


class PlanRecorder(Observer):
    """Keeps the plans it is told of, in order."""

    def __init__(self, dry_run: bool = False):
        self.dry_run = dry_run
        self.plans: list[CallPlan] = []
        self.notes: list[str] = []

    def planned(self, plan: CallPlan) -> None:
        self.plans.append(plan)

    def noted(self, text: str) -> None:
        self.notes.append(text)


_WATCHING = jax.make_user_context(default_value=())  # tokens of this thread's observers, outermost first
_LOCK = threading.Lock()
_OBSERVERS: dict[int, Observer] = {}
_EVERY_THREAD: tuple[Observer, ...] = ()
_TOKENS = itertools.count(1)


@contextlib.contextmanager
def watching(observer: Observer, *, every_thread: bool = False) -> Iterator[int]:
    """Puts `observer` in force for the block; yields its token.

    Args:
      every_thread: it is also told of the calls of all other threads, as torch's autograd runs backward passes in
        threads of its own.
    """
    global _EVERY_THREAD
    with _LOCK:
        token = next(_TOKENS)
        _OBSERVERS[token] = observer
        if every_thread:
            _EVERY_THREAD = (*_EVERY_THREAD, observer)
    try:
        if every_thread:
            yield token
        else:
            with _WATCHING((*_WATCHING.value, token)):
                yield token
    finally:
        with _LOCK:
            del _OBSERVERS[token]
            _EVERY_THREAD = tuple(entry for entry in _EVERY_THREAD if entry is not observer)


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Runs the block as if no observer of this thread were in force."""
    with _WATCHING(()):
        yield


def tokens() -> tuple[int, ...]:
    """The tokens of this thread's observers, for `resumed`."""
    return _WATCHING.value


def resumed(tokens: tuple[int, ...]) -> contextlib.AbstractContextManager[object]:
    """Puts the observers of another thread or moment in force, or keeps those that are if there were none."""
    return _WATCHING(tokens) if tokens else contextlib.nullcontext()


def find(token: int) -> Observer | None:
    """The observer of a token; None once its block is over."""
    return _OBSERVERS.get(token)


def _in_force() -> tuple[Observer, ...]:
    tokens = _WATCHING.value
    if not tokens:  # the usual case, at every call of an op
        return _EVERY_THREAD
    return (*(observer for token in tokens if (observer := _OBSERVERS.get(token)) is not None), *_EVERY_THREAD)


def report(plan: CallPlan) -> None:
    """Tells every observer of the plan of an op call."""
    for observer in _in_force():
        observer.planned(plan)


def note(text: str) -> None:
    """Tells every observer a sentence about an op call."""
    for observer in _in_force():
        observer.noted(text)


def dry_run() -> bool:
    """Whether the program is only traced to learn what would run."""
    observers = _in_force()
    return bool(observers) and any(observer.dry_run for observer in observers)


def interceptor() -> Observer | None:
    """The innermost observer that runs the passes itself."""
    observers = _in_force()
    return next((observer for observer in reversed(observers) if observer.intercepts), None) if observers else None


def record_plans(function: Callable[..., object], *args: object, **kwargs: object) -> list[CallPlan]:
    """Traces `function` (nothing runs) and returns the plan of every op call in it, in order."""
    return record(function, *args, **kwargs).plans


def record(function: Callable[..., object], *args: object, **kwargs: object) -> PlanRecorder:
    """As `record_plans`, with what the operations noted."""
    recorder = PlanRecorder(dry_run=True)
    with watching(recorder):
        # A fresh wrapper: `eval_shape` caches by function identity.
        jax.eval_shape(lambda *a, **k: function(*a, **k), *args, **kwargs)
    return recorder


@contextlib.contextmanager
def recording() -> Iterator[list[CallPlan]]:
    """Yields the list of the plans of every op call that runs in the block, in order, those of torch's autograd threads
    included.
    """
    recorder = PlanRecorder()
    with watching(recorder, every_thread=True):
        yield recorder.plans
