"""Mixture of experts: the grouped matrix product, routing, dispatch and the expert layer."""

from vishwamai.ops.moe.api import MOE, grouped_gemm
from vishwamai.ops.moe.dispatch import Dispatch, moe_combine, moe_dispatch
from vishwamai.ops.moe.layer import MoEOutput, moe_layer
from vishwamai.ops.moe.routing import Routing, moe_routing

__all__ = [
    "MOE",
    "Dispatch",
    "MoEOutput",
    "Routing",
    "grouped_gemm",
    "moe_combine",
    "moe_dispatch",
    "moe_layer",
    "moe_routing",
]
