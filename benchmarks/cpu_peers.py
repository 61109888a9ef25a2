"""The native CPU kernels side by side with torch and XLA, in one process.

Every round calls the contestants in a new random order; the result is the ratio of the best times and the median of the rounds' ratios. Before anything
is timed, each contestant's numbers are compared with float64, and one whose error is beyond four times the best peer's is not timed at all.

    python benchmarks/cpu_peers.py --suite attention,gemm
    taskset -c 1 python benchmarks/cpu_peers.py --clock cpu     # on a busy machine: one core, and the CPU time that the process itself used

Inputs are random normal: AMX runs at a higher clock on zeros. torch gets its own preferred layouts; XLA is asked for a float32 sum of bfloat16 products,
which is the form that it runs fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import vishwamai
from vishwamai.core import ffi

OURS: dict[str, Any] = {"implementation": "native_cpu"}


@dataclasses.dataclass
class Case:
    """One comparison: contestants by name (each a call without arguments), the work of a call, and the truth to check `probe(result)` against."""

    name: str
    work: float  # floating-point operations or bytes
    unit: str  # of work per nanosecond
    contestants: dict[str, Callable[[], Any]]
    truth: np.ndarray | None = None
    probe: Callable[[Any], Any] = lambda result: result


def jitted(function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    compiled = jax.jit(function)
    return lambda: jax.block_until_ready(compiled(*args))


def pull(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of `function` of three arrays, for the cotangent that comes fourth."""
    return lambda a, b, c, cotangent: jax.vjp(function, a, b, c)[1](cotangent)


def host(x: Any) -> np.ndarray:
    """A jax or torch result as float64."""
    if isinstance(x, (tuple, list)):
        x = x[0]
    if hasattr(x, "detach"):
        return x.detach().float().numpy().astype(np.float64)
    return np.asarray(jnp.asarray(x, jnp.float32), np.float64)


class Suites:
    """The cases. Arrays are drawn from one generator, so every run compares on the same numbers."""

    def __init__(self, options: argparse.Namespace):
        import torch

        self.torch = torch
        torch.set_num_threads(options.threads)
        self.options = options
        self.rng = np.random.default_rng(0)

    def arrays(self, dtype: str, *shapes: tuple[int, ...]) -> tuple[list[jax.Array], list[Any]]:
        """Random arrays as jax and as torch arrays of the same values."""
        ours = [jnp.asarray(self.rng.standard_normal(shape, np.float32), dtype) for shape in shapes]
        theirs = [self.torch.tensor(np.asarray(x, np.float32)).to(getattr(self.torch, dtype)) for x in ours]
        return ours, theirs

    def attention(self, gradient: bool = False) -> Iterator[Case]:
        functional = self.torch.nn.functional
        for dtype in self.options.dtypes:
            for length in self.options.lengths:
                for dim in (64, 128):
                    for causal in (False, True):
                        shape = (1, 8, length, dim)
                        (q, k, v, w), (tq, tk, tv, tw) = self.arrays(dtype, shape, shape, shape, shape)

                        def ours(q: Any, k: Any, v: Any, causal: bool = causal) -> Any:
                            return vishwamai.flash_attention(q, k, v, causal=causal, **OURS)

                        def xla(q: Any, k: Any, v: Any, causal: bool = causal) -> Any:
                            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
                            return jax.nn.dot_product_attention(q, k, v, is_causal=causal).swapaxes(1, 2)

                        flops = 4.0 * 8 * length * length * dim * (0.5 if causal else 1.0)
                        name = f"{dtype} 8x{length}x{dim} {'causal' if causal else 'full'}"
                        if gradient:
                            leaves = [x.clone().requires_grad_() for x in (tq, tk, tv)]

                            def torch_grad(leaves: Any = leaves, tw: Any = tw, causal: bool = causal) -> Any:
                                out = functional.scaled_dot_product_attention(*leaves, is_causal=causal)
                                return self.torch.autograd.grad(out, leaves, tw)

                            contestants = {"ours": jitted(pull(ours), q, k, v, w), "torch": torch_grad}
                            if length <= self.options.xla_length:
                                contestants["xla"] = jitted(pull(xla), q, k, v, w)
                            yield Case(f"attention_grad {name}", 3.5 * flops, "GFLOP/s", contestants)
                            continue

                        def torch_forward(tq: Any = tq, tk: Any = tk, tv: Any = tv, causal: bool = causal) -> Any:
                            return functional.scaled_dot_product_attention(tq, tk, tv, is_causal=causal)

                        contestants = {"ours": jitted(ours, q, k, v), "torch": torch_forward}
                        if length <= self.options.xla_length:
                            contestants["xla"] = jitted(xla, q, k, v)
                        rows = min(32, length)
                        logits = (
                            np.asarray(q, np.float64)[0, 0, -rows:] @ np.asarray(k, np.float64)[0, 0].T / math.sqrt(dim)
                        )
                        if causal:
                            logits = np.where(
                                np.arange(length) <= np.arange(length - rows, length)[:, None], logits, -np.inf
                            )
                        p = np.exp(logits - logits.max(-1, keepdims=True))
                        truth = p / p.sum(-1, keepdims=True) @ np.asarray(v, np.float64)[0, 0]
                        yield Case(
                            f"attention {name}",
                            flops,
                            "GFLOP/s",
                            contestants,
                            truth,
                            lambda y, rows=rows: y[0, 0, -rows:],
                        )

    def attention_grad(self) -> Iterator[Case]:
        yield from self.attention(gradient=True)

    def decode(self) -> Iterator[Case]:
        functional = self.torch.nn.functional
        for dtype in self.options.dtypes:
            for batch, length, heads, kv_heads, dim in (
                (1, 8192, 8, 8, 64),
                (1, 8192, 32, 8, 128),
                (8, 2048, 32, 8, 128),
            ):
                cache = (batch, kv_heads, length, dim)
                (q, k, v), (tq, tk, tv) = self.arrays(dtype, (batch, heads, 1, dim), cache, cache)

                def torch_forward(
                    tq: Any = tq, tk: Any = tk, tv: Any = tv, heads: int = heads, kv_heads: int = kv_heads
                ) -> Any:
                    return functional.scaled_dot_product_attention(tq, tk, tv, enable_gqa=heads != kv_heads)

                contestants = {
                    "ours": jitted(lambda q, k, v: vishwamai.flash_attention(q, k, v, **OURS), q, k, v),
                    "torch": torch_forward,
                }
                logits = np.asarray(q, np.float64)[0, 0] @ np.asarray(k, np.float64)[0, 0].T / math.sqrt(dim)
                p = np.exp(logits - logits.max())
                truth = p / p.sum() @ np.asarray(v, np.float64)[0, 0]
                name = f"decode {dtype} {batch}x{heads}/{kv_heads}x{length}x{dim}"
                yield Case(name, k.nbytes + v.nbytes, "GB/s", contestants, truth, lambda y: y[0, 0])

    def gemm(self) -> Iterator[Case]:
        shapes = [
            (512, 512, 512),
            (1024, 1024, 1024),
            (2048, 2048, 2048),
            (1, 4096, 4096),
            (16, 4096, 4096),
            (128, 4096, 4096),
        ]
        for dtype in self.options.dtypes:
            for m, n, k in shapes:
                (a, b), (ta, tb) = self.arrays(dtype, (m, k), (k, n))
                contestants = {
                    "ours": jitted(lambda a, b: vishwamai.gemm(a, b, **OURS), a, b),
                    "torch": lambda ta=ta, tb=tb: ta @ tb,
                    "xla": jitted(lambda a, b: jnp.dot(a, b, preferred_element_type=jnp.float32).astype(a.dtype), a, b),
                }
                truth = np.asarray(a, np.float64)[:8] @ np.asarray(b, np.float64)
                yield Case(f"gemm {dtype} {m}x{n}x{k}", 2.0 * m * n * k, "GFLOP/s", contestants, truth, lambda y: y[:8])

    def int8(self) -> Iterator[Case]:
        for m, n, k in ((256, 256, 256), (1024, 1024, 1024), (32, 4096, 4096)):
            a, b = (self.rng.integers(-127, 128, shape).astype(np.int8) for shape in ((m, k), (k, n)))
            ja, jb, ta, tb = jnp.asarray(a), jnp.asarray(b), self.torch.tensor(a), self.torch.tensor(b)
            contestants = {
                "ours": jitted(lambda a, b: vishwamai.gemm(a, b, **OURS), ja, jb),
                "torch": lambda ta=ta, tb=tb: self.torch.ops.aten._int_mm(ta, tb),
                "xla": jitted(lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32), ja, jb),
            }
            yield Case(
                f"int8 {m}x{n}x{k}",
                2.0 * m * n * k,
                "GOP/s",
                contestants,
                a[:8].astype(np.float64) @ b,
                lambda y: y[:8],
            )

    def packed(self) -> Iterator[Case]:
        """Few rows times a weight that was packed beforehand: what bounds it is reading the weight."""
        for dtype in self.options.dtypes:
            for m, n, k in ((1, 14336, 4096), (4, 14336, 4096), (16, 14336, 4096)):
                (a, b), (ta, tb) = self.arrays(dtype, (m, k), (k, n))
                weight = vishwamai.pack_weight(b)
                contestants = {
                    "ours": jitted(lambda a, b: vishwamai.gemm(a, b, **OURS), a, weight),
                    "plain": jitted(lambda a, b: vishwamai.gemm(a, b, **OURS), a, b),
                    "torch": lambda ta=ta, tb=tb: ta @ tb,
                }
                truth = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
                yield Case(f"packed {dtype} {m}x{n}x{k}", b.nbytes, "GB/s", contestants, truth)

    def grouped(self) -> Iterator[Case]:
        """Experts' products; torch takes a loop over the groups, XLA our own reference (`jax.lax.ragged_dot` multiplies every row with every matrix)."""
        for dtype in self.options.dtypes:
            for groups, k, n in ((8, 1024, 1024), (64, 1024, 512)):
                sizes = self.rng.multinomial(1024, self.rng.dirichlet(np.full(groups, 2.0)))
                (a, b), (ta, tb) = self.arrays(dtype, (1024, k), (groups, k, n))
                counts = jnp.asarray(sizes, jnp.int32)

                def torch_loop(ta: Any = ta, tb: Any = tb, sizes: Any = sizes) -> Any:
                    parts = self.torch.split(ta, [int(size) for size in sizes])
                    return self.torch.cat([x @ y for x, y in zip(parts, tb, strict=True)])

                contestants = {
                    "ours": jitted(lambda a, b, s: vishwamai.grouped_gemm(a, b, s, **OURS), a, b, counts),
                    "torch": torch_loop,
                    "xla": jitted(lambda a, b, s: vishwamai.grouped_gemm(a, b, s, implementation="xla"), a, b, counts),
                }
                owner = np.repeat(np.arange(groups), sizes)[:8]
                truth = np.einsum("ik,ikn->in", np.asarray(a, np.float64)[:8], np.asarray(b, np.float64)[owner])
                name = f"grouped {dtype} 1024x{n}x{k} of {groups}"
                yield Case(name, 2.0 * 1024 * n * k, "GFLOP/s", contestants, truth, lambda y: y[:8])

    def norm(self, gradient: bool = False) -> Iterator[Case]:
        """A layer norm, an RMS norm, and each of a sum with a residual stream, which is returned too."""
        functional = self.torch.nn.functional
        for dtype in self.options.dtypes:
            for rows, features in (
                ((256, 1024), (4096, 1024)) if gradient else ((256, 1024), (4096, 1024), (8192, 4096))
            ):
                drawn = self.arrays(
                    dtype, (rows, features), (rows, features), (features,), (features,), (rows, features)
                )
                (x, other, scale, offset, dy), (tx, to, ts, tb, tdy) = drawn
                for kind, summed in itertools.product(("layer", "rms"), (False, True)):
                    arrays = (x, scale, *(() if kind == "rms" else (offset,)), *((other,) if summed else ()))

                    def normed(*arrays: Any, how: str, kind: str = kind, summed: bool = summed) -> Any:
                        x, scale, *rest = arrays
                        residual = rest.pop() if summed else None
                        call = vishwamai.layer_norm if kind == "layer" else vishwamai.rms_norm
                        return call(x, scale, *rest, residual=residual, eps=1e-5, implementation=how)

                    def torch_normed(
                        x: Any, scale: Any, *rest: Any, kind: str = kind, summed: bool = summed, n: int = features
                    ) -> Any:
                        total = x + rest[-1] if summed else x
                        if kind == "rms":
                            y = functional.rms_norm(total, (n,), scale, 1e-5)
                        else:
                            y = functional.layer_norm(total, (n,), scale, rest[0], 1e-5)
                        return (y, total) if summed else y

                    def pulled(dy: Any, *arrays: Any, how: str, f: Any = normed, summed: bool = summed) -> Any:
                        _, pull = jax.vjp(lambda *a: f(*a, how=how), *arrays)
                        return pull((dy, dy) if summed else dy)

                    def first(y: Any, summed: bool = summed) -> Any:
                        return (y[0] if summed else y)[:8]

                    leaves = (tx, ts, *(() if kind == "rms" else (tb,)), *((to,) if summed else ()))
                    name = f"{kind}_norm{'+residual' if summed else ''} {dtype} {rows}x{features}"
                    if gradient:
                        leaves = tuple(t.clone().requires_grad_() for t in leaves)

                        def torch_pulled(leaves: Any = leaves, f: Any = torch_normed, dy: Any = tdy) -> Any:
                            y = f(*leaves)
                            return self.torch.autograd.grad(y, leaves, [dy] * len(y) if isinstance(y, tuple) else dy)

                        contestants = {
                            "ours": jitted(functools.partial(pulled, how="native_cpu"), dy, *arrays),
                            "torch": torch_pulled,
                            "xla": jitted(functools.partial(pulled, how="xla"), dy, *arrays),
                        }
                        # Both passes read x, the second dy, and write dx; with a residual the sum is written and its cotangent read.
                        yield Case(f"{name} grad", (6.0 if summed else 4.0) * x.nbytes, "GB/s", contestants)
                        continue
                    contestants = {
                        "ours": jitted(functools.partial(normed, how="native_cpu"), *arrays),
                        "torch": lambda leaves=leaves, f=torch_normed: f(*leaves),
                        "xla": jitted(functools.partial(normed, how="xla"), *arrays),
                    }
                    wide = np.asarray(x, np.float64)[:8]
                    if summed:
                        wide = np.asarray((x + other)[:8], np.float64)
                    if kind == "layer":
                        wide = wide - wide.mean(-1, keepdims=True)
                    truth = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(scale, np.float64)
                    if kind == "layer":
                        truth = truth + np.asarray(offset, np.float64)
                    yield Case(name, (4.0 if summed else 2.0) * x.nbytes, "GB/s", contestants, truth, first)

    def norm_grad(self) -> Iterator[Case]:
        return self.norm(gradient=True)

    def rows(self) -> Iterator[Case]:
        """Softmaxes, activations, dropout and rotary embeddings: memory's own speed is the goal."""
        functional = self.torch.nn.functional
        key = jax.random.key(0)
        calls: dict[
            str, tuple[Any, Any, Any]
        ] = {  # ours and XLA's in one, torch's, the truth (None where the dice differ)
            "softmax": (vishwamai.softmax, lambda t: t.softmax(-1), lambda x: jax.nn.softmax(x, axis=-1)),
            "log_softmax": (
                vishwamai.log_softmax,
                lambda t: t.log_softmax(-1),
                lambda x: jax.nn.log_softmax(x, axis=-1),
            ),
            "gelu": (vishwamai.gelu, functional.gelu, lambda x: jax.nn.gelu(x, approximate=False)),
            "gelu_tanh": (
                lambda x, **how: vishwamai.gelu(x, approximate=True, **how),
                lambda t: functional.gelu(t, approximate="tanh"),
                jax.nn.gelu,
            ),
            "silu": (vishwamai.silu, functional.silu, jax.nn.silu),
            "relu2": (vishwamai.relu2, lambda t: functional.relu(t).square(), lambda x: jnp.square(jax.nn.relu(x))),
            "gelu_dropout": (
                lambda x, **how: vishwamai.fused_gelu_dropout(x, 0.1, key=key, **how),
                lambda t: functional.dropout(functional.gelu(t), 0.1),
                None,
            ),
        }
        for dtype in self.options.dtypes:
            for shape in ((64, 2048), (1024, 2048), (4096, 4096)):
                (x,), (tx,) = self.arrays(dtype, shape)
                for name, (ours, theirs, true) in calls.items():
                    contestants = {
                        "ours": jitted(lambda x, f=ours: f(x, **OURS), x),
                        "torch": lambda tx=tx, f=theirs: f(tx),
                        "xla": jitted(lambda x, f=ours: f(x, implementation="xla"), x),
                    }
                    truth = None if true is None else np.asarray(true(x[:8].astype(jnp.float32)), np.float64)
                    label = f"{name} {dtype} {shape[0]}x{shape[1]}"
                    yield Case(label, 2.0 * x.nbytes, "GB/s", contestants, truth, lambda y: y[:8])
            for heads, length, dim in ((32, 1, 128), (32, 128, 128), (32, 1024, 128)):
                (x,), (tx,) = self.arrays(dtype, (1, heads, length, dim))
                angle = np.arange(length)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim / 2))
                cos, sin = (self.torch.tensor(f(angle), dtype=tx.dtype) for f in (np.cos, np.sin))

                def torch_rope(tx: Any = tx, cos: Any = cos, sin: Any = sin) -> Any:
                    a, b = tx.chunk(2, -1)
                    return self.torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

                # The tables are made outside, as every model does.
                cache = vishwamai.RotaryCache(dim, length)
                contestants = {
                    who: jitted(
                        lambda x, how=how, cache=cache: vishwamai.apply_rope(x, cache=cache, implementation=how), x
                    )
                    for who, how in (("ours", "native_cpu"), ("xla", "xla"))
                } | {"torch": torch_rope}
                wide = np.asarray(x, np.float64)
                a, b = wide[..., : dim // 2], wide[..., dim // 2 :]
                truth = np.concatenate(
                    [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
                )
                yield Case(f"rope {dtype} {heads}x{length}x{dim}", 2.0 * x.nbytes, "GB/s", contestants, truth)

    def rows_grad(self) -> Iterator[Case]:
        """The gradients of some of `rows`; torch keeps what its backward pass needs, ours computes it again."""
        functional = self.torch.nn.functional
        calls: dict[str, tuple[Any, Any]] = {
            "softmax": (vishwamai.softmax, lambda t: t.softmax(-1)),
            "log_softmax": (vishwamai.log_softmax, lambda t: t.log_softmax(-1)),
            "gelu": (vishwamai.gelu, functional.gelu),
            "silu": (vishwamai.silu, functional.silu),
        }
        for dtype in self.options.dtypes:
            (x, w), (tx, tw) = self.arrays(dtype, (1024, 2048), (1024, 2048))
            for name, (ours, theirs) in calls.items():

                def pulled(x: Any, w: Any, how: str, f: Any = ours) -> Any:
                    return jax.vjp(lambda x: f(x, implementation=how), x)[1](w)[0]

                leaf = tx.clone().requires_grad_()
                contestants = {
                    "ours": jitted(lambda x, w, f=pulled: f(x, w, "native_cpu"), x, w),
                    "torch": lambda leaf=leaf, tw=tw, f=theirs: self.torch.autograd.grad(f(leaf), leaf, tw),
                    "xla": jitted(lambda x, w, f=pulled: f(x, w, "xla"), x, w),
                }
                yield Case(f"{name}_grad {dtype} 1024x2048", 3.0 * x.nbytes, "GB/s", contestants)

    def paged(self) -> Iterator[Case]:
        """Decoding over pages of 64 tokens, Llama 3 8B's heads; beside it what this machine reads (numpy's sum of as many float32 numbers)."""
        heads, kv_heads, dim, page = 32, 8, 128, 64
        for stored in (*self.options.dtypes, "int8", "float8_e4m3fn"):
            for sequences, length in ((1, 16384), (8, 4096)):
                dtype = "bfloat16" if stored in ("int8", "float8_e4m3fn") else stored
                entries = length // page
                number = sequences * entries
                narrow = stored != dtype
                pool = self.rng.standard_normal((number, page, 2 * kv_heads, dim), np.float32)
                pages = jnp.asarray(np.round(pool * 40).clip(-127, 127) if narrow else pool, stored)
                query = jnp.asarray(self.rng.standard_normal((sequences, heads, dim), np.float32), dtype)
                table = jnp.asarray(self.rng.permutation(number).reshape(sequences, entries), jnp.int32)
                rest = jnp.full((sequences,), length, jnp.int32), table, jnp.arange(sequences + 1, dtype=jnp.int32)
                scales = {"k_scale": 0.025, "v_scale": 0.025} if narrow else {}

                def call(query: Any, pages: Any, *rest: Any, how: str, scales: Any = scales) -> Any:
                    return vishwamai.ragged_paged_attention(
                        query, pages, *rest, max_q_len=1, implementation=how, **scales
                    )

                contestants: dict[str, Any] = {
                    who: jitted(lambda *a, how=how, call=call: call(*a, how=how), query, pages, *rest)
                    for who, how in (("ours", "native_cpu"), ("xla", "xla"))
                }
                memory = np.ones(pages.nbytes // 4, np.float32)
                contestants["read"] = lambda memory=memory: memory.sum()
                unit = 0.025 if narrow else 1.0
                own = np.asarray(pages[table[0]], np.float64).reshape(length, kv_heads, 2, dim) * unit
                q = np.asarray(query[0], np.float64).reshape(kv_heads, heads // kv_heads, dim)
                logits = np.einsum("hgd,khd->hgk", q, own[:, :, 0]) / math.sqrt(dim)
                p = np.exp(logits - logits.max(-1, keepdims=True))
                truth = np.einsum("hgk,khd->hgd", p / p.sum(-1, keepdims=True), own[:, :, 1]).reshape(heads, dim)
                name = f"paged {stored} {sequences}x{length}"
                yield Case(name, pages.nbytes, "GB/s", contestants, truth, lambda y: y[0])


def verify(case: Case, precision: str | None = None) -> dict[str, float]:
    """The largest error of each contestant, relative to the truth's largest entry; contestants that are wrong are taken out."""
    if case.truth is None:
        return {}
    size = np.abs(case.truth).max()
    found = {
        name: float(np.abs(host(case.probe(call())) - case.truth).max() / size)
        for name, call in case.contestants.items()
        if name != "read"  # memory's speed, not a result
    }
    allowed = 4 * max(min(found.values()), 1e-7) + (2.0**-16 if precision == "high" else 1e-6)
    for name, error in found.items():
        if not error <= allowed:
            print(
                f"  {case.name}: {name} is wrong (error {error:.2g}, allowed {allowed:.2g}) and is not timed",
                file=sys.stderr,
            )
            del case.contestants[name]
    return found


def measure(case: Case, rounds: int, seconds: float, clock: Callable[[], float]) -> dict[str, np.ndarray]:
    """Time of a call of each contestant in every round, in seconds."""
    repeats = {}
    for name, call in case.contestants.items():
        call()
        start = clock()
        call()
        repeats[name] = max(1, int(seconds / max(clock() - start, 1e-6)))
    times: dict[str, list[float]] = {name: [] for name in case.contestants}
    order, rng = list(case.contestants), np.random.default_rng(1)
    for _ in range(rounds):
        rng.shuffle(order)  # in a fixed order one contestant would always pay for the same predecessor's caches
        for name in order:
            call = case.contestants[name]
            call()
            start = clock()
            for _ in range(repeats[name]):
                call()
            times[name].append((clock() - start) / repeats[name])
    return {name: np.array(values) for name, values in times.items()}


def compare(suites: Suites, options: argparse.Namespace, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Runs the suites and prints a line for each case; the ratios of best times, by suite, dtype and peer."""
    ratios: dict[str, list[float]] = {}
    for suite in options.suite.split(","):
        for case in getattr(suites, suite)():
            found = verify(case, options.precision)
            times = measure(case, options.rounds, options.seconds, clock)
            rates = {name: case.work / values.min() / 1e9 for name, values in times.items()}
            line = [f"{name} {rate:.4g}" for name, rate in rates.items()]
            for peer in times:
                if peer != "ours" and "ours" in times:
                    best, median = (
                        times[peer].min() / times["ours"].min(),
                        float(np.median(times[peer] / times["ours"])),
                    )
                    line.append(f"| x {peer} {best:.2f} ({median:.2f})")
                    ratios.setdefault(f"{suite} {case.name.split()[1] if suite != 'int8' else ''} / {peer}", []).append(
                        best
                    )
            print(f"{case.name:42} {case.unit}: {' '.join(line)}", flush=True)
            if options.json:
                with open(options.json, "a") as file:
                    file.write(
                        json.dumps({"case": case.name, "unit": case.unit, "rates": rates, "errors": found}) + "\n"
                    )
    return ratios


DEFAULT = "attention,attention_grad,decode,gemm,int8,norm,rows,rows_grad,paged"


def main(kind: type[Suites] = Suites, default: str = DEFAULT) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--suite", default=default, help="comma-separated suites")
    parser.add_argument("--dtypes", default=["float32", "bfloat16"], type=lambda text: text.split(","))
    parser.add_argument(
        "--lengths", default=[512, 1024, 2048], type=lambda text: [int(x) for x in text.split(",")], help="of attention"
    )
    parser.add_argument("--xla-length", default=1024, type=int, help="longest attention that XLA runs, which is slow")
    parser.add_argument("--precision", help='of our float32 products: "high" keeps 16 bits, for which the check allows')
    parser.add_argument("--rounds", default=7, type=int)
    parser.add_argument("--seconds", default=0.05, type=float, help="of each contestant in each round")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: the CPU time of this process; pin it to one core"
    )
    parser.add_argument("--threads", type=int, default=0, help="of torch; 0: as many as this process may use")
    parser.add_argument("--json", help="append one line per case to this file")
    options = parser.parse_args()
    options.threads = options.threads or len(os.sched_getaffinity(0))
    clock = time.perf_counter if options.clock == "wall" else time.process_time
    suites = kind(options)
    print(
        f"# isa {ffi.isa()}, jax {jax.__version__}, torch {suites.torch.__version__}, {options.threads} threads, clock {options.clock}"
    )
    with vishwamai.kernel_config(**({"precision": options.precision} if options.precision else {})):
        ratios = compare(suites, options, clock)
    print("# geometric means of the ratios of best times")
    for name, values in ratios.items():
        print(f"#   {name:40} {math.exp(np.mean(np.log(values))):.2f} (least {min(values):.2f}, of {len(values)})")


if __name__ == "__main__":
    main()
