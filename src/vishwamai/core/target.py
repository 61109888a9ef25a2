"""Where a call of an operation runs, as far as the choice of a kernel depends on it."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable

from vishwamai.core import hardware
from vishwamai.core.errors import DeviceError
from vishwamai.core.hardware import CpuChip, GpuChip, TpuChip


@dataclasses.dataclass(frozen=True)
class Target:
    """A platform, the chip on it where one is known, and the framework of the arrays.

    Attributes:
      platform: "tpu", "cuda", "rocm" or "cpu". Torch's tensors on any GPU, AMD's too, are "cuda", as torch itself calls
        them.
      chip: None where only the platform is known; a kernel then plans for the least that the platform has.
      framework: "jax" or "torch": whose arrays the operands are.
      topology: the sides of a slice of TPUs, in chips; None for one device.
      local: the program is built with the tools of this machine: a kernel declines where its compiler or its native
        module is not installed. False for a target that a user names, about which this machine says nothing.

    Example:
        >>> Target.parse("v5e").tpu.mxu_size, Target.parse("h100").gpu.sms, str(Target.parse("cpu:avx2"))
        (128, 132, 'cpu (avx2)')
    """

    platform: str
    chip: TpuChip | GpuChip | CpuChip | None = None
    framework: str = "jax"
    local: bool = False
    topology: tuple[int, ...] | None = None

    @staticmethod
    def parse(name: str) -> Target:
        """The target of a name: a TPU ("v5e", "TPU v5 lite"), a slice of TPUs ("v5e:4x4", "v5litepod-16", "v5p-8"), a
        GPU ("h100"), a GPU's architecture ("sm_90", "gfx942"), "cpu" or "cpu:avx2".

        Raises:
          DeviceError: nothing has this name, or the TPU has no such topology; the text lists what there is.

        >>> Target.parse("v5litepod-16").topology, str(Target.parse("v5e:4x4"))
        ((4, 4), 'tpu (v5e:4x4)')
        """
        if not isinstance(name, str):
            raise DeviceError(f'`target` is {name!r}, of type {type(name).__name__}; pass a name such as "v5e".')
        return _parse(name)

    @staticmethod
    def parse_tpu(name: str) -> Target:
        """The target of a TPU or a slice of TPUs, for what only libtpu can do.

        Raises:
          DeviceError: nothing has this name, or it is not a TPU.
        """
        target = Target.parse(name)
        if target.tpu is None:
            kind = "a CPU" if target.platform == "cpu" else "a GPU"
            raise DeviceError(
                f"target {name!r} is {kind}, but this compiles with libtpu, for TPUs only; pass one of "
                f"{', '.join(hardware.TPUS)}."
            )
        return target

    @staticmethod
    def parse_chip(name: str) -> TpuChip:
        """The chip of `parse_tpu(name)`."""
        chip = Target.parse_tpu(name).tpu
        assert chip is not None
        return chip

    def on(self, platform: str | None) -> Target:
        """The target of the branch for `platform` (None: for any) in a program that is made for this target."""
        if platform is None or platform == self.platform:
            return self
        return _branch(platform, self.framework)

    @property
    def tpu(self) -> TpuChip | None:
        """The chip, if it is a TPU."""
        return self.chip if isinstance(self.chip, TpuChip) else None

    @property
    def gpu(self) -> GpuChip | None:
        """The chip, if it is a GPU."""
        return self.chip if isinstance(self.chip, GpuChip) else None

    @property
    def cpu(self) -> CpuChip | None:
        """The chip, if it is a CPU."""
        return self.chip if isinstance(self.chip, CpuChip) else None

    @property
    def multiplies_bfloat16(self) -> bool:
        """Whether the chip has units for products of bfloat16; False for a CPU or a GPU that is not known.

        >>> [name for name in ("v5e", "sm_75", "h100", "cpu:avx512") if Target.parse(name).multiplies_bfloat16]
        ['v5e', 'h100']
        """
        if self.platform == "tpu":
            return True
        return isinstance(self.chip, CpuChip | GpuChip) and self.chip.bfloat16_products

    def widens_fp8(self, formats: Iterable[str]) -> str | None:
        """Why products of these 8-bit floats are no faster than bfloat16 ones, in words; None where they are, or where
        the GPU is not known.

        >>> Target.parse("h100").widens_fp8(["float8_e4m3fn"]) is None
        True
        >>> Target.parse("v5e").widens_fp8(["float8_e5m2"])
        '8-bit floats are widened to bfloat16, for v5e has no unit for float8_e5m2: they save memory and cost time'
        """
        names = list(dict.fromkeys(formats))
        if self.tpu is not None:
            subject, missing = f"{self.tpu.name} has", [name for name in names if name not in self.tpu.fp8_formats]
        elif self.gpu is not None:
            subject, missing = f"{self.gpu.name} has", [] if self.gpu.peak_fp8 is not None else names
        elif self.platform == "cpu":
            subject, missing = "this CPU has", names
        else:
            subject, missing = "some chips have", names if self.platform == "tpu" else []
        if not missing:
            return None
        units = " and ".join(missing)
        return (
            f"8-bit floats are widened to bfloat16, for {subject} no unit for {units}: they save memory and cost time"
        )

    @property
    def name(self) -> str | None:
        """The name that `parse` reads back: "v5e", "v5e:4x4"; None where only the platform is known."""
        if self.chip is None:
            return None
        if self.topology is not None:
            return f"{self.chip.name}:{hardware.sides_text(self.topology)}"
        return f"cpu:{self.chip.name}" if self.cpu is not None else self.chip.name

    def __str__(self) -> str:
        if self.topology is not None:
            return f"{self.platform} ({self.name})"
        return f"{self.platform} ({self.chip.name})" if self.chip else self.platform


@functools.cache
def _branch(platform: str, framework: str) -> Target:
    return Target(platform, None, framework, local=True)


@functools.cache
def _parse(name: str) -> Target:
    text = name.strip().lower()
    tpu = _tpu(name, text)
    if tpu is not None:
        return tpu
    gpu = hardware.GPUS.get(text)
    if gpu is None and re.fullmatch(r"sm_\d{2,3}|gfx[0-9a-f]{3,4}", text):
        gpu = hardware.architecture(text)
    if gpu is not None:
        return Target(gpu.platform, gpu)
    platform, _, isa = text.partition(":")
    if platform == "cpu" and (not isa or isa in hardware.CPUS):
        return Target("cpu", hardware.CPUS[isa] if isa else None)
    raise DeviceError(
        f"no target is called {name!r}; the known ones are the TPUs {', '.join(hardware.TPUS)}, or a slice such as "
        f"v5e:4x4 or v5litepod-16; the GPUs {', '.join(hardware.GPUS)}, or an architecture such as sm_90 or gfx942; "
        f"and cpu, {', '.join(f'cpu:{isa}' for isa in hardware.CPUS)}."
    )


_TPU_NAMES = {
    name.lower(): chip for chip in hardware.TPUS.values() for name in (chip.name, *chip.aliases, *chip.device_kinds)
}


def _tpu(name: str, text: str) -> Target | None:
    """The target of `text`, which is `name` in lower case, if it begins with the name of a TPU."""
    if text in _TPU_NAMES:
        return Target("tpu", _TPU_NAMES[text])
    kind, colon, shape = text.partition(":")
    if colon and kind in _TPU_NAMES:
        return _slice(name, _TPU_NAMES[kind], shape)
    kind, dash, units = text.rpartition("-")
    if dash and kind in _TPU_NAMES and units.isdecimal():
        return _accelerator(name, _TPU_NAMES[kind], int(units))
    return None


def _slice(name: str, chip: TpuChip, shape: str) -> Target:
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", shape):
        raise DeviceError(
            f'target {name!r}: {shape!r} is not a topology; write its sides joined by "x", such as '
            f"{chip.topology!r}, or {chip.name!r} for one device."
        )
    sides = tuple(map(int, shape.split("x")))
    if not hardware.is_slice(chip, sides):
        near = ", ".join(f"{chip.name}:{hardware.sides_text(s)}" for s in hardware.nearest(chip, sides))
        raise DeviceError(f"target {name!r}: {chip.name} has no slice of {shape} chips; the nearest are {near}.")
    return Target("tpu", chip, topology=sides)


def _accelerator(name: str, chip: TpuChip, units: int) -> Target:
    """The slice of an accelerator type, which counts chips or TensorCores."""
    sides = hardware.of_chips(chip, units // chip.accelerator_units)
    if sides is None or units % chip.accelerator_units:
        near = hardware.nearest(chip, (units // chip.accelerator_units,))
        examples = ", ".join(f"{chip.name}:{hardware.sides_text(s)}" for s in near)
        unit = "chips" if chip.accelerator_units == 1 else "TensorCores"
        raise DeviceError(f"target {name!r}: {chip.name} has no slice of {units} {unit}; the nearest are {examples}.")
    return Target("tpu", chip, topology=sides)


def devices_of(target: str) -> int:
    """How many jax devices a TPU's target has; 1 for a chip's name alone.

    >>> devices_of("v5e"), devices_of("v5e:4x4"), devices_of("tpu7x:2x2x1")
    (1, 16, 8)
    """
    parsed = Target.parse_tpu(target)
    return 1 if parsed.topology is None else math.prod(parsed.topology) * Target.parse_chip(target).devices
