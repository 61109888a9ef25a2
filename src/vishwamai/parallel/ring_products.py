"""The rings of `products.py` with their gradients. A device multiplies whole pieces by our kernels.

With z = gathered(x) @ w + bias and y = act(z): dx is the reduce-scatter of dz @ w^T, which is a ring too, and dw = the
sum over the pieces of x_piece^T @ dz_piece, for which x goes around once more. So no device keeps the rows of all.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp

from vishwamai.core.errors import UnsupportedError
from vishwamai.core.precision import accumulator_dtype
from vishwamai.core.signature import array_specs
from vishwamai.core.types import AnyArray, PyTree
from vishwamai.ops.gated import GATED, gated_linear_unit
from vishwamai.ops.gated.reference import slopes
from vishwamai.ops.gated.spec import SIGNATURE as GATED_SIGNATURE
from vishwamai.ops.gated.spec import Operands as GatedOperands
from vishwamai.ops.gated.spec import describe
from vishwamai.ops.matmul import MATMUL, gemm
from vishwamai.ops.matmul.batch_layout import make_spec, signature
from vishwamai.ops.matmul.epilogue import derivative
from vishwamai.ops.matmul.spec import Operands
from vishwamai.parallel.ring_pieces import RingPieces

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Static:
    """What is static about a call.

    Attributes:
      pieces: the ring.
      precision: mode of the products, forward and backward.
      implementation: name for the products, forward and backward.
      activation, out_dtype: options of the result.
      config: configuration of a product of the forward pass.
    """

    pieces: RingPieces
    precision: str
    implementation: str | None
    activation: str | None
    out_dtype: jnp.dtype
    config: object

    def product(self, a: jax.Array, b: jax.Array, **options: Any) -> jax.Array:
        """`a @ b` in the dtype of its sums."""
        wide = accumulator_dtype(a.dtype)
        return gemm(a, b, precision=self.precision, implementation=self.implementation, out_dtype=wide, **options)


def _weight_gradient(static: Static, pairs: Iterable[tuple[jax.Array, jax.Array]], dtype: DTypeLike) -> jax.Array:
    """The sum of a^T @ b over pairs of pieces, `[..., rows, .]` each."""
    # Lazily: a piece is multiplied when it is asked for, so the next transfer is traced before the product that hides
    # it.
    parts = (static.product(_flat(a), _flat(b), transpose_a=True) for a, b in pairs)
    return functools.reduce(jnp.add, parts).astype(dtype)


def _flat(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])  # [rows of all batch elements, features]: a weight's gradient sums over both


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_product(static: Static, x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
    """`act(gathered(x) @ w + bias)`, from this device's rows of x."""
    gathered = static.pieces.gathered(x)
    options = {"activation": static.activation, "out_dtype": static.out_dtype, "precision": static.precision}
    run = functools.partial(gemm, b=w, bias=bias, config=static.config, implementation=static.implementation, **options)
    # [..., devices * rows, columns]
    return static.pieces.joined((distance, run(piece)) for distance, piece in gathered)


def _gathered_forward(
    static: Static, x: jax.Array, w: jax.Array, bias: jax.Array
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    of_caller = signature(False, False)

    def piece_of(x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        arrays = Operands(x, w, bias, None, None)
        spec = make_spec(array_specs(arrays), static.activation, False, False, static.precision, static.out_dtype)
        outputs, z = MATMUL.with_residuals(
            spec, of_caller.pack(arrays, spec), config=static.config, implementation=static.implementation
        )
        y = of_caller.unpack(spec, outputs, arrays).out
        return y, None if z is None else z.reshape(y.shape)

    y, z = static.pieces.joined((distance, piece_of(piece)) for distance, piece in static.pieces.gathered(x))
    # relu's derivative is read off y. Other activations keep their argument z; without one neither is kept.
    return y, (x, w, bias, y if static.activation == "relu" else None, z)


def _gathered_backward(static: Static, saved: PyTree, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    return _gathered_gradients(static, saved, dy)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gathered_gradients(static: Static, saved: PyTree, dy: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, bias, y, z = saved
    wide = accumulator_dtype(x.dtype)
    dz = dy.astype(wide)
    if y is not None:
        dz = jnp.where(y > 0, dz, 0)
    elif z is not None:
        assert static.activation is not None  # whose argument was kept
        dz = dz * derivative(static.activation, z.astype(wide))
    dbias = None if bias is None else jnp.sum(dz, range(dz.ndim - 1)).astype(bias.dtype)
    dz = dz.astype(x.dtype)  # products take the operands' dtype; the activation's slope was applied in the wide one
    pieces = static.pieces
    # The transpose of an all-gather is a reduce-scatter: each device sums what all have for its own rows.
    dx = pieces.reduced(lambda d: static.product(pieces.rows(dz, d), w, transpose_b=True), x.dtype).astype(x.dtype)
    # x goes around again, and meets the rows of dz that it made
    pairs = ((piece, pieces.rows(dz, -d)) for d, piece in pieces.gathered(x))
    return dx, _weight_gradient(static, pairs, w.dtype), dbias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scattered_product(static: Static, x: jax.Array, w: jax.Array) -> jax.Array:
    """This device's rows of the sum of all devices' `x @ w`, in the dtype of sums; they travel in `out_dtype`."""
    pieces = static.pieces
    product = functools.partial(static.product, b=w, config=static.config)
    return pieces.reduced(lambda distance: product(pieces.rows(x, distance)), static.out_dtype)


def _scattered_forward(static: Static, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    return scattered_product(static, x, w), (x, w)


def _scattered_backward(static: Static, saved: PyTree, dz: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w = saved
    pieces, gathered = static.pieces, []  # one trip of dz serves both gradients: its pieces are noted on the way

    def piece_of(distance: int, piece: jax.Array) -> jax.Array:
        gathered.append((pieces.rows(x, -distance), piece))
        return static.product(piece, w, transpose_b=True).astype(x.dtype)

    dx = pieces.joined((d, piece_of(d, piece)) for d, piece in pieces.gathered(dz.astype(x.dtype)))
    return dx, _weight_gradient(static, gathered, w.dtype)  # after `joined`, which has run the generator to its end


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_gated(static: Static, x: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """`act(gathered(x) @ gate) * (gathered(x) @ up)`, from this device's rows of x."""
    options = {"config": static.config, "implementation": static.implementation, "precision": static.precision}
    run = functools.partial(gated_linear_unit, weights=(gate, up), activation=static.activation, **options)
    return static.pieces.joined((distance, run(piece)) for distance, piece in static.pieces.gathered(x))


def _gated_forward(
    static: Static, x: jax.Array, gate: jax.Array, up: jax.Array
) -> tuple[jax.Array, tuple[jax.Array | None, ...]]:
    def piece_of(x: jax.Array) -> tuple[jax.Array, PyTree]:
        arrays = GatedOperands(x, gate, up, None)
        spec = describe(array_specs(arrays), static.activation, static.precision)
        outputs, residuals = GATED.with_residuals(
            spec, GATED_SIGNATURE.pack(arrays, spec), config=static.config, implementation=static.implementation
        )
        h = GATED_SIGNATURE.unpack(spec, outputs, arrays).h
        return h, jax.tree.map(lambda z: z.reshape(h.shape), residuals)

    gathered = static.pieces.gathered(x)
    h, residuals = static.pieces.joined((distance, piece_of(piece)) for distance, piece in gathered)
    return h, (x, gate, up, residuals)


def _gated_backward(static: Static, saved: PyTree, dh: jax.Array) -> tuple[jax.Array | None, ...]:
    return _gated_gradients(static, saved, dh)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated_gradients(static: Static, saved: PyTree, dh: jax.Array) -> tuple[jax.Array | None, ...]:
    x, gate, up, residuals = saved
    weights = [gate, up]
    arrays = GatedOperands(x, gate, up, None)
    spec = describe(array_specs(arrays), static.activation, static.precision)
    dz, pieces = slopes(spec, residuals, dh), static.pieces

    def to_x(distance: int) -> Any:
        return sum(
            static.product(pieces.rows(d, distance), w, transpose_b=True) for d, w in zip(dz, weights, strict=True)
        )

    dx = pieces.reduced(to_x, x.dtype).astype(x.dtype)
    gathered = list(pieces.gathered(x))  # a list: the gradients of both weights read the pieces
    dw = (
        _weight_gradient(static, ((piece, pieces.rows(piece_gradient, -d)) for d, piece in gathered), x.dtype)
        for piece_gradient in dz
    )
    return dx, *dw


def _once(gradients: PyTree, static: Static, saved: PyTree, cotangent: AnyArray) -> tuple[PyTree, None]:
    return gradients(static, saved, cotangent), None


def _twice(static: Static, saved: PyTree, cotangents: PyTree) -> NoReturn:
    raise UnsupportedError(
        "a product with its all-gather as a ring is differentiable once; for a second derivative pass overlap=False."
    )


# The gradients have a rule of their own, so that a second derivative fails by name and not inside `ppermute`'s.
_gathered_gradients.defvjp(functools.partial(_once, _gathered_gradients), _twice)
_gated_gradients.defvjp(functools.partial(_once, _gated_gradients), _twice)
gathered_product.defvjp(_gathered_forward, _gathered_backward)
scattered_product.defvjp(_scattered_forward, _scattered_backward)
gathered_gated.defvjp(_gated_forward, _gated_backward)
