"""The performance system: memory by class, batches, measurements, and the names under one roof."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.core import Tracer

import vishwamai
from vishwamai import aot, performance
from vishwamai.core.errors import ConfigError, DeviceError, ShapeError
from vishwamai.measure.live import live_bytes
from vishwamai.models import ModelConfig
from vishwamai.planning.memory.allocation import llama_like
from vishwamai.planning.memory.analytic import CLASSES, serving_memory, training_memory
from vishwamai.planning.search import batch
from vishwamai.planning.serving import Serving
from vishwamai.training.config_file import from_dict

needs_libtpu = pytest.mark.skipif(not aot.has_libtpu(), reason="libtpu is not installed")
SMALL = {"num_hidden_layers": 2, "vocab_size": 512}
MODEL = SMALL | {"hidden_size": 128}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("VISHWAMAI_AOT_CACHE", str(tmp_path))


def test_every_name_is_there():
    for name in performance.__all__:
        assert getattr(performance, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = performance.nothing


@pytest.mark.long
def test_the_packages_of_training_are_loaded_when_they_are_needed():
    code = """
import sys
import vishwamai.performance as performance
loaded = {"flax", "optax", "orbax", "grain"} & set(sys.modules)
assert not loaded, loaded
sys.modules["flax"] = None
try:
    _ = performance.MemoryPlanner
except performance.DeviceError as error:
    assert "pip install '.[train]'" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.turns(3)
def test_an_allocation_is_that_of_the_step_that_it_describes():
    planner = performance.MemoryPlanner(SMALL, "v5e:2x2", step={"remat": "full", "microbatches": 2})
    found = planner.allocate(16, 64, 128)
    assert tuple(found) == (*CLASSES, "total", "free")
    config = from_dict(
        {
            "model": {"config": llama_like(128, 64) | SMALL, "compute_dtype": "bfloat16"},
            "data": {"sequence_length": 64},
            "batch_size": 16,
            "microbatches": 2,
            "mesh": {"fsdp": 4},
            "remat": "full",
        }
    )
    expected = training_memory(config, "v5e:2x2")
    assert found.subject == config
    assert {name: found[name] for name in CLASSES} == {n: round(p.value) for n, p in expected.parts.items()}
    assert found["total"] == sum(found[name] for name in CLASSES) and found["total"] + found["free"] == found.limit


@pytest.mark.long
def test_an_allocation_grows_with_every_size():
    planner = performance.MemoryPlanner(SMALL)
    small = planner.allocate(2, 64, 128)
    for more in (planner.allocate(4, 64, 128), planner.allocate(2, 128, 128), planner.allocate(2, 64, 256)):
        assert more["total"] > small["total"] and more["free"] < small["free"]


def test_an_allocation_of_serving():
    planner = performance.MemoryPlanner(SMALL, "v6e", "serving", step={"kv_dtype": "int8"})
    found = planner.allocate(4, 64, 128)
    config = ModelConfig.from_dict(llama_like(128, 64) | SMALL)
    expected = serving_memory(Serving(config, 4, 64, kv_dtype="int8"), "v6e")
    assert {name: found[name] for name in CLASSES} == {n: round(p.value) for n, p in expected.parts.items()}
    assert found["kv"] > 0 and found["optimizer"] == 0 and found.fits
    assert not performance.MemoryPlanner(SMALL, "v5e", "serving").allocate(10_000_000, 64, 128).fits


@needs_libtpu
@pytest.mark.long
def test_an_allocation_is_verified_by_the_compiler():
    found = performance.MemoryPlanner(SMALL | {"tie_word_embeddings": True}).allocate(4, 64, 128)
    verified = found.verify()
    assert verified.total.level == "verified" and verified.parts["arguments"].value > 0
    # Parameters and optimizer are the step's arguments, next to a small batch.
    arguments = found["parameters"] + found["optimizer"]
    assert arguments <= verified.parts["arguments"].value <= 1.1 * arguments


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: performance.MemoryPlanner(purpose="guessing"), ShapeError, "pass 'training' or 'serving'"),
        (lambda: performance.MemoryPlanner().allocate(0, 64, 128), ShapeError, "`batch_size` is 0"),
        (
            lambda: performance.MemoryPlanner({"hidden_size": 64}).allocate(1, 64, 128),
            ShapeError,
            "the planner's model has hidden_size=64",
        ),
        (lambda: performance.MemoryPlanner(SMALL).allocate(1, 2**31, 128), ConfigError, r"less than 2\*\*31"),
        (lambda: performance.MemoryPlanner(SMALL, step={"remta": "full"}).allocate(1, 64, 128), ConfigError, "remat"),
        (
            lambda: performance.MemoryPlanner(SMALL, purpose="serving", step={"kv": 1}).allocate(1, 64, 128),
            ConfigError,
            "serving has no key kv",
        ),
        (
            lambda: performance.MemoryPlanner(SMALL, purpose="serving", step={"dtype": "f7"}).allocate(1, 64, 128),
            ConfigError,
            "dtype is 'f7'",
        ),
        (lambda: performance.MemoryPlanner(SMALL, "v5e:2x2").allocate(3, 64, 128), ConfigError, "batch_size=3"),
        (lambda: performance.apply_gradient_checkpointing(jnp.sin), ShapeError, "pass a module of Flax, NNX or linen"),
    ],
)
def test_what_cannot_be_planned(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.turns(3)
def test_the_forward_pass_gives_the_logsumexp():
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 2, 40, 16))
    out, lse = performance.flash_attention_forward(q, k, v, 16, causal=True, return_lse=True)
    logits = jnp.where(jnp.tri(40, dtype=bool), jnp.einsum("bhid,bhjd->bhij", q, k) / 4, -jnp.inf)
    assert jnp.allclose(lse, jax.nn.logsumexp(logits, -1), atol=1e-5)
    assert jnp.allclose(out, vishwamai.flash_attention(q, k, v, causal=True, block_size=16), atol=1e-6)


@given(
    st.floats(0, 1e6), st.floats(0.01, 1e4), st.sampled_from((0.5, 1.0, 1.5)), st.floats(1, 1e7), st.integers(0, 1000)
)
def test_the_largest_count_that_fits(fixed, slope, power, budget, guess):
    asked = []

    def memory(count):
        asked.append(count)
        return fixed + slope * count**power

    found = batch.largest(memory, budget, guess)
    assert memory(found + 1) > budget and (not found or memory(found) <= budget)
    assert len(asked) < 150 and (power != 1.0 or len(asked) < 16)


@pytest.mark.long
def test_a_batch_is_the_largest_that_fits_the_budget():
    options: dict[str, Any] = dict(sequence_length=64, target="v5e:2x2", step={"microbatches": 2}, level="analytic")
    found = performance.optimize_batch_size(MODEL, 24 * MIB, **options)
    assert found > 8 and found % 8 == 0
    planner = performance.MemoryPlanner(SMALL, "v5e:2x2", step={"microbatches": 2})
    assert planner.allocate(found, 64, 128)["total"] <= 24 * MIB < planner.allocate(found + 8, 64, 128)["total"]


@pytest.mark.long
def test_a_batch_that_cannot_be_says_which_bound_holds():
    options: dict[str, Any] = dict(sequence_length=64, level="analytic")
    with pytest.raises(DeviceError, match="memory is the bound: a batch of 1 takes .* the nearest that fits is a"):
        performance.optimize_batch_size(MODEL, MIB, **options)
    with pytest.raises(DeviceError, match=r"with step=.'remat': 'full'. it takes .* which fits"):
        longer: dict[str, Any] = {**options, "sequence_length": 4096}
        least = performance.MemoryPlanner(SMALL, step={"remat": "full"}).allocate(1, 4096, 128)["total"]
        performance.optimize_batch_size(MODEL, least + MIB, **longer)
    with pytest.raises(
        DeviceError, match="is the bound: the largest batch that fits.* take a target with at least"
    ) as e:
        performance.optimize_batch_size(MODEL, 32 * MIB, 1e12, **options)
    most = float(str(e.value).partition("at most ")[2].partition(" ")[0].replace(",", ""))
    assert performance.optimize_batch_size(MODEL, 32 * MIB, most * 0.99, **options) > 1
    with pytest.raises(ShapeError, match="hidden_size=None"):
        performance.optimize_batch_size({}, MIB)
    with pytest.raises(ShapeError, match="`level` is 'guessed'"):
        performance.optimize_batch_size(MODEL, MIB, level="guessed")


def test_a_batch_that_takes_more_than_its_probe_is_lowered_by_what_was_found():
    tried = []

    def compiled(count):
        tried.append(count)
        return 130.0 * count

    assert batch._verified(compiled, lambda count: 100.0 * count, 5000.0, 50) == 38 and tried == [50, 38]
    assert batch._verified(lambda count: 9000.0, lambda count: 100.0 * count, 5000.0, 1) == 0
    with pytest.raises(DeviceError, match=r"4 compiled programs took more than the budget .* smaller `memory_budget`"):
        batch._verified(lambda count: 5001.0, lambda count: 100.0 * count, 5000.0, 50)


@needs_libtpu
@pytest.mark.soak
def test_a_batch_is_probed_and_verified():
    step = {"remat": "full"}
    options: dict[str, Any] = dict(sequence_length=256, step=step)
    budget = 48 * MIB
    found = performance.optimize_batch_size(MODEL, budget, **options)
    planner = performance.MemoryPlanner(SMALL, step=step)
    assert planner.allocate(found, 256, 128).verify().total.value <= budget
    assert planner.allocate(2 * found + 8, 256, 128).verify().total.value > budget


def test_what_a_step_takes_and_keeps():
    kept = []

    def step(w, x):
        y = jnp.tanh(x @ w)
        if not isinstance(y, Tracer):
            kept.append(y)
        return w - (x.T @ y), y.sum()

    inputs = jnp.ones((64, 64)), jnp.ones((256, 64))
    found = performance.track_memory_usage(step, inputs, steps=3)
    assert found.leaked == performance.Measurement(256 * 64 * 4, "cpu")
    assert found.donated == {} and found.donatable == {"[0]": 64 * 64 * 4}
    assert found.parts["arguments"].value == 4 * (64 * 64 + 256 * 64)
    clean = performance.track_memory_usage(jax.jit(lambda w, x: w - x.sum(), donate_argnums=0), inputs, steps=3)
    assert clean.leaked.value == 0 and clean.donated == {"[0]": 64 * 64 * 4} and clean.donatable == {}
    assert clean.parts["aliased"].value == 64 * 64 * 4 and "left behind" in str(clean)

    by_name = performance.track_memory_usage(step, {"x": inputs[1], "w": inputs[0]}, steps=1)
    assert by_name.donatable == {"['w']": 64 * 64 * 4}
    one_dict = performance.track_memory_usage(lambda batch: batch["x"] @ batch["w"], {"x": inputs[1], "w": inputs[0]})
    assert one_dict.parts["outputs"].value == 256 * 64 * 4

    def cyclic(w, x):
        loop: list[Any] = [x + 1]
        loop.append(loop)
        return w * 2

    assert performance.track_memory_usage(cyclic, inputs, steps=3).leaked.value == 0  # the collector frees it
    with pytest.raises(ShapeError, match="does not take these inputs"):
        performance.track_memory_usage(step, (jnp.ones(3),))
    with pytest.raises(ShapeError, match=r"`inputs`\[0\] is of type object"):
        performance.track_memory_usage(step, (object(),))


@pytest.mark.long
def test_what_is_alive_agrees_with_the_plan():
    """The greatest sum of live results is near the compiler's total, loops and donated arguments included."""

    def loss(w, x):
        return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2)

    def step(w, x):
        return w - jax.grad(loss)(w, x), x

    inputs = jnp.ones((6, 64, 64)), jnp.ones((256, 64))
    for jitted in (jax.jit(step), jax.jit(step, donate_argnums=0)):
        found = performance.track_memory_usage(jitted, inputs, steps=1)
        assert abs(found.largest(1)[0].live / found.peak.value - 1) < 0.15
    assert any("scan" in one.source or "while" in one.source for one in found.live)


def test_live_bytes_by_hand():
    text = """HloModule f, is_scheduled=true, input_output_alias={ {1}: (1, {}, may-alias) }

%body (p: (f32[8])) -> (f32[8]) {
  %p = (f32[8]{0}) parameter(0)
  %e = f32[8]{0} get-tuple-element(%p), index=0
  %big = f32[1024]{0} broadcast(%e), dimensions={0}
  %s = f32[8]{0} slice(%big), slice={[0:8]}
  ROOT %t = (f32[8]{0}) tuple(%s)
}

ENTRY %main (x: f32[8], y: bf16[16]) -> (f32[8], bf16[16]) {
  %x = f32[8]{0} parameter(0)
  %y = bf16[16]{0} parameter(1)
  %c = f32[8]{0} copy(%x)
  %t = (f32[8]{0}) tuple(%c)
  %w = (f32[8]{0}) while(%t), condition=%cond, body=%body
  %o = f32[8]{0} get-tuple-element(%w), index=0
  %z = bf16[16]{0} negate(%y), metadata={op_name="jit(f)/neg"}
  ROOT %r = (f32[8]{0}, bf16[16]{0}) tuple(%o, %z)
}
"""
    found = {one.name: (one.live, one.source) for one in live_bytes(text)}
    assert found == {"c": (96, ""), "w": (96 + 4096, ""), "z": (96, "jit(f)/neg")}
