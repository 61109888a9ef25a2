"""Out of memory in words: what lies in the memory at a program's peak, and the changes that make it fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from vishwamai.aot.compile.options.config import RuntimeConfig, compiler_options_of
from vishwamai.aot.compile.traced import Program, trace
from vishwamai.core.arguments import checked
from vishwamai.core.errors import VishwamaiError
from vishwamai.core.figures import Estimate
from vishwamai.core.interrupt import raise_interrupt
from vishwamai.core.numbers import human
from vishwamai.core.types import PyTree
from vishwamai.planning.memory.compiler import Compiler, Options
from vishwamai.planning.memory.peak import PeakMemory

if TYPE_CHECKING:
    from vishwamai.training.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Change:
    """One change, and what it does to the memory of a device.

    Attributes:
      words: the change, as a configuration or a call writes it.
      saving: bytes that it is predicted to save.
      cost: seconds that it adds to a step; None where no formula gives them.
      probe: bytes after the change; None where the compiler declines the program, and `declined` says why.
      limit: bytes that the compiler lets one device use.
      config: the changed configuration; None for a function.
      rounds: True where the program's numbers change too.
    """

    words: str
    saving: Estimate
    cost: Estimate | None
    limit: int
    probe: Estimate | None = None
    declined: str = ""
    config: TrainConfig | None = None
    rounds: bool = False

    @property
    def fits(self) -> bool:
        """Whether one device holds the program after the change."""
        return self.probe is not None and self.probe.value <= self.limit

    def __str__(self) -> str:
        cost = "cost in time not known" if self.cost is None else f"costs {self.cost} of a step or more"
        if self.cost is not None and self.cost.value <= 0:
            cost = "costs no time by this bound"
        then = f"declined: {self.declined}" if self.probe is None else str(self.probe)
        fits = "" if self.probe is None else ": fits" if self.fits else ": does not fit"
        words = f"{self.words}, which changes numbers" if self.rounds else self.words
        return f"{words}: saves {human(self.saving.value)} ({self.saving.level}), {cost}; then {then}{fits}"


def ranked(changes: list[Change]) -> tuple[Change, ...]:
    """Those that fit first, the cheapest in time first, and of these the ones that keep the program's numbers; then the
    others by what they need.
    """

    def order(change: Change) -> tuple[float, ...]:
        cost = float("inf") if change.cost is None else change.cost.value
        after = float("inf") if change.probe is None else change.probe.value
        return (0, max(cost, 0.0), change.rounds, after) if change.fits else (1, after, cost)

    return tuple(sorted(changes, key=order))


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Why a program takes the memory that it takes, and what to change. Printing it gives both in words.

    Attributes:
      peak: arrays that are alive at the program's peak.
      changes: each probed; those that fit first, the cheapest in time first. Empty where the program fits.
      hints: changes that only the author of the program can make, which were not probed.
    """

    peak: PeakMemory
    changes: tuple[Change, ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether one device holds the program as it is."""
        return self.peak.total.value <= self.peak.limit

    def __str__(self) -> str:
        lines = [str(self.peak)]
        if not self.fits:
            lines.append("What to change:" if self.changes else "No change that was tried saves memory.")
            lines += [f"  {place}. {change}" for place, change in enumerate(self.changes, 1)]
            lines += [f"  not probed: {hint}" for hint in self.hints]
        return "\n".join(lines)


@checked
def explain_memory(
    fn: Callable[..., object],
    *args: object,
    target: str = "v5e",
    compiler_options: Mapping[str, object] | RuntimeConfig | None = None,
    **kwargs: object,
) -> Diagnosis:
    """What lies in the memory of one device at the peak of `fn(*args, **kwargs)`; if that does not fit, what to change.

    The arrays at the peak come from the compiler's live ranges. Arguments have their paths, other arrays the operation
    and the line that made them. Two changes are probed: the donation of arguments that the function returns updated,
    and float32 arguments in bfloat16, which changes numbers.

    Args: as `probe`.

    Raises:
      VishwamaiError: as `probe`; also KernelError: the installed libtpu writes no live ranges that can be read.

    >>> import jax, jax.numpy as jnp
    >>> w = jax.ShapeDtypeStruct((50_000, 50_000), jnp.float32)
    >>> found = explain_memory(lambda w: w - 0.1 * jnp.tanh(w), w, target="v5e")  # doctest: +SKIP
    >>> found.peak.by_use["arguments"] >> 20, found.changes[0].words  # doctest: +SKIP
    (9539, 'donate [0]')
    """
    options = compiler_options_of("explain_memory", compiler_options)
    program = trace(fn, *args, target=target, **kwargs)
    with Compiler() as compiler:
        return explain_program(compiler, program, fn, args, kwargs, options)


def explain_program(
    compiler: Compiler,
    program: Program,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    options: Options | None = None,
) -> Diagnosis:
    """`explain_memory` of a function that is traced already as `program`, by a compiler that runs."""
    peak = compiler.peak(program, options)
    if peak.total.value <= peak.limit:
        return Diagnosis(peak)
    calls = (_donation(fn, args, kwargs, program), _narrow(args, kwargs))
    changes = [_probed(fn, call, program, peak, compiler, options) for call in calls if call is not None]
    activations = peak.by_use.get("activations", 0)
    hint = (
        "jax.checkpoint around the function whose gradient is taken recomputes up to "
        f"{human(activations)} of activations"
    )
    return Diagnosis(peak, ranked(changes), (hint,) if activations else ())


@dataclasses.dataclass(frozen=True)
class _Call:
    """A changed call: what was changed, the bytes that it is predicted to save, and the call itself."""

    words: str
    saving: float
    wrap: Callable[[Callable[..., PyTree]], Callable[..., PyTree]]
    args: tuple[PyTree, ...]
    kwargs: dict[str, PyTree]
    rounds: bool = False


def _probed(
    fn: Callable[..., object],
    call: _Call,
    program: Program,
    peak: PeakMemory,
    compiler: Compiler,
    options: Options | None,
) -> Change:
    saving = Estimate(call.saving, "analytic")
    try:
        changed = trace(call.wrap(fn), *call.args, target=program.target, **call.kwargs)
        total = compiler.probe(changed, options).total
    except Exception as error:  # the function may not take the changed arguments
        raise_interrupt()
        text = str(error) if isinstance(error, VishwamaiError) else f"{type(error).__name__}: {error}"
        declined = text.splitlines()[0][:200]
        return Change(call.words, saving, None, peak.limit, declined=declined, rounds=call.rounds)
    return Change(call.words, saving, Estimate(0.0, "analytic", "s"), peak.limit, total, rounds=call.rounds)


def _donation(
    fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object], program: Program
) -> _Call | None:
    """The donation of positional arguments whose arrays the function returns with the same shape and dtype."""
    if not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves((args, kwargs))):
        return None  # static values: the caller's own jit says which they are
    out = [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(jax.eval_shape(fn, *args, **kwargs))]
    donated = {aval.path for aval in program.arguments if aval.donated}
    numbers, saving = [], 0
    for number, argument in enumerate(args):
        leaves = jax.tree_util.tree_leaves_with_path(argument)
        paths = {f"[{number}]{jax.tree_util.keystr(path)}" for path, _ in leaves}
        results = [(leaf.shape, str(jnp.dtype(leaf.dtype))) for _, leaf in leaves]
        if not paths or paths & donated or any(out.count(aval) < results.count(aval) for aval in results):
            continue
        for aval in results:
            out.remove(aval)
        numbers.append(number)
        saving += sum(aval.nbytes for aval in program.arguments if aval.path in paths)
    if not numbers:
        return None
    words = f"donate {', '.join(f'[{number}]' for number in numbers)} (jax.jit(..., donate_argnums={tuple(numbers)}))"

    def donating(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        return jax.jit(lambda *args, **kwargs: fn(*args, **kwargs), donate_argnums=numbers)

    return _Call(words, saving, donating, args, kwargs)


def _narrow(args: tuple[object, ...], kwargs: Mapping[str, object]) -> _Call | None:
    """Float32 arguments in bfloat16."""

    def narrow(leaf: PyTree) -> PyTree:
        if getattr(leaf, "dtype", None) != jnp.float32:
            return leaf
        return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=getattr(leaf, "sharding", None))

    changed = jax.tree.map(narrow, (args, kwargs))
    pairs = zip(jax.tree.leaves((args, kwargs)), jax.tree.leaves(changed))
    saving = sum(2 * math.prod(_on_device(before)) for before, after in pairs if before is not after)
    if not saving:
        return None
    return _Call("float32 arguments in bfloat16", saving, lambda fn: fn, *changed, rounds=True)


def _on_device(leaf: PyTree) -> tuple[int, ...]:
    """The shape of one device's part."""
    sharding = getattr(leaf, "sharding", None)
    return leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
