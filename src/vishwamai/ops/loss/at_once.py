"""The sum of the losses of tokens, whose gradients are computed with it, in one walk over the tokens.

The cotangents of the op's outputs may be anything, so its gradients have to wait for them and compute the logits again.
Those of a sum of losses are known up to one factor. Three products of the size of the logits, and where the weight has
no gradient two, then take the place of four (Hsu et al., "Liger Kernel", 2024). Tokens without a loss take none.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from vishwamai.core import dims, execute, ffi, observe
from vishwamai.core.call_plan import CallPlan
from vishwamai.core.config import ambient_target
from vishwamai.core.jax_private import is_linearized
from vishwamai.core.promotion import by_default
from vishwamai.core.sharding import Axes, explicit_mesh, partitioned
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.loss.compose import compose
from vishwamai.ops.loss.cpu import NATIVE, TOTAL, total_with_gradients
from vishwamai.ops.loss.spec import SIGNATURE, Operands


class Tokens(NamedTuple):
    """The arrays of a sum."""

    x: Annotated[AnyArray, "tokens features"]
    weight: Annotated[AnyArray, "vocab features"]  # of x's dtype
    bias: Annotated[AnyArray, "vocab", "optional"]  # in the accumulation dtype
    labels: Annotated[AnyArray, "tokens"]  # int32
    shares: Annotated[AnyArray, "tokens"]  # in the accumulation dtype: what each loss is multiplied by; 0: it has none


class Slopes(NamedTuple):
    """The gradients of a sum, in the accumulation dtype."""

    x: Annotated[AnyArray, "tokens features"]
    weight: Annotated[AnyArray, "vocab features", "optional"]
    bias: Annotated[AnyArray, "vocab", "optional"]


@dataclasses.dataclass(frozen=True)
class Sum:
    """What is summed: the losses of `plan`'s tokens, with these options of `linear_cross_entropy`."""

    plan: CallPlan
    label_smoothing: float
    z_loss: float

    def unmerged(self, tokens: Tokens) -> AnyArray:
        """The sum by the op, whose gradients compute the logits again."""
        arrays, shares = Operands(*tokens[:4], None), tokens.shares
        outputs = execute.run(self.plan, SIGNATURE.pack(arrays))
        numbers = SIGNATURE.unpack(self.plan.spec, outputs, arrays)
        rest = self.label_smoothing, self.z_loss, "sum"
        return compose(jnp, numbers, tokens.weight.shape[0], shares != 0, False, shares, *rest)


def expected(arrays: object) -> bool:
    """Whether the program is made for a CPU, of arrays that no mesh splits by their types, and not by `jax.linearize`.

    Whoever watches the passes of the op, as a profile does, sees them: under it they run.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return (
        ambient_target().platform == "cpu"
        and explicit_mesh(arrays) is None
        and not is_linearized(arrays)
        and not mesh.manual_axes
        and not mesh.explicit_axes
        and observe.interceptor() is None
        and not observe.dry_run()
    )


def serves(plan: CallPlan) -> bool:
    """Whether the CPU's kernel, which alone has such a walk, would run."""
    choice = plan.choice("cpu")
    return choice.implementation is NATIVE and ffi.why_not(choice.target, TOTAL) is None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(loss_sum: Sum, tokens: Tokens) -> jax.Array:
    """The sum; differentiable by `x`, `weight` and `bias`."""
    return loss_sum.unmerged(tokens)


def _total_fwd(loss_sum: Sum, tokens: Tokens) -> tuple[PyTree, Slopes]:
    of_weight = tokens.weight.perturbed
    primals = jax.tree.map(lambda leaf: leaf.value, tokens, is_leaf=lambda node: hasattr(node, "perturbed"))
    return _with_slopes(loss_sum, of_weight, primals)


def _total_bwd(loss_sum: Sum, slopes: Slopes, cotangent: AnyArray) -> tuple[Tokens]:
    if isinstance(cotangent, SymbolicZero):
        like: Any = cotangent.aval
        cotangent = jnp.zeros(like.shape, like.dtype)
    dtype = loss_sum.plan.spec.operands.x.dtype
    scaled = jax.tree.map(lambda slope: slope * cotangent, slopes)
    x, weight = jax.tree.map(lambda slope: slope.astype(dtype), (scaled.x, scaled.weight))
    return (Tokens(x, weight, scaled.bias, None, None),)


total.defvjp(by_default(_total_fwd), by_default(_total_bwd), symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_slopes(loss_sum: Sum, of_weight: bool, tokens: Tokens) -> tuple[PyTree, Slopes]:
    """(the sum, its gradients); differentiable once more through the op."""
    return _batchable(loss_sum, of_weight)(tokens)


def _with_slopes_fwd(loss_sum: Sum, of_weight: bool, tokens: Tokens) -> tuple[PyTree, Tokens]:
    return _with_slopes(loss_sum, of_weight, tokens), tokens


def _with_slopes_bwd(loss_sum: Sum, of_weight: bool, tokens: Tokens, cotangents: PyTree) -> tuple[Tokens]:
    floats = Slopes(tokens.x, tokens.weight, tokens.bias)
    pull = jax.vjp(lambda floats: _unmerged(loss_sum, of_weight, tokens._replace(**floats._asdict())), floats)[1]
    (slopes,) = pull(cotangents)
    return (Tokens(slopes.x, slopes.weight, slopes.bias, None, None),)


_with_slopes.defvjp(by_default(_with_slopes_fwd), by_default(_with_slopes_bwd))


def _unmerged(loss_sum: Sum, of_weight: bool, tokens: Tokens) -> tuple[PyTree, Slopes]:
    """`_with_slopes` by the op."""
    merged = jax.value_and_grad(lambda floats: loss_sum.unmerged(tokens._replace(**floats._asdict())))
    loss, slopes = merged(Slopes(tokens.x, tokens.weight, tokens.bias))
    slopes = jax.tree.map(lambda slope: slope.astype(loss.dtype), slopes)
    return loss, slopes if of_weight else slopes._replace(weight=None)


@functools.lru_cache(maxsize=4096)
def _batchable(loss_sum: Sum, of_weight: bool) -> Callable[..., PyTree]:
    mapped = jax.custom_batching.custom_vmap(by_default(functools.partial(_by_platform, loss_sum, of_weight)))

    @mapped.def_vmap
    @by_default
    def rule(size: int, in_batched: list[object], tokens: Tokens) -> tuple[PyTree, PyTree]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched[0])
        unmerged = functools.partial(_unmerged, loss_sum, of_weight)
        results = jax.vmap(unmerged, in_axes=(axes,), axis_size=size)(tokens)
        return results, jax.tree.map(lambda _: True, results)

    return mapped


def _by_platform(loss_sum: Sum, of_weight: bool, tokens: Tokens) -> tuple[PyTree, Slopes]:
    def native(tokens: Tokens) -> tuple[PyTree, Slopes]:
        spec, rest = loss_sum.plan.spec, (loss_sum.label_smoothing, loss_sum.z_loss)
        loss, *slopes = total_with_gradients(spec, *tokens, *rest, of_weight=of_weight)
        return loss, Slopes(*slopes)

    def factors(arrays: Any) -> Any:
        texts = zip(arrays, dims.declared(type(arrays)), strict=True)
        return type(arrays)(*(None if x is None else dims.factors(text, x.ndim) for x, text in texts))

    results = Slopes(tokens.x, tokens.weight if of_weight else None, tokens.bias)  # of these shapes
    axes = Axes((factors(tokens),), ((), factors(results)), frozenset({"tokens"}))
    return execute.by_platform(
        functools.partial(_unmerged, loss_sum, of_weight), {"cpu": partitioned(native, axes)}, tokens
    )
