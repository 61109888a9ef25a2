"""AdamW in one pass by the native kernel: its numbers are XLA's, and it writes parameters and moments in place."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from test_training import step_by_batch
from vishwamai.core import ffi
from vishwamai.training import step as training_step
from vishwamai.training.config import GroupSection, OptimizerSection, TrainConfig
from vishwamai.training.optimizers import optimizer, schedule
from vishwamai.training.sharding import ALL, Layout
from vishwamai.training.step import initial_state, updated

pytestmark = pytest.mark.skipif(ffi.why_not() is not None, reason="needs the native CPU kernels")

SHAPES = {
    "seven": (7,),
    "one": (1,),
    "odd": (4097,),
    "none": (0, 3),
    "scalar": (),
    "matrix": (7, 65),
    "wide": (3, 9000),
}
SECTION = OptimizerSection(warmup_steps=2, eps=1e-6)
GROUPS = (GroupSection("odd", weight_decay=0.5, learning_rate_scale=3.0), GroupSection("wide", learning_rate_scale=0.0))


def drawn(seed, shapes=SHAPES):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items())}


def taken(section, steps=4, params=None, rule: Any = None) -> tuple[Any, Any]:
    """Parameters and state after some steps that clip, the last of them one that is not good."""
    params = drawn(0) if params is None else params
    rule = optimizer(section, 10, params) if rule is None else rule
    state = rule.init(params)
    step = jax.jit(lambda g, p, s, good: updated(rule, g, {}, p, s, jnp.float32(0.3), good, Layout()))
    for seed in range(1, steps + 1):
        params, state = step(drawn(seed), params, state, True)
    bad = jax.tree.map(lambda g: g * jnp.nan, drawn(9))
    for before, after in zip(*map(jax.tree.leaves, ((params, state), step(bad, params, state, False)))):
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    return params, state


def close(found, expected, tolerance=3e-6):
    def one(a, b):
        dtype = a.dtype
        assert b.dtype == dtype
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        if dtype == jnp.bfloat16:  # a value between two of its numbers may go to either
            np.testing.assert_allclose(a, b, rtol=2**-7, atol=5e-4)  # of sums of about 0.1
            assert a.size < 1000 or np.mean(a == b) > 0.99
        else:
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance / 10)

    jax.tree.map(one, found, expected)


@pytest.mark.turns(3)
@pytest.mark.parametrize("moment_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("groups", [(), GROUPS], ids=["plain", "groups"])
def test_the_numbers_are_those_of_xla_and_of_optax(monkeypatch, moment_dtype, groups):
    section = OptimizerSection(warmup_steps=2, eps=1e-6, moment_dtype=moment_dtype, groups=groups)
    found = taken(section)
    if not groups and moment_dtype == "float32":
        rates, mask = schedule(section, 10), jax.tree.map(lambda p: p.ndim >= 2, drawn(0))
        own = optax.adamw(rates, 0.9, 0.95, 1e-6, weight_decay=0.1, mask=mask)
        params, state = taken(section, rule=own)
        close((found[0], found[1][0][1:]), (params, state[0][1:]))
    monkeypatch.setattr(training_step, "why_not", lambda *_: "the test compares with XLA's loops")
    close(found, taken(section), 3e-6 if moment_dtype == "float32" else 3e-5)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_moment_in_bfloat16_decays_by_b1_and_not_by_its_rounding(monkeypatch, kernel):
    """optax rounds b1 to the moment's dtype: 0.9 to 0.8984."""
    if not kernel:
        monkeypatch.setattr(training_step, "why_not", lambda *_: "the test compares with XLA's loops")
    params = {"w": jnp.ones(1 << 14)}
    rule: Any = optimizer(OptimizerSection(moment_dtype="bfloat16"), 10, params)
    state = rule.init(params)
    before = jax.random.uniform(jax.random.key(0), (1 << 14,), jnp.bfloat16, 1.0, 2.0)
    state = (state[0]._replace(mu={"w": before}), *state[1:])
    zeros = jax.tree.map(jnp.zeros_like, params)
    _, after = updated(rule, zeros, {}, params, state, jnp.float32(1.0), jnp.bool_(True), Layout())
    ratio = np.asarray(after[0].mu["w"], np.float64) / np.asarray(before, np.float64)
    assert abs(ratio.mean() - 0.9) < 2e-4


def test_other_dtypes_are_for_xla():
    params = {name: x.astype(jnp.bfloat16) for name, x in drawn(0).items()}
    rule: Any = optimizer(SECTION, 10, params)
    assert "bfloat16" in (training_step.why_not(params, params, rule.init(params)[0]) or "")
    text = jax.jit(lambda p, s: updated(rule, p, {}, p, s, None, True, Layout()))
    text = text.lower(params, rule.init(params)).as_text()
    assert "vishwamai_adam" not in text


def compiled_step(params, section) -> tuple[Any, Any]:
    """A training step whose gradients are its batch, compiled, and its first state."""
    config = TrainConfig(optimizer=section)
    update = optimizer(section, config.steps, params)
    state = initial_state(jax.tree.map(jnp.copy, params), update, average=section.ema_decay is not None)
    return jax.jit(step_by_batch(update, config), donate_argnums=0).lower(state, params).compile(), state


@pytest.mark.parametrize("ema_decay", [None, 0.99])
def test_seven_arrays_are_read_and_written(ema_decay):
    params = {"w": jnp.full((512, 256), 0.5), "v": jnp.ones((256, 128))}
    program, state = compiled_step(params, OptimizerSection(ema_decay=ema_decay))
    assert program.as_text().count('custom_call_target="vishwamai_adam"') == len(params)
    assert not re.search(r"f32\[\d+,\d+\]\S* copy\(", program.as_text())
    assert program.memory_analysis().temp_size_in_bytes < 4096
    moved = program.cost_analysis()["bytes accessed"] / sum(p.nbytes for p in params.values())
    # The loss reads both of its arrays, and the norm one. The average is read with the parameters, and written.
    assert moved < 1.01 * (3 + 7 + (3 if ema_decay else 0))
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), program(state, params)))


@pytest.mark.parametrize("axes", ["layout", "automatic", "explicit"])
def test_each_device_of_a_mesh_updates_its_part(axes):
    kind = jax.sharding.AxisType.Explicit if axes == "explicit" else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((1, 1, 2, 1, 1, 4), ALL, axis_types=(kind,) * 6)
    lies = Layout(mesh, {"w": -2, "rows": -1}, {"tensor": {"w": -1}})
    shapes = {"w": (64, 40), "rows": (5, 24), "whole": (33,)}
    params, gradients = drawn(0, shapes), drawn(1, shapes)
    places = lies.shardings(params)
    rule: Any = optimizer(SECTION, 10, params)

    def one(layout, gradients, params, state):
        return updated(rule, gradients, {}, params, state, jnp.float32(0.3), jnp.bool_(True), layout)

    expected = jax.jit(functools.partial(one, Layout()))(gradients, params, rule.init(params))
    with jax.set_mesh(mesh):
        laid = tuple(jax.device_put(x, places) for x in (gradients, params))
        moments, *rest = rule.init(params)
        state = (moments._replace(mu=jax.device_put(moments.mu, places), nu=jax.device_put(moments.nu, places)), *rest)
        step = functools.partial(one, lies if axes == "layout" else Layout())
        program: Any = jax.jit(step, donate_argnums=(1, 2)).lower(*laid, state).compile()
        found = program(*laid, state)
    assert program.as_text().count('custom_call_target="vishwamai_adam"') == len(shapes)
    assert "all-gather" not in program.as_text() and "f32[64,40]" not in program.as_text()
    close(found, expected)
    assert all(x.sharding.is_equivalent_to(places[name], x.ndim) for name, x in found[0].items())
