"""What attention over chosen tokens computes: operands, options, and the checks that all platforms share."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, NamedTuple

import jax.numpy as jnp

from vishwamai.core.errors import ShapeError
from vishwamai.core.shape_checks import check_float
from vishwamai.core.signature import Signature, described
from vishwamai.core.spec import QueryKeySpec
from vishwamai.core.types import AnyArray


class Operands(NamedTuple):
    """Operands in the op's own layout; `batch` counts folded vmap axes. Query head h reads kv head h // (Hq // Hkv)."""

    query: Annotated[AnyArray, "batch heads q_len qk_dim"]
    key: Annotated[AnyArray, "batch heads/ kv_len qk_dim"]
    indices: Annotated[AnyArray, "batch? q_len chosen"]  # int32
    value: Annotated[AnyArray, "batch heads/ kv_len v_dim", "optional"] = None


class Outputs(NamedTuple):
    """`out` in the query's dtype."""

    out: Annotated[AnyArray, "batch heads q_len v_dim"]


@dataclasses.dataclass(frozen=True)
class IndexedSpec(QueryKeySpec):
    """Attention of each query over the keys that its row of `indices` names.

    Attributes:
      scale: multiplies q.k.
      value_dim: features of a value; without the operand `value` they are the key's first ones.
    """

    scale: float = 1.0
    value_dim: int = 0

    @property
    def chosen(self) -> int:
        """Entries of `indices` for each query."""
        return self.operands.indices.shape[2]

    def tuning_key(self) -> str:
        sizes = f"{self.batch}x{self.q_heads}/{self.kv_heads}x{self.q_len}x{self.kv_len}x{self.qk_dim}x{self.value_dim}"
        return f"{self.operands.query.dtype.name} {sizes} of {self.chosen}"

    @property
    def flops(self) -> int:
        """Floating-point operations of both products (a multiply-add is two)."""
        return 2 * self.batch * self.q_heads * self.q_len * self.chosen * (self.qk_dim + self.value_dim)

    @property
    def bytes_moved(self) -> int:
        """Bytes that must move: queries, results, and each chosen key and value once for each query."""
        query, key = self.operands.query, self.operands.key
        features = self.qk_dim if self.operands.value is None else self.qk_dim + self.value_dim
        rows = self.batch * self.kv_heads * self.q_len * self.chosen
        out = self.batch * self.q_heads * self.q_len * self.value_dim * query.dtype.itemsize
        return query.nbytes + self.operands.indices.nbytes + out + rows * features * key.dtype.itemsize


SIGNATURE = Signature(
    Operands(
        "batch heads q_len qk_dim", "batch heads/ kv_len qk_dim", "batch? q_len chosen", "batch heads/ kv_len v_dim"
    ),
    Outputs("batch heads q_len v_dim"),
)


@described
def describe(operands: Operands, scale: float | None, value_dim: int | None) -> IndexedSpec:
    """The spec of the caller's arrays (their `ArraySpec`s), checked.

    Args:
      scale: None for the inverse square root of qk_dim.
      value_dim: features of the key that are the value too; None with the operand `value`.

    Raises:
      ShapeError: an argument is not legal or does not fit the others; the text names it, its value and the fix.
    """
    name = "indexed_attention"
    query, key, value = operands.query, operands.key, operands.value
    check_float(name, "query", query.dtype)
    SIGNATURE.check(name, operands)
    for label in ("key", "value"):
        array = getattr(operands, label)
        if array is not None and array.dtype != query.dtype:
            raise ShapeError(
                f"{name}: `{label}` has dtype {array.dtype.name}, but `query` {query.dtype.name}; pass one dtype."
            )
    if not jnp.issubdtype(operands.indices.dtype, jnp.integer):
        raise ShapeError(f"{name}: `indices` has dtype {operands.indices.dtype.name}; pass integers, such as int32.")
    if (value is None) == (value_dim is None):
        raise ShapeError(
            f"{name}: `value` and `value_dim` are both {'absent' if value is None else 'set'}; "
            "pass one: an array, or the number of the key's first features that are the value too."
        )
    dim = key.shape[3]
    if value_dim is not None and not 0 <= value_dim <= dim:
        raise ShapeError(f"{name}: `value_dim` is {value_dim}, but a key has {dim} features; pass at most {dim}.")
    features = value.shape[3] if value_dim is None else value_dim
    factor = math.sqrt(1 / max(1, query.shape[3])) if scale is None else float(scale)
    return IndexedSpec(SIGNATURE.specs(operands), factor, features)
