"""Attention on TPUs you do not have, compared with its peers: the compiler's own schedule of each kernel, followed by
the same simulator.

Peers are the Pallas kernels that come with jax, `flash_attention` and `splash_attention`, each at the best of a few
block sizes, and Tokamax's splash attention where the package is installed (`pip install tokamax`). Every time is an
estimate (docs/aot.md says how far to trust it; differences below 4 % are not worth reading); the last lines give the
geometric mean of ours / best peer. "backward" is the program of forward and backward less the forward.

    python benchmarks/tpu.py attention --targets v4,v5e,v5p,v6e,tpu7x --cases causal-128,full-128 --directions
    forward,backward
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai import flash_attention
from vishwamai.bench import estimates


@dataclasses.dataclass(frozen=True)
class Shape:
    """One attention problem, bfloat16."""

    causal: bool
    dim: int
    kv_heads: int = 16
    heads: int = 16
    window: int | None = None
    batch: int = 4
    length: int = 4096
    document: int | None = None
    """Tokens of each document, where rows are packed."""

    def arrays(self) -> list[Any]:
        """Query, key, value and, of packed rows, the segment ids, whose values steer kernels."""

        def of(heads: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch, heads, self.length, self.dim), jnp.bfloat16)

        ids = [] if self.document is None else [np.arange(self.length, dtype=np.int32) // self.document]
        return [of(self.heads), of(self.kv_heads), of(self.kv_heads), *(np.tile(x, (self.batch, 1)) for x in ids)]

    @property
    def flops(self) -> float:
        """Of the forward pass, over the positions that the mask leaves."""
        if self.window is not None:
            live = sum(min(row, self.window) + 1 for row in range(self.length))
        elif self.document is not None:
            live = sum(row % self.document + 1 for row in range(self.length))
        else:
            live = self.length * (self.length + 1) // 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * live * self.dim


SHAPES = {
    **{
        f"{'causal' if causal else 'full'}-{dim}": Shape(causal, dim)
        for causal in (True, False)
        for dim in (128, 64, 256)
    },
    "window-128": Shape(True, 128, window=1024),
    "narrow-128": Shape(True, 128, window=511, batch=1, length=16384),
    "gqa-128": Shape(True, 128, heads=32, kv_heads=8),
    "docs-700": Shape(True, 128, batch=1, length=8192, document=700),
}


def ours(shape: Shape) -> Iterator[estimates.Call]:
    window = None if shape.window is None else (shape.window, None)

    def call(q: Any, k: Any, v: Any, ids: Any = None) -> Any:
        segments = None if ids is None else (ids, ids)
        return flash_attention(q, k, v, causal=shape.causal, window=window, segment_ids=segments)

    yield estimates.OURS, call


def jax_flash(shape: Shape) -> Iterator[estimates.Call]:
    """jax.experimental.pallas.ops.tpu.flash_attention; it has neither windows nor grouped heads."""
    from jax.experimental.pallas.ops.tpu import flash_attention as kernel

    if shape.window is not None or shape.kv_heads != shape.heads:
        return
    for block in (512, 1024):
        sizes = kernel.BlockSizes(
            block_q=block,
            block_k_major=block,
            block_k=block,
            block_b=1,
            block_q_major_dkv=block,
            block_k_major_dkv=block,
            block_k_dkv=block,
            block_q_dkv=block,
            block_k_major_dq=block,
            block_k_dq=block,
            block_q_dq=block,
        )

        def call(q: Any, k: Any, v: Any, ids: Any = None, *, sizes: Any = sizes) -> Any:
            segments = None if ids is None else kernel.SegmentIds(ids, ids)
            options = {"segment_ids": segments, "causal": shape.causal, "sm_scale": 1 / math.sqrt(shape.dim)}
            return kernel.flash_attention(q, k, v, **options, block_sizes=sizes)

        yield f"jax flash {block}", call


def _masked(shape: Shape, masks: Any) -> Any:
    size = (shape.length, shape.length)
    if shape.window is not None:
        return masks.LocalMask(size, (shape.window, 0), 0)
    return masks.CausalMask(size) if shape.causal else masks.FullMask(size)


def _splash(
    shape: Shape, name: str, modules: tuple[Any, Any], make: Callable[..., Any], choices: Sequence[tuple[int, int, int]]
) -> Iterator[estimates.Call]:
    """A splash attention with each choice of tiles; `make(mask, blocks)` makes its kernel. The scale is the caller's to
    apply.
    """
    kernel, masks = modules
    for block_q, block_kv, compute in choices:
        blocks = {
            "block_q": block_q,
            "block_kv": block_kv,
            "block_kv_compute": compute,
            "block_q_dkv": block_q,
            "block_kv_dkv": block_kv,
            "block_kv_dkv_compute": compute,
        }

        def call(q: Any, k: Any, v: Any, ids: Any = None, *, blocks: dict[str, int] = blocks) -> Any:
            attend = make(_masked(shape, masks), blocks)
            segments = () if ids is None else (kernel.SegmentIds(ids, ids),)
            return jax.vmap(attend)(q * jnp.asarray(1 / math.sqrt(shape.dim), q.dtype), k, v, *segments)

        yield f"{name} {block_q}/{block_kv}/{compute}", call


def jax_splash(shape: Shape) -> Iterator[estimates.Call]:
    """jax.experimental.pallas.ops.tpu.splash_attention, with its fused backward kernel and, of windows, where they are
    faster, with its two kernels.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def make(mask: Any, blocks: dict[str, Any], fused: bool = True) -> Any:
        separate_blocks = {} if fused else {"block_q_dq": blocks["block_q_dkv"], "block_kv_dq": blocks["block_kv_dkv"]}
        sizes = kernel.BlockSizes(**blocks, **separate_blocks, use_fused_bwd_kernel=fused)
        heads = masks.MultiHeadMask([mask] * shape.heads)
        return kernel.make_splash_mha(heads, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    choices = ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (1024, 2048, 512))
    yield from _splash(shape, "jax splash", (kernel, masks), make, choices)
    if shape.window is not None:
        unfused = functools.partial(make, fused=False)
        narrow = ((256, 256, 256), (512, 512, 512), (512, 1024, 512), (1024, 1024, 512))
        yield from _splash(shape, "jax splash, unfused", (kernel, masks), unfused, narrow)


def tokamax_splash(shape: Shape) -> Iterator[estimates.Call]:
    """Tokamax's splash attention; nothing where the package is not installed."""
    try:
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as kernel  # type: ignore
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks  # type: ignore
    except ImportError:
        return

    def make(mask: Any, blocks: dict[str, int]) -> Any:
        config = kernel.SplashConfig(**blocks, use_base2_exp=True)
        return kernel.make_splash_mha(mask=mask, config=config, q_seq_shards=1)

    choices = ((1024, 1024, 256), (1024, 1024, 512), (2048, 2048, 512))
    yield from _splash(shape, "tokamax splash", (kernel, masks), make, choices)


PEERS = (jax_flash, jax_splash, tokamax_splash)


def _calls(shape: Shape) -> list[estimates.Call]:
    return [*ours(shape), *(call for peer in PEERS for call in peer(shape))]


def _pulled(call: Callable[..., Any]) -> Callable[..., Any]:
    """Both passes, of the arrays and a cotangent; segment ids have no gradient."""

    def run(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        *ids, cotangent = rest
        return estimates.with_gradient(lambda q, k, v: call(q, k, v, *ids))(q, k, v, cotangent)

    return run


@functools.cache
def forward_seconds(shape: Shape, target: str) -> dict[str, float | str]:
    """Estimated seconds of the forward pass by name."""
    return estimates.inspected(_calls(shape), shape.arrays(), target, shape.flops)


def backward_seconds(shape: Shape, target: str) -> dict[str, float | str]:
    """Estimated seconds of the backward pass by name: the program of both passes less the forward."""
    forward, arrays, calls = forward_seconds(shape, target), shape.arrays(), _calls(shape)
    pulled = [(name, _pulled(call)) for name, call in calls]
    total = estimates.inspected(pulled, [*arrays, arrays[0]], target, 3.5 * shape.flops)

    def less(name: str) -> float | str:
        first, two = forward[name], total[name]
        return first if isinstance(first, str) else two if isinstance(two, str) else two - first

    return {name: less(name) for name, _ in calls}


def main() -> None:
    options = estimates.parser(__doc__, cases=SHAPES, directions=("forward", "backward")).parse_args()
    table = estimates.PeerTable(f"{'case':<12}{'target':<7}{'direction':<10}")
    for direction in options.directions:
        for name in options.cases:
            for target in options.targets:
                seconds = (backward_seconds if direction == "backward" else forward_seconds)(SHAPES[name], target)
                table.line(f"{name:<12}{target:<7}{direction:<10}", direction, seconds)
    table.means()
