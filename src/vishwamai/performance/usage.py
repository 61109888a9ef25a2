"""`track_memory_usage`: what a step takes and keeps, by the plan of its compiled program and by running it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from vishwamai.core.arguments import check_callable, checked
from vishwamai.core.errors import ShapeError, VishwamaiError
from vishwamai.core.figures import Estimate, Measurement
from vishwamai.core.numbers import human
from vishwamai.measure.live import LiveAt, live_bytes


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """Memory of a step on one device.

    Attributes:
      peak: the plan of the compiled program: arguments, results and temporaries together.
      parts: the same by class: "arguments", "outputs", "temporaries", "code" and "aliased" (results that lie in donated
        arguments, which `peak` counts once).
      live: bytes that are alive while each operation of the compiled program runs, in its order.
      donated: paths of the arguments that the step may overwrite, with their bytes.
      donatable: paths of the others whose shape and dtype are those of a result that lies in no donated argument:
        donating them would save so many bytes.
      leaked: bytes of JAX arrays that a step leaves behind, the median over the steps; 0 for a step that keeps nothing.
      resident: growth of the process's memory over the steps; None where the system does not say.
      device_peak: most bytes that the device's allocator counted; None on devices without a counter, as CPUs.
    """

    peak: Estimate
    parts: dict[str, Estimate]
    live: tuple[LiveAt, ...] = dataclasses.field(repr=False)
    donated: dict[str, int]
    donatable: dict[str, int]
    leaked: Measurement
    resident: Measurement | None
    device_peak: Measurement | None

    def largest(self, count: int = 5) -> tuple[LiveAt, ...]:
        """The operations with most bytes alive, largest first."""
        return tuple(sorted(self.live, key=lambda entry: -entry.live))[:count]

    def __str__(self) -> str:
        lines = [f"peak {self.peak}: " + ", ".join(f"{name} {human(part.value)}" for name, part in self.parts.items())]
        lines += [
            f"  {human(program.live):>10} alive at {program.name} ({program.source or program.opcode})"
            for program in self.largest()
        ]
        lines.append(
            f"donated {human(sum(self.donated.values()))}, could be donated: {', '.join(self.donatable) or '-'}"
        )
        lines.append(f"left behind by a step: {self.leaked}")
        return "\n".join(lines)


_MOST_STEPS = 10_000


@checked
def track_memory_usage(
    step_fn: Callable[..., object], inputs: Sequence[object] | Mapping[str, object], *, steps: int = 4
) -> MemoryStats:
    """The memory of a step: planned by the compiler of this machine's device, and over steps that run.

    The step is traced and compiled once for its plan. Then it runs, every time with copies of the inputs, so that
    donated ones can be used again. What JAX arrays are alive after a step and were not before it, leaked.

    Args:
      step_fn: a function of arrays, jitted or not; a jitted one's donated arguments stay donated.
      inputs: its arguments, trees of arrays. A dict has them by name if the step has these parameters, and is its only
        argument otherwise. A sequence has them by position.
      steps: number of runs after one that warms up, 10,000 times at most.

    Raises:
      ShapeError: `steps` is not positive or above 10,000, or `step_fn` cannot be traced with these inputs.
      KernelError: `step_fn` is not a function.

    >>> import jax, jax.numpy as jnp
    >>> update = jax.jit(lambda w, x: (w - x.sum(), x * 2), donate_argnums=0)
    >>> found = track_memory_usage(update, (jnp.ones(1024), jnp.ones(512)))
    >>> found.donated, found.donatable
    ({'[0]': 4096}, {'[1]': 2048})
    >>> found.parts["aliased"].value, found.peak.level, found.leaked.value
    (4096, 'verified', 0.0)
    """
    check_callable("track_memory_usage", "step_fn", step_fn)
    if not 1 <= steps <= _MOST_STEPS:
        raise ShapeError(f"track_memory_usage: `steps` is {steps}; pass a whole number from 1 to {_MOST_STEPS}.")
    call = _call(step_fn, inputs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(inputs if isinstance(inputs, Mapping) else tuple(inputs)):
        if not isinstance(leaf, (jax.Array, np.ndarray, bool, int, float, complex, np.generic)):
            raise ShapeError(
                f"track_memory_usage: `inputs`{jax.tree_util.keystr(path)} is of type {type(leaf).__name__}; pass "
                "arrays and numbers."
            )
    jitted = step_fn if hasattr(step_fn, "lower") else jax.jit(step_fn)
    try:
        lowered = jitted.lower(*call[0], **call[1])  # type: ignore[attr-defined]
    except VishwamaiError:
        raise
    except Exception as error:  # of the caller's own function
        raise ShapeError(f"track_memory_usage: `step_fn` does not take these inputs: {error}") from error
    compiled = lowered.compile()
    peak, parts = planned_memory(compiled)
    donated, donatable = _donation(lowered)
    leaked, resident = _run(step_fn, call, steps)
    return MemoryStats(
        peak,
        parts,
        live_bytes(compiled.as_text() or ""),
        donated,
        donatable,
        Measurement(leaked, jax.devices()[0].device_kind),
        None if resident is None else Measurement(resident, "the process"),
        counted_peak(),
    )


def planned_memory(compiled: jax.stages.Compiled) -> tuple[Estimate, dict[str, Estimate]]:
    """The peak of a compiled program on one device, and its parts, as of `MemoryStats`."""
    stats = compiled.memory_analysis()
    assert stats is not None  # every backend of jax that compiles gives it
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "code": stats.generated_code_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    total = sum(sizes.values()) - 2 * sizes["aliased"]
    return Estimate(total, "verified"), {name: Estimate(size, "verified") for name, size in sizes.items()}


def counted_peak() -> Measurement | None:
    """What the default device's allocator counted at most; None on devices without a counter."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    return Measurement(stats["peak_bytes_in_use"], device.device_kind) if "peak_bytes_in_use" in stats else None


def _donation(lowered: jax.stages.Lowered) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the donated arguments by path, and of those that could be."""
    results = Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(lowered.out_info))
    leaves = [
        leaf
        for arguments in lowered.args_info  # by position, and by name
        for leaf in jax.tree_util.tree_leaves_with_path(arguments, is_leaf=lambda leaf: hasattr(leaf, "donated"))
    ]
    donated, donatable = {}, {}
    for flag in (True, False):
        for path, leaf in leaves:
            if leaf.donated is not flag:
                continue
            matches = results[leaf.shape, leaf.dtype] > 0
            results[leaf.shape, leaf.dtype] -= matches
            nbytes = int(np.prod(leaf.shape)) * getattr(leaf.dtype, "itemsize", 4)
            if flag:
                donated[jax.tree_util.keystr(path)] = nbytes
            elif matches:
                donatable[jax.tree_util.keystr(path)] = nbytes
    return donated, donatable


_Call = tuple[tuple[object, ...], dict[str, object]]
"""Arguments by position and by name."""


def _call(step_fn: Callable[..., object], inputs: Sequence[object] | Mapping[str, object]) -> _Call:
    """The arguments that `inputs` are."""
    if not isinstance(inputs, Mapping):
        return tuple(inputs), {}
    try:
        inspect.signature(step_fn).bind(**inputs)
    except (TypeError, ValueError):  # other parameters, or a builtin without a signature
        return (dict(inputs),), {}
    return (), dict(inputs)


def _run(step_fn: Callable[..., object], call: _Call, steps: int) -> tuple[float, int | None]:
    """Bytes of arrays that a step leaves behind, the median over the steps, and the process's growth over them all."""
    left, resident = [], None
    with _without_collections():
        for turn in range(steps + 1):
            arguments = jax.tree.map(jax.numpy.array, call)
            _collect_young()
            before = _alive()
            jax.block_until_ready(step_fn(*arguments[0], **arguments[1]))
            _collect_young()
            if turn:
                left.append(_bytes_of_new(before, arguments))
            else:
                resident = _resident()
            del arguments, before
    after = _resident()
    return float(np.median(left)), None if after is None or resident is None else after - resident


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Keeps the garbage collector from running by itself, so that what is made in this block stays young."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _collect_young() -> None:
    """Collects cycles among young objects; of a large process, the others take seconds each time."""
    gc.collect(1)


def _alive() -> dict[int, jax.Array]:
    """The live arrays by identity, held so that no identity is used twice."""
    return {id(array): array for array in jax.live_arrays()}


def _bytes_of_new(before: Mapping[int, object], arguments: object) -> int:
    existing = set(before) | {id(leaf) for leaf in jax.tree.leaves(arguments)}
    return sum(array.nbytes for array in jax.live_arrays() if id(array) not in existing and not array.is_deleted())


def _resident() -> int | None:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None
