"""benchmarks/tpu.py layer: its layers compute the same, its words about a schedule, and how long ours compiles."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmark_files import loaded
from vishwamai import aot
from vishwamai.bench import estimates


@pytest.fixture(scope="module")
def script():
    with loaded("subjects/tpu/layer") as module:
        yield module


@pytest.mark.turns(5)
def test_the_layers_compute_the_same(script):
    """Forward and with gradients; attention by its formula in place of splash's kernel, which is for TPUs."""
    layer = script.Layer(tokens=24, hidden=64, heads=4, kv_heads=2, dim=16, inner=96, dtype=jnp.float32)
    random = np.random.default_rng(0)
    x, weights, cotangent = jax.tree.map(
        lambda a: jnp.asarray(random.normal(size=a.shape) / (len(a) ** 0.5 if a.ndim == 2 else 1.0), a.dtype),
        (layer.x(), layer.weights(), layer.x()),
    )

    def formula(query, key, value):
        key, value = (jnp.repeat(a, layer.heads // layer.kv_heads, axis=1) for a in (key, value))
        scores = jnp.einsum("bhqd,bhkd->bhqk", query, key) * layer.dim**-0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)) @ value

    calls = script.ours(layer), script.splash(layer, formula), script.xla(layer)
    mine, *others = (estimates.with_gradient(call, outputs=True)(x, weights, cotangent) for call in calls)
    for other in others:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), mine, other)


def test_the_layer_is_llama_3_8b(script):
    layer = script.Layer()
    assert sum(w.size for w in layer.weights().values()) == 218_112_000  # a thirty-second of the model less its vocab
    assert layer.flops == pytest.approx(2 * 2048 * 218_103_808 + 4 * 32 * 128 * 2048 * 2049 / 2)
    assert [a.shape for a in jax.tree.leaves(script.arrays(layer, "backward"))[:1]] == [(1, 2048, 4096)]


def test_what_stands_around_kernels_is_named():
    def program(name, cycles, calls=1, dma_wait=0.0):
        return SimpleNamespace(name=name, cycles=cycles, calls=calls, dma_wait=dma_wait)

    programs = program("kernel.1", 6e6), program("copy.2", 1e6, 2), program("fusion", 2e6), program("TLP", 1e6, 1, 5e5)
    simulation = SimpleNamespace(chip=SimpleNamespace(clock=1e9), programs=programs)
    schedule: Any = SimpleNamespace(simulation=simulation, seconds=0.01, pallas={"kernel.1"})
    assert estimates.around(schedule) == [
        "moved: 1000 us, 10.0%; the top level waits 500 us for copies",
        "  copy.2 1000 us (2 calls)",
        "other: fusion 2000 us (1 calls), 20.0%",
        "other: TLP 1000 us (1 calls), 10.0%",
    ]


@pytest.mark.long
@pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
def test_gradients_compile_about_as_fast_as_without_kernels(script):
    """The goal is twice XLA's CPU seconds on v6e; a shared machine may add half."""
    layer = script.Layer()
    args = script.arrays(layer, "backward")
    aot.compile_for(jnp.sin, layer.x(), target="v6e")  # loads libtpu
    mine, alone = (
        script.compile_seconds(estimates.with_gradient(call, outputs=True), args, "v6e")
        for call in (script.ours(layer), script.xla(layer))
    )
    print(f"ours {mine:.1f} s, XLA alone {alone:.1f} s: {mine / alone:.2f} times")
    assert mine < 2.5 * alone, f"ours compiles in {mine:.1f} s, XLA alone in {alone:.1f} s: {mine / alone:.2f} times"
