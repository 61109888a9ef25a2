"""The TPU generations that vishwamai knows, figure by figure, each with its source; nothing here touches a device.

A `TpuChip` describes one *chip*. Some chips hold two TensorCores, and jax shows them differently: on v4 and v5p both
cores make one device ("megacore"), on TPU7x each core is a device of its own. What a kernel sees is therefore the
per-device and per-core properties (`peak_per_device`, `hbm_bandwidth_per_device`, `vmem_bytes`, ...), never the chip's
totals.

Sources, named in the comments below:
  [J] `jax/_src/pallas/mosaic/tpu_info.py` of jax 0.10.2
  [C] the "System architecture" pages of Google Cloud's TPU documentation (v4, v5e, v5p, v6e, TPU7x)
  [P] Jouppi et al. 2023, "TPU v4: An Optically Reconfigurable Supercomputer", table 4 (clock of v4)
  [B] "How to Scale Your Model" (jax-ml.github.io/scaling-book), chapter "How to think about TPUs"
  [L] asked of libtpu 0.0.51: the limit that its compiler names when a program exceeds it, and what its bundles hold
  [D] derived here; the comment says from what
"""

from __future__ import annotations

import dataclasses

__all__ = ["TPUS", "TpuChip", "tpu_for"]

_MIB, _GIB = 1 << 20, 1 << 30


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)  # one object each, so hashing it costs nothing
class TpuChip:
    """One TPU generation.

    Peaks are FLOP/s of the whole chip (a multiply-add counts as two), sizes bytes, bandwidth bytes/s, clock Hz.

    Example:
        >>> v5e = TPUS["v5e"]
        >>> v5e.device_kinds[0], v5e.has_fp8, v5e.vmem_bytes >> 20
        ('TPU v5 lite', False, 128)
        >>> TPUS["tpu7x"].peak_per_device("bfloat16") == TPUS["tpu7x"].peak_bf16 / 2
        True
    """

    name: str
    """What users write: "v4", "v5e", "v5p", "v6e", "tpu7x"."""
    aliases: tuple[str, ...] = ()
    """Other names of it, in lower case: accelerator types ("v5litepod-16") and of the product."""
    device_kinds: tuple[str, ...]
    """`jax.Device.device_kind` of this chip; the first is what libtpu reports today, the others are accepted."""
    generation: int
    """4, 5, 6 or 7."""
    topology: str
    """The smallest topology that libtpu gives without further options; its first device is the compilation target."""
    topology_options: tuple[tuple[str, str], ...] = ()
    """Keyword options of `jax.experimental.topologies.get_topology_desc` that belong to the topology."""
    pod_chips: int
    """Chips of the largest slice that is sold."""
    cores: int
    """TensorCores per chip."""
    devices: int
    """jax devices per chip: `cores / devices` cores share one device (2 = megacore)."""
    lanes: int = 128  # [J]
    sublanes: int = 8  # [J]
    mxu_size: int
    """Side of the systolic array."""
    mxus: int
    """Systolic arrays per core."""
    valus: int
    """Vector ALU operations of [sublanes, lanes] issued per cycle and core."""
    vmem_bytes: int
    """Vector memory per core."""
    vmem_scoped_bytes: int
    """What one kernel may take of it unless `vmem_limit_bytes` says otherwise."""
    smem_bytes: int = 1 * _MIB  # [J], [L]: "would exceed memory (size=1048576)" on every generation
    """Scalar memory per core."""
    hbm_bytes: int
    """HBM per chip."""
    hbm_usable_bytes: int
    """HBM that the compiler lets one jax *device* use: less than the chip's, the runtime keeps some."""
    hbm_bandwidth: float
    """HBM bytes/s per chip."""
    clock: float
    """TensorCore cycles per second."""
    peak_bf16: float
    peak_int8: float | None
    """None where the chip multiplies no int8 matrices (the kernel then works in bf16)."""
    peak_fp8: float | None
    """None where the chip multiplies no 8-bit floats (the kernel then works in bf16)."""
    sparse_collectives: bool = False
    """Whether libtpu can run collectives on the SparseCores, next to the work of the TensorCores."""
    ici_bandwidth: float
    """Bytes/s of one link between neighbouring chips in one direction. A chip has two links along each side."""
    ici_latency: float = 1e-6  # [B] "about 1us per hop", chapter "Sharded matrices"
    """Seconds of one hop between neighbours."""
    dcn_bandwidth: float
    """Bytes/s of one chip to chips of other slices."""
    host_bandwidth: float | None
    """Bytes/s between one chip and the memory of its host, each way; None where no source states it."""
    fp8_formats: tuple[str, ...] = ()
    """The 8-bit float formats that the matrix unit takes as they are, by numpy name."""

    @property
    def cores_per_device(self) -> int:
        """TensorCores that one jax device drives: 2 on a megacore chip, else 1."""
        return self.cores // self.devices

    @property
    def accelerator_units(self) -> int:
        """What an accelerator type counts for each chip: "v5p-8" has 8 TensorCores, "v5litepod-8" has 8 chips. [C]"""
        return self.cores

    @property
    def vmem_budget(self) -> int:
        """Bytes of VMEM that a kernel plans with: three quarters of the core's. The rest is the compiler's (spills, its
        own buffers).
        """
        return self.vmem_bytes * 3 // 4

    @property
    def has_int8(self) -> bool:
        """Whether int8 x int8 -> int32 runs on the matrix unit."""
        return self.peak_int8 is not None

    @property
    def has_fp8(self) -> bool:
        """Whether 8-bit floats are multiplied on the matrix unit; see `fp8_formats` for which."""
        return self.peak_fp8 is not None

    @property
    def peak_f32(self) -> float:
        """FLOP/s of float32 at full precision: no matrix unit has it, XLA's HIGHEST takes six bfloat16 products. [D]"""
        return self.peak_bf16 / 6

    @property
    def peak_vector(self) -> float:
        """Elementwise float32 operations per second of the chip: cores x valus x sublanes x lanes x clock. [D]"""
        return self.cores * self.valus * self.sublanes * self.lanes * self.clock

    def peak(self, dtype: str) -> float:
        """FLOP/s of the chip for matrix products of `dtype`: a name ("bfloat16", "float8_e4m3fn") or bf16/f32/fp8.

        A type without a unit of its own gets the rate of what the work is done in: bfloat16.

        Example:
            >>> TPUS["v5e"].peak("int8") / TPUS["v5e"].peak("bfloat16")
            2.0
            >>> TPUS["v4"].peak("int8") == TPUS["v4"].peak_bf16
            True
        """
        name = str(dtype)
        if name in ("float32", "f32", "float64", "f64"):
            return self.peak_f32
        if name in ("int8", "uint8", "s8", "u8"):
            return self.peak_int8 or self.peak_bf16
        if name == "fp8" or name in self.fp8_formats:
            return self.peak_fp8 or self.peak_bf16
        return self.peak_bf16

    def peak_per_device(self, dtype: str) -> float:
        """`peak(dtype)` of one jax device."""
        return self.peak(dtype) / self.devices

    @property
    def hbm_bandwidth_per_device(self) -> float:
        """HBM bytes/s of one jax device."""
        return self.hbm_bandwidth / self.devices

    @property
    def host_bandwidth_per_device(self) -> float | None:
        """Bytes/s between one jax device and its host, each way; None where no source states it."""
        return None if self.host_bandwidth is None else self.host_bandwidth / self.devices


_V4 = TpuChip(
    name="v4",
    device_kinds=("TPU v4",),  # [L]
    generation=4,
    topology="v4:2x2x1",
    topology_options=(("chip_config_name", "megacore"),),  # [L] without it libtpu shows two one-core devices a chip
    pod_chips=4096,  # [C]
    cores=2,  # [J]
    devices=1,  # megacore, [J]
    mxu_size=128,  # [J]
    mxus=4,  # [J]
    valus=2,  # [B] gives 4 from v5p on; libtpu's bundles of v4 carry two VALU slots
    vmem_bytes=16 * _MIB,  # [J], [L]
    vmem_scoped_bytes=16 * _MIB,  # [L]
    hbm_bytes=32 * _GIB,  # [C]
    hbm_usable_bytes=int(30.75 * _GIB),  # [L] "exceeds available HBM (30.75G)"
    hbm_bandwidth=1.228e12,  # [C] 1228 GB/s; [J] 1.23e12
    clock=1.05e9,  # [P] 1050 MHz = [D] 275e12 / (2 cores x 4 x 128 x 128 x 2)
    peak_bf16=275e12,  # [C], [J]
    peak_int8=None,  # [J]; [L] Mosaic: "Unsupported matmul RHS type on target" ([C] quotes 275e12, the bf16 rate)
    peak_fp8=None,  # [J], [L] as int8
    ici_bandwidth=4.5e10,  # [B]
    dcn_bandwidth=6.25e9,  # [B]
    host_bandwidth=1.6e10,  # [B] "PCIe bandwidth for TPU v4 is 16GB / second each way"
)

_V5E = TpuChip(
    name="v5e",
    aliases=("v5litepod", "v5lite"),
    device_kinds=("TPU v5 lite", "TPU v5e"),  # [L], [J]
    generation=5,
    topology="v5e:2x2",
    pod_chips=256,  # [C]
    cores=1,  # [J]
    devices=1,
    mxu_size=128,  # [J]
    mxus=4,  # [J]
    valus=4,  # [B]
    vmem_bytes=128 * _MIB,  # [J], [L]
    vmem_scoped_bytes=16 * _MIB,  # [L]
    hbm_bytes=16 * _GIB,  # [C]
    hbm_usable_bytes=int(15.75 * _GIB),  # [L]
    hbm_bandwidth=0.819e12,  # [C] 819 GB/s; [J] 8.2e11
    clock=1.5e9,  # [B]; [D] 197e12 / (4 x 128 x 128 x 2)
    peak_bf16=197e12,  # [C], [J]
    peak_int8=394e12,  # [C], [J]
    peak_fp8=None,  # [J] "Not Available"
    ici_bandwidth=4.5e10,  # [B]
    dcn_bandwidth=3.125e9,  # [B]
    host_bandwidth=1.5e10,  # [B] "PCIe bandwidth is typically around 1.5e10 bytes / second per chip"
)

_V5P = TpuChip(
    name="v5p",
    device_kinds=("TPU v5", "TPU v5p"),  # [L], [J]
    generation=5,
    topology="v5p:2x2x1",
    pod_chips=8960,  # [C]
    cores=2,  # [J]
    devices=1,  # megacore, [J]
    mxu_size=128,  # [J]
    mxus=4,  # [J]
    valus=4,  # [B]
    vmem_bytes=64 * _MIB,  # [J]; [L] 63.94 MiB of it usable
    vmem_scoped_bytes=16 * _MIB,  # [L]
    hbm_bytes=95 * _GIB,  # [C]
    hbm_usable_bytes=int(95.73 * _GIB),  # [L]; more than [C] states
    hbm_bandwidth=2.765e12,  # [C] 2765 GB/s; [J] says 2.46e12
    clock=1.75e9,  # [D] 459e12 / (2 cores x 4 x 128 x 128 x 2)
    peak_bf16=459e12,  # [C], [J]
    peak_int8=918e12,  # [C], [J]
    peak_fp8=None,  # [J] "Not Available"
    sparse_collectives=True,  # [L]
    ici_bandwidth=9e10,  # [B]; [C] 1200 GB/s for a chip's 6 links, both ways
    dcn_bandwidth=6.25e9,  # [B]
    host_bandwidth=1.5e10,  # [B] as v5e
)

_V6E = TpuChip(
    name="v6e",
    aliases=("v6lite", "trillium"),
    device_kinds=("TPU v6 lite", "TPU v6e"),  # [L], [J]
    generation=6,
    topology="v6e:2x2",
    pod_chips=256,  # [C]
    cores=1,  # [J]
    devices=1,
    mxu_size=256,  # [J]
    mxus=2,  # [J]; [C] "two 256x256 MXU"
    valus=4,  # [B]
    vmem_bytes=128 * _MIB,  # [J]; [L] 127.94 MiB of it usable
    vmem_scoped_bytes=32 * _MIB,  # [L]
    hbm_bytes=32 * _GIB,  # [C]
    hbm_usable_bytes=int(31.24 * _GIB),  # [L]
    hbm_bandwidth=1.638e12,  # [C] 1638 GB/s; [J] 1.64e12
    clock=1.75e9,  # [D] 918e12 / (2 x 256 x 256 x 2 x 2 rows a cycle)
    peak_bf16=918e12,  # [C]; [J] 9.2e14
    peak_int8=1836e12,  # [C]; [J] 1.84e15
    peak_fp8=918e12,  # [J] 9.2e14: stored in 8 bits, no faster than bfloat16
    fp8_formats=("float8_e5m2", "float8_e4m3b11fnuz"),  # [J] is_matmul_supported
    sparse_collectives=True,  # [L]
    ici_bandwidth=9e10,  # [B]
    dcn_bandwidth=1.25e10,  # [B]
    host_bandwidth=3.2e10,  # [B] "Trillium (TPU v6e) has 32GB/s"
)

_TPU7X = TpuChip(
    name="tpu7x",
    aliases=("v7x", "ironwood"),
    device_kinds=("TPU7x",),  # [L], [J]
    generation=7,
    topology="tpu7x:2x2x1",
    pod_chips=9216,  # [C]
    cores=2,  # [J]
    devices=2,  # [L] two one-core devices a chip
    mxu_size=256,  # [J]
    mxus=2,  # [J]
    valus=4,  # [B] gives 4 for the generations before; libtpu's bundles carry four VALU slots
    vmem_bytes=64 * _MIB,  # [J]; [L] 63.94 MiB of it usable
    vmem_scoped_bytes=32 * _MIB,  # [L]
    hbm_bytes=192 * _GIB,  # [C]
    hbm_usable_bytes=int(94.74 * _GIB),  # [L], per device
    hbm_bandwidth=7.38e12,  # [C] 7380 GB/s; [J] 7.4e12
    clock=2.2e9,  # [D] 2307e12 / (2 cores x 2 x 256 x 256 x 2 x 2 rows a cycle)
    peak_bf16=2307e12,  # [C]; [J] 2.31e15
    peak_int8=None,  # [J] "Not Available"
    peak_fp8=4614e12,  # [C]; [J] 4.6e15
    fp8_formats=("float8_e5m2", "float8_e4m3fn"),  # [J] is_matmul_supported
    sparse_collectives=True,  # [L]
    ici_bandwidth=9e10,  # [B]
    dcn_bandwidth=1.25e10,  # [B]
    host_bandwidth=None,  # neither [C] nor [B] states it
)

TPUS: dict[str, TpuChip] = {c.name: c for c in (_V4, _V5E, _V5P, _V6E, _TPU7X)}
"""Every known TPU by name, oldest first."""

_BY_KIND = {kind: c for c in TPUS.values() for kind in c.device_kinds}


def tpu_for(device_kind: str) -> TpuChip | None:
    """The chip whose `jax.Device.device_kind` this is, or None for anything else (a CPU, a GPU, an older TPU).

    Example:
        >>> tpu_for("TPU v5 lite").name
        'v5e'
        >>> tpu_for("cpu") is None
        True
    """
    return _BY_KIND.get(device_kind)
