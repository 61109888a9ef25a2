"""Repeats what a pass launched for tensors of the same shapes, without the Python that prepared it.

A pass of an operation on a GPU is a function of shapes, strides and options that launches a few kernels, and between
two launches makes nothing but views. The second call of the same kind is recorded: each launch, and of each of its
buffers which tensor of the pass it is a part of. Later calls allocate the results and launch. What cannot be repeated
so, a pass in which torch computes something too (`gpu.repeat` does) or whose operands lie among each other, runs as it
is every time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vishwamai.core import gpu
from vishwamai.core.types import AnyArray
from vishwamai.torch.launch import MOST


class _Part(NamedTuple):
    """A tensor as a part of the memory of another one.

    Attributes:
      memory: which, among the operands and then the results of the launches, in order.
      form: None where it is that tensor itself; else dtype, shape, strides, and the distance in elements.
    """

    memory: int
    form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...], int] | None


class _Step(NamedTuple):
    """A launch; arrays of NumPy among its inputs are constants."""

    how: gpu.Launch
    inputs: tuple[tuple[str, Any], ...]
    outputs: dict[str, gpu.Result]
    starts: tuple[tuple[str, _Part], ...]  # of outputs that take over another array's memory


class _Program(NamedTuple):
    steps: list[_Step]
    results: Any


class _Unlike(Exception):
    """The pass is not made of launches and views alone."""


_VIEWS = frozenset(
    "alias as_strided detach empty empty_strided expand narrow new_empty permute reshape select slice squeeze t "
    "transpose unsqueeze view _reshape_alias _unsafe_view".split()
)


class _OnlyViews(TorchDispatchMode):
    """Notes whether torch is asked for anything but views and fresh memory outside of a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.others = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not gpu.launching() and func.overloadpacket.__name__ not in _VIEWS:
            self.others = True
        return func(*args, **(kwargs or {}))


def _flat(x: AnyArray, tensors: list[Tensor]) -> Any:
    """What is hashable of nested tuples of tensors and options; appends the tensors."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return x.shape, x.stride(), x.dtype
    if isinstance(x, tuple):
        return tuple([_flat(item, tensors) for item in x])
    return x


def _mapped(x: AnyArray, of: type, function: Callable[[Any], Any]) -> Any:
    """Nested tuples with `function` applied to what is of a type."""
    if isinstance(x, of):
        return function(x)
    if isinstance(x, tuple):
        items = [_mapped(item, of, function) for item in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return x


class _Memory:
    """The tensors of a pass that is being recorded."""

    def __init__(self, operands: list[Tensor]) -> None:
        self.tensors = list(operands)

    def part(self, x: Tensor) -> _Part:
        """Where a tensor lies.

        Raises:
          _Unlike: in none of them, or in several.
        """
        for i, base in enumerate(self.tensors):
            if base.data_ptr() == x.data_ptr() and (base.shape, base.stride()) == (x.shape, x.stride()):
                return _Part(i, None if base.dtype == x.dtype else (x.dtype, x.shape, x.stride(), 0))
        bases = [i for i, base in enumerate(self.tensors) if _inside(x, base)]
        if len({self.tensors[i].data_ptr() for i in bases}) != 1:
            raise _Unlike
        base = self.tensors[bases[0]]
        distance, rest = divmod(x.data_ptr() - base.data_ptr(), x.element_size())
        if rest or x.element_size() != base.element_size():
            raise _Unlike
        return _Part(bases[0], (x.dtype, x.shape, x.stride(), distance))


def _span(x: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    steps = zip(x.shape, x.stride(), strict=True)
    return (1 + sum((extent - 1) * step for extent, step in steps)) * x.element_size() if x.numel() else 0


def _inside(x: Tensor, base: Tensor) -> bool:
    first = base.data_ptr()
    return bool(x.numel()) and first <= x.data_ptr() and x.data_ptr() + _span(x) <= first + _span(base)


def _record(run: Callable[[], Any], operands: list[Tensor]) -> tuple[Any, _Program | None]:
    """(the results of the pass, how to repeat it or None)."""
    with _OnlyViews() as torch_itself, gpu.recorded() as launches:
        results = run()
    if torch_itself.others:
        return results, None
    memory, steps = _Memory(operands), []
    try:
        for how, inputs, outputs, allocated in launches:
            parts = tuple((n, x if isinstance(x, np.ndarray) else memory.part(x)) for n, x in inputs.items())
            starts = tuple((n, memory.part(out.start)) for n, out in outputs.items() if out.start is not None)
            unbound = {n: dataclasses.replace(out, start=None) for n, out in outputs.items()}
            steps.append(_Step(how, parts, unbound, starts))
            memory.tensors += allocated
        return results, _Program(steps, _mapped(results, Tensor, memory.part))
    except _Unlike:
        return results, None


def _repeat(program: _Program, memory: list[Tensor]) -> Any:
    def take(part: _Part) -> Tensor:
        base = memory[part.memory]
        if part.form is None:
            return base
        dtype, shape, strides, distance = part.form
        return base.view(dtype).as_strided(shape, strides, base.storage_offset() + distance)

    launcher: Any = gpu.launcher("torch")
    for step in program.steps:
        inputs = {n: take(x) if type(x) is _Part else x for n, x in step.inputs}
        outputs = step.outputs
        if step.starts:
            outputs = outputs | {n: dataclasses.replace(outputs[n], start=take(x)) for n, x in step.starts}
        memory += launcher(step.how, inputs, outputs)
    return _mapped(program.results, _Part, take)


_PROGRAMS: dict[Any, _Program | None | bool] = {}
"""By kind of call, `MOST` at once: False after the first, None where it cannot be repeated."""


def repeatable(of: object, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)`, which launches kernels on the tensors in the nested tuples of `arguments`.

    Args:
      of: further inputs of the call, hashable.
    """
    tensors: list[Tensor] = []
    try:
        kind = _flat(arguments, tensors)
        places = [x.data_ptr() for x in tensors]
        # Tensors that are the same one, and where they are, are a part of the kind.
        key = (of, kind, tuple(map(places.index, places)), tensors[0].device)
        program = _PROGRAMS.get(key)
        seen = program is not None or key in _PROGRAMS
    except TypeError:  # something is not hashable
        return function(*arguments)
    if program:
        return _repeat(program, tensors)  # type: ignore[arg-type]
    if program is False and all(place % 16 == 0 for place in places):
        results, _PROGRAMS[key] = _record(lambda: function(*arguments), tensors)
        return results
    if not seen:
        if len(_PROGRAMS) >= MOST:
            _PROGRAMS.clear()
        _PROGRAMS[key] = False
    return function(*arguments)
