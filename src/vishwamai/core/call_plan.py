"""What is decided about one call of an op: its spec, and for every platform the implementation that runs, with its
config.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from vishwamai.core.target import Target
from vishwamai.core.types import PyTree


class Spec(Protocol):
    """*What* is computed: shapes, dtypes and options; frozen, hashable, and free of any framework."""

    @property
    def operands(self) -> PyTree:
        """The `ArraySpec` of each operand, in a named tuple."""
        ...

    def localize(self, operands: PyTree) -> PyTree:
        """The same computation for operands of other sizes (a shard, or a folded vmap axis)."""
        ...

    def dims(self, kind: type) -> PyTree:
        """The dims of every field of a named-tuple type of the op."""
        ...


S = TypeVar("S", bound=Spec)

FORWARD = ("spec", "config", "operands", "residuals")
"""The arguments of a forward pass; `residuals` says whether the caller wants them."""

BACKWARD = ("spec", "config", "operands", "outputs", "residuals", "cotangents")
"""The arguments of a backward pass."""


def with_arguments(function: Callable[..., object], names: tuple[str, ...]) -> Callable[..., Any]:
    """A function that is called with the arguments `names`, in their order, and hands `function` those that it names.

    >>> with_arguments(lambda operands, spec: (operands, spec), FORWARD)("a spec", None, "operands", False)
    ('operands', 'a spec')
    """
    parameters = tuple(inspect.signature(function).parameters)
    if parameters == names or not set(parameters) <= set(names):
        return function
    places = tuple(names.index(name) for name in parameters)

    def call(*arguments: PyTree) -> PyTree:
        return function(*(arguments[place] for place in places))

    call.__name__ = getattr(function, "__name__", "call")
    return call


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation(Generic[S]):
    """One way to compute an op.

    Attributes:
      name: "pallas_tpu", "xla", "native_cpu" ...
      platform: the platform it is written for, or None for all of them.
      forward: `(*FORWARD) -> (outputs, residuals or None)`; a function that needs fewer of them names only those.
      backward: `(*BACKWARD) -> gradients`, a tuple of the operands' type; it, too, names only what it needs.
      why_not: `(spec, target) -> None` if it can serve the spec, else the reason in words.
      heuristic: `(spec, target) -> Config`, or None if there is nothing to configure.
      config_type: class of its configs.
      notes: `(spec, target) -> sentences` that `explain` adds about a served spec (an upcast, a padded dimension).
      autodiff: JAX can differentiate `forward` itself, to any order and in forward mode, when the implementation is
        asked for by name.
      why_not_default: `(spec, target) -> the reason` why it leaves a call that it can serve to the implementations
        after it, unless it is asked for by name; None if it does not.
    """

    name: str
    platform: str | None
    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., Any]
    why_not: Callable[[S, Target], str | None] = lambda spec, target: None
    heuristic: Callable[[S, Target], Any] | None = None
    config_type: type | None = None
    notes: Callable[[S, Target], Iterable[str]] = lambda spec, target: ()
    autodiff: bool = False
    why_not_default: Callable[[S, Target], str | None] = lambda spec, target: None
    names: ClassVar[dict[str, None]] = {}
    """The names that implementations have, in the order of their first use; a misspelled name is told by them."""

    def __post_init__(self) -> None:
        self.names[self.name] = None
        object.__setattr__(self, "forward", with_arguments(self.forward, FORWARD))
        object.__setattr__(self, "backward", with_arguments(self.backward, BACKWARD))

    def is_for(self, target: Target) -> bool:
        """Whether it is written for the arrays of a target. What serves any platform is JAX code, which tensors on a
        GPU never pass through.
        """
        if self.platform is None:
            return target.framework == "jax" or target.platform == "cpu"
        return self.platform == target.platform


@dataclasses.dataclass(frozen=True)
class Choice:
    """The implementation that runs on one platform, with its config, and those that declined before it with their
    reasons.
    """

    platform: str | None
    implementation: Implementation
    config: Any
    target: Target = dataclasses.field(compare=False)  # what it was chosen for
    declined: tuple[tuple[str, str], ...] = ()


class Planner(Protocol):
    """An `Op`, as far as whoever runs or reports a plan needs it."""

    name: str
    implementations: tuple[Implementation[Any], ...]

    def plan(self, spec: Any, *, config: object = None, implementation: str | None = None) -> CallPlan:
        """Chooses an implementation for every platform."""
        ...

    def fallbacks(self, choice: Choice) -> list[str]:
        """What is said of the kernels that are written for the choice's platform and declined."""
        ...

    def axes(self, spec: Any, arguments: tuple[PyTree, ...], results: PyTree) -> Any:
        """The factor rule of one pass."""
        ...

    def shareable(self, spec: Any) -> Any:
        """Names of the operands whose leading axis may be 1 while the batch is larger."""
        ...


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """Everything static about one call of an op."""

    op: Planner
    spec: Any
    choices: tuple[Choice, ...]  # the last one has platform None and serves every platform that is not named before it
    # What the caller asked for, kept so that a folded or sharded call chooses again with the same requests.
    config: Any = None
    implementation: str | None = None

    def choice(self, platform: str) -> Choice:
        """What runs on `platform`."""
        return next((choice for choice in self.choices if choice.platform == platform), self.choices[-1])
