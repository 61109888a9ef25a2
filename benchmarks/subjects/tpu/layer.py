"""A layer of a decoder on TPUs you do not have, compared with its peers: the compiler's own schedule of each program,
followed by the same simulator.

The layer is Llama 3 8B's: norm, projections, rotation, causal attention, norm, SwiGLU, bfloat16, one row of tokens.
"vishwamai" makes every step of it by an operation of the library. "splash + XLA" has jax's splash attention, at the
block sizes that are fastest alone, and "XLA" `jax.nn.dot_product_attention`; all else of both is plain jax.numpy.
"backward" is the program of forward and backward together, with the result, the gradient of the input and those of all
weights.

Every time is an estimate (docs/aot.md says how far to trust it; differences below 4 % are not worth reading). Below
each line stand the programs that XLA adds around our kernels, with their time and share: first those that only move
data. "compile" are the seconds of tracing and compiling, of all threads together.

    python benchmarks/tpu.py layer --targets v4,v5e,v5p,v6e,tpu7x --directions forward,backward --tokens 2048
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from subjects.tpu import attention as peers

import vishwamai
from vishwamai.aot import Inspection, KernelSchedule, compile_for, inspect_many
from vishwamai.bench import estimates
from vishwamai.core.errors import VishwamaiError

THETA, EPS = 500_000.0, 1e-5
Weights = Mapping[str, Any]
Attend = Callable[[Any, Any, Any], Any]
"""Of query, key and value, `[batch, seq, heads, head_dim]`."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """The dims of Llama 3 8B."""

    tokens: int = 2048
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    inner: int = 14336
    dtype: Any = jnp.bfloat16

    def x(self) -> jax.ShapeDtypeStruct:
        """The input, and the output."""
        return jax.ShapeDtypeStruct((1, self.tokens, self.hidden), self.dtype)

    def weights(self) -> dict[str, jax.ShapeDtypeStruct]:
        """By name; those of products are `[in, out]`."""
        query, key = self.heads * self.dim, self.kv_heads * self.dim
        shapes = {
            "attention_norm": (self.hidden,),
            "query": (self.hidden, query),
            "key": (self.hidden, key),
            "value": (self.hidden, key),
            "output": (query, self.hidden),
            "mlp_norm": (self.hidden,),
            "gate": (self.hidden, self.inner),
            "up": (self.hidden, self.inner),
            "down": (self.inner, self.hidden),
        }
        return {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}

    def heads_of(self, x: Any) -> Any:
        """`[batch, seq, heads, head_dim]`."""
        return x.reshape(*x.shape[:-1], -1, self.dim)

    @property
    def attention(self) -> peers.Shape:
        """Its attention, alone."""
        return peers.Shape(True, self.dim, self.kv_heads, self.heads, batch=1, length=self.tokens)

    @property
    def flops(self) -> float:
        """Of the forward pass."""
        products = sum(w.size for w in self.weights().values() if w.ndim == 2)
        return 2.0 * self.tokens * products + self.attention.flops


def ours(layer: Layer) -> Callable[..., Any]:
    """Every step by an operation of the library."""

    def call(x: Any, weights: Weights) -> Any:
        normed = vishwamai.rms_norm(x, weights["attention_norm"], eps=EPS)
        query, key, value = (layer.heads_of(vishwamai.gemm(normed, weights[n])) for n in ("query", "key", "value"))
        query, key = vishwamai.apply_rope((query, key), theta=THETA, layout="bshd")
        mixed = vishwamai.flash_attention(query, key, value, causal=True, layout="bshd")
        mixed = vishwamai.gemm(mixed.reshape(*x.shape[:-1], -1), weights["output"])
        normed, x = vishwamai.rms_norm(mixed, weights["mlp_norm"], eps=EPS, residual=x)
        inner = vishwamai.gated_linear_unit(normed, (weights["gate"], weights["up"]))
        return x + vishwamai.gemm(inner, weights["down"])

    return call


def plain(layer: Layer, attend: Attend) -> Callable[..., Any]:
    """jax.numpy around an attention."""

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + EPS)
        return (wide * inverse).astype(x.dtype) * scale

    def rotate(x: Any) -> Any:
        half = layer.dim // 2
        angles = jnp.arange(x.shape[1])[:, None, None] * THETA ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

    def call(x: Any, weights: Weights) -> Any:
        normed = norm(x, weights["attention_norm"])
        query, key, value = (layer.heads_of(normed @ weights[n]) for n in ("query", "key", "value"))
        mixed = attend(rotate(query), rotate(key), value)
        x = x + mixed.reshape(*x.shape[:-1], -1) @ weights["output"]
        normed = norm(x, weights["mlp_norm"])
        return x + (jax.nn.silu(normed @ weights["gate"]) * (normed @ weights["up"])) @ weights["down"]

    return call


def xla(layer: Layer) -> Callable[..., Any]:
    """Nothing but XLA."""
    return plain(layer, lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))


def splash(layer: Layer, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A splash attention of `attention.py`, which has heads first."""
    return plain(layer, lambda *x: kernel(*(a.swapaxes(1, 2) for a in x)).swapaxes(1, 2))


def fastest_splash(shape: peers.Shape, target: str, direction: str) -> estimates.Call:
    """The block sizes of jax's splash attention that take the least time alone."""
    calls, arrays, flops = list(peers.jax_splash(shape)), shape.arrays(), shape.flops
    if direction == "backward":
        calls = [(name, estimates.with_gradient(call, outputs=True)) for name, call in calls]
        arrays, flops = [*arrays, arrays[0]], 3.5 * flops
    best = estimates.best_peer(estimates.inspected(calls, arrays, target, flops))
    if best is None:
        raise SystemExit(f"no block sizes of splash attention compile for {target}")
    return next((name, call) for name, call in peers.jax_splash(shape) if name == best[0])


def candidates(layer: Layer, target: str, direction: str) -> dict[str, Callable[..., Any]]:
    """The layers by name."""
    name, kernel = fastest_splash(layer.attention, target, direction)
    calls = {
        estimates.OURS: ours(layer),
        f"{name.removeprefix('jax ')} + XLA": splash(layer, kernel),
        "XLA": xla(layer),
    }
    if direction == "backward":
        return {name: estimates.with_gradient(call, outputs=True) for name, call in calls.items()}
    return calls


def arrays(layer: Layer, direction: str) -> list[Any]:
    """What a program takes."""
    return [layer.x(), layer.weights(), *([layer.x()] if direction == "backward" else [])]


def compile_seconds(call: Callable[..., Any], args: list[Any], target: str) -> float:
    """CPU seconds of tracing and compiling, of all threads; less noisy than the clock where others use the machine."""
    before = time.process_time()
    compile_for(call, *args, target=target)
    return time.process_time() - before


def main() -> None:
    parser = estimates.parser(__doc__, targets=("v5e", "v6e", "v5p", "tpu7x", "v4"), directions=("forward", "backward"))
    parser.add_argument("--tokens", type=int, default=Layer.tokens)
    parser.add_argument("--no-compile", action="store_true", help="leave out the seconds of the compiler")
    options = parser.parse_args()
    layer = Layer(tokens=options.tokens)
    table = estimates.PeerTable(f"{'target':<7}{'direction':<10}")
    for target in options.targets:
        for direction in options.directions:
            calls, args = candidates(layer, target, direction), arrays(layer, direction)
            flops = layer.flops * (3 if direction == "backward" else 1)
            programs = [Inspection(call, args, target=target, flops=flops, name=n) for n, call in calls.items()]
            schedules = dict(zip(calls, inspect_many(programs, timeout=3600)))
            table.line(f"{target:<7}{direction:<10}", direction, estimates.seconds_of(schedules))
            for name, schedule in schedules.items():
                _print(name, schedule)
            if not options.no_compile:
                compile_for(jnp.sin, layer.x(), target=target)  # loads libtpu
                took = {name: compile_seconds(call, args, target) for name, call in calls.items()}
                print("  compile: " + ", ".join(f"{name} {s:.1f} s" for name, s in took.items()), flush=True)
    table.means()


def _print(name: str, schedule: KernelSchedule | VishwamaiError) -> None:
    if isinstance(schedule, VishwamaiError):
        print(f"  {name}: {str(schedule).splitlines()[0]}", flush=True)
        return
    share = schedule.roofline.seconds / schedule.seconds
    print(f"  {name}: {schedule.seconds * 1e3:.3f} ms, {share:.0%} of the roofline", flush=True)
    if name == estimates.OURS:
        print(*(f"    {line}" for line in estimates.around(schedule)), sep="\n", flush=True)
