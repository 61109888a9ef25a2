"""`pack_weight` of torch tensors on the CPU, and the product with what it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.core import dims
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.signature import Signature
from vishwamai.ops.matmul import packed_weight
from vishwamai.ops.matmul.packed import PACKED, Operands, check_packed, describe_packed
from vishwamai.ops.matmul.spec import Outputs
from vishwamai.torch import bridge
from vishwamai.torch.operator import TorchOperator

_packed = TorchOperator(
    PACKED,
    Outputs,
    Signature(dims.declared(Operands), Outputs("groups m n")),
    describe_packed,
    gradients=("a", "bias", "scale_a", "scale_b"),
    saves=lambda call: (*Operands._fields, *(("out",) if call.activation == "relu" else ())),
    dtypes=lambda call: (_out_dtype(call),),
    sizes=lambda call: {"n": call.shape[1]},
    one_by_one=True,
)


def _out_dtype(call: Any) -> torch.dtype:
    if call.out_dtype is not None:
        return getattr(torch, call.out_dtype)
    plain = call.activation is None and all(x is None for x in call.operands[2:])
    dtype = call.operands.a.dtype
    return dtype if dtype != torch.int8 else torch.int32 if plain else torch.float32


class PackedWeight(packed_weight.PackedWeight):
    """A `vishwamai.PackedWeight` whose data is a torch tensor."""

    data: Any

    def unpack(self) -> Any:
        """The weight as it was, bit for bit."""
        return bridge.on_cpu(
            lambda x: packed_weight.PackedWeight(x, self.shape, self.dtype, self.isa).unpack(), self.data
        )


def pack_weight(weight: Tensor, *, transpose: bool = False, isa: str | None = None) -> PackedWeight:
    """Packs a weight once, for `gemm(x, packed)` on the CPU; see `vishwamai.pack_weight`.

    Raises:
      ShapeError: the weight is no matrix, its dtype is none that can be packed, or `isa` is unknown.
      UnsupportedError: the weight is on a GPU, whose kernels read it as it is.

    >>> weight = pack_weight(torch.tensor([[3.0], [-4.0]]), isa="generic")
    >>> weight
    PackedWeight(float32[2,1], isa='generic')
    """
    if not isinstance(weight, Tensor):
        raise UnsupportedError(
            f"pack_weight: `weight` is a {type(weight).__name__}; pass a tensor: `gemm` takes a QTensor as it is."
        )
    if bridge.target_of(weight).platform != "cpu":
        raise UnsupportedError(f"pack_weight: `weight` is on {weight.device}; pass it to `gemm` there as it is.")
    how: list[packed_weight.PackedWeight] = []

    def pack(x: Any) -> Any:
        how.append(packed_weight.pack_weight(x, transpose=transpose, isa=isa))
        return how[0].data

    return PackedWeight(bridge.on_cpu(pack, weight), how[0].shape, how[0].dtype, how[0].isa)


def packed_gemm(
    a: Tensor,
    b: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    out_dtype: str | None,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
) -> Tensor:
    """`gemm` where `b` is packed; see there."""
    check_packed(a, b, activation, bias=bias, scale_a=scale_a, scale_b=scale_b)
    (k, n), rows = b.shape, a.shape[-2]
    if scale_a is not None and scale_a.shape == (rows,):
        scale_a = scale_a.expand(a.shape[:-1])
    rest = (None if x is None else x.float().reshape(1, -1) for x in (scale_a, scale_b))
    arrays = (a.reshape(1, -1, k), b.data[None], None if bias is None else bias[None], *rest)
    return _packed(*arrays, list(b.shape), b.isa, activation, out_dtype)[0].reshape(*a.shape[:-1], n)
