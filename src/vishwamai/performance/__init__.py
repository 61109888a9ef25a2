"""The performance system under one roof: memory, batch and flags planned, steps measured.

These names come from the packages that do the work. Those of training need their packages
(the extra `train`), which are loaded when such a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vishwamai.aot.compile.options.config import RuntimeConfig, configure_runtime_options
from vishwamai.aot.tuning.flags import FlagTrial, FlagTuning, tune_flags
from vishwamai.core.errors import DeviceError
from vishwamai.core.installing import install_line
from vishwamai.parallel import (
    DataParallelConfig,
    KernelLayout,
    MemoryLayout,
    PipelineScheduler,
    Schedule,
    configure_data_parallel,
    configure_tpu_mesh,
    optimize_kernel_layout,
    optimize_memory_layout,
)
from vishwamai.parallel.optimization import Optimization, explain_optimization
from vishwamai.performance.functions import apply_gradient_checkpointing, flash_attention_forward
from vishwamai.performance.profile_results import ProfileResults
from vishwamai.performance.profiler import TPUProfiler
from vishwamai.performance.usage import MemoryStats, track_memory_usage
from vishwamai.planning import Estimate, Measurement, MemorySettings, optimize_memory_usage
from vishwamai.rewrite import XlaReport, explain_xla_compilation, optimize_xla_compilation

if TYPE_CHECKING:
    from vishwamai.planning.memory.allocation import Allocation, MemoryPlanner
    from vishwamai.planning.search.batch import optimize_batch_size
    from vishwamai.training.fp8 import FP8Optimizer

__all__ = [
    "Allocation",
    "DataParallelConfig",
    "Estimate",
    "FP8Optimizer",
    "FlagTrial",
    "FlagTuning",
    "KernelLayout",
    "Measurement",
    "MemoryLayout",
    "MemoryPlanner",
    "MemorySettings",
    "MemoryStats",
    "Optimization",
    "PipelineScheduler",
    "ProfileResults",
    "RuntimeConfig",
    "Schedule",
    "TPUProfiler",
    "XlaReport",
    "apply_gradient_checkpointing",
    "configure_data_parallel",
    "configure_runtime_options",
    "configure_tpu_mesh",
    "explain_optimization",
    "explain_xla_compilation",
    "flash_attention_forward",
    "optimize_batch_size",
    "optimize_kernel_layout",
    "optimize_memory_layout",
    "optimize_memory_usage",
    "optimize_xla_compilation",
    "track_memory_usage",
    "tune_flags",
]

_OF_TRAINING = {
    "Allocation": "vishwamai.planning.memory.allocation",
    "FP8Optimizer": "vishwamai.training.fp8",
    "MemoryPlanner": "vishwamai.planning.memory.allocation",
    "optimize_batch_size": "vishwamai.planning.search.batch",
}


def __getattr__(name: str) -> Any:
    if name not in _OF_TRAINING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_OF_TRAINING[name]), name)
    except ModuleNotFoundError as error:
        raise DeviceError(
            f"vishwamai.performance.{name} needs the package {error.name}: {install_line('train')}."
        ) from error
