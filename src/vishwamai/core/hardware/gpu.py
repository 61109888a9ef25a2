"""The GPUs that vishwamai knows, figure by figure, each with its source; nothing here touches a device.

Peaks are of dense products: data sheets that state them "with sparsity" state twice as much.

Sources, named in the comments below:
  [A] "NVIDIA A100 Tensor Core GPU" data sheet (2021), SXM4 80 GB, and "NVIDIA A100 Tensor Core GPU Architecture"
      (2020), table 4
  [H] "NVIDIA H100 Tensor Core GPU Architecture" (2022), tables 1-3, and the data sheet of H100 SXM5
  [I] "NVIDIA H200 Tensor Core GPU" data sheet (2024), SXM
  [W] "NVIDIA Blackwell Architecture Technical Brief" (2024), table of HGX B200, one GPU at 1000 W
  [C] CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
  [M] "AMD Instinct MI300X" data sheet (2023)
  [R] ROCm documentation, "AMD GPU specifications" (rocm.docs.amd.com/en/latest/reference/gpu-specs.html)
  [S] Chips and Cheese, "Nvidia's B200: Keeping the CUDA Juggernaut Rolling" (2025): what the device itself reports
"""

from __future__ import annotations

import dataclasses
import functools
import re

__all__ = ["GPUS", "GpuChip", "architecture", "gpu_for"]

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # one object each, so hashing it costs nothing
class GpuChip:
    """One GPU, or an architecture without further facts; a figure that has no source is None.

    Peaks are FLOP/s (a multiply-add counts as two), sizes bytes, bandwidth bytes/s. An "SM" is a compute unit (CU) on
    AMD's GPUs.

    Example:
        >>> GPUS["h200"].hbm_bandwidth > GPUS["h100"].hbm_bandwidth
        True
        >>> GPUS["h100"].architecture, architecture("sm_90").sms is None
        ('sm_90', True)
    """

    name: str
    """What users write: "a100", "h100", "h200", "b200", "mi300x", or an architecture's own name."""
    architecture: str
    """What code is compiled for: "sm_90", "gfx942". Tuning tables go by it."""
    device_name: str | None = None
    """A regular expression for what the driver calls the device."""
    sms: int | None = None
    """Streaming multiprocessors (compute units)."""
    shared_per_sm: int | None = None
    """Shared memory (LDS) of a multiprocessor."""
    shared_per_block: int | None = None
    """What one block may take of it."""
    registers_per_sm: int | None = None
    """32-bit registers of a multiprocessor."""
    threads_per_sm: int | None = None
    """Threads that a multiprocessor can hold."""
    blocks_per_sm: int | None = None
    """Blocks that a multiprocessor can hold."""
    l2_bytes: int | None = None
    hbm_bytes: int | None = None
    hbm_bandwidth: float | None = None
    peak_f32: float | None = None
    """Of the vector units, at full precision."""
    peak_tf32: float | None = None
    """Of the matrix units on float32 rounded to TF32."""
    peak_bf16: float | None = None
    peak_int8: float | None = None
    peak_fp8: float | None = None
    """None where the matrix units multiply no 8-bit floats."""

    @property
    def platform(self) -> str:
        """ "cuda" or "rocm"."""
        return "rocm" if self.architecture.startswith("gfx") else "cuda"

    @property
    def bfloat16_products(self) -> bool:
        """Whether the matrix units multiply bfloat16: NVIDIA's from compute capability 8.0 on [C], AMD's CDNA [R].

        Example:
            >>> [name for name in ("sm_75", "sm_80", "gfx906", "gfx942") if architecture(name).bfloat16_products]
            ['sm_80', 'gfx942']
        """
        if self.platform == "cuda":
            return int(re.sub(r"[^0-9]", "", self.architecture)) >= 80
        return self.architecture in ("gfx908", "gfx90a", "gfx942", "gfx950")

    def is_called(self, device_name: str) -> bool:
        """Whether the driver's name of a device is this GPU's."""
        return self.device_name is not None and re.search(self.device_name, device_name) is not None

    def peak(self, dtype: str) -> float | None:
        """FLOP/s for matrix products of `dtype`, by its name; a type without a unit of its own gets the rate of
        bfloat16; None where it is not known.

        Example:
            >>> GPUS["a100"].peak("float8_e4m3fn") == GPUS["a100"].peak("bfloat16")
            True
        """
        name = str(dtype)
        if name in ("float32", "f32"):
            return self.peak_f32
        if name in ("int8", "uint8", "s8", "u8"):
            return self.peak_int8 or self.peak_bf16
        if name.startswith(("float8", "fp8")):
            return self.peak_fp8 or self.peak_bf16
        return self.peak_bf16


_A100 = GpuChip(
    name="a100",
    architecture="sm_80",
    device_name="A100-SXM4-80GB",
    sms=108,  # [A]
    shared_per_sm=164 * _KIB,  # [C], [A]
    shared_per_block=163 * _KIB,  # [C]
    registers_per_sm=64 * _KIB,  # [C]
    threads_per_sm=2048,  # [C]
    blocks_per_sm=32,  # [C]
    l2_bytes=40 * _MIB,  # [A]
    hbm_bytes=80 * _GIB,  # [A]
    hbm_bandwidth=2.039e12,  # [A] 2039 GB/s
    peak_f32=19.5e12,  # [A]
    peak_tf32=156e12,  # [A]
    peak_bf16=312e12,  # [A]
    peak_int8=624e12,  # [A]
)

_H100 = GpuChip(
    name="h100",
    architecture="sm_90",
    device_name="H100 80GB HBM3",
    sms=132,  # [H]
    shared_per_sm=228 * _KIB,  # [C], [H]
    shared_per_block=227 * _KIB,  # [C]
    registers_per_sm=64 * _KIB,  # [C]
    threads_per_sm=2048,  # [C]
    blocks_per_sm=32,  # [C]
    l2_bytes=50 * _MIB,  # [H]
    hbm_bytes=80 * _GIB,  # [H]
    hbm_bandwidth=3.35e12,  # [H] 3.35 TB/s
    peak_f32=66.9e12,  # [H]
    peak_tf32=494.7e12,  # [H]
    peak_bf16=989.4e12,  # [H]
    peak_int8=1978.9e12,  # [H]
    peak_fp8=1978.9e12,  # [H]
)

_H200 = dataclasses.replace(
    _H100,  # [I]: the same compute as H100 SXM5
    name="h200",
    device_name="NVIDIA H200$",
    hbm_bytes=141 * 10**9,  # [I] 141 GB
    hbm_bandwidth=4.8e12,  # [I] 4.8 TB/s
)

_B200 = GpuChip(
    name="b200",
    architecture="sm_100",
    device_name="NVIDIA B200$",
    sms=148,  # [S]
    shared_per_sm=228 * _KIB,  # [C]
    shared_per_block=227 * _KIB,  # [C]
    registers_per_sm=64 * _KIB,  # [C]
    threads_per_sm=2048,  # [C]
    blocks_per_sm=32,  # [C]
    l2_bytes=126 * _MIB,  # [S]
    hbm_bytes=180 * 10**9,  # [W] 180 GB usable of 192 GB
    hbm_bandwidth=8e12,  # [W] 8 TB/s
    peak_f32=80e12,  # [W]
    peak_tf32=1.1e15,  # [W] 2.2 PFLOPS with sparsity
    peak_bf16=2.25e15,  # [W] 4.5 PFLOPS with sparsity
    peak_int8=4.5e15,  # [W] 9 POPS with sparsity
    peak_fp8=4.5e15,  # [W] 9 PFLOPS with sparsity
)

_MI300X = GpuChip(
    name="mi300x",
    architecture="gfx942",
    device_name="MI300X",
    sms=304,  # [M], [R]
    shared_per_sm=64 * _KIB,  # [R] LDS
    shared_per_block=64 * _KIB,  # [R]
    registers_per_sm=128 * _KIB,  # [R] 512 KiB of vector registers
    l2_bytes=32 * _MIB,  # [R] 4 MiB in each of 8 dies; behind it 256 MiB that all share
    hbm_bytes=192 * _GIB,  # [R]
    hbm_bandwidth=5.3e12,  # [M] 5.3 TB/s
    peak_f32=163.4e12,  # [M]
    peak_tf32=653.7e12,  # [M]
    peak_bf16=1307.4e12,  # [M]
    peak_int8=2614.9e12,  # [M]
    peak_fp8=2614.9e12,  # [M]
)

GPUS: dict[str, GpuChip] = {c.name: c for c in (_A100, _H100, _H200, _B200, _MI300X)}
"""Every known GPU by name, NVIDIA's first, oldest first."""


@functools.cache
def architecture(name: str) -> GpuChip:
    """An architecture ("sm_90", "gfx942") without a product: what all its GPUs have in common.

    Example:
        >>> architecture("sm_90").shared_per_block == GPUS["h100"].shared_per_block
        True
        >>> architecture("sm_89").shared_per_block is None
        True
    """
    chip = next((gpu for gpu in GPUS.values() if gpu.architecture == name), None)
    if chip is None:
        return GpuChip(name=name, architecture=name)
    return GpuChip(
        name=name,
        architecture=name,
        shared_per_sm=chip.shared_per_sm,
        shared_per_block=chip.shared_per_block,
        registers_per_sm=chip.registers_per_sm,
        threads_per_sm=chip.threads_per_sm,
        blocks_per_sm=chip.blocks_per_sm,
    )


def gpu_for(device_name: str, architecture_name: str) -> GpuChip:
    """The GPU that the driver calls `device_name`; where it is none of `GPUS`, its architecture.

    Example:
        >>> gpu_for("NVIDIA H100 80GB HBM3", "sm_90").name, gpu_for("NVIDIA GeForce RTX 4090", "sm_89").name
        ('h100', 'sm_89')
    """
    matches = (gpu for gpu in GPUS.values() if gpu.architecture == architecture_name and gpu.is_called(device_name))
    return next(matches, architecture(architecture_name))
