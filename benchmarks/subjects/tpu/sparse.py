"""What sparse attention and block-sparse products cost by the share of blocks that are there: by the compiler's
schedule on TPUs, by CPU time here.

In every row of blocks the same number of random ones is live, so that the share is exact and no pattern helps. A time
compared with the dense one (share 1, the same kernel) should be the share itself; what is above it is the price of
small tiles and of starting up.

    python benchmarks/tpu.py sparse --targets v5e,v5p --blocks 128,512
    python benchmarks/tpu.py sparse --cpu
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai import FallbackWarning, block_sparse_attention, block_sparse_matmul
from vishwamai.aot import Inspection, inspect_many
from vishwamai.bench import estimates
from vishwamai.core.errors import VishwamaiError
from vishwamai.measure import timing
from vishwamai.ops.sparse import block_indices

SHARES = (1.0, 0.5, 0.25, 0.125)


CPU_TIME = timing.sampler(time.process_time)


def live_blocks(count: int, share: float) -> np.ndarray:
    """Bool `[count, count]` with `share` of every row."""
    rng = np.random.default_rng(0)
    mask = np.zeros((count, count), bool)
    for row in mask:
        row[rng.permutation(count)[: max(1, round(count * share))]] = True
    return mask


def programs(op: str, size: int, width: int, heads: int, block: int, share: float, dtype: Any) -> tuple[Any, ...]:
    """(forward, its arguments, forward and backward, its arguments) of one problem; `width` is the head dimension, or
    the dense rows.
    """
    mask = live_blocks(size // block, share)
    if op == "attention":
        x = jax.ShapeDtypeStruct((1, heads, size, width), dtype)
        arguments = [x, x, x]
        cotangent = x

        def call(*args: Any) -> Any:
            return block_sparse_attention(*args, block_mask=mask, block_size=block)
    else:
        indices = block_indices(mask)
        arguments = [
            jax.ShapeDtypeStruct((width, size), dtype),
            jax.ShapeDtypeStruct((len(indices), block, block), dtype),
        ]
        cotangent = arguments[0]

        def call(*args: Any) -> Any:
            return block_sparse_matmul(*args, indices=indices, shape=(size, size))

    return call, arguments, estimates.with_gradient(call, outputs=True), [*arguments, cotangent]


def by_schedule(op: str, block: int, target: str) -> list[tuple[float, float]]:
    """Estimated (forward, backward) seconds for every share."""
    width, heads = (128, 8) if op == "attention" else (4096, 1)
    cases = []
    for share in SHARES:
        call, arguments, with_gradient, more = programs(op, 4096, width, heads, block, share, jnp.bfloat16)
        cases += [
            Inspection(call, arguments, target=target, flops=1.0),
            Inspection(with_gradient, more, target=target, flops=1.0),
        ]
    schedules = inspect_many(cases)
    for result in schedules:
        if isinstance(result, VishwamaiError):
            raise result
    seconds = [result.seconds for result in schedules]  # type: ignore[union-attr]
    return [(forward, total - forward) for forward, total in zip(seconds[::2], seconds[1::2], strict=True)]


def by_cpu_time(op: str, block: int, rounds: int) -> list[tuple[float, float]]:
    """Medians of (forward, forward and backward) seconds of CPU time, all shares in turn."""
    width, heads = (64, 4) if op == "attention" else (512, 1)
    calls: list[Callable[[], Any]] = []
    rng = np.random.default_rng(0)
    for share in SHARES:
        call, arguments, with_gradient, more = programs(op, 2048, width, heads, block, share, jnp.float32)
        for function, shapes in ((call, arguments), (with_gradient, more)):
            arrays = [jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in shapes]
            jitted = jax.jit(function)
            calls.append(lambda f=jitted, arrays=arrays: jax.block_until_ready(f(*arrays)))
    timed = timing.side_by_side(
        {str(i): call for i, call in enumerate(calls)}, rounds=rounds, sample=CPU_TIME, sample_seconds=0.0
    )
    medians = [timed[str(i)].median for i in range(len(calls))]
    return list(zip(medians[::2], medians[1::2], strict=True))


def main() -> None:
    parser = estimates.parser(__doc__, targets=["v5e", "v5p"], ops=["attention", "matmul"], blocks=["128", "512"])
    parser.add_argument("--cpu", action="store_true", help="CPU time on this machine instead of schedules")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    warnings.simplefilter("ignore", FallbackWarning)
    second = "forward and backward" if options.cpu else "backward"
    print(
        f"{'op':<10}{'block':>6} "
        f"{'on':<6}{'share':>6}{'forward, ms':>13}{'of dense':>9}{second + ', ms':>25}{'of dense':>9}"
    )
    for op in options.ops:
        for block in map(int, options.blocks):
            for target in ["cpu"] if options.cpu else options.targets:
                times = by_cpu_time(op, block, options.rounds) if options.cpu else by_schedule(op, block, target)
                for share, (forward, backward) in zip(SHARES, times, strict=True):
                    dense = times[0]
                    print(
                        f"{op:<10}{block:>6} {target:<6}{share:>6}{forward * 1e3:>13.3f}{forward / dense[0]:>9.3f}"
                        f"{backward * 1e3:>25.3f}{backward / dense[1]:>9.3f}",
                        flush=True,
                    )
