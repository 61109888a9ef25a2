"""Programs over eight devices of this host, compared with XLA's own sharding of the same math.

Ours are the functions of `vishwamai.parallel` inside `shard_map`; the peer is plain `jax.numpy` on the whole arrays,
jitted with the same shardings in and out, which XLA partitions by itself. Results are compared first; then both are
timed in turns. The devices share one machine's cores and memory, so nothing is learnt here about links: a ratio says
what a program computes and copies, above 1 where ours is faster. The last line is the geometric mean of the ratios.

    python benchmarks/cpu.py sharding
    python benchmarks/cpu.py sharding --cases decode,layer --rounds 20
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

DEVICES = 8
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from vishwamai.measure import timing  # noqa: E402
from vishwamai.parallel import (  # noqa: E402
    all_gather_gated_linear_unit,
    all_to_all_grouped_gemm,
    decode_attention,
    from_zigzag,
    gemm_reduce_scatter,
    grouped_gemm_all_to_all,
    ring_attention,
    to_zigzag,
    ulysses_attention,
)

FIRST, ROWS, COLUMNS, SEQUENCE = P("x"), P("x", None), P(None, "x"), P(None, None, "x")


class Subject(NamedTuple):
    """One program, ours and plain.

    Attributes:
      ours: function of a device's parts, inside `shard_map`. plain: function of the global arrays.
      shapes, specs, out: shapes and specs of the arguments, and the spec of the result.
      placed: puts an argument in the order in which ours takes it; back: the result in the order of plain.
    """

    ours: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    specs: tuple[P, ...]
    out: P
    placed: Callable[[Any], Any] = lambda x: x
    back: Callable[[Any], Any] = lambda x: x


def attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """As `jax.nn` computes it."""
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal).swapaxes(1, 2)


def layer(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """A gated layer of tensor parallelism whose rows are split outside of it."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def our_layer(x: Any, gate: Any, up: Any, down: Any, overlap: bool | None) -> Any:
    h = all_gather_gated_linear_unit(x, (gate, up), axis="x", overlap=overlap)
    return gemm_reduce_scatter(h, down, axis="x", overlap=overlap)


def experts(x: Any, up: Any, down: Any) -> Any:
    """One expert on each device, and a full buffer for each pair of devices: `[from, to, room, features]`."""
    h = jax.nn.silu(jnp.einsum("ijrk,jkn->ijrn", x, up))
    return jnp.einsum("ijrn,jnk->ijrk", h, down)


def our_experts(x: Any, up: Any, down: Any, overlap: bool | None) -> Any:
    sizes = jnp.full((DEVICES, 1), x.shape[2], jnp.int32)
    h, arriving = all_to_all_grouped_gemm(x[0], up, sizes, axis="x", overlap=overlap)
    return grouped_gemm_all_to_all(jax.nn.silu(h), down, arriving, axis="x", overlap=overlap)[None]


def subjects(length: int, keys: int, rows: int) -> dict[str, Subject]:
    """By name."""

    def attend(function: Any, causal: bool = True, **options: Any) -> Subject:
        ours = functools.partial(function, axis="x", causal=causal, **options)
        shapes = ((1, 8, length, 64), *[(1, 2, length, 64)] * 2)
        return Subject(ours, functools.partial(attention, causal=causal), shapes, (SEQUENCE,) * 3, SEQUENCE)

    def layered(overlap: bool | None) -> Subject:
        shapes = ((rows, 512), (512, 2048), (512, 2048), (2048, 512))
        ours = functools.partial(our_layer, overlap=overlap)
        return Subject(ours, layer, shapes, (ROWS, COLUMNS, COLUMNS, ROWS), ROWS)

    def exchanged(overlap: bool | None) -> Subject:
        shapes = ((DEVICES, DEVICES, rows // DEVICES, 256), (DEVICES, 256, 1024), (DEVICES, 1024, 256))
        return Subject(functools.partial(our_experts, overlap=overlap), experts, shapes, (FIRST,) * 3, FIRST)

    decode = Subject(
        functools.partial(decode_attention, axis="x"),
        functools.partial(attention, causal=False),
        ((4, 8, 1, 64), *[(4, 2, keys, 64)] * 2),
        (P(), SEQUENCE, SEQUENCE),
        P(),
    )
    zigzag = attend(ring_attention, placement="zigzag")._replace(
        placed=lambda x: to_zigzag(x, DEVICES), back=lambda x: from_zigzag(x, DEVICES)
    )
    return {
        "ring": attend(ring_attention, causal=False),
        "causal ring": attend(ring_attention),
        "zigzag ring": zigzag,
        "ulysses": attend(ulysses_attention),
        "decode": decode,
        "layer": layered(None),
        "layer as a ring": layered(True),
        "experts": exchanged(None),
        "experts in pieces": exchanged(True),
    }


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    """The result, and the gradients of every argument."""

    def run(*arrays: Any) -> Any:
        y, pull = jax.vjp(function, *arrays)
        return y, pull(jnp.cos(y))

    return run


def compare(subject: Subject, gradients: bool, rounds: int, seconds: float) -> tuple[timing.Timing, timing.Timing]:
    """(ours, plain): timings of programs whose results agree."""
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(subject.ours, mesh=mesh, in_specs=subject.specs, out_specs=subject.out)
    shardings = [NamedSharding(mesh, spec) for spec in (*subject.specs, subject.out)]
    of_results = (shardings[-1], tuple(shardings[:-1])) if gradients else shardings[-1]
    random = np.random.default_rng(0)
    # The scale of weights keeps results near one.
    arrays = [
        jnp.asarray(random.standard_normal(s, np.float32) / math.sqrt(math.prod(s[-2:-1]) if len(s) < 4 else 1))
        for s in subject.shapes
    ]
    calls, results = {}, {}
    for name, function, place in (("ours", mapped, subject.placed), ("plain", subject.plain, lambda x: x)):
        run = jax.jit(with_gradients(function) if gradients else function, out_shardings=of_results)
        placed = [jax.device_put(place(x), sharding) for x, sharding in zip(arrays, shardings)]
        back = subject.back if name == "ours" else lambda x: x
        results[name] = jax.tree.map(back, run(*placed))
        calls[name] = functools.partial(_finished, run, placed)
    for ours, plain in zip(*(jax.tree.leaves(results[name]) for name in ("ours", "plain")), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=2e-3, atol=2e-3 * max(1.0, float(np.abs(plain).max())))
    timings = timing.side_by_side(calls, budget=seconds, rounds=rounds)
    return timings["ours"], timings["plain"]


def _finished(run: Callable[..., Any], arrays: list[Any]) -> None:
    jax.block_until_ready(run(*arrays))


def lines(options: argparse.Namespace) -> Iterator[float]:
    """Prints a line for each program, and yields its ratio."""
    for name, subject in subjects(options.length, options.keys, options.rows).items():
        if options.cases and name not in options.cases.split(","):
            continue
        for gradients in (False, True):
            ours, plain = compare(subject, gradients, options.rounds, options.seconds)
            ratio = ours.ratio(plain)
            label = f"{name}{' + grad' if gradients else ''}"
            times = f"{1e3 * ours.median:9.2f} ms  XLA {1e3 * plain.median:9.2f} ms"
            print(f"{label:24} {times}  ratio {ratio:5.2f}", flush=True)
            if name not in ("layer as a ring", "experts in pieces"):  # what the library itself does not choose here
                yield ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="names, separated by commas; default all")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=20.0, help="for one program and its peer")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the split sequence")
    parser.add_argument("--keys", type=int, default=32768, help="keys of decoding")
    parser.add_argument("--rows", type=int, default=1024, help="rows of the layer, and of a device's experts")
    ratios = list(lines(parser.parse_args()))
    if ratios:
        print(f"geometric mean {math.exp(sum(map(math.log, ratios)) / len(ratios)):.2f}")
