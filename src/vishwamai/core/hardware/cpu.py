"""The instruction sets that the native CPU kernels are compiled for; core/cpp/isa.h numbers them in this order."""

from __future__ import annotations

import dataclasses

__all__ = ["CPUS", "CpuChip"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # one object each, so hashing it costs nothing
class CpuChip:
    """A processor by its instruction set. Each set contains those before it of the same architecture, and `generic`.

    Example:
        >>> [name for name, cpu in CPUS.items() if cpu.bfloat16_products]
        ['avx512_bf16', 'amx', 'neon_bf16']
    """

    name: str
    """What users write, in `VISHWAMAI_CPU_ISA` too: "generic", "avx2", "avx512", "avx512_bf16", "amx", "neon_dot",
    "neon_bf16"."""
    architecture: str | None = None
    """"x86_64" or "aarch64"; None for all."""
    vector_bytes: int
    """Bytes of a vector register."""
    bfloat16_products: bool = False
    """Products of bfloat16 in one instruction, summed in float32 (VDPBF16PS, BFMMLA)."""
    int8_products: bool = False
    """Products of 8-bit integers in one instruction, summed in int32 (VPDPBUSD, SDOT)."""
    tile_products: bool = False
    """Products of whole tiles, of bfloat16 and of 8-bit integers (TDPBF16PS, TDPBSSD)."""


# What each set contains is what core/cpp/isa.cc asks the processor for; the sizes and instructions are those of the
# "Intel 64 and IA-32 Architectures Software Developer's Manual", volume 1, chapters on AVX2, AVX-512 and AMX, and the
# "Arm Architecture Reference Manual for A-profile", FEAT_DotProd, FEAT_I8MM and FEAT_BF16.
_GENERIC = CpuChip(name="generic", vector_bytes=16)  # SSE2 is part of x86-64, NEON of arm64
_AVX2 = CpuChip(name="avx2", architecture="x86_64", vector_bytes=32)  # with FMA
_AVX512 = CpuChip(name="avx512", architecture="x86_64", vector_bytes=64)  # F, BW, DQ and VL
_AVX512_BF16 = CpuChip(  # and VNNI
    name="avx512_bf16", architecture="x86_64", vector_bytes=64, bfloat16_products=True, int8_products=True
)
_AMX = CpuChip(
    name="amx",
    architecture="x86_64",
    vector_bytes=64,
    bfloat16_products=True,
    int8_products=True,
    tile_products=True,
)
_NEON_DOT = CpuChip(name="neon_dot", architecture="aarch64", vector_bytes=16, int8_products=True)
_NEON_BF16 = CpuChip(
    name="neon_bf16", architecture="aarch64", vector_bytes=16, bfloat16_products=True, int8_products=True
)

CPUS: dict[str, CpuChip] = {c.name: c for c in (_GENERIC, _AVX2, _AVX512, _AVX512_BF16, _AMX, _NEON_DOT, _NEON_BF16)}
"""Every instruction set by name, of each architecture the least first."""
