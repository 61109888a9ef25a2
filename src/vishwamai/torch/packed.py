"""`pack_weight` of torch tensors on the CPU, and the operator of the product with what it gives."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vishwamai.core import dims
from vishwamai.core.errors import UnsupportedError
from vishwamai.core.signature import Signature
from vishwamai.core.spec import array_spec
from vishwamai.core.types import AnyArray
from vishwamai.ops.matmul import packed_weight
from vishwamai.ops.matmul.packed import PACKED, Operands, describe_packed
from vishwamai.ops.matmul.spec import Outputs, resolve_out_dtype
from vishwamai.torch import bridge
from vishwamai.torch.arguments import checks_its_own
from vishwamai.torch.launch import torch_dtype
from vishwamai.torch.operator import TorchOperator
from vishwamai.torch.torch_private import is_transformed


def result_dtype(call: Any, of_b: torch.dtype) -> torch.dtype:
    """The dtype of a product: the caller's, or the one that its factors have."""
    a, b = (array_spec(torch.empty(0, dtype=dtype)).dtype for dtype in (call.operands.a.dtype, of_b))
    epilogue = call.activation is not None or any(x is not None for x in call.operands[2:])
    return torch_dtype(resolve_out_dtype(call.out_dtype, a, b, float_epilogue=epilogue))


packed_gemm = TorchOperator(
    PACKED,
    Outputs,
    Signature(dims.declared(Operands), Outputs("groups m n")),
    describe_packed,
    gradients=("a", "bias", "scale_a", "scale_b"),
    saves=lambda call: (*Operands._fields, *(("out",) if call.activation == "relu" else ())),
    dtypes=lambda call: (result_dtype(call, call.operands.a.dtype),),
    sizes=lambda call: {"n": call.shape[1]},
    one_by_one=True,
)


class PackedWeight(packed_weight.PackedWeight):
    """A `vishwamai.PackedWeight` whose data is a torch tensor."""

    data: Any

    def unpack(self) -> AnyArray:
        """The weight as it was, bit for bit."""
        return bridge.on_cpu(
            lambda x: packed_weight.PackedWeight(x, self.shape, self.dtype, self.isa).unpack(), self.data
        )


@checks_its_own("weight")
def pack_weight(weight: Tensor, *, transpose: bool = False, isa: str | None = None) -> PackedWeight:
    """Packs a weight once, for `gemm(x, packed)` on the CPU; see `vishwamai.pack_weight`.

    Raises:
      ShapeError: the weight is not a matrix, its dtype is none that can be packed, or `isa` is unknown.
      UnsupportedError: the weight is on a GPU, whose kernels read it as it is.

    >>> weight = pack_weight(torch.tensor([[3.0], [-4.0]]), isa="generic")
    >>> weight
    PackedWeight(float32[2,1], isa='generic')
    """
    if not isinstance(weight, Tensor):
        raise UnsupportedError(
            f"pack_weight: `weight` is a {type(weight).__name__}; pass a tensor: `gemm` takes a QTensor as it is."
        )
    if is_transformed((weight,)):
        raise UnsupportedError(
            "pack_weight: a transform (torch.func, forward mode) is in force, and packed bytes have no derivative; "
            "pack the weight before it, or pass it to `gemm` as it is."
        )
    if bridge.platform_of(weight) != "cpu":
        raise UnsupportedError(f"pack_weight: `weight` is on {weight.device}; pass it to `gemm` there as it is.")
    how: list[packed_weight.PackedWeight] = []

    def pack(x: AnyArray) -> AnyArray:
        how.append(packed_weight.pack_weight(x, transpose=transpose, isa=isa))
        return how[0].data

    return PackedWeight(bridge.on_cpu(pack, weight), how[0].shape, how[0].dtype, how[0].isa)
