"""What the benchmark must know of an operation in addition to its cases: which peers to compare with, which part of a
big result to check, how to make it smaller.

The defaults serve any operation: no peers, the whole result is checked, nothing is made smaller. `bench/norm.py`,
`gemm.py` and `attention.py` know more of theirs.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from vishwamai.core.cases import Case
from vishwamai.core.types import PyTree

if TYPE_CHECKING:
    from torch import Tensor

Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Peer:
    """The framework's own way to compute a case.

    Attributes:
      name: called function: "jax.nn.dot_product_attention", "torch layer_norm".
      framework: "jax", "torch" or "numpy".
      prepare: the case's arrays (NumPy) to this peer's arguments, in its own layout; not timed.
      call: the arguments to the result. Jitted for "jax".
      restore: the result, as a NumPy array, to the layout of ours; its own inverse; not timed.
      arguments: names of the case's arrays behind the peer's arguments, in order.
      laid_out: names of the arrays that `restore` applies to.
      checked: its result is the case's; not that of a random function with dice of its own.
    """

    name: str
    framework: str
    prepare: Callable[[Arrays], tuple[object, ...]]
    call: Callable[..., PyTree]
    restore: Callable[[PyTree], PyTree] = lambda result: result
    arguments: tuple[str, ...] = ()
    laid_out: frozenset[str] = frozenset()
    checked: bool = True


@dataclasses.dataclass(frozen=True)
class Sample:
    """A part of a case that can be computed by itself.

    Attributes:
      case: a smaller case whose result is that part.
      arrays: its arrays.
      pick: takes the part out of the whole result, a tuple of NumPy arrays.
      words: description: "64 of 4096 rows".
    """

    case: Case
    arrays: Arrays
    pick: Callable[[tuple[np.ndarray, ...]], tuple[np.ndarray, ...]]
    words: str


class Subject:
    """What the benchmark knows of one operation.

    Attributes:
      slack: how much slower than its own rate in a plain matrix product the slowest candidate is reckoned to be, in
        deciding how big a case to run.
    """

    slack = 3.0

    def peers(self, case: Case) -> list[Peer]:
        """The framework's own ways to compute exactly this; those that mean something else are left out."""
        del case
        return []

    def in_torch(self, case: Case) -> Peer | None:
        """`vishwamai.torch`'s own function for the case; None where it has none of that name."""
        return ours_in_torch(case)

    def sample(self, case: Case, arrays: Arrays) -> Sample:
        """The part of the result that is checked against the float64 reference; the whole where that is affordable."""
        return Sample(case, arrays, lambda outputs: outputs, "the whole result")

    def gradient_sample(self, case: Case, arrays: Arrays) -> Sample:
        """The same of a case of `bench.gradient`, whose results are the gradients of its arrays."""
        return Sample(case, arrays, lambda outputs: outputs, "all gradients")

    def smaller(self, case: Case, share: float) -> Case | None:
        """The same for fewer tokens, so that it costs about `share` of the work, or the least that still means the
        same; None where nothing gets less.
        """
        del case, share
        return None


def subject(op: str) -> Subject:
    """The subject for an op by name."""
    name = f"vishwamai.bench.subjects.{op}"
    return importlib.import_module(name).SUBJECT if importlib.util.find_spec(name) else Subject()


def resized(case: Case, axes: Mapping[str, Mapping[int, int]], note: str) -> Case:
    """The case with other sizes: for each array, axis -> new size.

    >>> from vishwamai.ops.catalogue import operations
    >>> llama = next(c for c in operations()["norm"].cases if c.name == "Llama 3 8B")
    >>> resized(llama, {"x": {0: 64}, "residual": {0: 64}}, "64 of 4096 tokens").arrays["x"].shape
    (64, 4096)
    """

    def shape(name: str, old: tuple[int, ...]) -> tuple[int, ...]:
        new = list(old)
        for axis, size in axes.get(name, {}).items():
            new[axis] = size
        return tuple(new)

    arrays = {name: dataclasses.replace(init, shape=shape(name, init.shape)) for name, init in case.arrays.items()}
    return dataclasses.replace(case, name=f"{case.name}, {note}", arrays=arrays)


def halvings(size: int, share: float, floor: int, power: float = 1.0) -> int:
    """`size` halved until its `power` is at most `share` of what it was, but not below `floor`.

    >>> halvings(4096, 0.3, floor=128), halvings(4096, 0.3, floor=128, power=2), halvings(4096, 0.001, floor=128)
    (1024, 2048, 128)
    """
    new = size
    while (new / size) ** power > share and new // 2 >= floor:
        new //= 2
    return new


def jax_peer(name: str, case: Case, call: Callable[..., object], **how: Any) -> Peer:
    """A peer that takes the case's arrays as they are, in their order."""
    names = tuple(case.arrays)
    return Peer(name, "jax", lambda arrays: tuple(arrays[n] for n in names), call, arguments=names, **how)


def torch_peer(name: str, case: Case, call: Callable[..., object], **how: Any) -> Peer:
    """A peer that takes the case's arrays as tensors, in their order."""
    names = tuple(case.arrays)

    def prepare(arrays: Arrays) -> tuple[object, ...]:
        return tuple(to_torch(arrays[n]) for n in names)

    return Peer(name, "torch", prepare, call, arguments=names, **how)


def ours_in_torch(case: Case, call: Callable[..., object] | None = None) -> Peer | None:
    """The function of `vishwamai.torch` that bears the name of the case's, or `call`, of tensors by the names of the
    case's arrays; None where it does not have all arguments. Options that are arrays become tensors too.
    """
    import torch

    import vishwamai.torch as ours

    function = getattr(ours, case.call.__name__, None) if call is None else call
    if function is None:
        return None
    names = (*case.arrays, *(name for name, value in case.options.items() if _holds_arrays(value)))
    rest: dict[str, Any] = {name: value for name, value in case.options.items() if name not in names}
    if isinstance(rest.get("out_dtype"), str):
        rest["out_dtype"] = getattr(torch, rest["out_dtype"])
    parameters = inspect.signature(function).parameters
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not open_ended and not {*names, *rest} <= set(parameters):
        return None

    def prepare(arrays: Arrays) -> tuple[object, ...]:
        return tuple(jax.tree.map(to_torch, {**case.options, **arrays}[name]) for name in names)

    return Peer(
        "vishwamai.torch", "torch", prepare, lambda *x: function(**dict(zip(names, x)), **rest), arguments=names
    )


def _holds_arrays(value: object) -> bool:
    """An array, or a tuple of them."""
    parts = value if isinstance(value, tuple) else (value,)
    return bool(parts) and all(isinstance(part, np.ndarray) for part in parts)


def sample_of_rows(case: Case, arrays: Arrays, names: Sequence[str], count: int) -> Sample | None:
    """`count` rows of the arrays `names`, each of `[..., features]`, and the same rows of every result; None where
    there are no more.
    """
    shape = case.arrays[names[0]].shape
    total = int(np.prod(shape[:-1]))
    if total <= count:
        return None
    rows = np.sort(np.random.default_rng(0).choice(total, count, replace=False))

    def take(x: np.ndarray) -> np.ndarray:
        return x.reshape(total, x.shape[-1])[rows]

    chosen = {name: take(x) if name in names else x for name, x in arrays.items()}
    inits = {name: dataclasses.replace(case.arrays[name], shape=x.shape) for name, x in chosen.items()}
    return Sample(
        dataclasses.replace(case, arrays=inits),
        chosen,
        lambda outputs: tuple(map(take, outputs)),
        f"{count} of {total} rows",
    )


def fewer_rows(case: Case, share: float, names: Sequence[str]) -> Case | None:
    """The case with fewer rows of the arrays `names`, whose first axis they are; None where there are few already."""
    rows = case.arrays[names[0]].shape[0]
    new = halvings(rows, share, floor=128)
    if new == rows:
        return None
    axes = {name: {0: new} for name in names if name in case.arrays}
    return resized(case, axes, f"cut to {new} of {rows} tokens")


def to_torch(x: np.ndarray) -> Tensor:
    """A NumPy array (bfloat16 included) as a torch tensor that shares its memory."""
    import torch

    x = np.asarray(x)
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    if x.dtype.name.startswith("float8"):
        return torch.from_numpy(x.view(np.uint8)).view(getattr(torch, x.dtype.name))
    return torch.from_numpy(x)


def from_torch(x: Tensor) -> np.ndarray:
    """A torch tensor as a NumPy array; bfloat16 becomes float32, exactly."""
    x = x.detach().cpu()
    return (x.float() if x.is_floating_point() and x.dtype.itemsize <= 2 else x).numpy()
