"""The soft limit on GPUs: Triton kernels, element by element, for arrays of JAX and tensors of torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from toy_ops.soft_clip.spec import Operands, Outputs, SoftClipSpec
from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.core.tiles import Tiles, size, warp_count

FORWARD, BACKWARD = (gpu.TritonKernel("toy_ops.soft_clip.gpu_kernels", name) for name in ("forward", "backward"))


@dataclasses.dataclass(frozen=True)
class SoftClipGpuConfig(Tiles):
    """`block` elements for one program of so many warps."""

    block: int = size("elements", 1024, block_size=lambda tiles, n: gpu.next_power_of_2(n))
    warps: int = warp_count(4)


def why_not(spec: SoftClipSpec, target: Target) -> str | None:
    x = spec.operands.x
    if x.dtype.name == "float64":
        return "`x` is float64; the kernels compute in float32."
    if x.size == 0:
        return "the array is empty."
    return gpu.why_not(target)


def heuristic(spec: SoftClipSpec, target: Target) -> SoftClipGpuConfig:
    return SoftClipGpuConfig()


def _launch(
    kernel: gpu.TritonKernel,
    spec: SoftClipSpec,
    config: SoftClipGpuConfig,
    inputs: dict[str, Any],
    results: dict[str, bool],
) -> Any:
    """The results that are wanted, None for the others; each is like `x`."""
    x = spec.operands.x
    return gpu.launch(
        kernel,
        (gpu.cdiv(x.size, config.block),),
        inputs,
        {name: gpu.result(x.shape, x.dtype) if wanted else None for name, wanted in results.items()},
        warps=config.warps,
        size=x.size,
        LIMIT=spec.limit,
        BLOCK=config.block,
    )


def forward(spec: SoftClipSpec, config: SoftClipGpuConfig, operands: Operands) -> tuple[Outputs, None]:
    inputs = dict(x_ptr=operands.x, gain_ptr=operands.gain)
    return Outputs(*_launch(FORWARD, spec, config, inputs, dict(y_ptr=True))), None


def backward(
    spec: SoftClipSpec,
    config: SoftClipGpuConfig,
    operands: Operands,
    cotangents: Outputs,
) -> Operands:
    x, gain = operands
    inputs = dict(x_ptr=x, gain_ptr=gain, dy_ptr=cotangents.y)
    return Operands(*_launch(BACKWARD, spec, config, inputs, dict(dx_ptr=True, dgain_ptr=gain is not None)))


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, SoftClipGpuConfig)
