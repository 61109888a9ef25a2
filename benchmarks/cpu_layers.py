"""The native CPU kernels of whole layers side by side with torch and XLA: gated units, the linear cross entropy,
block-sparse products and attention.

As `cpu_peers.py` does it, and with its options:

    python benchmarks/cpu_layers.py --suite gated,loss
    taskset -c 1 python benchmarks/cpu_layers.py --clock cpu
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import numpy as np

import vishwamai
from vishwamai.bench.ratios import Comparison, main
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.ops.gated.cases import gated as gated_unit
from vishwamai.ops.loss.cases import Labels
from vishwamai.ops.sparse import block_indices, local

GATED = ((1, 2048, 5632), (64, 2048, 5632), (512, 1024, 4096))  # rows, features, hidden
LOSS = ((256, 32000, 768),)  # tokens, vocab, features
SPARSE = ((512, 4096, 64, 16),)  # rows, width of a square weight, its blocks, blocks of a row that are there
BLOCKS = ((8, 2048, 64, 64, 4),)  # heads, tokens, head_dim, block, blocks on either side of the diagonal


def comparisons_of(case: Case, xla: str = "xla") -> Iterator[Comparison]:
    """A case, and its gradients."""
    yield Comparison(case, xla=xla)
    with_gradients = Case(f"{case.name} + grad", case.op, case.call, case.arrays, case.options)
    yield Comparison(with_gradients, gradients=True, xla=xla)


def gated(options: Namespace) -> Iterator[Comparison]:
    for dtype in options.dtypes:
        for rows, features, hidden in GATED:
            weight = ArrayInit((features, hidden), dtype, scale=features**-0.5)
            arrays = {"x": ArrayInit((rows, features), dtype), "gate": weight, "up": weight}
            name = f"gated {dtype} {rows}x{features}x{hidden}"
            yield from comparisons_of(Case(name, "gated_linear_unit", gated_unit, arrays))


def loss(options: Namespace) -> Iterator[Comparison]:
    for dtype in options.dtypes:
        for tokens, vocab, features in LOSS:
            arrays = {
                "x": ArrayInit((tokens, features), dtype),
                "weight": ArrayInit((vocab, features), dtype, scale=features**-0.5),
                "labels": Labels((tokens,), "int32", "integers", vocab=vocab),
            }
            name = f"loss {dtype} {tokens}x{vocab}x{features}"
            yield from comparisons_of(Case(name, "linear_cross_entropy", vishwamai.linear_cross_entropy, arrays))


def sparse(options: Namespace) -> Iterator[Comparison]:
    """torch multiplies by the dense weight, which one would run without blocks. The work is that of the blocks that are
    there.
    """
    rng = np.random.default_rng(0)
    for dtype in options.dtypes:
        for rows, width, block, row_blocks in SPARSE:
            number = width // block
            live = np.zeros((number, number), bool)
            for row in live:
                row[rng.choice(number, row_blocks, replace=False)] = True
            indices = block_indices(live)
            arrays = {
                "dense": ArrayInit((rows, width), dtype),
                "values": ArrayInit((len(indices), block, block), dtype),
            }
            name = f"sparse {dtype} {rows}x{width}x{width} {live.mean():.2f} of {block}x{block}"
            how = {"indices": indices, "shape": (width, width)}
            yield Comparison(Case(name, "block_sparse_matmul", vishwamai.block_sparse_matmul, arrays, how))


def blocks(options: Namespace) -> Iterator[Comparison]:
    """Attention over a band of blocks; torch is given the mask of every position."""
    for dtype in options.dtypes:
        for heads, tokens, dim, block, side in BLOCKS:
            live = local(tokens // block, side, side)
            arrays = {name: ArrayInit((1, heads, tokens, dim), dtype) for name in ("query", "key", "value")}
            name = f"blocks {dtype} {heads}x{tokens}x{dim} {live.mean():.2f} of {block}"
            how = {"block_mask": live, "block_size": block}
            yield from comparisons_of(
                Case(name, "attention", vishwamai.block_sparse_attention, arrays, how), xla="xla_chunked"
            )


SUITES = {suite.__name__: suite for suite in (gated, loss, sparse, blocks)}

if __name__ == "__main__":
    main(SUITES, __doc__, SUITES)
