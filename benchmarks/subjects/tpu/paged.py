"""Paged attention on TPUs you do not have, compared with its peers: the compiler's own schedule of each kernel,
followed by the same simulator.

Peers are the Pallas kernels that come with jax, `ragged_paged_attention` and `paged_attention`, each at the best of a
few block sizes. Every time is an estimate of the whole program (docs/aot.md says how far to trust it; differences below
4 % are not worth reading). "share" is the bound over the estimate: the time that HBM needs at its peak for the pages
that are live, of which the simulator lets large copies reach 90 %, or that the matrix units need for the products of
the keys that are seen, whichever is longer.

    python benchmarks/tpu.py paged --targets v4,v5e,v5p,v6e,tpu7x --cases decode-4096,decode-ragged
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vishwamai import ragged_paged_attention
from vishwamai.aot import Inspection
from vishwamai.bench import estimates
from vishwamai.core.hardware import TPUS, TpuChip
from vishwamai.core.qtensor import bits

Calls = Iterator[tuple[str, Callable[..., Any], list[Any]]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """One step; `lengths` tokens of every sequence are in pages of `page_size`. `latent`: (columns, value's columns) of
    one shared head; 576 columns stand in 640. `queries`: new tokens of each sequence; one where it is empty.
    """

    lengths: tuple[int, ...]
    queries: tuple[int, ...] = ()
    page_size: int = 64
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    dtype: str = "bfloat16"
    latent: tuple[int, int] | None = None

    @property
    def entries(self) -> int:
        return -(-max(self.lengths) // self.page_size)

    @property
    def pages(self) -> int:
        return len(self.lengths) * self.entries

    @property
    def live_bytes(self) -> float:
        """Of the keys and values that are seen."""
        row = self.latent[0] if self.latent else 2 * self.kv_heads * self.dim
        return sum(self.lengths) * row * bits(self.dtype) / 8

    @property
    def runs(self) -> tuple[int, ...]:
        return self.queries or (1,) * len(self.lengths)

    @property
    def flops(self) -> float:
        """Of the keys that are seen."""
        dims = sum(self.latent) if self.latent else 2 * self.dim
        seen = sum(run * (length - (run - 1) / 2) for run, length in zip(self.runs, self.lengths, strict=True))
        return 2.0 * self.heads * dims * seen

    def bound(self, chip: TpuChip) -> float:
        """Seconds."""
        return max(self.live_bytes / chip.hbm_bandwidth_per_device, self.flops / chip.peak_per_device("bfloat16"))

    def query(self) -> jax.ShapeDtypeStruct:
        dim = self.latent[0] if self.latent else self.dim
        return jax.ShapeDtypeStruct((sum(self.runs), self.heads, dim), jnp.bfloat16)

    def tables(self) -> list[np.ndarray]:
        """kv_lens, page_indices, cu_q_lens; their values steer the kernels, so the simulator must have them."""
        order = np.random.default_rng(0).permutation(self.pages).astype(np.int32)
        return [
            np.array(self.lengths, np.int32),
            order.reshape(len(self.lengths), self.entries),
            np.concatenate(([0], np.cumsum(self.runs))).astype(np.int32),
        ]

    def pool(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))


def _ragged(count: int) -> tuple[int, ...]:
    """Lengths between 100 and 8000, many short ones."""
    return tuple(int(n) for n in np.exp(np.random.default_rng(1).uniform(math.log(100), math.log(8000), count)))


BATCHES = {
    "decode-4096": Batch((4096,) * 64),
    "decode-1024": Batch((1024,) * 64),
    "decode-ragged": Batch(_ragged(64)),
    "decode-page16": Batch((4096,) * 32, page_size=16),
    "decode-70b": Batch((4096,) * 32, heads=64),
    "decode-mha": Batch((1024,) * 32, kv_heads=32),
    "decode-int8": Batch((4096,) * 64, dtype="int8"),
    "decode-fp8": Batch((4096,) * 64, dtype="float8_e4m3fn"),
    "decode-1500": Batch((1500,) * 128, page_size=16, kv_heads=4),
    "decode-1500-page64": Batch((1500,) * 128, kv_heads=4),
    "decode-1500-int8": Batch((1500,) * 128, page_size=16, kv_heads=4, dtype="int8"),
    "decode-1500-int4": Batch((1500,) * 128, page_size=16, kv_heads=4, dtype="int4"),
    "prompt-2048": Batch((2048,), (2048,)),
    "prompt-8192": Batch((8192,), (2048,)),  # the last 2048 tokens of it
    "prompt-mha": Batch((2048,), (2048,), kv_heads=32),
    "prompt-int8": Batch((2048,), (2048,), dtype="int8"),
    "prompt-int4": Batch((2048,), (2048,), dtype="int4"),
    "mixed-page16": Batch((1024,) * 2 + (1500,) * 64, (1024,) * 2 + (1,) * 64, page_size=16),
    "decode-latent": Batch((4096,) * 64, heads=128, kv_heads=1, latent=(640, 512)),
}


def ours(batch: Batch) -> Calls:
    shape = (batch.latent[0],) if batch.latent else (2 * batch.kv_heads, batch.dim)
    pool = batch.pool(batch.pages, batch.page_size, *shape)
    options: dict[str, Any] = {"latent_dim": batch.latent[1], "scale": 192**-0.5} if batch.latent else {}
    if jnp.dtype(batch.dtype).itemsize == 1:
        options |= {"k_scale": 0.05, "v_scale": 0.05}

    def call(query: Any, pages: Any, lens: Any, table: Any, starts: Any) -> Any:
        return ragged_paged_attention(query, pages, lens, table, starts, max_q_len=max(batch.runs), **options)

    yield estimates.OURS, call, [batch.query(), pool, *batch.tables()]


def jax_ragged(batch: Batch) -> Calls:
    """jax.experimental.pallas.ops.tpu.ragged_paged_attention; it has no latent pages."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    if batch.latent:
        return
    pool = batch.pool(batch.pages, batch.page_size, 2 * batch.kv_heads, batch.dim)
    scale = 0.05 if jnp.dtype(batch.dtype).itemsize == 1 else None
    number = np.array([len(batch.lengths)], np.int32)
    blocks = ((8, 512), (8, 1024), (16, 512), (32, 1024))
    for queries, keys in ((32, 512), (64, 512), (64, 1024), (128, 512)) if batch.queries else blocks:

        def call(q: Any, kv: Any, lens: Any, table: Any, starts: Any, n: Any, blocks: Any = (queries, keys)) -> Any:
            return kernel.ragged_paged_attention(
                q,
                kv,
                lens,
                table,
                starts,
                n,
                sm_scale=batch.dim**-0.5,
                k_scale=scale,
                v_scale=scale,
                num_queries_per_block=blocks[0],
                num_kv_pages_per_block=blocks[1] // batch.page_size,
                vmem_limit_bytes=48 << 20,
            )

        yield f"jax ragged {queries}/{keys}", call, [batch.query(), pool, *batch.tables(), number]


def jax_paged(batch: Batch) -> Calls:
    """jax.experimental.pallas.ops.tpu.paged_attention: pages of one head each; 8-bit pages there have another layout,
    with a scale for every row, and it has no runs.
    """
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    if batch.latent or batch.dtype != "bfloat16" or batch.queries:
        return
    pool = batch.pool(batch.kv_heads, batch.pages, batch.page_size, batch.dim)
    lens, table, _ = batch.tables()
    for keys in (512, 1024):
        if batch.entries % (keys // batch.page_size):
            continue

        def call(q: Any, k: Any, v: Any, lens: Any, table: Any, keys: int = keys) -> Any:
            q = q * jnp.asarray(batch.dim**-0.5, q.dtype)
            return paged_attention(q, k, v, lens, table, pages_per_compute_block=keys // batch.page_size)

        yield f"jax paged {keys}", call, [batch.query(), pool, pool, lens, table]


def main() -> None:
    options = estimates.parser(__doc__, targets=["v5e"], cases=BATCHES).parse_args()
    print(
        (
            f"{'case':<20}{'chip':<7}{'ours us':>9}{'share':>7}{'best peer us':>14}{'share':>7}{'ratio':>7}  peer "
            "(estimates)"
        ),
        flush=True,
    )
    for name in options.cases:
        batch = BATCHES[name]
        calls = [call for peer in (ours, jax_ragged, jax_paged) for call in peer(batch)]
        for target in options.targets:
            seconds = estimates.seconds(
                [
                    Inspection(call, args, target=target, nbytes=batch.live_bytes, flops=batch.flops, name=label)
                    for label, call, args in calls
                ]
            )
            mine, bound = seconds[estimates.OURS], batch.bound(TPUS[target])
            if isinstance(mine, str):
                print(f"{name:<20}{target:<7} {mine}", flush=True)
                continue
            line = f"{name:<20}{target:<7}{mine * 1e6:>9.1f}{bound / mine:>7.2f}"
            # An estimate below what HBM allows is a kernel whose loops could not be followed.
            best = estimates.best_peer({n: s for n, s in seconds.items() if isinstance(s, float) and s > bound})
            if best is not None:
                line += f"{best[1] * 1e6:>14.1f}{bound / best[1]:>7.2f}{mine / best[1]:>7.2f}  {best[0]}"
            print(line, flush=True)
