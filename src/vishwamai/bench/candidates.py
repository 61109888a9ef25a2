"""What can compute a case here: our implementations that take it, and the frameworks' own ways, each built into a call
that can be timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from vishwamai.bench import numbers
from vishwamai.bench.gradient import gradient_case, gradient_peer, restored
from vishwamai.bench.subject import Arrays, Peer, Subject, from_torch
from vishwamai.core.cases import Case
from vishwamai.core.config import ambient_target
from vishwamai.core.errors import FallbackWarning
from vishwamai.core.op import Implementation
from vishwamai.core.types import PyTree
from vishwamai.ops.catalogue import Operation, specs_of


@dataclasses.dataclass
class Contestant:
    """One way to compute a case.

    Attributes:
      name, framework, implementation, default: fields of `runner.Measurement`.
      checked: its result is compared with the truth.
      build: the case's arrays to (the call, the call's result to our outputs as NumPy arrays, bytes that it takes or
        None).
    """

    name: str
    framework: str
    implementation: str | None
    default: bool
    build: Callable[[Arrays], tuple[Callable[[], Any], Callable[[Any], Any], int | None]]
    checked: bool = True


def _memory_limit() -> int:
    """Half of the memory that is free now."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class TooLarge(Exception):
    """A program's own plan says that it would not fit."""


def _compiled(function: Callable[..., object], arguments: tuple[object, ...]) -> tuple[Callable[[], PyTree], int]:
    """(the call, bytes that it takes) of a program compiled for the default device, arguments in place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        program = jax.jit(function).lower(*arguments).compile()
    plan = program.memory_analysis()
    assert plan is not None  # every backend of ours gives it
    memory = plan.argument_size_in_bytes + plan.output_size_in_bytes + plan.temp_size_in_bytes
    if ambient_target().platform == "cpu" and memory > _memory_limit():
        raise TooLarge(f"needs {memory / 2**30:.1f} GiB, more than half of the memory that is free")
    placed = jax.device_put(arguments)
    return lambda: jax.block_until_ready(program(*placed)), memory


def ours(case: Case, impl: Implementation, default: bool) -> Contestant:
    """One of our implementations."""

    def build(arrays: Arrays) -> Any:
        call, memory = _compiled(lambda arrays: case.run(arrays, implementation=impl.name), (arrays,))
        return call, numbers.as_tuple, memory

    return Contestant(f"vishwamai {impl.name}", "vishwamai", impl.name, default, build)


def theirs(peer: Peer, case: Case, gradients: bool, device: str = "cpu") -> Contestant:
    """A peer; `case` is the one without gradients, `device` where torch computes it."""
    run = gradient_peer(peer, case) if gradients else peer

    def restore(outputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        return restored(peer, case, outputs) if gradients else (peer.restore(outputs[0]), *outputs[1:])

    def build(arrays: Arrays) -> Any:
        arguments = run.prepare(arrays)
        if peer.framework == "jax":
            call, memory = _compiled(run.call, arguments)
            return call, lambda result: restore(numbers.as_tuple(result)), memory
        if peer.framework == "numpy":
            return lambda: peer.call(*arguments), lambda result: (result,), None
        if device != "cpu":
            arguments = jax.tree.map(lambda x: x.to(device), arguments)
        return _torch_call(run, arguments, gradients), lambda result: restore(_torch_arrays(result)), None

    return Contestant(peer.name, peer.framework, None, False, build, peer.checked)


def _torch_call(peer: Peer, arguments: tuple[object, ...], gradients: bool) -> Callable[[], PyTree]:
    import torch

    def call() -> PyTree:
        with contextlib.nullcontext() if gradients else torch.inference_mode():
            return peer.call(*arguments)

    return call


def _torch_arrays(result: PyTree) -> tuple[np.ndarray, ...]:
    return tuple(from_torch(x) for x in (result if isinstance(result, tuple) else (result,)))


def candidates(
    operation: Operation, case: Case, about: Subject, gradients: bool = False
) -> tuple[list[Contestant], list[tuple[str, str]]]:
    """(what can compute the case, or its gradients, here; (implementation, why it cannot) for the others)."""
    spec = specs_of(operation, case)[0]
    target = ambient_target()
    run = gradient_case(case) if gradients else case
    if run is None:
        return [], []
    contestants: list[Contestant] = []
    declined: list[tuple[str, str]] = []
    for impl in operation.op.implementations:
        if impl.platform not in (target.platform, None):
            continue
        reason = impl.why_not(spec, target)
        if reason is None:
            contestants.append(ours(run, impl, default=not contestants))
        else:
            declined.append((impl.name, reason))
    with_torch = importlib.util.find_spec("torch") is not None and target.platform == "cpu"
    differentiable = set(case.differentiable) if gradients else set()
    contestants += [
        theirs(p, case, gradients)
        for p in about.peers(case)
        if (p.framework != "torch" or with_torch) and differentiable <= set(p.arguments)
    ]
    return contestants, declined
