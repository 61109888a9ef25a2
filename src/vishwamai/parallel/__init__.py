"""Programs over many devices: meshes laid on a TPU's links, attention over a split sequence, pipelines as data.

Everything runs on JAX's own distributed runtime: one program, XLA's collectives, no engine of our own.

Meshes: `mesh`, `torus` (neighbours), `processes` and `roll_call` (several processes), `in_order` (their collectives on
CPUs). Placement: `rules` (logical axes), `shard`, `adaptive`, `placement`, `layout`, `data_parallel`. Products with
their collective: `products`, `ring_pieces`, `ring_products`, `overlap` (whether it pays). `pipeline/`: schedules as
data (`actions`, `generators`), what judges them (`check`, `simulate`, `timeline`), and the executor. `optimization` has
the dict of that name: what each key sets in training and serving.
"""

from vishwamai.core.errors import ScheduleError
from vishwamai.core.links import AxisLinks, axis_links, estimate_collective
from vishwamai.ops.attention.decode import decode_attention, merge_shards
from vishwamai.ops.attention.split.ring import from_zigzag, ring_attention, to_zigzag
from vishwamai.ops.attention.split.times import SplitAttentionEstimate, estimate_split_attention
from vishwamai.ops.attention.ulysses import ulysses_attention
from vishwamai.ops.moe.exchange.api import all_to_all_grouped_gemm, grouped_gemm_all_to_all
from vishwamai.ops.moe.exchange.placement import ExpertPlacement, PlacementChange, move_experts, place_experts
from vishwamai.ops.moe.exchange.times import ExchangeEstimate, estimate_exchange
from vishwamai.parallel.adaptive import AdaptiveSharding, ArrayChoice, adaptive_sharding
from vishwamai.parallel.data_parallel import DataParallelConfig, configure_data_parallel
from vishwamai.parallel.mesh import configure_tpu_mesh, make_mesh
from vishwamai.parallel.overlap import OverlapEstimate, estimate_overlap
from vishwamai.parallel.pipeline.actions import Action, Schedule, with_transfers
from vishwamai.parallel.pipeline.check import check_schedules
from vishwamai.parallel.pipeline.executor import pipelined_loss, place_parts
from vishwamai.parallel.pipeline.scheduler import PipelineScheduler
from vishwamai.parallel.pipeline.simulate import ActionTimes, Span, Timeline, simulate
from vishwamai.parallel.placement import ArrayPlace, ShardingTable, explain_sharding, validate_sharding
from vishwamai.parallel.processes import Processes, initialize
from vishwamai.parallel.products import all_gather_gated_linear_unit, all_gather_gemm, gemm_reduce_scatter
from vishwamai.parallel.rules import LogicalRules, shardings
from vishwamai.parallel.shard import shard
from vishwamai.parallel.tensor import copy_to_shards, sum_of_shards
from vishwamai.parallel.weight_layout import KernelLayout, MemoryLayout, optimize_kernel_layout, optimize_memory_layout

__all__ = [
    "Action",
    "ActionTimes",
    "AdaptiveSharding",
    "ArrayChoice",
    "ArrayPlace",
    "AxisLinks",
    "DataParallelConfig",
    "ExchangeEstimate",
    "ExpertPlacement",
    "KernelLayout",
    "LogicalRules",
    "MemoryLayout",
    "OverlapEstimate",
    "PipelineScheduler",
    "PlacementChange",
    "Processes",
    "Schedule",
    "ScheduleError",
    "ShardingTable",
    "Span",
    "SplitAttentionEstimate",
    "Timeline",
    "adaptive_sharding",
    "all_gather_gated_linear_unit",
    "all_gather_gemm",
    "all_to_all_grouped_gemm",
    "axis_links",
    "check_schedules",
    "configure_data_parallel",
    "configure_tpu_mesh",
    "copy_to_shards",
    "decode_attention",
    "estimate_collective",
    "estimate_exchange",
    "estimate_overlap",
    "estimate_split_attention",
    "explain_sharding",
    "from_zigzag",
    "gemm_reduce_scatter",
    "grouped_gemm_all_to_all",
    "initialize",
    "make_mesh",
    "merge_shards",
    "move_experts",
    "optimize_kernel_layout",
    "optimize_memory_layout",
    "pipelined_loss",
    "place_experts",
    "place_parts",
    "ring_attention",
    "shard",
    "shardings",
    "simulate",
    "sum_of_shards",
    "to_zigzag",
    "ulysses_attention",
    "validate_sharding",
    "with_transfers",
]
