"""Einstein sums over `gemm`: the order of contraction by opt_einsum, every contraction of two operands as one product,
batched where it has to be.

With the indices of two operands sorted into those of both and of the result (batch), of both alone (contracted), of the
first and of the second, a contraction is `[batch, M, K] x [batch, K, N]`. gemm reads either operand transposed, so most
of them need no copy. The order comes from Smith and Gray, "opt_einsum" (2018), which jax brings along.
"""

from __future__ import annotations

import functools
import itertools
import math
import string
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import opt_einsum
from opt_einsum.parser import parse_einsum_input
from opt_einsum.paths import get_path_fn

from vishwamai.core.arguments import checked
from vishwamai.core.config import current_config
from vishwamai.core.errors import ShapeError
from vishwamai.core.precision import PrecisionConfig, lax_precision, resolve_precision
from vishwamai.core.sharding import Axes, follow_explicit_axes
from vishwamai.core.spec import static_size
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.matmul.api import gemm

if TYPE_CHECKING:
    from jax import Array
    from jaxtyping import Num

_FLOATS = ("bfloat16", "float16", "float32", "float64")


@checked
def einsum(
    equation: str,
    *operands: Num[Array, " *axes"],
    optimize: str | bool | Sequence[tuple[int, ...]] = "optimal",
    precision: str | PrecisionConfig | jax.lax.Precision | None = None,
    config: object = None,
    implementation: str | None = None,
) -> Num[Array, " *result"]:
    """The sum of products that `equation` names, as `jnp.einsum`, with every contraction of two operands over `gemm`.

    gemm gets what is a product: two floating operands with at least one index to contract and one to keep. jnp.einsum
    gets the rest: traces and diagonals (an index that an operand repeats), sums over an index of one operand alone,
    products without a contraction (outer, elementwise), scalar products of vectors, integers, complex numbers, 8-bit
    floats, and steps of one operand or, if `optimize` asks for them, of three or more. An axis of size 1 is broadcast.
    Intermediate results are rounded to the operands' common dtype.

    Args:
      equation: such as "bhqd,bhkd->bhqk": a letter for each axis, "..." for any leading ones; without "->" the result
        has the letters that occur once.
      operands: arrays of any dtype; float16, bfloat16, float32 and float64 go to gemm, and promote as in JAX.
      optimize: how opt_einsum finds the order of contraction: "optimal" (the fewest operations; slow for more than
        about eight operands), "auto", "greedy" ..., True for "auto", False for one step (no use of gemm beyond two
        operands), or the path itself.
      precision: mode of float32 products: "highest" (the default: float32 accuracy) or "high"; None takes the ambient
        one.
      config: argument of `gemm`.
      implementation: argument of `gemm`.

    Returns:
      The sum; it is differentiable through gemm's own gradient.

    Raises:
      ShapeError: the equation cannot be read, or does not fit the operands; or `optimize` is not a name that opt_einsum
        knows, or no path from these operands to one result.
      UnsupportedError: the implementation asked for cannot serve one of the products.

    >>> import jax.numpy as jnp
    >>> q, k = jnp.ones((2, 4, 3, 8)), jnp.ones((2, 4, 5, 8))
    >>> einsum("bhqd,bhkd->bhqk", q, k).shape
    (2, 4, 3, 5)
    >>> einsum("ij,jk,kl->il", jnp.ones((3, 4)), jnp.ones((4, 5)), jnp.ones((5, 2)))[0].tolist()
    [20.0, 20.0]
    """
    arrays = [jnp.asarray(operand) for operand in operands]
    steps = plan_steps(equation, arrays, optimize)
    products = resolve_precision(precision, current_config().precision, *(array.dtype for array in arrays))

    def plain(subscripts: str, *factors: AnyArray) -> AnyArray:
        return jnp.einsum(subscripts, *factors, precision=lax_precision(products))

    product = functools.partial(gemm, precision=precision, config=config, implementation=implementation)
    return contract(steps, arrays, plain, product, jnp.transpose, _on_explicit_axes)


def _on_explicit_axes(contraction: Callable[..., object], subscripts: str, factors: list[PyTree]) -> AnyArray:
    """One contraction, where operands may lie on explicit mesh axes: indices of the result stay split, what is summed
    over is gathered.
    """

    def axes() -> Axes:
        inputs, out = subscripts.split("->")
        terms = inputs.split(",")
        return Axes(
            tuple(map(tuple, terms)), tuple(out), frozenset(i for i in out if all(t.count(i) < 2 for t in terms))
        )

    return follow_explicit_axes(contraction, axes, *factors)


def contract(
    steps: list[tuple[tuple[int, ...], str]],
    arrays: list[AnyArray],
    plain: Callable[..., object],
    product: Callable[..., object],
    permute: Callable[[AnyArray, list[int]], AnyArray],
    run: Callable[..., object] = lambda contraction, subscripts, factors: contraction(*factors),
) -> AnyArray:
    """The result of the contractions that `plan_steps` gives, on arrays of any framework.

    Args:
      plain: the framework's own einsum, for what is not a product.
      product: `gemm` of two arrays with `transpose_a` and `transpose_b`.
      permute: `(array, axes) -> array`.
      run: `(contraction, subscripts, factors) -> array`, calls one contraction.
    """
    arrays = list(arrays)
    for positions, subscripts in steps:

        def contraction(*factors: AnyArray, subscripts: str = subscripts) -> AnyArray:
            inputs, out = subscripts.split("->")
            if len(factors) == 2 and all(str(factor.dtype).removeprefix("torch.") in _FLOATS for factor in factors):
                return _pair(inputs.split(","), out, list(factors), plain, product, permute)
            return plain(subscripts, *factors)

        chosen = [arrays[i] for i in positions]
        arrays = [x for i, x in enumerate(arrays) if i not in positions]
        arrays.append(run(contraction, subscripts, chosen))
    (result,) = arrays
    return result


def plan_steps(equation: str, arrays: list[AnyArray], optimize: Any) -> list[tuple[tuple[int, ...], str]]:
    """The contractions in order: which of the arrays that are left, and their subscripts; each result goes to the end
    of the list.

    Raises:
      ShapeError: as `einsum`.
    """
    if not isinstance(equation, str):
        raise ShapeError(f"einsum: `equation` is a {type(equation).__name__}; pass a string, such as 'ij,jk->ik'.")
    strange = sorted(set(equation) - set(string.ascii_letters + " ,.->"))
    if strange:
        raise ShapeError(
            f"einsum: `equation` {equation!r} has {strange[0]!r} in it; pass letters, ',', '->' and '...'."
        )
    shapes = [tuple(array.shape) for array in arrays]
    try:
        inputs, out, _ = parse_einsum_input((equation, *shapes), shapes=True)
    except (ValueError, TypeError) as error:
        raise ShapeError(
            f"einsum: `equation` {equation!r} does not fit {len(arrays)} operands of shapes "
            f"{', '.join(map(str, shapes)) or 'none'}: {error}; pass one letter for each axis of each operand, "
            "operands parted by commas, as in 'ij,jk->ik'."
        ) from error
    sizes: dict[str, int] = {}
    for term, shape in zip(inputs.split(","), shapes, strict=True):
        if len(term) != len(shape):
            raise ShapeError(
                f"einsum: `equation` {equation!r} gives {len(term)} letters, {term!r}, to an operand of shape {shape}; "
                f"pass one for each of its {len(shape)} axes."
            )
        for letter, size in zip(term, shape, strict=True):
            if size != 1 and sizes.setdefault(letter, size) != size:
                raise ShapeError(
                    f"einsum: index {letter!r} of `equation` {equation!r} has sizes {sizes[letter]} and {size} in "
                    f"operands of shapes {', '.join(map(str, shapes))}; make them equal, or 1 where an axis is shared."
                )
    check_optimize(optimize, len(arrays))
    if len(arrays) == 1 or optimize is False:
        return [(tuple(range(len(arrays)))[::-1], ",".join(inputs.split(",")[::-1]) + f"->{out}")]
    strategy = "auto" if optimize is True else optimize
    find_path: Any = (
        opt_einsum.contract_path
    )  # with `einsum_call` it also gives the contractions, which its types do not say
    sizes_of_path = [tuple(static_size(size, 1024) for size in shape) for shape in shapes]
    _, contractions = find_path(f"{inputs}->{out}", *sizes_of_path, shapes=True, optimize=strategy, einsum_call=True)
    return [(tuple(positions), subscripts) for positions, _, subscripts, *_ in contractions]


def check_optimize(optimize: str | bool | Sequence[tuple[int, ...]], operands: int) -> None:
    """Raises ShapeError where opt_einsum does not know the name, or the path does not take so many operands to one."""
    if isinstance(optimize, bool):
        return
    if isinstance(optimize, str):
        try:
            get_path_fn(optimize)
        except KeyError:
            raise ShapeError(
                f"einsum: `optimize` is {optimize!r}, which opt_einsum does not know; pass 'optimal', 'auto' or "
                "'greedy'."
            ) from None
        return
    left = operands
    for number, positions in enumerate(optimize):
        if not positions or len(set(positions)) != len(positions) or not all(0 <= i < left for i in positions):
            raise ShapeError(
                f"einsum: step {number} of `optimize` is {positions}, and {left} operands are left by then; pass "
                f"different positions from 0 to {left - 1} in each step."
            )
        left -= len(positions) - 1
    if left != 1:
        raise ShapeError(
            f"einsum: the path {optimize!r} of `optimize` leaves {left} of {operands} operands; pass pairs of "
            f"positions, such as {[(0, 1)] * (operands - 1)}, or 'optimal'."
        )


def _pair(
    terms: list[str],
    out: str,
    factors: list[PyTree],
    plain: Any,
    product: Any,
    permute: Any,
) -> AnyArray:
    """One contraction of two operands: over `product` where it is one, over `plain` where it is not."""
    sizes = {i: max(f.shape[t.index(i)] for t, f in zip(terms, factors) if i in t) for t in terms for i in t}
    reduced = []
    for term, factor, partner in zip(terms, factors, terms[::-1]):
        # An axis of size 1 beside a longer one is the same for all its positions; an index of one operand alone is
        # summed before; a diagonal is taken.
        remaining = "".join(
            dict.fromkeys(i for i in term if (i in partner or i in out) and factor.shape[term.index(i)] == sizes[i])
        )
        reduced.append(factor if remaining == term else plain(f"{term}->{remaining}", factor))
        terms = [remaining if t is term else t for t in terms]
    (a, b), (a_term, b_term) = reduced, terms
    shared = [i for i in a_term if i in b_term]
    contracted = [i for i in shared if i not in out]
    rows, columns = ([i for i in term if i not in shared] for term in terms)
    if not contracted or not (rows or columns):
        return plain(f"{a_term},{b_term}->{out}", a, b)
    assumed = tuple((index, static_size(size, 1024)) for index, size in sizes.items())
    turned, batch, (a_order, transpose_a), (b_order, transpose_b) = best_layout(a_term, b_term, out, assumed)
    if turned:
        a, b, a_term, b_term, rows, columns = b, a, b_term, a_term, columns, rows
    rows, columns = (_order(axes, out) for axes in (rows, columns))

    def matrix(x: AnyArray, term: str, order: str, split: int) -> AnyArray:
        x = permute(x, [term.index(i) for i in order])
        inner = (math.prod(x.shape[len(batch) : split]), math.prod(x.shape[split:]))
        return x.reshape(*((math.prod(x.shape[: len(batch)]),) if batch else ()), *inner)

    result = product(
        matrix(a, a_term, a_order, len(batch) + len(contracted if transpose_a else rows)),
        matrix(b, b_term, b_order, len(batch) + len(columns if transpose_b else contracted)),
        transpose_a=transpose_a,
        transpose_b=transpose_b,
    )
    indices = "".join((*batch, *rows, *columns))
    result = result.reshape([sizes[i] for i in indices])
    return permute(result, [indices.index(i) for i in out])


def _order(indices: Any, term: str) -> str:
    """The indices in the order of a term that has them all."""
    return "".join(i for i in term if i in indices)


def best_layout(
    a_term: str, b_term: str, out: str, sizes: tuple[tuple[str, int], ...]
) -> tuple[bool, str, tuple[str, bool], tuple[str, bool]]:
    """The layout of a product that copies the fewest elements, as `_layouts` yields it without their number."""
    shared = [i for i in a_term if i in b_term]
    contracted = [i for i in shared if i not in out]
    layouts = (
        plan
        for turned in (False, True)
        for order in dict.fromkeys((_order(contracted, a_term), _order(contracted, b_term)))
        for plan in _layouts(a_term, b_term, out, shared, order, turned, dict(sizes))
    )
    return min(layouts, key=lambda plan: plan[0])[1:]


def _layouts(
    a_term: str, b_term: str, out: str, shared: list[str], order: str, turned: bool, sizes: dict[str, int]
) -> Any:
    """Every way to lay out a product, each with the number of elements that it copies.

    Yields:
      (elements copied, turned, batch indices, (order of the first operand, transposed), (order of the second,
      transposed)).
    """
    if turned:
        a_term, b_term = b_term, a_term
    batch = _order([i for i in shared if i in out], out)
    rows, columns = (_order([i for i in term if i not in shared], out) for term in (a_term, b_term))

    def elements(term: str) -> int:
        return math.prod(sizes[i] for i in term)

    for transpose_a, transpose_b in itertools.product((False, True), repeat=2):
        a_order = batch + (order + rows if transpose_a else rows + order)
        b_order = batch + (columns + order if transpose_b else order + columns)
        copied = sum(
            elements(want)
            for want, have in ((a_order, a_term), (b_order, b_term), (batch + rows + columns, out))
            if want != have
        )
        yield copied, turned, batch, (a_order, transpose_a), (b_order, transpose_b)
