"""Samples on a GPU: CUDA events around one call, after a write that empties the L2 cache."""

from __future__ import annotations

from vishwamai.measure.timing import Call, Sampler

_FLUSH_BYTES = 1 << 30
"""Many times the L2 cache of any GPU, so that the host has queued the call before the write is done (0.4 ms on an H100)
and what is measured is the GPU's time alone.
"""


def gpu_sampler() -> Sampler:
    """Takes samples on torch's current GPU; it sums the calls; each finds a cold cache."""
    import torch

    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def sample(call: Call, count: int) -> float:
        total = 0.0
        for _ in range(count):
            flush.zero_()
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            call()
            last.record()
            last.synchronize()
            total += first.elapsed_time(last) * 1e-3
        return total

    return sample
