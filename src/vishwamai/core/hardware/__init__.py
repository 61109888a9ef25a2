"""The chips that vishwamai knows, figure by figure, each with its source; nothing here touches a device."""

from vishwamai.core.hardware.cpu import CPUS, CpuChip
from vishwamai.core.hardware.gpu import GPUS, GpuChip, architecture, gpu_for
from vishwamai.core.hardware.slices import is_slice, nearest, of_chips, rank, sides_text, slices, wraps
from vishwamai.core.hardware.tpu import TPUS, TpuChip, tpu_for

__all__ = [
    "CPUS",
    "GPUS",
    "TPUS",
    "CpuChip",
    "GpuChip",
    "TpuChip",
    "architecture",
    "gpu_for",
    "is_slice",
    "nearest",
    "of_chips",
    "rank",
    "slices",
    "tpu_for",
    "wraps",
    "sides_text",
]
