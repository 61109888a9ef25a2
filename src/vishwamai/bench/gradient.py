"""The same benchmark for gradients: a case becomes one whose results are the gradients of its arrays, a peer
likewise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai.bench.subject import Arrays, Peer
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.core.types import AnyArray

if TYPE_CHECKING:
    from torch import Tensor

_COTANGENT = "cotangent_"


def has_gradient(case: Case) -> bool:
    """Whether the operation's first array has a gradient: not one of int8 or 8-bit floats."""
    first = next(iter(case.arrays))
    return first in case.differentiable and not case.arrays[first].dtype.startswith("float8")


def gradient_case(case: Case) -> Case | None:
    """A case whose call also takes a cotangent for every result, and gives the gradients of its floating arrays in
    their order.

    None where the case has no gradient (`has_gradient`).

    >>> from vishwamai.ops.catalogue import operations
    >>> case = gradient_case(operations()["norm"].cases[0])
    >>> list(case.arrays), [g.shape for g in jax.tree.leaves(case.run(case.make()))]
    (['x', 'scale', 'offset', 'cotangent_0'], [(4, 16, 256), (256,), (256,)])
    """
    if not has_gradient(case):
        return None
    results = jax.tree.leaves(jax.eval_shape(lambda arrays: case.run(arrays), case.shapes()))
    cotangents = {f"{_COTANGENT}{i}": ArrayInit(x.shape, x.dtype.name) for i, x in enumerate(results)}
    names = case.differentiable

    def call(**values: Any) -> tuple[AnyArray, ...]:
        outer = {name: values.pop(name) for name in cotangents}
        arrays = {name: jnp.asarray(values.pop(name)) for name in case.arrays}

        def leaves(floats: Mapping[str, object]) -> list[jax.Array]:
            return jax.tree.leaves(case.call(**{**arrays, **floats}, **values))

        outputs, pull = jax.vjp(leaves, {name: arrays[name] for name in names})
        (gradients,) = pull([g.astype(y.dtype) for g, y in zip(outer.values(), outputs, strict=True)])
        return tuple(gradients[name] for name in names)

    name = f"{case.name}, forward and backward"
    return dataclasses.replace(case, name=name, call=call, arrays={**case.arrays, **cotangents})


def work(case: Case, spec: Any) -> tuple[int, int]:
    """(FLOP, bytes) of forward and backward pass together, of a case from `gradient_case`.

    A backward pass is twice the forward's arithmetic unless the spec says otherwise; it reads the arrays and the
    cotangents again and writes the gradients.
    """
    backward = getattr(spec, "backward_flops", 2 * spec.flops)
    sizes = {name: int(np.prod(s.shape)) * s.dtype.itemsize for name, s in case.shapes().items()}
    gradients = sum(sizes[name] for name in case.differentiable if not name.startswith(_COTANGENT))
    return spec.flops + backward, spec.bytes_moved + sum(sizes.values()) + gradients


def gradient_peer(peer: Peer, case: Case) -> Peer:
    """The peer's own gradients, by the framework's own differentiation; `case` is the one that `gradient_case` was
    given.
    """
    positions = [peer.arguments.index(name) for name in case.differentiable]
    count = len(jax.tree.leaves(jax.eval_shape(lambda arrays: case.run(arrays), case.shapes())))

    def prepare(arrays: Arrays) -> tuple[object, ...]:
        cotangents = [peer.restore(arrays[f"{_COTANGENT}{i}"]) for i in range(count)]
        if peer.framework == "torch":
            from vishwamai.bench.subject import to_torch

            cotangents = [to_torch(np.asarray(x, order="C")) for x in cotangents]
        return (*peer.prepare(arrays), tuple(cotangents))

    differentiate = _torch(peer, positions) if peer.framework == "torch" else _jax(peer, positions)
    # Cases list their arrays in the order of the peers' arguments, so the gradients come in the order of
    # `case.differentiable`.
    return dataclasses.replace(peer, prepare=prepare, call=differentiate)


def restored(peer: Peer, case: Case, gradients: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
    """A peer's gradients in our layout."""
    pairs = zip(case.differentiable, gradients, strict=True)
    return tuple(peer.restore(x) if name in peer.laid_out else x for name, x in pairs)


def _jax(peer: Peer, positions: list[int]) -> Callable[..., tuple[jax.Array, ...]]:
    def call(*arguments: Any) -> tuple[AnyArray, ...]:
        *inputs, cotangents = arguments

        def leaves(floats: list[jax.Array]) -> list[jax.Array]:
            replaced = list(inputs)
            for i, x in zip(positions, floats, strict=True):
                replaced[i] = x
            return jax.tree.leaves(peer.call(*replaced))

        outputs, pull = jax.vjp(leaves, [inputs[i] for i in positions])
        return tuple(pull([g.astype(y.dtype) for g, y in zip(cotangents, outputs, strict=True)])[0])

    return call


def _torch(peer: Peer, positions: list[int]) -> Callable[..., tuple[Tensor, ...]]:
    def call(*arguments: Any) -> tuple[AnyArray, ...]:
        import torch

        *inputs, cotangents = arguments
        leaves = {i: inputs[i].detach().requires_grad_() for i in positions}
        outputs = peer.call(*(leaves.get(i, x) for i, x in enumerate(inputs)))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        # Zeros for an argument that has no gradient, as JAX gives them.
        return torch.autograd.grad(outputs, [leaves[i] for i in positions], cotangents, materialize_grads=True)

    return call
