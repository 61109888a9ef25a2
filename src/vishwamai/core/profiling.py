"""What the operations in a block of code cost, measured one by one on the device they run on: `profile_kernel`.

Inside a jitted program nobody can say when one operation ends and the next begins: XLA schedules and fuses as it likes. So a profile takes the program
apart. In its block jit is off (`jax.disable_jit`: loops run in Python, JAX's own operations one at a time), while every vishwamai operation, forward or
backward, is compiled as a program of its own and run on its own operands, once to warm up and then `repeats` times, each run waited for; its time
is the median. A decorated kernel is compiled and timed whole, too, since what XLA fuses across operations, and its own operations between ours, show
only there. So the times of a kernel's operations need not add up to the kernel's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from vishwamai.core.config import ambient_platform, current_config
from vishwamai.core.errors import KernelError
from vishwamai.core.measuring import Measured, Peaks, local_peaks, measure_compiled, work

if TYPE_CHECKING:
    from vishwamai.core.op import Plan


@dataclasses.dataclass
class Row:
    """Everything that was measured of one operation (same spec, same pass), or of one decorated kernel.

    Attributes:
      name: of the operation and its pass, or of the kernel.
      detail: its implementation and operands.
      calls: how often the block called it; the times are per call, each a median.
      flops: floating-point operations of one call; None where they are not counted.
      nbytes: bytes that one call must move at least; None for a kernel, whose intermediates may stay on the chip.
      memory: bytes that the program holds.
      dtype: whose peak counts.
    """

    name: str
    detail: str
    flops: float | None
    nbytes: int | None
    memory: int
    dtype: str
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def calls(self) -> int:
        return len(self.times)

    @property
    def seconds(self) -> float:
        """Of all calls together."""
        return sum(self.times)

    @property
    def flops_per_second(self) -> float | None:
        return None if self.flops is None else self.flops * self.calls / self.seconds

    @property
    def bytes_per_second(self) -> float | None:
        return None if self.nbytes is None else self.nbytes * self.calls / self.seconds


class Profile:
    """What `profile_kernel` measured.

    Attributes:
      operations: a `Row` for every operation, pass and spec, in order of their first call.
      kernels: a `Row` for every decorated kernel, timed whole.
      untimed: operations inside programs that could not be taken apart (a `shard_map`, a program compiled ahead of time), with their number.
    """

    def __init__(self, repeats: int, peaks: Callable[[], Peaks]):
        self.repeats = repeats
        self.operations: list[Row] = []
        self.kernels: list[Row] = []
        self.untimed: dict[str, int] = {}
        self.inside_kernel = False
        self.programs: dict[Any, jax.stages.Compiled] = {}
        self._peaks = peaks
        self._rows: dict[Any, Row] = {}

    @functools.cached_property
    def peaks(self) -> Peaks:
        """The peaks that shares are counted against; asked for (and measured, where they must be) on first use."""
        return self._peaks()

    @property
    def flops(self) -> float:
        """Floating-point operations of all calls that count them."""
        return sum(row.calls * (row.flops or 0) for row in self.operations)

    def record(self, key: Any, row: Callable[[], Row], seconds: float, *, kernel: bool) -> None:
        """Adds one call."""
        if key not in self._rows:
            self._rows[key] = row()
            (self.kernels if kernel else self.operations).append(self._rows[key])
        self._rows[key].times.append(seconds)

    def _too_fast(self, row: Row) -> str | None:
        """What is wrong with a row whose figures are above the maker's peak; None where nothing is."""
        if row.flops is None or row.nbytes is None or not self.peaks.published:
            return None
        peak, bandwidth = self.peaks.flops(row.dtype), self.peaks.bandwidth(row.nbytes)
        if peak is None or bandwidth is None:
            return None
        share = max(row.flops / peak, row.nbytes / bandwidth) * row.calls / row.seconds
        if share <= 1:
            return None
        return (
            f"{row.name}: {row.seconds / row.calls * 1e6:.1f} us for {row.flops:.3g} FLOP and {row.nbytes} bytes is {share:.2f} times the peak "
            f"({self.peaks.how}): the clock or the count of its work is wrong, and the figure is not told."
        )

    def share(self, row: Row) -> float | None:
        """The roofline's time for one call as a share of the measured one: 1.0 = nothing can be faster. None where the peaks are not known.

        Raises:
          KernelError: a figure is above the maker's peak, so the measurement cannot be right.
        """
        if row.flops is None or row.nbytes is None:
            return None
        peak, bandwidth = self.peaks.flops(row.dtype), self.peaks.bandwidth(row.nbytes)
        if peak is None or bandwidth is None:
            return None
        wrong = self._too_fast(row)
        if wrong is not None:
            raise KernelError(wrong)
        return max(row.flops / peak, row.nbytes / bandwidth) * row.calls / row.seconds

    def summary(self) -> str:
        """The table: for each operation its calls, time, GFLOP/s, GB/s, share of the peak and memory; then the kernels, timed whole."""
        head = ("operation", "calls", "ms", "GFLOP/s", "GB/s", "of peak", "MiB", "implementation and operands")
        lines = [head, *map(self._cells, self.operations)]
        if self.kernels:
            lines += [("whole kernel", *("",) * 7), *map(self._cells, self.kernels)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        text = [
            "  ".join(c.ljust(w) if i in (0, 7) else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths))).rstrip()
            for line in lines
        ]
        text.append(f"on {jax.devices()[0].device_kind}: each operation alone, median of {self.repeats} runs")
        if any(row.flops is not None and row.nbytes is not None for row in self.operations):
            text.append(f"of peak: roofline's time / measured time; {self.peaks.how}")
        if any("*" in line[5] for line in lines[1:]):
            text.append("* faster than all that was measured before, so it counts as the peak")
        text += [f"error: {wrong}" for row in self.operations if (wrong := self._too_fast(row)) is not None]
        for name, count in self.untimed.items():
            text.append(f"not timed: {name}, {count} times inside a program that could not be taken apart")
        return "\n".join(text)

    def _cells(self, row: Row) -> tuple[str, ...]:
        wrong = self._too_fast(row)
        share = None if wrong else self.share(row)
        percent = "error" if wrong else "-" if share is None else f"{share:.1%}" if share <= 1 else "100%*"

        def rate(value: float | None) -> str:
            return "-" if value is None or wrong else f"{value / 1e9:.1f}"

        return (
            row.name,
            str(row.calls),
            f"{row.seconds * 1e3:.3f}",
            rate(row.flops_per_second),
            rate(row.bytes_per_second),
            percent,
            f"{row.memory / 2**20:.1f}",
            row.detail,
        )


_PROFILING = jax.make_user_context(default_value=None)
_PROFILES: dict[int, Profile] = {}
_TOKENS = itertools.count(1)


@contextlib.contextmanager
def profile_kernel(*, repeats: int = 5, peaks: Callable[[], Peaks] = local_peaks) -> Iterator[Profile]:
    """Measures every operation that runs in the block; see the module's text for how.

    The results of the block are those of the program: a decorated kernel returns what its compiled form computes, everything else runs unjitted and
    may differ in rounding. A block is slower than without the profile: operations run several times, and all that is not ours one operation at a time.

    Args:
      repeats: how often an operation is run for its median.
      peaks: gives the device's peaks when the summary wants them; the default knows TPUs. `vishwamai.kernels.profile_kernel` measures other machines.

    >>> import vishwamai
    >>> with profile_kernel(repeats=3) as prof:
    ...     y = vishwamai.gemm(jnp.ones((64, 32)), jnp.ones((32, 16)))
    >>> [(row.name, row.calls, row.flops) for row in prof.operations]
    [('matmul forward', 1, 65536)]
    >>> print(prof.summary())
    operation       calls  ...
    """
    token = next(_TOKENS)
    profile = _PROFILES[token] = Profile(repeats, peaks)
    try:
        with _PROFILING(token), jax.disable_jit():
            yield profile
    finally:
        del _PROFILES[token]


def active() -> Profile | None:
    """The profile of the enclosing block, if there is one."""
    return _PROFILES.get(_PROFILING.value)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs the block as if there were no profile: jitted, and not taken apart."""
    with _PROFILING(None), jax.disable_jit(False):
        yield


def run_kernel(
    profile: Profile, kernel: Any, name: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """Times a decorated kernel whole, then once more taken apart into its operations; returns the result of the whole one.

    Args:
      kernel: what stands for the program, hashable; a call with the same and arguments of the same shapes does not compile again.
      name: of its row.
      function: of the arguments, which are arrays.
    """
    where = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in arguments)
    key = (kernel, where, current_config())
    with undisturbed():
        if key not in profile.programs:
            profile.programs[key] = jax.jit(function).lower(*arguments).compile()
        found = measure_compiled(profile.programs[key], *arguments, repeats=profile.repeats)
    before = profile.flops
    profile.inside_kernel = True
    try:
        function(*arguments)
    finally:
        profile.inside_kernel = False
    flops = profile.flops - before
    row = Row(name, "the program as a whole, FLOP of its operations alone", flops or None, None, found.memory, "")
    profile.record(key, lambda: row, found.seconds, kernel=True)
    return found.result


# --- One operation of a program that is taken apart --------------------------------------------------------------------------------------------------

_OPERATION = Primitive("vishwamai_operation")
_OPERATION.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """The static side of one call: which profile, which plan and pass, and the function of its flat arguments."""

    token: int
    plan: Plan
    direction: str
    function: Callable[..., list[Any]]
    results: tuple[jax.ShapeDtypeStruct, ...]


def operation(plan: Plan, direction: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """`function(*arguments)`, the `direction` of `plan`, as one equation that the profile in force times when it runs."""
    leaves, treedef = jax.tree.flatten(arguments)
    shapes = jax.eval_shape(function, *arguments)
    results, out_treedef = jax.tree.flatten(shapes)

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(function(*jax.tree.unflatten(treedef, leaves)))

    call = _Call(_PROFILING.value, plan, direction, flat, tuple(results))
    return jax.tree.unflatten(out_treedef, _OPERATION.bind(*leaves, call=call))


@_OPERATION.def_impl
def _timed(*operands: Any, call: _Call) -> list[Any]:
    profile = _PROFILES.get(call.token)
    leaves = tuple(map(jnp.asarray, operands))
    with undisturbed():
        if profile is None:  # the block is over: a function kept from it runs as any other
            return jax.jit(call.function)(*leaves)
        where = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        program = (call.plan, call.direction, where, current_config())
        if program not in profile.programs:
            profile.programs[program] = jax.jit(call.function).lower(*leaves).compile()
        found = measure_compiled(profile.programs[program], *leaves, repeats=profile.repeats)
    key = (call.plan.op.name, call.direction, str(call.plan.spec), where)
    profile.record(key, lambda: _row(call, found), found.seconds, kernel=False)
    return found.result


def _row(call: _Call, found: Measured) -> Row:
    plan = call.plan
    flops, nbytes = work(plan)
    if call.direction == "backward":
        flops = None if flops is None else getattr(plan.spec, "backward_flops", 2 * flops)
        nbytes = found.useful
    first = next(x for x in plan.spec.operands if x is not None)
    dtype = getattr(plan.spec, "compute_dtype", first.dtype)
    implementation = plan.choice(ambient_platform()).implementation.name
    word = call.direction.replace("forward_with_residuals", "forward (for a gradient)")
    return Row(
        f"{plan.op.name} {word}", f"{implementation}: {plan.spec}", flops, nbytes, found.memory, jnp.dtype(dtype).name
    )


@_OPERATION.def_abstract_eval
def _abstract(*avals: Any, call: _Call) -> list[Any]:
    del avals
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in call.results]


def _inside_a_program(*leaves: Any, call: _Call) -> list[Any]:
    profile = _PROFILES.get(call.token)
    if profile is not None:
        name = call.plan.op.name
        profile.untimed[name] = profile.untimed.get(name, 0) + 1
    with undisturbed():
        return call.function(*leaves)


mlir.register_lowering(_OPERATION, mlir.lower_fun(_inside_a_program, multiple_results=True))
