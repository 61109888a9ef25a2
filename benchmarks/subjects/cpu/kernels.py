"""The native CPU kernels side by side with torch and XLA, in one process; `vishwamai.bench.ratios` checks, times and
prints.

    python benchmarks/cpu.py kernels --suite attention,gemm
    python benchmarks/cpu.py kernels --suite gated,loss,sparse,blocks     # whole layers
    taskset -c 1 python benchmarks/cpu.py kernels --clock cpu # on a busy machine: one core, and the CPU time that the
    process itself used

Inputs are random normal: AMX runs at a higher clock on zeros.
"""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import numpy as np

import vishwamai
from vishwamai.bench import ratios
from vishwamai.bench.ratios import Comparison
from vishwamai.bench.subject import Arrays, Peer
from vishwamai.bench.subjects import gemm as gemm_subject
from vishwamai.core.cases import ArrayInit, Case
from vishwamai.ops.gated.cases import gated as gated_unit
from vishwamai.ops.loss.cases import Labels
from vishwamai.ops.paged_attention.cases import ForwardCase, tables
from vishwamai.ops.rope.cases import rope
from vishwamai.ops.sparse import block_indices, local

GATED = ((1, 2048, 5632), (64, 2048, 5632), (512, 1024, 4096))  # rows, features, hidden
LOSS = ((256, 32000, 768),)  # tokens, vocab, features
SPARSE = ((512, 4096, 64, 16),)  # rows, width of a square weight, its blocks, blocks of a row that are there
BLOCKS = ((8, 2048, 64, 64, 4),)  # heads, tokens, head_dim, block, blocks on either side of the diagonal


def _attention(name: str, query: tuple[int, ...], key: tuple[int, ...], dtype: str, **options: Any) -> Case:
    shapes = {"query": query, "key": key, "value": key}
    arrays = {name: ArrayInit(shape, dtype) for name, shape in shapes.items()}
    return Case(name, "attention", vishwamai.flash_attention, arrays, options)


def attention(options: Namespace, gradients: bool = False) -> Iterator[Comparison]:
    for dtype, length, dim, causal in itertools.product(options.dtypes, options.lengths, (64, 128), (False, True)):
        shape, suite = (1, 8, length, dim), "attention_grad" if gradients else "attention"
        name = f"{suite} {dtype} 8x{length}x{dim} {'causal' if causal else 'full'}"
        case = _attention(name, shape, shape, dtype, causal=causal)
        yield Comparison(case, gradients=gradients, xla="xla" if length <= options.xla_length else None)


def attention_grad(options: Namespace) -> Iterator[Comparison]:
    return attention(options, gradients=True)


def decode(options: Namespace) -> Iterator[Comparison]:
    shapes = ((1, 8192, 8, 8, 64), (1, 8192, 32, 8, 128), (8, 2048, 32, 8, 128))
    for dtype, (batch, length, heads, kv_heads, dim) in itertools.product(options.dtypes, shapes):
        name = f"decode {dtype} {batch}x{heads}/{kv_heads}x{length}x{dim}"
        case = _attention(name, (batch, heads, 1, dim), (batch, kv_heads, length, dim), dtype)
        yield Comparison(case, "GB/s", xla=None)


def _gemm(name: str, m: int, n: int, k: int, dtype: str, kind: Any = "normal", **options: Any) -> Case:
    arrays = {"a": ArrayInit((m, k), dtype, kind), "b": ArrayInit((k, n), dtype, kind)}
    return Case(name, "gemm", vishwamai.gemm, arrays, options)


def gemm(options: Namespace) -> Iterator[Comparison]:
    squares = [(512,) * 3, (1024,) * 3, (2048,) * 3]
    for dtype, (m, n, k) in itertools.product(
        options.dtypes, [*squares, *((rows, 4096, 4096) for rows in (1, 16, 128))]
    ):
        yield Comparison(_gemm(f"gemm {dtype} {m}x{n}x{k}", m, n, k, dtype))


def int8(options: Namespace) -> Iterator[Comparison]:
    del options
    for m, n, k in ((256, 256, 256), (1024, 1024, 1024), (32, 4096, 4096)):
        yield Comparison(_gemm(f"int8 {m}x{n}x{k}", m, n, k, "int8", "integers"), "GOP/s")


def packed(options: Namespace) -> Iterator[Comparison]:
    """Few rows times a weight that was packed beforehand: what bounds it is reading the weight."""
    for dtype, rows in itertools.product(options.dtypes, (1, 4, 16)):
        case = _gemm(f"packed {dtype} {rows}x14336x4096", rows, 14336, 4096, dtype)
        yield Comparison(case, "GB/s", xla=None, more=gemm_subject.packed(case))


def grouped(options: Namespace) -> Iterator[Comparison]:
    """Experts' products."""
    rng = np.random.default_rng(0)
    for dtype, (groups, k, n) in itertools.product(options.dtypes, ((8, 1024, 1024), (64, 1024, 512))):
        sizes = rng.multinomial(1024, rng.dirichlet(np.full(groups, 2.0))).astype(np.int32)
        arrays = {"lhs": ArrayInit((1024, k), dtype), "rhs": ArrayInit((groups, k, n), dtype)}
        name = f"grouped {dtype} 1024x{n}x{k} of {groups}"
        yield Comparison(Case(name, "grouped_gemm", vishwamai.grouped_gemm, arrays, {"group_sizes": sizes}))


def norm(options: Namespace, gradients: bool = False) -> Iterator[Comparison]:
    """A layer norm, an RMS norm, and each of a sum with a residual stream, which is returned too."""
    shapes = ((256, 1024), (4096, 1024), (8192, 4096))[: 2 if gradients else 3]
    kinds = (("layer", vishwamai.layer_norm), ("rms", vishwamai.rms_norm))
    for dtype, (rows, features), (kind, call), residual in itertools.product(
        options.dtypes, shapes, kinds, (False, True)
    ):
        names = {"x": (rows, features), "scale": (features,)}
        names |= {"offset": (features,)} if kind == "layer" else {}
        names |= {"residual": (rows, features)} if residual else {}
        arrays = {name: ArrayInit(shape, dtype) for name, shape in names.items()}
        name = f"{kind}_norm{'+residual' * residual} {dtype} {rows}x{features}{' grad' * gradients}"
        yield Comparison(Case(name, "norm", call, arrays, {"eps": 1e-5}), "GB/s", gradients)


def norm_grad(options: Namespace) -> Iterator[Comparison]:
    return norm(options, gradients=True)


ROWS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "softmax": ("softmax", vishwamai.softmax, {}),
    "log_softmax": ("softmax", vishwamai.log_softmax, {}),
    "gelu": ("activation", vishwamai.gelu, {}),
    "gelu_tanh": ("activation", vishwamai.gelu, {"approximate": True}),
    "silu": ("activation", vishwamai.silu, {}),
    "relu2": ("activation", vishwamai.relu2, {}),
    "gelu_dropout": ("activation", vishwamai.fused_gelu_dropout, {"rate": 0.1}),
}


def rows(options: Namespace) -> Iterator[Comparison]:
    """Softmaxes, activations, dropout and rotary embeddings: memory's own speed is the goal."""
    for dtype in options.dtypes:
        for shape, (name, (op, call, how)) in itertools.product(((64, 2048), (1024, 2048), (4096, 4096)), ROWS.items()):
            arrays = {"x": ArrayInit(shape, dtype)}
            if "rate" in how:
                arrays["key"] = ArrayInit((2,), "uint32", "key")
            yield Comparison(Case(f"{name} {dtype} {shape[0]}x{shape[1]}", op, call, arrays, how), "GB/s")
        for length in (1, 128, 1024):  # the tables are made outside, as every model does
            arrays = {"query": ArrayInit((1, 32, length, 128), dtype)}
            how = {"cache": vishwamai.RotaryCache(128, length)}
            yield Comparison(Case(f"rope {dtype} 32x{length}x128", "rope", rope, arrays, how), "GB/s")


def rows_grad(options: Namespace) -> Iterator[Comparison]:
    """The gradients of some of `rows`; torch keeps what its backward pass needs, ours computes it again."""
    for dtype, name in itertools.product(options.dtypes, ("softmax", "log_softmax", "gelu", "silu")):
        op, call, how = ROWS[name]
        case = Case(f"{name}_grad {dtype} 1024x2048", op, call, {"x": ArrayInit((1024, 2048), dtype)}, how)
        yield Comparison(case, "GB/s", gradients=True)


def paged(options: Namespace) -> Iterator[Comparison]:
    """Decoding over pages of 64 tokens, Llama 3 8B's heads; next to it what this machine reads (numpy's sum of as many
    float32 numbers).
    """
    heads, kv_heads, dim, page = 32, 8, 128, 64

    def memory(arrays: Arrays) -> tuple[Any, ...]:
        return (np.ones(arrays["kv_pages"].nbytes // 4, np.float32),)

    read = Peer("read", "numpy", memory, lambda x: x.sum(), checked=False)
    for stored, (sequences, length) in itertools.product(
        (*options.dtypes, "int8", "float8_e4m3fn"), ((1, 16384), (8, 4096))
    ):
        narrow = stored in ("int8", "float8_e4m3fn")
        lists, number = tables(((1, length),) * sequences, page, spare=0)
        pool = ArrayInit((number, page, 2 * kv_heads, dim), stored, "integers" if narrow else "normal")
        query = ArrayInit((sequences, heads, dim), "bfloat16" if narrow else stored)
        scale = 0.02 if stored == "int8" else 0.2
        how: dict[str, Any] = {"max_q_len": 1} | ({"k_scale": scale, "v_scale": scale} if narrow else {})
        arrays = {"query": query, "kv_pages": pool, **lists}
        name = f"paged {stored} {sequences}x{length}"
        case = ForwardCase(name, "paged_attention", vishwamai.ragged_paged_attention, arrays, how)
        yield Comparison(case, "GB/s", more={"read": read})


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


SUITES = {
    suite.__name__: suite
    for suite in (
        attention,
        attention_grad,
        decode,
        gemm,
        int8,
        packed,
        grouped,
        norm,
        norm_grad,
        rows,
        rows_grad,
        paged,
        gated,
        loss,
        sparse,
        blocks,
    )
}
DEFAULT = ("attention", "attention_grad", "decode", "gemm", "int8", "norm", "rows", "rows_grad", "paged")


def main() -> None:
    ratios.main(SUITES, __doc__, DEFAULT)
