"""What the operations in a block of code cost, measured one by one on the device they run on: `profile_kernel`.

Inside a jitted program no boundary between operations can be observed: XLA schedules and fuses as it likes.
So a profile takes the program apart. In its block jit is off (`jax.disable_jit`: loops run in Python, JAX's own
operations one at a time), while every vishwamai operation, forward or backward, is compiled as a program of its own and
run on its own operands, once to warm up and then `repeats` times, each run waited for; its time is the median. A
decorated kernel is compiled and timed whole, too, since what XLA fuses across operations, and its own operations
between ours, show only there. So the times of a kernel's operations need not add up to the kernel's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import mlir

from vishwamai.core import observe
from vishwamai.core.arguments import described
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.config import ambient_target, current_config
from vishwamai.core.errors import KernelError
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.measure.machine_peaks import local_peaks
from vishwamai.measure.measurement import (
    Measured,
    compute_dtype,
    measure_compiled,
    measure_eager,
    pass_flops,
    undisturbed,
    work,
)
from vishwamai.measure.peaks import Peaks
from vishwamai.measure.profile import Profile, ProfileRow


@contextlib.contextmanager
def profile_kernel(*, repeats: int = 5, peaks: Callable[[], Peaks] = local_peaks) -> Iterator[Profile]:
    """Measures every operation that runs in the block; see the module's text for how.

    The results of the block are those of the program: a decorated kernel returns what its compiled form computes,
    everything else runs unjitted and may differ in rounding. A block is slower than without the profile: operations run
    several times, and all that is not ours one operation at a time. Operations of `vishwamai.torch` are timed in the
    same way, backward passes too; bytes are left out where their device is not JAX's.

    Args:
      repeats: how often an operation is run for its median, 1 or more.
      peaks: gives the device's peaks when the summary needs them. The default takes a TPU's published peaks, and
        measures the peaks of other machines.

    Yields:
      a `Profile`: `print(prof.summary())` gives the table (per operation: calls, time, GFLOP/s, GB/s, share of the
      peak, memory); `prof.operations` and `prof.kernels` hold its rows.

    Raises:
      KernelError: `repeats` is not a positive whole number.

    >>> import vishwamai
    >>> with profile_kernel(repeats=3) as prof:
    ...     y = vishwamai.gemm(jnp.ones((64, 32)), jnp.ones((32, 16)))
    >>> [(row.name, row.calls, row.flops) for row in prof.operations]
    [('gemm forward', 1, 65536)]
    """
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise KernelError(f"profile_kernel: `repeats` is {described(repeats)}; pass a whole number of 1 or more.")
    profiler = _Profiler(Profile(repeats, peaks))
    with observe.watching(profiler) as profiler.token, jax.disable_jit():
        yield profiler.profile


def active() -> Profile | None:
    """The profile of the enclosing block, if there is one."""
    interceptor = observe.interceptor()
    return interceptor.profile if isinstance(interceptor, _Profiler) else None


def run_kernel(
    profile: Profile, kernel: object, name: str, function: Callable[..., PyTree], arguments: tuple[jax.Array, ...]
) -> PyTree:
    """Times a decorated kernel whole, then once more taken apart into its operations; returns the result of the whole
    one.

    Args:
      kernel: hashable identity of the program; a call with the same and arguments of the same shapes does not
        compile again.
      name: its row's name.
      function: callable of the arguments, which are arrays.
    """
    where = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in arguments)
    key = (kernel, where, current_config())
    with undisturbed():
        if key not in profile.programs:
            profile.programs[key] = jax.jit(function).lower(*arguments).compile()
        measured = measure_compiled(profile.programs[key], *arguments, repeats=profile.repeats, name=name)
    before = profile.flops
    profile.inside_kernel = True
    try:
        function(*arguments)
    finally:
        profile.inside_kernel = False
    flops = profile.flops - before
    row = ProfileRow(
        name, "the program as a whole, FLOP of its operations alone", flops or None, None, measured.memory, ""
    )
    profile.record(key, lambda: row, measured.seconds, kernel=True)
    return measured.result


def trace_passes(function: Callable[..., object], *arguments: object) -> ClosedJaxpr:
    """Traces a function so that every pass of our operations is one equation, which `pass_of` reads; nothing runs."""
    profiler = _Profiler(Profile(1, local_peaks))
    with undisturbed(), observe.watching(profiler) as profiler.token:
        return jax.make_jaxpr(lambda *arguments: function(*arguments))(*arguments)


def pass_of(equation: JaxprEqn) -> tuple[CallPlan, str] | None:
    """(plan, direction) of an equation of `trace_passes`; None where it is none of our operations."""
    if equation.primitive is not _OPERATION:
        return None
    return equation.params["call"].plan, equation.params["call"].direction


_OPERATION = Primitive("vishwamai_operation")
_OPERATION.multiple_results = True


@dataclasses.dataclass(frozen=True, eq=False)
class _Pass:
    """The static side of one call: which profile, which plan and pass, and the function of its flat arguments."""

    token: int
    plan: CallPlan
    direction: str
    function: Callable[..., list[jax.Array]]
    results: tuple[jax.ShapeDtypeStruct, ...]


class _Profiler(observe.Observer):
    """Turns every pass of an op into one equation, which is timed when it runs."""

    intercepts = True

    def __init__(self, profile: Profile):
        self.profile = profile
        self.token = 0

    def run_pass(
        self, plan: CallPlan, direction: str, function: Callable[..., object], arguments: tuple[object, ...]
    ) -> PyTree:
        leaves, treedef = jax.tree.flatten(arguments)
        shapes = jax.eval_shape(function, *arguments)
        results, out_treedef = jax.tree.flatten(shapes)

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(function(*jax.tree.unflatten(treedef, leaves)))

        call = _Pass(self.token, plan, direction, flat, tuple(results))
        return jax.tree.unflatten(out_treedef, _OPERATION.bind(*leaves, call=call))

    def run_eager(
        self, plan: CallPlan, direction: str, run: Callable[[], PyTree], arguments: tuple[AnyArray, ...]
    ) -> PyTree:
        """Times a pass on tensors of torch, which runs as it is met."""
        with undisturbed():
            measured = measure_eager(run, arguments, repeats=self.profile.repeats)
        call = _Pass(self.token, plan, direction, run, ())
        self.profile.record(
            (plan.op.name, direction, str(plan.spec)), lambda: _row(call, measured), measured.seconds, kernel=False
        )
        return measured.result


def _profile_of(call: _Pass) -> Profile | None:
    """The profile that the call was made under; None once its block is over."""
    observer = observe.find(call.token)
    return observer.profile if isinstance(observer, _Profiler) else None


@_OPERATION.def_impl
def _timed(*operands: object, call: _Pass) -> list[jax.Array]:
    profile = _profile_of(call)
    leaves = tuple(map(jnp.asarray, operands))
    with undisturbed():
        if profile is None:  # the block is over: a function kept from it runs as any other
            return jax.jit(call.function)(*leaves)
        where = tuple((x.shape, x.dtype, x.sharding) for x in leaves)
        program = (call.plan, call.direction, where, current_config())
        if program not in profile.programs:
            profile.programs[program] = jax.jit(call.function).lower(*leaves).compile()
        name = f"{call.plan.op.name} {call.direction}"
        measured = measure_compiled(profile.programs[program], *leaves, repeats=profile.repeats, name=name)
    key = (call.plan.op.name, call.direction, str(call.plan.spec), where)
    profile.record(key, lambda: _row(call, measured), measured.seconds, kernel=False)
    return measured.result


def _row(call: _Pass, measured: Measured) -> ProfileRow:
    plan = call.plan
    flops, nbytes = pass_flops(plan, call.direction), work(plan)[1]
    choice = plan.choice(ambient_target().platform)
    if call.direction == "backward":
        nbytes = measured.useful
    if choice.target.framework == "torch" and choice.target.platform != ambient_target().platform:
        nbytes = None  # the peaks belong to another device
    word = call.direction.replace("forward_with_residuals", "forward (for a gradient)")
    return ProfileRow(
        f"{plan.op.name} {word}",
        f"{choice.implementation.name}: {plan.spec}",
        flops,
        nbytes,
        measured.memory,
        compute_dtype(plan),
    )


@_OPERATION.def_abstract_eval
def _abstract(*avals: object, call: _Pass) -> list[jax.core.ShapedArray]:
    del avals
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in call.results]


def _inside_a_program(*leaves: jax.Array, call: _Pass) -> list[jax.Array]:
    profile = _profile_of(call)
    if profile is not None:
        name = call.plan.op.name
        profile.untimed[name] = profile.untimed.get(name, 0) + 1
    with undisturbed():
        return call.function(*leaves)


mlir.register_lowering(_OPERATION, mlir.lower_fun(_inside_a_program, multiple_results=True))
