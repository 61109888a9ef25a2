"""The cross entropy of a linear layer on GPUs: Triton kernels for torch tensors and JAX arrays; the logits live in
registers, a tile at a time.
"""

from __future__ import annotations

from vishwamai.core import gpu
from vishwamai.core.op import Implementation
from vishwamai.core.target import Target
from vishwamai.ops.loss.gpu_backward import backward
from vishwamai.ops.loss.gpu_forward import forward
from vishwamai.ops.loss.gpu_tiles import LossGpuConfig, heuristic
from vishwamai.ops.loss.spec import WITHOUT_TARGETS, LossSpec

_DTYPES = ("bfloat16", "float16", "float32")


def why_not(spec: LossSpec, target: Target) -> str | None:
    """The reason why this kernel cannot serve `spec`, or None."""
    if spec.operands.targets is not None:
        return WITHOUT_TARGETS
    dtype = spec.operands.x.dtype.name
    if dtype not in _DTYPES:
        return f"`x` is {dtype}; the Triton kernel takes {', '.join(_DTYPES)}."
    if spec.groups * spec.tokens == 0:
        return "there are no tokens."
    return gpu.why_not(target)


def notes(spec: LossSpec, target: Target) -> tuple[str, ...]:
    """What `explain` adds: what the backward pass holds."""
    entries = min(heuristic(spec, target).block_vocab, spec.vocab)
    size = spec.groups * spec.tokens * (entries * spec.operands.x.dtype.itemsize + 4 * spec.features)
    return (
        f"backward holds {entries} of the vocab of {spec.vocab} at a time, {size:,} bytes, and computes the logits "
        "once more",
    )


TRITON = Implementation("triton", "cuda", forward, backward, why_not, heuristic, LossGpuConfig, notes)
